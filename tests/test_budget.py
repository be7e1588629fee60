"""Budgets: no limit is exceeded with any number of calls in flight, and each affordable call is admitted."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import virtual_time
from profiles import cases
from reflact.adapters import EnvironmentAdapter
from reflact.concurrency import fan_out, open_task_group
from reflact.config.training import BudgetConfig, TrainerConfig
from reflact.errors import BudgetSpent, ConfigError
from reflact.llm.budget import Account, Budget, cover_rollout, require_caps
from reflact.protocols import Session
from reflact.records import Spend, Usage
from reflact.testing import InMemoryRunStore, ToyEnvironment
from reflact.types import Grade, Item, Score, Split

pytestmark = pytest.mark.virtual_time

WORST = Usage(calls=1, input_tokens=80, output_tokens=20, usd=0.1)
USED = Usage(calls=1, input_tokens=30, output_tokens=10, usd=0.04)


def budget(**limits: Any) -> Budget:
    return Budget(BudgetConfig(**limits))


async def refused(held: Budget, worst: Usage = WORST) -> str:
    with pytest.raises(BudgetSpent) as error:
        async with held.reserve(worst):
            pass
    return str(error.value)


async def test_a_call_that_does_not_fit_waits_for_what_is_in_flight() -> None:
    held, order = budget(max_tokens=200), []

    async def call(name: str, seconds: float) -> None:
        async with held.reserve(WORST) as reservation:
            reservation.mark_sent()
            order.append((name, anyio.current_time()))
            await anyio.sleep(seconds)
            reservation.settle(USED)

    await fan_out(lambda given: call(*given), (("a", 5), ("b", 3), ("c", 1)))
    assert order == [("a", 0), ("b", 0), ("c", 5)]


async def test_when_nothing_is_in_flight_the_budget_is_spent() -> None:
    held, reasons = budget(max_tokens=250), []

    async def call() -> None:
        async with held.reserve(WORST) as reservation:
            reservation.mark_sent()
            await anyio.sleep(1)
            reservation.settle(WORST)

    async def late() -> None:
        reasons.append(await refused(held))

    async with open_task_group() as tasks:
        for work in (call, call, late, late):
            tasks.start_soon(work)
    assert len(set(reasons)) == 1
    assert "200 are used" in reasons[0]
    assert await refused(held, Usage(calls=1, input_tokens=1)) == reasons[0]
    with pytest.raises(BudgetSpent):
        held.check()


async def test_nobody_overtakes_and_who_leaves_lets_the_next_one_go() -> None:
    held, order = budget(max_tokens=150), []

    async def call(name: str, tokens: int, patience: float) -> None:
        with anyio.move_on_after(patience):
            async with held.reserve(Usage(calls=1, output_tokens=tokens)) as reservation:
                reservation.mark_sent()
                order.append((name, anyio.current_time()))
                await anyio.sleep(5)

    await fan_out(lambda given: call(*given), (("first", 100, 9), ("leaves", 100, 1), ("small", 10, 9)))
    assert order == [("first", 0), ("small", 1)]


async def test_who_is_cancelled_when_its_turn_comes_holds_nothing() -> None:
    """Between being let in and waking up a task may be cancelled: what it was given goes to the next."""
    held, went = budget(max_calls=2), []
    both = Usage(calls=2)

    async def second() -> None:
        async with held.reserve(WORST):
            went.append("second")

    async with held.reserve(both):
        task = asyncio.create_task(second())
        await anyio.sleep(1)
    task.cancel()
    await asyncio.wait({task})
    async with held.reserve(both):
        went.append("third")
    assert went == ["third"]


async def test_earlier_starts_count() -> None:
    held = budget(max_calls=10, max_tokens=1000)
    used = Usage(calls=3, input_tokens=100, uncounted=1)
    worst = Usage(calls=2, output_tokens=850)
    held.begin([Spend(role="a", purpose="b", usage=used, unsettled=2, worst_case=worst)], 0.0)
    assert "950 are used" in await refused(held)


async def test_interrupted_and_uncounted_calls_are_no_usage_but_a_worst_case() -> None:
    """Usage is what a summary counts, in this start and after a resume; the worst case of the rest stands beside it."""
    reports = list[tuple[Usage, Usage]]()
    held = Budget(BudgetConfig(), on_usage=lambda *report: reports.append(report[:2]))
    cut = Usage(calls=1, output_tokens=850)
    held.begin([Spend(role="a", purpose="b", usage=USED, unsettled=1, worst_case=cut)], 0.0)
    for usage in (USED, Usage(calls=1, uncounted=1), None):
        async with held.reserve(WORST) as reservation:
            reservation.mark_sent()
            if usage is not None:
                reservation.settle(usage)
    two = USED + USED
    uncounted = two + Usage(calls=1, uncounted=1)
    tokens = WORST.model_copy(update={"calls": 0})
    assert reports == [(two, cut), (uncounted, cut + tokens), (uncounted, cut + tokens + WORST)]


async def test_an_overrun_stops_the_run_after_what_is_in_flight() -> None:
    """Nothing more is sent, what was sent is awaited, and the reason says whose fault it is."""
    held, ended = budget(max_tokens=10_000), []

    async def call(seconds: float, usage: Usage) -> None:
        async with held.reserve(WORST) as reservation:
            reservation.mark_sent()
            await anyio.sleep(seconds)
            reservation.settle(usage)
            ended.append(anyio.current_time())

    async def late() -> None:
        await anyio.sleep(2)
        assert "ignores caps" in await refused(held)
        ended.append(anyio.current_time())

    async with open_task_group() as tasks:
        tasks.start_soon(call, 1, USED.model_copy(update={"output_tokens": 99}))
        tasks.start_soon(call, 5, USED)
        tasks.start_soon(late)
    assert ended == [1, 5, 5]


async def test_caps_matter_only_where_something_rests_on_them() -> None:
    """A provider that ignores caps does not stop a run without limits of tokens or money."""
    held = budget(max_calls=5)
    async with held.reserve(WORST) as reservation:
        reservation.mark_sent()
        reservation.settle(Usage(calls=1, output_tokens=1000))
    held.check()


@pytest.mark.parametrize(("earlier", "deadline"), [(7.5, 2.5), (10.0, math.inf)])
async def test_time_is_a_limit_over_all_starts(earlier: float, deadline: float) -> None:
    """The deadline is what earlier starts left; without any, a start may look but not ask."""
    held = budget(max_seconds=10)
    held.begin([], earlier)
    assert held.deadline == deadline
    if deadline < math.inf:
        async with held.reserve(WORST):
            pass
        await anyio.sleep(deadline)
    assert "budget.max_seconds is 10, and the time is over" in await refused(held)


class World:
    """Calls of random sizes, of which some fail, are cancelled or are cut off.

    Args:
        seed: Of everything random.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.taken = self.in_flight = self.started = self.refused = 0

    async def call(self, held: Budget, limit: int) -> None:
        """Make one call."""
        most = self.chance.randint(1, 100)
        worst = Usage(calls=1, output_tokens=most)
        await anyio.sleep(self.chance.random())
        with anyio.move_on_after(self.chance.choice((0.5, 3, math.inf))):
            try:
                async with held.reserve(worst) as reservation:
                    await anyio.sleep(self.chance.choice((0, 0.1)))
                    reservation.mark_sent()
                    await self._answered(reservation, most, limit)
            except BudgetSpent:
                self.refused += 1
                assert self.in_flight == 0

    async def _answered(self, reservation: Any, most: int, limit: int) -> None:
        self.started += 1
        self.in_flight += most
        cost = most
        try:
            await anyio.sleep(self.chance.random() * 3)
            match self.chance.randrange(4):
                case 0:
                    reservation.release()
                    cost = 0
                case 1:
                    reservation.settle(Usage(calls=1, uncounted=1))
                case _:
                    cost = self.chance.randint(0, most)
                    reservation.settle(Usage(calls=1, output_tokens=cost))
        finally:
            self.in_flight -= most
            self.taken += cost
            assert self.taken + self.in_flight <= limit


@cases(60, 10)
@given(seed=st.integers(0, 10**6), limit=st.integers(0, 4000))
def test_no_limit_is_exceeded_and_none_is_left_unused(seed: int, limit: int) -> None:
    """64 calls at once: never too much, always an end, and a refusal only when nothing is under way."""
    world = World(seed)

    async def main() -> None:
        held = budget(max_tokens=limit)
        async with open_task_group() as tasks:
            for _ in range(64):
                tasks.start_soon(world.call, held, limit)
        assert world.taken <= limit
        left = limit - world.taken
        if not world.refused:
            async with held.reserve(Usage(calls=1, output_tokens=left)):
                pass
            assert f"{world.taken:,} are used" in await refused(held, Usage(calls=1, output_tokens=left + 1))

    virtual_time.run(main)


CAPPED: dict[str, Any] = {"model": "gpt-4o-mini", "max_tokens": 100}
LOCAL: dict[str, Any] = {"model": "own", "base_url": "http://127.0.0.1:8000/v1", "max_tokens": 100}
RUN = "r"


def configured(budget: dict[str, Any], model: dict[str, Any]) -> TrainerConfig:
    models = {"target": model, "optimizer": model}
    return TrainerConfig.model_validate({"budget": budget, "models": models})


@pytest.mark.parametrize(
    ("limits", "model", "passed", "words"),
    [
        ("max_tokens", {"model": "own"}, (), "max_tokens needs models.target.max_tokens"),
        ("max_usd", LOCAL, (), "max_usd needs models.target.price: no list price"),
        ("max_usd", CAPPED, ("target",), "max_usd is not possible with the target"),
        ("max_calls", CAPPED, ("optimizer",), "max_calls is not possible with the optimizer"),
    ],
)
def test_a_budget_that_cannot_hold_names_the_key(
    limits: str, model: dict[str, Any], passed: Collection[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"budget.{words}"):
        require_caps(configured({limits: 1}, model), passed=passed)


def test_a_measurement_asks_nothing_of_the_optimizer() -> None:
    """Neither its cap nor its price, and not whether its calls are seen: it is not called."""
    models = {
        "target": {**CAPPED, "price": {"input": 1, "output": 1}},
        "optimizer": LOCAL | {"max_tokens": None},
    }
    for limit in ("max_tokens", "max_usd"):
        config = TrainerConfig.model_validate({"budget": {limit: 1}, "models": models})
        require_caps(config, passed=(), trains=False)
        require_caps(config, passed=("optimizer",), trains=False)
        with pytest.raises(ConfigError, match=r"models.optimizer|with the optimizer"):
            require_caps(config, passed=())


class Swallowing(ToyEnvironment):
    """Takes every error for a wrong answer."""

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        try:
            return await super().run(item, session, seed=seed)
        except Exception:  # noqa: BLE001 - what users' environments do
            return Grade(score=Score.of(0), answer="")


class Refusing:
    """A session in which the budget is spent."""

    turns = ()

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    async def reply(self, message: str) -> str:
        async with self._budget.reserve(Usage(calls=1)):
            return ""


async def test_an_environment_cannot_make_a_failure_of_a_spent_budget() -> None:
    budget = Budget(BudgetConfig(max_calls=0))
    store = InMemoryRunStore()
    account = Account(RUN, store, store.decision_log(RUN), budget)
    environment = EnvironmentAdapter(Swallowing()).surround(lambda item, seed: cover_rollout(account))
    (item, *_) = environment.items(Split.train)
    with pytest.raises(BudgetSpent):
        await environment.run(item, Refusing(budget), seed=1)
