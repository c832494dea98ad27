"""Rows of one attack under one defense, in a few numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from gradveil.audit.rows import MethodId, ResultRow
from gradveil.audit.statistics import Interval, median_interval, paired_difference
from gradveil.audit.store import BLIND_GUESS
from gradveil.report.read import Audit


@dataclass(frozen=True)
class Score:
    """What an attack reached over its victims. Medians, since one lucky victim moves a mean.

    `values` are those of the primary metric, one per victim; `mse` is a mean, for the bound is on the mean.

    Example:
        >>> medians = {"psnr": 31.0, "lpips": None}
        >>> Score(3, 2, (20.0, 31.0, 34.0), medians, label_correct=1.0, seconds=2.0, mse=None, bound_mse=None).median
        31.0
    """

    victims: int
    leaked: int
    values: tuple[float, ...]
    medians: Mapping[str, float | None]
    label_correct: float | None
    seconds: float | None
    mse: float | None
    bound_mse: float | None

    @property
    def median(self) -> float:
        """Of the primary metric."""
        return median(self.values)

    @cached_property
    def interval(self) -> Interval:
        """That of the median."""
        return median_interval(self.values)


def score(audit: Audit, rows: Sequence[ResultRow]) -> Score:
    """Sum up at least one row. A metric that no row has is None; nulls do not count towards a median."""
    return Score(
        victims=len(rows),
        leaked=sum(row.leaked for row in rows),
        values=tuple(primary_of(audit, rows).values()),
        medians={metric.name: _known(median, (row.scores[metric.name] for row in rows)) for metric in audit.metrics},
        label_correct=_known(fmean, (row.label_correct for row in rows)),
        seconds=_known(median, (row.seconds for row in rows)),
        mse=_known(fmean, (row.scores.get("mse") for row in rows)),
        bound_mse=_known(fmean, (row.bound_mse for row in rows)),
    )


def scores(audit: Audit) -> dict[tuple[str | None, MethodId], Score]:
    """The score of the blind guess, then of every (defense, attack) that has rows, in the order of the audit."""
    found: dict[tuple[str | None, MethodId], Sequence[ResultRow]] = {(None, MethodId(BLIND_GUESS)): audit.blind}
    found |= {(defense, attack): audit.of(defense, attack) for defense in audit.defenses for attack in audit.attacks}
    return {pair: score(audit, rows) for pair, rows in found.items() if rows}


def strongest(audit: Audit, defense: str) -> tuple[MethodId, Score] | None:
    """The attack that comes closest under `defense`, in the median, and its score; None if none has rows."""
    ran = [(attack, score(audit, rows)) for attack in audit.attacks if (rows := audit.of(defense, attack))]
    return max(ran, key=lambda pair: audit.primary.closeness(pair[1].median), default=None)


def primary_of(audit: Audit, rows: Iterable[ResultRow]) -> dict[int, float]:
    """The score by the primary metric, by victim."""
    found = {row.victim: row.scores[audit.primary.name] for row in rows}
    return {victim: value for victim, value in found.items() if value is not None}


def closeness_of(audit: Audit, rows: Iterable[ResultRow]) -> dict[int, float]:
    """The same, turned so that more is always closer."""
    return {victim: audit.primary.closeness(value) for victim, value in primary_of(audit, rows).items()}


def difference_to_plain(audit: Audit, defense: str, attack: MethodId) -> Interval | None:
    """An adaptive attack's score minus its plain form's, paired by victim; None if one of them did not run."""
    if not attack.adaptive:
        return None
    return _difference(audit, audit.of(defense, attack), audit.of(defense, MethodId(attack.spec)))


def difference_to_undefended(audit: Audit, defense: str, attack: MethodId) -> Interval | None:
    """An attack's score under a defense minus that without one, paired by victim; None without such rows."""
    return _difference(audit, audit.of(defense, attack), audit.without_defense(attack))


def gain(audit: Audit, found: Interval) -> Interval:
    """A difference as what it brings the attacker: more is closer to the original."""
    estimate, low, high = map(audit.primary.closeness, (found.estimate, found.low, found.high))
    return Interval(estimate, min(low, high), max(low, high))


def _difference(audit: Audit, ones: Iterable[ResultRow], others: Iterable[ResultRow]) -> Interval | None:
    return paired_difference(primary_of(audit, ones), primary_of(audit, others))


def _known(average: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return average(present) if present else None
