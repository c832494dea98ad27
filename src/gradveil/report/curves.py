"""training.html: accuracy and loss by round of one or more training runs, in a single file that opens offline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradveil.core.folders import replace_file
from gradveil.report._scatter import Box, Mark, axis, ticks
from gradveil.report.page import fill_template

WIDTH, HEIGHT = 760.0, 360.0
COLOURS = ("#0b6b62", "#b8321a", "#8a5a00", "#3b5bb5", "#7b3fa0", "#1b8a3a", "#c2185b", "#5a636e")
DASHES = ("", "7 4", "2 3")
"""These tell lines of the same colour apart when there are more lines than colours."""

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curve:
    """A name and its (round, value) points.

    Example:
        >>> Curve("none", ((10, 0.8), (20, 0.9))).points[-1]
        (20, 0.9)
    """

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A curve in pixels."""

    name: str
    path: str
    end: tuple[float, float]
    colour: str
    dash: str
    last: str


@dataclass(frozen=True)
class Chart:
    """A finished layout.

    Example:
        >>> chart = lay_out("accuracy", [Curve("none", ((0, 0.1), (10, 0.9)))], percent=True)
        >>> chart.lines[0].last, [tick.text for tick in chart.y_ticks][-1]
        ('90.0 %', '80 %')
    """

    title: str
    plot: Box
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    lines: tuple[Line, ...]


def write(
    path: Path, title: str, charts: Sequence[Chart], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Path:
    """Write a page with charts and a table.

    Args:
        path: the file.
        title: the title of the page.
        charts: from `lay_out`.
        columns: headings of the table.
        rows: the cells of the table; the first of each row is a name.
    """
    style = (Path(__file__).parent / "page.css").read_text()
    size = {"width": WIDTH, "height": HEIGHT}
    page = fill_template("curves.html.j2", title=title, charts=charts, columns=columns, rows=rows, style=style, **size)
    return replace_file(path, [page.encode()])


def lay_out(title: str, curves: Sequence[Curve], *, percent: bool) -> Chart:
    """Lay out a line chart; values that are not finite are left out.

    Args:
        title: what the values are.
        curves: the lines.
        percent: whether the values are fractions to be shown as percentages.
    """
    plot = Box(58.0, 16.0, WIDTH - 58.0 - 16.0, HEIGHT - 16.0 - 40.0)
    finite = [
        Curve(curve.name, [(x, y) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)])
        for curve in curves
    ]
    points = [point for curve in finite for point in curve.points] or [(0.0, 0.0)]
    x_low, x_high, x_step = axis([0.0, 1.0, *(x for x, _ in points)], margin=0.0, min_span=1.0)
    y_low, y_high, y_step = axis([y for _, y in points], margin=0.05, min_span=0.01)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            plot.left + plot.width * (x - x_low) / (x_high - x_low),
            plot.bottom - plot.height * (y - y_low) / (y_high - y_low),
        )

    def text(value: float, digits: str) -> str:
        return f"{100 * value:{digits}} %" if percent else f"{value:{digits}}"

    lines = []
    for number, curve in enumerate(finite):
        if not curve.points:
            continue
        places = [place(*point) for point in curve.points]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        last = text(curve.points[-1][1], ".1f" if percent else ".3g")
        lines.append(Line(curve.name, path, places[-1], colour, dash, last))
    return Chart(
        title,
        plot,
        tuple(Mark(place(at, y_low)[0], f"{at:g}", plot.bottom + 18) for at in ticks(x_low, x_high, x_step)),
        tuple(Mark(place(x_low, at)[1], text(at, "g"), plot.left - 8) for at in ticks(y_low, y_high, y_step)),
        tuple(lines),
    )


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Values as bars for a terminal, at most `width` of them; the lowest bar is 0, the highest is 1.

    >>> sparkline([0.1, 0.5, 0.9, 1.0])
    '▁▅██'
    """
    step = max(1, math.ceil(len(values) / width))
    shown = [value for value in list(values)[::-1][::step][::-1] if math.isfinite(value)]
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * max(0.0, value)))] for value in shown)
