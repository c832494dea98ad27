"""The memories of many clients in bounded RAM: those used least recently are on disk.

1,000 dense residuals of a resnet18 are 44 GB. Every client's memory is one safetensors file, written completely or not
at all; tensors that are mostly zero are stored as positions and values. A file is never overwritten: a change makes a
new version, so that the versions a checkpoint refers to stay until the next checkpoint. A checkpoint holds the digest
of every file that it refers to, so no other file can be mistaken for it.
"""

import math
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import DataError
from gradveil.core.folders import writing
from gradveil.core.storage import check, load, save_atomically

RAM_BYTES = 2 << 30
SPARSE_BELOW = 0.4
"""A tensor is stored sparsely if at most this share of it is not zero: a position takes as many bytes as a value."""

MARKED_EVERY = 1024
"""In a sparse tensor every 1024th value is stored, zero or not, so that a short file cannot claim a huge tensor."""


class MemoryFile(NamedTuple):
    """One version of a client's file.

    Args:
        version: its number, which is part of the file's name.
        digest: the digest of its content, see `core.storage`.

    Example:
        >>> MemoryFile(3, "ab" * 32).version
        3
    """

    version: int
    digest: str


class ClientMemories(Mapping[int, MutableMapping[str, Tensor]]):
    """One memory per client; together they take at most `ram_bytes` of RAM, and the rest is on disk.

    Args:
        folder: where the files go; None: a temporary folder, made when the first file is written.
        ram_bytes: how much may stay in RAM; the memory in use always does.
        device: where tensors are put when they are read from disk.

    Example:
        >>> memories = ClientMemories(ram_bytes=100)
        >>> for client in range(3):
        ...     memories[client]["residual"] = torch.full((20,), float(client))
        >>> memories.resident, memories[0]["residual"][0].item(), len(memories)
        ([2], 0.0, 3)
    """

    def __init__(
        self, folder: Path | None = None, ram_bytes: int = RAM_BYTES, device: torch.device | str = "cpu"
    ) -> None:
        self.ram_bytes = checks.integer("memory", "ram_bytes", ram_bytes, low=0)
        self._folder, self._device = folder, device
        self._loaded: OrderedDict[int, dict[str, Tensor]] = OrderedDict()  # the most recently used one comes last
        self._changed: set[int] = set()
        self._files: dict[int, MemoryFile] = {}  # the newest ones
        self._kept: dict[int, MemoryFile] = {}  # those that the last checkpoint refers to
        self._next_version = 0
        self._used = 0

    def __getitem__(self, client: int) -> MutableMapping[str, Tensor]:
        return _ClientMemory(self, client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._files.keys() | self._loaded.keys()))

    def __len__(self) -> int:
        return len(self._files.keys() | self._loaded.keys())

    @property
    def resident(self) -> list[int]:
        """The clients whose memories are in RAM, the least recently used one first."""
        return list(self._loaded)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def flush(self) -> dict[int, MemoryFile]:
        """Write everything that has changed, and return every client's file."""
        for client in sorted(self._changed):
            self._write(client)
        return dict(self._files)

    def keep(self, files: Mapping[int, MemoryFile]) -> None:
        """Keep these files for a checkpoint from now on, and no longer those of the previous one."""
        before, self._kept = self._kept, dict(files)
        for client, file in before.items():
            if file not in (self._kept.get(client), self._files.get(client)):
                self._remove(self._path(client, file.version))

    def restore(self, files: Mapping[int, MemoryFile]) -> None:
        """Go back to the files of a checkpoint; once all of these are found to be in order, any others are removed."""
        for client, file in sorted(files.items()):
            check(self._path(client, file.version), file.digest)
        self._loaded.clear()
        self._changed.clear()
        self._used = 0
        self._files, self._kept = dict(files), dict(files)
        wanted = {self._path(client, file.version) for client, file in files.items()}
        for path in self.folder.glob("client-*"):
            if path not in wanted:  # newer than the checkpoint, or cut short
                self._remove(path)
        self._next_version = 1 + max((file.version for file in files.values()), default=-1)

    # -- internals ------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the files are."""
        if self._folder is None:
            with writing(Path(tempfile.gettempdir())):
                self._folder = Path(tempfile.mkdtemp(prefix="gradveil-memory-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def of(self, client: int) -> dict[str, Tensor]:
        """The client's memory, which becomes the most recently used one."""
        if client in self._loaded:
            self._loaded.move_to_end(client)
            return self._loaded[client]
        memory = {}
        if client in self._files:
            file = self._files[client]
            read = _read(self._path(client, file.version), file.digest)
            memory = {key: value.to(self._device) for key, value in read.items()}
        self._loaded[client] = memory
        self._used += _bytes(memory)
        self._make_room()
        return memory

    def change(self, client: int, key: str, value: Tensor | None) -> None:
        """Set or, with None, delete an entry."""
        memory = self.of(client)
        before = memory.pop(key, None)
        if before is not None:
            self._used -= before.nbytes
        if value is not None:
            memory[key] = value
            self._used += value.nbytes
        self._changed.add(client)
        self._make_room()

    def _make_room(self) -> None:
        while self._used > self.ram_bytes and len(self._loaded) > 1:
            client = next(iter(self._loaded))
            if client in self._changed:
                self._write(client)
            self._used -= _bytes(self._loaded.pop(client))

    def _write(self, client: int) -> None:
        version, self._next_version = self._next_version, self._next_version + 1
        digest = _write(self._path(client, version), self._loaded[client])
        before = self._files.get(client)
        if before is not None and before != self._kept.get(client):
            self._remove(self._path(client, before.version))
        self._files[client] = MemoryFile(version, digest)
        self._changed.discard(client)

    def _path(self, client: int, version: int) -> Path:
        return self.folder / f"client-{client}-{version}.safetensors"

    @staticmethod
    def _remove(path: Path) -> None:
        with writing(path):
            path.unlink(missing_ok=True)


class _ClientMemory(MutableMapping[str, Tensor]):
    """A client's memory, whether it is in RAM or on disk."""

    def __init__(self, memories: ClientMemories, client: int) -> None:
        self._memories, self._client = memories, client

    def __getitem__(self, key: str) -> Tensor:
        return self._memories.of(self._client)[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._memories.change(self._client, key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self._memories.of(self._client):
            raise KeyError(key)
        self._memories.change(self._client, key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._memories.of(self._client)))

    def __len__(self) -> int:
        return len(self._memories.of(self._client))


def _bytes(memory: Mapping[str, Tensor]) -> int:
    return sum(value.nbytes for value in memory.values())


def _write(path: Path, memory: Mapping[str, Tensor]) -> str:
    """Write a memory atomically, sparse tensors as positions and values, and return the file's digest."""
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for key, value in memory.items():
        flat = value.detach().cpu().reshape(-1)
        # By bits, not by value: -0.0 must come back as -0.0.
        stored = (flat != 0).logical_or(flat.signbit()) if flat.is_floating_point() else None
        if stored is not None and int(stored.sum()) <= SPARSE_BELOW * flat.numel():
            stored[::MARKED_EVERY] = True
            places = stored.nonzero()[:, 0]
            shapes[key] = list(value.shape)
            tensors[f"places/{key}"] = places.to(torch.int32 if flat.numel() < 2**31 else torch.int64)
            tensors[f"values/{key}"] = flat[places].clone()
        else:
            tensors[f"dense/{key}"] = value.detach().cpu().contiguous().clone()
    return save_atomically(path, tensors, {"order": list(memory), "sparse": shapes})


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    tensors, about = load(path, digest)
    try:
        order, shapes = _layout(about)
        expected = {
            name
            for key in order
            for name in ([f"places/{key}", f"values/{key}"] if key in shapes else [f"dense/{key}"])
        }
        if tensors.keys() != expected:
            raise ValueError(f"tensors {sorted(tensors.keys() ^ expected)} are missing or unexpected")
        return {
            key: _dense(tensors[f"places/{key}"], tensors[f"values/{key}"], shapes[key])
            if key in shapes
            else tensors[f"dense/{key}"]
            for key in order
        }
    except ValueError as error:
        raise DataError(f"{path}: expected a client's memory, got a damaged one ({error}); start over") from error


def _layout(about: Any) -> tuple[list[str], dict[str, list[int]]]:
    """The keys of a memory in order, and the shapes of the tensors that are stored sparsely."""
    if not isinstance(about, dict) or about.keys() != {"order", "sparse"}:
        raise ValueError("its metadata is not that of a memory")
    order, shapes = about["order"], about["sparse"]
    if not isinstance(order, list) or not all(isinstance(key, str) for key in order) or len({*order}) < len(order):
        raise ValueError(f"its keys are {order}")
    if not isinstance(shapes, dict) or not shapes.keys() <= {*order}:
        raise ValueError("it has shapes of other keys")
    for key, shape in shapes.items():
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"the shape of {key!r} is {shape}")
    return order, shapes


def _dense(places: Tensor, values: Tensor, shape: list[int]) -> Tensor:
    """The tensor with these values at these places of the flattened shape, zeros elsewhere."""
    size = math.prod(shape)
    if places.dtype not in (torch.int32, torch.int64) or places.ndim != 1 or values.shape != places.shape:
        raise ValueError(f"places are {list(places.shape)} {places.dtype}, values {list(values.shape)}")
    if size > MARKED_EVERY * len(places):  # before so much is allocated
        raise ValueError(f"{len(places)} places cannot be those of a shape {shape}")
    places = places.long()
    if len(places) and (places[0] < 0 or places[-1] >= size or not (places.diff() > 0).all()):
        raise ValueError(f"places are not increasing from 0 to {size - 1}")
    return torch.zeros(size, dtype=values.dtype).index_put_((places,), values).view(shape)
