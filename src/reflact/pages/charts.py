"""Charts as inline SVG: drawn in the page's colours, named and described in words, told apart by shape too.

They are about 340 units wide, so that on a narrow page their letters are as large as the page's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal, NamedTuple

import htpy as h

from reflact.calibration.metrics import Bin
from reflact.pages.frame import number, span
from reflact.reporting.lines import format_count
from reflact.results import IntervalEstimate

Look = Literal["before", "after", "plain"]
"""How a mark looks: a hollow circle, a filled diamond, a filled circle."""

WIDTH = 340
TENTHS = tuple(n / 10 for n in range(0, 11, 2))


class Scale(NamedTuple):
    """From values to places; what lies outside is drawn at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


class Row(NamedTuple):
    """One line of a chart of intervals; ``reference`` is a value to compare with, marked beside it."""

    label: str
    estimate: IntervalEstimate
    look: Look
    reference: float | None = None


def reliability_diagram(name: str, title: str, bins: Sequence[Bin], *, look: Look) -> h.Element:
    """Return how often a critic is right by how sure it is, with the number of steps in each bin below.

    Args:
        name: Begins the ids of its parts.
        title: What is shown, such as ``Before``.
        bins: The filled bins of confidence.
        look: How its marks look.
    """
    across, up = Scale(0, 1, 46, 330), Scale(0, 1, 314, 30)
    most = max((one.transitions for one in bins), default=1)
    described = "; ".join(
        f"confidence {number(one.confidence)}: right {number(one.right)} of {one.transitions}" for one in bins
    )
    return _drawing(
        name,
        f"{title}: reliability diagram",
        f"How often the critic is right by its confidence. {described or 'No step was scored'}.",
        428,
        _text(46, 12, title, class_="name"),
        ([_line(across(at), up(0), across(at), up(1), "grid"), _across(across, up, at)] for at in TENTHS),
        (_text(38, up(at) + 4, number(at, 1), anchor="end") for at in TENTHS),
        (_text(across(at), 330, number(at, 1), anchor="middle") for at in TENTHS),
        _line(across(0), up(0), across(1), up(1), "guide"),
        _text(across(0.03), up(0.93), "too modest", class_="halo"),
        _text(across(0.66), up(0.1), "too sure", anchor="middle", class_="halo"),
        _text(across(0.5), 346, "confidence", anchor="middle"),
        h.text(transform=f"translate(10 {_at(up(0.5))}) rotate(-90)", text_anchor="middle")["share right"],
        (_binned(one, across, up, most, look) for one in bins),
        (_count(one, across, Scale(0, most, 418, 374)) for one in bins),
        _line(across(0), 418, across(1), 418, "axis"),
        _text(38, 418, "steps", anchor="end"),
    )


def course(
    name: str,
    title: str,
    values: Sequence[IntervalEstimate | None],
    *,
    most: float,
    reference: float,
    known_as: str,
) -> h.Element:
    """Return a figure round by round: before any, and after each.

    Args:
        name: Begins the ids of its parts.
        title: What the figure is.
        values: The figure with its interval, the first one before any round; None where there was none.
        most: The upper end of the scale, which begins at 0.
        reference: A value to compare with.
        known_as: What that value is.
    """
    across = Scale(0, max(len(values) - 1, 1), 64, 312)
    up = Scale(0, most, 202, 30)
    points = [(across(place), place, one) for place, one in enumerate(values) if one is not None]
    every = -(-len(values) // 10)
    ticks = [most * n / 4 for n in range(5)]
    described = "; ".join(f"{_when(n)}: {number(one.value)} {span(one)}" for _, n, one in points)
    return _drawing(
        name,
        f"{title} by round",
        f"{described}. {known_as}: {number(reference)}.",
        246,
        _text(40, 14, title, class_="name"),
        ([_line(40, up(at), 330, up(at), "grid"), _text(34, up(at) + 4, _tick(at), "end")] for at in ticks),
        _line(40, up(reference), 330, up(reference), "guide"),
        (
            _line(x, up(one.value), next_x, up(after.value), "link")
            for (x, _, one), (next_x, _, after) in pairwise(points)
        ),
        (
            [_upright(x, up(one.low), up(one.high), _look(n)), _mark(x, up(one.value), 5, _look(n))]
            for x, n, one in points
        ),
        _text(across(0.5), up(reference) - 4, known_as, anchor="middle", class_="halo"),
        (_text(across(n), 220, _when(n), anchor="middle") for n in range(0, len(values), every)),
        _text(185, 238, "round", anchor="middle"),
    )


def intervals(
    name: str, title: str, rows: Sequence[Row], *, ends: tuple[float, float], known_as: str = ""
) -> h.Element:
    """Return estimates below each other, each with its interval and its value in words.

    A line in each marks 0.

    Args:
        name: Begins the ids of its parts.
        title: What is estimated, and in which unit.
        rows: The estimates.
        ends: The ends of the scale, with 0 at one or between them.
        known_as: What the rows' references are.
    """
    low, high = ends
    across = Scale(low, high if high > low else low + 1, 8, WIDTH - 8)
    bottom = 30 + 46 * len(rows)
    described = "; ".join(
        f"{row.label}: {number(row.estimate.value)} {span(row.estimate)}"
        + ("" if row.reference is None else f", {known_as} {number(row.reference)}")
        for row in rows
    )
    return _drawing(
        name,
        title,
        f"{described}.",
        bottom + 18,
        _text(0, 12, title, class_="name"),
        (_row(row, across, 36 + 46 * place) for place, row in enumerate(rows)),
        _line(8, bottom, WIDTH - 8, bottom, "axis"),
        _text(across(0), bottom + 14, "0", anchor="middle"),
        across(0) < WIDTH - 40 and _text(WIDTH - 8, bottom + 14, number(high, 1), anchor="end"),
        across(0) > 40 and _text(8, bottom + 14, number(low, 1)),
    )


def ends_of(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the ends of a scale on which all rows and 0 have room."""
    found = (end for row in rows for end in (row.estimate.low, row.estimate.high, row.reference))
    values = [0.0, *(end for end in found if end is not None)]
    return min(values), max(values)


def _row(row: Row, across: Scale, y: float) -> Iterator[h.Element]:
    low, value, high = (across(at) for at in (row.estimate.low, row.estimate.value, row.estimate.high))
    yield _text(0, y, row.label, class_="value")
    figures = f"{number(row.estimate.value)} {span(row.estimate)}"
    yield _text(WIDTH, y, figures, anchor="end", class_="value")
    middle = y + 17
    yield _line(across(0), middle - 11, across(0), middle + 11, "axis")
    yield _line(low, middle, high, middle, f"{row.look} whisker")
    yield from (_line(end, middle - 4, end, middle + 4, f"{row.look} whisker") for end in (low, high))
    yield _mark(value, middle, 5.5, row.look)
    if row.reference is not None:
        yield _line(across(row.reference), middle - 9, across(row.reference), middle + 9, "plain whisker")


def _binned(one: Bin, across: Scale, up: Scale, most: int, look: Look) -> Iterator[h.Element]:
    x, y = across(one.confidence), up(one.right)
    yield _line(x, up(one.confidence), x, y, f"{look} whisker")
    yield _mark(x, y, 4 + 6 * sqrt(one.transitions / most), look)


def _count(one: Bin, across: Scale, up: Scale) -> Iterator[h.Element]:
    left, right, top = across(one.low) + 1, across(one.high) - 1, up(one.transitions)
    size = {"x": _at(left), "y": _at(top), "width": _at(right - left), "height": _at(up(0) - top)}
    yield h.rect(size, class_="count")
    yield _text((left + right) / 2, top - 3, format_count(one.transitions), anchor="middle", class_="value")


def _mark(x: float, y: float, r: float, look: Look) -> h.Element:
    if look == "after":
        points = f"{_at(x)},{_at(y - r)} {_at(x + r)},{_at(y)} {_at(x)},{_at(y + r)} {_at(x - r)},{_at(y)}"
        return h.polygon(points=points, class_=look)
    return h.circle(cx=_at(x), cy=_at(y), r=_at(r), class_=look)


def _upright(x: float, low: float, high: float, look: Look) -> Iterator[h.Element]:
    yield _line(x, low, x, high, f"{look} whisker")
    yield from (_line(x - 4, end, x + 4, end, f"{look} whisker") for end in (low, high))


def _across(across: Scale, up: Scale, at: float) -> h.Element:
    return _line(across(0), up(at), across(1), up(at), "grid")


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> h.Element:
    return h.line(x1=_at(x1), y1=_at(y1), x2=_at(x2), y2=_at(y2), class_=class_)


def _text(
    x: float, y: float, words: str, anchor: Literal["start", "middle", "end"] = "start", class_: str = ""
) -> h.Element:
    return h.text(x=_at(x), y=_at(y), text_anchor=anchor, class_=class_ or None)[words]


def _drawing(name: str, title: str, description: str, height: float, *parts: h.Node) -> h.Element:
    ids = f"{name}-title {name}-description"
    return h.svg(viewBox=f"0 0 {WIDTH} {_at(height)}", role="img", aria_labelledby=ids)[
        h.title(id=f"{name}-title")[title], h.desc(id=f"{name}-description")[description], parts
    ]


def _when(place: int) -> str:
    return "before" if place == 0 else str(place)


def _look(place: int) -> Look:
    return "before" if place == 0 else "after"


def _tick(at: float) -> str:
    return number(at, 2 if at % 0.5 else 1)


def _at(place: float) -> str:
    return f"{place:.1f}".removesuffix(".0")
