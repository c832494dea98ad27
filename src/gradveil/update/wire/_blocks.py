"""One block of a layer as bytes and back: where its values stand, and the values.

A layer is cut into blocks of `BLOCK` values. Blocks are coded one by one, so that each takes the code that suits it,
what is worked on stays in the processor's cache, and a decoder needs little memory besides the result.
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

# How a block says where its values stand (the low three bits of its first byte) ...
ZEROS, ALL, BITMAP, ELIAS_FANO, HOLES = range(5)
_POSITIONS = 0b111
# ... and two flags: values are codes on the layer's grid; positions count only the places of the known set.
_CODED, _KNOWN = 0b1000, 0b10000


# A list of positions takes a third more time than a bitmap (measured at density 0.2, where it saves 2 % of the bytes):
# it is taken where it makes a block 3 % shorter.
_LIST_HANDICAP = 1.03


class Malformed(Exception):
    """The bytes are not what an encoder makes."""


class NotFinite(Exception):
    """A value is NaN or infinite; who knows the name of the layer says so."""


@dataclass(frozen=True)
class Kind:
    """A type of values: its number in a message, and how its bits lie there.

    Args:
        number: stands for the type in a message.
        dtype: the tensor's type.
        stored: integers of the same width, little-endian.
        exponent: for floating-point numbers the exponent's bits, which are all set in NaN and infinity; else 0.

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
        """The kind of a tensor's type, if messages can hold it."""
        return next((kind for kind in KINDS if kind.dtype == dtype), None)

    @property
    def width(self) -> int:
        """Bytes of a value; a truth value is told by its position alone."""
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
    """Bytes taken one piece after the other; asking for more than there are is an error, not a short answer."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Bytes not yet taken."""
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        if size > self.left:
            raise Malformed(f"{size} bytes should follow where {self.left} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def array(self, dtype: np.dtype[Any] | type, count: int) -> Array:
        """The next `count` numbers, a view of the bytes."""
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def number(self, size: int) -> int:
        """The next unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")


# -- blocks -------------------------------------------------------------------------------------------------------


def encode_block(bits: Array, kind: Kind, grid: Grid | None, known: Array | None) -> list[Piece]:
    """The shortest code of a block.

    Args:
        bits: the values as integers of the same bits: -0.0 is not zero.
        kind: their type.
        grid: what the values may be codes on.
        known: truth values, True where the receiver knows that values may stand.
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
    for positions, coded in _by_length(n, k, kind, grid):
        where = None if positions == ALL else np.flatnonzero(present)
        values = bits if where is None else bits.take(where)
        if not kind.is_finite(values):
            raise NotFinite
        packed = _codes(values, kind, grid) if coded and grid is not None else values.astype(kind.stored, copy=False)
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
    raise AssertionError("values that are not on the grid can always be stored as they are")


def decode_block(reader: Reader, out: Array, kind: Kind, grid: Grid | None, known: Array | None) -> None:
    """Write the next block's values into `out`.

    Allocates a small multiple of the block whatever the bytes say.
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
        where = np.flatnonzero(_truth_values(reader.take((n + 7) // 8), n))
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
        values = reader.array(kind.stored, count).astype(out.dtype)  # aligned and in this machine's order
    if not kind.is_finite(values):
        raise NotFinite
    if where is None:
        out[:] = values
    else:
        _put(values, out, where)


def _put(values: Array, out: Array, where: Array) -> None:
    """Values at some places of `out` and zeros at all others."""
    out.fill(0)
    # A third faster than numpy's out[where] = values.
    torch.from_numpy(out).scatter_(0, torch.from_numpy(where), torch.from_numpy(values))


def _by_length(n: int, k: int, kind: Kind, grid: Grid | None) -> list[tuple[int, bool]]:
    """The ways to code k > 0 values among n places, as (positions, coded), the shortest first."""
    positions = [(ALL, 0, n)] if kind.width or k == n else []
    if k < n:
        positions.append((BITMAP, (n + 7) // 8, k))
        positions.append((ELIAS_FANO if k <= n - k else HOLES, _elias_fano_size(n, min(k, n - k)), k))
    ways = []
    for code, size, count in positions:
        handicap = 1.0 if code in (ALL, BITMAP) else _LIST_HANDICAP
        ways.append((handicap * (size + count * kind.width), code, False))
        if grid is not None:
            ways.append((handicap * (size + packed_size(count, grid.bits)), code, True))
    return [(code, coded) for _, code, coded in sorted(ways)]


def _codes(bits: Array, kind: Kind, grid: Grid) -> Array | None:
    """The values as packed codes on the grid, or None if one of them is not on it to the bit."""
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
    where = np.flatnonzero(_truth_values(reader.take((length + 7) // 8), length))
    if len(where) != k:
        raise Malformed(f"a list of {k} positions holds {len(where)}")
    where -= np.arange(k)
    where <<= low
    where |= lows
    if where[-1] >= n or not (where[1:] > where[:-1]).all():
        raise Malformed(f"positions do not increase from 0 to {n - 1}")
    return where


def _truth_values(packed: memoryview, count: int) -> Array:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).view(bool)


# -- codes of any width ----------------------------------------------------------------------------------------------


def _planes(width: int) -> Iterator[tuple[int, int]]:
    """A code's bits as planes of 8, 4, 2 and 1 bits from the lowest on: (first bit, bits)."""
    first = 0
    for bits in [8] * (width // 8) + [bits for bits in (4, 2, 1) if width & bits]:
        yield first, bits
        first += bits


def packed_size(count: int, width: int) -> int:
    """Bytes of `count` codes of `width` bits.

    >>> packed_size(3, 13)  # a plane of 3 bytes, one of 3 half bytes, one of 3 bits
    6
    """
    return sum((count * bits + 7) // 8 for _, bits in _planes(width))


def pack(codes: Array, width: int) -> Array:
    """Non-negative integers below 2^width as bytes, plane after plane.

    In a plane of b < 8 bits, byte i holds the bits of codes i, i + m, i + 2m, ... from its lowest bit on, where m is
    the plane's length in bytes: all that is worked on is contiguous.

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
    """The codes that `pack` packed.

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
