"""Where everything goes in the privacy-utility picture; the template only draws it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

CHARACTER = 6.8  # width of a monospaced character of 11 px, rounded up
LABEL_HEIGHT = 14.0
RADIUS = 5.5
RING = 9.0  # distance between the circles on which a label's place is sought

Segment = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Point:
    """A defense: what it keeps (x), what the strongest attack gets (y), and the words for its tooltip.

    `family` is what the defense is called at any strength: its points are joined by a line. `interval` is that of y.
    `dominated`: another defense keeps as much and lets as little through, and is better in one of both.
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
    """A horizontal mark at y."""

    text: str
    y: float


@dataclass(frozen=True)
class Scale:
    """How y is drawn: over a difference of at least `least`; with a `sign` of -1, its ticks say the negative."""

    least: float = 5.0
    sign: float = 1.0


PLAIN = Scale()


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
        """Whether the two share an area."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def contains(self, other: "Box") -> bool:
        """Whether `other` lies inside."""
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
    """A point with its place, the ends of its interval, its label's box and the end of the line that leads there."""

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
    """A tick or a line at a position in pixels, with its text."""

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
    points: Sequence[Point], lines: Sequence[Line], scale: Scale = PLAIN, *, width: float, numbered: bool
) -> Chart:
    """Lay out at least one point. Labels never overlap: the chart grows until all have a place.

    Args:
        points: the defenses; x is a share of 1.
        lines: horizontal marks.
        scale: of y.
        width: of the whole chart, in pixels.
        numbered: label the points with numbers from 1 on, for a screen too narrow for names.
    """
    height = 380.0 if numbered else 440.0
    while (chart := _try_layout(points, lines, scale, width, height, numbered)) is None:
        height += 60.0
    return chart


def _try_layout(
    points: Sequence[Point], lines: Sequence[Line], scale: Scale, width: float, height: float, numbered: bool
) -> Chart | None:
    plot = Box(46.0, 14.0, width - 46.0 - 14.0, height - 14.0 - 44.0)
    x_low, x_high, x_step = axis([point.x for point in points], room=0.06, least=0.05)
    ends = [end for point in points for end in point.interval or ()]
    heights = [*(point.y for point in points), *ends, *(line.y for line in lines), 0.0]
    y_low, y_high, y_step = axis(heights, 0.05, scale.least)

    def to_x(value: float) -> float:
        return plot.left + plot.width * (value - x_low) / (x_high - x_low)

    def to_y(value: float) -> float:
        return plot.bottom - plot.height * (value - y_low) / (y_high - y_low)

    marks = _line_marks(lines, to_y_values=[to_y(line.y) for line in lines])
    places = [(to_x(point.x), to_y(point.y)) for point in points]
    texts = [str(number) if numbered else _shorten(point.label) for number, point in enumerate(points, 1)]
    occupied = [Box(x - RADIUS - 3, y - RADIUS - 3, 2 * RADIUS + 6, 2 * RADIUS + 6) for x, y in places]
    occupied += [
        Box(plot.left, mark.text_at - LABEL_HEIGHT + 3, len(mark.text) * CHARACTER, LABEL_HEIGHT) for mark in marks
    ]
    room = _Room(plot, occupied, [Box(plot.left, mark.at - 2, plot.width, 4) for mark in marks])
    markers = []
    for number, (point, (x, y), text) in enumerate(zip(points, places, texts, strict=True), 1):
        box = room.take(x, y, len(text) * CHARACTER)
        if box is None:
            return None
        end = box.nearest(x, y)
        far = math.dist(end, (x, y)) > RADIUS + 5
        low, high = point.interval or (None, None)
        whisker = None if low is None or high is None else (to_y(low), to_y(high))
        markers.append(Marker(point, number, x, y, whisker, text, box, end if far else None))
    return Chart(
        width=width,
        height=height,
        plot=plot,
        x_ticks=tuple(Mark(to_x(at), f"{100 * at:g} %", plot.bottom + 18) for at in ticks(x_low, x_high, x_step)),
        y_ticks=tuple(Mark(to_y(at), f"{scale.sign * at + 0:g}", plot.left - 8) for at in ticks(y_low, y_high, y_step)),
        lines=tuple(marks),
        paths=tuple(_paths(points, places)),
        markers=tuple(markers),
    )


class _Room:
    """The free space of a plot, given away label by label.

    Labels cover neither each other nor what is `occupied` nor the `lines`; the line that leads to a label may
    cross those, and goes through other labels and points only where nothing else is left.
    """

    def __init__(self, plot: Box, occupied: Sequence[Box], lines: Sequence[Box]) -> None:
        self._plot = plot
        self._occupied = list(occupied)
        self._lines = lines
        self._leaders: list[Segment] = []

    def take(self, x: float, y: float, width: float) -> Box | None:
        """The best place for a label of (x, y), None if there is none."""
        second_best = None
        for box in _boxes_around(x, y, width, reach=math.hypot(self._plot.width, self._plot.height)):
            if not self._is_free(box):
                continue
            if self._is_clear(((x, y), box.nearest(x, y)), box):
                return self._give(x, y, box)
            second_best = second_best or box
        return second_best and self._give(x, y, second_best)

    def _is_free(self, box: Box) -> bool:
        return self._plot.contains(box) and not any(
            box.overlaps(other) for others in (self._occupied, self._lines) for other in others
        )

    def _is_clear(self, leader: Segment, box: Box) -> bool:
        start, _ = leader
        elsewhere = (other for other in self._occupied if other.nearest(*start) != start)
        return not any(_crosses(leader, other) for other in elsewhere) and not any(
            _crosses(other, box) for other in self._leaders
        )

    def _give(self, x: float, y: float, box: Box) -> Box:
        self._occupied.append(box)
        self._leaders.append(((x, y), box.nearest(x, y)))
        return box


def _boxes_around(x: float, y: float, width: float, reach: float) -> Iterator[Box]:
    """Boxes at growing distance: right first, where the eye expects a label, then left, above, below."""
    eighths = (0, 8, 4, 12, 1, 15, 7, 9, 2, 14, 6, 10, 3, 13, 5, 11)
    for ring in range(math.ceil(reach / RING)):
        distance = RADIUS + 4 + RING * ring
        for eighth in eighths:
            angle = math.pi * eighth / 8
            anchor_x, anchor_y = x + distance * math.cos(angle), y - distance * math.sin(angle)
            left = anchor_x - width * (1 - math.cos(angle)) / 2
            yield Box(left, anchor_y - LABEL_HEIGHT * (1 + math.sin(angle)) / 2, width, LABEL_HEIGHT)


def _crosses(segment: Segment, box: Box) -> bool:
    """Whether a segment goes through a box: the parts of it between the edges, in x and in y, must meet."""
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
    """The points, marked where another one dominates them: at least as far right and as low, and not in the same place.

    >>> best, worse = Point("a", 0.9, 8.0, False, ""), Point("b", 0.8, 9.0, False, "")
    >>> [point.dominated for point in pareto([best, worse])]
    [False, True]
    """

    def is_dominated(point: Point) -> bool:
        return any(
            other.x >= point.x and other.y <= point.y and (other.x, other.y) != (point.x, point.y) for other in points
        )

    return [replace(point, dominated=is_dominated(point)) for point in points]


def _paths(points: Sequence[Point], places: Sequence[tuple[float, float]]) -> Iterator[str]:
    """The line through the points of each family, from left to right, as an SVG polyline has it."""
    families: dict[str, list[tuple[float, float]]] = {}
    for point, place in zip(points, places, strict=True):
        families.setdefault(point.family or point.label, []).append(place)
    for members in families.values():
        if len(members) > 1:
            yield " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(members))


def _line_marks(lines: Sequence[Line], to_y_values: Iterable[float]) -> list[Mark]:
    """The highest line has its text above, the others below, so that two close lines stay readable."""
    marks = sorted(zip(to_y_values, (line.text for line in lines), strict=True))
    return [Mark(at, text, at - 5 if position == 0 else at + 14) for position, (at, text) in enumerate(marks)]


def axis(values: Sequence[float], room: float, least: float) -> tuple[float, float, float]:
    """Ends and tick step of an axis that holds `values` with some room around them."""
    span = max(max(values) - min(values), least)
    low, high = min(values) - room * span, max(values) + room * span
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return low, high, step


def ticks(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` from `low` to `high`."""
    return [round(index * step, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _shorten(label: str, most: int = 38) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"
