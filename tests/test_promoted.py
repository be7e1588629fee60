"""The promoted pairs of a store: all of them, read once, whoever promoted them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory_pairs import CRITIC, make_pair, promote
from reflact import MemoryStore
from reflact.memory.cards import create_card
from reflact.memory.models import Scope

pytestmark = pytest.mark.anyio


async def test_pairs_come_and_go_with_their_state(tmp_path: Path) -> None:
    """What another opening promotes, edits, archives or forgets is known; what stays is not read again."""
    pairs = [make_pair(n, trace=f"t{n}") for n in range(5)]
    one, other = MemoryStore(tmp_path / "m.db"), MemoryStore(tmp_path / "m.db")
    async with one as mine, other as theirs:
        assert await mine.promoted_pairs(CRITIC) == ()
        await theirs.submit(make_pair(9))
        await theirs.submit_card(create_card("critic_calibration", "A card that stands alone.", scope=CRITIC))
        await promote(theirs, pairs[:4])
        first = await mine.promoted_pairs(CRITIC)
        assert [pair.id for pair in first] == sorted(pair.id for pair in pairs[:4])
        (card, _) = await theirs.cards(pairs[0].id)
        await theirs.edit(card.id, content="Other words.")
        await theirs.archive([pairs[1].id], reason="no longer of use")
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


async def test_there_may_be_any_number(tmp_path: Path) -> None:
    """No pair is left out because there are many."""
    pairs = [make_pair(n, trace=f"t{n}") for n in range(1200)]
    async with MemoryStore(tmp_path / "m.db", scan=lambda _: None) as memory:
        await promote(memory, pairs)
        assert len(await memory.promoted_pairs(CRITIC)) == 1200
