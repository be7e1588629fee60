"""The frame, sections, tables and charts of an HTML page.

Texts become HTML only as children and attributes of ``htpy`` elements, which escape them. Charts
are inline SVG in the page's colours: named and described in words, told apart by shape too. Most
are about 340 units wide, so that on a narrow page their letters are as large as the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from math import ceil, floor, sqrt
from typing import Literal, NamedTuple

import htpy as h
from markupsafe import Markup, escape

from reflact.calibration.metrics import ReliabilityBin
from reflact.calibration.report import format_interval, format_number
from reflact.records import IntervalEstimate
from reflact.text import escape_controls, format_count, name_count, shorten

# How much of a text is shown when the room for texts is used up.
MIN_SHOWN_CHARS = 60


class TextLimit:
    """Shortens texts, so that all of them together take little more than ``size`` bytes of a page.

    Attributes:
        shortened: The number of texts that lost their middle.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self.shortened = 0

    def fit(self, text: str, length: int = 4_000) -> str:
        """Return a text without control characters, of about ``length`` characters at most."""
        text = escape_controls(text)
        shown = shorten(text, length)
        size = len(escape(shown).encode())
        if size > self._left:
            shown = shorten(text, MIN_SHOWN_CHARS)
            size = len(escape(shown).encode())
        self._left -= min(size, self._left)
        self.shortened += shown != text
        return shown

    def build_note(self) -> h.Node:
        """Return how many texts are not whole; nothing if all are."""
        texts = name_count(self.shortened, "long text")
        return (
            self.shortened > 0
            and h.p(".note")[f"{texts} lost the middle; reflact show has all of it."]
        )


class PageSection(NamedTuple):
    """A part of a page: its id, its heading, and its content; without a heading it is the whole of
    the page.
    """

    section_id: str
    heading: str
    content: tuple[h.Node, ...]


class LiveBar(NamedTuple):
    """What stands on top of a page that a server keeps up to date: the address of its events, and
    its state.
    """

    events: str
    version: str
    text: str
    is_list: bool = False


LIVE_SCRIPT = "live.js"
MAX_NARROW_COLUMNS = 5


def build_document(
    title: str,
    header: h.Node,
    sections: Sequence[PageSection],
    *,
    script: str | None = None,
    live: LiveBar | None = None,
) -> str:
    """Return a whole HTML document that loads nothing, and runs nothing but files of this
    package.
    """
    style = _read_file("page.css")
    names = (script, None if live is None else LIVE_SCRIPT)
    codes = [_read_file(name) for name in names if name is not None]
    head = h.head[
        h.meta(charset="utf-8"),
        h.meta(
            {"http-equiv": "Content-Security-Policy"},
            content=_build_policy(style, codes, is_live=live is not None),
        ),
        h.meta(name="viewport", content="width=device-width, initial-scale=1"),
        h.meta(name="color-scheme", content="light dark"),
        h.meta(name="referrer", content="no-referrer"),
        h.link(rel="icon", href="data:,"),
        h.title[title],
        h.style[Markup(style)],  # noqa: S704 - a file of this package
    ]
    links = (
        len(sections) > 1
        and h.nav(aria_label="Contents")[
            h.ul[(h.li[h.a(href=f"#{part.section_id}")[part.heading]] for part in sections)]
        ]
    )
    parts = (
        h.section(id=part.section_id, aria_labelledby=f"{part.section_id}-heading")[
            h.h2(id=f"{part.section_id}-heading")[part.heading], part.content
        ]
        if part.heading
        else h.div(id=part.section_id)[part.content]
        for part in sections
    )
    end = [h.script[Markup(code)] for code in codes]  # noqa: S704 - files of this package
    bar = None if live is None else _build_live_bar(live)
    is_list = live is not None and live.is_list
    main = h.main[not is_list and bar, h.header[header, is_list and bar, links], parts]
    return f"{h.html(lang='en')[head, h.body[main, end]]}\n"


def _build_policy(style: str, codes: Sequence[str], *, is_live: bool) -> str:
    """Return the policy of a page: it loads nothing, and runs only what is written in it."""

    def list_hashes(texts: Sequence[str]) -> str:
        digests = (
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts
        )
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    parts = [
        "default-src 'none'",
        f"style-src {list_hashes([style])}",
        "img-src data:",
        "base-uri 'none'",
    ]
    parts += ["form-action 'self'", "connect-src 'self'"] if is_live else ["form-action 'none'"]
    return "; ".join([*parts, f"script-src {list_hashes(codes)}"] if codes else parts)


def _build_live_bar(live: LiveBar) -> h.Element:
    return h.div("#live.live", data_events=live.events, data_version=live.version)[
        not live.is_list and h.a(href="/")["All runs"],
        h.output(aria_live="polite")[live.text],
        h.button(type="button", hidden=True)["Show the new state"],
    ]


def _read_file(name: str) -> str:
    return files("reflact.reporting.html").joinpath(name).read_text(encoding="utf-8")


def render_node(element: h.Element) -> Markup:
    """Return an element as it stands in the page; a long list of rendered elements is quicker than
    one tree.
    """
    return Markup(element)  # noqa: S704 - the element has escaped its texts


def break_key(key: str) -> h.Node:
    """Return a key or a path that may be broken behind a dot, underscore or slash, and nowhere else
    if it fits.
    """
    return [(part, h.wbr) for part in re.split(r"(?<=[._/])", key)]


def build_table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[h.Node]],
    *,
    prose: Collection[int] = (),
) -> h.Element:
    """Return a table that can be scrolled sideways; ``prose`` are the numbers of columns that hold
    words.

    Rows of more than five columns become blocks on a narrow page, so that no column is out of
    sight.
    """
    is_stacked = len(columns) > MAX_NARROW_COLUMNS
    kinds = [
        "prose" if number in prose or number == 0 else "figure" for number in range(len(columns))
    ]
    heads = (
        h.th(scope="col", class_=kind)[name] for kind, name in zip(kinds, columns, strict=True)
    )
    body = (
        h.tr[
            h.th(scope="row")[first],
            (
                h.td(class_=kind, data_label=name if is_stacked else None)[cell]
                for kind, name, cell in zip(kinds[1:], columns[1:], rest, strict=True)
            ),
        ]
        for first, *rest in rows
    )
    return h.div(".scroll", role="region", tabindex="0", aria_label=caption)[
        h.table(class_="stacked" if is_stacked else None)[
            h.caption[caption], h.thead[h.tr[heads]], h.tbody[body]
        ]
    ]


def build_column_table(
    caption: str, columns: Mapping[str, Sequence[h.Node]], *, prose: Collection[str] = ()
) -> h.Element:
    """Return a table of columns that a terminal shows too; ``prose`` are the headings of columns
    that hold words.
    """
    numbers = {number for number, name in enumerate(columns) if name in prose}
    names = ["validation" if name == "val" else name for name in columns]
    return build_table(caption, names, [*zip(*columns.values(), strict=True)], prose=numbers)


def build_figure(caption: str, *charts: h.Element) -> h.Element:
    """Return charts that are read together, side by side if there is room."""
    return h.figure[h.div(".charts")[charts], h.figcaption[caption]]


# ------------------------------------------------------------------------------------------- charts

# How a mark looks: a hollow circle, or a filled diamond.
MarkStyle = Literal["before", "after"]

CHART_WIDTH = 340

# The scores by step have a wider chart, which a narrow page shrinks.
SCORES_WIDTH = 640

MAX_STEP_LABELS = 16

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


def draw_reliability(
    name: str, title: str, bins: Sequence[ReliabilityBin], *, look: MarkStyle
) -> h.Element:
    """Return how often a critic is right by its confidence, with the number of steps in each bin
    below.
    """
    across = AxisScale(0, 1, 46, 330)
    up = AxisScale(0, 1, 314, 30)
    most = max((one.n_transitions for one in bins), default=1)
    described = "; ".join(
        f"confidence {format_number(one.confidence)}: right {format_number(one.right_share)} of "
        f"{one.n_transitions}"
        for one in bins
    )
    return build_svg(
        name,
        f"{title}: reliability diagram",
        f"How often the critic is right by its confidence. {described or 'No step was scored'}.",
        370,
        draw_text(46, 12, title, class_="name"),
        (
            [
                draw_line(across(at), up(0), across(at), up(1), "grid"),
                draw_line(46, up(at), 330, up(at), "grid"),
            ]
            for at in AXIS_TICKS
        ),
        (draw_text(38, up(at) + 4, format_number(at, 1), anchor="end") for at in AXIS_TICKS),
        (draw_text(across(at), 330, format_number(at, 1), anchor="middle") for at in AXIS_TICKS),
        draw_line(across(0), up(0), across(1), up(1), "guide"),
        draw_text(across(0.03), up(0.93), "too modest", class_="halo"),
        draw_text(across(0.66), up(0.1), "too sure", anchor="middle", class_="halo"),
        draw_text(across(0.5), 346, "confidence", anchor="middle"),
        h.text(
            transform=f"translate(10 {format_coordinate(up(0.5))}) rotate(-90)",
            text_anchor="middle",
        )["share right"],
        (
            [
                draw_line(x, up(one.confidence), x, up(one.right_share), f"{look} whisker"),
                _draw_mark(x, up(one.right_share), 4 + 6 * sqrt(one.n_transitions / most), look),
                draw_text(
                    across((one.low + one.high) / 2),
                    364,
                    format_count(one.n_transitions),
                    "middle",
                    "value",
                ),
            ]
            for one, x in ((one, across(one.confidence)) for one in bins)
        ),
        draw_text(38, 364, "steps", anchor="end"),
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
    """Return a figure round by round: before any, and after each, on a scale from 0 to
    ``maximum``.
    """
    across = AxisScale(0, max(len(values) - 1, 1), 64, 312)
    up = AxisScale(0, maximum, 202, 30)
    labels = ["before", *map(str, range(1, len(values)))]
    points = [(across(n), labels[n], one) for n, one in enumerate(values) if one is not None]
    described = "; ".join(
        f"{label}: {format_number(one.value)} {format_interval(one)}" for _, label, one in points
    )
    return build_svg(
        name,
        f"{title} by round",
        f"{described}. {reference_label}: {format_number(reference)}.",
        246,
        draw_text(40, 14, title, class_="name"),
        (
            [
                draw_line(40, up(at), 330, up(at), "grid"),
                draw_text(34, up(at) + 4, format_number(at, 2 if at % 0.5 else 1), "end"),
            ]
            for at in (maximum * n / 4 for n in range(5))
        ),
        draw_line(40, up(reference), 330, up(reference), "guide"),
        (
            draw_line(x, up(one.value), next_x, up(after.value), "link")
            for (x, _, one), (next_x, _, after) in pairwise(points)
        ),
        (
            _draw_interval(x, up, one, "before" if label == "before" else "after")
            for x, label, one in points
        ),
        draw_text(across(0.5), up(reference) - 4, reference_label, anchor="middle", class_="halo"),
        (
            draw_text(across(n), 220, labels[n], anchor="middle")
            for n in range(0, len(values), -(-len(values) // 10))
        ),
        draw_text(185, 238, "round", anchor="middle"),
    )


class ScorePoint(NamedTuple):
    """A measured document in the chart of a run; ``at`` is its step."""

    at: float
    label: str
    value: float
    interval: tuple[float, float] | None
    look: MarkStyle


def draw_scores(
    name: str,
    title: str,
    points: Sequence[ScorePoint],
    current: Sequence[tuple[float, float | None]],
) -> h.Element:
    """Return scores by step with their intervals: accepted documents are filled, and a line is the
    current one.

    ``current`` is the score of the current document after each step; None interrupts the line.
    """
    shown = [end for point in points for end in (point.value, *(point.interval or ()))]
    low = floor(5 * min(shown, default=0)) / 5
    high = max(ceil(5 * max(shown, default=1)) / 5, low + 0.2)
    last = max([1.0, *(point.at for point in points), *(at for at, _ in current)])
    across = AxisScale(0, last, 46, SCORES_WIDTH - 12)
    up = AxisScale(low, high, 202, 28)
    gap = (SCORES_WIDTH - 58) / last
    size = 5.0 if gap > 14 else 2.5
    n_parts = round((5 if high - low > 0.5 else 10) * (high - low))
    ticks = [low + n * (high - low) / n_parts for n in range(n_parts + 1)]
    described = [p.label for p in points if p.look == "after" or len(points) <= MAX_DESCRIBED]
    return build_svg(
        name,
        title,
        "; ".join(described),
        246,
        draw_text(46, 12, title, class_="name"),
        [draw_line(46, up(at), SCORES_WIDTH - 12, up(at), "grid") for at in ticks],
        [draw_text(36, up(at) + 4, format_number(at, 1), "end") for at in ticks],
        [
            draw_line(across(x), up(y), across(next_x), up(next_y), "link")
            for (x, y), (next_x, next_y) in pairwise(current)
            if y is not None and next_y is not None
        ],
        [
            h.g(class_="dense" if gap <= 5 else None)[
                h.title[point.label],
                point.interval is not None
                and _draw_whisker(
                    across(point.at), up, point.interval, point.look, size if gap > 5 else 0
                ),
                _draw_mark(across(point.at), up(point.value), size, point.look),
            ]
            for point in sorted(points, key=lambda point: point.look)[::-1]
        ],
        [
            draw_text(across(at), 220, str(at), anchor="middle")
            for at in range(0, int(last) + 1, ceil(last / MAX_STEP_LABELS))
        ],
        draw_text(SCORES_WIDTH / 2, 238, "step", anchor="middle"),
        width=SCORES_WIDTH,
    )


def draw_estimates(
    name: str, title: str, rows: Sequence[tuple[str, MarkStyle, IntervalEstimate]]
) -> h.Element:
    """Return figures between 0 and 1 below each other, each with its interval."""
    across = AxisScale(0, 1, 120, 328)
    height = 30 * len(rows)
    described = "; ".join(
        f"{row}: {format_number(one.value)} {format_interval(one)}" for row, _, one in rows
    )
    return build_svg(
        name,
        title,
        described,
        height + 44,
        draw_text(0, 12, title, class_="name"),
        [
            [
                draw_line(across(at), 22, across(at), height + 22, "grid"),
                draw_text(across(at), height + 38, format_number(at, 1), "middle"),
            ]
            for at in AXIS_TICKS
        ],
        [
            [
                draw_text(110, y + 4, row, "end", "value"),
                draw_line(across(one.low), y, across(one.high), y, f"{look} whisker"),
                [
                    draw_line(across(end), y - 4, across(end), y + 4, f"{look} whisker")
                    for end in (one.low, one.high)
                ],
                _draw_mark(across(one.value), y, 5, look),
            ]
            for y, (row, look, one) in ((30 * n + 37, row) for n, row in enumerate(rows))
        ],
    )


def _draw_whisker(
    x: float, up: AxisScale, interval: tuple[float, float], look: MarkStyle, size: float
) -> list[h.Element]:
    low, high = (up(end) for end in interval)
    caps = (
        draw_line(x - size, end, x + size, end, f"{look} whisker") for end in (low, high) if size
    )
    return [draw_line(x, low, x, high, f"{look} whisker"), *caps]


def _draw_interval(
    x: float, up: AxisScale, estimate: IntervalEstimate, look: MarkStyle
) -> list[h.Element]:
    return [
        *_draw_whisker(x, up, (estimate.low, estimate.high), look, 4),
        _draw_mark(x, up(estimate.value), 5, look),
    ]


def _draw_mark(x: float, y: float, r: float, look: MarkStyle) -> h.Element:
    if look == "before":
        return h.circle(
            cx=format_coordinate(x), cy=format_coordinate(y), r=format_coordinate(r), class_=look
        )
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


def build_svg(
    name: str, title: str, description: str, height: int, *parts: h.Node, width: int = CHART_WIDTH
) -> h.Element:
    """Return a chart with its title, and its content in words."""
    ids = f"{name}-title {name}-description"
    return h.svg(viewBox=f"0 0 {width} {height}", role="img", aria_labelledby=ids)[
        h.title(id=f"{name}-title")[title], h.desc(id=f"{name}-description")[description], parts
    ]


def format_coordinate(coordinate: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{coordinate:.1f}".removesuffix(".0")
