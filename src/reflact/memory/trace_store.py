"""The store of traces and of calibrations."""

from __future__ import annotations

import json
from collections.abc import Mapping

from reflact.errors import DataError
from reflact.memory.cards import describe_other_trace, extend_content_hash, hash_purpose
from reflact.memory.models import (
    Label,
    ScoreEvent,
    StoredCalibration,
    StoredTrace,
    TestableTrace,
    TraceSummary,
)
from reflact.memory.rows import decode_value, encode_value
from reflact.store.database import Database, Tables
from reflact.types import canonical_json

SUMMARIES_QUERY = """
SELECT traces.id, purpose,
    (
        SELECT count(DISTINCT owner) FROM memory_origins JOIN memory_pairs ON memory_pairs.id = owner
        WHERE memory_origins.trace_id = traces.id AND pair IS NOT NULL
    ),
    count(step),
    coalesce(sum(json_type(event, '$.evaluation') = 'object'), 0),
    coalesce(sum(json_extract(event, '$.label.source') <> 'agreement'), 0)
FROM traces LEFT JOIN trace_events ON trace_events.trace_id = traces.id GROUP BY traces.id ORDER BY traces.id
"""


TESTABLE_QUERY = """
SELECT rowid, id, purpose, content_hash, EXISTS (
    SELECT 1 FROM traces AS copy
    JOIN memory_origins ON memory_origins.trace_id = copy.id
    JOIN memory_pairs ON memory_pairs.id = owner
    WHERE copy.content_hash = traces.content_hash AND pair IS NOT NULL
)
FROM traces WHERE n_labelled > 0 AND (?1 IS NULL OR rowid < ?1) ORDER BY rowid DESC LIMIT ?2
"""
"""Traces with labelled steps."""


MATCHING_IDS_QUERY = """
SELECT id FROM (
    SELECT id FROM traces
    UNION SELECT trace_id FROM memory_origins
) WHERE substr(id, 1, length(?1)) = ?1 ORDER BY id <> ?1, id LIMIT 10
"""


class SQLiteTraceStore:
    """Stores traces step by step, and the starts and results of calibrations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        """Add a trace, unless it is stored with the same purpose.

        Raises:
            DataError: It is stored with another purpose.
        """
        await self._database.write(lambda tables: open_trace(tables, trace_id, purpose))

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        """Append an event and return whether it is new; it is on disk when this returns.

        If the stored event has no label, the label of this one is added. A stored label stays.

        Raises:
            DataError: The trace is unknown, or another event has the same step.
        """
        return await self._database.write(lambda tables: append_event(tables, trace_id, event))

    async def label(self, trace_id: str, step: int, label: Label, *, replace: bool = True) -> None:
        """Label a stored step.

        Raises:
            DataError: The trace has no such step, or without ``replace`` it has a label that is not by agreement.
        """

        def change(tables: Tables) -> None:
            event = _find_event(tables, trace_id, step)
            if event is None:
                raise DataError(f"trace {trace_id} has no step {step} to label; steps are numbered from 0")
            known = event.label
            if known is not None and known.source != "agreement" and not replace:
                raise DataError(
                    f"step {step} of trace {trace_id} already has a label from a {known.source} with progress after "
                    f"{known.progress_after:g}; replace it explicitly if it is wrong"
                )
            _replace_event(tables, trace_id, event, event.model_copy(update={"label": label}))

        await self._database.write(change)

    async def trace(self, trace_id: str) -> StoredTrace | None:
        """Return a trace with its events in the order of their steps, or None."""
        return await self._database.read(lambda tables: find_trace(tables, trace_id))

    async def trace_ids(self) -> tuple[str, ...]:
        """Return the ids of all traces, sorted."""
        return tuple(
            trace for (trace,) in await self._database.fetch_rows("SELECT id FROM traces ORDER BY id")
        )

    async def content_hashes(self) -> Mapping[str, str]:
        """Return the hash of each trace's content, by its id."""
        return dict(await self._database.fetch_rows("SELECT id, content_hash FROM traces"))

    async def testable_traces(self, *, before: int | None, limit: int) -> tuple[TestableTrace, ...]:
        """Return traces with steps that a program or a person labelled, newest first.

        Args:
            before: Only traces with a smaller number; None: from the newest on.
            limit: The largest number of traces.
        """
        rows = await self._database.fetch_rows(TESTABLE_QUERY, (before, limit))
        return tuple(
            TestableTrace(number, trace, json.loads(purpose), content, bool(has_pairs))
            for number, trace, purpose, content, has_pairs in rows
        )

    async def purposes(self, *, limit: int) -> frozenset[str]:
        """Return the distinct purposes of all traces, at most ``limit``."""
        found = await self._database.fetch_rows("SELECT DISTINCT purpose FROM traces LIMIT ?", (limit,))
        return frozenset(json.loads(purpose) for (purpose,) in found)

    async def summaries(self) -> tuple[TraceSummary, ...]:
        """Return the counts of each trace, in the order of their ids."""
        names = ("n_pairs", "n_events", "n_scored", "n_labelled")
        return tuple(
            TraceSummary(id=trace, purpose=json.loads(purpose), **dict(zip(names, counts, strict=True)))
            for trace, purpose, *counts in await self._database.fetch_rows(SUMMARIES_QUERY)
        )

    async def find_trace_ids(self, name: str) -> tuple[str, ...]:
        """Return up to ten ids of traces, stored or named by pairs, that start with a text; an equal one first."""
        return tuple(trace for (trace,) in await self._database.fetch_rows(MATCHING_IDS_QUERY, (name,)))

    # -------------------------------------------------------------------------------------- calibrations

    async def start_calibration(self, identity: str, baseline: str) -> StoredCalibration:
        """Store the start of a calibration; it is on disk when this returns."""

        def insert(tables: Tables) -> StoredCalibration:
            sql = "INSERT INTO calibrations (identity, baseline) VALUES (?, ?)"
            number = tables.execute(sql, (identity, baseline)).lastrowid
            return StoredCalibration(number=int(number or 0), baseline=baseline)

        return await self._database.write(insert)

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        """Return the latest calibration of an identity, or None."""
        sql = (
            "SELECT number, baseline, result FROM calibrations WHERE identity = ? "
            "ORDER BY number DESC LIMIT 1"
        )
        for number, baseline, result in await self._database.fetch_rows(sql, (identity,)):
            return StoredCalibration(number=number, baseline=baseline, result=result)
        return None

    async def finish_calibration(self, number: int, result: str) -> None:
        """Store the result of a calibration; a result that is stored already stays."""
        sql = "UPDATE calibrations SET result = ? WHERE number = ? AND result IS NULL"
        await self._database.execute(sql, (result, number))


def open_trace(tables: Tables, trace_id: str, purpose: str) -> None:
    """Add a trace; see ``SQLiteTraceStore.open_trace``."""
    known = tables.execute("SELECT purpose FROM traces WHERE id = ?", (trace_id,)).fetchone()
    if known is None:
        tables.table("traces").insert(
            {"id": trace_id, "purpose": canonical_json(purpose), "content_hash": hash_purpose(purpose)}
        )
    elif known[0] != canonical_json(purpose):
        raise DataError(describe_other_trace(trace_id, purpose, json.loads(known[0])))


def append_event(tables: Tables, trace_id: str, event: ScoreEvent) -> bool:
    """Append an event; see ``SQLiteTraceStore.append``."""
    trace = tables.execute("SELECT purpose, content_hash FROM traces WHERE id = ?", (trace_id,)).fetchone()
    if trace is None:
        raise DataError(f"trace {trace_id} is not stored; open it before you append events")
    known = _find_event(tables, trace_id, event.step)
    if known is None:
        text = encode_value(event, f"step {event.step} of trace {trace_id}")
        tables.execute(
            "INSERT INTO trace_events (trace_id, step, event) VALUES (?, ?, ?)", (trace_id, event.step, text)
        )
        later = "SELECT 1 FROM trace_events WHERE trace_id = ? AND step > ? LIMIT 1"
        content: str = trace[1]
        new_steps: tuple[ScoreEvent, ...] = (event,)
        if tables.execute(later, (trace_id, event.step)).fetchone():
            content, new_steps = hash_purpose(json.loads(trace[0])), _read_events(tables, trace_id)
        for step in new_steps:
            content = extend_content_hash(content, step.transition)
        tables.execute(
            "UPDATE traces SET content_hash = ?, n_labelled = n_labelled + ? WHERE id = ?",
            (content, _is_labelled(event), trace_id),
        )
        return True
    one, other = (encode_value(step.model_copy(update={"label": None})) for step in (known, event))
    if one != other:
        raise DataError(
            f"trace {trace_id} already has another event as step {event.step}; give each trace a unique id"
        )
    if known.label is None and event.label is not None:
        _replace_event(tables, trace_id, known, event)
    return False


def _is_labelled(event: ScoreEvent) -> bool:
    """Whether a program or a person labelled the event."""
    return event.label is not None and event.label.source != "agreement"


def _replace_event(tables: Tables, trace_id: str, old: ScoreEvent, event: ScoreEvent) -> None:
    tables.execute(
        "UPDATE traces SET n_labelled = n_labelled + ? WHERE id = ?",
        (_is_labelled(event) - _is_labelled(old), trace_id),
    )
    tables.table("trace_events").update((trace_id, event.step), {"event": encode_value(event)})


def find_trace(tables: Tables, trace_id: str) -> StoredTrace | None:
    """Return a trace with its events in the order of their steps, or None."""
    stored = tables.execute("SELECT purpose FROM traces WHERE id = ?", (trace_id,)).fetchone()
    if stored is None:
        return None
    return StoredTrace(id=trace_id, purpose=json.loads(stored[0]), events=_read_events(tables, trace_id))


def _read_events(tables: Tables, trace_id: str) -> tuple[ScoreEvent, ...]:
    sql = "SELECT step, event FROM trace_events WHERE trace_id = ? ORDER BY step"
    return tuple(_decode_event(trace_id, *row) for row in tables.execute(sql, (trace_id,)).fetchall())


def _find_event(tables: Tables, trace_id: str, step: int) -> ScoreEvent | None:
    sql = "SELECT event FROM trace_events WHERE trace_id = ? AND step = ?"
    stored = tables.execute(sql, (trace_id, step)).fetchone()
    return None if stored is None else _decode_event(trace_id, step, stored[0])


def _decode_event(trace_id: str, step: int, text: str) -> ScoreEvent:
    return decode_value(ScoreEvent, text, f"step {step} of trace {trace_id}")
