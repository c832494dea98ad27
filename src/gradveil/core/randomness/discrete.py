r"""Noise on a grid: the last bits of a noisy float must not reveal the value that the noise was added to.

In floating point, `g + noise` reveals g. The noise lies on a grid of its own, and the sum is rounded according to its
size, so which of its last bits can be set depends on g (Mironov, CCS 2012), however the noise was drawn. Here the value
is first rounded to a grid, :math:`G = round(g / step)`; the noise Z is a whole number of steps, drawn independently of
g; and the result is :math:`step \cdot (G + Z)`. The sum of whole numbers is exact up to 2^53, and everything after it
(a larger sum rounded to nearest, float32, a division by the batch size) is a function of G + Z alone, which is
post-processing. The guarantee is therefore that of the integer mechanism.

**Normal noise.** Z is a discrete Gaussian (Canonne, Kamath and Steinke, NeurIPS 2020), :math:`P(z) \propto
exp(-z^2 / 2 s^2)`, with s from 2^24 to 2^25 steps. On so fine a grid it is the continuous Gaussian rounded to the
nearest step, except for a factor of :math:`1 + (z^2/s^2 - 1) / 24 s^2`, that is 1 + 2^-46 at eight deviations. The
rounded Gaussian, added to whole numbers, *is* the continuous mechanism followed by rounding, because round(G + X) =
G + round(X). Every theorem and accountant of the continuous Gaussian therefore holds for it, including sampled batches
and composition.

**How exactly it is drawn.** A sign and a magnitude are drawn by rejection from cells of 2^20 neighbouring values: a
cell by an alias table of whole numbers, which is exact, then a value z in it uniformly. The value is kept with
probability :math:`q_{cell} \, exp(-(z^2 - e^2) / 2 s^2)`, where e is the cell's smallest value. The exponent is
an exact integer times a constant, so each probability has a relative error below 2^-50. Together with the factor above,
one value within eight deviations changes log-likelihood ratios by less than 2^-45, and a round of d values changes
epsilon by less than d / 2^45: 4e-7 for 11 million values. Values beyond eight deviations, where a relative error could
be larger, have a total probability of 1.3e-15: they add at most d * 1.3e-15 to delta. (Values beyond 16 deviations
are never drawn; their probability would be 1.3e-57.)
"""

import decimal
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradveil.core.errors import ParameterError
from gradveil.core.randomness._stream import Keystream

SMALLEST, LARGEST = 1e-280, 1e280
"""Standard deviations outside this range would need grids that double precision cannot represent."""

LOG2_STEPS = 24
"""Binary logarithm of the grid steps in a standard deviation: there are 2^24 to 2^25."""

_CELLS = 512
_CELL_BITS = 20  # bits: 2^20 values per cell, so that a standard deviation is 16 to 32 cells
_CHUNK = 1 << 15  # values drawn at once, so that the working set fits in the caches
# The quick test is in float32. Its errors (2^-21.5 from rounding, 2^-21 from the tables) stay below this margin.
_MARGIN = np.float32(2.0**-19)


def grid_step(std: float) -> float:
    """The grid for noise of standard deviation `std`: a power of two, 2^24 to 2^25 steps per deviation.

    >>> grid_step(1.0) == 2**-24, grid_step(1.9) == 2**-24, grid_step(2.0) == 2**-23
    (True, True, True)
    """
    if not SMALLEST <= std <= LARGEST:
        raise ParameterError(f"noise: its standard deviation must be from {SMALLEST:g} to {LARGEST:g}, got {std:g}")
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - LOG2_STEPS)


class DiscreteGaussian:
    r"""Whole numbers z with probability proportional to :math:`exp(-z^2 / 2 s^2)`.

    Args:
        deviation: s, from 2^24 to 2^25.

    Example:
        >>> [drawn] = DiscreteGaussian(2.0**24).draw(20_000, Keystream(bytes(32)))
        >>> bool(abs(drawn.std() / 2**24 - 1) < 0.02)
        True
    """

    def __init__(self, deviation: float) -> None:
        if not 2.0**LOG2_STEPS <= deviation < 2.0 ** (LOG2_STEPS + 1):
            raise ValueError(f"expected a deviation from 2^24 to 2^25 steps, got {deviation}")
        self.deviation = deviation
        self._rate = 0.5 / deviation**2
        self._edges = np.arange(_CELLS, dtype=np.int32) << _CELL_BITS
        weights, self._keep = _envelope(self._edges.tolist(), deviation)
        self._threshold, self._alias = _alias_table(weights)
        # From this value on the quick test does not apply: the rounding of the small integer weights matters.
        self._quick_limit = int(self._edges[self._keep < 1 - 2.0**-21].min())

    def draw(self, count: int, stream: Keystream) -> Iterator[NDArray[np.int32]]:
        """Yield `count` values, in runs of at most 2^15."""
        size = min(_CHUNK, count + count // 16 + 16)
        bits, threshold = np.empty((3, size), "<u4"), np.empty(size, "<u4")
        cell, other = np.empty(size, np.intp), np.empty(size, np.intp)
        value, exponent, uniform = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.float32)
        float32 = np.float32
        left = count
        while left:
            stream.fill(bits)
            # `place` holds a sign, two unused bits, 9 bits for the cell and 20 for the place within it.
            place, coin, chance = bits
            sign = place.view(np.int32) >> 31
            np.right_shift(place, _CELL_BITS, out=cell, casting="unsafe")
            np.bitwise_and(cell, _CELLS - 1, out=cell)
            np.take(self._threshold, cell, out=threshold, mode="clip")
            np.take(self._alias, cell, out=other, mode="clip")
            np.copyto(cell, other, where=coin >= threshold)
            np.take(self._edges, cell, out=value, mode="clip")
            np.bitwise_and(place, (1 << _CELL_BITS) - 1, out=place)
            np.add(value, place.view(np.int32), out=value)
            # Quick test, which settles nearly all values: z^2 - e^2 <= 2 z (z - e), and 1 - x <= exp(-x).
            np.multiply(place, float32(2 * self._rate), out=exponent, casting="unsafe", dtype=float32)
            np.multiply(exponent, value, out=exponent, casting="unsafe", dtype=float32)
            np.multiply(chance, float32(2.0**-32), out=uniform, casting="unsafe", dtype=float32)
            np.add(uniform, exponent, out=exponent)
            kept = exponent < 1 - _MARGIN
            if value.max() >= self._quick_limit:
                kept &= value < self._quick_limit
            doubtful = np.flatnonzero(~kept)
            kept[doubtful] = self._passes(value[doubtful], cell[doubtful], chance[doubtful], stream)
            kept[(value == 0) & (sign < 0)] = False  # zero must count once, not once per sign
            value ^= sign
            value -= sign
            accepted = value[kept][:left]
            left -= len(accepted)
            yield accepted

    def _passes(
        self, value: NDArray[np.int32], cell: NDArray[np.intp], chance: NDArray[np.uint32], stream: Keystream
    ) -> NDArray[np.bool_]:
        """The exact test; `chance` holds the leading bits of a uniform number whose other bits are drawn only now."""
        edge = self._edges[cell].astype(np.int64)
        exponent = ((value - edge) * (value + edge)) * self._rate  # the product of whole numbers is exact
        uniform = (chance + stream.doubles(len(chance))) * 2.0**-32
        passes: NDArray[np.bool_] = uniform < self._keep[cell] * np.exp(-exponent)
        return passes


@lru_cache(maxsize=64)
def discrete_gaussian(deviation: float) -> DiscreteGaussian:
    """The sampler for a deviation; it is cached because its tables take some milliseconds."""
    return DiscreteGaussian(deviation)


def _envelope(edges: list[int], deviation: float) -> tuple[list[int], NDArray[np.float64]]:
    """Whole-number weights of the cells, and the probability with which a cell's most probable value is kept.

    The weights add up to 2^41 and lie above a multiple of the density everywhere; the excess is rejected.
    """
    total = _CELLS << 32
    with decimal.localcontext() as context:
        context.prec = 40
        rate = 1 / (2 * decimal.Decimal(deviation) ** 2)
        density = [(-(decimal.Decimal(edge) ** 2) * rate).exp() for edge in edges]
        scale = (total - _CELLS) / sum(density, decimal.Decimal(0))
        target = [scale * value for value in density]
        weights = [math.ceil(value) for value in target]
        weights[0] += total - sum(weights)
        keep = [float(value / weight) for value, weight in zip(target, weights, strict=True)]
    return weights, np.array(keep)


def _alias_table(weights: list[int]) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """Walker's alias method in whole numbers: column i gives i if a 32-bit word is below its threshold, else its alias.

    A full column would need a threshold of 2^32; it is its own alias instead.
    """
    full = 1 << 32
    left, threshold, alias = list(weights), [0] * len(weights), list(range(len(weights)))
    small = [column for column, weight in enumerate(left) if weight < full]
    large = [column for column, weight in enumerate(left) if weight >= full]
    while small:
        column, donor = small.pop(), large[-1]
        threshold[column], alias[column] = left[column], donor
        left[donor] -= full - left[column]
        if left[donor] < full:
            small.append(large.pop())
    return np.array(threshold, "<u4"), np.array(alias, np.intp)
