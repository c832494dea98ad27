"""Summary statistics of the rows of one attack under one defense."""

from collections import Counter
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
    """What an attack reached over its victims, as medians, because one lucky victim shifts a mean.

    `rules` counts the victims that leaked by the rule that decided. `values` holds the primary metric of each victim.
    `mse` is a mean because the bound is on the mean.

    Example:
        >>> medians = {"psnr": 31.0, "lpips": None}
        >>> rules = {"pixels": 2}
        >>> Score(3, rules, (20.0, 31.0, 34.0), medians, 1.0, seconds=2.0, mse=None, bound_mse=None).leaked
        2
    """

    victims: int
    rules: Mapping[str, int]
    values: tuple[float, ...]
    medians: Mapping[str, float | None]
    label_correct: float | None
    seconds: float | None
    mse: float | None
    bound_mse: float | None

    @property
    def leaked(self) -> int:
        """How many victims leaked."""
        return sum(self.rules.values())

    @property
    def median(self) -> float:
        """The median of the primary metric."""
        return median(self.values)

    @cached_property
    def interval(self) -> Interval:
        """The 95 % interval of that median."""
        return median_interval(self.values)


def score(audit: Audit, rows: Sequence[ResultRow]) -> Score:
    """Summarise at least one row. Nulls do not count towards a median; a metric that is null in all rows is None."""
    return Score(
        victims=len(rows),
        rules=Counter(row.leak_rule for row in rows if row.leak_rule is not None),
        values=tuple(primary_of(audit, rows).values()),
        medians={
            metric.name: _average_of_known(median, (row.scores[metric.name] for row in rows))
            for metric in audit.metrics
        },
        label_correct=_average_of_known(fmean, (row.label_correct for row in rows)),
        seconds=_average_of_known(median, (row.seconds for row in rows)),
        mse=_average_of_known(fmean, (row.scores.get("mse") for row in rows)),
        bound_mse=_average_of_known(fmean, (row.bound_mse for row in rows)),
    )


def scores(audit: Audit) -> dict[tuple[str | None, MethodId], Score]:
    """Scores of the blind guess, then of every (defense, attack) that has rows, in the order of the audit."""
    by_pair: dict[tuple[str | None, MethodId], Sequence[ResultRow]] = {(None, MethodId(BLIND_GUESS)): audit.blind}
    by_pair |= {
        (defense, attack): audit.rows_of(defense, attack) for defense in audit.defenses for attack in audit.attacks
    }
    return {pair: score(audit, rows) for pair, rows in by_pair.items() if rows}


def strongest(audit: Audit, defense: str) -> tuple[MethodId, Score] | None:
    """The attack whose median is closest under `defense`, with its score; None if no attack has rows."""
    ran = [(attack, score(audit, rows)) for attack in audit.attacks if (rows := audit.rows_of(defense, attack))]
    return max(ran, key=lambda pair: audit.primary.closeness(pair[1].median), default=None)


def primary_of(audit: Audit, rows: Iterable[ResultRow]) -> dict[int, float]:
    """The primary metric of each victim that has one."""
    by_victim = {row.victim: row.scores[audit.primary.name] for row in rows}
    return {victim: value for victim, value in by_victim.items() if value is not None}


def closeness_of(audit: Audit, rows: Iterable[ResultRow]) -> dict[int, float]:
    """The primary metric of each victim, with its sign changed if needed so that higher is always closer."""
    return {victim: audit.primary.closeness(value) for victim, value in primary_of(audit, rows).items()}


def difference_to_plain(audit: Audit, defense: str, attack: MethodId) -> Interval | None:
    """An adaptive attack's score minus its plain form's, paired by victim; None if either did not run."""
    if not attack.adaptive:
        return None
    return _difference(audit, audit.rows_of(defense, attack), audit.rows_of(defense, MethodId(attack.spec)))


def difference_to_undefended(audit: Audit, defense: str, attack: MethodId) -> Interval | None:
    """An attack's score under a defense minus its undefended score, paired by victim; None if either is missing."""
    return _difference(audit, audit.rows_of(defense, attack), audit.without_defense(attack))


def difference_to_blind(audit: Audit, defense: str, attack: MethodId) -> Interval | None:
    """An attack's score under a defense minus that of the blind guess, paired by victim; None if either is missing."""
    return _difference(audit, audit.rows_of(defense, attack), audit.blind)


def as_closeness(audit: Audit, interval: Interval) -> Interval:
    """An interval of the primary metric, with its sign changed if needed so that higher is always closer."""
    estimate, low, high = map(audit.primary.closeness, (interval.estimate, interval.low, interval.high))
    return Interval(estimate, min(low, high), max(low, high))


def _difference(audit: Audit, rows: Iterable[ResultRow], baseline: Iterable[ResultRow]) -> Interval | None:
    return paired_difference(primary_of(audit, rows), primary_of(audit, baseline))


def _average_of_known(average: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return average(known) if known else None
