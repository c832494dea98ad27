"""The tables of a report, for terminals, for the sortable page and as CSV."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from statistics import fmean

from gradveil.audit.rows import IdentificationRow, MatchRow, MethodId, ResultRow, UtilityRow
from gradveil.audit.statistics import Interval, rank
from gradveil.audit.store import BLIND_GUESS
from gradveil.metrics import Metric
from gradveil.modality import Drawn
from gradveil.modality.written import from_file
from gradveil.report import _images as images
from gradveil.report._evidence import Evidence, evidence
from gradveil.report._scores import (
    Score,
    closeness_of,
    difference_to_plain,
    difference_to_undefended,
    scores,
    strongest,
)
from gradveil.report._text import percent, ratio, seconds, size
from gradveil.report.read import UNDEFENDED, Audit

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """One entry: the text to show, the value to sort by (None sorts last) and a note in small type.

    `leaked` is set only in counts of recovered victims; `history` is a curve to draw instead of the text.
    """

    text: str
    value: float | str | None
    note: str = ""
    leaked: bool | None = None
    history: tuple[float, ...] = ()


@dataclass(frozen=True)
class Column:
    """A heading and a sentence on what it means; an `optional` column is left out if no row has a value.

    On the page a `folded` column has no column of its own: its value is in small type below the second one.
    """

    title: str
    hint: str
    numeric: bool = True
    optional: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows of equal length.

    Example:
        >>> table = Table((Column("PSNR", "higher is closer"),), ((Cell("34.2", 34.21, "30.0–38.1"),),))
        >>> table.texts()
        [['34.2 (30.0–38.1)']]
        >>> table.csv()
        'PSNR\\n34.21\\n'
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def shown(self, row: Sequence[Cell]) -> list[tuple[Column, Cell]]:
        """The cells of a row that have a column on the page."""
        return [pair for pair in zip(self.columns, row, strict=True) if not pair[0].folded]

    def folded(self, row: Sequence[Cell]) -> list[tuple[Column, Cell]]:
        """The cells of a row that have none, without those that hold nothing."""
        return [pair for pair in zip(self.columns, row, strict=True) if pair[0].folded and pair[1].value is not None]

    def texts(self) -> list[list[str]]:
        """The rows as plain text for a terminal."""
        return [[f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row] for row in self.rows]

    def latex(self) -> str:
        """A LaTeX ``tabular`` with the rules of the package booktabs."""
        lines = [
            [_latex(column.title) for column in self.columns],
            *([_latex(text) for text in row] for row in self.texts()),
        ]
        head, *body = (f"{' & '.join(line)} \\\\" for line in lines)
        kinds = "".join("r" if column.numeric else "l" for column in self.columns)
        parts = [
            f"\\begin{{tabular}}{{{kinds}}}",
            "\\toprule",
            head,
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}",
        ]
        return "\n".join(parts) + "\n"

    def csv(self) -> str:
        """The headings and the unrounded values as CSV."""
        text = StringIO()
        values = [[cell.value for cell in row] for row in self.rows]
        csv.writer(text, lineterminator="\n").writerows([[column.title for column in self.columns], *values])
        return text.getvalue()


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "…": r"\dots{}",
    "−": "$-$",
    "×": r"$\times$",
    "≤": r"$\le$",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _latex(text: str) -> str:
    """The text with everything escaped that LaTeX would read as a command.

    >>> _latex("top-k:keep=0.2 & 50 %")
    'top-k:keep=0.2 \\\\& 50 \\\\%'
    """
    return "".join(_LATEX.get(character, character) for character in text)


def attack_table(audit: Audit) -> Table:
    """A row for each defense and attack, and one for the blind guess, which uses nothing from the victim."""
    primary, unit = audit.primary, audit.modality.unit
    others = [metric for metric in audit.metrics if metric.column and metric != primary]
    results = scores(audit)
    bounded = any(result.bound_mse is not None for result in results.values())
    columns = [
        Column("Defense", "What the client did to its update before sharing it.", numeric=False),
        Column("Attack", f"The attack that tried to rebuild the {unit} from the update.", numeric=False),
        Column(
            "Leaked", "Victims recovered, out of all victims attacked, and the rules by which they count as leaked."
        ),
        Column(
            primary.heading,
            f"Median over the victims with its 95 % interval. {primary.better.capitalize()} is closer to the original.",
        ),
        Column(
            "vs. undefended",
            f"{primary.title} under the defense minus {primary.title} without one: median over the victims with its "
            "95 % interval.",
        ),
        Column(
            "vs. plain",
            f"{primary.title} of the adaptive attacker minus that of the plain one: median over the victims with its "
            "95 % interval.",
            optional=True,
        ),
        # If a command would make the metric available, its column is shown even if it is empty.
        *(
            Column(m.heading, f"Median over the victims. {m.summary}", optional=m.remedy is None, folded=True)
            for m in others
        ),
        Column("MSE", "Mean squared error, averaged over the victims.", optional=True, folded=True),
        Column(
            "Bound",
            f"The lowest mean squared error that any attacker can reach on {unit}s smoothed by N(0, 0.1²), if a bound "
            f"is known. The attacked {unit}s are not smoothed.",
            optional=True,
            folded=True,
        ),
        Column("Label", "Share of the labels that the attacker had right, known or inferred.", folded=True),
        Column("Time", "Median time of the attack per victim.", folded=True),
    ]

    def cells(defense: str | None, attack: MethodId, result: Score) -> Iterator[Cell]:
        undefended = defense in (None, UNDEFENDED)
        yield Cell(defense or MISSING, defense)
        yield Cell(audit.short_name(attack), attack.title)
        yield _leaked(result) if defense else Cell(MISSING, None)
        yield _primary(primary, result)
        yield _difference(primary, None if undefended else difference_to_undefended(audit, defense or "", attack))
        yield _difference(primary, difference_to_plain(audit, defense or "", attack))
        yield from (_cell(result.medians[metric.name], f"{{:.{metric.digits}f}}".format) for metric in others)
        yield _cell(result.mse if bounded else None, "{:.4f}".format)
        unbounded = "no bound" if defense else MISSING
        yield Cell(unbounded if result.bound_mse is None else f"{result.bound_mse:.2g}", result.bound_mse)
        yield _share(result.label_correct)
        yield _cell(result.seconds, seconds)

    return _table(columns, (cells(*pair, result) for pair, result in results.items()))


def column_table(audit: Audit) -> Table:
    """How often the strongest attack recovers each column of written examples; empty if they have no columns."""
    if isinstance(audit.modality, Drawn):
        return Table((), ())
    best = [(defense, found[0]) for defense in audit.defenses if (found := strongest(audit, defense))]
    counts: list[tuple[str | None, MethodId, Mapping[str, float]]] = [
        (None, MethodId(BLIND_GUESS), _recovered_by_column(audit, audit.blind)),
        *((defense, attack, _recovered_by_column(audit, audit.rows_of(defense, attack))) for defense, attack in best),
    ]
    names = list(dict.fromkeys(name for *_, shares in counts for name in shares if name))
    columns = [
        Column("Defense", "What the client did to its update before sharing it.", numeric=False),
        Column("Attack", "The attack that recovers most.", numeric=False),
        *(Column(name, f"Share of the {audit.modality.unit}s in which this column was recovered.") for name in names),
    ]

    def cells(defense: str | None, attack: MethodId, shares: Mapping[str, float]) -> Iterator[Cell]:
        yield Cell(defense or MISSING, defense)
        yield Cell(audit.short_name(attack), attack.title)
        yield from (_share(shares.get(name)) for name in names)

    return _table(columns, (cells(*row) for row in counts) if names else ())


def _recovered_by_column(audit: Audit, rows: Iterable[ResultRow]) -> dict[str, float]:
    """The share of the examples in which each column was recovered."""
    marks: dict[str, list[bool]] = {}
    for row in rows:
        content = images.reconstruction(audit, row)
        for fragment in (part for example in (from_file(content) if content else ()) for part in example):
            marks.setdefault(fragment.column, []).append(bool(fragment.recovered))
    return {name: fmean(found) for name, found in marks.items()}


def evidence_table(audit: Audit) -> Table:
    """A row for each defense and attack: what the same victims show with and without the defense."""
    columns = (
        Column("Defense", "What the client did to its update before sharing it.", numeric=False),
        Column("Attack", "The attack in all its forms, plain and adaptive.", numeric=False),
        Column("Undefended", "Victims that leaked without a defense, out of those attacked both ways."),
        Column("Defended", "Victims of these that leaked under the defense, to any form of the attack."),
        Column("p leaks", "How likely such a fall in leaks is by chance: McNemar's exact test, one-sided."),
        Column(
            "p score", f"How likely such a fall in {audit.primary.title} is by chance: sign test, one-sided, on pairs."
        ),
        Column("Adapted", "Whether a form of the attack made for this defense was tried.", numeric=False),
        Column("Shows", "Whether this attack shows that the defense stops it.", numeric=False),
    )

    def cells(defense: str, found: Evidence) -> Iterator[Cell]:
        yield Cell(defense, defense)
        yield Cell(audit.short_name(MethodId(found.method)), found.method)
        for count in (found.recovered, found.still_recovered):
            yield Cell(f"{count} of {found.victims:,}", count / found.victims)
        yield Cell(f"{found.leak_p:.2g}", found.leak_p)
        yield Cell(f"{found.score_p:.2g}", found.score_p)
        yield Cell("yes" if found.adapted else "no", found.adapted)
        shows = "a leak" if found.still_recovered else "protection" if found.shown and found.adapted else "nothing"
        yield Cell(shows, shows)

    return _table(columns, (cells(spec, found) for spec in audit.real_defenses for found in evidence(audit, spec)))


def utility_table(audit: Audit) -> Table:
    """A row for each defense whose training was measured, compared with the undefended run."""
    measured = [audit.utility[defense] for defense in audit.defenses if defense in audit.utility]
    unit, base = audit.modality.unit, audit.utility.get(UNDEFENDED)
    guaranteed = any(row.privacy for row in measured)
    columns = [
        Column("Defense", "What every client did to its updates during training.", numeric=False),
        Column("Accuracy", "Test accuracy of the model trained under the defense."),
        Column("PMM", "Accuracy with the defense divided by accuracy without. 100 % costs nothing."),
        Column("Loss", "Test loss of the model trained under the defense."),
        Column("Round time", "Time of one training round, and its ratio to the undefended run."),
        Column("Upload", "Bytes that one client sends per round, and the ratio to the undefended run."),
        Column("Download", "Bytes that one client receives per round, and the ratio to the undefended run."),
        *[Column("Guarantee", f"Differential privacy of a single training {unit}, if it is proven.")] * guaranteed,
        Column("Training", "Accuracy by round, on a scale from 0 to 100 %.", optional=True),
    ]

    def cells(row: UtilityRow) -> Iterator[Cell]:
        yield Cell(row.defense_spec, row.defense_spec)
        yield _share(row.accuracy)
        yield _share(row.pmm)
        yield Cell("diverged", None) if row.diverged is not None else _cell(row.loss, "{:.3f}".format)
        yield _cell(row.round_seconds, seconds, base.round_seconds if base else None)
        yield _cell(row.upload_bytes, size, base.upload_bytes if base else None)
        yield _cell(row.download_bytes, size, base.download_bytes if base else None)
        if guaranteed:
            yield Cell(row.privacy or "none", row.epsilon)
        has_curve = len(row.history) > 1
        yield Cell("" if has_curve else MISSING, row.accuracy if has_curve else None, history=row.history)

    return _table(columns, map(cells, measured))


def identification_table(audit: Audit) -> Table:
    """A row for each defense and attacker who looked for a client's example among candidates."""
    unit = audit.modality.unit
    columns = (
        Column("Defense", "What the client did to its update before sharing it.", numeric=False),
        Column("Attacker", "Whether the attacker knew the defense.", numeric=False),
        Column(
            "Named",
            f"Updates for which the client's {unit} has the highest score of all candidates, with the 95 % interval "
            "(Clopper and Pearson).",
        ),
        Column("Chance", "The share that a guess would name."),
        Column(
            "AUC",
            f"How often the client's {unit} scores higher than another candidate, with its 95 % interval; 0.5 is a "
            "guess.",
        ),
        Column(
            "In the top 1 %", f"Updates for which the client's {unit} scores higher than all but 1 % of the others."
        ),
        Column("Bits", "A lower bound on what an update tells about which candidate it was (Fano)."),
        Column("Games", "Updates of different clients that were tried."),
    )

    def cells(row: IdentificationRow) -> Iterator[Cell]:
        yield Cell(row.defense_spec, row.defense_spec)
        attacker = "adaptive" if row.adaptive else "plain"
        yield Cell(attacker, attacker)
        interval = f"{100 * row.named_low:.0f} … {100 * row.named_high:.0f} %"
        yield Cell(percent(row.share), row.share, interval)
        yield Cell(f"{100 * row.chance:.2g} %", row.chance)
        around = f"{row.auc_low:.3f} … {row.auc_high:.3f}" if row.auc_low is not None else ""
        yield Cell(f"{row.auc:.3f}", row.auc, around)
        yield _share(row.tpr)
        yield Cell(f"{row.bits:.1f}", row.bits)
        yield Cell(f"{row.games:,}", row.games)

    return _table(columns, (cells(row) for spec in audit.defenses for row in audit.identified.get(spec, [])))


def ranking(audit: Audit) -> Table:
    """A row for each defense that was attacked, the most private first; only `Rank` is statistically meaningful."""
    attacked = {defense: best for defense in audit.real_defenses if (best := strongest(audit, defense))}
    primary = audit.primary
    ranks = rank(
        {defense: closeness_of(audit, audit.rows_of(defense, attack)) for defense, (attack, _) in attacked.items()}
    )
    columns = (
        Column("Defense", "What the client did to its update before sharing it.", numeric=False),
        Column(
            "Strongest attack",
            f"The attack with the {primary.better.replace('er', 'est')} median {primary.title} under the defense.",
            numeric=False,
        ),
        Column(
            "Rank",
            "Place by privacy; a range of places if the 95 % intervals of paired differences do not separate defenses.",
        ),
        Column(primary.heading, "The strongest attack's median over the victims with its 95 % interval."),
        Column("Leaked", "Victims recovered by the strongest attack."),
        Column("PMM", "Accuracy with the defense divided by accuracy without."),
    )
    order = sorted(attacked, key=lambda defense: (ranks[defense], primary.closeness(attacked[defense][1].median)))

    def cells(defense: str) -> Iterator[Cell]:
        attack, result = attacked[defense]
        yield Cell(defense, defense)
        yield Cell(audit.short_name(attack), attack.title)
        yield Cell(str(ranks[defense]), ranks[defense].best)
        yield _primary(primary, result)
        yield _leaked(result)
        yield _share(audit.utility[defense].pmm if defense in audit.utility else None)

    return _table(columns, map(cells, order))


def match_table(audit: Audit) -> Table:
    """A row for each defense whose strength was matched to the given cost."""
    columns = (
        Column("Requested", "The defense as it was requested.", numeric=False),
        Column("Audited", "The same defense at the strength that has the given cost.", numeric=False),
        Column("Cost", "Its cost at that strength."),
        Column("Tries", "Number of strengths that were tried."),
    )

    def cells(row: MatchRow) -> Iterator[Cell]:
        yield Cell(row.asked, row.asked)
        yield Cell(row.found or "left out", row.found)
        yield _cell(row.cost, partial(price, row.kind))
        yield Cell(str(row.tries), row.tries)

    return _table(columns, map(cells, audit.matches))


def price(kind: str, value: float) -> str:
    """A cost of the given kind, formatted.

    >>> price("accuracy", 0.95), price("power", 0.5)
    ('95 %', '0.5')
    """
    return f"{value:.3g}" if kind == "power" else percent(value)


def tolerance(row: MatchRow) -> str:
    """How far the cost of a defense may be from the target."""
    return f"{row.tolerance:.2g}" if row.kind == "power" else f"{100 * row.tolerance:.2g} %"


def _table(columns: Sequence[Column], rows: Iterable[Iterable[Cell]]) -> Table:
    cells = [tuple(row) for row in rows]
    kept = [
        index
        for index, column in enumerate(columns)
        if not column.optional or any(row[index].value is not None for row in cells)
    ]
    return Table(tuple(columns[index] for index in kept), tuple(tuple(row[index] for index in kept) for row in cells))


def _primary(metric: Metric, result: Score) -> Cell:
    return Cell(metric.without_unit(result.median), result.median, _range(metric, result.interval))


def _difference(metric: Metric, difference: Interval | None) -> Cell:
    if difference is None:
        return Cell(MISSING, None)
    sign = "+" if round(difference.estimate, metric.digits) > 0 else ""
    text = f"{sign}{metric.without_unit(difference.estimate)}".replace("-", "−")
    return Cell(text, difference.estimate, _range(metric, difference))


def _range(metric: Metric, interval: Interval) -> str:
    """The interval, or nothing if there are too few victims for one."""
    return (
        f"{metric.without_unit(interval.low)} … {metric.without_unit(interval.high)}".replace("-", "−")
        if interval.known
        else ""
    )


def _leaked(result: Score) -> Cell:
    """The count, with the rules that decided."""
    share = result.leaked / result.victims
    rules = ", ".join(f"{count} by {rule}" for rule, count in sorted(result.rules.items()))
    return Cell(f"{result.leaked} of {result.victims:,}", share, rules, leaked=result.leaked > 0)


def _share(value: float | None) -> Cell:
    return _cell(value, lambda share: f"{100 * share:.1f} %")


def _cell(value: float | None, format_value: Callable[[float], str], base: float | None = None) -> Cell:
    """A formatted value, with its ratio to the undefended run's if that is given."""
    if value is None:
        return Cell(MISSING, None)
    return Cell(format_value(value), value, ratio(value / base) if base else "")
