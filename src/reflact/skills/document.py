"""The skill document: its protected regions, and edits with exact anchors.

A document is Markdown text. Three kinds of region in it are protected, and no edit changes a byte of them:

* YAML front matter: from a first line ``---`` to the next line ``---``;
* slow guidance, from ``<!-- SLOW_UPDATE_START -->`` to ``<!-- SLOW_UPDATE_END -->``;
* the appendix of execution notes, from ``<!-- APPENDIX_START -->`` to ``<!-- APPENDIX_END -->``.

The last two usually stand at the end, in either order; together they are the *protected tail*.

``check_document`` refuses a document whose fences or markers do not pair. Edits are still defined on one:
everything from the first fence or marker that does not fit is then protected, up to the end.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from reflact.errors import SkillError
from reflact.types import Candidate, Edit, EditKind, EditResult, FrozenModel, Skill

RegionName = Literal["front_matter", "slow_update", "appendix"]

MARKER = re.compile(r"<!--[ \t]*(SLOW_UPDATE|APPENDIX)_(START|END)[ \t]*-->")

UNSPACED_SCRIPTS = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    r"\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Characters of scripts without spaces between words, as the inside of a character class: Thai, Lao,
Tibetan, Burmese, Khmer, kana and Han."""

_FENCE = re.compile(r"\ufeff?---[ \t]*(?=\r?\n|\Z)")
_CLOSING_FENCE = re.compile(r"\n---[ \t]*(?=\r?\n|\Z)")
_REGION_NAMES: dict[str, RegionName] = {"SLOW_UPDATE": "slow_update", "APPENDIX": "appendix"}

# A word: letters, digits and underscores with combining accents, and with apostrophes between them, in
# scripts that put spaces between words.
_LETTERS = rf"(?:[^\W{UNSPACED_SCRIPTS}]|[\u0300-\u036f])+"
_WORD = re.compile(rf"{_LETTERS}(?:['’]{_LETTERS})*")


class Region(FrozenModel):
    """A protected stretch of a document: characters ``start`` up to, not including, ``end``."""

    name: RegionName
    start: int
    end: int


class _Layout(NamedTuple):
    regions: tuple[Region, ...]
    problem: str | None


class _Splice(NamedTuple):
    start: int
    end: int
    text: str


def check_document(text: str) -> None:
    """Refuse a text whose protected regions are malformed.

    Raises:
        SkillError: Front matter or a region is unclosed, unopened, nested or there twice; names the line.
    """
    problem = _layout(text).problem
    if problem is not None:
        raise SkillError(f"the skill document is malformed: {problem}")


def find_regions(text: str) -> tuple[Region, ...]:
    """Return the protected regions, in order; they never overlap."""
    return _layout(text).regions


def editable_text(text: str) -> str:
    """Return what edits may change: the document without its protected regions."""
    return "".join(text[start:end] for start, end in _open_spans(text, find_regions(text)))


def is_same_body(text: str, words: str) -> bool:
    """Return whether words are what edits may change of a document: white space around it and the kind of
    line break apart.
    """
    return _adapt_newlines(words, text).strip() == editable_text(text).strip()


def apply_edits(skill: Skill, edits: Sequence[Edit]) -> Candidate:
    """Apply edits in order; one that is rejected leaves the document as it is and the next one is tried.

    The anchor (``target``) must occur exactly once in the unprotected text, overlapping occurrences
    counted, and must neither begin nor end inside a word. ``replace`` and ``delete`` change exactly the
    anchor. ``insert_after`` puts the content on lines of its own after the line that holds the anchor's
    last character. ``append`` puts it at the end, before the protected tail, as a paragraph of its own:
    after at least one blank line, unless nothing stands before it, and with one after it where a tail
    follows. Both leave out line breaks around the content and end it with one. ``rewrite`` puts the
    content in place of all unprotected text: front matter, content and the other regions, in their order,
    follow one another with a blank line between. ``suggest`` is never applied. ``append`` and ``rewrite``
    do not look at the target, nor ``delete`` at the content. Where all line breaks of the document are of
    one kind, those of the edits are read as that kind. An edit that would change nothing, run two words
    together, or touch a protected region in any way is rejected.

    Any edits on any text give a candidate with one result for each edit.
    """
    text = skill.text
    results = []
    for edit in edits:
        text, reason = _try_edit(text, edit)
        status: Literal["applied", "rejected"] = "applied" if reason is None else "rejected"
        results.append(EditResult(edit=edit, status=status, reason=reason))
    return Candidate(skill=Skill(text=text), results=tuple(results))


def format_paragraph(text: str, place: int, content: str) -> str:
    """Return a content with the line breaks that make it a paragraph of its own at a place of a text.

    There is at least one blank line before it, unless nothing stands before the place, and one after it,
    unless nothing follows.
    """
    line_break = detect_newline(text)
    head = text[:place]
    trailing = head[len(head.rstrip("\r\n")) :].count("\n")
    before = line_break * max(0, 2 - trailing) if head else ""
    after = line_break if place == len(text) else line_break * 2
    return before + content.strip("\r\n") + after


def detect_newline(text: str) -> str:
    """Return the line break that a text uses: CR LF where it has any, else LF."""
    return "\r\n" if "\r\n" in text else "\n"


def check_edit(skill: Skill, edit: Edit) -> str | None:
    """Return why ``apply`` would reject an edit of this document, or None."""
    return _try_edit(skill.text, edit)[1]


def diff_texts(old: str, new: str) -> str:
    """Return the unified diff of two texts; empty where they are equal."""
    lines = difflib.unified_diff(_lines(old), _lines(new), "before", "after")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


# --------------------------------------------------------------------------------------------- reading


def _layout(text: str) -> _Layout:
    found: list[Region] = []
    position = 0
    opening = _FENCE.match(text)
    if opening is not None:
        closing = _CLOSING_FENCE.search(text, opening.end())
        if closing is None:
            everything = Region(name="front_matter", start=0, end=len(text))
            reason = "line 1 opens front matter that no second line --- closes (a rule can be written ***)"
            return _Layout((everything,), reason)
        position = closing.end()
        found.append(Region(name="front_matter", start=0, end=position))
    start: re.Match[str] | None = None
    for marker in MARKER.finditer(text, position):
        problem = _explain_misplaced_marker(marker, start, found)
        if problem is not None:
            first = marker if start is None else start
            return _truncate_layout(text, found, first, f"line {_line_number(text, marker)}: {problem}")
        if start is None:
            start = marker
        else:
            found.append(Region(name=_REGION_NAMES[marker[1]], start=start.start(), end=marker.end()))
            start = None
    if start is not None:
        return _truncate_layout(
            text, found, start, f"line {_line_number(text, start)}: {start[0]} is never closed"
        )
    return _Layout(tuple(found), None)


def _explain_misplaced_marker(
    marker: re.Match[str], start: re.Match[str] | None, found: Sequence[Region]
) -> str | None:
    if marker[2] == "END":
        if start is None:
            return f"{marker[0]} closes a region that was not opened"
        return None if marker[1] == start[1] else f"{marker[0]} stands where {start[0]} is still open"
    if start is not None:
        return f"{marker[0]} opens a region inside another one"
    if any(region.name == _REGION_NAMES[marker[1]] for region in found):
        return f"{marker[0]} opens this region a second time"
    return None


def _truncate_layout(text: str, found: Sequence[Region], first: re.Match[str], problem: str) -> _Layout:
    rest = Region(name=_REGION_NAMES[first[1]], start=first.start(), end=len(text))
    return _Layout((*found, rest), problem)


def _line_number(text: str, marker: re.Match[str]) -> int:
    return text.count("\n", 0, marker.start()) + 1


def _open_spans(text: str, protected: Sequence[Region]) -> Iterator[tuple[int, int]]:
    start = 0
    for region in protected:
        yield start, region.start
        start = region.end
    yield start, len(text)


# --------------------------------------------------------------------------------------------- editing


def _try_edit(text: str, edit: Edit) -> tuple[str, str | None]:
    layout = _layout(text)
    target = "" if edit.op in {"append", "rewrite"} else _adapt_newlines(edit.target, text)
    content = "" if edit.op == "delete" else _adapt_newlines(edit.content, text)
    reason = _check_content(edit.op, target, content)
    if reason is not None:
        return text, reason
    if edit.op == "rewrite":
        edited = _rewrite_body(text, content, layout.regions)
        reason = _find_damage(text, edited, layout)
    else:
        splice = _splice(text, edit.op, target, content, layout.regions)
        if isinstance(splice, str):
            return text, splice
        edited = text[: splice.start] + splice.text + text[splice.end :]
        reason = _find_damage(text, edited, layout) or _find_joined_words(edited, splice)
    return (edited, None) if reason is None else (text, reason)


def _splice(text: str, op: EditKind, target: str, content: str, protected: Sequence[Region]) -> _Splice | str:
    if op == "append":
        return _splice_append(text, content, protected)
    place = _locate(text, target, protected)
    if isinstance(place, str):
        return place
    if op == "insert_after":
        return _splice_insert(text, content, place + len(target), protected)
    return _Splice(place, place + len(target), content)


def _check_content(op: EditKind, target: str, content: str) -> str | None:
    if op == "suggest":
        return "a suggestion is for a rewrite of the document and is not applied by itself"
    if op not in {"append", "rewrite"} and not target.strip():
        return "the target is empty"
    if op != "delete" and not content.strip():
        return "the content is empty"
    for name, words in (("target", target), ("content", content)):
        if MARKER.search(words):
            return f"the {name} holds the marker of a protected region"
    if op == "rewrite" and _FENCE.match(content.strip("\r\n")):
        return "the content opens front matter; leave it out (a rule can be written ***)"
    return None


def _locate(text: str, target: str, protected: Sequence[Region]) -> int | str:
    places: list[int] = []
    for start, end in _open_spans(text, protected):
        place = text.find(target, start, end)
        while place >= 0 and len(places) < 2:
            places.append(place)
            place = text.find(target, place + 1, end)
    if len(places) > 1:
        return "the target occurs more than once in the document; quote more of the text around it"
    if not places and target in text:
        return "the target lies in a protected region or crosses into one"
    if not places:
        return "the target does not occur in the document"
    if _inside_word(text, places[0]) or _inside_word(text, places[0] + len(target)):
        return "the target begins or ends in the middle of a word; quote whole words"
    return places[0]


def _splice_append(text: str, content: str, protected: Sequence[Region]) -> _Splice:
    place = len(text)
    for region in reversed(protected):
        if region.name == "front_matter" or text[region.end : place].strip():
            break
        place = region.start
    return _Splice(place, place, format_paragraph(text, place, content))


def _splice_insert(text: str, content: str, anchor_end: int, protected: Sequence[Region]) -> _Splice:
    limit = next((region.start for region in protected if region.start >= anchor_end), len(text))
    line_break = detect_newline(text)
    end = text.find("\n", anchor_end - 1, limit) + 1
    if end > 0:
        return _Splice(end, end, content.strip("\r\n") + line_break)
    return _Splice(limit, limit, line_break + content.strip("\r\n") + line_break)


def _rewrite_body(text: str, content: str, protected: Sequence[Region]) -> str:
    content = content.strip("\r\n")
    if is_same_body(text, content):
        return text
    line_break = detect_newline(text)
    front = [r for r in protected if r.name == "front_matter"]
    tail = [r for r in protected if r.name != "front_matter"]
    rest = text[tail[-1].end :] if tail else line_break
    parts = [*(text[r.start : r.end] for r in front), content, *(text[r.start : r.end] for r in tail)]
    return (line_break * 2).join(parts) + (line_break if rest.strip() else rest)


def _find_damage(text: str, edited: str, layout: _Layout) -> str | None:
    if edited == text:
        return "the edit changes nothing"
    kept = [text[region.start : region.end] for region in layout.regions]
    if [edited[region.start : region.end] for region in find_regions(edited)] != kept:
        return "the edit would open, close or change a protected region"
    return None


def _find_joined_words(edited: str, splice: _Splice) -> str | None:
    if _inside_word(edited, splice.start) or _inside_word(edited, splice.start + len(splice.text)):
        return "the edit would run two words together"
    return None


def _inside_word(text: str, place: int) -> bool:
    for word in _WORD.finditer(text, text.rfind("\n", 0, place) + 1):
        if word.end() > place:
            return word.start() < place
    return False


# ---------------------------------------------------------------------------------------------- lines


def _adapt_newlines(words: str, text: str) -> str:
    """Give words the document's line breaks, where the document has but one kind."""
    crlf, all_breaks = text.count("\r\n"), text.count("\n")
    if 0 < crlf < all_breaks:
        return words
    return re.sub(r"\r*\n", detect_newline(text), words)


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)
