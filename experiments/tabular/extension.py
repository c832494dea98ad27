"""Rows of a table under defenses, one of which needs an evaluation network for the columns.

robust rows: what refiner makes of rows that no client holds: how far the gradients are, and what the network sees.

The network is what scripts/train_refiner_network.py makes, with its fixed seed, when a case first needs it.
"""

from collections.abc import Callable
from pathlib import Path

import torch

import gradveil
from gradveil.core.randomness import derived_generator, source_of
from gradveil.core.registry import parse_spec
from gradveil.defenses.refiner import Refiner
from gradveil.task import Gradients
from kinds import Row, Session, attack, build, dataset_of, public_of, training
from made_files import kept_files, made, script

Kind = Callable[[Row, Session], Row]


def with_network(kind: Kind) -> Kind:
    """The same measurement, in which refiner gets its network."""

    def measure(case: Row, session: Session) -> Row:
        if parse_spec(case["defense"])[0] != "refiner":
            return kind(case, session)

        def make(out: Path) -> None:
            making, split = script("train_refiner_network"), dataset_of(case).train
            making["write"](making["train"](split.modality, split.inputs), out, {"data": case["dataset"]})

        with kept_files(session) as kept:
            path = made(Path(f"{case['dataset']}-rows.safetensors"), make)
            row = kind({**case, "defense": f"{case['defense']},network={path}"}, kept)
        return {**row, "network_made_by": "scripts/train_refiner_network.py, seed 0"}

    return measure


def norm(gradients: Gradients) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())


def robust_rows(case: Row, _session: Session) -> Row:
    """For batches of public rows: |g|, how far the gradients of the blend and of x* are from g, and D of all three."""
    task, defense = build(case), gradveil.defense(case["defense"])
    assert isinstance(defense, Refiner)
    network = defense.evaluation(task)
    inputs, labels = public_of(case, task)
    size, batches = case["batch_size"], []
    for number in range(case["victims"]):
        rows, classes = (values[number * size : (number + 1) * size] for values in (inputs, labels))
        generators = [derived_generator(case["seed"], "robust rows", size, number) for _ in range(2)]
        blend = torch.lerp(rows, task.modality.noise(rows, source_of(generators[0])), defense.blend)
        memory: dict[str, torch.Tensor] = {}
        defense.share(task, rows, classes, generator=generators[1], memory=memory)
        own = task.gradients(rows, classes)
        measured = {"norm": norm(own), "own_noise_share": float(network(rows).mean())}
        for name, used in (("blend", blend), ("robust", memory["trained_on"])):
            gradients = task.gradients(used, classes)
            measured[f"{name}_distance"] = norm({key: gradients[key] - value for key, value in own.items()})
            measured[f"{name}_noise_share"] = float(network(used).mean())
        batches.append(measured)
    return {key: [measured[key] for measured in batches] for key in batches[0]}


KINDS = {
    name: with_network(kind)
    for name, kind in (("attack", attack), ("training", training), ("robust rows", robust_rows))
}
