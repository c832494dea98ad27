"""Tables and plots of rows, as an experiment's config describes them; nothing is measured here.

A table has a line for each row that its `where` selects (or for each of its `lines`) and a cell for each of its
`columns`: the text `show`, with fields of the row in braces. `from` names another row to show and `base` a row to
compare with, both by the name of the case; these keys may be in a table, a line or a column. Rows for which the text
`joined` is the same are one line, in which numbers are lists with an entry for each row, and lists follow one another.
In addition to its own fields, a row has

    median_X, mean_X, min_X, max_X, sum_X, count_X   a summary of a field that is a list
    percent_X                                        a hundred times a field
    base_X, ratio_X                                  the field of the base; the quotient of the two
    gain_X                                           the median of the paired differences with its 95 % interval
    method, strength                                 the defense's name; its parameters, from the first value on

A plot has `panels` with a line for each value of `line`, through points `x`, `y` or the pairs in a field `points`.
"""

import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gradveil.audit.statistics import paired_difference

MISSING = "–"
OTHERS_COLOUR = "#b9bec4"
SUMMARIES = {"median": statistics.median, "mean": statistics.fmean, "min": min, "max": max, "sum": sum, "count": len}


class View(dict[str, Any]):
    """A row, with fields derived from it and from its base."""

    base: "View | None" = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "View":
        """A view of a row, with views of the objects inside it."""
        return cls({key: cls.of(value) if isinstance(value, dict) else value for key, value in row.items()})

    def compared(self, spec: Mapping[str, Any], rows: Mapping[str, "View"]) -> "View":
        """The same view with the base that a table names."""
        view = View(self)
        view.base = rows.get(spec["base"].format_map(self)) if "base" in spec else None
        return view

    def __missing__(self, key: str) -> Any:
        if key in ("method", "strength"):
            return self["defense"].partition(":")[0] if key == "method" else self["defense"].partition("=")[2]
        operation, _, field = key.partition("_")
        if operation in SUMMARIES:
            return SUMMARIES[operation](self[field]) if isinstance(self[field], list) else self[field]
        if operation == "percent":
            return 100 * self[field]
        if self.base is None or operation not in ("base", "ratio", "gain"):
            raise KeyError(key)
        if operation == "gain":
            return gain(self[field], self.base[field])
        return self.base[field] if operation == "base" else self[field] / self.base[field]


def gain(values: Sequence[float], base: Sequence[float]) -> str:
    """The paired difference to the base, in bold if it is significantly negative; each difference if they are few."""
    difference = paired_difference(dict(enumerate(values)), dict(enumerate(base)))
    if difference is None or not difference.known:
        return ", ".join(f"{value - other:+.1f}" for value, other in zip(values, base, strict=True))
    text = f"{difference.estimate:+.1f} ({difference.low:+.1f} to {difference.high:+.1f})"
    return f"**{text}**" if difference.high < 0 else text


def select_rows(spec: Mapping[str, Any], rows: Mapping[str, View]) -> list[View]:
    """The rows whose fields match the patterns of `where`, grouped by the text `together`."""
    selected = list(rows.values())
    for key, patterns in spec["where"].items():
        alternatives = patterns if isinstance(patterns, list) else [patterns]
        selected = [
            row for row in selected if any(fnmatchcase(str(row.get(key)), str(pattern)) for pattern in alternatives)
        ]
    order: dict[str, int] = {}
    return sorted(selected, key=lambda row: order.setdefault(spec.get("together", "").format_map(row), len(order)))


def joined_rows(text: str, rows: Sequence[View]) -> list[View]:
    """One row for all that have the same `text`: numbers as lists, lists as one, all else as in the first of them."""
    groups: dict[str, list[View]] = {}
    for row in rows:
        groups.setdefault(text.format_map(row), []).append(row)

    def joined(key: str, group: list[View]) -> Any:
        first = group[0][key]
        if isinstance(first, int | float):
            return [row.get(key) for row in group]
        return [entry for row in group for entry in row.get(key) or []] if isinstance(first, list) else first

    return [View({key: joined(key, group) for key in group[0]}) for group in groups.values()]


def table(spec: Mapping[str, Any], rows: Mapping[str, View]) -> list[str]:
    """The table as lines of Markdown."""

    def cell(line: Mapping[str, Any], column: Mapping[str, Any]) -> str:
        names = {**spec, **line, **column}
        try:
            if not names.get("from"):
                return names["show"].format_map(View(line).compared(names, rows))
            row = rows[names["from"].format_map(names)]
            return names["show"].format_map(names).format_map(row.compared(names, rows))
        except (KeyError, TypeError):  # not measured, or null
            return MISSING

    columns = spec["columns"]
    text = [f"## {spec['title']}", ""] if "title" in spec else []
    text += [f"| {' | '.join(column['title'] for column in columns)} |", "|---" * len(columns) + "|"]
    lines = spec["lines"] if "lines" in spec else select_rows(spec, rows)
    for line in joined_rows(spec["joined"], lines) if "joined" in spec else lines:
        text.append(f"| {' | '.join(cell(line, column).replace('|', ' or ') for column in columns)} |")
    return [*text, ""]


def plot(spec: Mapping[str, Any], rows: Mapping[str, View], root: Path) -> Path:
    """Draw a plot into its `file`."""
    from matplotlib.figure import Figure

    panels = [{**spec, **panel} for panel in spec["panels"]]
    figure = Figure(figsize=(6 * len(panels), 4.6), layout="constrained")
    colours, legend = dict(spec.get("colours", {})), {}
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for view in [row.compared(panel, rows) for row in select_rows(panel, rows)]:
            if "base" in panel and view.base is None:
                continue
            points = view[panel["points"]] if "points" in panel else [(view[panel["x"]], view[panel["y"]])]
            lines.setdefault(panel["line"].format_map(view), []).extend(points)
            if note := panel.get("note", "").format_map(view):
                axes.annotate(note, points[-1], (4, 3), textcoords="offset points", fontsize=7)
        for name, points in lines.items():
            if "colours" not in spec:
                colours.setdefault(name, f"C{len(colours)}")
            (drawn,) = axes.plot(
                *zip(*points, strict=True), panel.get("style", "-"), color=colours.get(name, OTHERS_COLOUR)
            )
            legend[name if name in colours else "others"] = drawn
        axes.set(**panel["axes"])
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(root / spec["file"], dpi=110)
    return root / spec["file"]
