import math
import re

import pytest

from gradveil.report.curves import BARS, COLOURS, Curve, lay_out, sparkline, write


def points_of(line):
    return [tuple(map(float, pair.split())) for pair in re.split(r"[ML]", line.path)[1:]]


def test_points_are_where_the_axes_say():
    chart = lay_out("accuracy", [Curve("a", [(0, 0.1), (10, 0.5), (20, 0.9)])], percent=True)
    [line] = chart.lines
    (x0, y0), (x1, y1), (x2, y2) = points_of(line)
    assert x0 == pytest.approx(chart.plot.left, abs=0.1)
    assert x2 == pytest.approx(chart.plot.right, abs=0.1)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert chart.plot.top < y2 < y0 < chart.plot.bottom
    half = next(tick for tick in chart.y_ticks if tick.text == "40 %")
    assert half.at == pytest.approx(y0 + (y2 - y0) * (0.4 - 0.1) / 0.8, abs=0.1)


def test_what_is_not_finite_is_left_out():
    chart = lay_out(
        "loss", [Curve("a", [(0, 2.0), (1, math.inf), (2, math.nan), (3, 1.0)]), Curve("b", [])], percent=False
    )
    [line] = chart.lines
    assert len(points_of(line)) == 2
    assert line.last == "1"
    assert lay_out("loss", [Curve("b", [])], percent=False).lines == ()


def test_more_curves_than_colours_can_still_be_told_apart():
    chart = lay_out("loss", [Curve(str(n), [(0, n), (1, n)]) for n in range(2 * len(COLOURS))], percent=False)
    assert len({(line.colour, line.dash) for line in chart.lines}) == 2 * len(COLOURS)


def test_the_page_is_one_file_and_escapes_names(tmp_path):
    charts = [lay_out("accuracy", [Curve("<b>a</b>", [(0, 0.1), (5, 0.3)])], percent=True)]
    page = write(tmp_path / "training.html", "a <title>", charts, ["defense"], [["<i>x</i>"]]).read_text()
    assert "&lt;b&gt;a&lt;/b&gt;" in page
    assert "<i>x</i>" not in page
    assert "http" not in page


def test_a_sparkline_ends_with_the_last_value_and_keeps_its_width():
    values = [number / 100 for number in range(101)]
    line = sparkline(values, width=10)
    assert len(line) <= 10
    assert line[-1] == BARS[-1]
    assert sparkline([]) == ""
    assert sparkline([math.nan, 0.0]) == BARS[0]
