"""Linear equations over GF(2), with bits packed into 64-bit words."""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MAX_GUESSED = 4  # undetermined bits for which both values are tried
_STRIP = 8  # columns that one table of sums covers
_CHUNK = 64  # rows updated together, so that they stay in the cache while all tables of a word are added


@dataclass(frozen=True)
class Solution:
    """The solution of a system of equations over GF(2).

    Args:
        rank: number of independent equations.
        checks: number of redundant equations that hold; each would fail with probability 1/2 in a random system.
        contradictions: number of redundant equations that do not hold.
        candidates: possible values of the unknowns; none if there are contradictions or more than four bits are left
            undetermined.

    Example:
        >>> solve(pack(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], bool)), 2).candidates  # x + y = 0, y = 1, x = 1
        [array([1, 1], dtype=uint8)]
    """

    rank: int
    checks: int
    contradictions: int
    candidates: list[NDArray[np.uint8]]


def pack(bits: NDArray[np.bool_]) -> Words:
    """Pack rows of booleans into rows of words: column c becomes bit c % 64 of word c // 64."""
    rows, columns = bits.shape
    padded = np.zeros((rows, -(-columns // 64) * 64), np.uint8)
    padded[:, :columns] = bits
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def solve(equations: Words, unknowns: int) -> Solution:
    """Solve for `unknowns` bits; `equations` is overwritten.

    Args:
        equations: one row per equation: the coefficients in the first `unknowns` columns, then the constant on the
            right-hand side.
        unknowns: number of unknown bits.
    """
    pivots = _eliminate(equations, unknowns)
    rank = len(pivots)
    word, shift = divmod(unknowns, 64)
    redundant = (equations[rank:, word] >> np.uint64(shift)) & np.uint64(
        1
    )  # no coefficients left: the constant must be 0
    contradictions = int(redundant.sum())
    free = sorted(set(range(unknowns)) - set(pivots))
    guesses = itertools.product((0, 1), repeat=len(free)) if len(free) <= _MAX_GUESSED and not contradictions else ()
    candidates = [
        _substitute(equations, pivots, unknowns, [column for column, bit in zip(free, guess, strict=True) if bit])
        for guess in guesses
    ]
    return Solution(rank, len(redundant) - contradictions, contradictions, candidates)


def _eliminate(rows: Words, columns: int) -> list[int]:
    """Bring `rows` to echelon form in place by the method of the four Russians; returns the columns of the pivots.

    A table holds the sums of up to eight pivot rows, so one addition clears eight columns of a row. The tables of a
    whole word are collected first, because only that word decides what is added; then each row is read just once.
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
                    used[pick] = 0  # because the row is stored with these sums already added
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
        _move_to_top(rest, chosen)
    return pivots


def _pivots_of(bits: NDArray[np.uint8], width: int) -> tuple[list[int], list[int], NDArray[np.uint8]]:
    """The pivot rows of a strip of columns, their columns, and for each row a mask of the pivots to add to it."""
    sums = np.zeros_like(bits)
    picks: list[int] = []
    offsets: list[int] = []
    for offset in range(width):
        column = (bits >> np.uint8(offset)) & np.uint8(1)
        pick = int(column.argmax())
        if not column[pick]:
            continue
        value = bits[pick]
        column[pick] = 0
        bits[pick] = 0
        bits ^= column * value
        sums |= column << np.uint8(len(picks))
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


def _move_to_top(rows: Words, chosen: list[int]) -> None:
    """Move the chosen rows, in their order, above the others."""
    pivots = rows[chosen].copy()
    displaced = sorted(set(range(len(chosen))) - set(chosen))
    rows[[row for row in chosen if row >= len(chosen)]] = rows[displaced]
    rows[: len(chosen)] = pivots


def _substitute(rows: Words, pivots: list[int], unknowns: int, ones: list[int]) -> NDArray[np.uint8]:
    """Solve an echelon form by back substitution; of the unknowns without a pivot, those in `ones` are 1."""
    solution = np.zeros(rows.shape[1], np.uint64)
    for column in (*ones, unknowns):  # the constant is always included
        word, shift = divmod(column, 64)
        solution[word] |= np.uint64(1 << shift)
    for row in range(len(pivots) - 1, -1, -1):
        if int(np.bitwise_xor.reduce(rows[row] & solution)).bit_count() & 1:
            word, shift = divmod(pivots[row], 64)
            solution[word] |= np.uint64(1 << shift)
    return np.unpackbits(solution.astype("<u8").view(np.uint8), bitorder="little")[:unknowns]
