"""report.html: everything about an audit in one file that opens offline."""

import os
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gradveil.errors import DataError
from gradveil.metrics import LEAK_MARGIN, LEAK_PSNR, LEAK_SSIM
from gradveil.report.gallery import figures, victim_names
from gradveil.report.judgement import judge
from gradveil.report.picture import overview
from gradveil.report.read import UNDEFENDED, Audit, read
from gradveil.report.scatter import Line, Point, layout
from gradveil.report.scores import score, strongest
from gradveil.report.tables import Table, attack_table, utility_table
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
    """The headline of an audit, then its caveats, one plain sentence each."""
    return judge(read(folder)).lines()


def summary(folder: Path) -> Table:
    """The table of attacks: `columns` with titles, `texts()` for a terminal, `rows` of cells with values."""
    return attack_table(read(folder))


def render(audit: Audit) -> str:
    """The page as text."""
    points, not_shown = _points(audit)
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


def _points(audit: Audit) -> tuple[list[Point], list[str]]:
    """The defenses that have both a cost and an attack, and the names of those that do not."""
    points, not_shown = [], []
    for defense in audit.defenses:
        found, utility = strongest(audit, defense), audit.utility.get(defense)
        if found is None or utility is None:
            not_shown.append(defense)
            continue
        attack, psnr = found[0], found[1].psnr
        leaked = any(row.leaked for row in audit.attempts if row.defense == defense)
        kept = "" if utility.pmm is None or defense == UNDEFENDED else f", {percent(utility.pmm)} of the undefended"
        detail = (
            f"strongest attack: {audit.short(attack)}, median {psnr:.1f} dB, "
            f"{'something leaked' if leaked else 'nothing leaked'}; "
            f"accuracy {percent(utility.accuracy)}{kept}"
        )
        points.append(Point(defense, utility.accuracy, psnr, leaked, detail))
    return points, not_shown


def _facts(audit: Audit) -> list[tuple[str, str]]:
    """All of the config but the command and the methods, which the page shows by themselves."""
    elsewhere = {"command", "defenses", "attacks"}
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
