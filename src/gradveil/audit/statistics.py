"""What can be concluded from a handful of victims: bootstrap intervals, paired differences, sign tests, ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradveil.core import checks
from gradveil.core.extras import OptionalModule

stats = OptionalModule("scipy.stats", "a confidence interval")  # takes a second to import

LEVEL = 0.95
RESAMPLES = 4000
FEWEST = 6
"""Below this many victims there is no 95 % interval for a median: even the range from the lowest to the highest of n
values holds it only with probability 1 - 2^(1-n), 94 % for five."""


@dataclass(frozen=True)
class Interval:
    """A median over victims and its 95 % interval, which is infinite if there are too few of them.

    Example:
        >>> Interval(2.0, 0.5, 3.0).separated, Interval(2.0, -0.5, 3.0).separated
        (True, False)
    """

    estimate: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there were enough victims for an interval."""
        return math.isfinite(self.low)

    @property
    def separated(self) -> bool:
        """Whether zero lies outside the interval: a difference that is more than chance."""
        return self.low > 0 or self.high < 0


def median_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """The median and its percentile-bootstrap interval over victims.

    It uses the median because a single victim that is recovered to the last bit (100 dB) can move a mean. Measured
    coverage of the 95 % interval on normal, heavy-tailed and skewed values: 91 to 95 % from six victims on, where that
    of a mean's interval drops to 77 %. The resampling is seeded: equal rows give equal intervals.

    Args:
        values: one per victim, at least one; fewer than six have no interval.
        level: the probability with which the interval should hold the true median.

    References:
        Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.

    Example:
        >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        Interval(estimate=4.5, low=2.0, high=7.0)
        >>> median_interval([1.0, 2.0]).known
        False
    """
    checks.number("median_interval", "level", level, above=0, below=1)
    sample = np.asarray(values, dtype=np.float64)
    estimate = float(np.median(sample))
    if len(sample) < FEWEST:
        return Interval(estimate, -math.inf, math.inf)
    medians = np.median(sample[_resamples(len(sample))], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high))


def paired_difference(
    ones: Mapping[int, float], others: Mapping[int, float], *, level: float = LEVEL
) -> Interval | None:
    """The median over victims of `ones` minus `others`, with its interval; None if they share no victim.

    Both sides see the same victims, so an easy victim is easy for both: the pairs are resampled, not the two sides.

    Args:
        ones: a value by victim.
        others: the same; victims that only one side has are left out.
        level: see `median_interval`.

    Example:
        >>> easy, hard = {v: 30.0 + 5 * v for v in range(8)}, {v: 28.0 + 5 * v for v in range(8)}
        >>> paired_difference(easy, hard)
        Interval(estimate=2.0, low=2.0, high=2.0)
    """
    shared = sorted(ones.keys() & others.keys())
    return median_interval([ones[victim] - others[victim] for victim in shared], level=level) if shared else None


def sign_test(wins: int, losses: int) -> float:
    """The probability of at least `wins` of ``wins + losses`` pairs by chance, if both ways are equally likely.

    The exact one-sided sign test; on pairs of yes and no it is McNemar's exact test. Pairs without a difference do not
    count.

    References:
        McNemar, Note on the sampling error of the difference between correlated proportions, Psychometrika 1947.

    Args:
        wins: pairs that differ in the expected way.
        losses: pairs that differ the other way.

    Example:
        >>> sign_test(5, 0), sign_test(4, 0), sign_test(0, 0)
        (0.03125, 0.0625, 1.0)
    """
    checks.integer("sign_test", "wins", wins, low=0)
    checks.integer("sign_test", "losses", losses, low=0)
    pairs = wins + losses
    return float(sum(math.comb(pairs, count) for count in range(wins, pairs + 1)) / 2**pairs)


@dataclass(frozen=True, order=True)
class Rank:
    """The range of places that a contender can have: 1 is the lowest value.

    Example:
        >>> str(Rank(1, 3)), str(Rank(2, 2))
        ('1–3', '2')
    """

    best: int
    worst: int

    def __str__(self) -> str:
        return str(self.best) if self.best == self.worst else f"{self.best}–{self.worst}"


def rank(values: Mapping[str, Mapping[int, float]]) -> dict[str, Rank]:
    """Rank contenders by value, lowest first, only as far as the paired intervals separate them.

    A contender comes after those that are lower and before those that are higher, if the interval of the difference
    excludes zero; the others are not ordered, and the place is a range.

    Args:
        values: for each contender, a value by victim.

    Example:
        >>> low, near = {v: 5.0 + v for v in range(8)}, {v: 5.0 + v + (-1) ** v for v in range(8)}
        >>> high = {v: 30.0 + v for v in range(8)}
        >>> {name: str(place) for name, place in rank({"high": high, "low": low, "near": near}).items()}
        {'high': '3', 'low': '1–2', 'near': '1–2'}
    """
    places = {}
    for name, own in values.items():
        differences = [paired_difference(own, others) for other, others in values.items() if other != name]
        separated = [interval for interval in differences if interval is not None and interval.separated]
        lower = sum(interval.low > 0 for interval in separated)
        higher = sum(interval.high < 0 for interval in separated)
        places[name] = Rank(1 + lower, len(values) - higher)
    return places


def possible_share(found: int, victims: int, *, level: float = LEVEL) -> float:
    """The largest true share of leaking victims compatible with `found` of `victims` (Clopper and Pearson 1934).

    >>> round(possible_share(0, 8), 2), round(possible_share(0, 3), 2)
    (0.31, 0.63)
    """
    return 1.0 if found >= victims else float(stats.beta.ppf(level, found + 1, victims - found))


@lru_cache(maxsize=8)
def _resamples(count: int) -> NDArray[np.int64]:
    """Indices ``[resamples, count]`` drawn with replacement, the same ones at every call."""
    return np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
