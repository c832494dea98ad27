"""Checkpoints: all that a training needs to go on as if it had never stopped.

Randomness is derived from the seed, the round and the client, and what `Defense.prepare` found is found again, so
neither has to be saved.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil.data import Dataset
from gradveil.defenses import Defense
from gradveil.errors import DataError, OutputError
from gradveil.federation.digests import data_digest, task_digest, weights_digest
from gradveil.federation.faults import Fault
from gradveil.federation.memory import ClientMemories
from gradveil.federation.optimiser import ServerOptimiser
from gradveil.federation.storage import load, save_atomically
from gradveil.federation.training import RoundRecord, Training
from gradveil.task import Gradients, Task

FILE = "checkpoint.safetensors"
MEMORIES = "memories"
VERSION = 1


@dataclass
class State:
    """What changes from round to round.

    Args:
        parameters: the weights.
        buffers: what is not trained, batch-norm statistics among it.
        optimiser: the server's, with its moments.
        memories: the clients' own states.
        number: the next round.
        server_memory: what the server's side of the defense remembers.
        records, history, faults: what was measured and noted so far.
        rounds_of: in how many rounds each client took part.
        diverged: the round in which the training was stopped.

    Example:
        >>> State.__dataclass_fields__["number"].default
        0
    """

    parameters: Gradients
    buffers: Gradients
    optimiser: ServerOptimiser
    memories: ClientMemories
    number: int = 0
    server_memory: dict[str, Tensor] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)
    history: list[tuple[int, float]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    rounds_of: Counter[int] = field(default_factory=Counter)
    diverged: int | None = None


class Checkpoints:
    """The checkpoint of one training in a folder: a file that is replaced, and the clients' memories beside it.

    Args:
        folder: where they are.
        identity: what tells this training from others, see `identify`; only the same one may go on.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self._identity = folder, dict(identity)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"train: expected a folder that can be written to, got {folder}: {error.strerror}; choose another"
            ) from error

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / FILE

    def refuse_existing(self) -> None:
        """Refuse to start where another training has left its checkpoint."""
        if self.path.exists():
            raise OutputError(f"train: {self.folder} holds a training already; go on with resume or choose another")

    def save(self, state: State) -> None:
        """Save everything; a crash leaves the checkpoint before this one intact."""
        versions = state.memories.flush()
        groups = {
            "parameters": state.parameters,
            "buffers": state.buffers,
            "first": state.optimiser.first,
            "second": state.optimiser.second,
            "server": state.server_memory,
        }
        about = {
            "version": VERSION,
            "identity": self._identity,
            "number": state.number,
            "steps": state.optimiser.steps,
            "names": {group: list(tensors) for group, tensors in groups.items()},
            "memories": sorted(versions.items()),
            "records": [dataclasses.astuple(record) for record in state.records],
            "history": state.history,
            "faults": [dataclasses.astuple(fault) for fault in state.faults],
            "rounds_of": sorted(state.rounds_of.items()),
            "diverged": state.diverged,
        }
        flat = {
            f"{group}/{name}": value.detach().cpu().clone()  # clones: safetensors refuses tensors that share memory
            for group, tensors in groups.items()
            for name, value in tensors.items()
        }
        save_atomically(self.path, flat, about)
        state.memories.keep(versions)

    def load_into(self, state: State) -> None:
        """Put what was saved into a state that was made for the same training; nothing saved: it stays as it is."""
        if not self.path.exists():
            return
        tensors, about = load(self.path)
        version = about.get("version") if isinstance(about, dict) else None
        if version != VERSION:
            raise DataError(f"{self.path}: expected checkpoint version {VERSION}, got {version}")
        try:
            self._restore(state, tensors, about)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self.path}: expected a whole checkpoint, got a damaged one ({error!r})") from error

    def _restore(self, state: State, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        self._refuse_another(about["identity"])
        device = next(iter(state.parameters.values())).device
        group = {
            kind: {name: tensors[f"{kind}/{name}"].to(device) for name in names}
            for kind, names in about["names"].items()
        }
        state.parameters, state.buffers, state.server_memory = group["parameters"], group["buffers"], group["server"]
        state.optimiser.first, state.optimiser.second = group["first"], group["second"]
        state.optimiser.steps, state.number, state.diverged = about["steps"], about["number"], about["diverged"]
        state.memories.restore(dict(about["memories"]))
        state.records = [RoundRecord(*record) for record in about["records"]]
        state.history = [(number, accuracy) for number, accuracy in about["history"]]
        state.faults = [Fault(*fault) for fault in about["faults"]]
        state.rounds_of = Counter(dict(about["rounds_of"]))

    def _refuse_another(self, saved: Mapping[str, Any]) -> None:
        differing = [key for key in {**saved, **self._identity} if saved.get(key) != self._identity.get(key)]
        if differing:
            changes = "; ".join(f"{key} was {saved.get(key)}, is {self._identity.get(key)}" for key in differing)
            raise OutputError(
                f"train: {self.folder} holds another training: {changes}; choose another folder, or bring back what it "
                "ran with"
            )


def identify(
    task: Task, dataset: Dataset, defense: Defense, training: Training, execution: str
) -> dict[str, str | int | float | None]:
    """What two runs must have in common to be the same training; `task` at its initial weights."""
    settings = {**dataclasses.asdict(training), "local": str(training.local)}
    settings.pop("checkpoint_every")  # how often it is saved does not change what is trained
    return {
        **settings,
        "defense": str(defense),
        "dataset": f"{dataset.name}, {len(dataset.train)} images",
        "data": data_digest(dataset),
        "execution": execution,
        "model": task_digest(task),
        "initial weights": weights_digest(task),
        "gradveil": gradveil.__version__,
        "torch": torch.__version__,
    }
