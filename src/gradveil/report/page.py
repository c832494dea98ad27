"""report.html: everything about an audit in one file that opens offline."""

import os
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gradveil.errors import DataError
from gradveil.modality.image import LEAK_MARGIN, LEAK_PSNR, LEAK_SSIM
from gradveil.report.flags import FLAGS, Raised
from gradveil.report.gallery import figures, victim_names
from gradveil.report.judgement import judge
from gradveil.report.picture import overview
from gradveil.report.read import UNDEFENDED, Audit, read
from gradveil.report.scatter import Line, Point, layout, pareto
from gradveil.report.scores import score, strongest
from gradveil.report.tables import Table, attack_table, match_table, price, ranking, tolerance, utility_table
from gradveil.report.text import percent


def write(folder: Path) -> Path:
    """Write `report.html` and `overview.png` into an audit folder, finished or not.

    Reads `config.json`, `results.jsonl`, `utility.jsonl` and `images/`. What is missing is named on the page.

    Args:
        folder: the audit's folder (`--out`).

    Returns:
        The path of the page.
    """
    audit = read(folder)
    sheet = BytesIO()
    overview(audit).save(sheet, format="PNG", optimize=True)
    page = render(audit).encode()
    replace(audit.folder / "overview.png", sheet.getvalue())
    return replace(audit.folder / "report.html", page)


def verdict(folder: Path) -> list[str]:
    """The flags of an audit, its headline, then its caveats, in plain sentences."""
    return judge(read(folder)).lines()


def raised_flags(folder: Path) -> list[Raised]:
    """The flags that an audit raises."""
    return list(judge(read(folder)).flags)


def summary(folder: Path) -> Table:
    """The table of attacks: `columns` with titles, `texts()` for a terminal, `rows` of cells with values."""
    return attack_table(read(folder))


def render(audit: Audit) -> str:
    """The page as text."""
    points, not_shown, axis = _points(audit)
    lines = [Line(f"{LEAK_PSNR:g} dB threshold", LEAK_PSNR)]
    if audit.blind:
        lines.append(Line("blind guess", score(audit.blind).psnr))
    shown = figures(audit)
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            audit=audit,
            verdict=judge(audit),
            figures=shown,
            victim_names=victim_names(audit),
            images_missing=sum(shot.uri is None for figure in shown for row in figure.strips for shot in row.shots),
            attacks=attack_table(audit),
            utility=utility_table(audit),
            ranking=ranking(audit),
            matches=match_table(audit),
            price=_price(audit),
            flags=FLAGS,
            axis=axis,
            charts={
                "wide": layout(points, lines, width=900, numbered=False),
                "narrow": layout(points, lines, width=350, numbered=True),
            }
            if points
            else {},
            not_shown=not_shown,
            facts=_facts(audit),
            rule={"psnr": LEAK_PSNR, "ssim": LEAK_SSIM, "margin": LEAK_MARGIN},
        )
    )


def environment() -> Environment:
    """The templates of this folder."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["code"] = _code
    made.filters["breakable"] = _breakable
    made.filters["polyline"] = _polyline
    return made


def _code(sentence: str) -> Markup:
    """The sentence with what stands between backticks set as code, all of it escaped."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(sentence.split("`"))
    )


def _breakable(label: str) -> Markup:
    """A label that may break after its name and between its parameters."""
    return Markup("<wbr>").join(re.split(r"(?<=[:,])", label))


def _polyline(history: Sequence[float]) -> str:
    """A curve of shares for an 80 x 22 picture."""
    return " ".join(
        f"{1 + 78 * index / (len(history) - 1):.1f},{21 - 20 * value:.1f}" for index, value in enumerate(history)
    )


def _points(audit: Audit) -> tuple[list[Point], list[str], str]:
    """The defenses that have both a cost and an attack, the names of those that do not, and what x is."""
    shown = {
        defense: (*found, audit.utility[defense])
        for defense in audit.defenses
        if (found := strongest(audit, defense)) and defense in audit.utility
    }
    relative = all(utility.pmm is not None for _, _, utility in shown.values())
    points = []
    for defense, (attack, result, utility) in shown.items():
        leaked = any(row.leaked for row in audit.attempts if row.defense == defense)
        kept = "" if utility.pmm is None or defense == UNDEFENDED else f", {percent(utility.pmm)} of the undefended"
        interval = result.psnr_interval
        between = f" ({interval.low:.1f} to {interval.high:.1f})" if interval.known else ""
        detail = (
            f"strongest attack: {audit.short(attack)}, median {result.psnr:.1f} dB{between}, "
            f"{'something leaked' if leaked else 'nothing leaked'}; "
            f"accuracy {percent(utility.accuracy)}{kept}"
        )
        x = utility.pmm if relative and utility.pmm is not None else utility.accuracy
        ends = (interval.low, interval.high) if interval.known else None
        points.append(Point(defense, x, result.psnr, leaked, detail, family(defense), ends))
    not_shown = [defense for defense in audit.defenses if defense not in shown]
    return pareto(points), not_shown, "PMM" if relative else "accuracy"


def family(defense: str) -> str:
    """What a defense is called at any strength.

    >>> family("dual-pruning:k1=0.05,k2=0.75+error-feedback:decay=0.5"), family("gaussian-noise:std=1e+37")
    ('dual-pruning+error-feedback', 'gaussian-noise')
    """
    return "+".join(part.partition(":")[0] for part in re.split(r"\+(?=[a-zA-Z])", defense))


def _price(audit: Audit) -> dict[str, str] | None:
    """What the defenses were matched to, in words; None if they were not."""
    if not audit.matches:
        return None
    first = audit.matches[0]
    words = {
        "accuracy": "keeps {} of the undefended accuracy (PMM)",
        "power": "changes the update by {} of its power, |u − g|² / |g|²",
        "bytes": "uploads {} of the undefended bytes",
    }[first.kind]
    return {"words": words.format(price(first.kind, first.target)), "tolerance": tolerance(first)}


def _facts(audit: Audit) -> list[tuple[str, str]]:
    """All of the config but the command and the methods, which the page shows by themselves."""
    elsewhere = {"command", "defenses", "attacks", "adapted", "generic"}
    return [(key.replace("_", " "), _words(value)) for key, value in audit.config.items() if key not in elsewhere]


def _words(value: object) -> str:
    """A JSON value as a reader wants it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_words(item) for item in value)
    return str(value)


def replace(path: Path, content: bytes) -> Path:
    """Write a file so that nobody ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); make its folder writable") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
