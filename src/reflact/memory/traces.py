"""Traces and their steps: reading and changing them within one transaction."""

from __future__ import annotations

import json

from reflact.errors import DataError
from reflact.memory.cards import describe_other_trace, extend_content_hash, hash_purpose
from reflact.memory.models import Label, ScoreEvent, StoredTrace, TestableTrace, TraceSummary
from reflact.memory.pairs import decode_value, encode_value
from reflact.store.database import Tables
from reflact.types import canonical_json


def open_trace(tables: Tables, trace_id: str, purpose: str) -> bool:
    """Add a trace and return whether it is new; see ``MemoryStore.open_trace``."""
    stored_purpose = _read_purpose(tables, trace_id)
    if stored_purpose is None:
        record = {
            "id": trace_id,
            "purpose": canonical_json(purpose),
            "content_hash": hash_purpose(purpose),
        }
        tables.table("traces").insert(record)
    elif stored_purpose != purpose:
        raise DataError(describe_other_trace(trace_id, purpose, stored_purpose))
    return stored_purpose is None


def append_event(tables: Tables, trace_id: str, event: ScoreEvent) -> bool:
    """Append an event and return whether it is new; see ``MemoryStore.append``."""
    if _read_purpose(tables, trace_id) is None:
        raise DataError(f"trace {trace_id} is not stored; open it before you append events")
    stored = _find_event(tables, trace_id, event.step)
    if stored is None:
        text = encode_value(event, f"step {event.step} of trace {trace_id}")
        record = {"trace_id": trace_id, "step": event.step, "event": text}
        tables.table("trace_events").insert(record)
        _update_content_hash(tables, trace_id, event)
        return True
    unlabelled = {encode_value(one.model_copy(update={"label": None})) for one in (stored, event)}
    if len(unlabelled) > 1:
        raise DataError(
            f"trace {trace_id} already has another event as step {event.step}; give each trace a "
            "unique id"
        )
    if stored.label is None and event.label is not None:
        _replace_event(tables, trace_id, event)
    return False


def label_step(tables: Tables, trace_id: str, step: int, label: Label, *, replace: bool) -> None:
    """Label a stored step; see ``MemoryStore.label``."""
    event = _find_event(tables, trace_id, step)
    if event is None:
        raise DataError(f"trace {trace_id} has no step {step} to label; steps are numbered from 0")
    if event.label is not None and event.label.source != "agreement" and not replace:
        raise DataError(
            f"step {step} of trace {trace_id} already has a label from a {event.label.source} with "
            f"progress after {event.label.progress_after:g}; replace it explicitly if it is wrong"
        )
    _replace_event(tables, trace_id, event.model_copy(update={"label": label}))


def _replace_event(tables: Tables, trace_id: str, event: ScoreEvent) -> None:
    tables.table("trace_events").update((trace_id, event.step), {"event": encode_value(event)})


def find_trace(tables: Tables, trace_id: str) -> StoredTrace | None:
    """Return a trace with its events in the order of their steps, or None."""
    purpose = _read_purpose(tables, trace_id)
    if purpose is None:
        return None
    return StoredTrace(id=trace_id, purpose=purpose, events=_read_events(tables, trace_id))


def _read_purpose(tables: Tables, trace_id: str) -> str | None:
    stored = tables.execute("SELECT purpose FROM traces WHERE id = ?", (trace_id,)).fetchone()
    return None if stored is None else json.loads(stored[0])


def _read_events(tables: Tables, trace_id: str) -> tuple[ScoreEvent, ...]:
    sql = "SELECT step, event FROM trace_events WHERE trace_id = ? ORDER BY step"
    return tuple(
        _decode_event(trace_id, *row) for row in tables.execute(sql, (trace_id,)).fetchall()
    )


def _find_event(tables: Tables, trace_id: str, step: int) -> ScoreEvent | None:
    sql = "SELECT event FROM trace_events WHERE trace_id = ? AND step = ?"
    stored = tables.execute(sql, (trace_id, step)).fetchone()
    return None if stored is None else _decode_event(trace_id, step, stored[0])


def _decode_event(trace_id: str, step: int, text: str) -> ScoreEvent:
    return decode_value(ScoreEvent, text, f"step {step} of trace {trace_id}")


def _update_content_hash(tables: Tables, trace_id: str, event: ScoreEvent) -> None:
    """Let a trace's hash cover an event that was added."""
    later = "trace_id = ? AND step > ?"
    if tables.table("trace_events").count_where(later, [trace_id, event.step]):
        # Steps came out of order, so the hash is computed from the first one on.
        content = hash_purpose(_read_purpose(tables, trace_id) or "")
        for one in _read_events(tables, trace_id):
            content = extend_content_hash(content, one.transition)
    else:
        content = extend_content_hash(
            tables.table("traces").get(trace_id)["content_hash"], event.transition
        )
    tables.table("traces").update(trace_id, {"content_hash": content})


# ---------------------------------------------------------------------------------------- overviews

PAIRS_OF_TRACES = """
SELECT 1 FROM memory_origins JOIN memory_pairs ON memory_pairs.id = owner
JOIN traces AS copy ON copy.id = memory_origins.trace_id
WHERE copy.content_hash = traces.content_hash
"""

# Whether a program or a person labelled an event.
IS_LABELLED = "json_extract(event, '$.label.source') IN ('program', 'human')"

TESTABLE_QUERY = f"""
SELECT rowid, id, purpose, content_hash, EXISTS ({PAIRS_OF_TRACES}) FROM traces
WHERE EXISTS (SELECT 1 FROM trace_events WHERE trace_id = traces.id AND {IS_LABELLED})
AND (?1 IS NULL OR rowid < ?1) ORDER BY rowid DESC LIMIT ?2
"""  # noqa: S608 - constant

SUMMARIES_QUERY = f"""
SELECT traces.id, purpose,
    (
        SELECT count(DISTINCT owner)
        FROM memory_origins JOIN memory_pairs ON memory_pairs.id = owner
        WHERE memory_origins.trace_id = traces.id
    ) AS n_pairs,
    count(step) AS n_events,
    coalesce(sum(json_type(event, '$.evaluation') = 'object'), 0) AS n_scored,
    coalesce(sum({IS_LABELLED}), 0) AS n_labelled
FROM traces LEFT JOIN trace_events ON trace_events.trace_id = traces.id
GROUP BY traces.id ORDER BY traces.id
"""  # noqa: S608 - constant


def list_testable_traces(
    tables: Tables, before: int | None, limit: int
) -> tuple[TestableTrace, ...]:
    """Return traces that a program or a person labelled, newest first; see ``MemoryStore``."""
    rows = tables.execute(TESTABLE_QUERY, (before, limit)).fetchall()
    return tuple(
        TestableTrace(number, trace_id, json.loads(purpose), content_hash, bool(has_pairs))
        for number, trace_id, purpose, content_hash, has_pairs in rows
    )


def list_summaries(tables: Tables) -> tuple[TraceSummary, ...]:
    """Return the counts of each trace, in the order of their ids."""
    rows = tables.query(SUMMARIES_QUERY)
    return tuple(TraceSummary(**{**row, "purpose": json.loads(row["purpose"])}) for row in rows)
