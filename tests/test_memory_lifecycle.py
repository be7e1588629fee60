"""Pairs over time: promotion as other processes see it, a full memory, and what forgetting leaves."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import anyio
import pytest
from typer.testing import Result

from calibration_reports import everything
from flattered_world import PURPOSE, flattered, steps
from html_page import read
from memory_pairs import CRITIC, HELD_OUT, evidence_for, make_pair, promote, set_utility
from reflact import MemoryStore, Trace
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.events import CalibrationEvent, PairsGenerated
from reflact.calibration.report import CalibrationReport
from reflact.memory.models import Action, Evaluation, Label, Scope, Transition
from reflact.reporting.html.calibration import render_calibration_page
from served import assert_refused, reflact


async def test_pairs_come_and_go_with_their_state(tmp_path: Path) -> None:
    """What another opening promotes, archives or forgets is known; what stays is not read again."""
    pairs = [make_pair(n, trace=f"t{n}") for n in range(5)]
    one, other = MemoryStore(tmp_path / "m.db"), MemoryStore(tmp_path / "m.db")
    async with one as mine, other as theirs:
        assert await mine.promoted_pairs(CRITIC) == ()
        await theirs.submit(make_pair(9))
        await promote(theirs, pairs[:4])
        first = await mine.promoted_pairs(CRITIC)
        assert [pair.id for pair in first] == sorted(pair.id for pair in pairs[:4])
        await theirs.archive([pairs[0].id, pairs[1].id], reason="no longer of use")
        await theirs.forget("t2")
        await promote(theirs, pairs[4:])
        second = await mine.promoted_pairs(CRITIC)
        assert {pair.id for pair in second} == {pairs[3].id, pairs[4].id}
        (kept,) = (pair for pair in second if pair.id == pairs[3].id)
        assert any(kept is pair for pair in first)


async def test_a_scope_sees_its_own(tmp_path: Path) -> None:
    """Pairs of another scope are left out, whoever looked before."""
    ours, theirs = make_pair(1), make_pair(2, scope=Scope(roles=("critic",), user="alice"))
    async with MemoryStore(tmp_path / "m.db") as memory:
        await promote(memory, [ours, theirs])
        alice = Scope(roles=("critic",), user="alice")
        assert {pair.id for pair in await memory.promoted_pairs(alice)} == {ours.id, theirs.id}
        assert [pair.id for pair in await memory.promoted_pairs(CRITIC)] == [ours.id]
        assert await memory.promoted_pairs(Scope(roles=("coder",))) == ()


SAID = Evaluation(progress_before=0, progress_after=9, reasoning="said", evidence=("filed",))
SETTINGS = CalibratorSettings(
    pairs_per_step=2,
    max_asked=0,
    max_pairs=1000,
    max_rounds=1,
    concurrency=1,
)


def ticking() -> Callable[[], datetime]:
    """Return a clock that moves by a second with every look."""
    times = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=n) for n in count())
    return lambda: next(times)


def memory_of(folder: Path, bound: int) -> MemoryStore:
    return MemoryStore(folder / "memory.db", max_active_pairs=bound, clock=ticking())


async def judge(memory: MemoryStore, numbers: Sequence[int], *, promoted: bool) -> None:
    """Test a batch of pairs."""
    ids = [make_pair(number).id for number in numbers]
    test = await memory.open_test(ids, holdout_id="given", traces=HELD_OUT)
    await memory.close_test(test.number, evidence_for(test, promoted=promoted))


async def read_statuses(memory: MemoryStore, numbers: Sequence[int]) -> list[str]:
    """Return the states of pairs."""
    states = {one.pair.id: one.status for one in await memory.pairs()}
    return [states[make_pair(number).id] for number in numbers]


def traces(name: str, number: int) -> list[Trace]:
    """Return traces of two steps each whose critic was flattered."""
    found = []
    for n in range(number):
        trace = Trace(PURPOSE, id=f"{name} {n}")
        for step, gold in steps(trace.id, n, count=2, claims=[True, True]):
            trace.record(step, SAID, label=gold)
        found.append(trace)
    return found


async def test_what_a_test_refused_leaves_first(tmp_path: Path) -> None:
    """A pair that no test takes again makes room for one that waits, though its test measured some gain."""
    async with memory_of(tmp_path, 4) as memory:
        for number in range(4):
            await memory.submit(make_pair(number))
        await judge(memory, [0], promoted=True)
        await judge(memory, [2, 3], promoted=False)
        await set_utility(memory, make_pair(2).id, 0.9)
        assert await memory.remaining_capacity() == 2
        for number in (4, 5):
            assert (await memory.submit(make_pair(number))).status == "quarantined"
        assert await read_statuses(memory, range(6)) == [
            "promoted",
            "quarantined",
            "archived",
            "archived",
            "quarantined",
            "quarantined",
        ]
        assert await memory.remaining_capacity() == 0


async def test_pairs_are_not_paid_for_where_there_is_no_room(tmp_path: Path) -> None:
    """As many pairs are made as the memory has room for, and all are tested; the report counts the others."""
    async with memory_of(tmp_path, 30) as memory:
        calibrator = Calibrator(flattered(), memory, settings=SETTINGS)
        report = await calibrator.calibrate(traces("learn", 40), heldout=traces("held out", 25))
        made, stored = sum(kind.n_pairs for kind in report.pairs), await memory.pairs()
    assert [len(test.pair_ids) for test in report.tests] == [30]
    assert (made, report.n_quarantined) == (30, 0)
    assert report.n_left_out >= 30
    assert not any(one.status == "archived" for one in stored)
    assert report.not_tested_reason is None


async def test_a_full_memory_is_why_nothing_was_tested(tmp_path: Path) -> None:
    """Where promoted pairs take all room nothing is made, and the report says what to do about it."""
    async with memory_of(tmp_path, 4) as memory:
        for number in range(4):
            await memory.submit(make_pair(number))
        await judge(memory, range(4), promoted=True)
        calibrator = Calibrator(flattered(), memory, settings=SETTINGS)
        report = await calibrator.calibrate(traces("learn", 3), heldout=traces("held out", 25))
        assert await read_statuses(memory, range(4)) == ["promoted"] * 4
    assert report.n_candidates == 0 < report.n_left_out
    assert "the memory is full" in report.not_tested_reason


async def test_beside_an_agent_a_full_memory_is_told(tmp_path: Path) -> None:
    """A trace that comes then is kept, asks nothing, and the event says why."""
    told: list[CalibrationEvent] = []
    async with memory_of(tmp_path, 2) as memory:
        for number in range(2):
            await memory.submit(make_pair(number))
        calibrator = Calibrator(flattered(), memory, settings=SETTINGS, on_event=told.append)
        async with calibrator:
            for trace in traces("live", 8):
                calibrator.submit(trace)
            await calibrator.wait_until_idle()
        assert calibrator.usage.calls == 0
        assert len(await memory.trace_ids()) == 8
    made = [event for event in told if isinstance(event, PairsGenerated)]
    assert made
    assert all(event.n_candidates == 0 for event in made)


def test_a_report_says_what_was_put_away(capsys: pytest.CaptureFixture[str]) -> None:
    """On its page and at a terminal, and nothing where nothing was."""
    from rich.console import Console

    from reflact.cli.calibrate_output import print_calibration

    def said(report: CalibrationReport) -> tuple[str, str]:
        print_calibration(Console(width=300), report)
        return capsys.readouterr().out, read(render_calibration_page(report)).text

    printed, page = said(everything().model_copy(update={"n_left_out": 3}))
    assert "not made, because the memory was full: 3" in printed
    assert "not made, because the memory was full: 3" in page
    assert not any("memory was full" in text for text in said(everything()))


WORD = "zebrafink"
GOLD = Label(progress_before=0, progress_after=1, source="human")


async def fill_with_word(memory: MemoryStore) -> None:
    """Store a trace and pairs that were made of it, all with one word in them, and an anchor of another."""
    trace = Trace(f"Feed the {WORD}.", id=f"{WORD} 1")
    for number in range(20):
        step = Transition(
            before=f"{WORD} {number} {'pad ' * 400}", action=Action(name="feed"), after=f"{WORD} fed {number}"
        )
        trace.record(step, label=GOLD)
    await trace.save_to(memory)
    for number in range(20):
        await memory.submit(make_pair(number, note=f"the {WORD} ate", trace=trace.id))
    await memory.add_anchors([make_pair(99, trace="another")])


def files_with_word(path: Path) -> set[str]:
    """Return the files of a memory that hold the word, in whatever case."""
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
    return {file.name for file in files if WORD.encode() in file.read_bytes().lower()}


@contextmanager
def reading_from(path: Path) -> Iterator[None]:
    """Read from a memory for the length of the block, in a transaction of another connection."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM traces").fetchone()
        yield


def forget_at_terminal(path: Path) -> Result:
    """Forget the trace at a terminal."""
    return reflact("memory", "forget", path, f"{WORD} 1")


async def test_a_reader_keeps_the_log_and_forgetting_again_empties_it(tmp_path: Path) -> None:
    """While another connection reads, the log holds what was removed; that is said, until it is emptied."""
    path = tmp_path / "memory.db"
    async with MemoryStore(path, lock_timeout=0.05) as memory:
        await fill_with_word(memory)
        assert files_with_word(path)
        with reading_from(path):
            assert (await memory.forget(f"{WORD} 1")).remains_in_wal
            assert files_with_word(path) == {"memory.db-wal"}
            assert (await memory.forget(f"{WORD} 1")).remains_in_wal
        assert not (await memory.forget(f"{WORD} 1")).remains_in_wal
        assert files_with_word(path) == set()


@pytest.mark.slow
def test_the_command_says_that_the_log_still_holds_it(tmp_path: Path) -> None:
    """It names the file and what to do; given again after the reader has ended, it says that this is done."""
    path = tmp_path / "memory.db"

    async def prepare() -> None:
        async with MemoryStore(path) as memory:
            await fill_with_word(memory)

    anyio.run(prepare)
    with reading_from(path):
        said = forget_at_terminal(path).stdout
        assert "forgot trace zebrafink 1: 20 events" in said
        assert "memory.db-wal still contains" in said
        assert "run this command again" in said
        assert "memory.db-wal still contains" in forget_at_terminal(path).stdout
    assert_refused(forget_at_terminal(path), "nothing in")
    assert files_with_word(path) == set()
