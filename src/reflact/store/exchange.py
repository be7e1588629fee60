"""A memory as JSON lines: everything in it goes out and comes back, and nothing is promoted on the way.

What the lines are stands in ``lines``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from functools import partial

import anyio.to_thread

from reflact.memory import CardStatus
from reflact.memory_cards import Finding, Recording
from reflact.memory_ports import BatchTest
from reflact.store import booking, changing, origins, traces, units
from reflact.store.cards import SQLiteCards
from reflact.store.database import Tables
from reflact.store.lines import (
    AnchorLine,
    ChangeLine,
    HeaderLine,
    Line,
    TestLine,
    TraceLine,
    UnitLine,
    parse,
    text_of,
    unit_of,
)
from reflact.store.migrations import REFUSED
from reflact.store.units import stamp
from reflact.types import Frozen

PAGE = 200
"""Units that are read at once."""

NO_EVIDENCE = "imported without its evidence"

MORE_TESTS = "more tests on its traces here than where it was promoted"
"""The reason of a unit whose batch passes no longer at the level that it has here."""


class Imported(Frozen):
    """What an import brought; what was there already is not counted and stays as it was.

    Args:
        traces, events, anchors, tests, units: How many were new.
        recounted: New tests that have more tests before them on their traces here than where they were made.
        held: New units that a scan held or rejected, or that were promoted on evidence which is missing or no
            longer enough.
        unproven: Those of them whose evidence is no longer enough, since their test was counted anew.
    """

    traces: int = 0
    events: int = 0
    anchors: int = 0
    tests: int = 0
    recounted: int = 0
    units: int = 0
    held: int = 0
    unproven: int = 0


class SQLiteExchange(SQLiteCards):
    """Export and import of a memory."""

    async def export_lines(self) -> AsyncIterator[str]:
        """Yield the memory as lines of ASCII JSON, without line breaks; the same memory gives the same lines.

        What is written while this runs may be missing or come along.
        """
        yield text_of(HeaderLine())
        for trace_id in await self._ids("SELECT id FROM traces ORDER BY id"):
            trace = await self._database.read(partial(traces.find_trace, trace_id=trace_id))
            if trace is not None:
                yield text_of(TraceLine(trace=trace))
        for anchor in await self._database.read(_anchor_lines):
            yield text_of(anchor)
        made = await self._database.read(booking.made_tests)
        tests = {test.number: booking.test_id(test) for test in made}
        for test in made:
            yield text_of(TestLine(id=tests[test.number], test=test))
        ids = await self._ids("SELECT id FROM memory_units ORDER BY number")
        for start in range(0, len(ids), PAGE):
            page = ids[start : start + PAGE]
            for line in await self._database.read(partial(_unit_lines, ids=page, tests=tests)):
                yield text_of(line)

    async def import_lines(self, lines: Iterable[str]) -> Imported:
        """Bring in what ``export_lines`` gave, all or nothing; importing twice changes nothing.

        What is stored already stays as it is, but for steps that it was made of as well. Every new unit is
        scanned. Tests count those here that share a trace with them, as if they were made after them. A
        promoted unit stays promoted only where the file holds the test that promoted it, and where that
        passes at the level that it has here; else it is quarantined and held. A pair of a transition that is
        an anchor here, or of a step that an anchor was made of, is left out, as it is when handed in. The
        file is trusted as far as whoever wrote it: what was measured cannot be proven by a file that carries
        it.

        Raises:
            DataError: A line is not one of an export, an id does not follow from its content, or a test's
                evidence cannot be what such a test finds; names the line.
        """

        def look() -> tuple[list[tuple[int, Line]], dict[int, Finding | None]]:
            parsed = parse(lines)
            looked_at = ((number, line) for number, line in parsed if isinstance(line, UnitLine))
            return parsed, {number: self._scan(unit_of(line).texts) for number, line in looked_at}

        parsed, findings = await anyio.to_thread.run_sync(look)
        return await self._database.write(lambda tables: self._bring(tables, parsed, findings, self._clock()))

    async def _ids(self, sql: str) -> list[str]:
        return [unit_id for (unit_id,) in await self._database.rows(sql)]

    def _bring(
        self,
        tables: Tables,
        lines: list[tuple[int, Line]],
        findings: dict[int, Finding | None],
        now: datetime,
    ) -> Imported:
        done: dict[str, int] = dict.fromkeys(Imported.model_fields, 0)
        strangers = _strangers(tables, lines)
        here: tuple[Recording, ...] | None = None
        for number, line in lines:
            match line:
                case TraceLine():
                    done["traces"] += traces.find_trace(tables, line.trace.id) is None
                    traces.open_trace(tables, line.trace.id, line.trace.purpose)
                    done["events"] += sum(
                        traces.append(tables, line.trace.id, event) for event in line.trace.events
                    )
                case AnchorLine():
                    done["anchors"] += booking.keep_anchor(tables, line.pair, line.made_of)
                case TestLine():
                    if here is None:
                        here = traces.recordings(tables) if strangers else ()
                    more = booking.bring_test(tables, line.test, line.id, strangers=strangers, here=here)
                    done["tests"] += more is not None
                    done["recounted"] += more is True
                case UnitLine() if _wanted(tables, line):
                    done["units"] += 1
                    lowered, reason = _bring_unit(tables, line, findings[number], now)
                    done["held"] += lowered is not None
                    done["unproven"] += lowered is not None and reason == MORE_TESTS
                    changing.make_room(tables, unit_of(line).kind, self._bound, now)
                case _:
                    pass
        tables.execute(REFUSED)
        return Imported(**done)


def _unit_lines(tables: Tables, ids: list[str], tests: dict[int, str]) -> list[UnitLine]:
    lines = []
    for unit_id in ids:
        for row in units.rows(tables, "id = ?", (unit_id,)):
            changes = units.history(tables, row.number)
            lines.append(
                UnitLine(
                    cards=tuple(units.cards(tables, row)),
                    pair=None if row.pair is None else units.pair_of(row),
                    origins=origins.of(tables, origins.UNITS, [row.number])[row.number],
                    history=tuple(
                        ChangeLine(
                            change=change,
                            test=None if change.promotion is None else tests.get(change.promotion),
                        )
                        for change in changes
                    ),
                )
            )
    return lines


def _anchor_lines(tables: Tables) -> list[AnchorLine]:
    pairs = booking.anchors(tables)
    found = origins.of(tables, origins.ANCHORS, [pair.id for pair in pairs])
    return [AnchorLine(pair=pair, origins=found[pair.id]) for pair in pairs]


def _wanted(tables: Tables, line: UnitLine) -> bool:
    """Whether a unit is new and no anchor's; one that is there gets the steps that it was made of as well."""
    unit = unit_of(line)
    if booking.barred(tables, unit, line.made_of) is not None:
        return False
    known = units.rows(tables, "id = ?", (unit.id,))
    for row in known:
        origins.add(tables, origins.UNITS, row.number, line.made_of)
    return not known


def _strangers(tables: Tables, lines: list[tuple[int, Line]]) -> int:
    """Return how many tests are here that are not among the lines."""
    here = {name for (name,) in tables.execute("SELECT id FROM memory_tests").fetchall()}
    return len(here - {line.id for _, line in lines if isinstance(line, TestLine)})


def _bring_unit(
    tables: Tables, line: UnitLine, finding: Finding | None, now: datetime
) -> tuple[CardStatus | None, str | None]:
    """Write a unit with its history; returns what ``_lowered`` does."""
    unit, first = unit_of(line), line.cards[0]
    number = changing.add(tables, unit, first.status, now)
    origins.add(tables, origins.UNITS, number, line.made_of)
    tables.execute(
        "UPDATE memory_units SET reason = ?, created = ?, changed = ? WHERE number = ?",
        (first.reason, stamp(first.created or now), stamp(first.changed or now), number),
    )
    for entry in line.history:
        change = entry.change
        changing.note(
            tables,
            number,
            change.before,
            change.after,
            now=change.at,
            version=change.version,
            reason=change.reason,
            test=_test_number(tables, entry.test),
        )
    lower, reason = _lowered(tables, line, unit.id, finding)
    if lower is not None:
        changing.settle(tables, number, first.status, lower, now=now, version=first.version, reason=reason)
    return lower, reason


def _lowered(
    tables: Tables, line: UnitLine, unit_id: str, finding: Finding | None
) -> tuple[CardStatus | None, str | None]:
    """Return the state that an imported unit is taken down to, and why; None where it keeps its own."""
    status, reason = line.cards[0].status, line.cards[0].reason
    if status in {"rejected", "archived"}:
        return None, None
    if finding is not None and finding.verdict == "reject":
        return "rejected", finding.rule
    if finding is not None and reason != finding.rule and not _released(line, finding):
        return "quarantined", finding.rule
    if status == "promoted" and (doubt := _doubt(tables, line, unit_id)) is not None:
        return "quarantined", doubt
    return ("quarantined", reason) if status == "candidate" else (None, None)


def _released(line: UnitLine, finding: Finding) -> bool:
    """Whether somebody looked at what a scan held, in the version at hand."""
    version = line.cards[0].version
    reasons = [entry.change.reason for entry in line.history if entry.change.version == version]
    return finding.rule in reasons and reasons.index(finding.rule) < len(reasons) - 1


def _doubt(tables: Tables, line: UnitLine, unit_id: str) -> str | None:
    """Return why a promotion does not hold here; None where the test that it names is of it and passes."""
    number = _test_number(tables, line.history[-1].test)
    if number is None or not any(_promotes(test, unit_id) for test in booking.made_tests(tables, number)):
        return NO_EVIDENCE
    passes = any(_promotes(test, unit_id) for test in booking.stored_tests(tables, number))
    return None if passes else MORE_TESTS


def _promotes(test: BatchTest, unit_id: str) -> bool:
    found = test.evidence
    return test.use == "promote" and found is not None and found.promoted and unit_id in found.pair_ids


def _test_number(tables: Tables, name: str | None) -> int | None:
    found = tables.execute("SELECT number FROM memory_tests WHERE id = ?", (name,)).fetchone()
    return None if found is None else int(found[0])
