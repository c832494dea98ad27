"""Rows of a table under defenses, one of which needs an evaluation network for the columns.

The network is what scripts/train_refiner_network.py makes, with its fixed seed, when a case first needs it.
"""

from collections.abc import Callable
from pathlib import Path

from gradveil.core.registry import parse_spec
from kinds import Row, Session, attack, dataset_of, training
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


KINDS = {"attack": with_network(attack), "training": with_network(training)}
