"""Pairs, anchors, traces and tests as rows: reading and changing them within one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, JsonValue

from reflact.errors import DataError
from reflact.jsonutil import parse_stored
from reflact.memory.cards import (
    ACTIVE_STATUSES,
    check_status_change,
    describe_other_trace,
    extend_content_hash,
    hash_purpose,
)
from reflact.memory.models import (
    BatchTest,
    CardStatus,
    ContrastPair,
    Origin,
    ScoreEvent,
    StoredPair,
    StoredTrace,
    Submission,
)
from reflact.memory.scan import Scanner
from reflact.store.database import Tables
from reflact.types import canonical_json

Value = TypeVar("Value", bound=BaseModel)

# The most characters of a text by which a pair is found.
MAX_INDEXED_CHARS = 5_000


def encode_value(value: BaseModel, what: str = "a value") -> str:
    """Return a value as stored text: ASCII, since SQLite cannot store lone surrogates.

    DataError if a number has more digits than Python reads from JSON; names ``what`` the value is.
    """
    try:
        # pydantic's own JSON would replace lone surrogates in the field names of a state.
        return json.dumps(value.model_dump(), sort_keys=True, allow_nan=False, default=str)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise DataError(f"{what} cannot be stored: {reason}; write the number as a text") from None


def encode_pair(pair: ContrastPair) -> str:
    """Return a pair as stored text; DataError names its step."""
    source = pair.provenance
    return encode_value(pair, f"a pair made of step {source.step} of trace {source.trace_id}")


def decode_value(kind: type[Value], text: str, what: str) -> Value:
    """Return a stored value; StoreError if the text does not validate."""
    return parse_stored(lambda stored: kind.model_validate(json.loads(stored)), text, what)


def format_time(at: datetime) -> str:
    """Return a time as stored text: UTC with microseconds, so texts sort in the order of times."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def list_texts(pair: ContrastPair) -> tuple[str, ...]:
    """Return all texts of a pair and the names of its states' fields, which are scanned."""
    return tuple(dict.fromkeys(_iter_texts(pair.model_dump())))


def clean(text: str) -> str:
    """Return a text as the index of words takes it: without NUL and lone surrogates."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def _iter_texts(value: JsonValue) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _iter_texts(item)


# ------------------------------------------------------------------------------------------ origins

# Pairs or anchors that came from a trace.
FROM_TRACE = "id IN (SELECT owner FROM memory_origins WHERE trace_id = ?1)"


def add_origins(tables: Tables, owner: str, origins: Iterable[Origin]) -> None:
    """Write origins of a pair or an anchor that are not stored yet."""
    records = ({"owner": owner, **origin.model_dump()} for origin in origins)
    tables.table("memory_origins").insert_all(records, ignore=True)


def read_origins(tables: Tables, owners: Sequence[str]) -> Mapping[str, tuple[Origin, ...]]:
    """Return the origins of each pair or anchor, sorted by trace and step."""
    origins: dict[str, tuple[Origin, ...]] = dict.fromkeys(owners, ())
    sql = (
        "SELECT owner, trace_id, step FROM memory_origins "
        "WHERE owner IN (SELECT value FROM json_each(?)) ORDER BY trace_id, step"
    )
    for owner, trace_id, step in tables.execute(sql, (json.dumps(list(owners)),)):
        origins[owner] += (Origin(trace_id=trace_id, step=step),)
    return origins


# -------------------------------------------------------------------------------------------- pairs

ACTIVE = f"status IN {ACTIVE_STATUSES}"

# The weakest active pairs, which an index gives at once: those that failed a test first, then by
# the lowest measured utility, not promoted, and the longest time without a change.
WEAKEST_CONDITION = (
    f"{ACTIVE} ORDER BY failed_test DESC, utility, status = 'promoted', changed_at, number LIMIT ?"
)


def select_pairs(
    tables: Tables, where: str, parameters: Sequence[Any] = ()
) -> tuple[StoredPair, ...]:
    """Return the pairs that meet an SQL condition; it must be a constant of this package."""
    columns = "id, pair, status, reason, utility, changed_at"
    sql = f"SELECT {columns} FROM memory_pairs WHERE {where}"  # noqa: S608 - constant
    rows = list(tables.query(sql, parameters))
    origins = read_origins(tables, [row["id"] for row in rows])
    pairs = []
    for row in rows:
        pair_id = row.pop("id")
        pair = decode_value(ContrastPair, row.pop("pair"), f"pair {pair_id}")
        pairs.append(StoredPair(pair=pair, origins=origins[pair_id], **row))
    return tuple(pairs)


def read_pair(tables: Tables, pair_id: str) -> StoredPair:
    """Return a pair by its id; DataError if it is not stored."""
    for stored in select_pairs(tables, "id = ?", (pair_id,)):
        return stored
    raise DataError(f"the memory has no pair {pair_id}; list its pairs with `reflact memory list`")


class Admission(NamedTuple):
    """How new pairs enter: what scans them, the time, and the bound on active pairs."""

    scan: Scanner
    now: datetime
    max_active: int


def submit_pair(
    tables: Tables, pair: ContrastPair, origins: Sequence[Origin], admission: Admission
) -> Submission:
    """Scan and store a pair, and archive the weakest; of a stored one only add its origins."""
    encoded = encode_pair(pair)  # names a number that is too long, before the pair's id needs it
    exclusion = _find_exclusion(tables, pair, origins)
    if exclusion is not None:
        return Submission(is_new=False, status="rejected", reason=exclusion)
    pairs = tables.table("memory_pairs")
    is_new = not pairs.count_where("id = ?", [pair.id])
    if is_new:
        texts = list_texts(pair)
        finding = admission.scan(texts)
        is_rejected = finding is not None and finding.verdict == "reject"
        record = {
            "id": pair.id,
            "status": "rejected" if is_rejected else "quarantined",
            "reason": None if finding is None else finding.rule,
            "changed_at": format_time(admission.now),
            "subject": pair.hashes.subject,
            "pair": encoded,
            "words": clean("\n".join(text[:MAX_INDEXED_CHARS] for text in texts)),
        }
        pairs.insert(record)
        n_surplus = max(0, pairs.count_where(ACTIVE) - admission.max_active)
        for weak in select_pairs(tables, WEAKEST_CONDITION, (n_surplus,)):
            move_pair(tables, weak, "archived", "bound", now=admission.now)
    add_origins(tables, pair.id, origins)
    stored = read_pair(tables, pair.id)
    return Submission(is_new=is_new, status=stored.status, reason=stored.reason)


def _find_exclusion(tables: Tables, pair: ContrastPair, origins: Iterable[Origin]) -> str | None:
    """Return why calibration must not learn from a pair, see ``Submission``; or None."""
    anchors = tables.table("memory_anchors")
    if anchors.count_where("subject = ?", [pair.hashes.subject]):
        return "anchor"
    if any(anchors.count_where(FROM_TRACE, [origin.trace_id]) for origin in origins):
        return "anchor_trace"
    return None


def move_pair(
    tables: Tables,
    stored: StoredPair,
    after: CardStatus,
    reason: str | None = None,
    *,
    now: datetime,
) -> None:
    """Change the status of a pair, and clear the mark of a failed test."""
    check_status_change(stored, after)
    sql = (
        "UPDATE memory_pairs SET status = ?, reason = ?, failed_test = 0, changed_at = ? "
        "WHERE id = ?"
    )
    tables.execute(sql, (after, reason, format_time(now), stored.pair.id))


def add_anchor(tables: Tables, pair: ContrastPair, origins: Sequence[Origin]) -> bool:
    """Store an anchor that came from these steps, and return whether it is new."""
    anchors = tables.table("memory_anchors")
    is_new = not anchors.count_where("id = ?", [pair.id])
    if not is_new and set(origins) <= set(read_origins(tables, [pair.id])[pair.id]):
        return False
    for stored in select_pairs(tables, "subject = ? ORDER BY id LIMIT 1", (pair.hashes.subject,)):
        raise DataError(
            f"anchor {pair.id} has the transition of stored pair {stored.pair.id}; calibration "
            "never learns from anchors, so choose another one"
        )
    for origin in origins:
        for stored in select_pairs(tables, f"{FROM_TRACE} ORDER BY id LIMIT 1", (origin.trace_id,)):
            raise DataError(
                f"anchor {pair.id} was made of trace {origin.trace_id}, and so was stored pair "
                f"{stored.pair.id}; calibration never learns from traces of anchors, so choose "
                "another trace"
            )
    record = {"id": pair.id, "subject": pair.hashes.subject, "pair": encode_pair(pair)}
    anchors.insert(record, ignore=True)
    add_origins(tables, pair.id, origins)
    return is_new


def read_anchors(tables: Tables) -> tuple[ContrastPair, ...]:
    """Return the anchors in the order of their ids."""
    stored = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return tuple(decode_value(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in stored)


def read_tests(tables: Tables) -> tuple[BatchTest, ...]:
    """Return all tests in their order."""
    stored = tables.execute("SELECT number, test FROM memory_tests ORDER BY number").fetchall()
    return tuple(decode_value(BatchTest, test, f"test {number}") for number, test in stored)


# ------------------------------------------------------------------------------------------- traces


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
    stored = find_event(tables, trace_id, event.step)
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
        replace_event(tables, trace_id, event)
    return False


def _update_content_hash(tables: Tables, trace_id: str, event: ScoreEvent) -> None:
    """Let a trace's hash cover an event that was added."""
    later = "trace_id = ? AND step > ?"
    content = str(tables.table("traces").get(trace_id)["content_hash"])
    events = [event]
    if tables.table("trace_events").count_where(later, [trace_id, event.step]):
        # Steps came out of order, so the hash is computed from the first one on.
        content = hash_purpose(_read_purpose(tables, trace_id) or "")
        events = _read_events(tables, trace_id)
    for one in events:
        content = extend_content_hash(content, one.transition)
    tables.table("traces").update(trace_id, {"content_hash": content})


def find_trace(tables: Tables, trace_id: str) -> StoredTrace | None:
    """Return a trace with its events in the order of their steps, or None."""
    purpose = _read_purpose(tables, trace_id)
    if purpose is None:
        return None
    return StoredTrace(id=trace_id, purpose=purpose, events=tuple(_read_events(tables, trace_id)))


def find_event(tables: Tables, trace_id: str, step: int) -> ScoreEvent | None:
    """Return an event of a trace, or None."""
    sql = "SELECT event FROM trace_events WHERE trace_id = ? AND step = ?"
    stored = tables.execute(sql, (trace_id, step)).fetchone()
    return None if stored is None else _decode_event(trace_id, step, stored[0])


def replace_event(tables: Tables, trace_id: str, event: ScoreEvent) -> None:
    """Write an event over that of its step."""
    tables.table("trace_events").update((trace_id, event.step), {"event": encode_value(event)})


def _read_purpose(tables: Tables, trace_id: str) -> str | None:
    stored = tables.execute("SELECT purpose FROM traces WHERE id = ?", (trace_id,)).fetchone()
    return None if stored is None else json.loads(stored[0])


def _read_events(tables: Tables, trace_id: str) -> list[ScoreEvent]:
    sql = "SELECT step, event FROM trace_events WHERE trace_id = ? ORDER BY step"
    rows = tables.execute(sql, (trace_id,)).fetchall()
    return [_decode_event(trace_id, step, text) for step, text in rows]


def _decode_event(trace_id: str, step: int, text: str) -> ScoreEvent:
    return decode_value(ScoreEvent, text, f"step {step} of trace {trace_id}")
