"""Tables and pictures of rows, as an experiment's config describes them; nothing is measured here.

A table has a line for each row that its `where` names (or each of its `lines`) and a cell for each of its `columns`:
the text `show` with fields of the row in braces. `from` names another row that is shown, `base` one to compare with,
both by the name of the case; these words may stand in a table, a line or a column. Besides its own fields a row has

    median_X, mean_X, min_X, max_X, sum_X, count_X   of a field that is a list
    percent_X                                        a hundred times that
    base_X, ratio_X                                  that of the base; the quotient of the two
    gain_X                                           the median of the paired differences with its 95 % interval
    method, strength                                 the defense's name; its parameters from the first value on

A picture has `panels` with a line for each value of `line`, through points `x`, `y` or through pairs, a field `points`.
"""

import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gradveil.audit.statistics import paired_difference

NOTHING = "–"
OTHERS = "#b9bec4"
SUMMARIES = {"median": statistics.median, "mean": statistics.fmean, "min": min, "max": max, "sum": sum, "count": len}


class View(dict[str, Any]):
    """A row with what follows from it and its base."""

    base: "View | None" = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "View":
        """With views of the objects inside it."""
        return cls({key: cls.of(value) if isinstance(value, dict) else value for key, value in row.items()})

    def compared(self, spec: Mapping[str, Any], rows: Mapping[str, "View"]) -> "View":
        """With the base that a table names."""
        view = View(self)
        view.base = rows.get(spec["base"].format_map(self)) if "base" in spec else None
        return view

    def __missing__(self, key: str) -> Any:
        if key in ("method", "strength"):
            return self["defense"].partition(":")[0] if key == "method" else self["defense"].partition("=")[2]
        how, _, field = key.partition("_")
        if how in SUMMARIES:
            return SUMMARIES[how](self[field]) if isinstance(self[field], list) else self[field]
        if how == "percent":
            return 100 * self[field]
        if self.base is None or how not in ("base", "ratio", "gain"):
            raise KeyError(key)
        if how == "gain":
            return gain(self[field], self.base[field])
        return self.base[field] if how == "base" else self[field] / self.base[field]


def gain(ones: Sequence[float], others: Sequence[float]) -> str:
    """What the first have more, paired by victim; bold if it is less for certain, one by one if there are few."""
    found = paired_difference(dict(enumerate(ones)), dict(enumerate(others)))
    if found is None or not found.known:
        return ", ".join(f"{one - other:+.1f}" for one, other in zip(ones, others, strict=True))
    text = f"{found.estimate:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
    return f"**{text}**" if found.high < 0 else text


def chosen(spec: Mapping[str, Any], rows: Mapping[str, View]) -> list[View]:
    """The rows whose fields fit the patterns of `where`, those with the same text `together` after each other."""
    found = list(rows.values())
    for key, patterns in spec["where"].items():
        wanted = patterns if isinstance(patterns, list) else [patterns]
        found = [row for row in found if any(fnmatchcase(str(row.get(key)), str(one)) for one in wanted)]
    order: dict[str, int] = {}
    return sorted(found, key=lambda row: order.setdefault(spec.get("together", "").format_map(row), len(order)))


def table(spec: Mapping[str, Any], rows: Mapping[str, View]) -> list[str]:
    """Lines of markdown."""

    def cell(line: Mapping[str, Any], column: Mapping[str, Any]) -> str:
        names = {**spec, **line, **column}
        try:
            if not names.get("from"):
                return names["show"].format_map(View(line).compared(names, rows))
            row = rows[names["from"].format_map(names)]
            return names["show"].format_map(names).format_map(row.compared(names, rows))
        except (KeyError, TypeError):  # not measured, or null
            return NOTHING

    columns = spec["columns"]
    text = [f"## {spec['title']}", ""] if "title" in spec else []
    text += [f"| {' | '.join(column['title'] for column in columns)} |", "|---" * len(columns) + "|"]
    for line in spec["lines"] if "lines" in spec else chosen(spec, rows):
        text.append(f"| {' | '.join(cell(line, column).replace('|', ' or ') for column in columns)} |")
    return [*text, ""]


def plot(spec: Mapping[str, Any], rows: Mapping[str, View], root: Path) -> Path:
    """Draw a picture into its `file`."""
    from matplotlib.figure import Figure

    panels = [{**spec, **panel} for panel in spec["panels"]]
    figure = Figure(figsize=(6 * len(panels), 4.6), layout="constrained")
    colours, legend = dict(spec.get("colours", {})), {}
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for view in [row.compared(panel, rows) for row in chosen(panel, rows)]:
            if "base" in panel and view.base is None:
                continue
            points = view[panel["points"]] if "points" in panel else [(view[panel["x"]], view[panel["y"]])]
            lines.setdefault(panel["line"].format_map(view), []).extend(points)
            if note := panel.get("note", "").format_map(view):
                axes.annotate(note, points[-1], (4, 3), textcoords="offset points", fontsize=7)
        for name, points in lines.items():
            if "colours" not in spec:
                colours.setdefault(name, f"C{len(colours)}")
            (drawn,) = axes.plot(*zip(*points, strict=True), panel.get("style", "-"), color=colours.get(name, OTHERS))
            legend[name if name in colours else "others"] = drawn
        axes.set(**panel["axes"])
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(root / spec["file"], dpi=110)
    return root / spec["file"]
