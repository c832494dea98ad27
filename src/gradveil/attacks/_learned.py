"""What attacks have learned, on disk: found again by everything it depends on, so that an interrupted audit need not
learn it twice; and what an interrupted attack had learned so far.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from torch import Tensor

from gradveil._version import __version__
from gradveil.attacks.problem import Progress
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import DataError
from gradveil.core.folders import prepare_folder
from gradveil.core.parameters import state_fields
from gradveil.core.storage import load, save_atomically
from gradveil.core.tensors import Tensors
from gradveil.task import Task

A = TypeVar("A")

_STATE = "state of the generator"

_PROBED = 2  # public inputs whose gradients tell models apart that differ in more than their weights


@dataclasses.dataclass(frozen=True, eq=False)
class Learning:
    """How an attack learns: its randomness, to whom it reports, and where it keeps the parts that it has finished.

    Args:
        generator: the attacker's randomness.
        progress: called with (steps done, total steps, seconds left).
        kept: the file to which what was learned will be written; finished parts lie beside it until then. None:
            nothing is kept.

    Example:
        >>> Learning(torch.manual_seed(0)).once("a-part", lambda: {"ones": torch.ones(2)})
        {'ones': tensor([1., 1.])}
    """

    generator: torch.Generator
    progress: Progress = None
    kept: Path | None = None

    def once(self, part: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a part of the learning, computed unless an interrupted attempt has already finished it.

        The generator ends in the same state either way, so that what follows does not depend on interruptions.

        Args:
            part: its name, unique within the learning, of letters, digits and hyphens.
            compute: computes it, with random numbers from the generator only.
        """
        if self.kept is None:
            return compute()
        path = self.kept.with_suffix(f".{part}")
        if path.exists():
            try:
                found, _ = load(path)
                state = found.pop(_STATE)
            except (DataError, LookupError):
                path.unlink()
            else:
                self.generator.set_state(state)
                return {name: value.to(self.generator.device) for name, value in found.items()}
        computed = compute()
        tensors = {name: value.detach().cpu() for name, value in computed.items()}
        save_atomically(path, {**tensors, _STATE: self.generator.get_state()}, part)
        return computed

    def discard(self) -> None:
        """Remove what was kept of parts, once all are finished."""
        if self.kept is not None:
            for path in self.kept.parent.glob(f"{self.kept.stem}.*"):
                if path != self.kept:
                    path.unlink()


def learned_once(
    attack: A, task: Task, threat: ThreatModel, learning: Learning, folder: Path, learn: Callable[[Learning], A]
) -> A:
    """The fitted attack: read from `folder`, or learned and written there.

    A file that is damaged is replaced. Anybody who can write to the folder can decide what the attack has learned, so
    it must be the user's own.

    Args:
        attack: the attack before it has learned anything.
        task: the model that the victims will be sent.
        threat: what the attacker may know.
        learning: the attacker's randomness, which is not used if the file is there, and its progress.
        folder: where files are kept; made if it is missing.
        learn: does the learning.
    """
    assert threat.public is not None
    prepare_folder(folder, "learned attacks")
    path = folder / f"{learned_digest(attack, task, threat, learning.generator)}.safetensors"
    # Another process that needs the same waits, instead of learning it too.
    with FileLock(folder / f".{path.stem}.lock"):
        if path.exists():
            try:
                return _read(attack, path, task.device)
            except DataError:
                path.unlink()
        return _learn(path, dataclasses.replace(learning, kept=path), learn)


def _learn(path: Path, learning: Learning, learn: Callable[[Learning], A]) -> A:
    """Learn, and write what was learned."""
    fitted = learn(learning)
    save_atomically(path, *packed(fitted))
    learning.discard()
    return fitted


def _read(attack: A, path: Path, device: torch.device) -> A:
    tensors, about = load(path)
    try:
        return unpacked(attack, tensors, about, device)
    except (LookupError, AttributeError, TypeError) as error:
        raise DataError(f"{path}: expected what {type(attack).__name__} has learned, got something else") from error


def packed(fitted: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an attack has learned, as tensors by name and a description that JSON can hold."""
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for name in state_fields(fitted):
        value = getattr(fitted, name)
        if isinstance(value, Tensors):
            tensors |= {f"{name}/{key}": tensor.detach().cpu() for key, tensor in value.items()}
            about[name] = {"tensors": list(value)}  # a file has an order of its own
        else:
            about[name] = {"value": value}
    return tensors, about


def unpacked(attack: A, tensors: Mapping[str, Tensor], about: Mapping[str, Any], device: torch.device) -> A:
    """The attack with what `packed` took from a fitted one; a `LookupError` or `TypeError` if that does not fit."""
    found: dict[str, Any] = {}
    for name in state_fields(attack):
        entry = about[name]
        keys = entry.get("tensors")
        found[name] = (
            entry["value"] if keys is None else Tensors({key: tensors[f"{name}/{key}"].to(device) for key in keys})
        )
    replaced: Any = dataclasses.replace(attack, **found)  # type: ignore[type-var]
    fitted: A = replaced
    return fitted


def learned_digest(attack: object, task: Task, threat: ThreatModel, generator: torch.Generator) -> str:
    """Digest of everything that decides what an attack learns: if any of it changes, so does the digest."""
    assert threat.public is not None
    digest = hashlib.sha256()
    # A plain attacker does not know the defense, so what it learns serves against all of them.
    known = threat if threat.adaptive else dataclasses.replace(threat, defense=None)
    # The labels of the victims are known only when it attacks.
    known = dataclasses.replace(known, labels="infer", known_labels=None)
    inputs, labels = threat.public
    response = task.without_dropout().gradients(inputs[:_PROBED], labels[:_PROBED])
    model = [task.parameters, task.buffers, response, task.dropout_rates]
    for part in _parts([__version__, attack, known, *model, generator.get_state()]):
        digest.update(part)
    return digest.hexdigest()[:32]


def _parts(value: object) -> Iterator[bytes]:
    """The value as bytes; methods, settings and containers with everything that they hold."""
    if isinstance(value, Tensor):
        yield f"{list(value.shape)} {value.dtype} ".encode()
        yield value.detach().cpu().contiguous().numpy().tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{key}: ".encode()
            yield from _parts(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield f"{len(value)} items ".encode()
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield f"{type(value).__name__} ".encode()
        yield from _parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        yield f"{value!r} ".encode()
