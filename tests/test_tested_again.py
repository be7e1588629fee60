"""Units after a test: what it measured of their worth, and when they are tested again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from memory_pairs import HELD_OUT, evidence_for, make_pair
from reflact import Action, Gold, Trace, Transition
from reflact.calibration.critic import Critic
from reflact.calibration.reviewing import Reviewer
from reflact.memory_store import MemoryStore
from reflact.testing import ScriptedLLM

pytestmark = pytest.mark.anyio


def ticking() -> Iterator[datetime]:
    """Yield times that lie a second apart."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    while True:
        now += timedelta(seconds=1)
        yield now


async def waiting(store: MemoryStore) -> list[str]:
    """Return the pairs that may be tested now."""
    reviewer = Reviewer(Critic(ScriptedLLM(lambda *_: {})), store, limit=1)
    return [one.pair.id for one in (await reviewer.standing()).waiting]


async def judge(store: MemoryStore, unit_id: str, *, promoted: bool, recheck: bool = False) -> None:
    """Test a batch of one pair."""
    test = await store.open_test(
        [unit_id], held_out="given", traces=HELD_OUT, use="demote" if recheck else "promote"
    )
    await store.close_test(test.number, evidence_for(test, promoted=promoted))


def store_in(folder: Path) -> MemoryStore:
    """Return a memory whose clock moves with every look."""
    times = ticking()
    return MemoryStore(folder / "memory.db", clock=lambda: next(times))


async def test_what_was_refused_is_not_tested_again(tmp_path: Path) -> None:
    """A batch that has not shown its worth does not come up in every later test."""
    async with store_in(tmp_path) as store:
        unit = (await store.submit(make_pair())).unit_id
        assert await waiting(store) == [unit]
        await judge(store, unit, promoted=False)
        assert await waiting(store) == []


async def test_what_was_edited_is_tested_again(tmp_path: Path) -> None:
    """An edit takes a promoted pair out of use until a test has looked at it anew, and a test can."""
    async with store_in(tmp_path) as store:
        unit = (await store.submit(make_pair())).unit_id
        await judge(store, unit, promoted=True)
        card, _ = await store.cards(unit)
        await store.edit(card.id, strategy="Look at the files.")
        assert await waiting(store) == [unit]
        await judge(store, unit, promoted=True)
        assert [one.pair.id for one in await store.pairs(status="promoted")] == [unit]


async def test_what_was_taken_back_is_tested_again_once_it_is_released(tmp_path: Path) -> None:
    """Harm holds a pair back until somebody has looked; then it may prove itself."""
    async with store_in(tmp_path) as store:
        unit = (await store.submit(make_pair())).unit_id
        await judge(store, unit, promoted=True)
        await judge(store, unit, promoted=False, recheck=True)
        assert await waiting(store) == []
        await store.release(unit, reason="I looked")
        assert await waiting(store) == [unit]


async def test_a_test_measures_the_worth_of_its_units(tmp_path: Path) -> None:
    """A point of error that a batch takes away is worth a twentieth; the last measurement counts."""
    async with store_in(tmp_path) as store:
        unit = (await store.submit(make_pair())).unit_id
        assert (await store.pairs([unit]))[0].utility == 0.5
        await judge(store, unit, promoted=True)
        assert (await store.pairs([unit]))[0].utility == pytest.approx(0.575)
        await judge(store, unit, promoted=False, recheck=True)
        assert (await store.pairs([unit]))[0].utility == pytest.approx(0.475)


def made_older(path: Path, statements: str, step: str) -> None:
    """Take a file back to before a step of the schema."""
    with closing(sqlite3.connect(path)) as older:
        older.executescript(f"{statements}; DELETE FROM _sqlite_migrations WHERE name = '{step}';")


async def test_an_older_file_learns_what_its_tests_measured(tmp_path: Path) -> None:
    """Worth counts from the first start with this version, for batches that were tested before it too."""
    async with store_in(tmp_path) as store:
        tested = (await store.submit(make_pair())).unit_id
        other = (await store.submit(make_pair(1))).unit_id
        await judge(store, tested, promoted=False)
        await judge(store, tested, promoted=True)
        worth = [(await store.pairs([unit]))[0].utility for unit in (tested, other)]
    made_older(tmp_path / "memory.db", "UPDATE memory_units SET utility = 0.5", "0012_tested_worth")
    async with store_in(tmp_path) as store:
        assert [(await store.pairs([unit]))[0].utility for unit in (tested, other)] == pytest.approx(worth)
        assert worth[0] > worth[1] == 0.5


async def test_an_older_file_with_a_damaged_step_opens(tmp_path: Path) -> None:
    """What is damaged is damaged by itself: the rest of the memory can be read."""
    async with store_in(tmp_path) as store:
        unit = (await store.submit(make_pair())).unit_id
        trace = Trace("Ship it.", id="t")
        step = Transition(before="a", action=Action(name="go"), after="b")
        trace.record(step, gold=Gold(phi_after=3, source="human"))
        await trace.keep(store)
    made_older(
        tmp_path / "memory.db",
        "UPDATE trace_events SET event = substr(event, 3); DROP INDEX traces_by_content; "
        "ALTER TABLE traces DROP COLUMN content; ALTER TABLE traces DROP COLUMN known",
        "0010_trace_contents",
    )
    async with store_in(tmp_path) as store:
        assert [one.pair.id for one in await store.pairs()] == [unit]
