"""The protected tail of a skill document: slow guidance, and the appendix of execution notes. Pure.

Both are read from and written into their marked regions (see ``skill``). Writing changes nothing outside
the region: where there is none yet, it is added as a paragraph of its own. Line breaks are read as LF and
written as the document's own kind. A region that says already what is to be written stays as it is, so
that a document with another spelling of it keeps its hash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from reflact.errors import SkillError
from reflact.skills.document import (
    MARKER,
    Region,
    check_document,
    detect_newline,
    find_regions,
    format_paragraph,
)
from reflact.types import Skill

NOTES_HEADING = "## Execution Notes Appendix"

_Name = Literal["slow_update", "appendix"]


def read_guidance(text: str) -> str:
    """Return the slow guidance of a document; empty where its region is empty or missing."""
    region = _find_region(text, "slow_update")
    return "" if region is None else _read_region(text, region)


def replace_guidance(skill: Skill, new: str) -> Skill:
    """Return the document with new guidance in place of its own; empty guidance leaves an empty region.

    A new region stands at the end of the document, or before the appendix where that ends it. White space
    around the guidance is left out.

    Raises:
        SkillError: The document is malformed, or the guidance holds a marker.
    """
    check_document(skill.text)
    _refuse_markers(new)
    wanted = _normalize_newlines(new)
    region = _find_region(skill.text, "slow_update")
    if region is not None and read_guidance(skill.text) == wanted:
        return skill
    return _write_region(skill.text, "slow_update", wanted)


def reserve_guidance_region(skill: Skill) -> Skill:
    """Return the document with a region for slow guidance; one that is there stays as it is.

    Raises:
        SkillError: The document is malformed.
    """
    check_document(skill.text)
    return replace_guidance(skill, "") if _find_region(skill.text, "slow_update") is None else skill


def read_notes(text: str) -> tuple[str, ...]:
    """Return the execution notes of a document, in order, each on one line.

    A line ``- ...`` begins a note and other lines continue it; the heading is no note.
    """
    region = _find_region(text, "appendix")
    found: list[str] = []
    for line in [] if region is None else _read_region(text, region).splitlines():
        words = _flatten(line)
        if words == "-" or words.startswith("- "):
            found.append(words[2:])
        elif found:
            found[-1] = _flatten(f"{found[-1]} {words}")
        elif words != NOTES_HEADING:
            found.append(words)
    return tuple(note for note in found if note)


def replace_notes(skill: Skill, new: Sequence[str]) -> Skill:
    """Return the document with new execution notes in place of its own.

    The region holds a heading and one ``- `` bullet a note; a note of several lines is written on one,
    an empty one not at all. A new region stands at the end of the document. Without any notes a document
    gets no region, and one that is there is emptied: removing it would change the text around it.

    Raises:
        SkillError: The document is malformed, or a note holds a marker.
    """
    check_document(skill.text)
    wanted = tuple(flat for note in new if (flat := _flatten(note)))
    for note in wanted:
        _refuse_markers(note)
    if wanted == read_notes(skill.text):
        return skill
    bullets = "\n".join(f"- {note}" for note in wanted)
    return _write_region(skill.text, "appendix", f"{NOTES_HEADING}\n\n{bullets}" if wanted else "")


def merge_notes(notes: Iterable[str], reminders: Iterable[str]) -> tuple[str, ...]:
    """Return the notes with the reminders after them, in order, each once and on one line.

    Two are the same if they differ in case and white space at most; the earlier one stays.
    """
    first: dict[str, str] = {}
    for note in (*notes, *reminders):
        words = _flatten(note)
        if words:
            first.setdefault(words.casefold(), words)
    return tuple(first.values())


def check_region_text(text: str) -> None:
    """Refuse guidance or a note that cannot be written into the tail.

    Raises:
        ValueError: It holds the marker of a protected region, or would once it is put on one line.
    """
    marker = MARKER.search(_flatten(text))
    if marker is not None:
        raise ValueError(f"the text holds {marker[0]}, which marks a protected region; leave it out")


def _refuse_markers(text: str) -> None:
    try:
        check_region_text(text)
    except ValueError as error:
        raise SkillError(str(error)) from None


def _find_region(text: str, name: _Name) -> Region | None:
    return next((region for region in find_regions(text) if region.name == name), None)


def _read_region(text: str, region: Region) -> str:
    return _normalize_newlines(MARKER.sub("", text[region.start : region.end]))


def _write_region(text: str, name: _Name, inside: str) -> Skill:
    words = f"\n{inside}\n" if inside else "\n"
    block = f"<!-- {name.upper()}_START -->{words}<!-- {name.upper()}_END -->".replace(
        "\n", detect_newline(text)
    )
    region = _find_region(text, name)
    if region is None:
        place = _find_insertion_point(text, name)
        edited = text[:place] + format_paragraph(text, place, block) + text[place:]
    else:
        edited = text[: region.start] + block + text[region.end :]
    check_document(edited)
    return Skill(text=edited)


def _find_insertion_point(text: str, name: _Name) -> int:
    appendix = _find_region(text, "appendix")
    if name == "appendix" or appendix is None or text[appendix.end :].strip():
        return len(text)
    return appendix.start


def _normalize_newlines(text: str) -> str:
    return re.sub(r"\r\n?", "\n", text).strip()


def _flatten(text: str) -> str:
    return " ".join(text.split())
