"""How units change, within one transaction: stored, moved from state to state, edited, retired, forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime

from reflact.errors import DataError
from reflact.memory import CardStatus, MemoryCard, Origin, Promotion
from reflact.memory_cards import ACTIVE, PAIR_KINDS, Finding, moved, subject
from reflact.memory_ports import Forgotten, Submission
from reflact.store import origins
from reflact.store.database import Tables
from reflact.store.encoding import stamp, written
from reflact.store.units import PAIR, Row, Text, Unit, cards, rows, scope_of, units
from reflact.store.words import indexed, tags


def submit(
    tables: Tables,
    unit: Unit,
    finding: Finding | None,
    made_of: Sequence[Origin],
    *,
    bound: int,
    now: datetime,
) -> Submission:
    """Store a unit that was scanned, or add what it was made of to one that is there already."""
    barred = origins.barred(tables, unit.pair, made_of)
    if barred is not None:
        return Submission(unit_id=unit.id, new=False, status="rejected", reason=barred)
    known = rows(tables, "id = ?", (unit.id,))
    if not known:
        status, reason = judge(finding)
        _insert(tables, unit, status, reason, now)
        (row,) = units(tables, [unit.id])
        _note(tables, row, (None, "candidate", None), ("candidate", status, reason), now=now)
    origins.add(tables, unit.id, made_of)
    if not known:
        make_room(tables, unit.kind, bound, now)
    (row,) = units(tables, [unit.id])
    return Submission(unit_id=unit.id, new=not known, status=row.status, reason=row.reason)


def _insert(tables: Tables, unit: Unit, status: CardStatus, reason: str | None, now: datetime) -> None:
    first, at = unit.cards[0], stamp(now)
    stored = tables.table("memory_units").insert(
        {
            "id": unit.id,
            "kind": unit.kind,
            "status": status,
            "reason": reason,
            "version": first.version,
            "trust": first.trust,
            "created_by": first.created_by,
            "created": at,
            "changed": at,
            "subject": None if unit.pair is None else subject(unit.pair),
            "scope": written(first.scope),
            "provenance": written(first.provenance),
            "pair": None if unit.pair is None else written(unit.pair),
            "tags": tags(status, unit.kinds, first.scope),
            "words": indexed(unit.said),
        }
    )
    tables.table("memory_cards").insert_all(
        {"id": card.id, "unit": stored.last_pk, "kind": card.kind, "text": written(Text.of(card))}
        for card in unit.cards
    )


def _note(
    tables: Tables,
    row: Row,
    *changes: tuple[CardStatus | None, CardStatus, str | None],
    now: datetime,
    test: int | None = None,
) -> None:
    """Write lines of a unit's history: the state before, the state after, the reason."""
    same = {"unit": row.number, "test": test, "version": row.version, "at": stamp(now)}
    tables.table("memory_history").insert_all(
        {"before": before, "after": after, "reason": reason, **same} for before, after, reason in changes
    )


def judge(finding: Finding | None) -> tuple[CardStatus, str | None]:
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
    """Change a unit's state, if it may.

    Raises:
        DataError: It may not; names the unit.
    """
    try:
        moved(row.status, after, evidence)
    except DataError as error:
        raise DataError(f"unit {row.id}: {error}") from None
    settle(tables, row, after, now=now, reason=reason, test=test)


def settle(
    tables: Tables,
    row: Row,
    after: CardStatus,
    *,
    now: datetime,
    reason: str | None = None,
    test: int | None = None,
) -> None:
    """Write a state with its tags and its line of history; what a test said of the unit before is over."""
    kinds = PAIR_KINDS if row.kind == PAIR else (row.kind,)
    named = tags(after, kinds, scope_of(row))  # type: ignore[arg-type]
    tables.table("memory_units").update(
        row.number,
        {"status": after, "reason": reason, "refused": 0, "changed": stamp(now), "tags": named},
    )
    _note(tables, row, (row.status, after, reason), now=now, test=test)


def edit(
    tables: Tables, row: Row, texts: Sequence[MemoryCard], finding: Finding | None, *, now: datetime
) -> None:
    """Write what a unit's cards say now; it is a candidate again, one version up, with what a scan found."""
    for card in texts:
        tables.table("memory_cards").update(card.id, {"text": written(Text.of(card))})
    said = Unit(row.id, tuple(texts), None).said
    edited = row._replace(version=row.version + 1)
    tables.table("memory_units").update(
        row.number, {"version": edited.version, "words": indexed(said), "refused": 0}
    )
    _note(tables, edited, (row.status, "candidate", "edited"), now=now)
    status, reason = judge(finding)
    settle(tables, edited._replace(status="candidate"), status, now=now, reason=reason)


def release(tables: Tables, row: Row, *, reason: str, now: datetime) -> None:
    """Let a unit be tested that was held.

    Raises:
        DataError: It is not held.
    """
    if row.status != "quarantined" or row.reason is None:
        raise DataError(f"unit {row.id} is {row.status} and not held; there is nothing to release")
    tables.table("memory_units").update(row.number, {"reason": None, "changed": stamp(now)})
    _note(tables, row, (row.status, row.status, reason), now=now)


# --------------------------------------------------------------------------------------------- bounds


def make_room(tables: Tables, kind: str, bound: int, now: datetime) -> None:
    """Archive the weakest active units of a kind until the bound holds; a pair counts for both its kinds.

    The weakest is one that a test refused; of several, or if there is none, the one of the least measured
    utility; of equals one that is not promoted, then the least trusted, then the one that changed least
    lately.
    """
    for kinds in _kinds(kind):
        for _ in range(_active(tables, kinds) - bound):
            weakest = [row for one in kinds for row in rows(tables, WEAKEST, (one,))]
            move(tables, min(weakest, key=_strength), "archived", now=now, reason="bound")


WEAKEST = (
    f"kind = ? AND status IN {ACTIVE} "
    "ORDER BY refused DESC, utility, status = 'promoted', trust, changed, number LIMIT 1"
)


def _strength(row: Row) -> tuple[bool, float, bool, float, str, int]:
    return not row.refused, row.utility, row.status == "promoted", row.trust, row.changed, row.number


def room(tables: Tables, kind: str, bound: int) -> int:
    """Return how many units of a kind can be added before one is archived that no test has refused."""
    free = []
    for kinds in _kinds(kind):
        refused = tables.table("memory_units").count_where(
            f"kind IN (SELECT value FROM json_each(?)) AND status IN {ACTIVE} AND refused = 1",  # noqa: S608 - constant
            [json.dumps(kinds)],
        )
        free.append(bound - _active(tables, kinds) + refused)
    return int(max(0, min(free)))


def _kinds(kind: str) -> list[tuple[str, ...]]:
    """Return for each kind that a unit counts for the kinds that are counted with it."""
    return [(one, PAIR) if one in PAIR_KINDS else (one,) for one in (PAIR_KINDS if kind == PAIR else (kind,))]


def _active(tables: Tables, kinds: Sequence[str]) -> int:
    sql = "SELECT coalesce(sum(units), 0) FROM memory_active WHERE kind IN (SELECT value FROM json_each(?))"
    (active,) = tables.execute(sql, (json.dumps(kinds),)).fetchone()
    return int(active)


# ----------------------------------------------------------------------------------------- forgetting

ONLY_MADE_OF = "id IN (SELECT owner FROM memory_origins GROUP BY owner HAVING min(trace_id = ?1))"
"""Units that came from one trace alone."""

PURPOSES = """
SELECT json_extract(purpose, '$') AS purpose FROM traces WHERE {traces} UNION
SELECT json_extract(pair, '$.purpose') FROM memory_units WHERE pair IS NOT NULL AND {units}
AND json_extract(pair, '$.construction') <> 'other_purpose'
"""
"""The purposes of traces, as far as they are stored."""

ELSEWHERE = f"""
NOT {origins.MADE_OF} AND pair IS NOT NULL AND json_extract(pair, '$.construction') = 'other_purpose'
AND json_extract(pair, '$.purpose') IN (
    SELECT purpose FROM ({PURPOSES.format(traces="id = ?1", units=origins.MADE_OF)})
    EXCEPT SELECT purpose FROM ({PURPOSES.format(traces="id <> ?1", units=f"NOT {ONLY_MADE_OF}")})
) ORDER BY id
"""  # noqa: S608 - constants of this module
"""Pairs of other traces that look at their step under a purpose that one trace alone has."""

ASKED = """
key IN (SELECT key FROM calls WHERE substr(sample, 1, instr(sample, '/')) IN
('critic/', 'contrast/', 'judge/', 'meta_judge/'))
"""
"""Replies of models to calibration's questions, by who asked."""


def forget(tables: Tables, trace_id: str, *, calls: bool) -> Forgotten:
    """Remove what came from a trace; see ``SQLiteCards.forget``.

    A reply does not say whose steps its question showed: worked examples and other purposes come from other
    traces than the step that was judged. So either all replies go or none.
    """
    found = rows(tables, f"{origins.MADE_OF} ORDER BY id", (trace_id,))
    found += rows(tables, ELSEWHERE, (trace_id,))
    removed = sum(len(cards(tables, row)) for row in found)
    sql = f"DELETE FROM memory_anchors WHERE {origins.MADE_OF} RETURNING id"  # noqa: S608 - constant
    anchored = [anchor for (anchor,) in tables.execute(sql, (trace_id,)).fetchall()]
    _remove(tables, "memory_units", "id", [row.id for row in found])
    _remove(tables, "memory_origins", "owner", [*anchored, *(row.id for row in found)])
    events = tables.execute("DELETE FROM trace_events WHERE trace_id = ?", (trace_id,)).rowcount
    known = tables.execute("DELETE FROM traces WHERE id = ?", (trace_id,)).rowcount
    if found:
        tables.table("memory_units").optimize()
    replies = tables.execute(f"DELETE FROM replies WHERE {ASKED}").rowcount if calls else 0  # noqa: S608 - constant
    return Forgotten(
        trace_id=trace_id,
        trace=known > 0,
        events=events,
        unit_ids=tuple(row.id for row in found),
        cards=removed,
        anchors=len(anchored),
        replies=replies,
        replies_left=tables.table("replies").count_where(ASKED),
    )


def _remove(tables: Tables, table: str, column: str, ids: Iterable[str]) -> None:
    where = f"{column} IN (SELECT value FROM json_each(?))"  # noqa: S608 - constants of this module
    tables.table(table).delete_where(where, [json.dumps(list(ids))])
