"""Layout of the privacy-utility chart; the template only draws it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

CHARACTER_WIDTH = 6.8  # of a monospaced 11 px font, rounded up
LABEL_HEIGHT = 14.0
RADIUS = 5.5
RING_SPACING = 9.0  # between the circles around a point on which its label may be placed

Segment = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Point:
    """A defense: the accuracy it keeps (x), what the strongest attack recovers (y) and the text of its tooltip.

    `family` is the name of the defense without its strength; a line joins the points of a family. `interval` is the
    interval of y. `dominated` means that another defense is at least as good in both x and y, and better in one.
    """

    label: str
    x: float
    y: float
    leaked: bool
    detail: str
    family: str = ""
    interval: tuple[float, float] | None = None
    dominated: bool = False


@dataclass(frozen=True)
class Line:
    """A horizontal reference line at y."""

    text: str
    y: float


@dataclass(frozen=True)
class Scale:
    """How y is drawn: the axis spans at least `min_span`; if `sign` is -1, tick labels show the negated values."""

    min_span: float = 5.0
    sign: float = 1.0


DEFAULT_SCALE = Scale()


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of the right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The y of the lower edge."""
        return self.top + self.height

    def overlaps(self, other: "Box") -> bool:
        """Whether the two boxes overlap."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def contains(self, other: "Box") -> bool:
        """Whether `other` lies inside this box."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the box nearest to (x, y)."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


@dataclass(frozen=True)
class Marker:
    """A point in pixels: its position, its interval (`whisker`), its label and the end of the line that leads there."""

    point: Point
    number: int
    x: float
    y: float
    whisker: tuple[float, float] | None
    text: str
    box: Box
    leader: tuple[float, float] | None


@dataclass(frozen=True)
class Mark:
    """A tick or a reference line at a position in pixels, with its text."""

    at: float
    text: str
    text_at: float


@dataclass(frozen=True)
class Chart:
    """A finished layout.

    Example:
        >>> points = [Point("none", 0.9, 34.0, True, "everything leaks")]
        >>> chart = layout(points, [Line("threshold", 15.0)], width=700, numbered=False)
        >>> chart.markers[0].text, chart.plot.contains(chart.markers[0].box)
        ('none', True)
    """

    width: float
    height: float
    plot: Box
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    lines: tuple[Mark, ...]
    paths: tuple[str, ...]
    markers: tuple[Marker, ...]


def layout(
    points: Sequence[Point], lines: Sequence[Line], scale: Scale = DEFAULT_SCALE, *, width: float, numbered: bool
) -> Chart:
    """Lay out at least one point. Labels never overlap: the chart grows until all of them fit.

    Args:
        points: the defenses; x is a fraction.
        lines: horizontal reference lines.
        scale: how y is drawn.
        width: the width of the chart in pixels.
        numbered: label the points 1, 2, ... instead of by name, for narrow screens.
    """
    height = 380.0 if numbered else 440.0
    while (chart := _try_layout(points, lines, scale, width, height, numbered)) is None:
        height += 60.0
    return chart


def _try_layout(
    points: Sequence[Point], lines: Sequence[Line], scale: Scale, width: float, height: float, numbered: bool
) -> Chart | None:
    plot = Box(46.0, 14.0, width - 46.0 - 14.0, height - 14.0 - 44.0)
    x_low, x_high, x_step = axis([point.x for point in points], margin=0.06, min_span=0.05)
    interval_ends = [end for point in points for end in point.interval or ()]
    y_values = [*(point.y for point in points), *interval_ends, *(line.y for line in lines), 0.0]
    y_low, y_high, y_step = axis(y_values, 0.05, scale.min_span)

    def to_x(value: float) -> float:
        return plot.left + plot.width * (value - x_low) / (x_high - x_low)

    def to_y(value: float) -> float:
        return plot.bottom - plot.height * (value - y_low) / (y_high - y_low)

    marks = _line_marks(lines, heights=[to_y(line.y) for line in lines])
    positions = [(to_x(point.x), to_y(point.y)) for point in points]
    texts = [str(number) if numbered else _shorten(point.label) for number, point in enumerate(points, 1)]
    occupied = [Box(x - RADIUS - 3, y - RADIUS - 3, 2 * RADIUS + 6, 2 * RADIUS + 6) for x, y in positions]
    occupied += [
        Box(plot.left, mark.text_at - LABEL_HEIGHT + 3, len(mark.text) * CHARACTER_WIDTH, LABEL_HEIGHT)
        for mark in marks
    ]
    placer = _LabelPlacer(plot, occupied, [Box(plot.left, mark.at - 2, plot.width, 4) for mark in marks])
    markers = []
    for number, (point, (x, y), text) in enumerate(zip(points, positions, texts, strict=True), 1):
        box = placer.place(x, y, len(text) * CHARACTER_WIDTH)
        if box is None:
            return None
        end = box.nearest(x, y)
        needs_leader = math.dist(end, (x, y)) > RADIUS + 5
        low, high = point.interval or (None, None)
        whisker = None if low is None or high is None else (to_y(low), to_y(high))
        markers.append(Marker(point, number, x, y, whisker, text, box, end if needs_leader else None))
    return Chart(
        width=width,
        height=height,
        plot=plot,
        x_ticks=tuple(Mark(to_x(at), f"{100 * at:g} %", plot.bottom + 18) for at in ticks(x_low, x_high, x_step)),
        y_ticks=tuple(Mark(to_y(at), f"{scale.sign * at + 0:g}", plot.left - 8) for at in ticks(y_low, y_high, y_step)),
        lines=tuple(marks),
        paths=tuple(_paths(points, positions)),
        markers=tuple(markers),
    )


class _LabelPlacer:
    """Places labels one by one in the free space of a plot.

    A label never covers another label, an `occupied` box or one of the `lines`. Its leader, the line from the point to
    the label, may cross the `lines`, but crosses other labels and points only if there is no other place.
    """

    def __init__(self, plot: Box, occupied: Sequence[Box], lines: Sequence[Box]) -> None:
        self._plot = plot
        self._occupied = list(occupied)
        self._lines = lines
        self._leaders: list[Segment] = []

    def place(self, x: float, y: float, width: float) -> Box | None:
        """The best box for the label of the point (x, y), or None if there is no room."""
        second_best = None
        for box in _boxes_around(x, y, width, reach=math.hypot(self._plot.width, self._plot.height)):
            if not self._is_free(box):
                continue
            if self._is_clear(((x, y), box.nearest(x, y)), box):
                return self._reserve(x, y, box)
            second_best = second_best or box
        return second_best and self._reserve(x, y, second_best)

    def _is_free(self, box: Box) -> bool:
        return self._plot.contains(box) and not any(
            box.overlaps(other) for others in (self._occupied, self._lines) for other in others
        )

    def _is_clear(self, leader: Segment, box: Box) -> bool:
        start, _ = leader
        obstacles = (other for other in self._occupied if other.nearest(*start) != start)
        return not any(_crosses(leader, other) for other in obstacles) and not any(
            _crosses(other, box) for other in self._leaders
        )

    def _reserve(self, x: float, y: float, box: Box) -> Box:
        self._occupied.append(box)
        self._leaders.append(((x, y), box.nearest(x, y)))
        return box


def _boxes_around(x: float, y: float, width: float, reach: float) -> Iterator[Box]:
    """Boxes at growing distance: first to the right, where readers expect a label, then left, above, below."""
    directions = (0, 8, 4, 12, 1, 15, 7, 9, 2, 14, 6, 10, 3, 13, 5, 11)  # in units of pi / 8
    for ring in range(math.ceil(reach / RING_SPACING)):
        distance = RADIUS + 4 + RING_SPACING * ring
        for direction in directions:
            angle = math.pi * direction / 8
            anchor_x, anchor_y = x + distance * math.cos(angle), y - distance * math.sin(angle)
            left = anchor_x - width * (1 - math.cos(angle)) / 2
            yield Box(left, anchor_y - LABEL_HEIGHT * (1 + math.sin(angle)) / 2, width, LABEL_HEIGHT)


def _crosses(segment: Segment, box: Box) -> bool:
    """Whether a segment passes through a box: the parts of it inside the box in x and in y must overlap."""
    (x, y), (end_x, end_y) = segment
    enter, leave = 0.0, 1.0
    for start, step, low, high in ((x, end_x - x, box.left, box.right), (y, end_y - y, box.top, box.bottom)):
        if step == 0:
            if not low < start < high:
                return False
            continue
        near, far = sorted(((low - start) / step, (high - start) / step))
        enter, leave = max(enter, near), min(leave, far)
    return enter < leave


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points, with `dominated` set if another point is at least as far right and as low, and not identical.

    >>> best, worse = Point("a", 0.9, 8.0, False, ""), Point("b", 0.8, 9.0, False, "")
    >>> [point.dominated for point in pareto([best, worse])]
    [False, True]
    """

    def is_dominated(point: Point) -> bool:
        return any(
            other.x >= point.x and other.y <= point.y and (other.x, other.y) != (point.x, point.y) for other in points
        )

    return [replace(point, dominated=is_dominated(point)) for point in points]


def _paths(points: Sequence[Point], positions: Sequence[tuple[float, float]]) -> Iterator[str]:
    """The line through the points of each family, from left to right, in the format of an SVG polyline."""
    families: dict[str, list[tuple[float, float]]] = {}
    for point, position in zip(points, positions, strict=True):
        families.setdefault(point.family or point.label, []).append(position)
    for members in families.values():
        if len(members) > 1:
            yield " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(members))


def _line_marks(lines: Sequence[Line], heights: Iterable[float]) -> list[Mark]:
    """Put the text of the highest line above it and the others below, so that two close lines stay readable."""
    marks = sorted(zip(heights, (line.text for line in lines), strict=True))
    return [Mark(at, text, at - 5 if position == 0 else at + 14) for position, (at, text) in enumerate(marks)]


def axis(values: Sequence[float], margin: float, min_span: float) -> tuple[float, float, float]:
    """The ends and the tick step of an axis that holds `values`, with a margin relative to their span."""
    span = max(max(values) - min(values), min_span)
    low, high = min(values) - margin * span, max(values) + margin * span
    min_step = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= min_step)
    return low, high, step


def ticks(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` from `low` to `high`."""
    return [round(index * step, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _shorten(label: str, limit: int = 38) -> str:
    return label if len(label) <= limit else f"{label[: limit - 1]}…"
