"""report.html: everything about an audit in a single file that opens offline."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gradveil.core.folders import replace_file
from gradveil.report._evidence import RULE
from gradveil.report._gallery import figures, victim_names
from gradveil.report._glossary import glossary
from gradveil.report._picture import write_overview
from gradveil.report._scatter import Line, Point, Scale, layout, pareto
from gradveil.report._scores import as_closeness, score, strongest
from gradveil.report._subject import attacked, untested
from gradveil.report._tables import (
    Table,
    attack_table,
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
    points, not_shown, axis = _points(audit)
    primary, threshold = audit.primary, audit.modality.threshold
    lines = []
    if threshold is not None:
        lines.append(Line(f"{threshold:g} {primary.unit}".rstrip() + " threshold", primary.closeness(threshold)))
    if audit.blind:
        lines.append(Line("blind guess", primary.closeness(score(audit, audit.blind).median)))
    chart = partial(layout, points, lines, Scale(10 * primary.noticeable or 0.1, primary.closeness(1)))
    shown = figures(audit)
    tables = {
        "attacks": attack_table(audit),
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
        victim_names=victim_names(audit),
        absent=sum(shot.uri is None for strips in shown.values() for strip in strips for shot in strip.shots),
        **tables,
        glossary=glossary(audit, tables.values()),
        stop_rule=RULE,
        attacked=attacked(audit),
        untested=untested(audit),
        price=_price(audit),
        flags=flags_for(audit.modality, audit.metrics),
        axis=axis,
        charts={"wide": chart(width=900, numbered=False), "narrow": chart(width=350, numbered=True)} if points else {},
        not_shown=not_shown,
        facts=_facts(audit),
        candidates=max((row.candidates for rows in audit.identified.values() for row in rows), default=0),
        modality=audit.modality,
        unit=audit.modality.unit,
        primary=primary,
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


def _points(audit: Audit) -> tuple[list[Point], list[str], str]:
    """Points for the defenses that have both a cost and an attack, the names of the others, and what x is."""
    shown = {
        defense: (*best, audit.utility[defense])
        for defense in audit.defenses
        if (best := strongest(audit, defense)) and defense in audit.utility
    }
    relative = all(utility.pmm is not None for _, _, utility in shown.values())
    points = []
    for defense, (attack, result, utility) in shown.items():
        leaked = any(row.leaked for row in audit.attempts if row.defense_spec == defense)
        kept = (
            ""
            if utility.pmm is None or defense == UNDEFENDED
            else f", {percent(utility.pmm)} of the undefended accuracy"
        )
        primary, interval = audit.primary, result.interval
        interval_text = (
            f" ({primary.without_unit(interval.low)} to {primary.without_unit(interval.high)})"
            if interval.known
            else ""
        )
        detail = (
            f"strongest attack: {audit.short_name(attack)}, median {primary.with_unit(result.median)}{interval_text}, "
            f"{'something leaked' if leaked else 'nothing leaked'}; "
            f"accuracy {percent(utility.accuracy)}{kept}"
        )
        x = utility.pmm if relative and utility.pmm is not None else utility.accuracy
        y = as_closeness(audit, interval)
        y_interval = (y.low, y.high) if interval.known else None
        points.append(Point(defense, x, y.estimate, leaked, detail, family(defense), y_interval))
    not_shown = [defense for defense in audit.defenses if defense not in shown]
    return pareto(points), not_shown, "PMM" if relative else "accuracy"


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
