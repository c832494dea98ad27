"""The frame around encoded tensors: the header, in which a message describes itself."""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.core.errors import InputError, ParameterError
from gradveil.update import Grid, LocalSteps
from gradveil.update.wire._blocks import KINDS, Kind, Malformed, Piece, Reader

MAGIC = b"gradveil"
VERSION = 1
UPDATE, LOCATIONS = 0, 1  # the contents of a message

MAX_TENSORS = 1 << 14
MAX_NAME = 1 << 10
MAX_DIMENSIONS = 32
MAX_SIZE = 2**63 - 1  # of a tensor, leaving out dimensions of size 0: torch cannot count further

_FRAME = struct.Struct("<8sHI")  # magic, version, checksum of the rest
_LENGTHS = struct.Struct("<QI")  # of the message and of the header
_FIELDS = struct.Struct("<BBqQQQd16sHH")  # see `Header`
_GRID = struct.Struct("<ddB")
_MOMENTUM = struct.Struct("<d")
_HAS_ROUND, _HAS_LOCAL, _HAS_BATCH_SIZE, _HAS_LOCATIONS, _HAS_MOMENTUM = 1, 2, 4, 8, 16
_SHORTEST_ENTRY = 13  # bytes


@dataclass(frozen=True)
class Entry:
    """One tensor of a message.

    Args:
        name: its name.
        kind: the type of its values.
        shape: its shape.
        grid: the values it takes, if it is quantised.
        length: how many bytes its encoded values take.

    Example:
        >>> Entry("weight", KINDS[3], (3, 2), None, 25).size
        6
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    grid: Grid | None
    length: int

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The part of a message before its values.

    Args:
        contents: `UPDATE` or `LOCATIONS`.
        layers: its layers in order.
        buffers: its buffers in order.
        round, samples, local: as in `gradveil.update.Meta`.
        digest: digest of the known locations within which positions are counted; None if the message needs none.

    Example:
        >>> Header(UPDATE, [], []).samples
        0
    """

    contents: int
    layers: Sequence[Entry]
    buffers: Sequence[Entry]
    round: int | None = None
    samples: int = 0
    local: LocalSteps | None = None
    digest: bytes | None = None


def write(header: Header, body: Sequence[Piece]) -> bytes:
    """Write a message: frame, header and body."""
    tensors = (*header.layers, *header.buffers)
    if len(tensors) > MAX_TENSORS:
        raise InputError(f"wire: a message holds at most {MAX_TENSORS} tensors, got {len(tensors)}")
    for entry in tensors:
        if len(entry.name.encode()) > MAX_NAME:
            raise InputError(f"wire: names must have at most {MAX_NAME} bytes, got {entry.name!r}")
    try:
        header_bytes = _write_header(header)
    except struct.error as error:
        raise InputError(
            f"wire: round, samples and local steps must fit 64 bits, got {header.round}, "
            f"{header.samples} and {header.local}"
        ) from error
    length = _FRAME.size + _LENGTHS.size + len(header_bytes) + sum(memoryview(piece).nbytes for piece in body)
    rest = [_LENGTHS.pack(length, len(header_bytes)), header_bytes, *body]
    checksum = 0
    for piece in rest:
        checksum = zlib.crc32(piece, checksum)
    return b"".join([_FRAME.pack(MAGIC, VERSION, checksum), *rest])


def read(message: memoryview) -> tuple[Header, Reader]:
    """Read the header of a message and check its consistency; return it with a reader of what follows."""
    frame = Reader(message)
    magic, version, checksum = _FRAME.unpack(frame.take(_FRAME.size))
    if magic != MAGIC:
        raise Malformed(f"it begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise Malformed(f"it has version {version}, but version {VERSION} is read here; use one gradveil on both sides")
    rest = frame.take(frame.left)
    if len(rest) < _LENGTHS.size or _LENGTHS.unpack_from(rest)[0] != len(message):
        raise Malformed(f"its length of {len(message)} bytes is not the one it declares")
    if zlib.crc32(rest) != checksum:
        raise Malformed("its checksum does not match: bytes were changed in transit")
    reader = Reader(rest)
    _, header_length = _LENGTHS.unpack(reader.take(_LENGTHS.size))
    header = _read_header(Reader(reader.take(header_length)))
    if sum(entry.length for entry in (*header.layers, *header.buffers)) != reader.left:
        raise Malformed(f"its tensors do not take exactly the {reader.left} bytes after the header")
    return header, reader


def _write_header(header: Header) -> bytes:
    local = header.local
    batch_size = None if local is None else local.batch_size
    momentum = 0.0 if local is None else local.momentum
    flags = (
        _HAS_ROUND * (header.round is not None)
        + _HAS_LOCAL * (local is not None)
        + _HAS_BATCH_SIZE * (batch_size is not None)
        + _HAS_LOCATIONS * (header.digest is not None)
        + _HAS_MOMENTUM * (momentum != 0)
    )
    fields = _FIELDS.pack(
        header.contents,
        flags,
        header.round or 0,
        header.samples,
        local.epochs if local else 0,
        batch_size or 0,
        local.lr if local else 0.0,
        header.digest or bytes(16),
        len(header.layers),
        len(header.buffers),
    )
    if momentum:
        fields += _MOMENTUM.pack(momentum)
    return fields + b"".join(map(_write_entry, (*header.layers, *header.buffers)))


def _write_entry(entry: Entry) -> bytes:
    name, dimensions = entry.name.encode(), len(entry.shape)
    grid = b"\0" if entry.grid is None else b"\1" + _GRID.pack(entry.grid.low, entry.grid.step, entry.grid.bits)
    return (
        struct.pack(f"<H{len(name)}sBB{dimensions}Q", len(name), name, entry.kind.number, dimensions, *entry.shape)
        + grid
        + struct.pack("<Q", entry.length)
    )


def _read_header(reader: Reader) -> Header:
    contents, flags, number, samples, epochs, batch_size, lr, digest, layers, buffers = _FIELDS.unpack(
        reader.take(_FIELDS.size)
    )
    momentum_without_steps = flags & _HAS_MOMENTUM and not flags & _HAS_LOCAL
    if contents not in (UPDATE, LOCATIONS) or flags >= 2 * _HAS_MOMENTUM or momentum_without_steps:
        raise Malformed(f"no message has contents {contents} and flags {flags}")
    if layers + buffers > min(MAX_TENSORS, reader.left // _SHORTEST_ENTRY):
        raise Malformed(f"{layers + buffers} tensors are more than its header can hold, or more than {MAX_TENSORS}")
    try:
        momentum = _MOMENTUM.unpack(reader.take(_MOMENTUM.size))[0] if flags & _HAS_MOMENTUM else 0.0
        batch_limit = batch_size if flags & _HAS_BATCH_SIZE else None
        local = LocalSteps(epochs, batch_limit, lr, momentum) if flags & _HAS_LOCAL else None
        header = Header(
            contents,
            [_read_entry(reader) for _ in range(layers)],
            [_read_entry(reader) for _ in range(buffers)],
            number if flags & _HAS_ROUND else None,
            samples,
            local,
            digest if flags & _HAS_LOCATIONS else None,
        )
    except (ParameterError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error
    if reader.left:
        raise Malformed(f"its header has {reader.left} bytes too many")
    if contents == LOCATIONS and (flags or buffers or any(entry.grid for entry in header.layers)):
        raise Malformed("it mixes locations with parts of an update")
    for entries in (header.layers, header.buffers):
        if len({entry.name for entry in entries}) != len(entries):
            raise Malformed("a name occurs twice")
    return header


def _read_entry(reader: Reader) -> Entry:
    length = reader.number(2)
    if length > MAX_NAME:
        raise Malformed(f"a name has {length} bytes")
    name = str(reader.take(length), "utf-8")
    number, dimensions = reader.number(1), reader.number(1)
    if number >= len(KINDS) or dimensions > MAX_DIMENSIONS:
        raise Malformed(f"{name!r} has {dimensions} dimensions of type {number}")
    shape = tuple(reader.number(8) for _ in range(dimensions))
    if math.prod(size or 1 for size in shape) > MAX_SIZE:
        raise Malformed(f"{name!r} has the impossible shape {list(shape)}")
    has_grid = reader.number(1)
    if has_grid > 1:
        raise Malformed(f"{name!r} has {has_grid} grids")
    grid = Grid(*_GRID.unpack(reader.take(_GRID.size))) if has_grid else None
    return Entry(name, KINDS[number], shape, grid, reader.number(8))
