"""Tests of batches: recorded before their alpha is chosen, counted by their traces, closed with evidence."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Literal

from reflact.errors import DataError
from reflact.memory import lifecycle, rows
from reflact.memory.cards import (
    TraceIdentity,
    compute_fingerprint,
    compute_utility,
    count_tests,
    find_inconsistency,
)
from reflact.memory.models import BatchTest, PromotionEvidence
from reflact.memory.rows import decode_value, encode_value
from reflact.store.database import Tables
from reflact.types import canonical_json

MEASURED_HARM = "measured harm"
"""The reason of a pair that a ``demote`` test took back."""

UNCHANGED_CONDITION = """
id IN (SELECT value FROM json_each(?)) AND number NOT IN (
    SELECT pair FROM memory_history
    WHERE sequence > (SELECT first_history_row FROM memory_tests WHERE number = ?)
) ORDER BY id
"""
"""Pairs of a batch that have not changed since their test was opened."""


def open_test(
    tables: Tables,
    pair_ids: tuple[str, ...],
    *,
    holdout_id: str,
    traces: Collection[TraceIdentity],
    kind: Literal["promote", "demote"],
    now: datetime,
) -> BatchTest:
    """Record a test; see ``MemoryStore.open_test``."""
    if not traces:
        raise DataError(
            "a batch is tested on held-out traces, and tests are counted by them; name the traces"
        )
    if not pair_ids or len(set(pair_ids)) < len(pair_ids):
        raise DataError("a batch must name at least one pair, and each pair once")
    trace_ids = {trace.id for trace in traces}
    origins = rows.read_origins(tables, pair_ids)
    for row in rows.read_rows(tables, pair_ids):
        if kind == "demote" and row.status != "promoted":
            raise DataError(f"pair {row.id} is {row.status}; only promoted pairs can be measured again")
        if kind == "promote" and (row.status != "quarantined" or row.reason is not None):
            review = (
                f" and needs review ({row.reason}); release it first" if row.status == "quarantined" else ""
            )
            raise DataError(f"pair {row.id} is {row.status}{review}; only quarantined pairs can be tested")
        for origin in origins[row.id]:
            if origin.trace_id in trace_ids:
                raise DataError(
                    f"pair {row.id} was made of trace {origin.trace_id}, which is held out; a trace cannot "
                    "test a pair that came from it"
                )
    earlier = read_tests(tables)
    test = BatchTest(
        number=len(earlier) + 1,
        holdout_id=holdout_id,
        n_earlier_tests=count_tests(earlier, traces),
        pair_ids=pair_ids,
        kind=kind,
        content_fingerprints=tuple(sorted({trace.fingerprint for trace in traces})),
        name_fingerprints=tuple(sorted({compute_fingerprint(trace.id) for trace in traces})),
        at=now,
    )
    (last_change,) = tables.execute("SELECT coalesce(max(sequence), 0) FROM memory_history").fetchone()
    record = {"number": test.number, "test": encode_value(test), "first_history_row": last_change}
    tables.table("memory_tests").insert(record)
    return test


def close_test(tables: Tables, number: int, evidence: PromotionEvidence, *, now: datetime) -> None:
    """Store the result of a test and change the pairs; see ``MemoryStore.close_test``."""
    test = next((one for one in read_tests(tables) if one.number == number), None)
    if test is None or test.evidence is not None:
        state = "was never opened" if test is None else "is over"
        raise DataError(f"test {number} {state}; open a test for each batch")
    check_evidence(test, evidence)
    batch = canonical_json(list(test.pair_ids))
    tables.table("memory_tests").update(number, {"evidence": encode_value(evidence)})
    tables.execute(
        "UPDATE memory_pairs SET utility = ? WHERE id IN (SELECT value FROM json_each(?))",
        (compute_utility(evidence), batch),
    )
    for row in rows.select_rows(tables, UNCHANGED_CONDITION, (batch, number)):
        if test.kind == "promote" and evidence.passed_test:
            lifecycle.change_status(tables, row, "promoted", now=now, test=number, evidence=evidence)
        elif test.kind == "promote":
            tables.table("memory_pairs").update(row.number, {"failed_test": 1})
        elif not evidence.passed_test:
            lifecycle.change_status(tables, row, "quarantined", now=now, reason=MEASURED_HARM, test=number)


def check_evidence(test: BatchTest, evidence: PromotionEvidence) -> None:
    """Check that evidence can be the result of a test; DataError if it names another or contradicts itself."""
    if evidence.pair_ids != test.pair_ids or evidence.n_earlier_tests != test.n_earlier_tests:
        raise DataError(
            f"the evidence is not that of test {test.number}, which has {len(test.pair_ids)} pairs and "
            f"{test.n_earlier_tests} earlier tests on its traces; pass the evidence of the test that you opened"
        )
    problem = find_inconsistency(evidence, test.kind)
    if problem is None and evidence.n_traces > len(test.content_fingerprints):
        problem = (
            f"it compares {evidence.n_traces} traces, and {len(test.content_fingerprints)} were held out"
        )
    if problem is not None:
        raise DataError(f"the evidence does not fit test {test.number}: {problem}; test the batch again")


def read_tests(tables: Tables) -> tuple[BatchTest, ...]:
    """Return all tests in their order."""
    return tuple(
        decode_value(BatchTest, test, f"test {number}").model_copy(
            update={
                "evidence": evidence
                and decode_value(PromotionEvidence, evidence, f"evidence of test {number}")
            }
        )
        for number, test, evidence in tables.execute(
            "SELECT number, test, evidence FROM memory_tests ORDER BY number"
        ).fetchall()
    )
