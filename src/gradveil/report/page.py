"""report.html: everything about an audit in a single file that opens offline."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gradveil.core.folders import replace_file
from gradveil.modality import Drawn
from gradveil.report._evidence import RULE
from gradveil.report._gallery import MAX_WRITTEN, figures, pages, victim_names
from gradveil.report._glossary import glossary
from gradveil.report._picture import write_overview
from gradveil.report._scatter import Chart, Line, Point, Scale, layout, pareto
from gradveil.report._scores import as_closeness, score, strongest
from gradveil.report._subject import attacked, untested
from gradveil.report._tables import (
    Table,
    attack_table,
    column_table,
    evidence_table,
    identification_table,
    match_table,
    price,
    ranking,
    tolerance,
    utility_table,
)
from gradveil.report._text import percent
from gradveil.report.export import write_tables
from gradveil.report.flags import Raised, flags_for, raised
from gradveil.report.judgement import judge
from gradveil.report.read import UNDEFENDED, Audit, read


def write(source: Path | Audit) -> Path:
    """Write `report.html`, `overview.png` and the tables, as CSV and LaTeX, into an audit folder, finished or not.

    Reads `config.json`, `results.jsonl`, `utility.jsonl` and `images/`. What is missing is named on the page.

    Args:
        source: the audit's folder (`--out`), or the `Audit` that `read` returns for it.

    Returns:
        The path of the page.
    """
    audit = _audit(source)
    page = render(audit).encode()
    write_overview(audit)
    write_tables(audit)
    return replace_file(audit.folder / "report.html", [page])


def verdict(source: Path | Audit) -> list[str]:
    """The flags of an audit, its headline, then its caveats, in plain sentences."""
    return judge(_audit(source)).lines()


def raised_flags(source: Path | Audit) -> list[Raised]:
    """The flags that an audit raises."""
    return raised(_audit(source))


def summary(source: Path | Audit) -> Table:
    """The table of attacks: `columns` with titles, `texts()` for a terminal, `csv()`, `rows` of cells with values."""
    return attack_table(_audit(source))


def _audit(source: Path | Audit) -> Audit:
    return source if isinstance(source, Audit) else read(source)


def render(audit: Audit) -> str:
    """The page as text."""
    shown = figures(audit)
    tables = {
        "attacks": attack_table(audit),
        "columns": column_table(audit),
        "evidence": evidence_table(audit),
        "identification": identification_table(audit),
        "utility": utility_table(audit),
        "ranking": ranking(audit),
        "matches": match_table(audit),
    }
    return fill_template(
        "page.html.j2",
        audit=audit,
        verdict=judge(audit),
        figures=shown,
        pages=None if isinstance(audit.modality, Drawn) else partial(pages, audit),
        max_written=MAX_WRITTEN,
        victim_names=victim_names(audit),
        absent=sum(shot.missing for strips in shown.values() for strip in strips for shot in strip.shots),
        **tables,
        glossary=glossary(audit, tables.values()),
        stop_rule=RULE,
        attacked=attacked(audit),
        untested=untested(audit),
        price=_price(audit),
        flags=flags_for(audit.modality, audit.metrics),
        trade_offs=[by_reconstruction(audit), *([by_identification(audit)] if audit.identified else [])],
        facts=_facts(audit),
        candidates=max((row.candidates for rows in audit.identified.values() for row in rows), default=0),
        modality=audit.modality,
        unit=audit.modality.unit,
        primary=audit.primary,
    )


def fill_template(name: str, **values: Any) -> str:
    """A template of this folder, filled in with these values."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "breakable": _breakable, "polyline": _polyline}
    return environment.get_template(name).render(values)


def _code(sentence: str) -> Markup:
    """The escaped sentence, with the parts between backticks marked up as code."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(sentence.split("`"))
    )


def _breakable(label: str) -> Markup:
    """A label in which lines may break after the name and between parameters."""
    return Markup("<wbr>").join(re.split(r"(?<=[:,])", label))


def _polyline(history: Sequence[float]) -> str:
    """The points of an SVG polyline, 80 x 22 pixels, for a curve of values from 0 to 1."""
    return " ".join(
        f"{1 + 78 * index / (len(history) - 1):.1f},{21 - 20 * value:.1f}" for index, value in enumerate(history)
    )


@dataclass(frozen=True)
class TradeOff:
    """Privacy against utility, by one measure of privacy.

    Args:
        by: the measure, one word.
        charts: the same chart for wide and for narrow screens; empty if there are no points.
        x: what is further right.
        y: what is higher, with its unit.
        not_shown: defenses of which the cost or the measure is missing.
    """

    by: str
    charts: Mapping[str, Chart]
    x: str
    y: str
    not_shown: Sequence[str]


def by_reconstruction(audit: Audit) -> TradeOff:
    """What the strongest attack recovers, against the accuracy that the defense keeps."""
    primary, threshold, x = audit.primary, audit.modality.threshold, _utility_axis(audit)
    lines = []
    if threshold is not None:
        lines.append(Line(f"{threshold:g} {primary.unit}".rstrip() + " threshold", primary.closeness(threshold)))
    if audit.blind:
        lines.append(Line("blind guess", primary.closeness(score(audit, audit.blind).median)))
    points = []
    for defense in audit.defenses:
        if not (best := strongest(audit, defense)) or defense not in audit.utility:
            continue
        attack, result = best
        interval = result.interval
        leaked = any(row.leaked for row in audit.attempts if row.defense_spec == defense)
        interval_text = (
            f" ({primary.without_unit(interval.low)} to {primary.without_unit(interval.high)})"
            if interval.known
            else ""
        )
        detail = (
            f"strongest attack: {audit.short_name(attack)}, median {primary.with_unit(result.median)}{interval_text}, "
            f"{'something leaked' if leaked else 'nothing leaked'}; {_kept(audit, defense)}"
        )
        y = as_closeness(audit, interval)
        y_interval = (y.low, y.high) if interval.known else None
        at = _utility(audit, defense, x)
        points.append(Point(defense, at, y.estimate, leaked, detail, family(defense), y_interval))
    unit = f", {primary.unit}" if primary.unit else ""
    title = f"{primary.title} of the strongest attack{unit} {'→' if primary.better == 'higher' else '←'}"
    scale = Scale(10 * primary.noticeable or 0.1, primary.closeness(1))
    return _trade_off(audit, "reconstruction", points, lines, scale, x, title)


def by_identification(audit: Audit) -> TradeOff:
    """How often the strongest attacker names the client's example, against the accuracy that the defense keeps."""
    x, unit, points = _utility_axis(audit), audit.modality.unit, []
    for defense in audit.defenses:
        row = audit.most_identified(defense)
        if row is None or defense not in audit.utility:
            continue
        low, high = 100 * row.named_low, 100 * row.named_high
        detail = (
            f"the client's {unit} is named in {percent(row.share)} of {row.games:,} updates "
            f"({low:.0f} to {high:.0f} %), {row.candidates:,} candidates; {_kept(audit, defense)}"
        )
        above_chance = row.named_low > row.chance
        at = _utility(audit, defense, x)
        points.append(Point(defense, at, 100 * row.share, above_chance, detail, family(defense), (low, high)))
    chance = max(row.chance for rows in audit.identified.values() for row in rows)
    title = f"updates in which the client's {unit} is named, % →"
    return _trade_off(audit, "identification", points, [Line("chance", 100 * chance)], Scale(10.0), x, title)


def _trade_off(
    audit: Audit, by: str, points: Sequence[Point], lines: Sequence[Line], scale: Scale, x: str, y: str
) -> TradeOff:
    chart = partial(layout, pareto(points), lines, scale)
    charts = {"wide": chart(width=900, numbered=False), "narrow": chart(width=350, numbered=True)} if points else {}
    shown = {point.label for point in points}
    return TradeOff(by, charts, x, y, [defense for defense in audit.defenses if defense not in shown])


def _utility_axis(audit: Audit) -> str:
    """What is kept of the undefended accuracy, if that is known of all defenses; otherwise the accuracy."""
    return "PMM" if all(row.pmm is not None for row in audit.utility.values()) else "accuracy"


def _utility(audit: Audit, defense: str, axis: str) -> float:
    row = audit.utility[defense]
    return row.pmm if axis == "PMM" and row.pmm is not None else row.accuracy


def _kept(audit: Audit, defense: str) -> str:
    row = audit.utility[defense]
    kept = "" if row.pmm is None or defense == UNDEFENDED else f", {percent(row.pmm)} of the undefended accuracy"
    return f"accuracy {percent(row.accuracy)}{kept}"


def family(defense: str) -> str:
    """The name of a defense without its parameters, the same at every strength.

    >>> family("dual-pruning:k1=0.05,k2=0.75+error-feedback:decay=0.5"), family("gaussian-noise:std=1e+37")
    ('dual-pruning+error-feedback', 'gaussian-noise')
    """
    return "+".join(part.partition(":")[0] for part in re.split(r"\+(?=[a-zA-Z])", defense))


def _price(audit: Audit) -> dict[str, str] | None:
    """The cost that the defenses were matched to, in words; None if they were not matched."""
    if not audit.matches:
        return None
    first = audit.matches[0]
    phrase = {
        "accuracy": "keeps {} of the undefended accuracy (PMM)",
        "power": "changes the update by {} of its power, |u − g|² / |g|²",
        "bytes": "uploads {} of the undefended bytes",
        "named": "lets a server that knows it name the right candidate in {} of the identification games",
    }[first.kind]
    return {"words": phrase.format(price(first.kind, first.target)), "tolerance": tolerance(first)}


def _facts(audit: Audit) -> list[tuple[str, str]]:
    """All settings except the command and the methods, which the page shows elsewhere."""
    shown_elsewhere = {"command", "defenses", "attacks", "adapted", "generic", "learned", "simulating", "caveats"}
    return [(key.replace("_", " "), _words(value)) for key, value in audit.config.items() if key not in shown_elsewhere]


def _words(value: object) -> str:
    """A JSON value formatted for readers."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_words(item) for item in value)
    return str(value)
