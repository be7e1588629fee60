"""Changes of units within one transaction: submission, status changes, edits, archiving, and forgetting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from reflact.errors import DataError
from reflact.memory import rows
from reflact.memory.cards import ACTIVE_STATUSES, PAIR_KINDS, ScanFinding, Scanner, check_status_change
from reflact.memory.models import CardStatus, ForgetResult, Origin, PromotionEvidence, Submission
from reflact.memory.rows import (
    FROM_TRACE,
    PAIR_UNIT,
    Unit,
    UnitRow,
    encode_texts,
    encode_value,
    format_time,
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
    """Store a scanned unit and archive the weakest; if it is stored already, only add its origins."""
    exclusion = rows.find_exclusion(tables, unit.pair, unit_origins)
    if exclusion is not None:
        return Submission(unit_id=unit.id, is_new=False, status="rejected", reason=exclusion)
    is_new = not select_rows(tables, "id = ?", (unit.id,))
    if is_new:
        status, reason = _choose_status(finding)
        _insert_unit(tables, unit, status, reason, now)
        (row,) = read_units(tables, [unit.id])
        _write_history(tables, row, (None, "candidate", None), ("candidate", status, reason), now=now)
    rows.add_origins(tables, unit.id, unit_origins)
    if is_new:
        archive_weakest(tables, unit.kind, max_active, now)
    return _describe_unit(tables, unit.id, is_new=is_new)


def _describe_unit(tables: Tables, unit_id: str, *, is_new: bool) -> Submission:
    (row,) = read_units(tables, [unit_id])
    return Submission(unit_id=row.id, is_new=is_new, status=row.status, reason=row.reason)


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
            "subject": None if unit.pair is None else unit.pair.hashes.subject,
            "scope": encode_value(first.scope),
            "provenance": encode_value(first.provenance),
            "pair": None if unit.pair is None else encode_value(unit.pair),
            "tags": build_tags(status, tuple(card.kind for card in unit.cards), first.scope),
            "words": build_index_text(unit.card_texts),
        }
    )
    tables.table("memory_cards").insert_all(
        {"id": card.id, "unit": stored.last_pk, "kind": card.kind, "text": encode_texts(card)}
        for card in unit.cards
    )


def _write_history(
    tables: Tables,
    row: UnitRow,
    *changes: tuple[CardStatus | None, CardStatus, str | None],
    now: datetime,
    test: int | None = None,
) -> None:
    """Write status changes of a unit, each as the earlier status, the later status, and the reason."""
    shared = {"unit": row.number, "test_number": test, "version": row.version, "at": format_time(now)}
    tables.table("memory_history").insert_all(
        {"before": before, "after": after, "reason": reason, **shared} for before, after, reason in changes
    )


def _choose_status(finding: ScanFinding | None) -> tuple[CardStatus, str | None]:
    """Return the status of a candidate after its scan, and the reason."""
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
    """Change the status of a unit, and clear the mark of a failed test; DataError if it cannot follow."""
    try:
        check_status_change(row.status, after, evidence)
    except DataError as error:
        raise DataError(f"unit {row.id}: {error}") from None
    kinds = PAIR_KINDS if row.kind == PAIR_UNIT else (row.kind,)
    tags = build_tags(after, kinds, row.parse_scope())  # type: ignore[arg-type]
    tables.table("memory_units").update(
        row.number,
        {"status": after, "reason": reason, "failed_test": 0, "changed_at": format_time(now), "tags": tags},
    )
    _write_history(tables, row, (row.status, after, reason), now=now, test=test)


def edit_card(
    tables: Tables, card_id: str, texts: Mapping[str, str], scan: Scanner, *, now: datetime
) -> Submission:
    """Change texts of a card; see ``MemoryStore.edit``."""
    found = select_rows(tables, "number = (SELECT unit FROM memory_cards WHERE id = ?)", (card_id,))
    if not found:
        raise DataError(f"the memory has no card {card_id}; list its cards with `reflact memory list`")
    row = found[0]
    if row.status not in {"quarantined", "promoted"}:
        raise DataError(f"card {card_id} is {row.status} and cannot be edited; submit another card")
    cards = tuple(
        card.model_copy(update=texts) if card.id == card_id else card for card in rows.read_cards(tables, row)
    )
    for card in cards:
        tables.table("memory_cards").update(card.id, {"text": encode_texts(card)})
    unit = Unit(row.id, cards, row.parse_pair())
    edited = row._replace(version=row.version + 1)
    tables.table("memory_units").update(
        row.number, {"version": edited.version, "words": build_index_text(unit.card_texts), "failed_test": 0}
    )
    _write_history(tables, edited, (row.status, "candidate", "edited"), now=now)
    status, reason = _choose_status(scan(unit.all_texts))
    change_status(tables, edited._replace(status="candidate"), status, now=now, reason=reason)
    return _describe_unit(tables, row.id, is_new=False)


def release_unit(tables: Tables, unit_id: str, *, reason: str, now: datetime) -> None:
    """Allow tests of a unit that needed review; see ``MemoryStore.release``."""
    (row,) = read_units(tables, [unit_id])
    if row.status != "quarantined" or row.reason is None:
        raise DataError(f"unit {row.id} is {row.status} and needs no review; there is nothing to release")
    tables.table("memory_units").update(row.number, {"reason": None, "changed_at": format_time(now)})
    _write_history(tables, row, (row.status, row.status, reason), now=now)


# --------------------------------------------------------------------------------------------- bounds


WEAKEST_CONDITION = (
    f"kind = ? AND status IN {ACTIVE_STATUSES} "
    "ORDER BY failed_test DESC, utility, status = 'promoted', trust, changed_at, number LIMIT 1"
)
"""The weakest active unit of a kind, which an index gives at once."""


def archive_weakest(tables: Tables, kind: str, max_active: int, now: datetime) -> None:
    """Archive the weakest active units of a kind until the bound is met; a pair counts for both its kinds.

    Units that failed a test are archived first. Then the order is: lowest measured utility, not promoted,
    lowest trust, and the longest time without a change.
    """
    for kinds in _group_kinds(kind):
        for _ in range(_count_active(tables, kinds) - max_active):
            weakest = [row for one in kinds for row in select_rows(tables, WEAKEST_CONDITION, (one,))]
            change_status(tables, min(weakest, key=_strength_key), "archived", now=now, reason="bound")


def _strength_key(row: UnitRow) -> tuple[bool, float, bool, float, str, int]:
    return not row.failed_test, row.utility, row.status == "promoted", row.trust, row.changed_at, row.number


def count_free(tables: Tables, kind: str, max_active: int) -> int:
    """Return how many units of a kind can be added before one is archived that has not failed a test."""
    failed = f"kind IN (SELECT value FROM json_each(?)) AND status IN {ACTIVE_STATUSES} AND failed_test = 1"  # noqa: S608 - constant
    free = (
        max_active
        - _count_active(tables, kinds)
        + tables.table("memory_units").count_where(failed, [json.dumps(kinds)])
        for kinds in _group_kinds(kind)
    )
    return max(0, min(free))


def _group_kinds(kind: str) -> list[tuple[str, ...]]:
    """Return, for each card kind that a unit counts for, the unit kinds that are counted together."""
    counted = PAIR_KINDS if kind == PAIR_UNIT else (kind,)
    return [(one, PAIR_UNIT) if one in PAIR_KINDS else (one,) for one in counted]


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
"""The purposes of traces, from the traces themselves and from pairs that were made of them."""

OTHER_TRACES_CONDITION = f"""
NOT {FROM_TRACE} AND pair IS NOT NULL AND json_extract(pair, '$.construction') = 'other_purpose'
AND json_extract(pair, '$.purpose') IN (
    SELECT purpose FROM ({PURPOSES_QUERY.format(traces="id = ?1", units=FROM_TRACE)})
    EXCEPT SELECT purpose FROM ({PURPOSES_QUERY.format(traces="id <> ?1", units=f"NOT {ONLY_FROM_TRACE}")})
) ORDER BY id
"""  # noqa: S608 - constants of this module
"""Pairs of other traces with a purpose that only one trace has."""

CALIBRATION_RESPONSES = """
key IN (SELECT key FROM calls WHERE substr(call_id, 1, instr(call_id, '/')) IN
('critic/', 'contrast/', 'judge/', 'meta_judge/'))
"""
"""Cached responses to questions of calibrations, by the role that asked."""


def forget_trace(tables: Tables, trace_id: str, *, calls: bool) -> ForgetResult:
    """Remove everything that came from a trace; see ``MemoryStore.forget``.

    A response does not record which traces its prompt showed, because worked examples and other purposes
    come from other traces. So either all responses are removed or none.
    """
    units = select_rows(tables, f"{FROM_TRACE} ORDER BY id", (trace_id,))
    units += select_rows(tables, OTHER_TRACES_CONDITION, (trace_id,))
    n_cards = sum(len(rows.read_cards(tables, row)) for row in units)
    sql = f"DELETE FROM memory_anchors WHERE {FROM_TRACE} RETURNING id"  # noqa: S608 - constant
    anchors = [anchor for (anchor,) in tables.execute(sql, (trace_id,)).fetchall()]
    _delete_rows(tables, "memory_units", "id", [row.id for row in units])
    _delete_rows(tables, "memory_origins", "owner", [*anchors, *(row.id for row in units)])
    n_events = tables.execute("DELETE FROM trace_events WHERE trace_id = ?", (trace_id,)).rowcount
    n_traces = tables.execute("DELETE FROM traces WHERE id = ?", (trace_id,)).rowcount
    if units:
        tables.table("memory_units").optimize()
    sql = f"DELETE FROM responses WHERE {CALIBRATION_RESPONSES}"  # noqa: S608 - constant
    n_responses = tables.execute(sql).rowcount if calls else 0
    return ForgetResult(
        trace_id=trace_id,
        trace_removed=n_traces > 0,
        n_events=n_events,
        unit_ids=tuple(row.id for row in units),
        n_cards=n_cards,
        n_anchors=len(anchors),
        n_responses=n_responses,
        n_responses_left=tables.table("responses").count_where(CALIBRATION_RESPONSES),
    )


def _delete_rows(tables: Tables, table: str, column: str, ids: Iterable[str]) -> None:
    where = f"{column} IN (SELECT value FROM json_each(?))"  # noqa: S608 - constants of this module
    tables.table(table).delete_where(where, [json.dumps(list(ids))])
