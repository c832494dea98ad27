r"""Noise on a grid: a float that carries noise must not carry anything of what the noise was added to.

`g + noise` in floating point shows g. The noise lies on a grid of its own, and the sum is rounded by its own size:
which of its last bits can be set depends on g (Mironov, CCS 2012), whatever the noise was made of. Here the value is
rounded to a grid first, :math:`G = round(g / step)`, the noise Z is a whole number of steps, drawn without looking at
g, and what leaves is :math:`step \cdot (G + Z)`. The sum of whole numbers is exact up to 2^53, and everything after it
(a larger sum rounded to nearest, float32, a division by the batch size) is a function of G + Z alone: processing what
was already released. So the guarantee is that of the integer mechanism.

**Normal noise.** Z is a discrete Gaussian (Canonne, Kamath and Steinke, NeurIPS 2020), :math:`P(z) \propto
exp(-z^2 / 2 s^2)`, with s from 2^24 to 2^25 steps. On so fine a grid it is the continuous Gaussian rounded to the
nearest step, but for a factor of :math:`1 + (z^2/s^2 - 1) / 24 s^2`, that is 1 + 2^-46 at eight deviations. The rounded
Gaussian, added to whole numbers, *is* the continuous mechanism followed by rounding, for round(G + X) = G + round(X):
every theorem and accountant of the continuous Gaussian holds for it, sampled batches and composition included.

**How exactly it is drawn.** A sign and a magnitude, by rejection from cells of 2^20 neighbouring values: a cell by an
alias table of whole numbers, which is exact, a value z in it uniformly, and the value is kept with probability
:math:`q_{cell} \, exp(-(z^2 - e^2) / 2 s^2)`, e the cell's smallest value. The exponent is an exact integer times a
constant, so each probability has a relative error below 2^-50. Together with the factor above, one value within eight
deviations changes log-likelihood ratios by less than 2^-45, a round of d values epsilon by less than d / 2^45: 11
million values, 4e-7. Values beyond eight deviations, where a relative error could be larger, have a probability of
1.3e-15 together: they add at most d * 1.3e-15 to delta. (Beyond 16 deviations there is nothing: 1.3e-57.)
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
"""Standard deviations beyond these have grids that double precision cannot count in."""

FINENESS = 24
"""Steps of the grid in a standard deviation: 2^24 and up to twice as many."""

_CELLS = 512
_WITHIN = 20  # bits: 2^20 values a cell, so that a standard deviation is 16 to 32 cells
_CHUNK = 1 << 15  # values drawn at once: what is worked on stays in the caches
# The quick test is in float32. Its slips (2^-21.5 for rounding, 2^-21 for the tables) stay below this margin.
_MARGIN = np.float32(2.0**-19)


def grid_step(std: float) -> float:
    """The grid for noise of standard deviation `std`: a power of two, 2^24 to 2^25 steps a deviation.

    >>> grid_step(1.0) == 2**-24, grid_step(1.9) == 2**-24, grid_step(2.0) == 2**-23
    (True, True, True)
    """
    if not SMALLEST <= std <= LARGEST:
        raise ParameterError(f"noise: its standard deviation must be from {SMALLEST:g} to {LARGEST:g}, got {std:g}")
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - FINENESS)


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
        if not 2.0**FINENESS <= deviation < 2.0 ** (FINENESS + 1):
            raise ValueError(f"expected a deviation from 2^24 to 2^25 steps, got {deviation}")
        self.deviation = deviation
        self._rate = 0.5 / deviation**2
        self._first = np.arange(_CELLS, dtype=np.int32) << _WITHIN
        weights, self._keep = _envelope(self._first.tolist(), deviation)
        self._threshold, self._alias = _alias_table(weights)
        # From here on the whole weights are too small for the quick test to overlook their rounding.
        self._rough = int(self._first[self._keep < 1 - 2.0**-21].min())

    def draw(self, count: int, stream: Keystream) -> Iterator[NDArray[np.int32]]:
        """`count` values, in runs of at most 2^15."""
        size = min(_CHUNK, count + count // 16 + 16)
        bits, threshold = np.empty((3, size), "<u4"), np.empty(size, "<u4")
        cell, other = np.empty(size, np.intp), np.empty(size, np.intp)
        value, exponent, uniform = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.float32)
        single = np.float32
        left = count
        while left:
            stream.fill(bits)
            place, coin, chance = bits  # a sign, two bits that are not used, 9 for the cell, 20 for the place in it
            sign = place.view(np.int32) >> 31
            np.right_shift(place, _WITHIN, out=cell, casting="unsafe")
            np.bitwise_and(cell, _CELLS - 1, out=cell)
            np.take(self._threshold, cell, out=threshold, mode="clip")
            np.take(self._alias, cell, out=other, mode="clip")
            np.copyto(cell, other, where=coin >= threshold)
            np.take(self._first, cell, out=value, mode="clip")
            np.bitwise_and(place, (1 << _WITHIN) - 1, out=place)
            np.add(value, place.view(np.int32), out=value)
            # Quick test, for nearly all: z^2 - e^2 <= 2 z (z - e), and 1 - x <= exp(-x).
            np.multiply(place, single(2 * self._rate), out=exponent, casting="unsafe", dtype=single)
            np.multiply(exponent, value, out=exponent, casting="unsafe", dtype=single)
            np.multiply(chance, single(2.0**-32), out=uniform, casting="unsafe", dtype=single)
            np.add(uniform, exponent, out=exponent)
            kept = exponent < 1 - _MARGIN
            if value.max() >= self._rough:
                kept &= value < self._rough
            doubtful = np.flatnonzero(~kept)
            kept[doubtful] = self._passes(value[doubtful], cell[doubtful], chance[doubtful], stream)
            kept[(value == 0) & (sign < 0)] = False  # zero is there once, not once with each sign
            value ^= sign
            value -= sign
            accepted = value[kept][:left]
            left -= len(accepted)
            yield accepted

    def _passes(
        self, value: NDArray[np.int32], cell: NDArray[np.intp], chance: NDArray[np.uint32], stream: Keystream
    ) -> NDArray[np.bool_]:
        """The exact test; `chance` is the head of a uniform number whose other bits are drawn only now."""
        edge = self._first[cell].astype(np.int64)
        exponent = ((value - edge) * (value + edge)) * self._rate  # the product of whole numbers is exact
        uniform = (chance + stream.doubles(len(chance))) * 2.0**-32
        passes: NDArray[np.bool_] = uniform < self._keep[cell] * np.exp(-exponent)
        return passes


@lru_cache(maxsize=64)
def discrete_gaussian(deviation: float) -> DiscreteGaussian:
    """The sampler for a deviation; its tables take some milliseconds and are kept."""
    return DiscreteGaussian(deviation)


def _envelope(edges: list[int], deviation: float) -> tuple[list[int], NDArray[np.float64]]:
    """Whole-number weights of the cells, and with what probability a cell's most probable value is kept.

    The weights add up to 2^41 and lie above a multiple of the density everywhere; what they lie above it is rejected.
    """
    total = _CELLS << 32
    with decimal.localcontext() as context:
        context.prec = 40
        rate = 1 / (2 * decimal.Decimal(deviation) ** 2)
        density = [(-(decimal.Decimal(edge) ** 2) * rate).exp() for edge in edges]
        scale = (total - _CELLS) / sum(density, decimal.Decimal(0))
        wanted = [scale * value for value in density]
        weights = [math.ceil(value) for value in wanted]
        weights[0] += total - sum(weights)
        keep = [float(value / weight) for value, weight in zip(wanted, weights, strict=True)]
    return weights, np.array(keep)


def _alias_table(weights: list[int]) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """Walker's alias method in whole numbers: column i gives i below its threshold (of a 32-bit word), else its alias.

    A full column would need a threshold of 2^32; it is its own alias instead.
    """
    full = 1 << 32
    left, threshold, alias = list(weights), [0] * len(weights), list(range(len(weights)))
    small = [place for place, weight in enumerate(left) if weight < full]
    large = [place for place, weight in enumerate(left) if weight >= full]
    while small:
        place, donor = small.pop(), large[-1]
        threshold[place], alias[place] = left[place], donor
        left[donor] -= full - left[place]
        if left[donor] < full:
            small.append(large.pop())
    return np.array(threshold, "<u4"), np.array(alias, np.intp)
