"""What stands beside the cards: tests of batches, counted exactly; anchors; and what a trace left behind."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Literal

from reflact.errors import DataError
from reflact.memory import ContrastPair, Origin, Promotion
from reflact.memory_cards import Recording, level, mark_of, misfit, subject, utility_of
from reflact.memory_ports import BatchTest, Forgotten
from reflact.store import changing, origins, units
from reflact.store.database import Tables
from reflact.store.units import Row, Unit, read, stamp, time_of, written
from reflact.types import canonical, digest

HELD_BY_TEST = "measured harm"
"""The reason of a unit that a later measurement took back."""


TESTS_ON = """
SELECT count(*) FROM memory_tests WHERE traces IS NULL
OR EXISTS (SELECT 1 FROM json_each(traces) WHERE value IN (SELECT value FROM json_each(?1)))
OR EXISTS (SELECT 1 FROM json_each(names) WHERE value IN (SELECT value FROM json_each(?1)))
"""
"""How many tests were made on any of these traces; see ``memory_ports.count_tests``."""


def open_test(
    tables: Tables,
    unit_ids: tuple[str, ...],
    *,
    held_out: str,
    traces: Collection[Recording],
    use: Literal["promote", "demote"],
    now: datetime,
) -> BatchTest:
    """Book a test; see ``SQLiteCards.open_test``."""
    if not traces:
        raise DataError("a batch is tested on held-out traces; name them, since tests are counted by them")
    if not unit_ids or len(set(unit_ids)) < len(unit_ids):
        raise DataError("a batch to be tested names at least one unit, and none twice")
    ids = {trace.id for trace in traces}
    for row in units.units(tables, unit_ids):
        if use == "demote" and row.status != "promoted":
            raise DataError(f"unit {row.id} is {row.status}; only what is promoted can be measured again")
        if use == "promote" and (row.status != "quarantined" or row.reason is not None):
            held = f" and held ({row.reason}); release it first" if row.status == "quarantined" else ""
            raise DataError(f"unit {row.id} is {row.status}{held}; only what is quarantined can be tested")
        for origin in origins.of(tables, origins.UNITS, [row.number])[row.number]:
            if origin.trace_id in ids:
                raise DataError(
                    f"unit {row.id} was made of trace {origin.trace_id}, which is held out; no trace tests "
                    "what came from it"
                )
    known_by = frozenset[str]().union(*(trace.marks for trace in traces))
    (before,) = tables.execute(TESTS_ON, (json.dumps(sorted(known_by)),)).fetchone()
    (last,) = tables.execute("SELECT coalesce(max(number), 0) FROM memory_tests").fetchone()
    test = BatchTest(
        number=last + 1,
        held_out=held_out,
        before=before,
        unit_ids=unit_ids,
        use=use,
        traces=tuple(sorted({trace.mark for trace in traces})),
        names=tuple(sorted({mark_of(trace.id) for trace in traces})),
        at=now,
    )
    insert_test(tables, test)
    return test


def bring_test(
    tables: Tables, test: BatchTest, name: str, *, strangers: int, here: Iterable[Recording]
) -> bool | None:
    """Write a test that was made elsewhere after those that are here; None where it is here already.

    It counts the tests here that it shares a trace with, if these are more than it counted where it was
    made; one that does not name its traces counts those that were not made there. What it found is kept as it
    was found, and read as it counts here. Returns whether it counts more of them now.

    Args:
        tables: Where it is written.
        test: As it was where it was made.
        name: Its id.
        strangers: How many of the tests here were not made there.
        here: The traces that are stored, by whose contents a mark of one is known as it grew.
    """
    if tables.execute("SELECT 1 FROM memory_tests WHERE id = ?", (name,)).fetchone():
        return None
    (last,) = tables.execute("SELECT coalesce(max(number), 0) FROM memory_tests").fetchone()
    insert_test(tables, test.model_copy(update={"number": last + 1}))
    if test.evidence is None:
        return False
    counted = test.before + strangers
    if test.traces is not None:
        named = test.marks
        marks = named.union(*(trace.marks for trace in here if not named.isdisjoint(trace.marks)))
        (shared,) = tables.execute(TESTS_ON, (json.dumps(sorted(marks)),)).fetchone()
        counted = max(test.before, shared - 1)
    tables.execute("UPDATE memory_tests SET before = ? WHERE number = ?", (counted, last + 1))
    return counted > test.before


def insert_test(tables: Tables, test: BatchTest) -> None:
    """Write a test with its number."""
    evidence = None if test.evidence is None else written(test.evidence)
    tables.execute(
        'INSERT INTO memory_tests (number, id, held_out, before, unit_ids, "use", traces, names, evidence, '
        "at, since) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(max(sequence), 0) FROM memory_history",
        (
            test.number,
            test_id(test),
            test.held_out,
            test.before,
            canonical(list(test.unit_ids)),
            test.use,
            None if test.traces is None else canonical(list(test.traces)),
            canonical(list(test.names)),
            evidence,
            stamp(test.at),
        ),
    )


def test_id(test: BatchTest) -> str:
    """Return what names a test in any store that it is brought to."""
    names = {"held_out", "before", "unit_ids", "use", "at"} | (set() if test.traces is None else {"traces"})
    return digest(test.model_dump(mode="json", include=names))


def close_test(tables: Tables, number: int, evidence: Promotion, *, now: datetime) -> None:
    """Store how a test ended and do what follows; see ``SQLiteCards.close_test``."""
    test = next(iter(stored_tests(tables, number)), None)
    if test is None or test.evidence is not None:
        state = "was never opened" if test is None else "is over"
        raise DataError(f"test {number} {state}; open a test for each batch")
    check_evidence(test, evidence)
    tables.execute("UPDATE memory_tests SET evidence = ? WHERE number = ?", (written(evidence), number))
    tables.execute(
        "UPDATE memory_units SET utility = ? WHERE id IN (SELECT value FROM json_each(?))",
        (utility_of(evidence), canonical(list(test.unit_ids))),
    )
    for row in _untouched(tables, test):
        if test.use == "promote" and evidence.promoted:
            changing.move(tables, row, "promoted", now=now, test=number, evidence=evidence)
        elif test.use == "promote":
            tables.execute("INSERT OR IGNORE INTO memory_refused (unit) VALUES (?)", (row.number,))
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
    if wrong is None and test.traces is not None and evidence.traces > len(test.traces):
        wrong = f"it compares {evidence.traces} traces, and {len(test.traces)} were held out"
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
    """Return all tests in their order, or the one of a number, each with what it shows here."""
    return [
        test
        if test.evidence is None
        else test.model_copy(update={"evidence": recounted(test.evidence, test.use, test.before)})
        for test in _rows_of_tests(tables, number)
    ]


def made_tests(tables: Tables, number: int | None = None) -> list[BatchTest]:
    """Return all tests in their order, or the one of a number, each as it was where it was made."""
    return [
        test if test.evidence is None else test.model_copy(update={"before": test.evidence.batches_before})
        for test in _rows_of_tests(tables, number)
    ]


def recounted(evidence: Promotion, use: Literal["promote", "demote"], before: int) -> Promotion:
    """Return evidence at the level that it has after so many tests, at which it may show nothing any more."""
    alpha = level(before)
    passed = evidence.promoted if use == "promote" else not evidence.promoted
    changed: dict[str, object] = {"batches_before": before, "alpha": alpha}
    if passed and evidence.p_value > alpha:
        changed["promoted"] = not evidence.promoted
        changed["outcome"] = "not_shown" if use == "promote" else "no_harm_shown"
    return evidence if before == evidence.batches_before else evidence.model_copy(update=changed)


def _rows_of_tests(tables: Tables, number: int | None) -> list[BatchTest]:
    found = tables.execute(
        'SELECT number, held_out, before, unit_ids, "use", traces, names, evidence, at FROM memory_tests '
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
            traces=None if traces is None else tuple(json.loads(traces)),
            names=tuple(json.loads(names)),
            evidence=None if evidence is None else read(Promotion, evidence, f"evidence of test {number}"),
            at=time_of(at),
        )
        for number, held_out, before, unit_ids, use, traces, names, evidence, at in found
    ]


# ------------------------------------------------------------------------------------------- anchors


def barred(tables: Tables, unit: Unit, made_of: Sequence[Origin]) -> str | None:
    """Return why a unit is never learned from, None where it may be.

    ``anchor``: it speaks of an anchor's transition. ``anchor_trace``: it was made of an anchor's trace, whose
    steps show each other's states.
    """
    if unit.pair is None:
        return None
    where = "SELECT 1 FROM memory_anchors WHERE subject = ?"
    if tables.execute(where, (subject(unit.pair),)).fetchone():
        return "anchor"
    shared = any(origins.owners(tables, origins.ANCHORS, origin.trace_id) for origin in made_of)
    return "anchor_trace" if shared else None


def keep_anchors(tables: Tables, pairs: Sequence[ContrastPair]) -> int:
    """Keep anchors; see ``SQLiteCards.keep_anchors``."""
    return sum(keep_anchor(tables, pair, pair.provenance.origins) for pair in pairs)


def keep_anchor(tables: Tables, pair: ContrastPair, made_of: Sequence[Origin]) -> bool:
    """Keep an anchor that was made of these steps; returns whether it is new."""
    spoken_of = subject(pair)
    known = origins.of(tables, origins.ANCHORS, [pair.id])[pair.id]
    if (
        set(made_of) <= set(known)
        and tables.execute("SELECT 1 FROM memory_anchors WHERE id = ?", (pair.id,)).fetchone()
    ):
        return False
    taken = tables.execute("SELECT id FROM memory_units WHERE subject = ?", (spoken_of,)).fetchone()
    if taken:
        raise DataError(
            f"anchor {pair.id} speaks of the transition of stored pair {taken[0]}; anchors are never learned "
            "from, so take another one"
        )
    for origin in made_of:
        for row in _pairs_of(tables, origin.trace_id):
            raise DataError(
                f"anchor {pair.id} was made of trace {origin.trace_id}, and so was stored pair {row.id}; "
                "what anchors are made of is never learned from, so take another trace"
            )
    new = tables.execute(
        "INSERT OR IGNORE INTO memory_anchors (id, subject, pair) VALUES (?, ?, ?)",
        (pair.id, spoken_of, written(pair)),
    ).rowcount
    origins.add(tables, origins.ANCHORS, pair.id, made_of)
    return new > 0


def _pairs_of(tables: Tables, trace_id: str) -> list[Row]:
    numbers = json.dumps(origins.owners(tables, origins.UNITS, trace_id))
    where = "pair IS NOT NULL AND number IN (SELECT value FROM json_each(?)) ORDER BY id LIMIT 1"
    return units.rows(tables, where, (numbers,))


def anchors(tables: Tables) -> list[ContrastPair]:
    """Return the anchors in the order of their ids."""
    found = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return [read(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in found]


# ----------------------------------------------------------------------------------------- forgetting


OWN = "number IN (SELECT unit FROM memory_origins WHERE trace_id = ?1)"
"""Units that came from a trace."""

ONLY_OWN = "number IN (SELECT unit FROM memory_origins GROUP BY unit HAVING min(trace_id = ?1))"
"""Units that came from it alone."""

PURPOSES = """
SELECT json_extract(purpose, '$') AS purpose FROM traces WHERE {traces} UNION
SELECT json_extract(pair, '$.purpose') FROM memory_units WHERE pair IS NOT NULL AND {units}
AND json_extract(pair, '$.construction') <> 'other_purpose'
"""
"""The purposes of traces, as far as they are stored."""

ELSEWHERE = f"""
NOT {OWN} AND pair IS NOT NULL AND json_extract(pair, '$.construction') = 'other_purpose'
AND json_extract(pair, '$.purpose') IN (
    SELECT purpose FROM ({PURPOSES.format(traces="id = ?1", units=OWN)})
    EXCEPT SELECT purpose FROM ({PURPOSES.format(traces="id <> ?1", units=f"NOT {ONLY_OWN}")})
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
    rows = units.rows(tables, f"{OWN} ORDER BY id", (trace_id,))
    rows += units.rows(tables, ELSEWHERE, (trace_id,))
    cards = sum(len(units.cards(tables, row)) for row in rows)
    changing.remove(tables, [row.number for row in rows])
    anchored = origins.owners(tables, origins.ANCHORS, trace_id)
    tables.execute(
        "DELETE FROM memory_anchors WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(anchored),)
    )
    events = tables.execute("DELETE FROM trace_events WHERE trace_id = ?", (trace_id,)).rowcount
    known = tables.execute("DELETE FROM traces WHERE id = ?", (trace_id,)).rowcount
    if rows:
        tables.execute("INSERT INTO memory_words (memory_words) VALUES ('optimize')")
    replies = tables.execute(f"DELETE FROM replies WHERE {ASKED}").rowcount if calls else 0  # noqa: S608 - constant
    (left,) = tables.execute(f"SELECT count(*) FROM replies WHERE {ASKED}").fetchone()  # noqa: S608 - constant
    return Forgotten(
        trace_id=trace_id,
        trace=known > 0,
        events=events,
        unit_ids=tuple(row.id for row in rows),
        cards=cards,
        anchors=len(anchored),
        replies=replies,
        replies_left=left,
    )
