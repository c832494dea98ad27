"""Checkpoints: all that a training run needs to continue as if it had never stopped.

Randomness is derived from the seed, the round and the client, and `Defense.prepare` is run again with the same outcome,
so neither has to be saved.

A checkpoint is accepted only if it is undamaged (there is a digest of the file, and one for each client's memory file)
and if it fits the training that is resumed: see `core.storage` and `_consistency`. That guards against damage and
mix-ups, not against forgery: whoever can write to the folder can make up a checkpoint, so keep it where only you can
write.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradveil
from gradveil.core.errors import DataError, OutputError
from gradveil.core.folders import locked, prepare_folder
from gradveil.core.storage import load, save_atomically
from gradveil.data import Dataset
from gradveil.defenses import Defense
from gradveil.federation import _consistency as consistency
from gradveil.federation._optimiser import ServerOptimiser
from gradveil.federation.digests import data_digest, task_digest, weights_digest
from gradveil.federation.faults import Fault
from gradveil.federation.memory import ClientMemories
from gradveil.federation.training import RoundRecord, Training, history_of
from gradveil.task import Gradients, Task

FILE = "checkpoint.safetensors"
MEMORIES = "memories"
VERSION = 2
GROUPS = ("parameters", "buffers", "first", "second", "server")


@dataclass
class State:
    """What changes from round to round.

    Args:
        parameters: the weights.
        buffers: what is not trained, such as batch-norm statistics.
        optimiser: the server's optimiser with its moments.
        memories: the memories that the defense keeps for each client.
        number: the number of the next round.
        server_memory: what the server's side of the defense remembers.
        records, faults: what was measured and noted so far.
        rounds_of: in how many rounds each client took part.
        diverged: the round in which the training was stopped; None: it was not.

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
    faults: list[Fault] = field(default_factory=list)
    rounds_of: Counter[int] = field(default_factory=Counter)
    diverged: int | None = None


class Checkpoints:
    """The checkpoint of one training run: a file that each save replaces, and the clients' memories next to it.

    Args:
        folder: where the files are; it exists, and this training has locked it.
        identity: what distinguishes this training from others, see `identify`; only the same training may be resumed.
        training: the training that the numbers in a checkpoint must fit.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], training: Training) -> None:
        self.folder, self._identity, self._training = folder, dict(identity), training

    @property
    def path(self) -> Path:
        """The checkpoint file."""
        return self.folder / FILE

    def save(self, state: State) -> None:
        """Save everything; a crash or a full disk leaves the previous checkpoint intact."""
        files = state.memories.flush()
        groups = dict(zip(GROUPS, _groups(state), strict=True))
        about = {
            "version": VERSION,
            "identity": self._identity,
            "number": state.number,
            "steps": state.optimiser.steps,
            "names": {group: list(tensors) for group, tensors in groups.items()},
            "memories": [(client, *file) for client, file in sorted(files.items())],
            "records": [dataclasses.astuple(record) for record in state.records],
            "history": history_of(state.records),
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
        state.memories.keep(files)

    def load_into(self, state: State) -> None:
        """Restore what was saved into the initial state of the same training, or raise and change nothing.

        Memory files that the checkpoint does not refer to are removed.
        """
        tensors, about = load(self.path)
        version = about.get("version") if isinstance(about, dict) else None
        if version != VERSION:
            raise DataError(f"{self.path}: expected checkpoint version {VERSION}, got {version}")
        try:
            self._refuse_other_training(about["identity"])
            self._restore(state, tensors, about)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            found = " ".join(str(error).split()) if isinstance(error, ValueError) else repr(error)
            raise DataError(f"{self.path}: expected an undamaged checkpoint, got a damaged one ({found})") from error

    def _restore(self, state: State, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        training = self._training
        number = consistency.whole_number("the next round", about["number"], 0, training.rounds)
        diverged = about["diverged"]
        if diverged is not None:
            latest = min(number, training.rounds - 1)
            consistency.whole_number("the round of divergence", diverged, max(0, number - 1), latest)
        records = consistency.read_records(about["records"], training)
        consistency.whole_number("the number of records", len(records), number, number)
        consistency.check_history(about["history"], records)
        faults = consistency.read_faults(about["faults"], training, number + (diverged == number))
        counts = {name: about[name] for name in ("number", "steps", "diverged", "rounds_of")}
        rounds_of = consistency.check_rounds(training, records, faults, **counts)
        groups = self._read_groups(state, tensors, about["names"], finite=diverged is None)
        state.memories.restore(consistency.read_memories(about["memories"], training))

        state.parameters, state.buffers, state.optimiser.first, state.optimiser.second, state.server_memory = groups
        state.number, state.optimiser.steps, state.diverged = number, about["steps"], diverged
        state.records, state.faults, state.rounds_of = records, faults, rounds_of

    def _read_groups(
        self, state: State, tensors: Mapping[str, Tensor], names: Mapping[str, list[str]], *, finite: bool
    ) -> list[Gradients]:
        """The tensors by `GROUPS`; `finite`: moments and statistics must be, because the training has not diverged."""
        if names.keys() != {*GROUPS} or {f"{group}/{name}" for group in names for name in names[group]} != {*tensors}:
            raise ValueError("its tensors are not those that its text names")
        device = next(iter(state.parameters.values())).device
        groups = [{name: tensors[f"{group}/{name}"].to(device) for name in names[group]} for group in GROUPS]
        fresh, saved = (dict(zip(GROUPS, values, strict=True)) for values in (_groups(state), groups))
        for group in GROUPS[:-1]:  # only the defense knows what its memory on the server should look like
            consistency.check_like(group, fresh[group], saved[group], ordered=group in ("parameters", "buffers"))
        # Parameters are always finite: the server refuses any other step.
        for group in ("parameters", "buffers", "first") if finite else ("parameters",):
            consistency.check_finite(group, fresh[group], saved[group])
        if finite:
            consistency.check_squares("second", saved["second"])
        return groups

    def _refuse_other_training(self, saved: Mapping[str, Any]) -> None:
        differing = [key for key in {**saved, **self._identity} if saved.get(key) != self._identity.get(key)]
        if differing:
            changes = "; ".join(f"{key} was {saved.get(key)}, is {self._identity.get(key)}" for key in differing)
            raise OutputError(
                f"train: {self.folder} holds another training run: {changes}; choose another folder, or restore what "
                "it ran with"
            )


def _groups(state: State) -> list[Gradients]:
    """The tensors of a state, in the order of `GROUPS`."""
    return [state.parameters, state.buffers, state.optimiser.first, state.optimiser.second, state.server_memory]


@contextmanager
def training_folder(folder: Path, *, resume: bool) -> Iterator[None]:
    """Lock the folder of a training run; refuse to begin if it holds a training run, or to resume if it holds none."""
    if resume and not (folder / FILE).is_file():
        raise OutputError(
            f"train: expected a folder with a checkpoint to resume from, got {folder}, which "
            f"{'holds none' if folder.is_dir() else 'does not exist'}; begin without resume, or name another folder"
        )
    prepare_folder(folder, "train")
    with locked(folder, "train", "training run"):
        if not resume and (folder / FILE).exists():
            raise OutputError(
                f"train: {folder} holds a training run already; continue it with resume, or choose another"
            )
        yield


def identify(
    task: Task, dataset: Dataset, defense: Defense, training: Training, execution: str
) -> dict[str, str | int | float | None]:
    """What two runs must have in common to be the same training; `task` has its initial weights."""
    settings = {**dataclasses.asdict(training), "local": str(training.local)}
    settings.pop("checkpoint_every")  # how often it is saved does not change what is trained
    return {
        **settings,
        "defense": str(defense),
        "dataset": f"{dataset.name}, {len(dataset.train)} {dataset.train.modality.unit}s",
        "data": data_digest(dataset),
        "execution": execution,
        "model": task_digest(task),
        "initial weights": weights_digest(task),
        "gradveil": gradveil.__version__,
        "torch": torch.__version__,
    }
