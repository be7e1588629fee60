"""How units change, within one transaction: added, judged, moved from state to state, retired, removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from reflact.errors import DataError
from reflact.memory import CardStatus, Promotion
from reflact.memory_cards import ACTIVE, PAIR_KINDS, Finding, moved, subject
from reflact.store import origins
from reflact.store.database import Tables
from reflact.store.units import PAIR, Row, Text, Unit, rows, scope_of, stamp, written
from reflact.store.words import indexed, tags


def add(tables: Tables, unit: Unit, status: CardStatus, now: datetime, reason: str | None = None) -> int:
    """Write a unit in a state, with its index row, and return its number."""
    first, at = unit.cards[0], stamp(now)
    cursor = tables.execute(
        "INSERT INTO memory_units (id, kind, pair, subject, scope, provenance, status, reason, version, "
        "trust, utility, created_by, created, changed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            unit.id,
            unit.kind,
            None if unit.pair is None else written(unit.pair),
            None if unit.pair is None else subject(unit.pair),
            written(first.scope),
            written(first.provenance),
            status,
            reason,
            first.version,
            first.trust,
            first.utility,
            first.created_by,
            at,
            at,
        ),
    )
    number = int(cursor.lastrowid or 0)
    origins.add(tables, origins.UNITS, number, first.provenance.origins)
    for card in unit.cards:
        tables.execute(
            "INSERT INTO memory_cards (id, unit, kind, text) VALUES (?, ?, ?, ?)",
            (card.id, number, card.kind, written(Text.of(card))),
        )
    tables.execute(
        "INSERT INTO memory_words (rowid, tags, words) VALUES (?, ?, ?)",
        (number, tags(status, unit.kinds, first.scope), indexed(unit.said)),
    )
    return number


def note(
    tables: Tables,
    number: int,
    before: CardStatus | None,
    after: CardStatus,
    *,
    now: datetime,
    version: int = 1,
    reason: str | None = None,
    test: int | None = None,
) -> None:
    """Write a line of a unit's history; whatever a test said of it is about how it stood before."""
    tables.execute("DELETE FROM memory_refused WHERE unit = ?", (number,))
    tables.execute(
        "INSERT INTO memory_history (unit, before, after, reason, test, version, at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (number, before, after, reason, test, version, stamp(now)),
    )


def judged(finding: Finding | None) -> tuple[CardStatus, str | None]:
    """Return the state to which a scan's finding brings a candidate, and the reason that goes with it."""
    if finding is None:
        return "quarantined", None
    return ("rejected" if finding.verdict == "reject" else "quarantined"), finding.rule


def move(
    tables: Tables,
    row: Row,
    after: CardStatus,
    *,
    now: datetime,
    reason: str | None = None,
    test: int | None = None,
    evidence: Promotion | None = None,
) -> None:
    """Change a unit's state, where it may.

    Raises:
        DataError: It may not; names the unit.
    """
    try:
        moved(row.status, after, evidence)
    except DataError as error:
        raise DataError(f"unit {row.id}: {error}") from None
    settle(tables, row.number, row.status, after, now=now, version=row.version, reason=reason, test=test)


def settle(
    tables: Tables,
    number: int,
    before: CardStatus,
    after: CardStatus,
    *,
    now: datetime,
    version: int,
    reason: str | None = None,
    test: int | None = None,
) -> None:
    """Write a state with its index row and its line of history."""
    tables.execute(
        "UPDATE memory_units SET status = ?, reason = ?, changed = ? WHERE number = ?",
        (after, reason, stamp(now), number),
    )
    retag(tables, number)
    note(tables, number, before, after, now=now, version=version, reason=reason, test=test)


def retag(tables: Tables, number: int) -> None:
    """Write a unit's tags anew."""
    (row,) = rows(tables, "number = ?", (number,))
    kinds = PAIR_KINDS if row.kind == PAIR else (row.kind,)
    tables.execute(
        "UPDATE memory_words SET tags = ? WHERE rowid = ?",
        (tags(row.status, kinds, scope_of(row)), number),  # type: ignore[arg-type]
    )


def remove(tables: Tables, numbers: Iterable[int]) -> None:
    """Remove units with their cards, index rows and history."""
    for number in numbers:
        tables.execute("DELETE FROM memory_words WHERE rowid = ?", (number,))
        tables.execute("DELETE FROM memory_units WHERE number = ?", (number,))


REFUSED = "number IN (SELECT unit FROM memory_refused)"
"""Units that a test has not shown to help, and that no test takes again as they are."""


def make_room(tables: Tables, kind: str, bound: int, now: datetime) -> None:
    """Archive the weakest active units of a kind until the bound holds; a pair counts for both its kinds.

    The weakest is one that a test refused; of several, or where there is none, the one of the least measured
    utility; of equals one that is not promoted, then the least trusted, then the one that changed least
    lately.
    """
    for kinds in _kinds(kind):
        for _ in range(_active(tables, kinds) - bound):
            weakest = _weakest(tables, kinds, f"AND {REFUSED}") or _weakest(tables, kinds)
            move(tables, min(weakest, key=_strength), "archived", now=now, reason="bound")


def room(tables: Tables, kind: str, bound: int) -> int:
    """Return how many units of a kind can be added before one is archived that no test has refused."""
    free = []
    for kinds in _kinds(kind):
        among = f"kind IN ({_marks(kinds)}) AND {REFUSED}"
        (refused,) = tables.execute(f"SELECT count(*) FROM memory_units WHERE {among}", kinds).fetchone()  # noqa: S608 - constants
        free.append(bound - _active(tables, kinds) + refused)
    return int(max(0, min(free)))


def _kinds(kind: str) -> list[tuple[str, ...]]:
    """Return for each kind that a unit counts for the kinds that are counted with it."""
    return [(one, PAIR) if one in PAIR_KINDS else (one,) for one in (PAIR_KINDS if kind == PAIR else (kind,))]


def _active(tables: Tables, kinds: Sequence[str]) -> int:
    (active,) = tables.execute(
        f"SELECT coalesce(sum(units), 0) FROM memory_active WHERE kind IN ({_marks(kinds)})",  # noqa: S608 - only marks
        kinds,
    ).fetchone()
    return int(active)


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _weakest(tables: Tables, kinds: Sequence[str], among: str = "") -> list[Row]:
    order = "utility, status = 'promoted', trust, changed, number"
    where = f"kind = ? AND status IN {ACTIVE} {among} ORDER BY {order} LIMIT 1"
    return [row for kind in kinds for row in rows(tables, where, (kind,))]


def _strength(row: Row) -> tuple[float, bool, float, str, int]:
    return row.utility, row.status == "promoted", row.trust, row.changed, row.number
