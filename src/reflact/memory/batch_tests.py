"""Tests of batches: opened before their alpha is chosen, counted by traces, closed with
evidence.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Literal

from reflact.errors import DataError
from reflact.memory.cards import (
    TraceIdentity,
    compute_fingerprint,
    compute_utility,
    count_tests,
    find_inconsistency,
)
from reflact.memory.models import BatchTest, PromotionEvidence, StoredPair
from reflact.memory.pairs import (
    PairWriter,
    decode_value,
    encode_value,
    format_time,
    read_pair,
    select_pairs,
)
from reflact.store.database import Tables
from reflact.types import canonical_json

# The reason of a pair that a ``demote`` test took back.
MEASURED_HARM = "measured harm"

# Pairs of a batch that have not changed since their test was opened.
UNCHANGED_CONDITION = "id IN (SELECT value FROM json_each(?)) AND changed_at <= ? ORDER BY id"


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
    for pair_id in pair_ids:
        _check_testable(read_pair(tables, pair_id), trace_ids, kind)
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
    tables.table("memory_tests").insert({"number": test.number, "test": encode_value(test)})
    return test


def _check_testable(
    stored: StoredPair, trace_ids: Collection[str], kind: Literal["promote", "demote"]
) -> None:
    """Check that a pair may be tested on traces; DataError says why not."""
    pair_id = stored.pair.id
    status = stored.status
    if kind == "demote" and status != "promoted":
        raise DataError(f"pair {pair_id} is {status}; only promoted pairs can be measured again")
    if kind == "promote" and status != "quarantined":
        raise DataError(f"pair {pair_id} is {status}; only quarantined pairs can be tested")
    if kind == "promote" and stored.needs_review:
        raise DataError(f"pair {pair_id} needs review ({stored.reason}); release it first")
    for origin in stored.origins:
        if origin.trace_id in trace_ids:
            raise DataError(
                f"pair {pair_id} was made of trace {origin.trace_id}, which is held out; a trace "
                "cannot test a pair that came from it"
            )


def close_test(writer: PairWriter, number: int, evidence: PromotionEvidence) -> None:
    """Store the result of a test and change the pairs; see ``MemoryStore.close_test``."""
    tables = writer.tables
    test = next((one for one in read_tests(tables) if one.number == number), None)
    if test is None:
        raise DataError(f"test {number} was never opened; open a test for each batch")
    if test.evidence is not None:
        raise DataError(f"test {number} is over; open a test for each batch")
    _check_evidence(test, evidence)
    batch = canonical_json(list(test.pair_ids))
    tables.table("memory_tests").update(number, {"evidence": encode_value(evidence)})
    tables.execute(
        "UPDATE memory_pairs SET utility = ? WHERE id IN (SELECT value FROM json_each(?))",
        (compute_utility(evidence), batch),
    )
    for stored in select_pairs(tables, UNCHANGED_CONDITION, (batch, format_time(test.at))):
        if test.kind == "promote" and evidence.passed_test:
            writer.move(stored, "promoted")
        elif test.kind == "promote":
            tables.execute(
                "UPDATE memory_pairs SET failed_test = 1 WHERE id = ?", (stored.pair.id,)
            )
        elif not evidence.passed_test:
            writer.move(stored, "quarantined", MEASURED_HARM)


def _check_evidence(test: BatchTest, evidence: PromotionEvidence) -> None:
    """Check that evidence can be the result of a test; DataError says why not."""
    if evidence.pair_ids != test.pair_ids or evidence.n_earlier_tests != test.n_earlier_tests:
        raise DataError(
            f"the evidence is not that of test {test.number}, which has {len(test.pair_ids)} pairs "
            f"and {test.n_earlier_tests} earlier tests on its traces; pass the evidence of the "
            "test that you opened"
        )
    problem = find_inconsistency(evidence, test.kind)
    n_traces = len(test.content_fingerprints)
    if problem is None and evidence.n_traces > n_traces:
        problem = f"it compares {evidence.n_traces} traces, and {n_traces} were held out"
    if problem is not None:
        raise DataError(
            f"the evidence does not fit test {test.number}: {problem}; test the batch again"
        )


def read_tests(tables: Tables) -> tuple[BatchTest, ...]:
    """Return all tests in their order."""
    tests = []
    sql = "SELECT number, test, evidence FROM memory_tests ORDER BY number"
    for number, stored, evidence in tables.execute(sql).fetchall():
        test = decode_value(BatchTest, stored, f"test {number}")
        if evidence is not None:
            decoded = decode_value(PromotionEvidence, evidence, f"evidence of test {number}")
            test = test.model_copy(update={"evidence": decoded})
        tests.append(test)
    return tuple(tests)
