"""The frame, sections, tables and charts of an HTML page.

Texts become HTML only as children and attributes of ``htpy`` elements, which escape them. Charts
are inline SVG in the page's colours: named and described in words, told apart by shape too. They
are 340 units wide, so that on a narrow page their letters are as large as the page's own.
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
    """A part of a page: its id, heading and content; without a heading it is the whole page."""

    section_id: str
    heading: str
    content: tuple[h.Node, ...]


class LiveBar(NamedTuple):
    """The top of a page that a server keeps up to date: the address of its events, and its state.

    ``home`` is the address of the list of runs; None on the list itself.
    """

    events: str
    version: str
    text: str
    home: str | None = "/"


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
    """Return an HTML document that loads nothing, and runs nothing but files of this package."""
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
    contents = [h.li[h.a(href=f"#{part.section_id}")[part.heading]] for part in sections]
    links = len(sections) > 1 and h.nav(aria_label="Contents")[h.ul[contents]]
    parts = [_build_section(part) for part in sections]
    end = [h.script[Markup(code)] for code in codes]  # noqa: S704 - files of this package
    main = h.main[live is not None and _build_live_bar(live), h.header[header, links], parts]
    return f"{h.html(lang='en')[head, h.body[main, end]]}\n"


def _build_section(part: PageSection) -> h.Element:
    if not part.heading:
        return h.div(id=part.section_id)[part.content]
    heading_id = f"{part.section_id}-heading"
    heading = h.h2(id=heading_id)[part.heading]
    return h.section(id=part.section_id, aria_labelledby=heading_id)[heading, part.content]


def _build_policy(style: str, codes: Sequence[str], *, is_live: bool) -> str:
    """Return the policy of a page: it loads nothing, and runs only what is written in it."""
    parts = ["default-src 'none'", f"style-src {_hash_text(style)}", "img-src data:"]
    parts += ["base-uri 'none'", "form-action 'none'"]
    if is_live:
        parts.append("connect-src 'self'")
    if codes:
        parts.append(f"script-src {' '.join(map(_hash_text, codes))}")
    return "; ".join(parts)


def _hash_text(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _build_live_bar(live: LiveBar) -> h.Element:
    return h.div("#live.live", data_events=live.events, data_version=live.version)[
        live.home is not None and h.a(href=live.home)["All runs"],
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
    """Return a key or a path that may be broken behind a dot, underscore or slash."""
    return [(part, h.wbr) for part in re.split(r"(?<=[._/])", key)]


def build_table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[h.Node]],
    *,
    prose: Collection[int] = (),
) -> h.Element:
    """Return a table that can be scrolled sideways; ``prose`` are the numbers of columns of words.

    Rows of more than five columns become blocks on a narrow page, so that no column is out of
    sight.
    """
    is_stacked = len(columns) > MAX_NARROW_COLUMNS
    kinds = ["prose" if n in {0, *prose} else "figure" for n in range(len(columns))]
    heads = [h.th(scope="col", class_=kinds[n])[name] for n, name in enumerate(columns)]
    body = []
    for first, *rest in rows:
        cells = [
            h.td(class_=kinds[n], data_label=columns[n] if is_stacked else None)[cell]
            for n, cell in enumerate(rest, start=1)
        ]
        body.append(h.tr[h.th(scope="row")[first], cells])
    table = h.table(class_="stacked" if is_stacked else None)
    content = table[h.caption[caption], h.thead[h.tr[heads]], h.tbody[body]]
    return h.div(".scroll", role="region", tabindex="0", aria_label=caption)[content]


def build_row_table(
    caption: str, rows: Sequence[Mapping[str, h.Node]], *, prose: Collection[str] = ()
) -> h.Element:
    """Return a table of rows that a terminal shows too; ``prose`` are the columns of words."""
    names = list(rows[0])
    numbers = {names.index(name) for name in prose}
    headings = ["validation" if name == "val" else name for name in names]
    return build_table(caption, headings, [list(row.values()) for row in rows], prose=numbers)


def build_figure(caption: str, *charts: h.Element) -> h.Element:
    """Return charts that are read together, side by side if there is room."""
    return h.figure[h.div(".charts")[charts], h.figcaption[caption]]


def format_estimate(estimate: IntervalEstimate | None) -> h.Node:
    """Return a figure with its interval, for a table; a dash if there is none."""
    if estimate is None:
        return "–"
    return [format_number(estimate.value), " ", h.span(".interval")[format_interval(estimate)]]


# ------------------------------------------------------------------------------------------ charts

# How a mark looks: a hollow circle, or a filled diamond.
MarkStyle = Literal["before", "after"]

CHART_WIDTH = 340

# The most numbers below a chart.
MAX_LABELS = 9

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
    """A measured value in a chart; ``at`` is its step or round."""

    at: float
    label: str
    value: float
    interval: tuple[float, float] | None
    look: MarkStyle


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
        [(point.at, point.value) for point in points],
        unit="round",
        bounds=(0, maximum),
        reference=(reference, reference_label),
    )


def draw_series(
    name: str,
    title: str,
    points: Sequence[ScorePoint],
    line: Sequence[tuple[float, float | None]],
    *,
    unit: str,
    bounds: tuple[float, float] | None = None,
    reference: tuple[float, str] | None = None,
) -> h.Element:
    """Return values by step or round with their intervals, and a line through some of them.

    A None in ``line`` interrupts it. Without ``bounds``, the axis spans what is shown.
    """
    shown = [end for point in points for end in (point.value, *(point.interval or ()))]
    low = floor(5 * min(shown, default=0)) / 5
    high = max(ceil(5 * max(shown, default=1)) / 5, low + 0.2)
    if bounds is not None:
        low, high = bounds
    last = max([1.0, *(point.at for point in points), *(at for at, _ in line)])
    right = CHART_WIDTH - 12
    across = AxisScale(0, last, 56, right - 10)
    up = AxisScale(low, high, 202, 28)
    gap = (right - 66) / last
    size = 5.0 if gap > 14 else 2.5
    cap = size if gap > 5 else 0
    density = None if gap > 5 else "dense"
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
    for (x, y), (next_x, next_y) in pairwise(line):
        if y is not None and next_y is not None:
            parts.append(draw_line(across(x), up(y), across(next_x), up(next_y), "link"))
    for point in sorted(points, key=lambda point: point.look)[::-1]:
        x = across(point.at)
        marks: list[h.Node] = [h.title[point.label]]
        if point.interval is not None:
            marks += _draw_whisker(x, up, point.interval, point.look, cap)
        marks.append(_draw_mark(x, up(point.value), size, point.look))
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
