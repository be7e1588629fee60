"""The protected tail of a skill document: slow guidance, and the appendix of execution notes.

Writing changes nothing outside the region; a missing region is added as a separate paragraph. Line breaks are
read as LF and written as the document's own kind. Equal content leaves the document as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from reflact.skills.document import (
    MARKER,
    Region,
    RegionName,
    check_document,
    detect_newline,
    find_regions,
    format_paragraph,
)
from reflact.types import Skill

NOTES_HEADING = "## Execution Notes Appendix"


def read_guidance(text: str) -> str:
    """Return the slow guidance of a document; empty if its region is empty or missing."""
    region = _find_region(text, "slow_update")
    return "" if region is None else _read_region(text, region)


def replace_guidance(skill: Skill, new: str) -> Skill:
    """Return the document with its guidance replaced; empty guidance leaves an empty region.

    A new region is added at the end of the document, or before an appendix at the end. White space around the
    guidance is stripped.

    Raises:
        SkillError: The document is malformed.
        ValueError: The guidance contains a marker.
    """
    check_document(skill.text)
    check_region_text(new)
    guidance = _normalize_newlines(new)
    if _find_region(skill.text, "slow_update") is not None and read_guidance(skill.text) == guidance:
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
    """Return the document with its execution notes replaced.

    The region has a heading and one ``- `` bullet for each note. Each note is written on one line; empty notes
    are left out. A new region is added at the end of the document. Without notes, no region is added and an
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
    """Return the notes and then the reminders, in order, without duplicates and each on one line.

    Notes that differ only in case or white space are duplicates; the first one stays.
    """
    first: dict[str, str] = {}
    for note in (*notes, *reminders):
        if flat := _flatten(note):
            first.setdefault(flat.casefold(), flat)
    return tuple(first.values())


def check_region_text(text: str) -> None:
    """Check that guidance or a note can be written into the tail.

    Raises:
        ValueError: It contains the marker of a protected region, or would if written on one line.
    """
    marker = MARKER.search(_flatten(text))
    if marker is not None:
        raise ValueError(f"the text holds {marker[0]}, which marks a protected region; leave it out")


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
    appendix = _find_region(text, "appendix")
    if name == "appendix" or appendix is None or text[appendix.end :].strip():
        return len(text)
    return appendix.start


def _normalize_newlines(text: str) -> str:
    return re.sub(r"\r\n?", "\n", text).strip()


def _flatten(text: str) -> str:
    return " ".join(text.split())
