"""Encoding and decoding one block of a layer: the positions of its values, and the values.

A layer is split into blocks of `BLOCK` values. Blocks are encoded one by one, so that each uses the code that suits it,
the working set stays in the processor's cache, and a decoder needs little memory besides the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradveil.update import Grid

Array = npt.NDArray[Any]
Piece = memoryview | bytes

BLOCK = 1 << 16

# How a block stores the positions of its values (the low three bits of its first byte) ...
ZEROS, ALL, BITMAP, ELIAS_FANO, HOLES = range(5)
_POSITIONS = 0b111
# ... and two flags: values are codes on the layer's grid; positions are counted within the known set only.
_CODED, _KNOWN = 0b1000, 0b10000


# A list of positions takes a third more time than a bitmap (measured at density 0.2, where it saves 2 % of the bytes):
# it is used if it makes a block at least 3 % shorter.
_LIST_HANDICAP = 1.03


class Malformed(Exception):
    """The bytes are not what an encoder produces."""


class NotFinite(Exception):
    """A value is NaN or infinite; the caller knows the name of the layer and adds it."""


@dataclass(frozen=True)
class Kind:
    """A type of values: its number in a message, and how its bits are stored there.

    Args:
        number: represents the type in a message.
        dtype: the tensor's type.
        stored: integers of the same width, little-endian.
        exponent: mask of the exponent bits, which are all set in NaN and infinity; 0 for types other than floats.

    Example:
        >>> Kind.of(torch.float16).stored
        dtype('int16')
    """

    number: int
    dtype: torch.dtype
    stored: np.dtype[Any]
    exponent: int = 0

    @staticmethod
    def of(dtype: torch.dtype) -> "Kind | None":
        """The kind for a tensor's type; None if messages cannot hold it."""
        return next((kind for kind in KINDS if kind.dtype == dtype), None)

    @property
    def width(self) -> int:
        """Bytes per value; 0 for booleans, which are stored by their positions alone."""
        return 0 if self.dtype == torch.bool else self.stored.itemsize

    def is_finite(self, bits: Array) -> bool:
        """Whether no value is NaN or infinite."""
        return not self.exponent or not bits.size or bool((bits & self.exponent).max() < self.exponent)


KINDS = (
    Kind(0, torch.bool, np.dtype("<u1")),
    Kind(1, torch.float16, np.dtype("<i2"), 0x7C00),
    Kind(2, torch.bfloat16, np.dtype("<i2"), 0x7F80),
    Kind(3, torch.float32, np.dtype("<i4"), 0x7F800000),
    Kind(4, torch.float64, np.dtype("<i8"), 0x7FF0000000000000),
    Kind(5, torch.uint8, np.dtype("<u1")),
    Kind(6, torch.int8, np.dtype("<i1")),
    Kind(7, torch.int16, np.dtype("<i2")),
    Kind(8, torch.int32, np.dtype("<i4")),
    Kind(9, torch.int64, np.dtype("<i8")),
)


class Reader:
    """Reads bytes piece by piece; reading past the end raises `Malformed`."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._offset = data, 0

    @property
    def left(self) -> int:
        """Bytes not yet taken."""
        return len(self._data) - self._offset

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        if size > self.left:
            raise Malformed(f"{size} bytes should follow, but {self.left} are left")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def array(self, dtype: np.dtype[Any] | type, count: int) -> Array:
        """The next `count` numbers, as a view of the bytes."""
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def number(self, size: int) -> int:
        """The next unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")


# -- blocks -------------------------------------------------------------------------------------------------------


def encode_block(bits: Array, kind: Kind, grid: Grid | None, known: Array | None) -> list[Piece]:
    """Encode a block in the shortest way.

    Args:
        bits: the values reinterpreted as integers, so that -0.0 is not zero.
        kind: their type.
        grid: the grid that the values may lie on.
        known: booleans, True where the receiver knows that values may be.
    """
    flags = 0
    if known is not None:
        within = bits.take(np.flatnonzero(known))
        if np.count_nonzero(within) == np.count_nonzero(bits):
            bits, flags = within, _KNOWN
    present = bits != 0
    n, k = len(bits), int(np.count_nonzero(present))
    if k == 0:
        return [bytes([ZEROS | flags])]
    for positions, coded in _encodings_by_length(n, k, kind, grid):
        where = None if positions == ALL else np.flatnonzero(present)
        values = bits if where is None else bits.take(where)
        if not kind.is_finite(values):
            raise NotFinite
        packed = (
            _pack_codes(values, kind, grid) if coded and grid is not None else values.astype(kind.stored, copy=False)
        )
        if packed is None:
            continue
        pieces: list[Piece] = [bytes([positions | flags | (_CODED if coded else 0)])]
        if positions == BITMAP:
            pieces.append(np.packbits(present).data)
        elif positions == ELIAS_FANO and where is not None:
            pieces += _elias_fano(where, n)
        elif positions == HOLES:
            pieces += _elias_fano(np.flatnonzero(~present), n)
        return [*pieces, packed.data] if kind.width else pieces
    raise AssertionError("values that are not on the grid can always be stored unchanged")


def decode_block(reader: Reader, out: Array, kind: Kind, grid: Grid | None, known: Array | None) -> None:
    """Write the next block's values into `out`.

    Allocates at most a small multiple of the block, whatever the bytes contain.
    """
    first = reader.number(1)
    if first & _KNOWN:
        if known is None:
            raise Malformed("a block counts places of a known set, but its layer has none")
        places = np.flatnonzero(known)
        block = np.empty(len(places), out.dtype)
        _fill(reader, block, first ^ _KNOWN, kind, grid)
        _put(block, out, places)
    else:
        _fill(reader, out, first, kind, grid)


def _fill(reader: Reader, out: Array, first: int, kind: Kind, grid: Grid | None) -> None:
    n, positions, coded = len(out), first & _POSITIONS, first & _CODED
    if first > _POSITIONS | _CODED or positions > HOLES or (coded and (grid is None or positions == ZEROS)):
        raise Malformed(f"no block begins with the byte {first}")
    if positions == ZEROS:
        out.fill(0)
        return
    where: Array | None = None
    if positions == BITMAP:
        where = np.flatnonzero(_unpack_bits(reader.take((n + 7) // 8), n))
    elif positions == ELIAS_FANO:
        where = _read_elias_fano(reader, n)
    elif positions == HOLES:
        present = np.ones(n, bool)
        present[_read_elias_fano(reader, n)] = False
        where = np.flatnonzero(present)
    count = n if where is None else len(where)
    if kind.width == 0:
        values: Array = np.ones(count, out.dtype)
    elif coded and grid is not None:
        codes = unpack(reader.take(packed_size(count, grid.bits)), count, grid.bits)
        values = grid.values(torch.from_numpy(codes), kind.dtype).view(torch.from_numpy(out).dtype).numpy()
    else:
        values = reader.array(kind.stored, count).astype(out.dtype)  # aligned, in native byte order
    if not kind.is_finite(values):
        raise NotFinite
    if where is None:
        out[:] = values
    else:
        _put(values, out, where)


def _put(values: Array, out: Array, where: Array) -> None:
    """Write values to the places `where` of `out`, and zeros to all others."""
    out.fill(0)
    # A third faster than numpy's out[where] = values.
    torch.from_numpy(out).scatter_(0, torch.from_numpy(where), torch.from_numpy(values))


def _encodings_by_length(n: int, k: int, kind: Kind, grid: Grid | None) -> list[tuple[int, bool]]:
    """The ways to encode k > 0 values among n places, as (positions, coded), shortest first."""
    positions = [(ALL, 0, n)] if kind.width or k == n else []
    if k < n:
        positions.append((BITMAP, (n + 7) // 8, k))
        positions.append((ELIAS_FANO if k <= n - k else HOLES, _elias_fano_size(n, min(k, n - k)), k))
    encodings = []
    for code, size, count in positions:
        handicap = 1.0 if code in (ALL, BITMAP) else _LIST_HANDICAP
        encodings.append((handicap * (size + count * kind.width), code, False))
        if grid is not None:
            encodings.append((handicap * (size + packed_size(count, grid.bits)), code, True))
    return [(code, coded) for _, code, coded in sorted(encodings)]


def _pack_codes(bits: Array, kind: Kind, grid: Grid) -> Array | None:
    """The values as packed codes on the grid, or None if one of them is not exactly on it."""
    values = torch.from_numpy(bits).view(kind.dtype)
    codes = grid.codes(values)
    if not np.array_equal(grid.values(codes, kind.dtype).view(torch.from_numpy(bits).dtype).numpy(), bits):
        return None
    return pack(codes.numpy(), grid.bits)


# -- Elias-Fano: increasing positions as packed low bits and a unary bitmap of the rest -----------------------------


def _low_width(n: int, k: int) -> int:
    return (n // k).bit_length() - 1


def _elias_fano_size(n: int, k: int) -> int:
    low = _low_width(n, k)
    return 2 + packed_size(k, low) + (k + (n - 1 >> low) + 7) // 8


def _elias_fano(where: Array, n: int) -> list[Piece]:
    k = len(where)
    low = _low_width(n, k)
    unary = np.zeros(k + (n - 1 >> low), bool)
    unary[(where >> low) + np.arange(k)] = True
    return [k.to_bytes(2, "little"), pack(where, low).data, np.packbits(unary).data]


def _read_elias_fano(reader: Reader, n: int) -> Array:
    k = reader.number(2)
    if not 0 < k <= n // 2:
        raise Malformed(f"{k} positions of {n} are not stored as a list")
    low = _low_width(n, k)
    lows = unpack(reader.take(packed_size(k, low)), k, low)
    length = k + (n - 1 >> low)
    where = np.flatnonzero(_unpack_bits(reader.take((length + 7) // 8), length))
    if len(where) != k:
        raise Malformed(f"a list of {k} positions holds {len(where)}")
    where -= np.arange(k)
    where <<= low
    where |= lows
    if where[-1] >= n or not (where[1:] > where[:-1]).all():
        raise Malformed(f"positions do not increase from 0 to {n - 1}")
    return where


def _unpack_bits(packed: memoryview, count: int) -> Array:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).view(bool)


# -- codes of any width ----------------------------------------------------------------------------------------------


def _planes(width: int) -> Iterator[tuple[int, int]]:
    """Split a code of `width` bits into planes of 8, 4, 2 and 1 bits, lowest first, as (first bit, bits)."""
    first = 0
    for bits in [8] * (width // 8) + [bits for bits in (4, 2, 1) if width & bits]:
        yield first, bits
        first += bits


def packed_size(count: int, width: int) -> int:
    """How many bytes `count` codes of `width` bits take.

    >>> packed_size(3, 13)  # a plane of 3 bytes, one of 3 half bytes, one of 3 bits
    6
    """
    return sum((count * bits + 7) // 8 for _, bits in _planes(width))


def pack(codes: Array, width: int) -> Array:
    """Pack non-negative integers below 2^width into bytes, plane by plane.

    In a plane of b < 8 bits, byte i holds the bits of codes i, i + m, i + 2m, ... from its lowest bit on, where m is
    the plane's length in bytes; this keeps all array operations contiguous.

    >>> pack(np.array([1, 2, 3]), 4).tolist()  # two bytes: the first holds codes 0 and 2
    [49, 2]
    """
    planes = [np.empty(0, np.uint8)]
    for first, bits in _planes(width):
        plane = (codes >> first).astype(np.uint8)
        if bits < 8:
            size = (len(codes) * bits + 7) // 8
            columns = np.zeros((8 // bits, size), np.uint8)
            columns.reshape(-1)[: len(codes)] = plane & (2**bits - 1)
            columns <<= np.arange(0, 8, bits, dtype=np.uint8)[:, None]
            plane = np.bitwise_or.reduce(columns)
        planes.append(plane)
    return np.concatenate(planes)


def unpack(packed: memoryview, count: int, width: int) -> Array:
    """Unpack the codes that `pack` packed.

    >>> unpack(memoryview(pack(np.array([1, 2, 3]), 4)), 3, 4).tolist()
    [1, 2, 3]
    """
    codes = np.zeros(count, np.int32)
    reader = Reader(packed)
    for first, bits in _planes(width):
        plane = reader.array(np.uint8, (count * bits + 7) // 8)
        if bits < 8:
            shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
            plane = ((plane >> shifts) & (2**bits - 1)).reshape(-1)[:count]
        codes |= plane.astype(np.int32) << first
    return codes
