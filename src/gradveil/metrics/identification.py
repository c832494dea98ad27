"""How well members are told from other candidates: areas, rates, shares and bits, each with an interval over games."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.extras import OptionalModule
from gradveil.core.randomness import derived_generator

stats = OptionalModule("scipy.stats", "a confidence interval")

LEVEL = 0.95
RESAMPLES = 2000
FEWEST_GAMES = 6
"""With fewer games, not even their range is a 95 % interval (see `gradveil.audit.statistics`)."""


@dataclass(frozen=True)
class Estimate:
    """A figure over games and its 95 % interval, which is infinite if there are too few games.

    Args:
        value: the figure.
        low: the lower end of the interval.
        high: its upper end.

    Example:
        >>> Estimate(0.9, 0.85, 0.94).high
        0.94
    """

    value: float
    low: float
    high: float


def auc(scores: Tensor, members: Tensor) -> float:
    """The area under the ROC curve: how often a member scores higher than another candidate; a tie counts half.

    In words: 0.5 is a guess, 1 is certainty (Mann and Whitney 1947).

    Args:
        scores: ``[N]``.
        members: ``[N]``, True for members.

    >>> auc(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([True, False, True, False]))
    0.875
    """
    _check_game("auc", scores, members)
    _, distinct, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2  # equal scores share their mean rank
    inside, outside = int(members.sum()), int((~members).sum())
    return float((ranks[distinct][members].sum() - inside * (inside + 1) / 2) / (inside * outside))


def true_positive_rate(scores: Tensor, members: Tensor, *, false_positives: float = 0.01) -> float:
    """The share of members above a threshold that at most this share of the other candidates exceeds.

    Args:
        scores: ``[N]``.
        members: ``[N]``, True for members.
        false_positives: the share of other candidates that may be called members. Of fewer than 1 / `false_positives`
            other candidates none may.

    >>> true_positive_rate(torch.tensor([3.0, 1.0, 2.0, 2.5]), torch.tensor([True, True, False, False]))
    0.5
    """
    _check_game("true_positive_rate", scores, members)
    checks.number("true_positive_rate", "false_positives", false_positives, low=0, below=1)
    others = scores[~members].sort(descending=True).values
    threshold = others[math.floor(false_positives * len(others))]
    return float((scores[members] > threshold).double().mean())


def share_named(scores: Tensor, members: Tensor) -> float:
    """The share of members among the k highest scores, if there are k members; ties count as if broken at random.

    For a single member this is whether it has the highest score.

    Args:
        scores: ``[N]``.
        members: ``[N]``, True for members.

    >>> share_named(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([True, False, True, False]))
    0.75
    """
    _check_game("share_named", scores, members)
    count = int(members.sum())
    threshold = scores.topk(count).values[-1]
    above, tied = scores > threshold, scores == threshold
    places = (count - int(above.sum())) / int(tied.sum())
    return (int((members & above).sum()) + places * int((members & tied).sum())) / count


def over_games(metric: Callable[[Tensor, Tensor], float], scores: Tensor, members: Tensor) -> Estimate:
    """The mean of a metric over games, with its percentile-bootstrap interval; the resampling is seeded.

    Args:
        metric: of one game, such as `auc`.
        scores: ``[games, N]``.
        members: ``[games, N]``, True for members.

    >>> scores = torch.tensor([[3.0, 1.0, 2.0]] * 8)
    >>> over_games(auc, scores, torch.tensor([[True, False, False]] * 8))
    Estimate(value=1.0, low=1.0, high=1.0)
    """
    return mean_estimate(
        torch.tensor([metric(*game) for game in zip(scores, members, strict=True)], dtype=torch.float64)
    )


def mean_estimate(values: Tensor) -> Estimate:
    """The mean of some games' figures, with its percentile-bootstrap interval; the resampling is seeded.

    Args:
        values: ``[games]``, in double precision.

    >>> mean_estimate(torch.ones(8, dtype=torch.float64))
    Estimate(value=1.0, low=1.0, high=1.0)
    """
    if len(values) < FEWEST_GAMES:
        return Estimate(float(values.mean()), -math.inf, math.inf)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=derived_generator(0, "games", len(values)))
    low, high = values[drawn].mean(1).quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64))
    return Estimate(float(values.mean()), float(low), float(high))


def proportion(successes: int, games: int) -> Estimate:
    """A proportion with its exact interval (Clopper and Pearson 1934).

    >>> proportion(0, 10).high < 0.31, proportion(5, 10).value
    (True, 0.5)
    """
    checks.integer("proportion", "games", games, low=1)
    checks.integer("proportion", "successes", successes, low=0, high=games)
    tail, failures = (1 - LEVEL) / 2, games - successes
    low = float(stats.beta.ppf(tail, successes, failures + 1)) if successes else 0.0
    high = float(stats.beta.ppf(1 - tail, successes + 1, failures)) if failures else 1.0
    return Estimate(successes / games, low, high)


def rank_one_accuracy(scores: Tensor, members: Tensor) -> Estimate:
    """How often a single member has the highest score, as a `proportion`; a tie for it is a failure.

    Args:
        scores: ``[games, N]``.
        members: ``[games, N]``, True for the one member of each game.

    >>> rank_one_accuracy(torch.tensor([[3.0, 1.0], [1.0, 2.0]]), torch.tensor([[True, False]] * 2)).value
    0.5
    """
    if bool((members.sum(1) != 1).any()):
        raise InputError(
            f"rank_one_accuracy: expected one member in every game, got {sorted(set(members.sum(1).tolist()))}; use "
            "share_named"
        )
    named = [share_named(*game) == 1.0 for game in zip(scores, members, strict=True)]
    return proportion(sum(named), len(named))


def information_bits(accuracy: Estimate, candidates: int) -> Estimate:
    r"""A lower bound on the bits that an update gives away about which of N equally likely candidates is the member.

    .. math:: I \ge \log_2 N - H_2(e) - e \log_2 (N - 1), \qquad e = 1 - accuracy

    This is Fano's inequality (Cover and Thomas, Elements of Information Theory, 2.10). It bounds the mutual information
    between member and update, whatever the attack; a better attack gives a better bound. It holds for the true
    accuracy, so its lower end is that of the interval of `accuracy`. It says nothing about the other examples of a
    batch, and uses only the highest score: it may be 0 although the ranking of the candidates reveals something.

    Args:
        accuracy: how often the member has the highest score, see `rank_one_accuracy`.
        candidates: N.

    >>> information_bits(Estimate(1.0, 1.0, 1.0), 1024).value, information_bits(Estimate(0.25, 0.0, 1.0), 4).low
    (10.0, 0.0)
    """
    checks.integer("information_bits", "candidates", candidates, low=2)

    def bits(right: float) -> float:
        if right <= 1 / candidates:  # a guess, or worse
            return 0.0
        wrong = 1 - right
        entropy = -sum(p * math.log2(p) for p in (right, wrong) if p > 0)
        return math.log2(candidates) - entropy - wrong * math.log2(candidates - 1)

    return Estimate(*(bits(right) for right in (accuracy.value, accuracy.low, accuracy.high)))


def class_mix(classes: Tensor, members: Tensor) -> float:
    r"""How likely a mix of classes as unusual as the members' is, if members are drawn from the candidates at random.

    This is the p-value of Pearson's test with the classes of all games' members, :math:`O_k`, against their share of
    the candidates, :math:`\chi^2 = \sum_k (O_k - E_k)^2 / E_k`. An update often reveals classes. If members and other
    candidates differ in their classes, an attacker who reads nothing else seems to name members.

    Args:
        classes: ``[N]``, the class of each candidate.
        members: ``[games, N]``, True for members.

    >>> classes = torch.tensor([0, 1] * 10)
    >>> class_mix(classes, torch.eye(20).bool()), class_mix(classes, torch.eye(20).bool()[::2]) < 0.01
    (1.0, True)
    """
    _, place, counts = torch.unique(classes, return_inverse=True, return_counts=True)
    observed = torch.zeros(len(counts), dtype=torch.float64).index_add(0, place, members.double().sum(0))
    expected = counts.double() / len(classes) * observed.sum()
    return float(stats.chi2.sf(float(((observed - expected).square() / expected).sum()), max(1, len(counts) - 1)))


def summary(scores: Tensor, members: Tensor) -> dict[str, Estimate]:
    """All figures of some games that have equally many members each; rank-1 accuracy and bits only of single ones.

    Args:
        scores: ``[games, N]``.
        members: ``[games, N]``, True for members.

    >>> list(summary(torch.tensor([[3.0, 1.0, 2.0]] * 8), torch.tensor([[True, False, False]] * 8)))
    ['auc', 'tpr_at_1_percent', 'share_named', 'rank_one', 'bits']
    """
    metrics: Sequence[tuple[str, Callable[[Tensor, Tensor], float]]] = [
        ("auc", auc),
        ("tpr_at_1_percent", true_positive_rate),
        ("share_named", share_named),
    ]
    found = {name: over_games(metric, scores, members) for name, metric in metrics}
    if bool((members.sum(1) == 1).all()):
        found["rank_one"] = rank_one_accuracy(scores, members)
        found["bits"] = information_bits(found["rank_one"], scores.shape[1])
    return found


def _check_game(owner: str, scores: Tensor, members: Tensor) -> None:
    if scores.ndim != 1 or scores.shape != members.shape or members.dtype != torch.bool:
        raise InputError(
            f"{owner}: expected scores and a mask of members, two vectors of the same length, got shapes "
            f"{list(scores.shape)} and {list(members.shape)} ({members.dtype})"
        )
    if bool(members.all()) or not bool(members.any()):
        raise InputError(
            f"{owner}: expected members and other candidates, got {int(members.sum())} members of {len(members)}"
        )
    if bool(scores.isnan().any()):
        raise InputError(f"{owner}: expected scores that are numbers, got NaN")
