"""Charts as SVG inside a page, in its colors; a curve of many points keeps its extremes."""

import dataclasses
import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from convbert_jax.html_page.elements import element

_WIDTH, _HEIGHT = 360, 200  # of a chart, in the units of its SVG
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 8, 24  # room for the numbers at its axes
_MOST = 300  # points of a curve are thinned out to twice as many at most
_DOTTED = 60  # points of a curve that are shown one by one
_COLORS = ("first", "second", "third")


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
      points: (step, value), finite, by step.
      color: 0, 1 or 2.
      thin: drawn so, a single point as a dot; else bold, with its points told one by one where
        they are few.
    """

    label: str
    points: Sequence[tuple[int, float]]
    color: int = 0
    thin: bool = False


def line_chart(title: str, lines: Sequence[Line], no_skill: float | None = None) -> Element:
    """Values over steps, of at least one point.

    Args:
      no_skill: drawn as a dashed level.
    """
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    values += [] if no_skill is None else [no_skill]
    xs, ys = _Axis(steps, _LEFT, _WIDTH - _RIGHT), _Axis(values, _HEIGHT - _BOTTOM, _TOP)
    drawn, legend = [], []
    for tick in ys.ticks():
        y = ys.place(tick)
        drawn.append(_stroke(_LEFT, y, _WIDTH - _RIGHT, y, "axis"))
        drawn.append(_text(_LEFT - 5, y + 4, f"{tick:g}", "end"))
    for tick in xs.ticks():
        drawn.append(_text(xs.place(tick), _HEIGHT - 8, _count(tick), "middle"))
    if no_skill is not None:
        y = ys.place(no_skill)
        drawn.append(_stroke(_LEFT, y, _WIDTH - _RIGHT, y, "level"))
        legend.append(_key("no skill", "level"))
    for line in lines:
        color = _COLORS[line.color]
        kind = f"curve thin {color}" if line.thin else f"curve {color}"
        drawn.append(_curve(line, xs, ys, kind))
        legend.append(_key(line.label, kind))
        if len(line.points) <= (1 if line.thin else _DOTTED):
            drawn += [
                _dot(xs.place(x), ys.place(y), color, f"step {x:,}: {y:.4g}")
                for x, y in line.points
            ]
    return element(
        "figure",
        element("b", title),
        element(
            "svg",
            *drawn,
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            role="img",
            aria_label=f"{title}, over steps",
        ),
        element("figcaption", *legend, class_="legend"),
    )


def seeds_chart(values: Sequence[float], interval: tuple[float, float] | None) -> Element:
    """A dot for each finite score of a seed; the bar is an interval."""
    finite = [value for value in values if math.isfinite(value)]
    bounds = interval or ()
    axis = _Axis([*finite, *bounds], 8, 136)
    drawn = [_stroke(2, 10, 142, 10, "axis")]
    if interval:
        low, high = map(axis.place, interval)
        drawn.append(_stroke(low, 10, high, 10, "interval"))
    drawn += [_dot(axis.place(value), 10, "first", f"{100 * value:.1f}") for value in finite]
    label = ", ".join(f"{100 * value:.1f}" for value in finite)
    return element(
        "svg", *drawn, viewBox="0 0 144 20", role="img", aria_label=label, class_="seeds"
    )


class _Axis:
    """Numbers as places between two ends."""

    def __init__(self, values: Sequence[float], begin: float, end: float):
        self._low, self._high = min(values), max(values)
        if self._high - self._low < 1e-300:  # one number is shown in the middle
            room = max(abs(self._low) / 2, 1e-300) if self._low else 1.0
            self._low, self._high = self._low - room, self._high + room
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def ticks(self) -> list[float]:
        """Round numbers in its range."""
        from matplotlib.ticker import MaxNLocator

        found = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(self._low, self._high)
        return [float(tick) for tick in found if self._low <= tick <= self._high]


def _curve(line: Line, xs: _Axis, ys: _Axis, kind: str) -> Element:
    points = " ".join(f"{xs.place(x)},{ys.place(y)}" for x, y in _thin(line.points))
    return element("polyline", points=points, class_=kind)


def _thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lowest and the highest of each of `_MOST` stretches, in order."""
    if len(points) <= 2 * _MOST:
        return list(points)
    kept = []
    for number in range(_MOST):
        begin, end = (len(points) * n // _MOST for n in (number, number + 1))
        stretch = points[begin:end]
        ends = (min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1]))
        kept += sorted(set(ends))
    return kept


def _stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _dot(x: float, y: float, color: str, told: str) -> Element:
    return element("circle", element("title", told), cx=x, cy=y, r=3.2, class_=color)


def _text(x: float, y: float, text: str, anchor: str) -> Element:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _key(label: str, kind: str) -> Element:
    sample = element("svg", _stroke(0, 5, 24, 5, kind), viewBox="0 0 24 10", class_="key")
    return element("span", sample, label)


def _count(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"
