"""What is in a text stays a text, whatever it is."""

import base64

import hypothesis
import pytest
from hypothesis import given, strategies

from convbert_jax.html_page import blocks, charts
from convbert_jax.html_page.elements import clean, element, foreign, render
from tests.html_page import hostile
from tests.html_page.parsed import Page


@hypothesis.settings(max_examples=150, deadline=None)
@given(strategies.lists(hostile.TEXTS, min_size=8, max_size=8))
def test_no_text_opens_a_tag(texts):
    def make(t):
        return render(
            t[0],
            blocks.section(t[1], element("p", t[2], element("b", t[3]), foreign(t[4]), title=t[5])),
            blocks.table((t[6], "n"), [(t[7], element("i", t[0])), (t[1], t[2])], names=1),
            blocks.picture(b"\x89PNG", t[3]),
            charts.line_chart(t[4], [charts.Line(t[5], [(1, 2.0), (2, 3.0)])]),
        )

    hostile.check(make, texts)
    whole = make(texts).encode("utf-8")  # no half of a surrogate pair is left
    assert Page(whole.decode("utf-8")).tags.isdisjoint({"script", "link", "iframe"})


def test_a_command_is_read_as_it_is_typed():
    command = "python -m it --name='two  words' --file='<b>.txt'"
    (shown,) = Page(render("page", blocks.code(command))).texts("code")
    assert shown == command


def test_lines_end_as_in_a_browser():
    assert clean("a\r\nb\rc\nd\te\x00\ud800") == "a\nb\nc\nd\te\ufffd\ufffd"


def test_the_page_asks_for_nothing():
    page = Page(render("page", blocks.picture(b"\x89PNG", "a picture")))
    (source,) = page.values("src")
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == b"\x89PNG"
    assert any("default-src 'none'" in policy for policy in page.values("content"))


POINTS = strategies.lists(
    strategies.tuples(
        strategies.integers(0, 10**9),
        strategies.floats(-1e38, 1e38) | strategies.sampled_from([0.0, 5e-324, 1e-323, -5e-324]),
    ),
    min_size=1,
    max_size=1500,
    unique_by=lambda point: point[0],
).map(sorted)


@hypothesis.settings(max_examples=60, deadline=None)
@given(POINTS, strategies.none() | strategies.floats(-1e3, 1e3))
def test_curves_stay_inside_of_their_chart(points, no_skill):
    chart = charts.line_chart("loss", [charts.Line("loss", points)], no_skill)
    (curve,) = chart.iter("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in curve.get("points").split()]
    assert 1 <= len(places) <= 600
    left, right = 46, 348
    assert all(left <= x <= right and 8 <= y <= 176 for x, y in places)
    assert places == sorted(places, key=lambda place: place[0])
    if len(points) > 1 and no_skill is None:
        assert (places[0][0], places[-1][0]) == pytest.approx((left, right), abs=2)


def test_a_curve_of_many_points_keeps_its_spikes():
    points = [(step, 0.0) for step in range(10_000)]
    points[4321] = (4321, 9.0)
    points[8765] = (8765, -9.0)
    (curve,) = charts.line_chart("x", [charts.Line("x", points)]).iter("polyline")
    heights = [float(pair.split(",")[1]) for pair in curve.get("points").split()]
    assert (min(heights), max(heights)) == (8, 176)
    assert heights.count(92) == len(heights) - 2


def test_points_can_be_pointed_at():
    chart = charts.line_chart("x", [charts.Line("held out", [(1000, 0.25), (2000, 0.5)])])
    assert [title.text for title in chart.iter("title")] == [
        "step 1,000: 0.25",
        "step 2,000: 0.5",
    ]
    thin = charts.line_chart("x", [charts.Line("train", [(9, 0.5)], thin=True)])
    assert [title.text for title in thin.iter("title")] == ["step 9: 0.5"]


def test_seeds_and_their_interval():
    chart = charts.seeds_chart([0.5, float("nan"), 0.75], (0.4, 0.8))
    assert chart.get("aria-label") == "50.0, 75.0"
    assert [float(dot.get("cx")) for dot in chart.iter("circle")] == [40, 120]
