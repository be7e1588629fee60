"""How units change, within one transaction: stored, moved from state to state, edited, retired, forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime

from reflact.errors import DataError
from reflact.memory import rows as origins
from reflact.memory.cards import ACTIVE_STATUSES, PAIR_KINDS, ScanFinding, check_status_change, subject_hash
from reflact.memory.encoding import encode_value, format_time
from reflact.memory.models import CardStatus, MemoryCard, Origin, PromotionEvidence
from reflact.memory.protocols import ForgetResult, Submission
from reflact.memory.rows import (
    PAIR_UNIT,
    CardText,
    Unit,
    UnitRow,
    parse_scope,
    read_cards,
    read_units,
    select_rows,
)
from reflact.memory.search import build_index_text, build_tags
from reflact.store.database import Tables


def submit_unit(
    tables: Tables,
    unit: Unit,
    finding: ScanFinding | None,
    unit_origins: Sequence[Origin],
    *,
    max_active: int,
    now: datetime,
) -> Submission:
    """Store a unit that was scanned, or add what it was made of to one that is there already."""
    barred = origins.find_exclusion(tables, unit.pair, unit_origins)
    if barred is not None:
        return Submission(unit_id=unit.id, is_new=False, status="rejected", reason=barred)
    known = select_rows(tables, "id = ?", (unit.id,))
    if not known:
        status, reason = choose_status(finding)
        _insert_unit(tables, unit, status, reason, now)
        (row,) = read_units(tables, [unit.id])
        _write_history(tables, row, (None, "candidate", None), ("candidate", status, reason), now=now)
    origins.add_origins(tables, unit.id, unit_origins)
    if not known:
        archive_weakest(tables, unit.kind, max_active, now)
    (row,) = read_units(tables, [unit.id])
    return Submission(unit_id=unit.id, is_new=not known, status=row.status, reason=row.reason)


def _insert_unit(tables: Tables, unit: Unit, status: CardStatus, reason: str | None, now: datetime) -> None:
    first, at = unit.cards[0], format_time(now)
    stored = tables.table("memory_units").insert(
        {
            "id": unit.id,
            "kind": unit.kind,
            "status": status,
            "reason": reason,
            "version": first.version,
            "trust": first.trust,
            "created_by": first.created_by,
            "created_at": at,
            "changed_at": at,
            "subject": None if unit.pair is None else subject_hash(unit.pair),
            "scope": encode_value(first.scope),
            "provenance": encode_value(first.provenance),
            "pair": None if unit.pair is None else encode_value(unit.pair),
            "tags": build_tags(status, unit.kinds, first.scope),
            "words": build_index_text(unit.card_texts),
        }
    )
    tables.table("memory_cards").insert_all(
        {
            "id": card.id,
            "unit": stored.last_pk,
            "kind": card.kind,
            "text": encode_value(CardText.from_card(card)),
        }
        for card in unit.cards
    )


def _write_history(
    tables: Tables,
    row: UnitRow,
    *changes: tuple[CardStatus | None, CardStatus, str | None],
    now: datetime,
    test: int | None = None,
) -> None:
    """Write lines of a unit's history: the state before, the state after, the reason."""
    same = {"unit": row.number, "test_number": test, "version": row.version, "at": format_time(now)}
    tables.table("memory_history").insert_all(
        {"before": before, "after": after, "reason": reason, **same} for before, after, reason in changes
    )


def choose_status(finding: ScanFinding | None) -> tuple[CardStatus, str | None]:
    """Return the state to which a scan's finding brings a candidate, and the reason that goes with it."""
    if finding is None:
        return "quarantined", None
    return ("rejected" if finding.verdict == "reject" else "quarantined"), finding.rule


def change_status(
    tables: Tables,
    row: UnitRow,
    after: CardStatus,
    *,
    now: datetime,
    reason: str | None = None,
    test: int | None = None,
    evidence: PromotionEvidence | None = None,
) -> None:
    """Change a unit's state, if it may.

    Raises:
        DataError: It may not; names the unit.
    """
    try:
        check_status_change(row.status, after, evidence)
    except DataError as error:
        raise DataError(f"unit {row.id}: {error}") from None
    write_status(tables, row, after, now=now, reason=reason, test=test)


def write_status(
    tables: Tables,
    row: UnitRow,
    after: CardStatus,
    *,
    now: datetime,
    reason: str | None = None,
    test: int | None = None,
) -> None:
    """Write a state with its tags and its line of history; what a test said of the unit before is over."""
    kinds = PAIR_KINDS if row.kind == PAIR_UNIT else (row.kind,)
    named = build_tags(after, kinds, parse_scope(row))  # type: ignore[arg-type]
    tables.table("memory_units").update(
        row.number,
        {"status": after, "reason": reason, "failed_test": 0, "changed_at": format_time(now), "tags": named},
    )
    _write_history(tables, row, (row.status, after, reason), now=now, test=test)


def edit_unit(
    tables: Tables,
    row: UnitRow,
    edited_cards: Sequence[MemoryCard],
    finding: ScanFinding | None,
    *,
    now: datetime,
) -> None:
    """Write what a unit's cards say now; it is a candidate again, one version up, with what a scan found."""
    for card in edited_cards:
        tables.table("memory_cards").update(card.id, {"text": encode_value(CardText.from_card(card))})
    said = Unit(row.id, tuple(edited_cards), None).card_texts
    edited = row._replace(version=row.version + 1)
    tables.table("memory_units").update(
        row.number, {"version": edited.version, "words": build_index_text(said), "failed_test": 0}
    )
    _write_history(tables, edited, (row.status, "candidate", "edited"), now=now)
    status, reason = choose_status(finding)
    write_status(tables, edited._replace(status="candidate"), status, now=now, reason=reason)


def release_unit(tables: Tables, row: UnitRow, *, reason: str, now: datetime) -> None:
    """Let a unit be tested that was held.

    Raises:
        DataError: It is not held.
    """
    if row.status != "quarantined" or row.reason is None:
        raise DataError(f"unit {row.id} is {row.status} and not held; there is nothing to release")
    tables.table("memory_units").update(row.number, {"reason": None, "changed_at": format_time(now)})
    _write_history(tables, row, (row.status, row.status, reason), now=now)


# --------------------------------------------------------------------------------------------- bounds


def archive_weakest(tables: Tables, kind: str, max_active: int, now: datetime) -> None:
    """Archive the weakest active units of a kind until the bound holds; a pair counts for both its kinds.

    The weakest is one that a test refused; of several, or if there is none, the one of the least measured
    utility; of equals one that is not promoted, then the least trusted, then the one that changed least
    lately.
    """
    for kinds in _group_kinds(kind):
        for _ in range(_count_active(tables, kinds) - max_active):
            weakest = [row for one in kinds for row in select_rows(tables, WEAKEST_CONDITION, (one,))]
            change_status(tables, min(weakest, key=_strength_key), "archived", now=now, reason="bound")


WEAKEST_CONDITION = (
    f"kind = ? AND status IN {ACTIVE_STATUSES} "
    "ORDER BY failed_test DESC, utility, status = 'promoted', trust, changed_at, number LIMIT 1"
)


def _strength_key(row: UnitRow) -> tuple[bool, float, bool, float, str, int]:
    return not row.failed_test, row.utility, row.status == "promoted", row.trust, row.changed_at, row.number


def count_free(tables: Tables, kind: str, max_active: int) -> int:
    """Return how many units of a kind can be added before one is archived that no test has refused."""
    free = []
    for kinds in _group_kinds(kind):
        refused = tables.table("memory_units").count_where(
            f"kind IN (SELECT value FROM json_each(?)) AND status IN {ACTIVE_STATUSES} AND failed_test = 1",  # noqa: S608 - constant
            [json.dumps(kinds)],
        )
        free.append(max_active - _count_active(tables, kinds) + refused)
    return int(max(0, min(free)))


def _group_kinds(kind: str) -> list[tuple[str, ...]]:
    """Return for each kind that a unit counts for the kinds that are counted with it."""
    return [
        (one, PAIR_UNIT) if one in PAIR_KINDS else (one,)
        for one in (PAIR_KINDS if kind == PAIR_UNIT else (kind,))
    ]


def _count_active(tables: Tables, kinds: Sequence[str]) -> int:
    sql = "SELECT coalesce(sum(units), 0) FROM memory_active WHERE kind IN (SELECT value FROM json_each(?))"
    (active,) = tables.execute(sql, (json.dumps(kinds),)).fetchone()
    return int(active)


# ----------------------------------------------------------------------------------------- forgetting

ONLY_FROM_TRACE = "id IN (SELECT owner FROM memory_origins GROUP BY owner HAVING min(trace_id = ?1))"
"""Units that came from one trace alone."""

PURPOSES_QUERY = """
SELECT json_extract(purpose, '$') AS purpose FROM traces WHERE {traces} UNION
SELECT json_extract(pair, '$.purpose') FROM memory_units WHERE pair IS NOT NULL AND {units}
AND json_extract(pair, '$.construction') <> 'other_purpose'
"""
"""The purposes of traces, as far as they are stored."""

OTHER_TRACES_CONDITION = f"""
NOT {origins.FROM_TRACE} AND pair IS NOT NULL AND json_extract(pair, '$.construction') = 'other_purpose'
AND json_extract(pair, '$.purpose') IN (
    SELECT purpose FROM ({PURPOSES_QUERY.format(traces="id = ?1", units=origins.FROM_TRACE)})
    EXCEPT SELECT purpose FROM ({PURPOSES_QUERY.format(traces="id <> ?1", units=f"NOT {ONLY_FROM_TRACE}")})
) ORDER BY id
"""  # noqa: S608 - constants of this module
"""Pairs of other traces that look at their step under a purpose that one trace alone has."""

CALIBRATION_RESPONSES = """
key IN (SELECT key FROM calls WHERE substr(call_id, 1, instr(call_id, '/')) IN
('critic/', 'contrast/', 'judge/', 'meta_judge/'))
"""
"""Replies of models to calibration's questions, by who asked."""


def forget_trace(tables: Tables, trace_id: str, *, calls: bool) -> ForgetResult:
    """Remove what came from a trace; see ``SQLiteCards.forget``.

    A reply does not say whose steps its question showed: worked examples and other purposes come from other
    traces than the step that was judged. So either all replies go or none.
    """
    found = select_rows(tables, f"{origins.FROM_TRACE} ORDER BY id", (trace_id,))
    found += select_rows(tables, OTHER_TRACES_CONDITION, (trace_id,))
    removed = sum(len(read_cards(tables, row)) for row in found)
    sql = f"DELETE FROM memory_anchors WHERE {origins.FROM_TRACE} RETURNING id"  # noqa: S608 - constant
    anchored = [anchor for (anchor,) in tables.execute(sql, (trace_id,)).fetchall()]
    _delete_rows(tables, "memory_units", "id", [row.id for row in found])
    _delete_rows(tables, "memory_origins", "owner", [*anchored, *(row.id for row in found)])
    events = tables.execute("DELETE FROM trace_events WHERE trace_id = ?", (trace_id,)).rowcount
    known = tables.execute("DELETE FROM traces WHERE id = ?", (trace_id,)).rowcount
    if found:
        tables.table("memory_units").optimize()
    replies = tables.execute(f"DELETE FROM replies WHERE {CALIBRATION_RESPONSES}").rowcount if calls else 0  # noqa: S608 - constant
    return ForgetResult(
        trace_id=trace_id,
        trace_removed=known > 0,
        n_events=events,
        unit_ids=tuple(row.id for row in found),
        n_cards=removed,
        n_anchors=len(anchored),
        n_responses=replies,
        n_responses_left=tables.table("replies").count_where(CALIBRATION_RESPONSES),
    )


def _delete_rows(tables: Tables, table: str, column: str, ids: Iterable[str]) -> None:
    where = f"{column} IN (SELECT value FROM json_each(?))"  # noqa: S608 - constants of this module
    tables.table(table).delete_where(where, [json.dumps(list(ids))])
