r"""Lower confidence bounds on epsilon and mu from repeated games, to hold against what an accountant promises.

In a game, somebody sees the updates of a client and says whether an example was in its data. Differential privacy
limits how often both kinds of errors can be avoided; errors that are rarer than that refute the guarantee. The bounds
hold with the stated confidence whatever the attacker does, provided that no game that is counted was used to choose the
rule by which it was decided.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.extras import OptionalModule

special, stats = (OptionalModule(f"scipy.{part}", "a confidence bound") for part in ("special", "stats"))

CONFIDENCE = 0.999
_NORMAL = NormalDist()
_CANDIDATES = 400  # thresholds that are compared on the games that are not counted


@dataclass(frozen=True)
class Errors:
    """How often a rule that was fixed beforehand was wrong.

    Args:
        false_positives: games without the member in which it was said to be there.
        without: number of games without the member.
        false_negatives: games with the member in which it was said not to be there.
        with_member: number of games with the member.

    Example:
        >>> Errors.at(1.0, with_member=[0.5, 1.5, 2.0], without=[-1.0, 1.0])
        Errors(false_positives=1, without=2, false_negatives=1, with_member=3)
    """

    false_positives: int
    without: int
    false_negatives: int
    with_member: int

    def __post_init__(self) -> None:
        for wrong, of in (("false_positives", "without"), ("false_negatives", "with_member")):
            games = checks.integer("Errors", of, getattr(self, of), low=1)
            checks.integer("Errors", wrong, getattr(self, wrong), low=0, high=games)

    @classmethod
    def at(cls, threshold: float, *, with_member: ArrayLike, without: ArrayLike) -> "Errors":
        """The errors of saying "member" to every score from `threshold` on."""
        inside, outside = _scores(with_member), _scores(without)
        return cls(int((outside >= threshold).sum()), len(outside), int((inside < threshold).sum()), len(inside))

    def upper(self, *, confidence: float = CONFIDENCE, rules: int = 1) -> tuple[float, float]:
        """Upper bounds on the false-positive and the false-negative rate, which hold together.

        Args:
            confidence: probability with which both bounds of all rules hold.
            rules: number of rules whose bounds are used, among which the confidence is divided.

        >>> high, _ = Errors(0, 1000, 0, 1000).upper(confidence=0.998)
        >>> round(1 - (1 - high) ** 1000, 6)  # a higher rate would show no error with probability below 0.001
        0.999
        """
        checks.number("Errors", "confidence", confidence, above=0, below=1)
        checks.integer("Errors", "rules", rules, low=1)
        level = _level(confidence, rules)
        return (
            clopper_pearson(self.false_positives, self.without, level),
            clopper_pearson(self.false_negatives, self.with_member, level),
        )


def clopper_pearson(found: int, games: int, level: float) -> float:
    """The largest probability that is compatible with `found` cases in `games` games (Clopper and Pearson 1934).

    >>> round(clopper_pearson(5, 10, 0.975), 4)
    0.8129
    """
    return float(_upper_bounds(np.array([found]), games, level)[0])


def epsilon_at_least(errors: Errors, *, delta: float, confidence: float = CONFIDENCE, rules: int = 1) -> float:
    r"""A lower confidence bound on the epsilon of whatever was played against, at a given delta.

    .. math:: \epsilon \ge \max \Big( \log \frac{1 - \delta - \beta}{\alpha}, \log \frac{1 - \delta - \alpha}{\beta},
              0 \Big)

    where alpha and beta are upper bounds on the false-positive and the false-negative rate, by Clopper and Pearson,
    which hold together with the stated confidence. The neighbouring relation is that of the game.

    Args:
        errors: errors of a rule that was fixed before these games.
        delta: from 0 on, below 1. The same errors give valid bounds at all deltas at once.
        confidence: probability with which the bound holds, together with those of the other rules.
        rules: number of rules of which the best bound is taken.

    References:
        Kairouz, Oh and Viswanath, ICML 2015 (the inequality); Nasr et al., S&P 2021, and Jagielski, Ullman and Oprea,
        NeurIPS 2020 (as an audit).

    >>> round(epsilon_at_least(Errors(50, 10_000, 50, 10_000), delta=1e-5), 2)
    4.85
    """
    checks.number("epsilon_at_least", "delta", delta, low=0, below=1)
    alpha, beta = errors.upper(confidence=confidence, rules=rules)
    # Clopper and Pearson's upper bounds are never 0.
    return math.log(max(1.0, (1 - delta - beta) / alpha, (1 - delta - alpha) / beta))


def mu_at_least(errors: Errors, *, confidence: float = CONFIDENCE, rules: int = 1) -> float:
    r"""A lower confidence bound on the mu of Gaussian DP.

    .. math:: \mu \ge \Phi^{-1}(1 - \alpha) - \Phi^{-1}(\beta)

    with alpha and beta as in `epsilon_at_least`. A mechanism that promises mu-Gaussian DP and is above it breaks its
    promise; for a mechanism that is not Gaussian (sampled batches) the figure compares with none.

    Args:
        errors: errors of a rule that was fixed before these games.
        confidence: probability with which the bound holds, together with those of the other rules.
        rules: number of rules of which the best bound is taken.

    References:
        Dong, Roth and Su, Gaussian Differential Privacy, JRSSB 2022; Nasr et al., Tight Auditing of Differentially
        Private Machine Learning, USENIX Security 2023.

    >>> round(mu_at_least(Errors(1587, 10_000, 1587, 10_000)), 2)  # as N(0, 1) and N(2, 1), cut at 1
    1.9
    """
    alpha, beta = errors.upper(confidence=confidence, rules=rules)
    if alpha >= 1 or beta >= 1:
        return 0.0
    return max(0.0, -_NORMAL.inv_cdf(alpha) - _NORMAL.inv_cdf(beta))


@dataclass(frozen=True)
class EmpiricalPrivacy:
    """What games refute: lower confidence bounds that hold together.

    Args:
        epsilons: a lower bound on epsilon for each delta.
        mu: a lower bound on mu.
        confidence: probability with which all of them hold.
        errors: the errors that were counted at each threshold.

    Example:
        >>> found = EmpiricalPrivacy({1e-5: 0.5}, 0.4, 0.999, {})
        >>> found.refutes(1e-5, epsilon=0.3), found.refutes(1e-5, epsilon=0.7)
        (True, False)
    """

    epsilons: Mapping[float, float]
    mu: float
    confidence: float
    errors: Mapping[float, Errors]

    def refutes(self, delta: float, epsilon: float) -> bool:
        """Whether the games contradict this (epsilon, delta)."""
        return self.epsilons[delta] > epsilon


def empirical_privacy(
    with_member: ArrayLike,
    without: ArrayLike,
    *,
    deltas: Sequence[float] = (1e-5,),
    confidence: float = CONFIDENCE,
    tuning: float = 0.5,
    thresholds: Sequence[float] | None = None,
) -> EmpiricalPrivacy:
    r"""Lower bounds on epsilon and mu from the scores of games with and without the member.

    The first `tuning` share of the games chooses a threshold for each delta and one for mu, by the bounds that these
    games would give themselves; then they are put aside. The others are counted, and the confidence is divided among
    the thresholds. So the order of the games must not depend on their scores.

    Args:
        with_member: scores of the games with the member, higher where it seems to be there.
        without: scores of the games without it.
        deltas: the deltas at which epsilon is wanted.
        confidence: probability with which all bounds hold together.
        tuning: share of the games that choose the thresholds and are not counted; ignored if `thresholds` is given.
        thresholds: thresholds that were fixed before the games, all of which are then counted.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> found = empirical_privacy(draw.normal(1.0, size=50_000), draw.normal(size=50_000))
        >>> 0.9 < found.mu < 1.0, 1.5 < found.epsilons[1e-5] < 4.4  # N(1, 1) against N(0, 1) has mu = 1
        (True, True)
    """
    owner = "empirical_privacy"
    for delta in deltas:
        checks.number(owner, "every delta", delta, low=0, below=1)
    checks.number(owner, "confidence", confidence, above=0, below=1)
    inside, outside = _scores(with_member), _scores(without)
    if thresholds is None:
        checks.number(owner, "tuning", tuning, above=0, below=1)
        cuts = [int(tuning * len(scores)) for scores in (inside, outside)]
        if min(*cuts, len(inside) - cuts[0], len(outside) - cuts[1]) < 1:
            raise InputError(
                f"{owner}: expected at least one game of each kind to choose thresholds and one to count, got "
                f"{len(inside)} games with the member and {len(outside)} without it"
            )
        chosen = _best_thresholds(inside[: cuts[0]], outside[: cuts[1]], deltas, confidence)
        inside, outside = inside[cuts[0] :], outside[cuts[1] :]
    else:
        chosen = sorted({checks.number(owner, "every threshold", float(value)) for value in thresholds})
        if not chosen:
            raise InputError(f"{owner}: expected at least one threshold, got none; leave thresholds= out to tune one")
    counted = {threshold: Errors.at(threshold, with_member=inside, without=outside) for threshold in chosen}
    rules = len(counted)

    def epsilon(delta: float) -> float:
        bounds = [
            epsilon_at_least(errors, delta=delta, confidence=confidence, rules=rules) for errors in counted.values()
        ]
        return max(bounds)

    mu = max(mu_at_least(errors, confidence=confidence, rules=rules) for errors in counted.values())
    return EmpiricalPrivacy({delta: epsilon(delta) for delta in deltas}, mu, confidence, counted)


def _scores(values: ArrayLike) -> NDArray[np.float64]:
    scores = np.asarray(values, dtype=float)
    if scores.ndim != 1 or scores.size == 0 or not np.isfinite(scores).all():
        raise InputError("empirical privacy: expected one finite score for each of one or more games")
    return scores


def _level(confidence: float, rules: int) -> float:
    """The level of each bound: an error of either kind for each rule shares what the confidence leaves."""
    return 1 - (1 - confidence) / (2 * rules)


def _upper_bounds(found: NDArray[np.int64], games: int, level: float) -> NDArray[np.float64]:
    bounds: NDArray[np.float64] = stats.beta.ppf(level, found + 1, np.maximum(games - found, 1))
    return np.where(found >= games, 1.0, bounds)


def _best_thresholds(
    inside: NDArray[np.float64], outside: NDArray[np.float64], deltas: Sequence[float], confidence: float
) -> list[float]:
    """The threshold with the best bound on each epsilon and on mu, by the games that are not counted."""
    places = np.linspace(0, 1, _CANDIDATES)
    # Quantiles of both kinds, equally spaced in the middle and closer together in the tails.
    levels = np.concatenate([places, 10 ** (-6 * places), 1 - 10 ** (-6 * places)])
    candidates = np.unique(np.concatenate([np.quantile(inside, levels), np.quantile(outside, levels)]))
    level = _level(confidence, len(deltas) + 1)
    false_positives = len(outside) - np.searchsorted(np.sort(outside), candidates)
    false_negatives = np.searchsorted(np.sort(inside), candidates)
    alpha = _upper_bounds(false_positives, len(outside), level)
    beta = _upper_bounds(false_negatives, len(inside), level)
    objectives = [
        np.maximum(np.maximum(1 - delta - beta, 0) / alpha, np.maximum(1 - delta - alpha, 0) / beta) for delta in deltas
    ]
    objectives.append(-special.ndtri(alpha) - special.ndtri(beta))
    return sorted({float(candidates[np.argmax(objective)]) for objective in objectives})
