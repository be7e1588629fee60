"""Tests of batches: opened before their level is chosen, counted by the traces they are made on, closed."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime
from typing import Literal

from reflact.errors import DataError
from reflact.memory import lifecycle as changing
from reflact.memory import rows as origins
from reflact.memory import rows as units
from reflact.memory.cards import TraceIdentity, compute_fingerprint, compute_utility, find_inconsistency
from reflact.memory.encoding import decode_value, encode_value, format_time, parse_time
from reflact.memory.models import PromotionEvidence
from reflact.memory.protocols import BatchTest, count_tests
from reflact.memory.rows import UnitRow
from reflact.store.database import Tables
from reflact.types import canonical_json

MEASURED_HARM = "measured harm"
"""The reason of a unit that a later measurement took back."""


def open_test(
    tables: Tables,
    unit_ids: tuple[str, ...],
    *,
    holdout_id: str,
    traces: Collection[TraceIdentity],
    kind: Literal["promote", "demote"],
    now: datetime,
) -> BatchTest:
    """Record a test that begins; see ``SQLiteCards.open_test``."""
    if not traces:
        raise DataError("a batch is tested on held-out traces; name them, since tests are counted by them")
    if not unit_ids or len(set(unit_ids)) < len(unit_ids):
        raise DataError("a batch to be tested names at least one unit, and none twice")
    ids = {trace.id for trace in traces}
    made_of = origins.read_origins(tables, unit_ids)
    for row in units.read_units(tables, unit_ids):
        if kind == "demote" and row.status != "promoted":
            raise DataError(f"unit {row.id} is {row.status}; only what is promoted can be measured again")
        if kind == "promote" and (row.status != "quarantined" or row.reason is not None):
            held = f" and held ({row.reason}); release it first" if row.status == "quarantined" else ""
            raise DataError(f"unit {row.id} is {row.status}{held}; only what is quarantined can be tested")
        for origin in made_of[row.id]:
            if origin.trace_id in ids:
                raise DataError(
                    f"unit {row.id} was made of trace {origin.trace_id}, which is held out; no trace tests "
                    "what came from it"
                )
    before = read_tests(tables)
    test = BatchTest(
        number=len(before) + 1,
        holdout_id=holdout_id,
        n_earlier_tests=count_tests(before, traces),
        unit_ids=unit_ids,
        kind=kind,
        content_fingerprints=tuple(sorted({trace.fingerprint for trace in traces})),
        name_fingerprints=tuple(sorted({compute_fingerprint(trace.id) for trace in traces})),
        at=now,
    )
    (since,) = tables.execute("SELECT coalesce(max(sequence), 0) FROM memory_history").fetchone()
    tables.table("memory_tests").insert(
        {
            "number": test.number,
            "holdout_id": holdout_id,
            "n_earlier_tests": test.n_earlier_tests,
            "unit_ids": canonical_json(list(unit_ids)),
            "kind": kind,
            "content_fingerprints": canonical_json(list(test.content_fingerprints)),
            "name_fingerprints": canonical_json(list(test.name_fingerprints)),
            "first_history_row": since,
            "at": format_time(now),
        }
    )
    return test


def close_test(tables: Tables, number: int, evidence: PromotionEvidence, *, now: datetime) -> None:
    """Store how a test ended and do what follows; see ``SQLiteCards.close_test``."""
    test = next((one for one in read_tests(tables) if one.number == number), None)
    if test is None or test.evidence is not None:
        state = "was never opened" if test is None else "is over"
        raise DataError(f"test {number} {state}; open a test for each batch")
    check_evidence(test, evidence)
    tables.table("memory_tests").update(number, {"evidence": encode_value(evidence)})
    tables.execute(
        "UPDATE memory_units SET utility = ? WHERE id IN (SELECT value FROM json_each(?))",
        (compute_utility(evidence), canonical_json(list(test.unit_ids))),
    )
    for row in _read_unchanged_units(tables, test):
        if test.kind == "promote" and evidence.passed_test:
            changing.change_status(tables, row, "promoted", now=now, test=number, evidence=evidence)
        elif test.kind == "promote":
            tables.table("memory_units").update(row.number, {"failed_test": 1})
        elif not evidence.passed_test:
            changing.change_status(tables, row, "quarantined", now=now, reason=MEASURED_HARM, test=number)


def check_evidence(test: BatchTest, evidence: PromotionEvidence) -> None:
    """Refuse evidence that cannot be what a test found.

    Raises:
        DataError: It is of another batch or of other tests before it, or does not fit itself; says how.
    """
    if evidence.pair_ids != test.unit_ids or evidence.n_earlier_tests != test.n_earlier_tests:
        raise DataError(
            f"the evidence is not that of test {test.number}, which is of {len(test.unit_ids)} units after "
            f"{test.n_earlier_tests} others on its traces; test what was opened"
        )
    wrong = find_inconsistency(evidence, test.kind)
    if wrong is None and evidence.n_traces > len(test.content_fingerprints):
        wrong = f"it compares {evidence.n_traces} traces, and {len(test.content_fingerprints)} were held out"
    if wrong is not None:
        raise DataError(f"the evidence does not fit test {test.number}: {wrong}; test the batch again")


def _read_unchanged_units(tables: Tables, test: BatchTest) -> list[UnitRow]:
    """Return the units of a batch that are as they were when the test was opened."""
    where = (
        "id IN (SELECT value FROM json_each(?)) AND number NOT IN (SELECT unit FROM memory_history "
        "WHERE sequence > (SELECT first_history_row FROM memory_tests WHERE number = ?)) ORDER BY id"
    )
    return units.select_rows(tables, where, (canonical_json(list(test.unit_ids)), test.number))


def read_tests(tables: Tables) -> list[BatchTest]:
    """Return all tests in their order."""
    return [
        BatchTest(
            number=row["number"],
            holdout_id=row["holdout_id"],
            n_earlier_tests=row["n_earlier_tests"],
            unit_ids=tuple(json.loads(row["unit_ids"])),
            kind=row["kind"],
            content_fingerprints=tuple(json.loads(row["content_fingerprints"])),
            name_fingerprints=tuple(json.loads(row["name_fingerprints"])),
            evidence=row["evidence"]
            and decode_value(PromotionEvidence, row["evidence"], f"evidence of test {row['number']}"),
            at=parse_time(row["at"]),
        )
        for row in tables.table("memory_tests").rows_where(order_by="number")
    ]
