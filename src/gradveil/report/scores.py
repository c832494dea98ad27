"""Rows of one attack under one defense, in a few numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from gradveil.audit.statistics import Interval, median_interval, paired_difference
from gradveil.report.read import Attempt, Audit


@dataclass(frozen=True)
class Score:
    """What an attack reached over its victims. Medians, since one lucky victim moves a mean.

    Example:
        >>> from gradveil.report.read import Attempt
        >>> row = Attempt("none", "idlg", "idlg", False, 0, 31.0, 0.9, None, None, 1.0, True, 2.0, None)
        >>> score([row]).psnr, score([row]).leaked, score([row]).lpips
        (31.0, 1, None)
    """

    victims: int
    leaked: int
    psnr: float
    psnrs: tuple[float, ...]
    ssim: float
    lpips: float | None
    noise_ratio: float | None
    label_correct: float | None
    seconds: float | None
    mse: float | None
    bound_mse: float | None

    @cached_property
    def psnr_interval(self) -> Interval:
        """That of the median PSNR."""
        return median_interval(self.psnrs)


def score(rows: Sequence[Attempt]) -> Score:
    """Sum up at least one row. A metric that no row has is None; nulls do not count towards a median."""
    psnrs = tuple(row.psnr for row in rows)
    return Score(
        victims=len(rows),
        leaked=sum(row.leaked for row in rows),
        psnr=median(psnrs),
        psnrs=psnrs,
        ssim=median(row.ssim for row in rows),
        lpips=_median(row.lpips for row in rows),
        noise_ratio=_median(row.noise_ratio for row in rows),
        label_correct=_mean(row.label_correct for row in rows),
        seconds=_median(row.seconds for row in rows),
        mse=_mean(row.mse for row in rows),  # the bound is on the mean
        bound_mse=_mean(row.bound_mse for row in rows),
    )


def scores(audit: Audit) -> dict[tuple[str, str], Score]:
    """The score of every (defense, attack) that has rows, in the order of the audit."""
    pairs = ((defense, attack) for defense in audit.defenses for attack in audit.attacks)
    return {pair: score(rows) for pair in pairs if (rows := audit.of(*pair))}


def strongest(audit: Audit, defense: str) -> tuple[str, Score] | None:
    """The attack with the highest median PSNR under `defense`, and its score; None if none has rows."""
    ran = [(attack, score(rows)) for attack in audit.attacks if (rows := audit.of(defense, attack))]
    return max(ran, key=lambda pair: pair[1].psnr, default=None)


def psnr_of(rows: Iterable[Attempt]) -> dict[int, float]:
    """The PSNR by victim."""
    return {row.victim: row.psnr for row in rows}


def gain_over_plain(audit: Audit, defense: str, attack: str) -> Interval | None:
    """PSNR that an adaptive attack has more than its plain form, paired by victim; None if one of them did not run."""
    plain = audit.plain(attack)
    if plain == attack:
        return None
    return paired_difference(psnr_of(audit.of(defense, attack)), psnr_of(audit.of(defense, plain)))


def gain_over_undefended(audit: Audit, defense: str, attack: str) -> Interval | None:
    """PSNR that an attack has more under a defense than without one, paired by victim; None without such rows."""
    return paired_difference(psnr_of(audit.of(defense, attack)), psnr_of(audit.without_defense(attack)))


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    present = _present(values)
    return median(present) if present else None


def _mean(values: Iterable[float | None]) -> float | None:
    present = _present(values)
    return fmean(present) if present else None
