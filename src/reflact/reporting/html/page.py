"""What all pages have in common: the frame around them, sections, tables and figures, numbers in words.

Texts become HTML in one way only, as children and attributes of ``htpy`` elements, which escape them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from importlib.resources import files
from typing import NamedTuple

import htpy as h
from markupsafe import Markup

from reflact.calibration import report as words
from reflact.records import IntervalEstimate
from reflact.reporting.lines import escape_controls

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
"""What a page may load: nothing. Its style is written in it."""


def build_document(title: str, *content: h.Node) -> str:
    """Return a whole HTML document that asks for nothing and runs nothing.

    Args:
        title: Its name, for the browser's tab.
        content: What stands in it, in order.
    """
    style = files("reflact.reporting.html").joinpath("page.css").read_text(encoding="utf-8")
    head = h.head[
        h.meta(charset="utf-8"),
        h.meta({"http-equiv": "Content-Security-Policy"}, content=CONTENT_SECURITY_POLICY),
        h.meta(name="viewport", content="width=device-width, initial-scale=1"),
        h.meta(name="color-scheme", content="light dark"),
        h.meta(name="referrer", content="no-referrer"),
        h.link(rel="icon", href="data:,"),
        h.title[title],
        h.style[Markup(style)],  # noqa: S704 - a file of this package
    ]
    return f"{h.html(lang='en')[head, h.body[h.main[content]]]}\n"


class PageSection(NamedTuple):
    """A part of a page: its id, its heading, and what stands in it."""

    section_id: str
    heading: str
    content: tuple[h.Node, ...]


def build_contents(sections: Sequence[PageSection]) -> h.Element:
    """Return links to the sections."""
    return h.nav(aria_label="Contents")[
        h.ul[(h.li[h.a(href=f"#{part.section_id}")[part.heading]] for part in sections)]
    ]


def build_sections(sections: Sequence[PageSection]) -> list[h.Element]:
    """Return the sections themselves."""
    return [
        h.section(id=part.section_id, aria_labelledby=f"{part.section_id}-heading")[
            h.h2(id=f"{part.section_id}-heading")[part.heading], part.content
        ]
        for part in sections
    ]


def build_table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[h.Node]], *, prose: Collection[int] = ()
) -> h.Element:
    """Return a table that can be scrolled sideways if there is no room for it.

    Args:
        caption: What it shows.
        columns: The columns' headings.
        rows: A cell for each column; the first one names the row.
        prose: The numbers of columns that hold words; others hold figures.
    """
    kinds = ["prose" if number in prose or number == 0 else "figure" for number in range(len(columns))]
    return h.div(".scroll", role="region", tabindex="0", aria_label=caption)[
        h.table[
            h.caption[caption],
            h.thead[
                h.tr[
                    (h.th(scope="col", class_=kind)[name] for kind, name in zip(kinds, columns, strict=True))
                ]
            ],
            h.tbody[
                (
                    h.tr[
                        h.th(scope="row")[first],
                        (h.td(class_=kind)[cell] for kind, cell in zip(kinds[1:], rest, strict=True)),
                    ]
                    for first, *rest in rows
                )
            ],
        ]
    ]


def build_figure(caption: str, *charts: h.Element) -> h.Element:
    """Return charts that are read together, side by side if there is room."""
    return h.figure[h.div(".charts")[charts], h.figcaption[caption]]


def build_facts(pairs: Sequence[tuple[str, h.Node]], *, class_: str = "facts") -> h.Element:
    """Return names with what stands for each."""
    return h.dl(class_=class_)[(h.div[h.dt[name], h.dd[value]] for name, value in pairs)]


def build_details(summary: str, *content: h.Node) -> h.Element:
    """Return what most readers do not need, behind its name."""
    return h.details[h.summary[summary], content]


def escape_invisible(text: str) -> str:
    """Return a text of unknown origin with its unseen characters written out; escaping is the page's work."""
    return escape_controls(text)


def format_name(name: str) -> list[h.Node]:
    """Return a name of unknown origin, which may be broken after its underscores."""
    first, *rest = escape_invisible(name).split("_")
    return [first, *(node for part in rest for node in ("_", h.wbr, part))]


def typeset_numbers(text: str) -> str:
    """Return figures with true minus signs, and with intervals that stay on one line."""
    return re.sub(r"(\[[^ \]]+,) ", "\\1\N{NO-BREAK SPACE}", re.sub(r"-(?=\d)", "−", text))


def format_number(value: float, decimals: int = 2) -> str:
    """Return a number with so many decimals and a true minus sign; nothing is minus zero."""
    return typeset_numbers(words.format_number(value, decimals))


def format_interval(estimate: IntervalEstimate) -> str:
    """Return an interval in brackets."""
    return typeset_numbers(words.format_interval(estimate))


def format_estimate(estimate: IntervalEstimate | None) -> h.Node:
    """Return a figure with its interval, for a table; a dash if there is none."""
    if estimate is None:
        return "–"
    return [format_number(estimate.value), " ", h.span(".interval")[format_interval(estimate)]]


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``1 trace``, ``1,200 traces``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
