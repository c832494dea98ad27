"""Tables and pictures of rows, as an experiment's config describes them; nothing is measured here.

A table takes a line for each row that its `where` names (or for each of its `lines`) and a cell for each of `columns`.
A cell is the text `show`, with fields of the row in braces. `from` names another row to show, `base` one to compare with,
both by the name of its case. Besides its own fields a row has

    median_X, mean_X, min_X, max_X, sum_X, count_X   of a field that is a list
    base_X, ratio_X, gain_X    that of the base row; the quotient; the median of the differences with its 95 % interval
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gradveil.audit.statistics import paired_difference

Row = Mapping[str, Any]
NOTHING = "–"
SUMMARIES = {"median": statistics.median, "mean": statistics.fmean, "min": min, "max": max, "sum": sum, "count": len}


class View(dict[str, Any]):
    """A row with what follows from it and its base; what is not there raises KeyError."""

    base: "View | None" = None

    @classmethod
    def of(cls, row: Row) -> "View":
        """With views of the objects inside it."""
        return cls({key: cls.of(value) if isinstance(value, dict) else value for key, value in row.items()})

    def __missing__(self, key: str) -> Any:
        how, _, field = key.partition("_")
        if how in SUMMARIES:
            return SUMMARIES[how](self[field]) if isinstance(self[field], list) else self[field]
        if self.base is None or how not in ("base", "ratio", "gain"):
            raise KeyError(key)
        if how == "gain":
            return gain(self[field], self.base[field])
        return self.base[field] if how == "base" else self[field] / self.base[field]


def gain(ones: Sequence[float], others: Sequence[float]) -> str:
    """What the first have more, paired by victim; bold if it is less for certain."""
    found = paired_difference(dict(enumerate(ones)), dict(enumerate(others)))
    if found is None or not found.known:
        return ", ".join(f"{one - other:+.1f}" for one, other in zip(ones, others, strict=True))
    text = f"{found.estimate:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
    return f"**{text}**" if found.high < 0 else text


def chosen(spec: Row, rows: Mapping[str, View]) -> list[View]:
    """The rows that a table or a panel is about, with the one that each is compared with."""
    found = []
    for row in rows.values():
        wanted = {key: one if isinstance(one, list) else [one] for key, one in spec["where"].items()}
        if all(any(fnmatchcase(str(row.get(key)), str(one)) for one in some) for key, some in wanted.items()):
            row = View(row)
            row.base = rows.get(spec["base"].format_map(row)) if "base" in spec else None
            found.append(row)
    order: dict[str, int] = {}
    return sorted(found, key=lambda row: order.setdefault(spec.get("together", "").format_map(row), len(order)))


def cell(names: Row, line: Row, rows: Mapping[str, View]) -> str:
    try:
        row = rows[names["from"].format_map(names)] if "from" in names else line
        text = names["show"].format_map(names) if "from" in names else names["show"]
        return text.format_map(row)
    except (KeyError, TypeError):  # not measured, or null
        return NOTHING


def table(spec: Row, rows: Mapping[str, View]) -> list[str]:
    """Markdown; nothing if there is no row."""
    lines = spec["lines"] if "lines" in spec else chosen(spec, rows)
    titles = [column["title"] for column in spec["columns"]]
    text = [f"## {spec['title']}", ""] if "title" in spec else []
    text += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for line in lines:
        cells = [cell({**spec, **line, **column}, line, rows) for column in spec["columns"]]
        text.append(f"| {' | '.join(one.replace('|', ' or ') for one in cells)} |")
    return [*text, ""] if lines else []


def plot(spec: Row, rows: Mapping[str, View], folder: Path) -> Path:
    """A line for each value of `line`, through points (`x`, `y`) of its rows or through a field of `points`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [{**spec, **panel} for panel in spec["panels"]]
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.6), layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        lines: dict[str, list[tuple[float, float, str]]] = {}
        for row in chosen(panel, rows):
            points = row[panel["points"]] if "points" in panel else [(row[panel["x"]], row[panel["y"]])]
            line = lines.setdefault(panel["line"].format_map(row), [])
            line += [(x, y, panel.get("note", "").format_map(row)) for x, y in points if None not in (x, y)]
        for name, points in lines.items():
            colour = panel.get("colours", {name: None}).get(name, "#b9bec4")
            axis.plot(
                *zip(*((x, y) for x, y, _ in points), strict=True), panel.get("style", "-"), label=name, color=colour
            )
            for x, y, note in points:
                axis.annotate(note, (x, y), fontsize=7, xytext=(4, 3), textcoords="offset points")
        axis.set(**panel.get("axes", {}))
    names = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(names.values(), names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    path = folder / spec["file"]
    figure.savefig(path, dpi=110)
    return path
