"""The charts of a page, as inline SVG in its colours.

They are named and described in words, and marks are told apart by shape too. They are 340 units
wide, so that on a narrow page their letters are as large as the page's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, sqrt
from typing import Literal, NamedTuple

import htpy as h

from reflact.calibration.metrics import ReliabilityBin
from reflact.calibration.report import format_interval, format_number
from reflact.records import IntervalEstimate
from reflact.text import format_count

# How a mark looks: a hollow circle, or a filled diamond.
MarkStyle = Literal["before", "after"]

CHART_WIDTH = 340

# The most numbers below a chart.
MAX_LABELS = 9

# Marks have names if each has so many units of the width on average.
MIN_NAME_WIDTH = 24

# A description in words names at most this many points that were not accepted.
MAX_DESCRIBED = 60

AXIS_TICKS = tuple(n / 10 for n in range(0, 11, 2))


class AxisScale(NamedTuple):
    """Maps values to coordinates; what lies outside is drawn at the edge."""

    low: float
    high: float
    pixel_start: float
    pixel_end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.pixel_start + share * (self.pixel_end - self.pixel_start)


class ScorePoint(NamedTuple):
    """A measured value in a chart; ``at`` is its step or round, ``name`` stands above its mark."""

    at: float
    label: str
    value: float
    interval: tuple[float, float] | None
    look: MarkStyle
    name: str = ""


class Edge(NamedTuple):
    """A line between two points ``(at, value)`` of a chart."""

    start: tuple[float, float]
    end: tuple[float, float]
    look: MarkStyle = "after"


def draw_reliability(
    name: str, title: str, bins: Sequence[ReliabilityBin], *, look: MarkStyle
) -> h.Element:
    """Return how often a critic is right by its confidence, with the steps of each bin below."""
    across = AxisScale(0, 1, 46, 330)
    up = AxisScale(0, 1, 314, 30)
    most = max((one.n_transitions for one in bins), default=1)
    described = "; ".join(
        f"confidence {format_number(one.confidence)}: right {format_number(one.right_share)} of "
        f"{one.n_transitions}"
        for one in bins
    )
    parts: list[h.Node] = [draw_text(46, 12, title, class_="name")]
    for at in AXIS_TICKS:
        parts += [
            draw_line(across(at), up(0), across(at), up(1), "grid"),
            draw_line(46, up(at), 330, up(at), "grid"),
            draw_text(38, up(at) + 4, format_number(at, 1), anchor="end"),
            draw_text(across(at), 330, format_number(at, 1), anchor="middle"),
        ]
    turned = f"translate(12 {format_coordinate(up(0.5))}) rotate(-90)"
    parts += [
        draw_line(across(0), up(0), across(1), up(1), "guide"),
        draw_text(across(0.03), up(0.93), "too modest", class_="halo"),
        draw_text(across(0.66), up(0.1), "too sure", anchor="middle", class_="halo"),
        draw_text(across(0.5), 346, "confidence", anchor="middle"),
        h.text(transform=turned, text_anchor="middle")["share right"],
        draw_text(38, 364, "steps", anchor="end"),
    ]
    for one in bins:
        x = across(one.confidence)
        middle = across((one.low + one.high) / 2)
        steps = format_count(one.n_transitions)
        parts += [
            draw_line(x, up(one.confidence), x, up(one.right_share), f"{look} whisker"),
            _draw_mark(x, up(one.right_share), 4 + 6 * sqrt(one.n_transitions / most), look),
            draw_text(middle, 364, steps, "middle", "value"),
        ]
    description = (
        f"How often the critic is right by its confidence. {described or 'No step was scored'}."
    )
    return build_svg(name, f"{title}: reliability diagram", description, 370, *parts)


def draw_rounds(
    name: str,
    title: str,
    values: Sequence[IntervalEstimate | None],
    *,
    maximum: float,
    reference: float,
    reference_label: str,
) -> h.Element:
    """Return a figure after each round, the first one before any, from 0 to ``maximum``."""
    points = []
    for n, one in enumerate(values):
        if one is not None:
            label = f"{n or 'before'}: {format_number(one.value)} {format_interval(one)}"
            look: MarkStyle = "after" if n else "before"
            points.append(ScorePoint(n, label, one.value, (one.low, one.high), look))
    return draw_series(
        name,
        title,
        points,
        [Edge((a.at, a.value), (b.at, b.value)) for a, b in pairwise(points)],
        unit="round",
        bounds=(0, maximum),
        reference=(reference, reference_label),
    )


def draw_series(
    name: str,
    title: str,
    points: Sequence[ScorePoint],
    edges: Sequence[Edge],
    *,
    unit: str,
    bounds: tuple[float, float] | None = None,
    reference: tuple[float, str] | None = None,
) -> h.Element:
    """Return values by step or round with their intervals, and lines between some of them.

    Without ``bounds``, the axis spans what is shown.
    """
    shown = [end for point in points for end in (point.value, *(point.interval or ()))]
    low = floor(5 * min(shown, default=0)) / 5
    high = max(ceil(5 * max(shown, default=1)) / 5, low + 0.2)
    if bounds is not None:
        low, high = bounds
    last = max([1.0, *(point.at for point in points)])
    right = CHART_WIDTH - 12
    across = AxisScale(0, last, 56, right - 10)
    up = AxisScale(low, high, 202, 28)
    gap = (right - 66) / last
    size = 5.0 if gap > 14 else 2.5
    cap = size if gap > 5 else 0
    density = None if gap > 5 else "dense"
    has_names = sum(bool(point.name) for point in points) * MIN_NAME_WIDTH < right - 66
    parts: list[h.Node] = [draw_text(46, 12, title, class_="name")]
    described = [p.label for p in points if p.look == "after" or len(points) <= MAX_DESCRIBED]
    for n in range(5):
        at = low + n * (high - low) / 4
        parts += [
            draw_line(46, up(at), right, up(at), "grid"),
            draw_text(40, up(at) + 4, format_number(at, 2), "end"),
        ]
    for n in range(0, int(last) + 1, ceil(last / MAX_LABELS)):
        parts.append(draw_text(across(n), 220, str(n), anchor="middle"))
    parts.append(draw_text(CHART_WIDTH / 2, 238, unit, anchor="middle"))
    if reference is not None:
        value, label = reference
        described.append(f"{label}: {format_number(value)}")
        parts.append(draw_line(46, up(value), right, up(value), "guide"))
        parts.append(draw_text(across(last / 2), up(value) - 4, label, "middle", "halo"))
    for (x1, y1), (x2, y2), look in edges:
        parts.append(draw_line(across(x1), up(y1), across(x2), up(y2), f"{look} link"))
    for point in sorted(points, key=lambda point: point.look)[::-1]:
        x = across(point.at)
        marks: list[h.Node] = [h.title[point.label]]
        if point.interval is not None:
            marks += _draw_whisker(x, up, point.interval, point.look, cap)
        marks.append(_draw_mark(x, up(point.value), size, point.look))
        if point.name and has_names:
            marks.append(draw_text(x, up(point.value) - 10, point.name, "middle", "value halo"))
        parts.append(h.g(class_=density)[marks])
    return build_svg(name, f"{title} by {unit}", "; ".join(described), 246, *parts)


def _draw_whisker(
    x: float, up: AxisScale, interval: tuple[float, float], look: MarkStyle, size: float
) -> list[h.Element]:
    low, high = (up(end) for end in interval)
    lines = [draw_line(x, low, x, high, f"{look} whisker")]
    if size:
        lines += [draw_line(x - size, y, x + size, y, f"{look} whisker") for y in (low, high)]
    return lines


def _draw_mark(x: float, y: float, r: float, look: MarkStyle) -> h.Element:
    if look == "before":
        numbers = {"cx": x, "cy": y, "r": r}
        return h.circle({k: format_coordinate(n) for k, n in numbers.items()}, class_=look)
    corners = ((x, y - r), (x + r, y), (x, y + r), (x - r, y))
    points = " ".join(f"{format_coordinate(a)},{format_coordinate(b)}" for a, b in corners)
    return h.polygon(points=points, class_=look)


def draw_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> h.Element:
    """Return a line of a chart."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return h.line({name: format_coordinate(at) for name, at in ends.items()}, class_=class_)


def draw_text(
    x: float,
    y: float,
    text: str,
    anchor: Literal["start", "middle", "end"] = "start",
    class_: str = "",
) -> h.Element:
    """Return a text in a chart."""
    place = {"x": format_coordinate(x), "y": format_coordinate(y)}
    return h.text(place, text_anchor=anchor, class_=class_ or None)[text]


def build_svg(name: str, title: str, description: str, height: int, *parts: h.Node) -> h.Element:
    """Return a chart with its title, and its content in words."""
    ids = f"{name}-title {name}-description"
    return h.svg(viewBox=f"0 0 {CHART_WIDTH} {height}", role="img", aria_labelledby=ids)[
        h.title(id=f"{name}-title")[title], h.desc(id=f"{name}-description")[description], parts
    ]


def format_coordinate(coordinate: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{coordinate:.1f}".removesuffix(".0")
