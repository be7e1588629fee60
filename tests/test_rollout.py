"""Rollouts: had once, in order, seeded by item and trial, and unmeasured only where nothing helped."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from doubles import RUN, opened
from reflact.errors import EnvironmentFailure, RequestRefused, RunFailed
from reflact.protocols import Session
from reflact.stages.rollout import RolloutRunner, derive_rollout_seed, log_unmeasured, require_coverage
from reflact.testing import InMemoryRunStore
from reflact.types import Grade, Item, Rollout, Score, Skill, Split, Turn

NEW, OLD = Skill(text="new"), Skill(text="old")


class SkillTarget:
    """Answers every message with the skill's text."""

    identity = "skill target"

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return _SkillSession(skill)


class _SkillSession:
    def __init__(self, skill: Skill) -> None:
        self._skill = skill
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        return self._skill.text


Outcome = Callable[[str, str, int], float | Exception]
"""What the n-th attempt (from 1) at an item under a skill gives: a score or an error."""


class Scripted:
    """An environment whose outcomes are a function; attempts take a random number of turns.

    Attributes:
        ran: Item and skill text of all attempts, in order of their starts.
        seeds: The seeds that were given for each item and skill text.
    """

    identity = "scripted environment"

    def __init__(self, outcome: Outcome, *, waits: int | None = None) -> None:
        self._outcome = outcome
        self._draw = None if waits is None else random.Random(waits)
        self.ran: list[tuple[str, str]] = []
        self.seeds: dict[tuple[str, str], list[int]] = {}

    def items(self, split: Split) -> Sequence[Item]:
        return ()

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        skill = await session.reply("")
        self.ran.append((item.id, skill))
        self.seeds.setdefault((item.id, skill), []).append(seed)
        outcome = self._outcome(item.id, skill, self.ran.count((item.id, skill)))
        for _ in range(0 if self._draw is None else self._draw.randrange(1, 12)):
            await checkpoint()
        if isinstance(outcome, Exception):
            raise outcome
        return Grade(score=Score.of(outcome), answer=skill)


def items(size: int) -> tuple[Item, ...]:
    return tuple(Item(id=f"i{n}", input=f"q{n}") for n in range(size))


def right(item: str, skill: str, attempt: int) -> float:
    return 1.0


def losing(*lost: str, times: int = 99) -> Outcome:
    """Solve everything but these items, whose first attempts end in an infrastructure failure."""

    def outcome(item: str, skill: str, attempt: int) -> float | Exception:
        if item in lost and attempt <= times:
            return EnvironmentFailure(f"{item} broke")
        return 1.0

    return outcome


def make_runner(environment: Scripted, store: InMemoryRunStore, **settings: Any) -> RolloutRunner:
    collaborators = {"target": SkillTarget(), "environment": environment, "store": store}
    defaults = {"decision_log": store.decision_log(RUN), "step": 1, "feedback": False, "limit": 4}
    return RolloutRunner(**collaborators, **{**defaults, **settings})


async def rolled(
    environment: Scripted,
    batch: Sequence[Item],
    *,
    store: InMemoryRunStore,
    coverage: float = 0.0,
    trial: int = 0,
    **settings: Any,
) -> tuple[Rollout, ...]:
    runner = make_runner(environment, store, **settings)
    (rollouts,) = await runner.roll_out_trials(batch, NEW, (trial,))
    require_coverage(rollouts, coverage)
    await log_unmeasured(rollouts, decision_log=runner.decision_log, step=runner.step)
    return rollouts


async def passed(
    environment: Scripted,
    batch: Sequence[Item],
    *,
    store: InMemoryRunStore,
    skill: Skill = NEW,
    trial: int = 0,
) -> tuple[Rollout, ...]:
    return await make_runner(environment, store).roll_out_pass(batch, skill, trial=trial)


def test_keys_and_seeds_are_pinned() -> None:
    item = Item(id="i0", input="q", reference={"a": [1, 2.5, None]})
    runner = make_runner(Scripted(right), InMemoryRunStore(), feedback=True)
    assert [runner.make_job(item, NEW, trial).key for trial in (0, 1)] == [
        "3ae44de15cef141538dedd8c4ec0f9a68c6a982d94e9f73460c41767cbba02f9",
        "092cc17038514534bbf8afecfa3e5c2cab59511d15a0db96dc9bf73d6274a0aa",
    ]
    assert [derive_rollout_seed(item, trial) for trial in range(3)] == [3216078731, 2054704690, 2249697936]
    assert derive_rollout_seed(Item(id="i1", input="q"), 0) == 883645264


@pytest.mark.parametrize("limit", [1, 4])
async def test_equal_rollouts_run_once(limit: int) -> None:
    environment, store, (a, b) = Scripted(right, waits=2), await opened(), items(2)
    found = await rolled(environment, [a, b, a, a], store=store, trial=5, limit=limit)
    assert [r.item_id for r in found] == ["i0", "i1", "i0", "i0"]
    assert len(environment.ran) == 2
    await rolled(environment, [b, a], store=store, trial=5)
    assert len(environment.ran) == 2


async def test_an_absence_that_was_used_stays() -> None:
    environment, store, batch = Scripted(losing("i1", times=1)), await opened(), items(2)
    first = await rolled(environment, batch, store=store)
    assert [r.error for r in first] == [None, "i1 broke"]
    again = await rolled(environment, batch, store=store)
    assert [(r.error, r.refused) for r in again] == [(None, False), ("i1 broke", True)]
    assert len(environment.ran) == 2
    assert [r.error for r in await rolled(environment, batch, store=store, step=2)] == [None, None]


@pytest.mark.parametrize(("lost", "coverage"), [(["i0"], 0.9), (["i0", "i1", "i2"], 0.0)])
async def test_below_the_coverage_nothing_is_used(lost: list[str], coverage: float) -> None:
    environment, store, batch = Scripted(losing(*lost, times=1)), await opened(), items(3)
    with pytest.raises(RunFailed, match=f"only {3 - len(lost)} of 3 .* i0 broke"):
        await rolled(environment, batch, store=store, coverage=coverage)
    assert all(r.score is not None for r in await rolled(environment, batch, store=store, coverage=coverage))
    assert len(environment.ran) == 3 + len(lost)


def shown(rollouts: Sequence[Rollout]) -> list[tuple[str, float | None]]:
    return [(r.item_id, None if r.score is None else r.score.hard) for r in rollouts]


OUTCOME = st.tuples(st.sampled_from([0.0, 0.0, 1.0]), st.sampled_from([0, 0, 0, 0, 1, 2]))
"""A score, and how many attempts are lost before it."""


@given(outcomes=st.lists(OUTCOME, max_size=6), limit=st.integers(1, 7), waits=st.integers(0, 10**6))
def test_what_is_lost_in_a_pass_is_tried_once_more(
    outcomes: list[tuple[float, int]], limit: int, waits: int
) -> None:
    environment: Scripted

    def outcome(item: str, skill: str, attempt: int) -> float | Exception:
        score, losses = outcomes[int(item[1:])]
        return score if attempt > losses else EnvironmentFailure("lost")

    async def run() -> tuple[Rollout, ...]:
        nonlocal environment
        environment = Scripted(outcome, waits=waits)
        store = await opened()
        runner = make_runner(environment, store, limit=limit)
        found = await runner.roll_out_pass(items(len(outcomes)), NEW, trial=0)
        assert not await store._database.fetch_rows("SELECT * FROM outcomes WHERE kind = 'decision'")
        return found

    final = [(f"i{n}", None if losses > 1 else score) for n, (score, losses) in enumerate(outcomes)]
    assert shown(anyio.run(run)) == final
    assert max(Counter(environment.ran).values(), default=0) <= 2


async def test_what_is_refused_for_ever_does_not_count_and_is_not_repeated() -> None:
    def outcome(item: str, skill: str, attempt: int) -> float | Exception:
        return 1.0 if item == "i0" else RequestRefused("filtered", status=400)

    environment, store = Scripted(outcome), await opened()
    found = await rolled(environment, items(4), store=store, coverage=0.9)
    assert [(r.score is None, r.refused) for r in found] == [(False, False), *[(True, True)] * 3]
    assert shown(await passed(environment, items(4), store=await opened())) == shown(found)
    assert Counter(item for item, _ in environment.ran) == dict.fromkeys(("i0", "i1", "i2", "i3"), 2)
    with pytest.raises(RunFailed, match="only 0 of 1"):
        await rolled(Scripted(lambda *_: RequestRefused("no", status=400)), items(1), store=await opened())


async def test_a_cancellation_of_an_environments_own_leaves_the_item_unmeasured() -> None:
    class Careless(Scripted):
        async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
            if item.id == "i0":
                own = asyncio.create_task(asyncio.sleep(60))
                asyncio.get_running_loop().call_soon(own.cancel)
                await own
            return await super().run(item, session, seed=seed)

    lost, fine = await rolled(Careless(right), items(2), store=await opened())
    assert "item i0: CancelledError of a task of its own" in str(lost.error)
    assert (lost.score, fine.score) == (None, Score.of(1))


async def test_code_that_changes_an_item_changes_no_other_rollout() -> None:
    seen: list[tuple[object, object, object]] = []

    class Greedy(Scripted):
        async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
            assert isinstance(item.reference, list)
            assert isinstance(item.input, dict)
            seen.append((item.reference.pop(), item.input.popitem(), item.metadata.pop("kind")))
            return Grade(score=Score.of(1), answer="")

    item = Item(id="i0", input={"question": "q"}, reference=["a", "b"], metadata={"kind": "x"})
    before, store = item.fingerprint, await opened()
    for trial in (0, 1):
        (rollout,) = await rolled(Greedy(right), (item,), store=store, trial=trial)
        assert rollout.score is not None
    assert seen == [("b", ("question", "q"), "x")] * 2
    assert item.model_copy().fingerprint == before
