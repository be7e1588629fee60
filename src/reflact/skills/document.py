"""The skill document: its protected regions, edits with exact anchors, guidance and execution
notes.

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

RegionName = Literal["front_matter", "slow_update", "appendix", "examples", "file"]

MARKER = re.compile(r"<!--[ \t]*(SLOW_UPDATE|APPENDIX|EXAMPLES)_(START|END)[ \t]*-->")

# The mark before a further file, with the line breaks around it.
FILE_MARK = re.compile(r"(\r?\n)<!-- SKILL_FILE ([\w./-]+) -->\1", re.ASCII)

# Characters of scripts without spaces between words, as the inside of a character class: Thai, Lao,
# Tibetan, Burmese, Khmer, kana and Han.
UNSPACED_SCRIPTS = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    r"\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

# The order of the regions at the end of a document.
TAIL_ORDER: tuple[RegionName, ...] = ("examples", "slow_update", "appendix")

# Why an edit is rejected after which the document is as before.
UNCHANGED_REASON = "the edit changes nothing"

# Why an edit is rejected whose lines all stand in the document.
KNOWN_REASON = "the document says this already"

# The mark of a list's entry.
LIST_MARK = re.compile(r"^(?:[-*+\u2022]|\d+[.)])\s+")

_ANY_MARKER = re.compile(rf"{MARKER.pattern}|<!--[ \t]*SKILL_FILE\b.*?-->")
_FENCE = re.compile(r"\ufeff?---[ \t]*(?=\r?\n|\Z)")
_CLOSING_FENCE = re.compile(r"\n---[ \t]*(?=\r?\n|\Z)")
_REGION_NAMES: dict[str, RegionName] = {
    "SLOW_UPDATE": "slow_update",
    "APPENDIX": "appendix",
    "EXAMPLES": "examples",
}

# A word: letters, digits and underscores with combining accents, and with apostrophes between them,
# in
# scripts that put spaces between words.
_LETTERS = rf"(?:[^\W{UNSPACED_SCRIPTS}]|[\u0300-\u036f])+"
_WORD = re.compile(rf"{_LETTERS}(?:['’]{_LETTERS})*")


class Region(FrozenModel):
    """A protected region of a document: characters ``start`` up to, not including, ``end``."""

    name: RegionName
    start: int
    end: int


class _Layout(NamedTuple):
    regions: tuple[Region, ...]
    problem: str | None = None


class _Splice(NamedTuple):
    start: int
    end: int
    text: str


def check_document(text: str) -> None:
    """Check that a document's protected regions are well-formed.

    Raises:
        SkillError: Front matter or a region is unclosed, unopened, nested or repeated; names the
            line.
    """
    problem = _layout(text).problem
    if problem is not None:
        raise SkillError(f"the skill document is malformed: {problem}")


def find_regions(text: str) -> tuple[Region, ...]:
    """Return the protected regions, in order; they never overlap."""
    return _layout(text).regions


def editable_text(text: str) -> str:
    """Return the text that edits may change: the document without its protected regions, but with
    marks of files.
    """
    hidden = [region for region in find_regions(text) if region.name != "file"]
    return "".join(text[start:end] for start, end in _open_spans(text, hidden))


def remove_markers(text: str) -> str:
    """Return a document as plain Markdown: without the markers of guidance, notes and examples, and
    empty ones.
    """
    for region in reversed(find_regions(text)):
        if region.name in TAIL_ORDER:
            inside = _read_region(text, region).replace("\n", detect_newline(text))
            text = (
                text[: region.start] + inside + text[region.end :]
                if inside
                else _cut_region(text, region)
            )
    return text


def join_files(main: str, others: Sequence[tuple[str, str]]) -> str:
    """Return the document that joins a text and further files, each with its path.

    Raises:
        SkillError: One of the texts has the mark of a file, or a further one that of another
            protected region.
    """
    for path, content in (("the first file", main), *others):
        mark = (FILE_MARK if content is main else _ANY_MARKER).search(content)
        if mark is not None:
            raise SkillError(
                f"{path} holds {mark[0].strip()}, which marks a protected region; leave it out"
            )
    newline = detect_newline(main)
    return main + "".join(
        f"{newline}<!-- SKILL_FILE {path} -->{newline}{content}" for path, content in others
    )


def split_files(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the first text of a document, and its further files with their paths; see
    ``join_files``.
    """
    marks = [region for region in find_regions(text) if region.name == "file"]
    ends = [*(mark.start for mark in marks[1:]), len(text)]
    others = [
        (text[mark.start : mark.end].split()[2], text[mark.end : end])
        for mark, end in zip(marks, ends, strict=bool(marks))
    ]
    return text[: _main_end(text, marks)], tuple(others)


def is_same_body(document: str, body: str) -> bool:
    """Return whether a body equals a document's editable text, except for outer white space and
    line breaks.
    """
    return _adapt_newlines(body, document).strip() == editable_text(document).strip()


def apply_edits(skill: Skill, edits: Sequence[Edit]) -> Candidate:
    """Apply edits in order; a rejected edit leaves the document as it is, and the next one is
    tried.

    The anchor (``target``) must occur exactly once in the unprotected text, overlapping occurrences
    included, and must neither begin nor end inside a word.

    * ``replace`` and ``delete`` change exactly the anchor.
    * ``insert_after`` adds the content on new lines after the line with the anchor's last
    character.
    * ``append`` adds it at the end, before the protected tail, as a paragraph of its own.
    * ``rewrite`` replaces all unprotected text. Front matter, content and the other regions follow
      one another in their order, with a blank line between.
    * ``examples`` replaces the section of worked examples, and removes it if the content is empty.
    * ``suggest`` is never applied.

    A line of ``insert_after``, ``append`` or ``rewrite`` that stands in the document already is
    left out.

    ``insert_after`` and ``append`` strip line breaks around the content and end it with one. If all
    line breaks of the document are of one kind, those of the edits are converted to it. An edit is
    rejected if it would change nothing, join two words, or touch a protected region.
    """
    text = skill.text
    results = []
    for edit in edits:
        text, reason = _try_edit(text, edit)
        status: Literal["applied", "rejected"] = "applied" if reason is None else "rejected"
        results.append(EditResult(edit=edit, status=status, reason=reason))
    return Candidate(skill=Skill(text=text), results=tuple(results))


def format_paragraph(text: str, position: int, content: str) -> str:
    """Return a content with the line breaks that make it a separate paragraph at a position of a
    text.
    """
    line_break = detect_newline(text)
    head = text[:position]
    trailing = head[len(head.rstrip("\r\n")) :].count("\n")
    before = line_break * max(0, 2 - trailing) if head else ""
    after = line_break if position == len(text) else line_break * 2
    return before + content.strip("\r\n") + after


def normalize_line(line: str) -> str:
    """Return a line without its list mark and with single spaces."""
    return LIST_MARK.sub("", _flatten(line))


def digest_form(text: str) -> str:
    """Return the digest of a text after white space and list marks are normalised; equal for
    documents that say the same.
    """
    lines = [form for line in text.splitlines() if (form := normalize_line(line))]
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()


def detect_newline(text: str) -> str:
    """Return the line break of a text: CR LF if it has any, else LF."""
    return "\r\n" if "\r\n" in text else "\n"


def diff_texts(old: str, new: str) -> str:
    """Return the unified diff of two texts; empty if they are equal."""
    lines = difflib.unified_diff(_lines(old), _lines(new), "before", "after")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


# ---------------------------------------------------------------------------------------------
# reading


def _layout(text: str) -> _Layout:
    regions: list[Region] = []
    position = 0
    opening = _FENCE.match(text)
    if opening is not None:
        closing = _CLOSING_FENCE.search(text, opening.end())
        if closing is None:
            everything = Region(name="front_matter", start=0, end=len(text))
            reason = (
                "line 1 opens front matter that no second line --- closes (a rule can be "
                "written ***)"
            )
            return _Layout((everything,), reason)
        position = closing.end()
        regions.append(Region(name="front_matter", start=0, end=position))
    start: re.Match[str] | None = None
    marks = (*MARKER.finditer(text, position), *FILE_MARK.finditer(text, position))
    for marker in sorted(marks, key=re.Match.start):
        if marker.re is FILE_MARK:
            if start is None:
                regions.append(Region(name="file", start=marker.start(), end=marker.end()))
            continue
        problem = _explain_misplaced_marker(marker, start, regions)
        if problem is not None:
            first = marker if start is None else start
            return _truncate_layout(
                text, regions, first, f"line {_line_number(text, marker)}: {problem}"
            )
        if start is None:
            start = marker
        else:
            regions.append(
                Region(name=_REGION_NAMES[marker[1]], start=start.start(), end=marker.end())
            )
            start = None
    if start is not None:
        return _truncate_layout(
            text, regions, start, f"line {_line_number(text, start)}: {start[0]} is never closed"
        )
    return _Layout(tuple(regions))


def _explain_misplaced_marker(
    marker: re.Match[str], start: re.Match[str] | None, regions: Sequence[Region]
) -> str | None:
    if marker[2] == "END":
        if start is None:
            return f"{marker[0]} closes a region that was not opened"
        return (
            None
            if marker[1] == start[1]
            else f"{marker[0]} is inside {start[0]}, which is still open"
        )
    if start is not None:
        return f"{marker[0]} opens a region inside another one"
    if any(region.name == _REGION_NAMES[marker[1]] for region in regions):
        return f"{marker[0]} opens this region a second time"
    return None


def _truncate_layout(
    text: str, regions: Sequence[Region], first: re.Match[str], problem: str
) -> _Layout:
    rest = Region(name=_REGION_NAMES[first[1]], start=first.start(), end=len(text))
    return _Layout((*regions, rest), problem)


def _main_end(text: str, regions: Sequence[Region]) -> int:
    """Return the end of the first file of a document."""
    return next((region.start for region in regions if region.name == "file"), len(text))


def _line_number(text: str, marker: re.Match[str]) -> int:
    return text.count("\n", 0, marker.start()) + 1


def _open_spans(text: str, protected: Sequence[Region]) -> Iterator[tuple[int, int]]:
    start = 0
    for region in protected:
        yield start, region.start
        start = region.end
    yield start, len(text)


# ---------------------------------------------------------------------------------------------
# editing


def _try_edit(text: str, edit: Edit) -> tuple[str, str | None]:
    layout = _layout(text)
    if edit.op == "examples":
        return _try_examples(text, edit.content)
    shortened = _drop_known_lines(text, edit)
    if edit.content.strip() and not shortened.content.strip():
        return text, KNOWN_REASON
    edit = shortened
    target = "" if edit.op in {"append", "rewrite"} else _adapt_newlines(edit.target, text)
    content = "" if edit.op == "delete" else _adapt_newlines(edit.content, text)
    reason = _check_content(edit.op, target, content)
    if edit.op == "rewrite" and any(region.name == "file" for region in layout.regions):
        reason = "a rewrite would join the files of the document; edit them instead"
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
        reason = _find_damage(text, edited, layout)
        ends = (splice.start, splice.start + len(splice.text))
        if reason is None and any(_inside_word(edited, end) for end in ends):
            reason = "the edit would run two words together"
    return (edited, None) if reason is None else (text, reason)


def _drop_known_lines(text: str, edit: Edit) -> Edit:
    """Return an edit without what the document says already; a rewrite keeps the first of equal
    entries.

    An addition whose lines are all known is empty then. From any other text, only entries of lists
    are left out: a line such as an answer of an example belongs to the lines before it.
    """
    known = set()
    if edit.op in {"append", "insert_after"}:
        known = {
            form for line in editable_text(text).splitlines() if (form := normalize_line(line))
        }
        fresh = [
            form for line in edit.content.splitlines() if _is_sentence(form := normalize_line(line))
        ]
        if fresh and known.issuperset(fresh):
            return edit.model_copy(update={"content": ""})
    elif edit.op != "rewrite":
        return edit
    kept = []
    is_code = False
    for line in edit.content.splitlines(keepends=True):
        form = normalize_line(line)
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        is_entry = LIST_MARK.match(line.strip()) is not None
        if is_code or not is_entry or not _is_sentence(form) or form not in known:
            kept.append(line)
            known.add(form)
    content = "".join(kept)
    if content == edit.content:
        return edit
    says_nothing = all(line.lstrip().startswith("#") or not line.strip() for line in kept)
    return edit.model_copy(update={"content": "" if says_nothing else content})


def _is_sentence(form: str) -> bool:
    """Whether a normalised line can be a rule; headings, rules of tables and single words may
    repeat.
    """
    return not form.startswith("#") and len(_WORD.findall(form)) > 1


def _try_examples(text: str, content: str) -> tuple[str, str | None]:
    if _ANY_MARKER.search(content):
        return text, "the content holds the marker of a protected region"
    region = _find_region(text, "examples")
    if not content.strip() and region is None:
        return text, "the document has no examples"
    if not content.strip() and region is not None:
        return _cut_region(text, region), None
    edited = _write_region(text, "examples", content.strip("\r\n")).text
    return (text, UNCHANGED_REASON) if edited == text else (edited, None)


def _cut_region(text: str, region: Region) -> str:
    """Return a text without a region and the line breaks before it."""
    head = text[: region.start].rstrip("\r\n")
    return head + text[region.end :] if head.strip() else text[region.end :].lstrip("\r\n")


def _splice(
    text: str, op: EditKind, target: str, content: str, protected: Sequence[Region]
) -> _Splice | str:
    if op == "append":
        return _splice_append(text, content, protected)
    start = _locate(text, target, protected)
    if isinstance(start, str):
        return start
    if op == "insert_after":
        return _splice_insert(text, content, start + len(target), protected)
    return _Splice(start, start + len(target), content)


def _check_content(op: EditKind, target: str, content: str) -> str | None:
    if op == "suggest":
        return "a suggestion is for a rewrite of the document and is not applied by itself"
    if op not in {"append", "rewrite"} and not target.strip():
        return "the target is empty"
    if op != "delete" and not content.strip():
        return "the content is empty"
    for name, value in (("target", target), ("content", content)):
        if _ANY_MARKER.search(value):
            return f"the {name} holds the marker of a protected region"
    if op == "rewrite" and _FENCE.match(content.strip("\r\n")):
        return "the content opens front matter; leave it out (a rule can be written ***)"
    return None


def _locate(text: str, target: str, protected: Sequence[Region]) -> int | str:
    matches: list[int] = []
    for start, end in _open_spans(text, protected):
        match = text.find(target, start, end)
        while match >= 0 and len(matches) < 2:
            matches.append(match)
            match = text.find(target, match + 1, end)
    if len(matches) > 1:
        return "the target occurs more than once in the document; quote more of the text around it"
    if not matches and target in text:
        return "the target lies in a protected region or crosses into one"
    if not matches:
        return "the target does not occur in the document"
    if _inside_word(text, matches[0]) or _inside_word(text, matches[0] + len(target)):
        return "the target begins or ends in the middle of a word; quote whole words"
    return matches[0]


def _splice_append(text: str, content: str, protected: Sequence[Region]) -> _Splice:
    end = _main_end(text, protected)
    for region in reversed([region for region in protected if region.end <= end]):
        if region.name == "front_matter" or text[region.end : end].strip():
            break
        end = region.start
    return _Splice(end, end, format_paragraph(text, end, content))


def _splice_insert(
    text: str, content: str, anchor_end: int, protected: Sequence[Region]
) -> _Splice:
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
    parts = [
        *(text[r.start : r.end] for r in front),
        content,
        *(text[r.start : r.end] for r in tail),
    ]
    return (line_break * 2).join(parts) + (line_break if rest.strip() else rest)


def _find_damage(text: str, edited: str, layout: _Layout) -> str | None:
    if edited == text:
        return UNCHANGED_REASON
    protected = [text[region.start : region.end] for region in layout.regions]
    if [edited[region.start : region.end] for region in find_regions(edited)] != protected:
        return "the edit would open, close or change a protected region"
    return None


def _inside_word(text: str, position: int) -> bool:
    for word in _WORD.finditer(text, text.rfind("\n", 0, position) + 1):
        if word.end() > position:
            return word.start() < position
    return False


# ----------------------------------------------------------------------------------------------
# lines


def _adapt_newlines(text: str, document: str) -> str:
    """Return a text with the document's line breaks, if the document has only one kind."""
    if 0 < document.count("\r\n") < document.count("\n"):
        return text
    return re.sub(r"\r*\n", detect_newline(document), text)


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


# ---------------------------------------------------------------------------------- guidance and
# notes

NOTES_HEADING = "## Execution Notes Appendix"


def read_guidance(text: str) -> str:
    """Return the slow guidance of a document; empty if its region is empty or missing."""
    region = _find_region(text, "slow_update")
    return "" if region is None else _read_region(text, region)


def replace_guidance(skill: Skill, new: str) -> Skill:
    """Return the document with its guidance replaced; empty guidance leaves an empty region.

    A new region is added at the end of the document, or before an appendix at the end. White space
    around the guidance is stripped.

    Raises:
        SkillError: The document is malformed.
        ValueError: The guidance contains a marker.
    """
    check_document(skill.text)
    check_region_text(new)
    guidance = _normalize_newlines(new)
    if (
        _find_region(skill.text, "slow_update") is not None
        and read_guidance(skill.text) == guidance
    ):
        return skill
    return _write_region(skill.text, "slow_update", guidance)


def reserve_guidance_region(skill: Skill) -> Skill:
    """Return the document with a region for slow guidance; an existing one stays as it is.

    Raises:
        SkillError: The document is malformed.
    """
    check_document(skill.text)
    return replace_guidance(skill, "") if _find_region(skill.text, "slow_update") is None else skill


def read_notes(text: str) -> tuple[str, ...]:
    """Return the execution notes of a document, in order, each on one line.

    A line ``- ...`` begins a note and other lines continue it; the heading is not a note.
    """
    region = _find_region(text, "appendix")
    notes: list[str] = []
    for line in [] if region is None else _read_region(text, region).splitlines():
        flat = _flatten(line)
        if flat == "-" or flat.startswith("- "):
            notes.append(flat[2:])
        elif notes:
            notes[-1] = _flatten(f"{notes[-1]} {flat}")
        elif flat != NOTES_HEADING:
            notes.append(flat)
    return tuple(note for note in notes if note)


def replace_notes(skill: Skill, new: Sequence[str]) -> Skill:
    """Return the document with its execution notes replaced: a heading and a one-line bullet for
    each note.

    A new region is added at the end of the document. Without notes, no region is added and an
    existing one is emptied, because its removal would change the text around it.

    Raises:
        SkillError: The document is malformed.
        ValueError: A note contains a marker.
    """
    check_document(skill.text)
    notes = tuple(flat for note in new if (flat := _flatten(note)))
    for note in notes:
        check_region_text(note)
    if notes == read_notes(skill.text):
        return skill
    bullets = "\n".join(f"- {note}" for note in notes)
    return _write_region(skill.text, "appendix", f"{NOTES_HEADING}\n\n{bullets}" if notes else "")


def merge_notes(notes: Iterable[str], reminders: Iterable[str]) -> tuple[str, ...]:
    """Return the notes and then the reminders, each on one line, without later ones that differ
    only in case.
    """
    first: dict[str, str] = {}
    for note in (*notes, *reminders):
        if flat := _flatten(note):
            first.setdefault(flat.casefold(), flat)
    return tuple(first.values())


def check_region_text(text: str) -> None:
    """Raise ValueError if guidance or a note contains the marker of a protected region, maybe on
    two lines.
    """
    marker = _ANY_MARKER.search(_flatten(text))
    if marker is not None:
        raise ValueError(
            f"the text holds {marker[0]}, which marks a protected region; leave it out"
        )


def _find_region(text: str, name: RegionName) -> Region | None:
    return next((region for region in find_regions(text) if region.name == name), None)


def _read_region(text: str, region: Region) -> str:
    return _normalize_newlines(MARKER.sub("", text[region.start : region.end]))


def _write_region(text: str, name: RegionName, inside: str) -> Skill:
    body = f"\n{inside}\n" if inside else "\n"
    block = f"<!-- {name.upper()}_START -->{body}<!-- {name.upper()}_END -->".replace(
        "\n", detect_newline(text)
    )
    region = _find_region(text, name)
    if region is None:
        position = _find_insertion_point(text, name)
        edited = text[:position] + format_paragraph(text, position, block) + text[position:]
    else:
        edited = text[: region.start] + block + text[region.end :]
    check_document(edited)
    return Skill(text=edited)


def _find_insertion_point(text: str, name: RegionName) -> int:
    """Return where a new region goes: examples, guidance and appendix follow one another at the
    end.
    """
    end = _main_end(text, find_regions(text))
    later = TAIL_ORDER[TAIL_ORDER.index(name) + 1 :]
    for region in reversed([region for region in find_regions(text) if region.end <= end]):
        if region.name not in later or text[region.end : end].strip():
            break
        end = region.start
    return end


def _normalize_newlines(text: str) -> str:
    return re.sub(r"\r\n?", "\n", text).strip()


def _flatten(text: str) -> str:
    return " ".join(text.split())
