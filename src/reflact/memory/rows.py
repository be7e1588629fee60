"""Rows of units, their cards, origins and anchors. A unit is a pair with its two cards, or a single card.

Status, scope and provenance are stored once per unit, so the cards of a pair always agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, JsonValue

from reflact.errors import DataError
from reflact.jsonutil import parse_stored
from reflact.memory.cards import RankedUnit, build_cards, iter_texts, rank_units, subject_hash
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
    ScoreEvent,
    StatusChange,
    StoredPair,
    StoredTrace,
    Transition,
)
from reflact.memory.search import compute_relevances
from reflact.store.database import Tables
from reflact.types import FrozenModel, canonical_json, join_canonical_json

Value = TypeVar("Value", bound=BaseModel)


def format_time(at: datetime) -> str:
    """Return a time as stored text: UTC with microseconds, so texts sort in the order of times."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> datetime:
    """Return the time of a stored text."""
    return datetime.fromisoformat(text)


def encode_value(value: BaseModel, what: str = "a value") -> str:
    """Return a value as stored text; lone surrogates are escaped, since SQLite cannot store them.

    Raises:
        DataError: A number has more digits than Python reads from JSON; names ``what`` the value is.
    """
    try:
        if not isinstance(value, ContrastPair | ScoreEvent):
            return canonical_json(to_json_object(value))
        texts = {
            name: canonical_json(field)
            for name, field in to_json_object(value).items()
            if name != "transition"
        }
        return join_canonical_json({**texts, "transition": value.transition.canonical_json})
    except ValueError as error:
        raise _build_number_error(what, error) from None


def require_pair_id(pair: ContrastPair) -> str:
    """Return a pair's id.

    Raises:
        DataError: A number in the pair has more digits than Python reads from JSON.
    """
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


def to_json_object(value: BaseModel) -> dict[str, JsonValue]:
    """Return a value as a JSON object that shares its states.

    pydantic would visit each value of a state, and would replace lone surrogates in field names.
    """
    if isinstance(value, StoredTrace):
        return {
            "id": value.id,
            "purpose": value.purpose,
            "events": [to_json_object(event) for event in value.events],
        }
    if isinstance(value, ContrastPair | ScoreEvent):
        rest = {
            **value.model_dump(mode="json", exclude={"transition"}),
            "transition": value.transition.json_object,
        }
        return {name: rest[name] for name in type(value).model_fields}
    return value.model_dump(mode="json")


def decode_value(kind: type[Value], text: str, what: str) -> Value:
    """Return a stored value.

    Raises:
        StoreError: The text does not validate.
    """
    return parse_stored(lambda stored: kind.model_validate(json.loads(stored)), text, what)


FROM_TRACE = "id IN (SELECT owner FROM memory_origins WHERE trace_id = ?1)"
"""Units or anchors that came from a trace."""


def add_origins(tables: Tables, owner: str, origins: Iterable[Origin]) -> None:
    """Write origins that are not stored yet."""
    records = ({"owner": owner, "trace_id": origin.trace_id, "step": origin.step} for origin in origins)
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
    """Return why calibration must not learn from a unit, or None if it may.

    ``anchor``: an anchor has the same transition. ``anchor_trace``: an anchor came from the same trace, whose
    steps show each other's states.
    """
    if pair is None:
        return None
    if tables.execute("SELECT 1 FROM memory_anchors WHERE subject = ?", (subject_hash(pair),)).fetchone():
        return "anchor"
    sql = f"SELECT 1 FROM memory_anchors WHERE {FROM_TRACE}"  # noqa: S608 - constant
    shared = any(tables.execute(sql, (origin.trace_id,)).fetchone() for origin in unit_origins)
    return "anchor_trace" if shared else None


def add_anchor(tables: Tables, pair: ContrastPair, unit_origins: Sequence[Origin]) -> bool:
    """Store an anchor that came from these steps, and return whether it is new."""
    is_new = not tables.execute("SELECT 1 FROM memory_anchors WHERE id = ?", (pair.id,)).fetchone()
    if not is_new and set(unit_origins) <= set(read_origins(tables, [pair.id])[pair.id]):
        return False
    subject = subject_hash(pair)
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


def read_anchors(tables: Tables) -> list[ContrastPair]:
    """Return the anchors in the order of their ids."""
    found = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return [decode_value(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in found]


PAIR_UNIT = "pair"
"""The kind of a unit that is a pair; its cards have two kinds."""

RANK_QUERY = """
SELECT number, id, trust, utility, changed_at FROM memory_units
WHERE number IN (SELECT value FROM json_each(?1)) AND (?2 IS NULL OR kind = ?2)
"""

PAIR_FIELD_NAMES = frozenset(
    name
    for model in (ContrastPair, Transition, Action, Evaluation, Scope, Provenance)
    for name in model.model_fields
)
"""The field names of a pair, which are not scanned."""


class CardText(FrozenModel):
    """The texts of a card."""

    content: str
    pattern: str = ""
    strategy: str = ""

    @classmethod
    def from_card(cls, card: MemoryCard) -> CardText:
        """Return the texts of a card."""
        return cls(content=card.content, pattern=card.pattern, strategy=card.strategy)


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
        return tuple(
            text for card in self.cards for text in (card.content, card.pattern, card.strategy) if text
        )

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
    texts = dict.fromkeys(iter_texts(to_json_object(pair)))
    return tuple(text for text in texts if text not in PAIR_FIELD_NAMES)


def select_rows(tables: Tables, where: str, parameters: Sequence[Any] = ()) -> list[UnitRow]:
    """Return the units that meet an SQL condition; it must be a constant of this package."""
    sql = f"SELECT {', '.join(UnitRow._fields)} FROM memory_units WHERE {where}"  # noqa: S608 - constant
    return [UnitRow(*row) for row in tables.execute(sql, parameters).fetchall()]


def read_units(tables: Tables, ids: Iterable[str]) -> list[UnitRow]:
    """Return units by their ids.

    Raises:
        DataError: A unit is not stored.
    """
    rows = []
    for unit_id in ids:
        row = select_rows(tables, "id = ?", (unit_id,))
        if not row:
            raise DataError(f"the memory has no unit {unit_id}; list its cards with `reflact memory list`")
        rows.extend(row)
    return rows


def read_unit_of_card(tables: Tables, card_id: str) -> UnitRow:
    """Return the unit of a card.

    Raises:
        DataError: There is no such card.
    """
    found = select_rows(tables, "number = (SELECT unit FROM memory_cards WHERE id = ?)", (card_id,))
    if not found:
        raise DataError(f"the memory has no card {card_id}; list its cards with `reflact memory list`")
    return found[0]


def parse_pair(row: UnitRow) -> ContrastPair:
    """Return the pair of a unit."""
    return decode_value(ContrastPair, row.pair or "null", f"pair {row.id}")


def build_stored_pairs(tables: Tables, rows: Sequence[UnitRow]) -> list[StoredPair]:
    """Return the pairs of units, with their statuses and origins."""
    found = read_origins(tables, [row.id for row in rows])
    return [_build_stored_pair(row, found[row.id]) for row in rows]


def _build_stored_pair(row: UnitRow, unit_origins: tuple[Origin, ...]) -> StoredPair:
    pair = parse_pair(row)
    _ = pair.id  # computes the hash on the reader's thread
    return StoredPair(
        pair=pair,
        status=row.status,
        reason=row.reason,
        version=row.version,
        trust=row.trust,
        utility=row.utility,
        created_by=row.created_by,
        created_at=parse_time(row.created_at),
        changed_at=parse_time(row.changed_at),
        origins=unit_origins,
    )


def read_cards(tables: Tables, row: UnitRow, kinds: Sequence[CardKind] = ()) -> list[MemoryCard]:
    """Return the cards of a unit, in the order of their kinds."""
    found = tables.execute(
        "SELECT id, kind, text FROM memory_cards WHERE unit = ? ORDER BY kind, id", (row.number,)
    ).fetchall()
    provenance = decode_value(Provenance, row.provenance, f"provenance of unit {row.id}")
    return [
        MemoryCard(
            id=card_id,
            kind=kind,
            status=row.status,
            **decode_value(CardText, text, f"card {card_id}").model_dump(),
            scope=parse_scope(row),
            trust=row.trust,
            utility=row.utility,
            version=row.version,
            pair_id=None if row.pair is None else row.id,
            provenance=provenance,
            created_by=row.created_by,
            reason=row.reason,
            created_at=parse_time(row.created_at),
            changed_at=parse_time(row.changed_at),
        )
        for card_id, kind, text in found
        if not kinds or kind in kinds
    ]


def find_units(tables: Tables, query: CardQuery, *, pairs: bool = False) -> list[UnitRow]:
    """Return the units that match a query, or only the pairs among them, best first."""
    relevance = dict(compute_relevances(tables, query))
    ranked = [
        RankedUnit(unit_id, relevance[number], trust, utility, parse_time(changed))
        for number, unit_id, trust, utility, changed in tables.execute(
            RANK_QUERY, (json.dumps(list(relevance)), PAIR_UNIT if pairs else None)
        )
    ]
    best = rank_units(ranked, query.now)[: query.limit]
    return [row for unit_id in best for row in select_rows(tables, "id = ?", (unit_id,))]


def read_history(tables: Tables, unit_id: str) -> tuple[StatusChange, ...]:
    """Return the status changes of a unit in their order."""
    (row,) = read_units(tables, [unit_id])
    changes = tables.execute(
        "SELECT before, after, reason, test_number, version, at FROM memory_history WHERE unit = ? "
        "ORDER BY sequence",
        (row.number,),
    ).fetchall()
    return tuple(
        StatusChange(
            before=before, after=after, reason=reason, test_number=test, version=version, at=parse_time(at)
        )
        for before, after, reason, test, version, at in changes
    )


def parse_scope(row: UnitRow) -> Scope:
    """Return the scope of a unit."""
    return decode_value(Scope, row.scope, f"scope of unit {row.id}")
