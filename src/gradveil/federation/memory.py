"""The memories of many clients in bounded RAM: those used least recently lie on disk.

1,000 dense residuals of a resnet18 are 44 GB. Every client's memory is one safetensors file, written whole or not at
all; tensors that are mostly zero are stored as positions and values. A file is never overwritten: a change makes a new
version, so that the versions a checkpoint refers to stay until the next checkpoint.
"""

import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from gradveil import checks
from gradveil.errors import DataError
from gradveil.federation.storage import load, save_atomically

RAM_BYTES = 2 << 30
SPARSE_BELOW = 0.4
"""A tensor is stored sparsely if at most this share of it is not zero: a position takes as much as a value."""


class ClientMemories(Mapping[int, MutableMapping[str, Tensor]]):
    """One memory a client, all of them together in at most `ram_bytes` of RAM and the rest on disk.

    Args:
        folder: where files go; None: a temporary folder, made when the first one is needed.
        ram_bytes: how much may stay in RAM; the memory in use always does.
        device: where the tensors that come back from disk go.

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
        self._versions: dict[int, int] = {}  # of the files
        self._kept: dict[int, int] = {}  # the versions that the last checkpoint refers to
        self._next_version = 0
        self._used = 0

    def __getitem__(self, client: int) -> MutableMapping[str, Tensor]:
        return _ClientMemory(self, client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._versions.keys() | self._loaded.keys()))

    def __len__(self) -> int:
        return len(self._versions.keys() | self._loaded.keys())

    @property
    def resident(self) -> list[int]:
        """The clients whose memories are in RAM, the least recently used one first."""
        return list(self._loaded)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def flush(self) -> dict[int, int]:
        """Write everything that has changed; returns the version of every client's file."""
        for client in sorted(self._changed):
            self._write(client)
        return dict(self._versions)

    def keep(self, versions: Mapping[int, int]) -> None:
        """From now on, keep these versions for a checkpoint, and no longer the ones before."""
        before, self._kept = self._kept, dict(versions)
        for client, version in before.items():
            if version not in (self._kept.get(client), self._versions.get(client)):
                self._path(client, version).unlink(missing_ok=True)

    def restore(self, versions: Mapping[int, int]) -> None:
        """Go back to the versions of a checkpoint; newer files are removed."""
        self._loaded.clear()
        self._changed.clear()
        self._used = 0
        self._versions, self._kept = dict(versions), dict(versions)
        wanted = {self._path(client, version) for client, version in versions.items()}
        for path in self.folder.glob("client-*"):
            if path not in wanted:  # newer than the checkpoint, or cut short
                path.unlink()
        for path in sorted(wanted):
            if not path.exists():
                raise DataError(f"memory: expected {path.name} beside the checkpoint, got no such file; start anew")
        self._next_version = 1 + max(versions.values(), default=-1)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the files are."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gradveil-memory-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def of(self, client: int) -> dict[str, Tensor]:
        """The client's memory, now the most recently used one."""
        if client in self._loaded:
            self._loaded.move_to_end(client)
            return self._loaded[client]
        memory = {}
        if client in self._versions:
            read = _read(self._path(client, self._versions[client]))
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
        _write(self._path(client, version), self._loaded[client])
        before = self._versions.get(client)
        if before is not None and before != self._kept.get(client):
            self._path(client, before).unlink(missing_ok=True)
        self._versions[client] = version
        self._changed.discard(client)

    def _path(self, client: int, version: int) -> Path:
        return self.folder / f"client-{client}-{version}.safetensors"


class _ClientMemory(MutableMapping[str, Tensor]):
    """A client's memory, wherever it lies."""

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


def _write(path: Path, memory: Mapping[str, Tensor]) -> None:
    """Write a memory whole or not at all; of a sparse tensor, positions and values."""
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for key, value in memory.items():
        flat = value.detach().cpu().reshape(-1)
        # By bits, not by value: -0.0 must come back as -0.0.
        places = (flat != 0).logical_or(flat.signbit()).nonzero()[:, 0] if flat.is_floating_point() else None
        if places is not None and len(places) <= SPARSE_BELOW * flat.numel():
            shapes[key] = list(value.shape)
            tensors[f"places/{key}"] = places.to(torch.int32 if flat.numel() < 2**31 else torch.int64)
            tensors[f"values/{key}"] = flat[places].clone()
        else:
            tensors[f"dense/{key}"] = value.detach().cpu().contiguous().clone()
    save_atomically(path, tensors, {"order": list(memory), "sparse": shapes})


def _read(path: Path) -> dict[str, Tensor]:
    tensors, about = load(path)
    memory = {}
    for key in about["order"]:
        if key not in about["sparse"]:
            memory[key] = tensors[f"dense/{key}"]
            continue
        places, values = tensors[f"places/{key}"].long(), tensors[f"values/{key}"]
        shape = torch.Size(about["sparse"][key])
        memory[key] = torch.zeros(shape.numel(), dtype=values.dtype).index_put_((places,), values).view(shape)
    return memory
