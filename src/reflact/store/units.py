"""Units as they are stored, and how they are read. A unit is a pair with its two cards, or one card.

State, scope and provenance stand once for each unit, so that the cards of a pair cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from reflact.errors import DataError
from reflact.memory import (
    Action,
    CardKind,
    CardStatus,
    ContrastPair,
    Evaluation,
    MemoryCard,
    Origin,
    Provenance,
    Scope,
    Transition,
)
from reflact.memory_cards import Standing, cards_of, ranked, texts_of
from reflact.memory_ports import Query, StatusChange, StoredPair
from reflact.store import origins
from reflact.store.database import Tables
from reflact.store.encoding import id_of, plain, read, time_of
from reflact.store.words import relevances
from reflact.types import FrozenModel

PAIR = "pair"
"""What stands for the kind of a pair, whose cards are of two kinds."""

STANDING = """
SELECT number, id, trust, utility, changed FROM memory_units
WHERE number IN (SELECT value FROM json_each(?1)) AND (?2 IS NULL OR kind = ?2)
"""


FIELDS = frozenset(
    name
    for model in (ContrastPair, Transition, Action, Evaluation, Scope, Provenance)
    for name in model.model_fields
)
"""The names of a pair's own fields, which are no text of anybody's."""


class Text(FrozenModel):
    """What a card says."""

    content: str
    pattern: str = ""
    strategy: str = ""

    @classmethod
    def of(cls, card: MemoryCard) -> Text:
        """Return the text of a card."""
        return cls(content=card.content, pattern=card.pattern, strategy=card.strategy)


class Row(NamedTuple):
    """A stored unit."""

    number: int
    id: str
    kind: str
    status: CardStatus
    reason: str | None
    refused: int
    version: int
    trust: float
    utility: float
    created_by: str
    created: str
    changed: str
    scope: str
    provenance: str
    pair: str | None


class Unit(NamedTuple):
    """A unit to be stored: a pair with its two cards, or a card with no pair."""

    id: str
    cards: tuple[MemoryCard, ...]
    pair: ContrastPair | None

    @classmethod
    def of(cls, pair: ContrastPair, created_by: str) -> Unit:
        """Return the unit of a pair."""
        return cls(id_of(pair), cards_of(pair, created_by=created_by), pair)

    @property
    def kind(self) -> str:
        """The kind under which it counts against the bound."""
        return self.cards[0].kind if self.pair is None else PAIR

    @property
    def kinds(self) -> tuple[CardKind, ...]:
        """The kinds of its cards."""
        return tuple(card.kind for card in self.cards)

    @property
    def said(self) -> tuple[str, ...]:
        """The texts of its cards."""
        return tuple(
            text for card in self.cards for text in (card.content, card.pattern, card.strategy) if text
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in it, each once: what its pair holds, and what its cards say beyond that."""
        if self.pair is None:
            return (*self.said, *texts_of(self.cards[0].scope.model_dump(mode="json")))
        derived = Unit.of(self.pair, "").said
        edited = (text for text in self.said if text not in derived)
        return (*edited, *texts_in(self.pair))


def texts_in(pair: ContrastPair) -> tuple[str, ...]:
    """Return all texts of a pair, each once: those that its cards are made of."""
    held = texts_of(plain(pair))
    return tuple(text for text in dict.fromkeys(held) if text not in FIELDS)


def rows(tables: Tables, where: str, parameters: Sequence[Any] = ()) -> list[Row]:
    """Return units by a condition that this package wrote."""
    sql = f"SELECT {', '.join(Row._fields)} FROM memory_units WHERE {where}"  # noqa: S608 - see above
    return [Row(*row) for row in tables.execute(sql, parameters).fetchall()]


def units(tables: Tables, ids: Iterable[str]) -> list[Row]:
    """Return units by their ids.

    Raises:
        DataError: One is not stored.
    """
    found = []
    for unit_id in ids:
        row = rows(tables, "id = ?", (unit_id,))
        if not row:
            raise DataError(
                f"the memory holds no unit {unit_id}; list what it holds with `reflact memory list`"
            )
        found.extend(row)
    return found


def of_card(tables: Tables, card_id: str) -> Row:
    """Return the unit that a card belongs to.

    Raises:
        DataError: There is no such card.
    """
    found = rows(tables, "number = (SELECT unit FROM memory_cards WHERE id = ?)", (card_id,))
    if not found:
        raise DataError(f"the memory holds no card {card_id}; list what it holds with `reflact memory list`")
    return found[0]


def pair_of(row: Row) -> ContrastPair:
    """Return the pair that a unit is."""
    return read(ContrastPair, row.pair or "null", f"pair {row.id}")


def stored_pairs(tables: Tables, rows: Sequence[Row]) -> list[StoredPair]:
    """Return units as the pairs that they are."""
    found = origins.of(tables, [row.id for row in rows])
    return [_stored_pair(row, found[row.id]) for row in rows]


def _stored_pair(row: Row, made_of: tuple[Origin, ...]) -> StoredPair:
    pair = pair_of(row)
    _ = pair.id  # hashed here, on a reader's thread, and not where it is asked for
    return StoredPair(
        pair=pair,
        status=row.status,
        reason=row.reason,
        version=row.version,
        trust=row.trust,
        utility=row.utility,
        created_by=row.created_by,
        created=time_of(row.created),
        changed=time_of(row.changed),
        origins=made_of,
    )


def cards(tables: Tables, row: Row, kinds: Sequence[CardKind] = ()) -> list[MemoryCard]:
    """Return the cards of a unit, in the order of their kinds."""
    found = tables.execute(
        "SELECT id, kind, text FROM memory_cards WHERE unit = ? ORDER BY kind, id", (row.number,)
    ).fetchall()
    provenance = read(Provenance, row.provenance, f"provenance of unit {row.id}")
    return [
        MemoryCard(
            id=card_id,
            kind=kind,
            status=row.status,
            **read(Text, text, f"card {card_id}").model_dump(),
            scope=scope_of(row),
            trust=row.trust,
            utility=row.utility,
            version=row.version,
            pair_id=None if row.pair is None else row.id,
            provenance=provenance,
            created_by=row.created_by,
            reason=row.reason,
            created=time_of(row.created),
            changed=time_of(row.changed),
        )
        for card_id, kind, text in found
        if not kinds or kind in kinds
    ]


def found(tables: Tables, query: Query, *, pairs: bool = False) -> list[Row]:
    """Return the units that a query finds, or only the pairs among them, the best first."""
    relevance = dict(relevances(tables, query))
    standings = [
        Standing(unit_id, relevance[number], trust, utility, time_of(changed))
        for number, unit_id, trust, utility, changed in tables.execute(
            STANDING, (json.dumps(list(relevance)), PAIR if pairs else None)
        )
    ]
    best = ranked(standings, query.now)[: query.limit]
    return [row for unit_id in best for row in rows(tables, "id = ?", (unit_id,))]


def history(tables: Tables, number: int) -> tuple[StatusChange, ...]:
    """Return a unit's history, the first change first."""
    changes = tables.execute(
        "SELECT before, after, reason, test, version, at FROM memory_history WHERE unit = ? "
        "ORDER BY sequence",
        (number,),
    ).fetchall()
    return tuple(
        StatusChange(
            before=before, after=after, reason=reason, promotion=test, version=version, at=time_of(at)
        )
        for before, after, reason, test, version, at in changes
    )


def scope_of(row: Row) -> Scope:
    """Return for whom a unit is meant."""
    return read(Scope, row.scope, f"scope of unit {row.id}")
