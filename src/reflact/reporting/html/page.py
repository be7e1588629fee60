"""The frame, sections and tables of an HTML page.

A page has two columns: the text, and a margin with its evidence. On a narrow page the margin
follows the text. Texts become HTML only as children and attributes of ``htpy`` elements, which
escape them.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

import htpy as h
from markupsafe import Markup, escape

from reflact.text import escape_controls, escape_line, name_count, shorten

# How much of a text is shown when the room for texts is used up.
MIN_SHOWN_CHARS = 60

LIVE_SCRIPT = "live.js"
MAX_NARROW_COLUMNS = 5


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

    ``home`` is the address of the list of runs; None on the list itself. ``rows`` say how far a
    run is, each with its label.
    """

    events: str
    version: str
    text: str
    home: str | None = "/"
    rows: Sequence[tuple[str, str]] = ()


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
    rows = [h.div[h.dt[label], h.dd[text]] for label, text in live.rows]
    return h.div("#live.live", data_events=live.events, data_version=live.version)[
        live.home is not None and h.a(href=live.home)["All runs"],
        h.output(aria_live="polite")[live.text],
        h.button(type="button", hidden=True)["Show the new state"],
        h.dl(".facts", hidden=not rows)[rows],
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
    kinds = ["prose" if n in {0, *prose} else "figure" for n in range(len(columns))]
    heads = [h.th(scope="col", class_=kinds[n])[name] for n, name in enumerate(columns)]
    body = []
    for first, *rest in rows:
        cells = [
            h.td(class_=kinds[n], data_label=columns[n])[cell]
            for n, cell in enumerate(rest, start=1)
        ]
        body.append(h.tr[h.th(scope="row")[first], cells])
    table = h.table(class_={"stacked": len(columns) > MAX_NARROW_COLUMNS})
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


def build_texts(
    texts: Iterable[tuple[str, str]], limit: TextLimit, *, max_lines: int, length: int = 4_000
) -> h.Element:
    """Return texts with their labels, and how many of them are left out."""
    entries = list(texts)
    rows = []
    for name, text in entries[:max_lines]:
        fitted = limit.fit(text, length)
        shown = h.pre[fitted] if fitted else h.span(".note")["(empty)"]
        rows.append(h.div[h.dt[escape_line(name)], h.dd[shown]])
    left_out = len(entries) - len(rows)
    more = left_out > 0 and h.div[h.dt["left out"], h.dd[f"{left_out} more lines"]]
    return h.dl(".facts")[rows, more]


def build_figure(caption: str, *charts: h.Element) -> h.Element:
    """Return charts that are read together, side by side if there is room."""
    return h.figure[h.div(".charts")[charts], h.figcaption[caption]]
