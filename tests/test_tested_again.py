"""Units after a test: what it measured of their worth, and when they are tested again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from memory_pairs import HELD_OUT, evidence_for, make_pair
from reflact.calibration.critic import Critic
from reflact.calibration.promotion import PromotionTester
from reflact.memory.store import MemoryStore
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
    reviewer = PromotionTester(Critic(ScriptedLLM(lambda *_: {})), store, max_concurrent=1)
    return [one.pair.id for one in (await reviewer.take_snapshot()).waiting_pairs]


async def judge(store: MemoryStore, unit_id: str, *, promoted: bool, recheck: bool = False) -> None:
    """Test a batch of one pair."""
    test = await store.open_test(
        [unit_id], holdout_id="given", traces=HELD_OUT, kind="demote" if recheck else "promote"
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
