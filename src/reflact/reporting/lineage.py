"""How the versions of a skill follow from one another, and which commit brought each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from reflact.records import EpochRecord, SkillVersion, StepRecord
from reflact.skills.document import normalize_line
from reflact.types import Edit, FrozenModel


class VersionOrigin(FrozenModel):
    """A version, the number of the one that it was made from, and the commit that made it.

    The initial version has neither.
    """

    version: SkillVersion
    parent: int | None = None
    record: StepRecord | EpochRecord | None = None


class LineOrigin(FrozenModel):
    """The version that brought a line, and the edit of its step; None if no single edit did."""

    version: int
    edit: Edit | None = None


class LineBlock(FrozenModel):
    """Lines of a document with one origin, one after the other; line breaks are kept."""

    origin: LineOrigin
    text: str


def sort_commits(
    steps: Sequence[StepRecord], epochs: Sequence[EpochRecord]
) -> list[StepRecord | EpochRecord]:
    """Return commits in their order; the end of an epoch follows its last step."""
    commits: list[StepRecord | EpochRecord] = [*steps, *epochs]
    return sorted(commits, key=lambda commit: (commit.step, isinstance(commit, EpochRecord)))


def trace_versions(
    versions: Sequence[SkillVersion], commits: Sequence[StepRecord | EpochRecord]
) -> tuple[VersionOrigin, ...]:
    """Return the origin of each version, by number; a parent comes before its children."""
    numbers = {version.skill_hash: version.number for version in versions}
    origins: dict[int, tuple[int, StepRecord | EpochRecord]] = {}
    current = 0
    for commit in commits:
        verdict = commit.verdict
        parent = current
        if verdict is not None and verdict.action == "return" and verdict.ranked is not None:
            parent = numbers.get(verdict.ranked.chosen, current)
        for version in commit.created_versions:
            origins.setdefault(version.number, (parent, commit))
            parent = version.number
        current = commit.current.number
    traced = []
    for version in sorted(versions, key=lambda version: version.number):
        before, record = origins.get(version.number, (None, None))
        traced.append(VersionOrigin(version=version, parent=before, record=record))
    return tuple(traced)


def blame_lines(
    origins: Sequence[VersionOrigin], texts: Mapping[int, str]
) -> Mapping[int, tuple[LineOrigin, ...]]:
    """Return the origin of each line of each version, by number.

    A line that a version shares with its parent, in the same order, keeps its origin; any other
    line comes from the version itself. ``texts`` are the documents by number.
    """
    blamed: dict[int, tuple[LineOrigin, ...]] = {}
    for origin in origins:
        number = origin.version.number
        lines = texts[number].splitlines()
        found = [_find_origin(origin, line) for line in lines]
        if origin.parent is not None:
            before = texts[origin.parent].splitlines()
            kept = SequenceMatcher(None, before, lines, autojunk=False).get_matching_blocks()
            for start, place, size in kept:
                found[place : place + size] = blamed[origin.parent][start : start + size]
        blamed[number] = tuple(found)
    return blamed


def _find_origin(origin: VersionOrigin, line: str) -> LineOrigin:
    """Return the origin of a line that a version added: the first edit that holds it, or the only
    one.
    """
    number = origin.version.number
    if not isinstance(origin.record, StepRecord):
        return LineOrigin(version=number)
    applied = [result.edit for result in origin.record.edits if result.status == "applied"]
    form = normalize_line(line)
    for edit in applied:
        if len(applied) == 1 or form in map(normalize_line, edit.content.splitlines()):
            return LineOrigin(version=number, edit=edit)
    return LineOrigin(version=number)


def group_lines(text: str, origins: Sequence[LineOrigin]) -> list[LineBlock]:
    """Return a document in blocks of one origin; an empty line stays with the line before it."""
    pairs: list[tuple[LineOrigin, str]] = []
    for origin, line in zip(origins, text.splitlines(keepends=True), strict=True):
        is_empty = bool(pairs) and not line.strip()
        pairs.append((pairs[-1][0] if is_empty else origin, line))
    return [
        LineBlock(origin=origin, text="".join(line for _, line in block))
        for origin, block in groupby(pairs, key=lambda pair: pair[0])
    ]
