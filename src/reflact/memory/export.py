"""Export and import of a memory as JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from reflact.errors import DataError
from reflact.jsonutil import describe_problems
from reflact.memory.models import ContrastPair, Origin, StoredTrace
from reflact.memory.rows import (
    ACTIVE,
    Admission,
    add_anchor,
    append_event,
    find_trace,
    open_trace,
    read_anchors,
    read_origins,
    select_pairs,
    submit_pair,
)
from reflact.store.database import Database, Tables
from reflact.types import FrozenModel


class ImportResult(FrozenModel):
    """The numbers of new entries; ``n_blocked`` new pairs need review or were rejected."""

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


class PairLine(FrozenModel):
    """A pair or an anchor, and the steps that it came from."""

    type: Literal["pair", "anchor"]
    pair: ContrastPair
    origins: tuple[Origin, ...]


ExportLine = HeaderLine | TraceLine | PairLine

LINE_ADAPTER: TypeAdapter[ExportLine] = TypeAdapter(
    Annotated[ExportLine, Field(discriminator="type")]
)


async def read_lines(database: Database) -> AsyncIterator[ExportLine]:
    """Yield the lines of an export."""
    yield HeaderLine()
    for (trace_id,) in await database.fetch_rows("SELECT id FROM traces ORDER BY id"):
        trace = await database.read(partial(find_trace, trace_id=trace_id))
        if trace is not None:
            yield TraceLine(trace=trace)
    for line in await database.read(_read_pair_lines):
        yield line


def _read_pair_lines(tables: Tables) -> list[PairLine]:
    anchors = read_anchors(tables)
    origins = read_origins(tables, [pair.id for pair in anchors])
    lines = [PairLine(type="anchor", pair=pair, origins=origins[pair.id]) for pair in anchors]
    active = select_pairs(tables, f"{ACTIVE} ORDER BY number")
    lines += [PairLine(type="pair", pair=stored.pair, origins=stored.origins) for stored in active]
    return lines


def parse_lines(lines: Iterable[str]) -> list[ExportLine]:
    """Return the lines of an export; DataError names a wrong line."""
    parsed: list[ExportLine] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        line = _parse_line(number, text)
        if isinstance(line, HeaderLine) != (not parsed):
            raise DataError(f"line {number}: the first line, and no other, must be the header")
        parsed.append(line)
    if not parsed:
        raise DataError("this is no exported memory: all lines are empty")
    return parsed


def _parse_line(number: int, text: str) -> ExportLine:
    try:
        return LINE_ADAPTER.validate_python(json.loads(text))
    except ValidationError as error:
        problem = describe_problems(error)
        advice = "import what `reflact memory export` of this version wrote"
    except (ValueError, RecursionError):
        problem = "it is not complete JSON"
        advice = "if the file was cut off, export it again"
    raise DataError(f"line {number} is not part of an exported memory: {problem}; {advice}")


def import_parsed(
    tables: Tables, lines: Iterable[ExportLine], admission: Admission
) -> ImportResult:
    """Store the lines of an export; each new pair is scanned."""
    counts: Counter[str] = Counter()
    for line in lines:
        match line:
            case TraceLine(trace=trace):
                counts["n_traces"] += open_trace(tables, trace.id, trace.purpose)
                for event in trace.events:
                    counts["n_events"] += append_event(tables, trace.id, event)
            case PairLine(type="anchor"):
                counts["n_anchors"] += add_anchor(tables, line.pair, line.origins)
            case PairLine(pair=pair, origins=origins):
                submission = submit_pair(tables, pair, origins, admission)
                counts["n_pairs"] += submission.is_new
                is_blocked = submission.is_new and submission.reason not in {None, "bound"}
                counts["n_blocked"] += is_blocked
            case HeaderLine():
                pass
    return ImportResult(**counts)
