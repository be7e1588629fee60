"""The frame, sections, tables and figures of an HTML page.

Texts become HTML only as children and attributes of ``htpy`` elements, which escape them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence
from importlib.resources import files
from typing import NamedTuple

import htpy as h
from markupsafe import Markup, escape

from reflact.calibration.report import format_interval, format_number
from reflact.records import IntervalEstimate
from reflact.reporting.lines import escape_controls

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
"""The page may load nothing; its style and its script are written in it."""


MIN_SHOWN_CHARS = 80
"""How much of a text is shown when the room for texts is used up."""


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
        shown = cut_middle(text, length)
        size = len(escape(shown).encode())
        if size > self._left:
            shown = cut_middle(text, MIN_SHOWN_CHARS)
            size = len(escape(shown).encode())
        self._left -= min(size, self._left)
        self.shortened += shown != text
        return shown


def cut_middle(text: str, length: int) -> str:
    """Return a text; if it is longer than ``length``, its middle is replaced by the number of its characters."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters left out] {text[len(text) - half :]}"


class PageSection(NamedTuple):
    """A part of a page: its id, its heading, and its content."""

    section_id: str
    heading: str
    content: tuple[h.Node, ...]


def build_document(
    title: str, header: h.Node, sections: Sequence[PageSection], *, script: str | None = None
) -> str:
    """Return a whole HTML document that loads nothing, and runs nothing but a file of this package."""
    style = _read_file("page.css")
    code = None if script is None else _read_file(script)
    policy = CONTENT_SECURITY_POLICY
    if code is not None:
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    head = h.head[
        h.meta(charset="utf-8"),
        h.meta({"http-equiv": "Content-Security-Policy"}, content=policy),
        h.meta(name="viewport", content="width=device-width, initial-scale=1"),
        h.meta(name="color-scheme", content="light dark"),
        h.meta(name="referrer", content="no-referrer"),
        h.link(rel="icon", href="data:,"),
        h.title[title],
        h.style[Markup(style)],  # noqa: S704 - a file of this package
    ]
    links = h.nav(aria_label="Contents")[
        h.ul[(h.li[h.a(href=f"#{part.section_id}")[part.heading]] for part in sections)]
    ]
    parts = (
        h.section(id=part.section_id, aria_labelledby=f"{part.section_id}-heading")[
            h.h2(id=f"{part.section_id}-heading")[part.heading], part.content
        ]
        for part in sections
    )
    end = None if code is None else h.script[Markup(code)]  # noqa: S704 - a file of this package
    return f"{h.html(lang='en')[head, h.body[h.main[h.header[header, links], parts], end]]}\n"


def _read_file(name: str) -> str:
    return files("reflact.reporting.html").joinpath(name).read_text(encoding="utf-8")


def build_table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[h.Node]], *, prose: Collection[int] = ()
) -> h.Element:
    """Return a table that can be scrolled sideways; ``prose`` are the numbers of columns that hold words."""
    kinds = ["prose" if number in prose or number == 0 else "figure" for number in range(len(columns))]
    heads = (h.th(scope="col", class_=kind)[name] for kind, name in zip(kinds, columns, strict=True))
    body = (
        h.tr[
            h.th(scope="row")[first],
            (h.td(class_=kind)[cell] for kind, cell in zip(kinds[1:], rest, strict=True)),
        ]
        for first, *rest in rows
    )
    return h.div(".scroll", role="region", tabindex="0", aria_label=caption)[
        h.table[h.caption[caption], h.thead[h.tr[heads]], h.tbody[body]]
    ]


def build_figure(caption: str, *charts: h.Element) -> h.Element:
    """Return charts that are read together, side by side if there is room."""
    return h.figure[h.div(".charts")[charts], h.figcaption[caption]]


def format_estimate(estimate: IntervalEstimate | None) -> h.Node:
    """Return a figure with its interval, for a table; a dash if there is none."""
    if estimate is None:
        return "–"
    return [format_number(estimate.value), " ", h.span(".interval")[format_interval(estimate)]]


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``1 trace``, ``1,200 traces``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
