"""The skill document: its protected regions, edits with exact anchors, guidance and notes.

A document is Markdown text. No edit changes a byte of its protected regions:

* YAML front matter: from a first line ``---`` to the next line ``---``;
* slow guidance, from ``<!-- SLOW_UPDATE_START -->`` to ``<!-- SLOW_UPDATE_END -->``;
* the appendix of execution notes, from ``<!-- APPENDIX_START -->`` to ``<!-- APPENDIX_END -->``;
* worked examples, from ``<!-- EXAMPLES_START -->`` to ``<!-- EXAMPLES_END -->``;
* the mark before each further file of a document that joins several, a line ``<!-- SKILL_FILE path
  -->``.

Examples, guidance and notes usually are at the end of the first file; together they are the
*protected tail*. ``check_document`` refuses a document with unpaired fences or markers. In such a
document everything from the first one on is protected.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from reflact.errors import SkillError
from reflact.types import Candidate, Edit, EditKind, EditResult, FrozenModel, Skill

RegionName = Literal["front_matter", "examples", "slow_update", "appendix", "file"]

# The regions at the end of a document, in their order.
TAIL_ORDER: tuple[RegionName, ...] = ("examples", "slow_update", "appendix")

# A marker of a region, or the mark before a further file with the line breaks around it.
MARK = re.compile(
    r"<!--[ \t]*(?P<name>SLOW_UPDATE|APPENDIX|EXAMPLES)_(?P<side>START|END)[ \t]*-->"
    r"|(?P<break>\r?\n)<!-- SKILL_FILE (?P<path>(?a:[\w./-]+)) -->(?P=break)"
)

# What no text may hold that is written into a document.
ANY_MARKER = re.compile(
    r"<!--[ \t]*(?:(?:SLOW_UPDATE|APPENDIX|EXAMPLES)_(?:START|END)[ \t]*|SKILL_FILE\b.*?)-->"
)

# Why an edit is rejected after which the document is as before.
UNCHANGED_REASON = "the edit changes nothing"

# Why an edit is rejected whose lines all stand in the document.
KNOWN_REASON = "the document says this already"

NOTES_HEADING = "## Execution Notes Appendix"

# Two letters or digits between which a word is cut, in scripts that put spaces between words.
SPLIT_WORD = re.compile(r"[0-9A-Za-z\u00c0-\u052f\u0300-\u036f]{2}")

# The mark of a list's entry.
LIST_MARK = re.compile(r"^(?:[-*+\u2022]|\d+[.)])\s+")

_FENCE = re.compile(r"\ufeff?---[ \t]*(?=\r?\n|\Z)")
_CLOSING_FENCE = re.compile(r"\n---[ \t]*(?=\r?\n|\Z)")


class Region(FrozenModel):
    """A protected region of a document: characters ``start`` up to, not including, ``end``."""

    name: RegionName
    start: int
    end: int

    def read(self, text: str) -> str:
        """Return its part of a text, byte for byte."""
        return text[self.start : self.end]


class _Layout(NamedTuple):
    regions: tuple[Region, ...]
    problem: str | None = None


class _Rejected(Exception):
    """An edit cannot be applied, for the reason that is its text."""


# ------------------------------------------------------------------------------------------ regions


def check_document(text: str) -> None:
    """Check that a document's protected regions are well-formed."""
    problem = _layout(text).problem
    if problem is not None:
        raise SkillError(f"the skill document is malformed: {problem}")


def find_regions(text: str) -> tuple[Region, ...]:
    """Return the protected regions, in order; they never overlap."""
    return _layout(text).regions


def _layout(text: str) -> _Layout:
    regions: list[Region] = []
    position = 0
    opening = _FENCE.match(text)
    if opening is not None:
        closing = _CLOSING_FENCE.search(text, opening.end())
        position = len(text) if closing is None else closing.end()
        regions.append(Region(name="front_matter", start=0, end=position))
        if closing is None:
            return _Layout(
                tuple(regions),
                "line 1 opens front matter that no second line --- closes (a rule can be written "
                "***)",
            )
    start: re.Match[str] | None = None
    wrong: re.Match[str] | None = None
    problem: str | None = None
    for mark in MARK.finditer(text, position):
        if mark["path"] is not None:
            if start is None:
                regions.append(Region(name="file", start=mark.start(), end=mark.end()))
            continue
        problem = _explain_misplaced_marker(mark, start, regions)
        if problem is not None:
            wrong = mark
            break
        if start is None:
            start = mark
        else:
            name = _read_name(mark)
            regions.append(Region(name=name, start=start.start(), end=mark.end()))
            start = None
    if start is not None and wrong is None:
        wrong = start
        problem = f"{start[0]} is never closed"
    if wrong is None:
        return _Layout(tuple(regions))
    # All of a malformed document is protected from the region's first marker on.
    first = start or wrong
    regions.append(Region(name=_read_name(first), start=first.start(), end=len(text)))
    line = text.count("\n", 0, wrong.start()) + 1
    return _Layout(tuple(regions), f"line {line}: {problem}")


def _explain_misplaced_marker(
    marker: re.Match[str], start: re.Match[str] | None, regions: Sequence[Region]
) -> str | None:
    if marker["side"] == "END":
        if start is None:
            return f"{marker[0]} closes a region that was not opened"
        if marker["name"] != start["name"]:
            return f"{marker[0]} is inside {start[0]}, which is still open"
        return None
    if start is not None:
        return f"{marker[0]} opens a region inside another one"
    if any(region.name == _read_name(marker) for region in regions):
        return f"{marker[0]} opens this region a second time"
    return None


def _read_name(marker: re.Match[str]) -> RegionName:
    return next(name for name in TAIL_ORDER if name.upper() == marker["name"])


def _find_region(text: str, name: RegionName) -> Region | None:
    return next((region for region in find_regions(text) if region.name == name), None)


def _open_spans(text: str, protected: Iterable[Region]) -> Iterator[tuple[int, int]]:
    start = 0
    for region in protected:
        yield start, region.start
        start = region.end
    yield start, len(text)


def _find_tail(text: str, names: Sequence[RegionName]) -> int:
    """Return where the regions of these names at the end of the first file begin, or its end."""
    regions = find_regions(text)
    end = next((region.start for region in regions if region.name == "file"), len(text))
    for region in reversed([region for region in regions if region.end <= end]):
        if region.name not in names or text[region.end : end].strip():
            break
        end = region.start
    return end


def editable_text(text: str) -> str:
    """Return a document without its protected regions, but with marks of files."""
    hidden = [region for region in find_regions(text) if region.name != "file"]
    return "".join(text[start:end] for start, end in _open_spans(text, hidden))


def is_same_body(document: str, body: str) -> bool:
    """Whether a body is a document's editable text, but for outer white space and line breaks."""
    return _adapt_newlines(body, document).strip() == editable_text(document).strip()


def remove_markers(text: str) -> str:
    """Return a document as plain Markdown: without markers, and without empty regions."""
    for region in reversed(find_regions(text)):
        if region.name in TAIL_ORDER:
            inside = _read_inside(text, region).replace("\n", detect_newline(text))
            if inside:
                text = text[: region.start] + inside + text[region.end :]
            else:
                text = _cut_region(text, region)
    return text


def join_files(main: str, others: Sequence[tuple[str, str]]) -> str:
    """Return the document that joins a text and further files, each with its path."""
    marks = [("the first file", mark) for mark in MARK.finditer(main) if mark["path"] is not None]
    marks += [(path, mark) for path, content in others for mark in ANY_MARKER.finditer(content)]
    if marks:
        path, mark = marks[0]
        raise SkillError(
            f"{path} holds {mark[0].strip()}, which marks a protected region; leave it out"
        )
    newline = detect_newline(main)
    return main + "".join(
        f"{newline}<!-- SKILL_FILE {path} -->{newline}{content}" for path, content in others
    )


def split_files(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the first text of a document, and its further files with their paths."""
    marks = [region for region in find_regions(text) if region.name == "file"]
    first, *others = (text[start:end] for start, end in _open_spans(text, marks))
    paths = [mark.read(text).split()[2] for mark in marks]
    return first, tuple(zip(paths, others, strict=True))


# -------------------------------------------------------------------------------------------- edits


def apply_edits(skill: Skill, edits: Sequence[Edit]) -> Candidate:
    """Apply edits in order; a rejected one leaves the document as it is, and the next is tried.

    The anchor (``target``) must occur exactly once in the unprotected text, overlapping occurrences
    included.

    * ``replace`` and ``delete`` change exactly the anchor.
    * ``insert_after`` adds the content on new lines after the line with the anchor's last
      character.
    * ``append`` adds it at the end, before the protected tail, as a paragraph of its own.
    * ``rewrite`` replaces all unprotected text. Front matter, content and the other regions follow
      one another in their order, with a blank line between.
    * ``examples`` replaces the section of worked examples, and removes it if the content is empty.
    * ``suggest`` is never applied.

    A line of ``insert_after``, ``append`` or ``rewrite`` that stands in the document already is
    left out. ``insert_after`` and ``append`` strip line breaks around the content and end it with
    one. If all line breaks of the document are of one kind, those of the edits are converted to it.
    An edit is rejected if it would change nothing, or touch a protected region.
    """
    text = skill.text
    results = []
    for edit in edits:
        try:
            text = _apply_edit(text, edit)
        except _Rejected as error:
            results.append(EditResult(edit=edit, status="rejected", reason=str(error)))
        else:
            results.append(EditResult(edit=edit, status="applied"))
    return Candidate(skill=Skill(text=text), results=tuple(results))


def _apply_edit(text: str, edit: Edit) -> str:
    """Return the text after an edit; raises ``_Rejected`` with the reason."""
    op = edit.op
    if op == "suggest":
        raise _Rejected(
            "a suggestion is for a rewrite of the document and is not applied by itself"
        )
    target = "" if op in {"append", "rewrite", "examples"} else _adapt_newlines(edit.target, text)
    content = "" if op == "delete" else _adapt_newlines(edit.content, text)
    for name, value in (("target", target), ("content", content)):
        if ANY_MARKER.search(value):
            raise _Rejected(f"the {name} holds the marker of a protected region")
    if op == "examples":
        edited = _replace_examples(text, edit.content)
    else:
        edited = _edit_body(text, op, target, content)
        protected = [region.read(text) for region in find_regions(text)]
        if edited != text and [r.read(edited) for r in find_regions(edited)] != protected:
            raise _Rejected("the edit would open, close or change a protected region")
    if edited == text:
        raise _Rejected(UNCHANGED_REASON)
    return edited


def _edit_body(text: str, op: EditKind, target: str, content: str) -> str:
    if op in {"append", "insert_after", "rewrite"} and content.strip():
        content = _drop_known_lines(text, op, content)
        if not content.strip():
            raise _Rejected(KNOWN_REASON)
    if op not in {"append", "rewrite"} and not target.strip():
        raise _Rejected("the target is empty")
    if op != "delete" and not content.strip():
        raise _Rejected("the content is empty")
    if op == "rewrite":
        return _rewrite_body(text, content.strip("\r\n"))
    if op == "append":
        end = _find_tail(text, TAIL_ORDER)
        return text[:end] + _format_paragraph(text, end, content) + text[end:]
    start = _locate(text, target)
    end = start + len(target)
    if op != "insert_after":
        return text[:start] + content + text[end:]

    line_break = detect_newline(text)
    limit = next((r.start for r in find_regions(text) if r.start >= end), len(text))
    line_end = text.find("\n", end - 1, limit) + 1
    before = "" if line_end else line_break
    end = line_end or limit
    return text[:end] + before + content.strip("\r\n") + line_break + text[end:]


def _rewrite_body(text: str, content: str) -> str:
    regions = find_regions(text)
    if any(region.name == "file" for region in regions):
        raise _Rejected("a rewrite would join the files of the document; edit them instead")
    if _FENCE.match(content):
        raise _Rejected("the content opens front matter; leave it out (a rule can be written ***)")
    if is_same_body(text, content):
        return text
    line_break = detect_newline(text)
    front = [region.read(text) for region in regions if region.name == "front_matter"]
    tail = [region.read(text) for region in regions if region.name != "front_matter"]
    rest = text[regions[-1].end :] if tail else line_break
    end = line_break if rest.strip() else rest
    return (line_break * 2).join([*front, content, *tail]) + end


def _locate(text: str, target: str) -> int:
    pattern = re.compile(f"(?={re.escape(target)})")
    matches = [
        match.start()
        for start, end in _open_spans(text, find_regions(text))
        for match in pattern.finditer(text, start, end)
    ]
    if len(matches) == 1:
        for end in (matches[0], matches[0] + len(target)):
            if SPLIT_WORD.match(text, max(0, end - 1)) and end > 0:
                raise _Rejected(
                    "the target begins or ends in the middle of a word; quote whole words"
                )
        return matches[0]
    if matches:
        raise _Rejected(
            "the target occurs more than once in the document; quote more of the text around it"
        )
    if target in text:
        raise _Rejected("the target lies in a protected region or crosses into one")
    raise _Rejected("the target does not occur in the document")


def _drop_known_lines(text: str, op: EditKind, content: str) -> str:
    """Return a content without what the document says already; empty if it says nothing else.

    Of an addition whose lines are all known, nothing is left. From any other text, only entries of
    lists are left out, for a line such as an answer of an example belongs to the lines before it. A
    rewrite keeps the first of equal entries.
    """
    known = set[str]()
    if op != "rewrite":
        known = {normalize_line(line) for line in editable_text(text).splitlines()}
        sentences = {
            form for line in content.splitlines() if _is_sentence(form := normalize_line(line))
        }
        if sentences and sentences <= known:
            return ""
    kept = []
    is_code = False
    lines = content.splitlines(keepends=True)
    for line in lines:
        form = normalize_line(line)
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        is_entry = LIST_MARK.match(line.strip()) is not None and not is_code
        if not (is_entry and _is_sentence(form) and form in known):
            kept.append(line)
            known.add(form)
    says_nothing = all(line.lstrip().startswith("#") or not line.strip() for line in kept)
    return "" if says_nothing and len(kept) < len(lines) else "".join(kept)


def _is_sentence(form: str) -> bool:
    """Whether a normalised line can be a rule; headings and single words may repeat."""
    return not form.startswith("#") and len(re.findall(r"\w+", form)) > 1


def _replace_examples(text: str, content: str) -> str:
    if content.strip():
        return _write_region(text, "examples", content.strip("\r\n")).text
    region = _find_region(text, "examples")
    if region is None:
        raise _Rejected("the document has no examples")
    return _cut_region(text, region)


def _cut_region(text: str, region: Region) -> str:
    """Return a text without a region and the line breaks before it."""
    head = text[: region.start].rstrip("\r\n")
    return head + text[region.end :] if head.strip() else text[region.end :].lstrip("\r\n")


# ------------------------------------------------------------------------------- guidance and notes


def read_guidance(text: str) -> str:
    """Return the slow guidance of a document; empty if its region is empty or missing."""
    region = _find_region(text, "slow_update")
    return "" if region is None else _read_inside(text, region)


def replace_guidance(skill: Skill, new: str) -> Skill:
    """Return the document with its guidance replaced; empty guidance leaves an empty region.

    A new region is added at the end of the document, or before an appendix at the end. White space
    around the guidance is stripped.
    """
    check_document(skill.text)
    check_region_text(new)
    guidance = _normalize_newlines(new)
    region = _find_region(skill.text, "slow_update")
    if region is not None and _read_inside(skill.text, region) == guidance:
        return skill
    return _write_region(skill.text, "slow_update", guidance)


def read_notes(text: str) -> tuple[str, ...]:
    """Return the execution notes of a document, in order, each on one line.

    A line ``- ...`` begins a note and other lines continue it; the heading is not a note.
    """
    region = _find_region(text, "appendix")
    notes: list[str] = []
    for line in [] if region is None else _read_inside(text, region).splitlines():
        flat = _flatten(line)
        if flat == "-" or flat.startswith("- "):
            notes.append(flat[2:])
        elif notes:
            notes[-1] = _flatten(f"{notes[-1]} {flat}")
        elif flat != NOTES_HEADING:
            notes.append(flat)
    return tuple(note for note in notes if note)


def replace_notes(skill: Skill, new: Sequence[str]) -> Skill:
    """Return the document with its execution notes replaced: a heading, and a bullet for each.

    A new region is added at the end of the document. Without notes, no region is added and an
    existing one is emptied, because its removal would change the text around it.
    """
    check_document(skill.text)
    notes = tuple(flat for note in new if (flat := _flatten(note)))
    for note in notes:
        check_region_text(note)
    if notes == read_notes(skill.text):
        return skill
    bullets = "\n".join(f"- {note}" for note in notes)
    inside = f"{NOTES_HEADING}\n\n{bullets}" if notes else ""
    return _write_region(skill.text, "appendix", inside)


def merge_notes(notes: Iterable[str], reminders: Iterable[str]) -> tuple[str, ...]:
    """Return notes and reminders, each on one line, without later ones that differ only in case."""
    first: dict[str, str] = {}
    for note in (*notes, *reminders):
        if flat := _flatten(note):
            first.setdefault(flat.casefold(), flat)
    return tuple(first.values())


def check_region_text(text: str) -> None:
    """Raise ValueError if guidance or a note contains a marker, maybe on two lines."""
    marker = ANY_MARKER.search(_flatten(text))
    if marker is not None:
        raise ValueError(
            f"the text holds {marker[0]}, which marks a protected region; leave it out"
        )


def _read_inside(text: str, region: Region) -> str:
    return _normalize_newlines(ANY_MARKER.sub("", region.read(text)))


def _write_region(text: str, name: RegionName, inside: str) -> Skill:
    """Return the document with a region's content replaced, or with a new region in its place."""
    body = f"\n{inside}\n" if inside else "\n"
    block = f"<!-- {name.upper()}_START -->{body}<!-- {name.upper()}_END -->"
    block = block.replace("\n", detect_newline(text))
    region = _find_region(text, name)
    if region is None:
        later = TAIL_ORDER[TAIL_ORDER.index(name) + 1 :]
        position = _find_tail(text, later)
        edited = text[:position] + _format_paragraph(text, position, block) + text[position:]
    else:
        edited = text[: region.start] + block + text[region.end :]
    check_document(edited)
    return Skill(text=edited)


# -------------------------------------------------------------------------------------------- lines


def normalize_line(line: str) -> str:
    """Return a line without its list mark and with single spaces."""
    return LIST_MARK.sub("", _flatten(line))


def digest_form(text: str) -> str:
    """Return a digest that documents share if they differ in white space and list marks alone."""
    lines = [form for line in text.splitlines() if (form := normalize_line(line))]
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()


def detect_newline(text: str) -> str:
    """Return the line break of a text: CR LF if it has any, else LF."""
    return "\r\n" if "\r\n" in text else "\n"


def diff_texts(old: str, new: str) -> str:
    """Return the unified diff of two texts; empty if they are equal."""
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (old, new))
    lines = difflib.unified_diff(before, after, "before", "after")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _format_paragraph(text: str, position: int, content: str) -> str:
    """Return a content with the line breaks that make it a paragraph at a position of a text."""
    line_break = detect_newline(text)
    head = text[:position]
    trailing = head[len(head.rstrip("\r\n")) :].count("\n")
    before = line_break * max(0, 2 - trailing) if head else ""
    after = line_break if position == len(text) else line_break * 2
    return before + content.strip("\r\n") + after


def _adapt_newlines(text: str, document: str) -> str:
    """Return a text with the document's line breaks, if the document has only one kind."""
    if 0 < document.count("\r\n") < document.count("\n"):
        return text
    return re.sub(r"\r*\n", detect_newline(document), text)


def _normalize_newlines(text: str) -> str:
    return re.sub(r"\r\n?", "\n", text).strip()


def _flatten(text: str) -> str:
    return " ".join(text.split())
