"""Charts as inline SVG: drawn in the page's colours, named and described in words, told apart by shape too.

They are about 340 units wide, so that on a narrow page their letters are as large as the page's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal, NamedTuple

import htpy as h

from reflact.calibration.metrics import ReliabilityBin
from reflact.records import IntervalEstimate
from reflact.reporting.html.page import format_interval, format_number
from reflact.reporting.lines import format_count

MarkStyle = Literal["before", "after", "plain"]
"""How a mark looks: a hollow circle, a filled diamond, a filled circle."""

CHART_WIDTH = 340
AXIS_TICKS = tuple(n / 10 for n in range(0, 11, 2))


class AxisScale(NamedTuple):
    """From values to places; what lies outside is drawn at the edge."""

    low: float
    high: float
    pixel_start: float
    pixel_end: float

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.pixel_start + share * (self.pixel_end - self.pixel_start)


class IntervalRow(NamedTuple):
    """One line of a chart of intervals; ``reference`` is a value to compare with, marked beside it."""

    label: str
    estimate: IntervalEstimate
    look: MarkStyle
    reference: float | None = None


def draw_reliability(name: str, title: str, bins: Sequence[ReliabilityBin], *, look: MarkStyle) -> h.Element:
    """Return how often a critic is right by how sure it is, with the number of steps in each bin below.

    Args:
        name: Begins the ids of its parts.
        title: What is shown, such as ``Before``.
        bins: The filled bins of confidence.
        look: How its marks look.
    """
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
        428,
        _draw_text(46, 12, title, class_="name"),
        (
            [_draw_line(across(at), up(0), across(at), up(1), "grid"), _draw_grid_line(across, up, at)]
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
        (_draw_bin(one, across, up, most, look) for one in bins),
        (_draw_bin_count(one, across, AxisScale(0, most, 418, 374)) for one in bins),
        _draw_line(across(0), 418, across(1), 418, "axis"),
        _draw_text(38, 418, "steps", anchor="end"),
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
    """Return a figure round by round: before any, and after each.

    Args:
        name: Begins the ids of its parts.
        title: What the figure is.
        values: The figure with its interval, the first one before any round; None if there was none.
        maximum: The upper end of the scale, which begins at 0.
        reference: A value to compare with.
        reference_label: What that value is.
    """
    across = AxisScale(0, max(len(values) - 1, 1), 64, 312)
    up = AxisScale(0, maximum, 202, 30)
    points = [(across(place), place, one) for place, one in enumerate(values) if one is not None]
    every = -(-len(values) // 10)
    ticks = [maximum * n / 4 for n in range(5)]
    described = "; ".join(
        f"{_round_label(n)}: {format_number(one.value)} {format_interval(one)}" for _, n, one in points
    )
    return _build_svg(
        name,
        f"{title} by round",
        f"{described}. {reference_label}: {format_number(reference)}.",
        246,
        _draw_text(40, 14, title, class_="name"),
        (
            [_draw_line(40, up(at), 330, up(at), "grid"), _draw_text(34, up(at) + 4, _format_tick(at), "end")]
            for at in ticks
        ),
        _draw_line(40, up(reference), 330, up(reference), "guide"),
        (
            _draw_line(x, up(one.value), next_x, up(after.value), "link")
            for (x, _, one), (next_x, _, after) in pairwise(points)
        ),
        (
            [
                _draw_vertical_interval(x, up(one.low), up(one.high), _round_style(n)),
                _draw_mark(x, up(one.value), 5, _round_style(n)),
            ]
            for x, n, one in points
        ),
        _draw_text(across(0.5), up(reference) - 4, reference_label, anchor="middle", class_="halo"),
        (_draw_text(across(n), 220, _round_label(n), anchor="middle") for n in range(0, len(values), every)),
        _draw_text(185, 238, "round", anchor="middle"),
    )


def draw_intervals(
    name: str,
    title: str,
    rows: Sequence[IntervalRow],
    *,
    limits: tuple[float, float],
    reference_label: str = "",
) -> h.Element:
    """Return estimates below each other, each with its interval and its value in words.

    A line in each marks 0.

    Args:
        name: Begins the ids of its parts.
        title: What is estimated, and in which unit.
        rows: The estimates.
        limits: The ends of the scale, with 0 at one or between them.
        reference_label: What the rows' references are.
    """
    low, high = limits
    across = AxisScale(low, high if high > low else low + 1, 8, CHART_WIDTH - 8)
    bottom = 30 + 46 * len(rows)
    described = "; ".join(
        f"{row.label}: {format_number(row.estimate.value)} {format_interval(row.estimate)}"
        + ("" if row.reference is None else f", {reference_label} {format_number(row.reference)}")
        for row in rows
    )
    return _build_svg(
        name,
        title,
        f"{described}.",
        bottom + 18,
        _draw_text(0, 12, title, class_="name"),
        (_draw_row(row, across, 36 + 46 * place) for place, row in enumerate(rows)),
        _draw_line(8, bottom, CHART_WIDTH - 8, bottom, "axis"),
        _draw_text(across(0), bottom + 14, "0", anchor="middle"),
        across(0) < CHART_WIDTH - 40
        and _draw_text(CHART_WIDTH - 8, bottom + 14, format_number(high, 1), anchor="end"),
        across(0) > 40 and _draw_text(8, bottom + 14, format_number(low, 1)),
    )


def find_limits(rows: Sequence[IntervalRow]) -> tuple[float, float]:
    """Return the ends of a scale on which all rows and 0 have room."""
    found = (end for row in rows for end in (row.estimate.low, row.estimate.high, row.reference))
    values = [0.0, *(end for end in found if end is not None)]
    return min(values), max(values)


def _draw_row(row: IntervalRow, x_scale: AxisScale, y: float) -> Iterator[h.Element]:
    low, value, high = (x_scale(at) for at in (row.estimate.low, row.estimate.value, row.estimate.high))
    yield _draw_text(0, y, row.label, class_="value")
    figures = f"{format_number(row.estimate.value)} {format_interval(row.estimate)}"
    yield _draw_text(CHART_WIDTH, y, figures, anchor="end", class_="value")
    middle = y + 17
    yield _draw_line(x_scale(0), middle - 11, x_scale(0), middle + 11, "axis")
    yield _draw_line(low, middle, high, middle, f"{row.look} whisker")
    yield from (_draw_line(end, middle - 4, end, middle + 4, f"{row.look} whisker") for end in (low, high))
    yield _draw_mark(value, middle, 5.5, row.look)
    if row.reference is not None:
        yield _draw_line(
            x_scale(row.reference), middle - 9, x_scale(row.reference), middle + 9, "plain whisker"
        )


def _draw_bin(
    reliability_bin: ReliabilityBin, x_scale: AxisScale, y_scale: AxisScale, max_count: int, look: MarkStyle
) -> Iterator[h.Element]:
    x, y = x_scale(reliability_bin.confidence), y_scale(reliability_bin.right_share)
    yield _draw_line(x, y_scale(reliability_bin.confidence), x, y, f"{look} whisker")
    yield _draw_mark(x, y, 4 + 6 * sqrt(reliability_bin.n_transitions / max_count), look)


def _draw_bin_count(
    reliability_bin: ReliabilityBin, x_scale: AxisScale, y_scale: AxisScale
) -> Iterator[h.Element]:
    left, right, top = (
        x_scale(reliability_bin.low) + 1,
        x_scale(reliability_bin.high) - 1,
        y_scale(reliability_bin.n_transitions),
    )
    size = {
        "x": _format_coordinate(left),
        "y": _format_coordinate(top),
        "width": _format_coordinate(right - left),
        "height": _format_coordinate(y_scale(0) - top),
    }
    yield h.rect(size, class_="count")
    yield _draw_text(
        (left + right) / 2,
        top - 3,
        format_count(reliability_bin.n_transitions),
        anchor="middle",
        class_="value",
    )


def _draw_mark(x: float, y: float, r: float, look: MarkStyle) -> h.Element:
    if look == "after":
        points = f"{_format_coordinate(x)},{_format_coordinate(y - r)} {_format_coordinate(x + r)},{_format_coordinate(y)} {_format_coordinate(x)},{_format_coordinate(y + r)} {_format_coordinate(x - r)},{_format_coordinate(y)}"
        return h.polygon(points=points, class_=look)
    return h.circle(cx=_format_coordinate(x), cy=_format_coordinate(y), r=_format_coordinate(r), class_=look)


def _draw_vertical_interval(x: float, low: float, high: float, look: MarkStyle) -> Iterator[h.Element]:
    yield _draw_line(x, low, x, high, f"{look} whisker")
    yield from (_draw_line(x - 4, end, x + 4, end, f"{look} whisker") for end in (low, high))


def _draw_grid_line(x_scale: AxisScale, y_scale: AxisScale, value: float) -> h.Element:
    return _draw_line(x_scale(0), y_scale(value), x_scale(1), y_scale(value), "grid")


def _draw_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> h.Element:
    return h.line(
        x1=_format_coordinate(x1),
        y1=_format_coordinate(y1),
        x2=_format_coordinate(x2),
        y2=_format_coordinate(y2),
        class_=class_,
    )


def _draw_text(
    x: float, y: float, text: str, anchor: Literal["start", "middle", "end"] = "start", class_: str = ""
) -> h.Element:
    return h.text(
        x=_format_coordinate(x), y=_format_coordinate(y), text_anchor=anchor, class_=class_ or None
    )[text]


def _build_svg(name: str, title: str, description: str, height: float, *parts: h.Node) -> h.Element:
    ids = f"{name}-title {name}-description"
    return h.svg(viewBox=f"0 0 {CHART_WIDTH} {_format_coordinate(height)}", role="img", aria_labelledby=ids)[
        h.title(id=f"{name}-title")[title], h.desc(id=f"{name}-description")[description], parts
    ]


def _round_label(index: int) -> str:
    return "before" if index == 0 else str(index)


def _round_style(index: int) -> MarkStyle:
    return "before" if index == 0 else "after"


def _format_tick(value: float) -> str:
    return format_number(value, 2 if value % 0.5 else 1)


def _format_coordinate(coordinate: float) -> str:
    return f"{coordinate:.1f}".removesuffix(".0")
