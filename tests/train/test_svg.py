"""Pictures: axes with round numbers, paths that keep what they must, elements that parse."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanok3.train.svg import (
    RATIO_SHADE,
    Axis,
    Line,
    Mark,
    compact,
    escape,
    fit,
    heat_map,
    histogram,
    line_chart,
    median,
    ridges,
    share_shade,
    spread,
    thinned,
)

X, Y = Axis("tokens", 0, 10), Axis("loss", 0, 1)


def paths(svg: str, kind: str) -> list[str]:
    """The `d` of each path that carries a class."""
    return [e.get("d", "") for e in ET.fromstring(svg).iter("path") if kind in (e.get("class") or "").split()]


def words(svg: str) -> list[str]:
    return [e.text or "" for e in ET.fromstring(svg).iter("text")]


@pytest.mark.parametrize(
    "value, shown",
    [
        (0, "0"),
        (0.25, "0.25"),
        (1234, "1.23k"),
        (999.9, "1k"),
        (35_000_000, "35M"),
        (2.78e12, "2.78T"),
        (-1500, "-1.5k"),
        (2e-4, "2·10⁻⁴"),
        (1e-5, "10⁻⁵"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert compact(value) == shown


def test_escaping_leaves_nothing_that_html_cannot_hold() -> None:
    assert escape('<b a="1">&\'') == "&lt;b a=&quot;1&quot;&gt;&amp;&#x27;"
    assert escape("a\x00b\x1b[31m\ud800\x85") == "a␀b␛[31m��"
    assert escape("two\nlines\tand a tab") == "two\nlines\tand a tab"


def test_marks_are_round() -> None:
    assert Axis("", 0, 10).marks() == [0, 2, 4, 6, 8, 10]
    assert Axis("", 1.1, 1.9).marks(5) == pytest.approx([1.2, 1.4, 1.6, 1.8])
    assert Axis("", 1.2, 9, log=True).marks() == pytest.approx([1.5, 2, 3, 5, 7])
    assert Axis("", 1, 1e6, log=True).marks(4) == pytest.approx([1, 100, 1e4, 1e6])
    assert Axis("", 0, 100, ticks=(0, 50, 100, 150)).marks() == [0, 50, 100]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9), st.integers(4, 8))
def test_linear_marks_lie_inside_and_are_few(low: float, size: float, most: int) -> None:
    axis = fit("", [low, low + size])
    assert 1 <= len(axis.marks(most)) <= 2 * most
    assert all(0 <= axis.at(v) <= 1 for v in axis.marks(most))


@given(st.floats(1e-9, 1e9), st.floats(1.0, 1e9), st.integers(2, 8))
def test_logarithmic_marks_keep_their_distance(low: float, ratio: float, most: int) -> None:
    axis = fit("", [low, low * ratio], log=True)
    marks = axis.marks(most)
    assert all(axis.low <= v <= axis.high * (1 + 1e-9) for v in marks)
    assert all(axis.at(b) - axis.at(a) > 0.5 / (1.7 * most) for a, b in zip(marks, marks[1:]))


def test_an_axis_ignores_what_it_cannot_show() -> None:
    axis = fit("", [math.nan, 0.0, -1.0, 2.0, 8.0, math.inf], log=True)
    assert 0 < axis.low < 2 and 8 < axis.high < 10
    assert fit("", []).low < fit("", []).high and 0 < fit("", [], log=True).low < fit("", [], log=True).high
    assert fit("", [3.0, 3.0]).low < 3 < fit("", [3.0, 3.0]).high


def test_values_outside_stay_at_the_ends() -> None:
    assert [X.at(v) for v in (-5, 0, 5, 10, 50)] == [0, 0, 0.5, 1, 1]
    assert Axis("", 1, 100, log=True).at(10) == pytest.approx(0.5)


def test_thinning_keeps_every_peak() -> None:
    points = [(float(i), 1000.0 if i == 777 else -1000.0 if i == 4321 else math.sin(i)) for i in range(10_000)]
    kept = thinned(points, 100)
    assert len(kept) <= 100 and kept == sorted(kept)
    assert (777.0, 1000.0) in kept and (4321.0, -1000.0) in kept and points[0] in kept and points[-1] in kept
    assert thinned(points[:50], 100) == points[:50]


def test_labels_are_moved_apart() -> None:
    assert spread([1, 2, 3], 10, 0, 100) == [1, 11, 21]
    assert spread([95, 96, 97], 10, 0, 100) == [80, 90, 100]
    assert spread([0, 50, 100], 10, 0, 100) == [0, 50, 100]


def test_a_missing_value_breaks_the_line() -> None:
    chart = line_chart([Line("a", [(0, 0.1), (1, 0.2), (2, math.nan), (3, 0.4), (4, 0.5)])], X, Y)
    [path] = paths(chart, "line")
    assert path.count("M") == 2 and path.count("L") == 2


def test_a_chart_names_its_axes_lines_and_levels() -> None:
    chart = line_chart([Line("<mine>", [(0, 0.1), (10, 0.9)], 2, "dots")], X, Y, [Mark("zlib", 0.5)])
    assert {"tokens", "loss", "<mine>", "zlib"} <= set(words(chart))
    assert paths(chart, "level") and "0.9 at 10" in words(chart)


def test_a_chart_without_finite_points_still_parses() -> None:
    for points in ([], [(0.0, math.nan)]):
        assert paths(line_chart([Line("a", points)], X, Y), "line") == []


def test_whiskers_reach_over_their_interval() -> None:
    chart = line_chart([Line("a", [(5, 0.5)], spans=[(0.25, 0.75)])], X, Axis("", 0, 1))
    x, low, high = (float(v) for v in paths(chart, "whisker")[0].replace("M", "").replace("V", " ").split())
    dot = next(e for e in ET.fromstring(chart).iter("circle"))
    assert x == float(dot.get("cx", "")) and (low + high) / 2 == pytest.approx(float(dot.get("cy", "")), abs=0.1)


def test_a_heat_map_has_one_cell_a_value() -> None:
    names = {"row_name": "layer", "column_name": "expert", "key_name": "share"}
    svg = heat_map([[0.0, 1.0], [0.5, None], [0.25]], ["a", "b", "<c>"], ["x", "y"], share_shade(1.0), **names)
    cells = list(ET.fromstring(svg).iter("rect"))
    assert len(cells) == 4 + 5  # and the five of the key
    opacity = [float(e.get("fill-opacity", "")) for e in cells[:4]]
    assert opacity[1] == 1 and opacity[0] < opacity[3] < opacity[2] < 1
    assert [e.findtext("title") for e in cells[:4]] == ["a, x: 0", "a, y: 1", "b, x: 0.5", "<c>, x: 0.25"]


def test_ratios_are_colourless_at_one_and_differ_in_hue_around_it() -> None:
    assert RATIO_SHADE.strength(1.0) == 0 and RATIO_SHADE.strength(4.0) == RATIO_SHADE.strength(0.25) == 1
    assert (RATIO_SHADE.kind(2.0), RATIO_SHADE.kind(0.5)) == ("heat", "cool")
    assert RATIO_SHADE.strength(0.0) == 1


def test_histograms_count_everything_once() -> None:
    axis = Axis("", 1, 1000, log=True)
    assert histogram([0.5, 1, 5, 50, 500, 1000, 1e9], axis, 3) == [3, 1, 3]
    assert median([3, 1, 2]) == 2 and median([4, 1, 2, 3]) == 2.5


def test_ridges_show_a_histogram_and_a_median_for_each_row() -> None:
    svg = ridges([("head 0", [1, 10, 100]), ("head 1", [5])], Axis("tokens", 1, 1000, log=True), [Mark("length", 256)])
    assert len(paths(svg, "ridge")) == len(paths(svg, "median")) == 2 and "length" in words(svg)
