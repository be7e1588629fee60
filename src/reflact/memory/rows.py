"""Rows of pairs, their origins, histories and anchors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, JsonValue
from pydantic_core import to_jsonable_python

from reflact.errors import DataError
from reflact.jsonutil import iter_json_chunks, parse_stored
from reflact.memory.cards import iter_texts
from reflact.memory.models import (
    Action,
    CardStatus,
    ContrastPair,
    Evaluation,
    Origin,
    Provenance,
    Scope,
    StatusChange,
    StoredPair,
    Transition,
)
from reflact.store.database import Tables

Value = TypeVar("Value", bound=BaseModel)

MIN_WORD_CHARS = 3
"""The index holds all parts of three characters, so shorter words find nothing."""


def format_time(at: datetime) -> str:
    """Return a time as stored text: UTC with microseconds, so texts sort in the order of times."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def encode_value(value: BaseModel, what: str = "a value") -> str:
    """Return a value as stored text; lone surrogates are escaped, since SQLite cannot store them.

    DataError if a number has more digits than Python reads from JSON; names ``what`` the value is.
    """
    try:
        return "".join(iter_json_chunks(to_json(value)))
    except ValueError as error:
        raise _build_number_error(what, error) from None


def require_pair_id(pair: ContrastPair) -> str:
    """Return a pair's id; DataError if a number has more digits than Python reads from JSON."""
    try:
        return pair.id
    except ValueError as error:
        origin = pair.provenance
        raise _build_number_error(
            f"a pair made of step {origin.step} of trace {origin.trace_id}", error
        ) from None


def _build_number_error(subject: str, error: ValueError) -> DataError:
    reason = str(error).partition(";")[0]
    return DataError(f"{subject} cannot be stored: {reason}; write the number as a text")


def to_json(value: Any) -> JsonValue:
    """Return a value as JSON that shares its states.

    pydantic would visit each value of a state, and would replace lone surrogates in field names.
    """
    if isinstance(value, Transition):
        return value.json_object
    if isinstance(value, BaseModel):
        return {name: to_json(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    jsonable: JsonValue = to_jsonable_python(value) if isinstance(value, datetime) else value
    return jsonable


def decode_value(kind: type[Value], text: str, what: str) -> Value:
    """Return a stored value; StoreError if the text does not validate."""
    return parse_stored(lambda stored: kind.model_validate(json.loads(stored)), text, what)


# --------------------------------------------------------------------------------- origins and anchors

FROM_TRACE = "id IN (SELECT owner FROM memory_origins WHERE trace_id = ?1)"
"""Pairs or anchors that came from a trace."""


def add_origins(tables: Tables, owner: str, origins: Iterable[Origin]) -> None:
    """Write origins that are not stored yet."""
    records = ({"owner": owner, **origin.model_dump()} for origin in origins)
    tables.table("memory_origins").insert_all(records, ignore=True)


def read_origins(tables: Tables, owners: Sequence[str]) -> Mapping[str, tuple[Origin, ...]]:
    """Return the origins of each pair or anchor, sorted by trace and step."""
    found: dict[str, list[Origin]] = {owner: [] for owner in owners}
    for owner, trace_id, step in tables.execute(
        "SELECT owner, trace_id, step FROM memory_origins "
        "WHERE owner IN (SELECT value FROM json_each(?)) ORDER BY trace_id, step",
        (json.dumps(list(owners)),),
    ):
        found[owner].append(Origin(trace_id=trace_id, step=step))
    return {owner: tuple(origins) for owner, origins in found.items()}


def find_exclusion(tables: Tables, pair: ContrastPair, origins: Iterable[Origin]) -> str | None:
    """Return why calibration must not learn from a pair, or None if it may; see ``Submission``."""
    subject = pair.hashes.subject
    if tables.execute("SELECT 1 FROM memory_anchors WHERE subject = ?", (subject,)).fetchone():
        return "anchor"
    sql = f"SELECT 1 FROM memory_anchors WHERE {FROM_TRACE}"  # noqa: S608 - constant
    shared = any(tables.execute(sql, (origin.trace_id,)).fetchone() for origin in origins)
    return "anchor_trace" if shared else None


def add_anchor(tables: Tables, pair: ContrastPair, origins: Sequence[Origin]) -> bool:
    """Store an anchor that came from these steps, and return whether it is new."""
    is_new = not tables.execute("SELECT 1 FROM memory_anchors WHERE id = ?", (pair.id,)).fetchone()
    if not is_new and set(origins) <= set(read_origins(tables, [pair.id])[pair.id]):
        return False
    subject = pair.hashes.subject
    learned = tables.execute("SELECT id FROM memory_pairs WHERE subject = ?", (subject,)).fetchone()
    if learned:
        raise DataError(
            f"anchor {pair.id} has the transition of stored pair {learned[0]}; calibration never learns from "
            "anchors, so choose another one"
        )
    sql = f"SELECT id FROM memory_pairs WHERE {FROM_TRACE} ORDER BY id"  # noqa: S608 - constant
    for origin in origins:
        learned = tables.execute(sql, (origin.trace_id,)).fetchone()
        if learned:
            raise DataError(
                f"anchor {pair.id} was made of trace {origin.trace_id}, and so was stored pair {learned[0]}; "
                "calibration never learns from traces of anchors, so choose another trace"
            )
    record = {"id": pair.id, "subject": subject, "pair": encode_value(pair)}
    tables.table("memory_anchors").insert(record, ignore=True)
    add_origins(tables, pair.id, origins)
    return is_new


def read_anchors(tables: Tables) -> tuple[ContrastPair, ...]:
    """Return the anchors in the order of their ids."""
    found = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return tuple(decode_value(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in found)


# ----------------------------------------------------------------------------------------------- pairs

PAIR_FIELD_NAMES = frozenset(
    name
    for model in (ContrastPair, Transition, Action, Evaluation, Scope, Provenance)
    for name in model.model_fields
)
"""The field names of a pair, which are not scanned."""


class PairRow(NamedTuple):
    """A stored pair; the fields are columns of ``memory_pairs``."""

    number: int
    id: str
    status: CardStatus
    reason: str | None
    failed_test: int
    utility: float
    created_by: str
    created_at: str
    changed_at: str
    pair: str

    def parse_pair(self) -> ContrastPair:
        """Return the pair."""
        return decode_value(ContrastPair, self.pair, f"pair {self.id}")


def list_pair_texts(pair: ContrastPair) -> tuple[str, ...]:
    """Return all texts of a pair, each once."""
    texts = dict.fromkeys(iter_texts(to_json(pair)))
    return tuple(text for text in texts if text not in PAIR_FIELD_NAMES)


def select_rows(tables: Tables, where: str, parameters: Sequence[Any] = ()) -> list[PairRow]:
    """Return the pairs that meet an SQL condition; it must be a constant of this package."""
    sql = f"SELECT {', '.join(PairRow._fields)} FROM memory_pairs WHERE {where}"  # noqa: S608 - constant
    return [PairRow(*row) for row in tables.execute(sql, parameters).fetchall()]


def read_rows(tables: Tables, ids: Iterable[str]) -> list[PairRow]:
    """Return pairs by their ids; DataError if one is not stored."""
    rows = []
    for pair_id in ids:
        row = select_rows(tables, "id = ?", (pair_id,))
        if not row:
            raise DataError(f"the memory has no pair {pair_id}; list its pairs with `reflact memory list`")
        rows.extend(row)
    return rows


def build_stored_pairs(tables: Tables, rows: Sequence[PairRow]) -> tuple[StoredPair, ...]:
    """Return pairs with their statuses and origins."""
    origins = read_origins(tables, [row.id for row in rows])
    names = ("status", "reason", "utility", "created_by", "created_at", "changed_at")
    pairs = []
    for row in rows:
        pair = row.parse_pair()
        assert pair.hashes  # computed here, on the reader's thread
        fields: dict[str, Any] = {name: getattr(row, name) for name in names}
        pairs.append(StoredPair(pair=pair, origins=origins[row.id], **fields))
    return tuple(pairs)


def find_pairs(
    tables: Tables, words: str, statuses: Sequence[CardStatus], limit: int
) -> tuple[StoredPair, ...]:
    """Return the pairs that hold all words of at least three characters; see ``MemoryStore.find``."""
    parts = [word for word in words.replace("\0", " ").split() if len(word) >= MIN_WORD_CHARS]
    query = tables.quote_fts(" ".join(parts).encode("utf-8", "replace").decode()) if parts else ""
    where = (
        "(?1 = '[]' OR status IN (SELECT value FROM json_each(?1))) AND "
        "(?2 = '' OR number IN (SELECT rowid FROM memory_pairs_fts WHERE memory_pairs_fts MATCH ?2)) "
        "ORDER BY utility DESC, changed_at DESC, id LIMIT ?3"
    )
    found = select_rows(tables, where, (json.dumps(list(statuses)), query, limit))
    return build_stored_pairs(tables, found)


def read_history(tables: Tables, pair_id: str) -> tuple[StatusChange, ...]:
    """Return the status changes of a pair in their order."""
    (row,) = read_rows(tables, [pair_id])
    names = tuple(StatusChange.model_fields)
    sql = f"SELECT {', '.join(names)} FROM memory_history WHERE pair = ? ORDER BY sequence"  # noqa: S608 - constant
    return tuple(
        StatusChange.model_validate(dict(zip(names, change, strict=True)))
        for change in tables.execute(sql, (row.number,))
    )
