"""Changes of pairs within one transaction: submission, status changes, archiving, and forgetting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime

from reflact.errors import DataError
from reflact.memory import rows
from reflact.memory.cards import ACTIVE_STATUSES, ScanFinding, build_search_text, check_status_change
from reflact.memory.models import (
    CardStatus,
    ContrastPair,
    ForgetResult,
    Origin,
    PromotionEvidence,
    Submission,
)
from reflact.memory.rows import FROM_TRACE, PairRow, encode_value, format_time, read_rows, select_rows
from reflact.store.database import Tables


def submit_pair(
    tables: Tables,
    pair: ContrastPair,
    finding: ScanFinding | None,
    origins: Sequence[Origin],
    *,
    created_by: str,
    max_active: int,
    now: datetime,
) -> Submission:
    """Store a scanned pair and archive the weakest; if it is stored already, only add its origins."""
    exclusion = rows.find_exclusion(tables, pair, origins)
    if exclusion is not None:
        return Submission(pair_id=pair.id, is_new=False, status="rejected", reason=exclusion)
    is_new = not select_rows(tables, "id = ?", (pair.id,))
    if is_new:
        status, reason = _choose_status(finding)
        at = format_time(now)
        tables.table("memory_pairs").insert(
            {
                "id": pair.id,
                "status": status,
                "reason": reason,
                "created_by": created_by,
                "created_at": at,
                "changed_at": at,
                "subject": pair.hashes.subject,
                "pair": encode_value(pair),
                "words": build_search_text(pair),
            }
        )
        (row,) = read_rows(tables, [pair.id])
        _write_history(tables, row, (None, "candidate", None), ("candidate", status, reason), now=now)
    rows.add_origins(tables, pair.id, origins)
    if is_new:
        archive_weakest(tables, max_active, now)
    (row,) = read_rows(tables, [pair.id])
    return Submission(pair_id=row.id, is_new=is_new, status=row.status, reason=row.reason)


def _write_history(
    tables: Tables,
    row: PairRow,
    *changes: tuple[CardStatus | None, CardStatus, str | None],
    now: datetime,
    test: int | None = None,
) -> None:
    """Write status changes of a pair, each as the earlier status, the later status, and the reason."""
    shared = {"pair": row.number, "test_number": test, "at": format_time(now)}
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
    row: PairRow,
    after: CardStatus,
    *,
    now: datetime,
    reason: str | None = None,
    test: int | None = None,
    evidence: PromotionEvidence | None = None,
) -> None:
    """Change the status of a pair, and clear the mark of a failed test; DataError if it cannot follow."""
    try:
        check_status_change(row.status, after, evidence)
    except DataError as error:
        raise DataError(f"pair {row.id}: {error}") from None
    tables.table("memory_pairs").update(
        row.number, {"status": after, "reason": reason, "failed_test": 0, "changed_at": format_time(now)}
    )
    _write_history(tables, row, (row.status, after, reason), now=now, test=test)


def release_pair(tables: Tables, pair_id: str, *, reason: str, now: datetime) -> None:
    """Allow tests of a pair that needed review; see ``MemoryStore.release``."""
    (row,) = read_rows(tables, [pair_id])
    if row.status != "quarantined" or row.reason is None:
        raise DataError(f"pair {row.id} is {row.status} and needs no review; there is nothing to release")
    tables.table("memory_pairs").update(row.number, {"reason": None, "changed_at": format_time(now)})
    _write_history(tables, row, (row.status, row.status, reason), now=now)


# --------------------------------------------------------------------------------------------- bounds


ACTIVE = f"status IN {ACTIVE_STATUSES}"

WEAKEST_CONDITION = (
    f"{ACTIVE} ORDER BY failed_test DESC, utility, status = 'promoted', changed_at, number LIMIT ?"
)
"""The weakest active pairs, which an index gives at once."""


def archive_weakest(tables: Tables, max_active: int, now: datetime) -> None:
    """Archive the weakest active pairs until the bound is met.

    Pairs that failed a test are archived first. Then the order is: lowest measured utility, not promoted, and the
    longest time without a change.
    """
    surplus = max(0, tables.table("memory_pairs").count_where(ACTIVE) - max_active)
    for row in select_rows(tables, WEAKEST_CONDITION, (surplus,)):
        change_status(tables, row, "archived", now=now, reason="bound")


def count_free(tables: Tables, max_active: int) -> int:
    """Return how many pairs can be added before one is archived that has not failed a test."""
    return max(0, max_active - tables.table("memory_pairs").count_where(f"{ACTIVE} AND failed_test = 0"))


# ----------------------------------------------------------------------------------------- forgetting

ONLY_FROM_TRACE = "id IN (SELECT owner FROM memory_origins GROUP BY owner HAVING min(trace_id = ?1))"
"""Pairs that came from one trace alone."""

PURPOSES_QUERY = """
SELECT json_extract(purpose, '$') AS purpose FROM traces WHERE {traces} UNION
SELECT json_extract(pair, '$.purpose') FROM memory_pairs WHERE {pairs}
AND json_extract(pair, '$.construction') <> 'other_purpose'
"""
"""The purposes of traces, from the traces themselves and from pairs that were made of them."""

OTHER_TRACES_CONDITION = f"""
NOT {FROM_TRACE} AND json_extract(pair, '$.construction') = 'other_purpose'
AND json_extract(pair, '$.purpose') IN (
    SELECT purpose FROM ({PURPOSES_QUERY.format(traces="id = ?1", pairs=FROM_TRACE)})
    EXCEPT SELECT purpose FROM ({PURPOSES_QUERY.format(traces="id <> ?1", pairs=f"NOT {ONLY_FROM_TRACE}")})
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
    pairs = select_rows(tables, f"{FROM_TRACE} ORDER BY id", (trace_id,))
    pairs += select_rows(tables, OTHER_TRACES_CONDITION, (trace_id,))
    sql = f"DELETE FROM memory_anchors WHERE {FROM_TRACE} RETURNING id"  # noqa: S608 - constant
    anchors = [anchor for (anchor,) in tables.execute(sql, (trace_id,)).fetchall()]
    _delete_rows(tables, "memory_pairs", "id", [row.id for row in pairs])
    _delete_rows(tables, "memory_origins", "owner", [*anchors, *(row.id for row in pairs)])
    n_events = tables.execute("DELETE FROM trace_events WHERE trace_id = ?", (trace_id,)).rowcount
    n_traces = tables.execute("DELETE FROM traces WHERE id = ?", (trace_id,)).rowcount
    if pairs:
        tables.table("memory_pairs").optimize()
    sql = f"DELETE FROM responses WHERE {CALIBRATION_RESPONSES}"  # noqa: S608 - constant
    n_responses = tables.execute(sql).rowcount if calls else 0
    return ForgetResult(
        trace_id=trace_id,
        trace_removed=n_traces > 0,
        n_events=n_events,
        pair_ids=tuple(row.id for row in pairs),
        n_anchors=len(anchors),
        n_responses=n_responses,
        n_responses_left=tables.table("responses").count_where(CALIBRATION_RESPONSES),
    )


def _delete_rows(tables: Tables, table: str, column: str, ids: Iterable[str]) -> None:
    where = f"{column} IN (SELECT value FROM json_each(?))"  # noqa: S608 - constants of this module
    tables.table(table).delete_where(where, [json.dumps(list(ids))])
