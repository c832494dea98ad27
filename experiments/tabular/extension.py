"""Rows of a table under defenses, one of which needs an evaluation network for the columns.

robust rows: what refiner makes of rows that no client holds: how far the gradients are, and what the network sees.
"""

import torch

import gradveil
from gradveil.core.randomness import derived_generator, source_of
from gradveil.defenses.refiner import Refiner
from gradveil.task import Gradients
from kinds import Row, Session, attack, build, public_of, training
from made_files import with_table_network


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
    name: with_table_network(kind)
    for name, kind in (("attack", attack), ("training", training), ("robust rows", robust_rows))
}
