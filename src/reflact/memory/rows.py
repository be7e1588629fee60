"""Rows of units, their cards, origins and anchors. A unit is a pair with its two cards, or a single card.

Status, scope and provenance are stored once per unit, so the cards of a pair always agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, JsonValue
from pydantic_core import to_jsonable_python

from reflact.errors import DataError
from reflact.jsonutil import iter_json_chunks, parse_stored
from reflact.memory.cards import RankedUnit, build_cards, iter_texts, rank_units
from reflact.memory.models import (
    Action,
    CardKind,
    CardQuery,
    CardStatus,
    ContrastPair,
    Evaluation,
    MemoryCard,
    Origin,
    Provenance,
    Scope,
    StatusChange,
    StoredPair,
    Transition,
)
from reflact.memory.search import compute_relevances
from reflact.store.database import Tables

Value = TypeVar("Value", bound=BaseModel)


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
"""Units or anchors that came from a trace."""


def add_origins(tables: Tables, owner: str, origins: Iterable[Origin]) -> None:
    """Write origins that are not stored yet."""
    records = ({"owner": owner, **origin.model_dump()} for origin in origins)
    tables.table("memory_origins").insert_all(records, ignore=True)


def read_origins(tables: Tables, owners: Sequence[str]) -> Mapping[str, tuple[Origin, ...]]:
    """Return the origins of each unit or anchor, sorted by trace and step."""
    found: dict[str, list[Origin]] = {owner: [] for owner in owners}
    for owner, trace_id, step in tables.execute(
        "SELECT owner, trace_id, step FROM memory_origins "
        "WHERE owner IN (SELECT value FROM json_each(?)) ORDER BY trace_id, step",
        (json.dumps(list(owners)),),
    ):
        found[owner].append(Origin(trace_id=trace_id, step=step))
    return {owner: tuple(origins) for owner, origins in found.items()}


def find_exclusion(tables: Tables, pair: ContrastPair | None, unit_origins: Iterable[Origin]) -> str | None:
    """Return why calibration must not learn from a unit, or None if it may; see ``Submission``."""
    if pair is None:
        return None
    subject = pair.hashes.subject
    if tables.execute("SELECT 1 FROM memory_anchors WHERE subject = ?", (subject,)).fetchone():
        return "anchor"
    sql = f"SELECT 1 FROM memory_anchors WHERE {FROM_TRACE}"  # noqa: S608 - constant
    shared = any(tables.execute(sql, (origin.trace_id,)).fetchone() for origin in unit_origins)
    return "anchor_trace" if shared else None


def add_anchor(tables: Tables, pair: ContrastPair, unit_origins: Sequence[Origin]) -> bool:
    """Store an anchor that came from these steps, and return whether it is new."""
    is_new = not tables.execute("SELECT 1 FROM memory_anchors WHERE id = ?", (pair.id,)).fetchone()
    if not is_new and set(unit_origins) <= set(read_origins(tables, [pair.id])[pair.id]):
        return False
    subject = pair.hashes.subject
    learned = tables.execute("SELECT id FROM memory_units WHERE subject = ?", (subject,)).fetchone()
    if learned:
        raise DataError(
            f"anchor {pair.id} has the transition of stored pair {learned[0]}; calibration never learns from "
            "anchors, so choose another one"
        )
    sql = f"SELECT id FROM memory_units WHERE pair IS NOT NULL AND {FROM_TRACE} ORDER BY id"  # noqa: S608 - constant
    for origin in unit_origins:
        learned = tables.execute(sql, (origin.trace_id,)).fetchone()
        if learned:
            raise DataError(
                f"anchor {pair.id} was made of trace {origin.trace_id}, and so was stored pair {learned[0]}; "
                "calibration never learns from traces of anchors, so choose another trace"
            )
    record = {"id": pair.id, "subject": subject, "pair": encode_value(pair)}
    tables.table("memory_anchors").insert(record, ignore=True)
    add_origins(tables, pair.id, unit_origins)
    return is_new


def read_anchors(tables: Tables) -> tuple[ContrastPair, ...]:
    """Return the anchors in the order of their ids."""
    found = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return tuple(decode_value(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in found)


# ----------------------------------------------------------------------------------------------- units

PAIR_UNIT = "pair"
"""The kind of a unit that is a pair; its cards have two kinds."""

TEXT_FIELDS = ("content", "pattern", "strategy")
"""The fields of a card that are stored with it; all others are stored with its unit."""

PAIR_FIELD_NAMES = frozenset(
    name
    for model in (ContrastPair, Transition, Action, Evaluation, Scope, Provenance)
    for name in model.model_fields
)
"""The field names of a pair, which are not scanned."""


class UnitRow(NamedTuple):
    """A stored unit; the fields are columns of ``memory_units``."""

    number: int
    id: str
    kind: str
    status: CardStatus
    reason: str | None
    failed_test: int
    version: int
    trust: float
    utility: float
    created_by: str
    created_at: str
    changed_at: str
    scope: str
    provenance: str
    pair: str | None

    def parse_pair(self) -> ContrastPair | None:
        """Return the pair; None if the unit is a card."""
        return None if self.pair is None else decode_value(ContrastPair, self.pair, f"pair {self.id}")

    def parse_scope(self) -> Scope:
        """Return the scope."""
        return decode_value(Scope, self.scope, f"scope of unit {self.id}")


class Unit(NamedTuple):
    """A unit before it is stored: a pair with its two cards, or a card without a pair."""

    id: str
    cards: tuple[MemoryCard, ...]
    pair: ContrastPair | None

    @classmethod
    def from_pair(cls, pair: ContrastPair, created_by: str) -> Unit:
        """Return the unit of a pair."""
        return cls(require_pair_id(pair), build_cards(pair, created_by=created_by), pair)

    @property
    def kind(self) -> str:
        """The kind by which the bound counts it."""
        return self.cards[0].kind if self.pair is None else PAIR_UNIT

    @property
    def card_texts(self) -> tuple[str, ...]:
        """The texts of its cards."""
        texts = (getattr(card, name) for card in self.cards for name in TEXT_FIELDS)
        return tuple(text for text in texts if text)

    @property
    def all_texts(self) -> tuple[str, ...]:
        """All texts to scan, each once: those of its pair, and edited texts of its cards."""
        if self.pair is None:
            return (*self.card_texts, *iter_texts(self.cards[0].scope.model_dump(mode="json")))
        derived = Unit.from_pair(self.pair, "").card_texts
        edited = (text for text in self.card_texts if text not in derived)
        return (*edited, *list_pair_texts(self.pair))


def list_pair_texts(pair: ContrastPair) -> tuple[str, ...]:
    """Return all texts of a pair, each once."""
    texts = dict.fromkeys(iter_texts(to_json(pair)))
    return tuple(text for text in texts if text not in PAIR_FIELD_NAMES)


def encode_texts(card: MemoryCard) -> str:
    """Return the texts of a card as stored text."""
    return "".join(iter_json_chunks({name: getattr(card, name) for name in TEXT_FIELDS}))


def select_rows(tables: Tables, where: str, parameters: Sequence[Any] = ()) -> list[UnitRow]:
    """Return the units that meet an SQL condition; it must be a constant of this package."""
    sql = f"SELECT {', '.join(UnitRow._fields)} FROM memory_units WHERE {where}"  # noqa: S608 - constant
    return [UnitRow(*row) for row in tables.execute(sql, parameters).fetchall()]


def read_units(tables: Tables, ids: Iterable[str]) -> list[UnitRow]:
    """Return units by their ids; DataError if one is not stored."""
    rows = []
    for unit_id in ids:
        row = select_rows(tables, "id = ?", (unit_id,))
        if not row:
            raise DataError(f"the memory has no unit {unit_id}; list its cards with `reflact memory list`")
        rows.extend(row)
    return rows


def _get_shared_fields(row: UnitRow) -> dict[str, Any]:
    """Return the fields that a unit shares with its cards and its pair."""
    names = ("status", "reason", "version", "trust", "utility", "created_by", "created_at", "changed_at")
    return {name: getattr(row, name) for name in names}


def build_stored_pairs(tables: Tables, rows: Sequence[UnitRow]) -> tuple[StoredPair, ...]:
    """Return the pairs of units, with their statuses and origins."""
    origins = read_origins(tables, [row.id for row in rows])
    pairs = ((row, row.parse_pair()) for row in rows)
    return tuple(
        StoredPair(pair=pair, origins=origins[row.id], **_get_shared_fields(row))
        for row, pair in pairs
        if pair is not None and pair.hashes  # computed here, on the reader's thread
    )


def read_cards(tables: Tables, row: UnitRow, kinds: Sequence[CardKind] = ()) -> tuple[MemoryCard, ...]:
    """Return the cards of a unit, in the order of their kinds."""
    found = tables.execute(
        "SELECT id, kind, text FROM memory_cards WHERE unit = ? ORDER BY kind, id", (row.number,)
    ).fetchall()
    fields: dict[str, Any] = {
        "scope": row.parse_scope(),
        "provenance": decode_value(Provenance, row.provenance, f"provenance of unit {row.id}"),
        "pair_id": None if row.pair is None else row.id,
        **_get_shared_fields(row),
    }

    def read(card_id: str, kind: CardKind, text: str) -> MemoryCard:
        return parse_stored(
            lambda stored: MemoryCard(id=card_id, kind=kind, **fields, **json.loads(stored)),
            text,
            f"card {card_id}",
        )

    return tuple(read(*card) for card in found if not kinds or card[1] in kinds)


def find_units(tables: Tables, query: CardQuery) -> list[UnitRow]:
    """Return the units that match a query, best first."""
    relevance = dict(compute_relevances(tables, query))
    found = tables.execute(
        "SELECT number, id, trust, utility, changed_at FROM memory_units "
        "WHERE number IN (SELECT value FROM json_each(?))",
        (json.dumps(list(relevance)),),
    )
    ranked = [
        RankedUnit(unit_id, relevance[number], trust, utility, datetime.fromisoformat(changed))
        for number, unit_id, trust, utility, changed in found
    ]
    return read_units(tables, rank_units(ranked, query.now)[: query.limit])


def read_history(tables: Tables, unit_id: str) -> tuple[StatusChange, ...]:
    """Return the status changes of a unit in their order."""
    (row,) = read_units(tables, [unit_id])
    names = tuple(StatusChange.model_fields)
    sql = f"SELECT {', '.join(names)} FROM memory_history WHERE unit = ? ORDER BY sequence"  # noqa: S608 - constant
    return tuple(
        StatusChange.model_validate(dict(zip(names, change, strict=True)))
        for change in tables.execute(sql, (row.number,))
    )
