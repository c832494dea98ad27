"""Linear equations over GF(2), bits packed into 64-bit words."""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GUESSED = 4  # bits that are tried both ways if the equations leave them open
_STRIP = 8  # columns that one table of sums covers
_CHUNK = 64  # rows updated together: they stay in the cache while all tables of a word are added


@dataclass(frozen=True)
class Solution:
    """What a system of equations over GF(2) says.

    Args:
        rank: number of independent equations.
        checks: further equations that follow from those, and hold: each would fail with probability 1/2 in a system
            made of noise.
        contradictions: further equations that do not hold.
        candidates: the unknowns, if nothing is contradicted: one answer if the rank is their number, all of them if up
            to four bits are missing, none if more are.

    Example:
        >>> solve(pack(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], bool)), 2).candidates  # x + y = 0, y = 1, x = 1
        [array([1, 1], dtype=uint8)]
    """

    rank: int
    checks: int
    contradictions: int
    candidates: list[NDArray[np.uint8]]


def pack(bits: NDArray[np.bool_]) -> Words:
    """Rows of booleans as rows of words: column c is bit c % 64 of word c // 64."""
    rows, columns = bits.shape
    padded = np.zeros((rows, -(-columns // 64) * 64), np.uint8)
    padded[:, :columns] = bits
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def solve(equations: Words, unknowns: int) -> Solution:
    """Solve for `unknowns` bits; `equations` is overwritten.

    Args:
        equations: one row for each: its coefficients in the first `unknowns` columns, then the constant that they must
            add up to.
        unknowns: how many bits are sought.
    """
    pivots = _eliminate(equations, unknowns)
    rank = len(pivots)
    word, shift = divmod(unknowns, 64)
    left = (equations[rank:, word] >> np.uint64(shift)) & np.uint64(1)
    contradictions = int(left.sum())
    free = sorted(set(range(unknowns)) - set(pivots))
    guesses = itertools.product((0, 1), repeat=len(free)) if len(free) <= _GUESSED and not contradictions else ()
    candidates = [
        _substitute(equations, pivots, unknowns, [column for column, bit in zip(free, guess, strict=True) if bit])
        for guess in guesses
    ]
    return Solution(rank, len(left) - contradictions, contradictions, candidates)


def _eliminate(rows: Words, columns: int) -> list[int]:
    """Bring `rows` to echelon form in place by the method of the four Russians; the columns of the pivots.

    A table holds the sums of up to eight pivot rows, so one addition clears eight columns of a row. The tables of a
    whole word are collected first, since only that word decides what is to be added; then each row is read once.
    """
    pivots: list[int] = []
    for word in range(-(-columns // 64)):
        rest = rows[len(pivots) :, word:]
        column = rest[:, 0].copy()
        tables: list[tuple[Words, NDArray[np.uint8]]] = []
        chosen: list[int] = []
        for shift in range(0, min(64, columns - 64 * word), _STRIP):
            width = min(_STRIP, columns - 64 * word - shift)
            bits = ((column >> np.uint64(shift)) & np.uint64((1 << width) - 1)).astype(np.uint8)
            bits[chosen] = 0
            picks, offsets, sums = _pivots_of(bits, width)
            if not picks:
                continue
            table = np.zeros((1, rest.shape[1]), np.uint64)
            for pick in picks:
                row = rest[pick].copy()
                for earlier, used in tables:
                    row ^= earlier[used[pick]]
                    used[pick] = 0  # it is stored finished
                row ^= table[sums[pick]]
                sums[pick] = 0
                rest[pick] = row
                column[pick] = row[0]
                table = np.concatenate([table, table ^ row])
            tables.append((table, sums))
            column ^= table[sums, 0]
            chosen += picks
            pivots += [64 * word + shift + offset for offset in offsets]
        _add_tables(rest, tables)
        _to_the_top(rest, chosen)
    return pivots


def _pivots_of(bits: NDArray[np.uint8], width: int) -> tuple[list[int], list[int], NDArray[np.uint8]]:
    """Rows that clear a strip of columns, their columns, and for each row which of them must be added to it."""
    sums = np.zeros_like(bits)
    picks: list[int] = []
    offsets: list[int] = []
    for offset in range(width):
        has = (bits >> np.uint8(offset)) & np.uint8(1)
        pick = int(has.argmax())
        if not has[pick]:
            continue
        value = bits[pick]
        has[pick] = 0
        bits[pick] = 0
        bits ^= has * value
        sums |= has << np.uint8(len(picks))
        picks.append(pick)
        offsets.append(offset)
    return picks, offsets, sums


def _add_tables(rows: Words, tables: list[tuple[Words, NDArray[np.uint8]]]) -> None:
    buffer = np.empty((_CHUNK, rows.shape[1]), np.uint64)
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        for table, sums in tables:
            part = np.take(table, sums[start : start + _CHUNK], axis=0, out=buffer[: len(chunk)], mode="clip")
            np.bitwise_xor(chunk, part, out=chunk)


def _to_the_top(rows: Words, chosen: list[int]) -> None:
    """Move the chosen rows, in their order, above the others."""
    pivots = rows[chosen].copy()
    among = set(chosen)
    displaced = [row for row in range(len(chosen)) if row not in among]
    rows[[row for row in chosen if row >= len(chosen)]] = rows[displaced]
    rows[: len(chosen)] = pivots


def _substitute(rows: Words, pivots: list[int], unknowns: int, ones: list[int]) -> NDArray[np.uint8]:
    """The unknowns of an echelon form, from the last to the first; of those without a pivot, `ones` are 1."""
    solution = np.zeros(rows.shape[1], np.uint64)
    for column in (*ones, unknowns):  # the constant counts always
        word, shift = divmod(column, 64)
        solution[word] |= np.uint64(1 << shift)
    for row in range(len(pivots) - 1, -1, -1):
        if int(np.bitwise_xor.reduce(rows[row] & solution)).bit_count() & 1:
            word, shift = divmod(pivots[row], 64)
            solution[word] |= np.uint64(1 << shift)
    return np.unpackbits(solution.astype("<u8").view(np.uint8), bitorder="little")[:unknowns]
