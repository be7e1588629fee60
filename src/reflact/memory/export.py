"""Export and import of a memory as JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from reflact.errors import DataError
from reflact.memory import lifecycle, rows
from reflact.memory import trace_store as traces
from reflact.memory.cards import ACTIVE_STATUSES, ScanFinding, Scanner
from reflact.memory.models import ContrastPair, Origin, StoredTrace
from reflact.memory.rows import list_pair_texts
from reflact.store.database import Database, Tables
from reflact.types import FrozenModel

PAGE_SIZE = 200
"""Pairs that an export reads at a time."""


class ImportResult(FrozenModel):
    """The numbers of new entries; ``n_blocked`` counts new pairs that need review or were rejected."""

    n_traces: int = 0
    n_events: int = 0
    n_anchors: int = 0
    n_pairs: int = 0
    n_blocked: int = 0


class HeaderLine(FrozenModel):
    """The first line of an export."""

    type: Literal["reflact_memory"] = "reflact_memory"
    version: Literal[1] = 1


class TraceLine(FrozenModel):
    """A trace with its events."""

    type: Literal["trace"] = "trace"
    trace: StoredTrace


class AnchorLine(FrozenModel):
    """An anchor."""

    type: Literal["anchor"] = "anchor"
    pair: ContrastPair
    origins: tuple[Origin, ...]


class PairLine(FrozenModel):
    """A pair, and the steps that it came from."""

    type: Literal["pair"] = "pair"
    id: str
    pair: ContrastPair
    origins: tuple[Origin, ...]


ExportLine = HeaderLine | TraceLine | AnchorLine | PairLine
ScannedLine = tuple[ExportLine, ScanFinding | None]

LINE_ADAPTER: TypeAdapter[ExportLine] = TypeAdapter(Annotated[ExportLine, Field(discriminator="type")])


async def read_lines(database: Database) -> AsyncIterator[ExportLine]:
    """Yield the lines of an export."""
    yield HeaderLine()
    for (trace_id,) in await database.fetch_rows("SELECT id FROM traces ORDER BY id"):
        trace = await database.read(partial(traces.find_trace, trace_id=trace_id))
        if trace is not None:
            yield TraceLine(trace=trace)
    for anchor in await database.read(_read_anchor_lines):
        yield anchor
    sql = f"SELECT id FROM memory_pairs WHERE status IN {ACTIVE_STATUSES} ORDER BY number"  # noqa: S608 - constant
    ids = [pair_id for (pair_id,) in await database.fetch_rows(sql)]
    for start in range(0, len(ids), PAGE_SIZE):
        for line in await database.read(partial(_read_pair_lines, ids=ids[start : start + PAGE_SIZE])):
            yield line


def _read_anchor_lines(tables: Tables) -> list[AnchorLine]:
    pairs = rows.read_anchors(tables)
    origins = rows.read_origins(tables, [pair.id for pair in pairs])
    return [AnchorLine(pair=pair, origins=origins[pair.id]) for pair in pairs]


def _read_pair_lines(tables: Tables, ids: list[str]) -> list[PairLine]:
    origins = rows.read_origins(tables, ids)
    return [
        PairLine(id=row.id, pair=row.parse_pair(), origins=origins[row.id])
        for pair_id in ids
        for row in rows.select_rows(tables, "id = ?", (pair_id,))
    ]


def import_parsed(
    tables: Tables, lines: Sequence[ScannedLine], *, max_active: int, now: datetime
) -> ImportResult:
    """Store the scanned lines of an export."""
    counts: Counter[str] = Counter()
    for line, finding in lines:
        match line:
            case TraceLine(trace=trace):
                counts["n_traces"] += traces.find_trace(tables, trace.id) is None
                traces.open_trace(tables, trace.id, trace.purpose)
                counts["n_events"] += sum(
                    traces.append_event(tables, trace.id, event) for event in trace.events
                )
            case AnchorLine():
                counts["n_anchors"] += rows.add_anchor(tables, line.pair, line.origins)
            case PairLine():
                submission = lifecycle.submit_pair(
                    tables,
                    line.pair,
                    finding,
                    line.origins,
                    created_by="",
                    max_active=max_active,
                    now=now,
                )
                counts["n_pairs"] += submission.is_new
                counts["n_blocked"] += submission.is_new and finding is not None
            case HeaderLine():
                pass
    return ImportResult(**counts)


def parse_and_scan(lines: Iterable[str], scan: Scanner) -> list[ScannedLine]:
    """Return the lines of an export, each pair with the finding of its scan; DataError names a wrong line."""
    parsed: list[ScannedLine] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = LINE_ADAPTER.validate_python(json.loads(text))
        except ValidationError as error:
            raise DataError(
                f"line {number} is not part of an exported memory: {_describe_line_error(error)}"
            ) from None
        except (ValueError, RecursionError):
            reason = "it is not complete JSON; if the file was cut off, export it again"
            raise DataError(f"line {number} is not part of an exported memory: {reason}") from None
        if isinstance(line, HeaderLine) != (not parsed):
            raise DataError(f"line {number}: the first line, and no other, must be the header")
        if isinstance(line, PairLine) and line.id != line.pair.id:
            raise DataError(f"line {number}: pair {line.id} does not match its id; export it again")
        parsed.append((line, scan(list_pair_texts(line.pair)) if isinstance(line, PairLine) else None))
    if not parsed:
        raise DataError("this is no exported memory: all lines are empty")
    return parsed


def _describe_line_error(error: ValidationError) -> str:
    """Return the first problem of a line, and what to do about it."""
    first = error.errors()[0]
    location = first["loc"]
    if location == ("reflact_memory", "version"):
        return f"its version is {first['input']!r}, which this reflact does not know; upgrade reflact"
    if not location:
        return (
            "its `type` is missing or unknown; `reflact memory export` writes files that can be imported, and "
            "files of traces belong to a calibration's `traces`"
        )
    return (
        f"`{'.'.join(map(str, location[1:]))}`: {first['msg'][:1].lower()}{first['msg'][1:]}; export it again"
    )
