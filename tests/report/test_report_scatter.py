"""The layout of the privacy-utility chart."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.report._scatter import Box, Line, Point, _crosses, layout

LINES = [Line("15 dB threshold", 15.0), Line("blind guess", 14.5)]
LABELS = st.text(alphabet="abcdefgh-:=.0123456789", min_size=1, max_size=60)
POINTS = st.lists(
    st.builds(Point, LABELS, st.floats(0, 1), st.floats(-5, 60), st.booleans(), st.just("detail")),
    min_size=1,
    max_size=20,
)


def assert_readable(chart):
    boxes = [marker.box for marker in chart.markers]
    assert all(chart.plot.contains(box) for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    for marker in chart.markers:
        dot = Box(marker.x - 5, marker.y - 5, 10, 10)
        assert not any(box.overlaps(dot) for box in boxes)
        assert chart.plot.contains(Box(marker.x, marker.y, 0, 0))


@settings(max_examples=25, deadline=None)
@given(POINTS, st.booleans())
def test_labels_never_cover_each_other_nor_a_point(points, numbered):
    assert_readable(layout(points, LINES, width=350 if numbered else 900, numbered=numbered))


def test_twenty_labels_of_one_place_still_find_room():
    points = [Point(f"defense-number-{index}:parameter=0.123", 0.5, 10.0, False, "") for index in range(20)]
    assert_readable(layout(points, LINES, width=900, numbered=False))


def test_more_labels_than_fit_make_the_chart_higher():
    few = layout([Point("none", 0.5, 10.0, False, "")], LINES, width=900, numbered=False)
    points = [Point(f"{'x' * 36}{index:02}", 0.5, 10.0, False, "") for index in range(36)]
    many = layout(points, LINES, width=900, numbered=False)
    assert many.height > few.height
    assert_readable(many)


def test_higher_values_lie_higher_and_further_right():
    low, high = Point("low", 0.2, 5.0, False, ""), Point("high", 0.9, 30.0, True, "")
    first, second = layout([low, high], LINES, width=900, numbered=False).markers
    assert first.x < second.x
    assert first.y > second.y


def test_ticks_and_lines_are_on_the_same_scale_as_the_points():
    points = [Point("a", 0.5, 15.0, False, ""), Point("b", 0.6, 30.0, True, "")]
    chart = layout(points, [Line("threshold", 15.0)], width=900, numbered=False)
    assert chart.lines[0].at == pytest.approx(chart.markers[0].y)
    tick = next(tick for tick in chart.y_ticks if tick.text == "30")
    assert tick.at == pytest.approx(chart.markers[1].y)
    half = next(tick for tick in chart.x_ticks if tick.text == "50 %")
    assert half.at == pytest.approx(chart.markers[0].x)


def test_two_close_lines_have_their_texts_on_different_sides():
    chart = layout([Point("a", 0.5, 15.0, False, "")], LINES, width=900, numbered=False)
    upper, lower = chart.lines
    assert upper.text_at < upper.at
    assert lower.text_at > lower.at


def test_numbers_follow_the_order_of_the_points():
    points = [Point(name, 0.5, 10.0, False, "") for name in "abc"]
    chart = layout(points, LINES, width=350, numbered=True)
    assert [marker.text for marker in chart.markers] == ["1", "2", "3"]


def test_a_long_label_is_cut_visibly():
    (marker,) = layout([Point("x" * 80, 0.5, 10.0, False, "")], LINES, width=900, numbered=False).markers
    assert marker.text.endswith("…")
    assert marker.point.label == "x" * 80


def test_a_far_label_has_a_line_that_leads_to_it():
    points = [Point(f"defense-number-{index}", 0.5, 10.0, False, "") for index in range(9)]
    markers = layout(points, LINES, width=900, numbered=False).markers
    assert any(marker.leader for marker in markers)
    for marker in markers:
        gap = math.dist(marker.box.nearest(marker.x, marker.y), (marker.x, marker.y))
        assert (marker.leader is not None) == (gap > 10.5)


SEGMENTS = st.tuples(*[st.tuples(st.floats(-20, 20), st.floats(-20, 20))] * 2)


@given(SEGMENTS)
def test_a_segment_crosses_a_box_where_one_of_its_points_is_well_inside(segment):
    (x, y), (end_x, end_y) = segment
    steps = [index / 200 for index in range(201)]
    places = [(x + (end_x - x) * step, y + (end_y - y) * step) for step in steps]
    if any(abs(at_x) < 4.99 and abs(at_y) < 2.99 for at_x, at_y in places):
        assert _crosses(segment, Box(-5, -3, 10, 6))
    elif not any(abs(at_x) < 5.3 and abs(at_y) < 3.3 for at_x, at_y in places):
        assert not _crosses(segment, Box(-5, -3, 10, 6))
