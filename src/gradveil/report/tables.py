"""The two tables of a report, ready to print, to show and to sort."""

from collections.abc import Iterator
from dataclasses import dataclass

from gradveil.audit.statistics import Interval, rank
from gradveil.audit.store import BLIND_GUESS
from gradveil.report.read import UNDEFENDED, Audit, Matched, Utility
from gradveil.report.scores import Score, gain_over_plain, gain_over_undefended, psnr_of, score, scores, strongest
from gradveil.report.text import percent, ratio, seconds, size

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """One entry: the text to read, the value to sort by (None sorts last) and a remark in small type.

    `leaked` marks a count of recovered victims; `history` is a curve to draw in place of the text.
    """

    text: str
    value: float | str | None
    note: str = ""
    leaked: bool | None = None
    history: tuple[float, ...] = ()


@dataclass(frozen=True)
class Column:
    """A heading, and what the column means in one sentence."""

    title: str
    hint: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Columns and rows of equal length.

    Example:
        >>> table = Table((Column("PSNR", "higher is closer"),), ((Cell("34.2", 34.21, "30.0–38.1"),),))
        >>> table.texts()
        [['34.2 (30.0–38.1)']]
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def texts(self) -> list[list[str]]:
        """The rows as plain text for a terminal."""
        return [[f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row] for row in self.rows]


def attack_table(audit: Audit) -> Table:
    """A row for each defense and attack, and one for the blind guess, which knows nothing of the victim."""
    entries = [(defense, attack, result) for (defense, attack), result in scores(audit).items()]
    if audit.blind:
        entries.insert(0, (MISSING, BLIND_GUESS, score(audit.blind)))
    with_adaptive = any(row.adaptive for row in audit.attempts)
    with_noise = any(result.noise_ratio is not None for _, _, result in entries)
    with_bound = any(result.bound_mse is not None for _, _, result in entries)
    columns = [
        Column("Defense", "What the client did to its update before sharing it.", numeric=False),
        Column("Attack", "Who tried to rebuild the image from the update.", numeric=False),
        Column("Leaked", "Victims recovered, of all victims attacked."),
        Column(
            "PSNR dB",
            "Median over the victims and its 95 % interval. Higher is closer to the original.",
        ),
        Column(
            "vs. undefended",
            "Median over the victims of the PSNR under the defense minus that without one, and its 95 % interval.",
        ),
        *(
            [
                Column(
                    "vs. plain",
                    "Median over the victims of the adaptive attacker's PSNR minus the plain one's; 95 % interval.",
                )
            ]
            if with_adaptive
            else []
        ),
        Column("SSIM", "Median structural similarity. 1 is identical."),
        Column("LPIPS", "Median perceptual distance. 0 is identical."),
        *([Column("Noise", "Median share of noise that an evaluation network sees.")] if with_noise else []),
        *(
            [
                Column("MSE", "Mean squared error over the victims."),
                Column(
                    "Bound",
                    "The least mean squared error that any attacker can reach on images smoothed by N(0, 0.1²), if a "
                    "bound is known. The attacked images are not smoothed.",
                ),
            ]
            if with_bound
            else []
        ),
        Column("Label", "How often the attacker knew the right label."),
        Column("Time", "Median time of the attack per victim."),
    ]
    rows = [
        (
            Cell(defense, None if defense == MISSING else defense),
            Cell(audit.short(attack), attack),
            _leaked(result) if attack != BLIND_GUESS else Cell(MISSING, None),
            _psnr(result),
            _difference(None if defense in (MISSING, UNDEFENDED) else gain_over_undefended(audit, defense, attack)),
            *([_difference(gain_over_plain(audit, defense, attack))] if with_adaptive else []),
            _decimal(result.ssim, 2),
            _decimal(result.lpips, 3),
            *([_decimal(result.noise_ratio, 2)] if with_noise else []),
            *([_decimal(result.mse, 4), _bound(result, attack)] if with_bound else []),
            _share(result.label_correct),
            _seconds(result.seconds),
        )
        for defense, attack, result in entries
    ]
    return Table(tuple(columns), tuple(rows))


def utility_table(audit: Audit) -> Table:
    """A row for each defense whose training was measured, compared with the undefended run."""
    measured = [audit.utility[defense] for defense in audit.defenses if defense in audit.utility]
    with_history = any(len(row.history) > 1 for row in measured)
    with_privacy = any(row.privacy for row in measured)
    columns = [
        Column("Defense", "What every client did to its updates during training.", numeric=False),
        Column("Accuracy", "Test accuracy of the model trained under the defense."),
        Column("PMM", "Accuracy with the defense divided by accuracy without. 100 % costs nothing."),
        Column("Loss", "Test loss of the model trained under the defense."),
        Column("Round time", "Time of one round of training, and against the undefended run."),
        Column("Upload", "Bytes one client sends in a round, and against the undefended run."),
        Column("Download", "Bytes one client receives in a round, and against the undefended run."),
        *([Column("Guarantee", "Differential privacy of one training image, where there is a proof.")] * with_privacy),
        *([Column("Training", "Accuracy over the rounds, from 0 to 100 %.")] if with_history else []),
    ]
    base = audit.utility.get(UNDEFENDED)
    rows = [tuple(_utility_cells(row, base, with_privacy, with_history)) for row in measured]
    return Table(tuple(columns), tuple(rows))


def ranking(audit: Audit) -> Table:
    """A row for each defense that was attacked, the most private first; the order is no more than its `Rank`."""
    found = {defense: best for defense in audit.real_defenses if (best := strongest(audit, defense))}
    places = rank({defense: psnr_of(audit.of(defense, attack)) for defense, (attack, _) in found.items()})
    columns = (
        Column("Defense", "What the client did to its update before sharing it.", numeric=False),
        Column("Strongest attack", "The attack with the highest median PSNR under the defense.", numeric=False),
        Column(
            "Rank",
            "Place by privacy as far as the 95 % intervals of the paired differences tell; a range where they do not.",
        ),
        Column("PSNR dB", "Of the strongest attack: median over the victims and its 95 % interval."),
        Column("Leaked", "Victims recovered by the strongest attack."),
        Column("PMM", "Accuracy with the defense divided by accuracy without."),
    )
    order = sorted(found, key=lambda defense: (places[defense].best, places[defense].worst, found[defense][1].psnr))
    rows = [
        (
            Cell(defense, defense),
            Cell(audit.short(found[defense][0]), found[defense][0]),
            Cell(str(places[defense]), places[defense].best),
            _psnr(found[defense][1]),
            _leaked(found[defense][1]),
            _share(audit.utility[defense].pmm if defense in audit.utility else None),
        )
        for defense in order
    ]
    return Table(columns, tuple(rows))


def match_table(audit: Audit) -> Table:
    """A row for each defense whose strength was chosen so that it costs the price."""
    columns = (
        Column("Asked for", "The defense as it was named.", numeric=False),
        Column("Audited", "The same defense at the strength that costs the price.", numeric=False),
        Column("Cost", "What it costs at that strength."),
        Column("Tries", "Strengths that were tried."),
    )
    rows = [
        (
            Cell(row.asked, row.asked),
            Cell(row.found or "left out", row.found),
            Cell(MISSING if row.cost is None else price(row.kind, row.cost), row.cost),
            Cell(str(row.tries), row.tries),
        )
        for row in audit.matches
    ]
    return Table(columns, tuple(rows))


def price(kind: str, value: float) -> str:
    """A cost of one kind in words.

    >>> price("accuracy", 0.95), price("power", 0.5)
    ('95 %', '0.5')
    """
    return f"{value:.3g}" if kind == "power" else percent(value)


def tolerance(row: Matched) -> str:
    """How far from the price a defense may be."""
    return f"{row.tolerance:.2g}" if row.kind == "power" else f"{100 * row.tolerance:.2g} %"


def _utility_cells(row: Utility, base: Utility | None, with_privacy: bool, with_history: bool) -> Iterator[Cell]:
    yield Cell(row.defense, row.defense)
    yield _share(row.accuracy)
    yield _share(row.pmm)
    yield Cell("diverged", None) if row.diverged else _decimal(row.loss, 3)
    yield _seconds(row.round_seconds, base.round_seconds if base else None)
    yield _size(row.upload_bytes, base.upload_bytes if base else None)
    yield _size(row.download_bytes, base.download_bytes if base else None)
    if with_privacy:
        yield Cell(row.privacy or "none", row.epsilon)
    if with_history:
        yield Cell("" if len(row.history) > 1 else MISSING, row.accuracy, history=row.history)


def _psnr(result: Score) -> Cell:
    return Cell(f"{result.psnr:.1f}", result.psnr, _range(result.psnr_interval))


def _difference(found: Interval | None) -> Cell:
    if found is None:
        return Cell(MISSING, None)
    rounded = round(found.estimate, 1)
    return Cell(f"{rounded:+.1f}".replace("-", "−") if rounded else "0.0", found.estimate, _range(found))


def _range(found: Interval) -> str:
    """The interval, if there were victims enough for one."""
    # Adding zero turns -0.0 into 0.0.
    return f"{round(found.low, 1) + 0:.1f} … {round(found.high, 1) + 0:.1f}".replace("-", "−") if found.known else ""


def _leaked(result: Score) -> Cell:
    share = result.leaked / result.victims
    return Cell(f"{result.leaked} of {result.victims:,}", share, leaked=result.leaked > 0)


def _bound(result: Score, attack: str) -> Cell:
    if attack == BLIND_GUESS:
        return Cell(MISSING, None)
    return Cell("no bound", None) if result.bound_mse is None else Cell(f"{result.bound_mse:.2g}", result.bound_mse)


def _decimal(value: float | None, digits: int) -> Cell:
    return Cell(MISSING if value is None else f"{value:.{digits}f}", value)


def _share(value: float | None) -> Cell:
    return Cell(MISSING if value is None else f"{100 * value:.1f} %", value)


def _seconds(value: float | None, base: float | None = None) -> Cell:
    return Cell(MISSING if value is None else seconds(value), value, _against(value, base))


def _size(value: float | None, base: float | None = None) -> Cell:
    return Cell(MISSING if value is None else size(value), value, _against(value, base))


def _against(value: float | None, base: float | None) -> str:
    return ratio(value / base) if value is not None and base else ""
