"""Tests of batches: opened before their level is chosen, counted by the traces they are made on, closed."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime
from typing import Literal

from reflact.errors import DataError
from reflact.memory import Promotion
from reflact.memory_cards import Recording, mark_of, misfit, utility_of
from reflact.memory_ports import BatchTest, count_tests
from reflact.store import changing, origins, units
from reflact.store.database import Tables
from reflact.store.encoding import read, stamp, time_of, written
from reflact.store.units import Row
from reflact.types import canonical_json

HELD_BY_TEST = "measured harm"
"""The reason of a unit that a later measurement took back."""


def open_test(
    tables: Tables,
    unit_ids: tuple[str, ...],
    *,
    held_out: str,
    traces: Collection[Recording],
    use: Literal["promote", "demote"],
    now: datetime,
) -> BatchTest:
    """Record a test that begins; see ``SQLiteCards.open_test``."""
    if not traces:
        raise DataError("a batch is tested on held-out traces; name them, since tests are counted by them")
    if not unit_ids or len(set(unit_ids)) < len(unit_ids):
        raise DataError("a batch to be tested names at least one unit, and none twice")
    ids = {trace.id for trace in traces}
    made_of = origins.of(tables, unit_ids)
    for row in units.units(tables, unit_ids):
        if use == "demote" and row.status != "promoted":
            raise DataError(f"unit {row.id} is {row.status}; only what is promoted can be measured again")
        if use == "promote" and (row.status != "quarantined" or row.reason is not None):
            held = f" and held ({row.reason}); release it first" if row.status == "quarantined" else ""
            raise DataError(f"unit {row.id} is {row.status}{held}; only what is quarantined can be tested")
        for origin in made_of[row.id]:
            if origin.trace_id in ids:
                raise DataError(
                    f"unit {row.id} was made of trace {origin.trace_id}, which is held out; no trace tests "
                    "what came from it"
                )
    before = stored_tests(tables)
    test = BatchTest(
        number=len(before) + 1,
        held_out=held_out,
        before=count_tests(before, traces),
        unit_ids=unit_ids,
        use=use,
        traces=tuple(sorted({trace.mark for trace in traces})),
        names=tuple(sorted({mark_of(trace.id) for trace in traces})),
        at=now,
    )
    (since,) = tables.execute("SELECT coalesce(max(sequence), 0) FROM memory_history").fetchone()
    tables.table("memory_tests").insert(
        {
            "number": test.number,
            "held_out": held_out,
            "before": test.before,
            "unit_ids": canonical_json(list(unit_ids)),
            "use": use,
            "traces": canonical_json(list(test.traces)),
            "names": canonical_json(list(test.names)),
            "since": since,
            "at": stamp(now),
        }
    )
    return test


def close_test(tables: Tables, number: int, evidence: Promotion, *, now: datetime) -> None:
    """Store how a test ended and do what follows; see ``SQLiteCards.close_test``."""
    test = next((one for one in stored_tests(tables) if one.number == number), None)
    if test is None or test.evidence is not None:
        state = "was never opened" if test is None else "is over"
        raise DataError(f"test {number} {state}; open a test for each batch")
    check_evidence(test, evidence)
    tables.table("memory_tests").update(number, {"evidence": written(evidence)})
    tables.execute(
        "UPDATE memory_units SET utility = ? WHERE id IN (SELECT value FROM json_each(?))",
        (utility_of(evidence), canonical_json(list(test.unit_ids))),
    )
    for row in _untouched(tables, test):
        if test.use == "promote" and evidence.promoted:
            changing.move(tables, row, "promoted", now=now, test=number, evidence=evidence)
        elif test.use == "promote":
            tables.table("memory_units").update(row.number, {"refused": 1})
        elif not evidence.promoted:
            changing.move(tables, row, "quarantined", now=now, reason=HELD_BY_TEST, test=number)


def check_evidence(test: BatchTest, evidence: Promotion) -> None:
    """Refuse evidence that cannot be what a test found.

    Raises:
        DataError: It is of another batch or of other tests before it, or does not fit itself; says how.
    """
    if evidence.pair_ids != test.unit_ids or evidence.batches_before != test.before:
        raise DataError(
            f"the evidence is not that of test {test.number}, which is of {len(test.unit_ids)} units after "
            f"{test.before} others on its traces; test what was opened"
        )
    wrong = misfit(evidence, test.use)
    if wrong is None and evidence.traces > len(test.traces):
        wrong = f"it compares {evidence.traces} traces, and {len(test.traces)} were held out"
    if wrong is not None:
        raise DataError(f"the evidence does not fit test {test.number}: {wrong}; test the batch again")


def _untouched(tables: Tables, test: BatchTest) -> list[Row]:
    """Return the units of a batch that are as they were when the test was opened."""
    where = (
        "id IN (SELECT value FROM json_each(?)) AND number NOT IN (SELECT unit FROM memory_history "
        "WHERE sequence > (SELECT since FROM memory_tests WHERE number = ?)) ORDER BY id"
    )
    return units.rows(tables, where, (canonical_json(list(test.unit_ids)), test.number))


def stored_tests(tables: Tables) -> list[BatchTest]:
    """Return all tests in their order."""
    return [
        BatchTest(
            number=row["number"],
            held_out=row["held_out"],
            before=row["before"],
            unit_ids=tuple(json.loads(row["unit_ids"])),
            use=row["use"],
            traces=tuple(json.loads(row["traces"])),
            names=tuple(json.loads(row["names"])),
            evidence=row["evidence"]
            and read(Promotion, row["evidence"], f"evidence of test {row['number']}"),
            at=time_of(row["at"]),
        )
        for row in tables.table("memory_tests").rows_where(order_by="number")
    ]
