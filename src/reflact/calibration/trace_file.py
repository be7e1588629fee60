"""The file of a trace: a header, a line for each event, and a last line once the trace is finished.

A file that ends in the middle of a line, or is damaged somewhere, is read up to there. A line that is whole
and says something wrong was written so. It is an error that names it: what follows would be lost unseen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from pydantic import ValidationError

from reflact.calibration.given import describe_first_error, require_trace_id
from reflact.errors import DataError, StoreError
from reflact.memory import ScoreEvent
from reflact.types import FrozenModel


class TraceHeader(FrozenModel):
    """The first line."""

    trace: str
    purpose: str
    version: Literal[1] = 1


class TraceEnd(FrozenModel):
    """The last line of a finished trace: how many events stand above it."""

    events: int


L = TypeVar("L", TraceHeader, ScoreEvent, TraceEnd)


class TraceFileContent(NamedTuple):
    """What a file holds up to where it is whole; the bytes that this takes, and those that follow.

    ``open`` says that the last whole line lacks its line break.
    """

    header: TraceHeader
    events: tuple[ScoreEvent, ...]
    finished: bool = True
    n_bytes: int = 0
    n_lost_bytes: int = 0
    is_open: bool = False


def read_trace_file(path: Path) -> TraceFileContent:
    """Read a trace's file up to where it is whole.

    Raises:
        DataError: Not even the header is whole, it has no purpose, or a line that is whole says something
            wrong; names file, line and field.
        StoreError: The file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    lines = content.splitlines(keepends=True)
    header = _read_header(path, lines)
    events: list[ScoreEvent] = []
    ends: list[TraceEnd] = []
    for number, line in enumerate(lines[1:], 2):
        place = f"{path}, line {number}"
        try:
            value = _parse_json(line, place)
        except _TornLine:
            break
        if ends:
            raise DataError(f"{place}, follows the end of the trace; a file holds one trace, so take it out")
        if isinstance(value, dict) and "events" in value:
            ends.append(_parse_line(value, TraceEnd, place))
        else:
            events.append(_parse_event(value, place, step=len(events)))
    finished = ends == [TraceEnd(events=len(events))]
    length = sum(map(len, lines[: 1 + len(events) + finished]))
    unbroken = not content[:length].endswith(b"\n")
    return TraceFileContent(header, tuple(events), finished, length, len(content) - length, unbroken)


def _read_header(path: Path, lines: Sequence[bytes]) -> TraceHeader:
    try:
        value = _parse_json(lines[0] if lines else b"", f"{path}, line 1")
    except _TornLine:
        raise DataError(
            f"{path} holds no trace: its first line is not a whole header; a trace is a file that "
            "Trace(path=...) wrote"
        ) from None
    header = _parse_line(value, TraceHeader, f"{path} holds no trace: line 1")
    require_trace_id(header.trace, subject=f"{path}, line 1, `trace`: the id of a trace")
    if not header.purpose.strip():
        raise DataError(
            f"{path}: the trace has no purpose; write into `purpose` of its first line what the agent was to "
            "achieve"
        )
    return header


def _parse_event(value: object, location: str, *, step: int) -> ScoreEvent:
    if isinstance(value, dict) and "purpose" in value:
        raise DataError(f"{location}, begins another trace; give each trace a file of its own")
    event = _parse_line(value, ScoreEvent, location)
    if event.step != step:
        raise DataError(
            f"{location}, `step`: it is {event.step}, and the next step is {step}; steps are numbered from 0, "
            "so a line before it is missing or stands twice"
        )
    return event


class _TornLine(Exception):
    """A line that is not whole; never leaves this module."""


def _parse_json(line: bytes, location: str) -> object:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise _TornLine from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}, cannot be read: {error}; take such values out of the states") from None


def _parse_line(value: object, line_type: type[L], location: str) -> L:
    try:
        return line_type.model_validate(value)
    except ValidationError as error:
        raise DataError(f"{location}, {describe_first_error(error)}; mend that line") from None
