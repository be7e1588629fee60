"""Charts as inline SVG: drawn in the page's colours, named and described in words, told apart by shape too.

They are about 340 units wide, so that on a narrow page their letters are as large as the page's own.
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
from reflact.reporting.lines import format_count

MarkStyle = Literal["before", "after"]
"""How a mark looks: a hollow circle, or a filled diamond."""

CHART_WIDTH = 340
MAX_DESCRIBED = 60
"""A description in words names at most this many points that were not accepted."""

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


def draw_reliability(name: str, title: str, bins: Sequence[ReliabilityBin], *, look: MarkStyle) -> h.Element:
    """Return how often a critic is right by its confidence, with the number of steps in each bin below."""
    across, up = AxisScale(0, 1, 46, 330), AxisScale(0, 1, 314, 30)
    most = max((one.n_transitions for one in bins), default=1)
    described = "; ".join(
        f"confidence {format_number(one.confidence)}: right {format_number(one.right_share)} of {one.n_transitions}"
        for one in bins
    )
    return _build_svg(
        name,
        f"{title}: reliability diagram",
        f"How often the critic is right by its confidence. {described or 'No step was scored'}.",
        370,
        _draw_text(46, 12, title, class_="name"),
        (
            [
                _draw_line(across(at), up(0), across(at), up(1), "grid"),
                _draw_line(46, up(at), 330, up(at), "grid"),
            ]
            for at in AXIS_TICKS
        ),
        (_draw_text(38, up(at) + 4, format_number(at, 1), anchor="end") for at in AXIS_TICKS),
        (_draw_text(across(at), 330, format_number(at, 1), anchor="middle") for at in AXIS_TICKS),
        _draw_line(across(0), up(0), across(1), up(1), "guide"),
        _draw_text(across(0.03), up(0.93), "too modest", class_="halo"),
        _draw_text(across(0.66), up(0.1), "too sure", anchor="middle", class_="halo"),
        _draw_text(across(0.5), 346, "confidence", anchor="middle"),
        h.text(transform=f"translate(10 {_format_coordinate(up(0.5))}) rotate(-90)", text_anchor="middle")[
            "share right"
        ],
        (
            [
                _draw_line(x, up(one.confidence), x, up(one.right_share), f"{look} whisker"),
                _draw_mark(x, up(one.right_share), 4 + 6 * sqrt(one.n_transitions / most), look),
                _draw_text(
                    across((one.low + one.high) / 2), 364, format_count(one.n_transitions), "middle", "value"
                ),
            ]
            for one, x in ((one, across(one.confidence)) for one in bins)
        ),
        _draw_text(38, 364, "steps", anchor="end"),
    )


def draw_rounds(
    name: str,
    title: str,
    values: Sequence[IntervalEstimate | None],
    *,
    maximum: float,
    reference: float,
    reference_label: str,
) -> h.Element:
    """Return a figure round by round: before any, and after each, on a scale from 0 to ``maximum``."""
    across = AxisScale(0, max(len(values) - 1, 1), 64, 312)
    up = AxisScale(0, maximum, 202, 30)
    labels = ["before", *map(str, range(1, len(values)))]
    points = [(across(n), labels[n], one) for n, one in enumerate(values) if one is not None]
    described = "; ".join(
        f"{label}: {format_number(one.value)} {format_interval(one)}" for _, label, one in points
    )
    return _build_svg(
        name,
        f"{title} by round",
        f"{described}. {reference_label}: {format_number(reference)}.",
        246,
        _draw_text(40, 14, title, class_="name"),
        (
            [
                _draw_line(40, up(at), 330, up(at), "grid"),
                _draw_text(34, up(at) + 4, format_number(at, 2 if at % 0.5 else 1), "end"),
            ]
            for at in (maximum * n / 4 for n in range(5))
        ),
        _draw_line(40, up(reference), 330, up(reference), "guide"),
        (
            _draw_line(x, up(one.value), next_x, up(after.value), "link")
            for (x, _, one), (next_x, _, after) in pairwise(points)
        ),
        (_draw_interval(x, up, one, "before" if label == "before" else "after") for x, label, one in points),
        _draw_text(across(0.5), up(reference) - 4, reference_label, anchor="middle", class_="halo"),
        (
            _draw_text(across(n), 220, labels[n], anchor="middle")
            for n in range(0, len(values), -(-len(values) // 10))
        ),
        _draw_text(185, 238, "round", anchor="middle"),
    )


class ScorePoint(NamedTuple):
    """A measured document in the chart of a run; ``at`` is its step."""

    at: float
    label: str
    value: float
    interval: tuple[float, float] | None
    accepted: bool
    partial: bool = False


def draw_scores(
    name: str,
    title: str,
    points: Sequence[ScorePoint],
    current: Sequence[tuple[float, float | None]],
    *,
    width: int = CHART_WIDTH,
) -> h.Element:
    """Return scores by step with their intervals: accepted documents are filled, and a line is the current one.

    ``current`` is the score of the current document after each step; None interrupts the line.
    """
    shown = [end for point in points for end in (point.value, *(point.interval or ()))]
    low, high = floor(5 * min(shown, default=0)) / 5, ceil(5 * max(shown, default=1)) / 5
    last = max([1.0, *(point.at for point in points), *(at for at, _ in current)])
    across, up = AxisScale(0, last, 46, width - 12), AxisScale(low, max(high, low + 0.2), 202, 28)
    gap = (width - 58) / last
    size = 5.0 if gap > 14 else 3.5 if gap > 5 else 2.5
    parts = round((5 if up.high - low > 0.5 else 10) * (up.high - low))
    ticks = [low + n * (up.high - low) / parts for n in range(parts + 1)]
    steps = range(0, int(last) + 1, max(1, ceil(last / (width / 34))))
    return _build_svg(
        name,
        title,
        "; ".join(point.label for point in points if point.accepted or len(points) <= MAX_DESCRIBED),
        246,
        _draw_text(46, 12, title, class_="name"),
        [_draw_line(46, up(at), width - 12, up(at), "grid") for at in ticks],
        [_draw_text(40, up(at) + 4, format_number(at, 1), "end") for at in ticks],
        [
            _draw_line(across(x), up(y), across(next_x), up(next_y), "link")
            for (x, y), (next_x, next_y) in pairwise(current)
            if y is not None and next_y is not None
        ],
        [
            h.g(class_="partial" if point.partial else None)[
                h.title[point.label],
                point.interval is not None
                and _draw_whisker(
                    across(point.at),
                    up,
                    point.interval,
                    _get_look(accepted=point.accepted),
                    size if gap > 5 else 0,
                ),
                _draw_mark(across(point.at), up(point.value), size, _get_look(accepted=point.accepted)),
            ]
            for point in sorted(points, key=lambda point: point.accepted)
        ],
        [_draw_text(across(at), 220, str(at), anchor="middle") for at in steps],
        _draw_text((34 + width) / 2, 238, "step", anchor="middle"),
        width=width,
    )


def draw_estimates(
    name: str, title: str, rows: Sequence[tuple[str, MarkStyle, IntervalEstimate]]
) -> h.Element:
    """Return figures between 0 and 1 below each other, each with its interval."""
    across, height = AxisScale(0, 1, 104, 328), 30 * len(rows)
    described = "; ".join(f"{row}: {format_number(one.value)} {format_interval(one)}" for row, _, one in rows)
    return _build_svg(
        name,
        title,
        described,
        height + 44,
        _draw_text(4, 12, title, class_="name"),
        [
            [
                _draw_line(across(at), 22, across(at), height + 22, "grid"),
                _draw_text(across(at), height + 38, format_number(at, 1), "middle"),
            ]
            for at in AXIS_TICKS
        ],
        [
            [
                _draw_text(96, y + 4, row, "end", "value"),
                _draw_line(across(one.low), y, across(one.high), y, f"{look} whisker"),
                [
                    _draw_line(across(end), y - 4, across(end), y + 4, f"{look} whisker")
                    for end in (one.low, one.high)
                ],
                _draw_mark(across(one.value), y, 5, look),
            ]
            for y, (row, look, one) in ((30 * n + 37, row) for n, row in enumerate(rows))
        ],
    )


def _get_look(*, accepted: bool) -> MarkStyle:
    return "after" if accepted else "before"


def _draw_whisker(
    x: float, up: AxisScale, interval: tuple[float, float], look: MarkStyle, size: float
) -> list[h.Element]:
    low, high = (up(end) for end in interval)
    caps = (_draw_line(x - size, end, x + size, end, f"{look} whisker") for end in (low, high) if size)
    return [_draw_line(x, low, x, high, f"{look} whisker"), *caps]


def _draw_interval(x: float, up: AxisScale, estimate: IntervalEstimate, look: MarkStyle) -> list[h.Element]:
    return [
        *_draw_whisker(x, up, (estimate.low, estimate.high), look, 4),
        _draw_mark(x, up(estimate.value), 5, look),
    ]


def _draw_mark(x: float, y: float, r: float, look: MarkStyle) -> h.Element:
    if look == "before":
        return h.circle(
            cx=_format_coordinate(x), cy=_format_coordinate(y), r=_format_coordinate(r), class_=look
        )
    corners = ((x, y - r), (x + r, y), (x, y + r), (x - r, y))
    points = " ".join(f"{_format_coordinate(a)},{_format_coordinate(b)}" for a, b in corners)
    return h.polygon(points=points, class_=look)


def _draw_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> h.Element:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return h.line({name: _format_coordinate(at) for name, at in ends.items()}, class_=class_)


def _draw_text(
    x: float, y: float, text: str, anchor: Literal["start", "middle", "end"] = "start", class_: str = ""
) -> h.Element:
    place = {"x": _format_coordinate(x), "y": _format_coordinate(y)}
    return h.text(place, text_anchor=anchor, class_=class_ or None)[text]


def _build_svg(
    name: str, title: str, description: str, height: int, *parts: h.Node, width: int = CHART_WIDTH
) -> h.Element:
    ids = f"{name}-title {name}-description"
    return h.svg(viewBox=f"0 0 {width} {height}", role="img", aria_labelledby=ids)[
        h.title(id=f"{name}-title")[title], h.desc(id=f"{name}-description")[description], parts
    ]


def _format_coordinate(coordinate: float) -> str:
    return f"{coordinate:.1f}".removesuffix(".0")
