"""Files that cases need beside the data, such as refiner's evaluation networks for text and tables.

They are made when they are first needed, with fixed seeds, and kept in the `checkpoints` of the experiment.
"""

import contextlib
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from gradveil.core.registry import parse_spec
from gradveil.modality import Table
from kinds import Row, Session, dataset_of

Kind = Callable[[Row, Session], Row]

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@contextlib.contextmanager
def kept_files(session: Session) -> Iterator[Session]:
    """Work in the folder of the files that are kept, with a session that does not mind.

    A defense's draws are seeded by its spec, which names the evaluation network; so that name must not depend on where
    the repository lies.
    """
    session = Session(session.folder.resolve(), session.progress)
    folder = session.folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        yield session


@cache
def script(name: str) -> dict[str, Any]:
    """What scripts/NAME.py defines."""
    return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name=name)


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """The file at `path`, which `make` writes if it is missing; an interruption leaves no half of it."""
    if not path.exists():
        new = path.with_suffix(".new")
        make(new)
        new.replace(path)
    return path


def with_table_network(kind: Kind) -> Kind:
    """The same measurement; on a table, refiner gets what scripts/train_refiner_network.py makes for it."""

    def measure(case: Row, session: Session) -> Row:
        split = dataset_of(case).train
        if parse_spec(case["defense"])[0] != "refiner" or not isinstance(split.modality, Table):
            return kind(case, session)

        def make(out: Path) -> None:
            making = script("train_refiner_network")
            making["write"](making["train"](split.modality, split.inputs), out, {"data": case["dataset"]})

        with kept_files(session) as kept:
            path = made(Path(f"{case['dataset']}-rows.safetensors"), make)
            row = kind({**case, "defense": f"{case['defense']},network={path}"}, kept)
        return {**row, "network_made_by": "scripts/train_refiner_network.py, seed 0"}

    return measure
