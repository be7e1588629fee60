"""What stands beside the cards: tests of batches, counted exactly; anchors; and what a trace left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from reflact.errors import DataError
from reflact.memory import ContrastPair, Promotion
from reflact.memory_cards import misfit, subject
from reflact.memory_ports import BatchTest, Forgotten
from reflact.store import changing, units
from reflact.store.database import Tables
from reflact.store.units import Row, read, stamp, time_of, written
from reflact.types import canonical, digest

HELD_BY_TEST = "measured harm"
"""The reason of a unit that a later measurement took back."""


def open_test(
    tables: Tables,
    unit_ids: tuple[str, ...],
    *,
    held_out: str,
    use: Literal["promote", "demote"],
    now: datetime,
) -> BatchTest:
    """Book a test; see ``SQLiteCards.open_test``."""
    if not unit_ids or len(set(unit_ids)) < len(unit_ids):
        raise DataError("a batch to be tested names at least one unit, and none twice")
    for row in units.units(tables, unit_ids):
        if use == "demote" and row.status != "promoted":
            raise DataError(f"unit {row.id} is {row.status}; only what is promoted can be measured again")
        if use == "promote" and (row.status != "quarantined" or row.reason is not None):
            held = f" and held ({row.reason}); release it first" if row.status == "quarantined" else ""
            raise DataError(f"unit {row.id} is {row.status}{held}; only what is quarantined can be tested")
    (before,) = tables.execute("SELECT count(*) FROM memory_tests WHERE held_out = ?", (held_out,)).fetchone()
    (last,) = tables.execute("SELECT coalesce(max(number), 0) FROM memory_tests").fetchone()
    test = BatchTest(number=last + 1, held_out=held_out, before=before, unit_ids=unit_ids, use=use, at=now)
    insert_test(tables, test)
    return test


def insert_test(tables: Tables, test: BatchTest) -> None:
    """Write a test with its number."""
    evidence = None if test.evidence is None else written(test.evidence)
    tables.execute(
        'INSERT INTO memory_tests (number, id, held_out, before, unit_ids, "use", evidence, at, since) '
        "SELECT ?, ?, ?, ?, ?, ?, ?, ?, coalesce(max(sequence), 0) FROM memory_history",
        (
            test.number,
            test_id(test),
            test.held_out,
            test.before,
            canonical(list(test.unit_ids)),
            test.use,
            evidence,
            stamp(test.at),
        ),
    )


def test_id(test: BatchTest) -> str:
    """Return what names a test in any store that it is brought to."""
    return digest(test.model_dump(mode="json", include={"held_out", "before", "unit_ids", "use", "at"}))


def close_test(tables: Tables, number: int, evidence: Promotion, *, now: datetime) -> None:
    """Store how a test ended and do what follows; see ``SQLiteCards.close_test``."""
    test = next(iter(stored_tests(tables, number)), None)
    if test is None or test.evidence is not None:
        state = "was never opened" if test is None else "is over"
        raise DataError(f"test {number} {state}; open a test for each batch")
    check_evidence(test, evidence)
    tables.execute("UPDATE memory_tests SET evidence = ? WHERE number = ?", (written(evidence), number))
    for row in _untouched(tables, test):
        if test.use == "promote" and evidence.promoted:
            changing.move(tables, row, "promoted", now=now, test=number, evidence=evidence)
        elif test.use == "demote" and not evidence.promoted:
            changing.move(tables, row, "quarantined", now=now, reason=HELD_BY_TEST, test=number)


def check_evidence(test: BatchTest, evidence: Promotion | None) -> None:
    """Refuse evidence that cannot be what a test found.

    Raises:
        DataError: It is of another batch or of other tests before it, or does not fit itself; says how.
    """
    if evidence is None:
        return
    if evidence.pair_ids != test.unit_ids or evidence.batches_before != test.before:
        raise DataError(
            f"the evidence is not that of test {test.number}, which is of {len(test.unit_ids)} units after "
            f"{test.before} others on its traces; test what was opened"
        )
    wrong = misfit(evidence, test.use)
    if wrong is not None:
        raise DataError(f"the evidence does not fit test {test.number}: {wrong}; test the batch again")


def _untouched(tables: Tables, test: BatchTest) -> list[Row]:
    """Return the units of a batch that are as they were when the test was opened."""
    where = (
        "id IN (SELECT value FROM json_each(?)) AND number NOT IN (SELECT unit FROM memory_history "
        "WHERE sequence > (SELECT since FROM memory_tests WHERE number = ?)) ORDER BY id"
    )
    return units.rows(tables, where, (canonical(list(test.unit_ids)), test.number))


def stored_tests(tables: Tables, number: int | None = None) -> list[BatchTest]:
    """Return all tests in their order, or the one of a number."""
    found = tables.execute(
        'SELECT number, held_out, before, unit_ids, "use", evidence, at FROM memory_tests '
        "WHERE ?1 IS NULL OR number = ?1 ORDER BY number",
        (number,),
    ).fetchall()
    return [
        BatchTest(
            number=number,
            held_out=held_out,
            before=before,
            unit_ids=tuple(json.loads(unit_ids)),
            use=use,
            evidence=None if evidence is None else read(Promotion, evidence, f"evidence of test {number}"),
            at=time_of(at),
        )
        for number, held_out, before, unit_ids, use, evidence, at in found
    ]


# ------------------------------------------------------------------------------------------- anchors


def is_anchor(tables: Tables, spoken_of: str) -> bool:
    """Whether a transition is one that is never learned from."""
    return bool(tables.execute("SELECT 1 FROM memory_anchors WHERE subject = ?", (spoken_of,)).fetchone())


def keep_anchors(tables: Tables, pairs: Sequence[ContrastPair]) -> int:
    """Keep anchors; see ``SQLiteCards.keep_anchors``."""
    new = 0
    for pair in pairs:
        spoken_of = subject(pair)
        if tables.execute("SELECT 1 FROM memory_units WHERE subject = ?", (spoken_of,)).fetchone():
            raise DataError(
                f"anchor {pair.id} speaks of a transition that a stored pair was made from; anchors are "
                "never learned from, so take another one"
            )
        new += tables.execute(
            "INSERT OR IGNORE INTO memory_anchors (id, subject, trace_id, pair) VALUES (?, ?, ?, ?)",
            (pair.id, spoken_of, pair.provenance.trace_id, written(pair)),
        ).rowcount
    return new


def anchors(tables: Tables) -> list[ContrastPair]:
    """Return the anchors in the order of their ids."""
    found = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return [read(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in found]


# ----------------------------------------------------------------------------------------- forgetting


PURPOSES = """
SELECT json_extract(purpose, '$') AS purpose FROM traces WHERE (id = ?1) = {its} UNION
SELECT json_extract(pair, '$.purpose') FROM memory_units WHERE pair IS NOT NULL AND (trace_id IS ?1) = {its}
AND json_extract(pair, '$.construction') <> 'other_purpose'
"""
"""The purposes of a trace (1) or of all others (0), as far as they are stored."""

ELSEWHERE = f"""
trace_id IS NOT ?1 AND pair IS NOT NULL AND json_extract(pair, '$.construction') = 'other_purpose'
AND json_extract(pair, '$.purpose') IN (
    SELECT purpose FROM ({PURPOSES.format(its=1)}) EXCEPT SELECT purpose FROM ({PURPOSES.format(its=0)})
) ORDER BY id
"""  # noqa: S608 - constants of this module
"""Pairs of other traces that look at their step under a purpose that one trace alone has."""


def forget(tables: Tables, trace_id: str) -> Forgotten:
    """Remove what came from a trace; see ``SQLiteCards.forget``."""
    tables.execute("PRAGMA secure_delete = ON")
    rows = units.rows(tables, "trace_id = ? ORDER BY id", (trace_id,))
    rows += units.rows(tables, ELSEWHERE, (trace_id,))
    cards = sum(len(units.cards(tables, row)) for row in rows)
    changing.remove(tables, [row.number for row in rows])
    anchored = tables.execute("DELETE FROM memory_anchors WHERE trace_id = ?", (trace_id,)).rowcount
    events = tables.execute("DELETE FROM trace_events WHERE trace_id = ?", (trace_id,)).rowcount
    known = tables.execute("DELETE FROM traces WHERE id = ?", (trace_id,)).rowcount
    if rows:
        tables.execute("INSERT INTO memory_words (memory_words) VALUES ('optimize')")
    return Forgotten(
        trace_id=trace_id,
        trace=known > 0,
        events=events,
        unit_ids=tuple(row.id for row in rows),
        cards=cards,
        anchors=anchored,
    )
