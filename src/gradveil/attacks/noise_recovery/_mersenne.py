"""The Mersenne Twister MT19937: forwards, backwards, and as linear equations in its state."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gradveil.attacks.noise_recovery._linear import Solution, Words, pack, solve

STATE_BITS = 19_937
_N, _M = 624, 397  # words of the state, and the offset of the recurrence
_TWIST = np.uint32(0x9908B0DF)
_UPPER, _LOWER = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_SEGMENTS = ((0, _N - _M), (_N - _M, 2 * (_N - _M)), (2 * (_N - _M), _N - 1), (_N - 1, _N))

State = NDArray[np.uint32]
"""624 words x[p] to x[p + 623] of the recurrence, before tempering; only the top bit of the first matters."""


@dataclass(frozen=True)
class KnownBits:
    """Known bits of a generator's outputs.

    Args:
        positions: which output of the stream, ``[bits]``.
        bits: which bit of that output, counted from the lowest, ``[bits]``.
        values: 0 or 1, ``[bits]``.

    Example:
        >>> KnownBits(np.array([0, 0]), np.array([31, 30]), np.array([1, 0])).values.sum()
        np.int64(1)
    """

    positions: NDArray[np.int64]
    bits: NDArray[np.int64]
    values: NDArray[np.int64]

    def select(self, where: NDArray[np.bool_] | NDArray[np.int64]) -> "KnownBits":
        """The bits selected by a mask or by indices."""
        return KnownBits(self.positions[where], self.bits[where], self.values[where])


def next_block(state: State) -> State:
    """The next 624 words."""
    new = state.copy()
    for start, stop in _SEGMENTS:
        index = np.arange(start, stop)
        joined = (new[index] & _UPPER) | (new[(index + 1) % _N] & _LOWER)
        new[index] = new[(index + _M) % _N] ^ (joined >> np.uint32(1)) ^ (joined & np.uint32(1)) * _TWIST
    return new


def rewind(state: State, outputs: int) -> State:
    """The state this many outputs earlier; only the top bit of its first word is determined, the others are 0."""
    words = [0] * outputs + state.tolist()
    # x[k+624] ^ x[k+397] = (y >> 1) ^ (y & 1) TWIST, where y joins the top bit of x[k] and the lower bits of x[k+1].
    # The top bit of TWIST is set and that of y >> 1 is not, so the top bit of the sum is the lowest bit of y.
    for k in range(outputs - 1, -1, -1):
        mixed = words[k + _N] ^ words[k + _M]
        low = mixed >> 31
        joined = ((mixed ^ low * int(_TWIST)) << 1 | low) & 0xFFFFFFFF
        words[k] = joined & 0x80000000
        words[k + 1] = words[k + 1] & 0x80000000 | joined & 0x7FFFFFFF
    return np.array(words[:_N], np.uint32)


def temper(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The outputs that belong to words of the recurrence."""
    y = words ^ (words >> np.uint32(11))
    y = y ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
    y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
    result: NDArray[np.uint32] = y ^ (y >> np.uint32(18))
    return result


def untemper(outputs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The words of the recurrence that belong to outputs: the inverse of `temper`."""
    shifts = np.arange(32, dtype=np.uint32)
    bits = (outputs[:, None] >> shifts) & np.uint32(1)
    words = bits @ _untemper_matrix().T.astype(np.uint32) & np.uint32(1)
    result: NDArray[np.uint32] = (words << shifts).sum(1, dtype=np.uint32)
    return result


def find_states(known: KnownBits, start: int) -> tuple[Solution, list[State]]:
    """Find the state whose first word belongs to output `start`, from known bits of later outputs.

    The unknowns are the bits of outputs start + 1 to start + 623, and the top bit of the word of output `start`. Known
    bits of these outputs need no unknown, so the system is small if many bits of consecutive outputs are known.

    Returns:
        The solution (its rank includes the bits that are known directly), and the states that are possible: one, or a
        few if some bits are undetermined, or none.
    """
    within = known.select((known.positions > start) & (known.positions < start + _N))
    output_bits = np.full((_N, 32), -1, np.int64)  # -1: unknown
    output_bits[0, :31] = 0  # these bits have no influence
    output_bits[within.positions - start, within.bits] = within.values
    unknown = output_bits < 0
    count = int(unknown.sum())
    later = known.select(known.positions >= start + _N)
    equations = _equations(_symbolic_state(output_bits), later, start, count)
    solution = solve(equations, count)
    rank = STATE_BITS - count + solution.rank
    states = []
    for bits in solution.candidates:
        output_bits[unknown] = bits
        outputs = (output_bits.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        state = untemper(outputs)
        state[0] = outputs[0]  # the first row holds the word itself, not its output
        states.append(state)
    return replace(solution, rank=rank), states


def _symbolic_state(output_bits: NDArray[np.int64]) -> Words:
    """The bits of the state as sums of the unknown output bits and a constant, ``[624, 32, words]``."""
    unknown = output_bits < 0
    count = int(unknown.sum())
    symbols = np.zeros((_N, 32, count // 64 + 1), np.uint64)
    word, bit = np.nonzero(unknown)
    column = np.arange(count)
    symbols[word, bit, column // 64] = np.uint64(1) << (column % 64).astype(np.uint64)
    symbols[..., count // 64] |= (output_bits == 1).astype(np.uint64) << np.uint64(count % 64)
    untemper_matrix = _untemper_matrix()
    first_word = symbols[0].copy()
    for start in range(0, _N, 104):  # in parts, to keep the memory small
        part = symbols[start : start + 104]
        outputs = part.copy()
        for row in range(32):
            part[:, row] = np.bitwise_xor.reduce(outputs[:, np.flatnonzero(untemper_matrix[row])], axis=1)
    symbols[0] = first_word
    return symbols


def _equations(symbols: Words, known: KnownBits, start: int, unknowns: int) -> Words:
    """One equation per known bit after the first 624 outputs; `symbols` is overwritten."""
    rows = np.empty((len(known.positions), symbols.shape[2]), np.uint64)
    blocks = (known.positions - start) // _N
    for number in range(1, int(blocks.max(initial=0)) + 1):
        _twist_symbols(symbols)
        in_block = np.flatnonzero(blocks == number)
        for bit in np.unique(known.bits[in_block]):
            equations = in_block[known.bits[in_block] == bit]
            words = known.positions[equations] - start - number * _N
            summands = np.flatnonzero(_TEMPER[bit])
            total = symbols[words, summands[0]]
            for summand in summands[1:]:
                total ^= symbols[words, summand]
            rows[equations] = total
    rows[:, unknowns // 64] ^= known.values.astype(np.uint64) << np.uint64(unknowns % 64)
    return rows


def _twist_symbols(symbols: Words) -> None:
    """Advance to the next 624 words in place; the symbolic form of `next_block`."""
    taps = [bit for bit in range(32) if int(_TWIST) >> bit & 1]
    for start, stop in _SEGMENTS:
        index = np.arange(start, stop)
        after = symbols[(index + 1) % _N] if stop == _N else symbols[start + 1 : stop + 1]
        source = (start + _M) % _N
        new = symbols[source : source + stop - start].copy()
        new[:, :30] ^= after[:, 1:31]
        new[:, 30] ^= symbols[start:stop, 31]
        for bit in taps:
            new[:, bit] ^= after[:, 0]
        symbols[start:stop] = new


def _matrix(results: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """The 32 x 32 matrix of a linear map of words, given its results for 1, 2, 4, ...; a row is a bit of the result."""
    return (results[None, :] >> np.arange(32, dtype=np.uint32)[:, None] & np.uint32(1)).astype(bool)


_UNITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
_TEMPER = _matrix(temper(_UNITS))


@cache
def _untemper_matrix() -> NDArray[np.bool_]:
    columns = []
    for unit in np.eye(32, dtype=bool):
        (bits,) = solve(pack(np.c_[_TEMPER, unit]), 32).candidates  # tempering is a bijection
        columns.append(bits.astype(bool))
    return np.array(columns).T


def squared_recurrence() -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The maps by which outputs k + 1248 and k + 794 add up to a function of outputs k + 2, k + 1 and k.

    The recurrence is D^624 + D^397 + L D + U = 0, where D is the step to the next word and the matrices L and U read
    the lower 31 bits and the top one. Its square, D^1248 + D^794 + L^2 D^2 + (L U + U L) D + U^2 = 0, holds as well,
    because scalars commute. The last two terms have few nonzero rows.

    Returns:
        The map of output k + 2, ``[32, 32]``, and those of k + 1 and k side by side, ``[32, 64]``.
    """
    shifted = (_UNITS >> np.uint32(1)) ^ (_UNITS & np.uint32(1)) * _TWIST
    twist = _matrix(shifted).astype(np.int64)
    upper = np.diag(np.arange(32) == 31).astype(np.int64)
    high, low = twist @ upper, twist @ (np.eye(32, dtype=np.int64) - upper)
    to_words, to_outputs = _untemper_matrix().astype(np.int64), _TEMPER.astype(np.int64)
    two_ahead, one_ahead, same = (
        (to_outputs @ matrix @ to_words % 2).astype(bool)
        for matrix in (low @ low, low @ high + high @ low, high @ high)
    )
    return two_ahead, np.c_[one_ahead, same]


def left_null_space(matrix: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A basis, as rows, of all combinations of rows that vanish; for small matrices."""
    rows = np.c_[matrix, np.eye(len(matrix), dtype=bool)]
    columns, rank = matrix.shape[1], 0
    for column in range(columns):
        candidates = np.flatnonzero(rows[rank:, column]) + rank
        if len(candidates):
            rows[[rank, candidates[0]]] = rows[[candidates[0], rank]]
            others = np.flatnonzero(rows[:, column])
            rows[others[others != rank]] ^= rows[rank]
            rank += 1
    basis: NDArray[np.bool_] = rows[rank:, columns:]
    return basis
