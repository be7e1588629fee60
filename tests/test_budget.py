"""Budgets: no limit is exceeded with any number of calls in flight, and each affordable call is admitted."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Sequence
from functools import partial
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
from reflact.llm.budget import (
    Account,
    Amount,
    Budget,
    amount_of,
    cover_rollout,
    describe_overrun,
    find_exceeded_limit,
    require_caps,
)
from reflact.llm.pricing import BILLION
from reflact.protocols import Session
from reflact.records import Spend, Usage
from reflact.testing import InMemoryRunStore, ToyEnvironment, ToyTarget
from reflact.types import Grade, Item, Score, Skill, Split

pytestmark = pytest.mark.virtual_time

WORST = Usage(calls=1, input_tokens=80, output_tokens=20, usd=0.1)
USED = Usage(calls=1, input_tokens=30, output_tokens=10, usd=0.04)


def budget(**limits: Any) -> Budget:
    """Return a budget with limits."""
    return Budget(BudgetConfig(**limits))


def account_of(store: InMemoryRunStore, held: Budget) -> Account:
    """Return the run's account."""
    return Account(RUN, store, store.decision_log(RUN), held)


async def refused(held: Budget, worst: Usage = WORST) -> str:
    """Return why a call is refused."""
    with pytest.raises(BudgetSpent) as error:
        async with held.reserve(worst):
            pass
    return str(error.value)


AMOUNTS = st.builds(Amount, *(st.integers(0, 100) for _ in range(3)))
LIMITS = st.none() | st.integers(0, 100)


@given(taken=AMOUNTS, most=AMOUNTS, calls=LIMITS, tokens=LIMITS, billionths=LIMITS)
def test_a_call_fits_where_no_sum_is_above_its_limit(
    taken: Amount, most: Amount, calls: int | None, tokens: int | None, billionths: int | None
) -> None:
    """To the call, the token and the billionth of a dollar."""
    usd = None if billionths is None else billionths / BILLION
    limits = BudgetConfig(max_calls=calls, max_tokens=tokens, max_usd=usd)
    after = taken + most
    pairs = ((calls, after.calls), (tokens, after.tokens), (billionths, after.billionths))
    fits = all(limit is None or total <= limit for limit, total in pairs)
    assert (find_exceeded_limit(limits, taken, most) is None) is fits


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_calls": 5}, "budget.max_calls is 5: 5 are used, and the next call may use 1;"),
        ({"max_tokens": 1500}, "budget.max_tokens is 1,500: 1,450 are used, and the next call may use 100;"),
        ({"max_usd": 0.5}, "budget.max_usd is 0.500000: 0.450000 are used, and the next call may use 0.1"),
    ],
)
def test_a_refusal_names_the_key_and_the_numbers(limits: dict[str, Any], sentence: str) -> None:
    """Whoever reads it knows which key to raise, and how far it went."""
    taken = Amount(5, 1450, 450_000_000)
    reason = find_exceeded_limit(BudgetConfig(**limits), taken, amount_of(WORST))
    assert reason.startswith(sentence)
    assert reason.endswith("set a larger one to go on")


def test_sums_of_prices_are_exact() -> None:
    """Ten times ten cents are a dollar, and fit it."""
    taken = sum((amount_of(Usage(calls=1, usd=0.1)) for _ in range(9)), Amount())
    assert find_exceeded_limit(BudgetConfig(max_usd=1.0), taken, amount_of(Usage(usd=0.1))) is None
    assert (
        find_exceeded_limit(BudgetConfig(max_usd=0.999999999), taken, amount_of(Usage(usd=0.1))) is not None
    )


@pytest.mark.parametrize(
    ("usage", "word"),
    [
        (USED, None),
        (WORST, None),
        (USED.model_copy(update={"output_tokens": 21}), "wrote 21 tokens, and the request allowed 20"),
        (USED.model_copy(update={"input_tokens": 81}), "read 81 tokens, and the request allowed 80"),
    ],
)
def test_an_overrun_is_told_by_what_went_beyond(usage: Usage, word: str | None) -> None:
    """Each of input and output is held against its own bound."""
    reason = describe_overrun(usage, WORST)
    assert reason is None if word is None else reason is not None and word in reason


async def test_a_call_that_does_not_fit_waits_for_what_is_in_flight() -> None:
    """It goes as soon as one in flight settles far enough below what it held."""
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
    """All who wait are refused with the same reason, and so is whoever comes later, even if it would fit."""
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


async def test_nobody_overtakes() -> None:
    """A small call that would fit waits behind a large one, so that the large one's turn comes."""
    held, order = budget(max_tokens=150), []

    async def call(name: str, tokens: int) -> None:
        async with held.reserve(Usage(calls=1, output_tokens=tokens)) as reservation:
            order.append(name)
            await anyio.sleep(1)
            reservation.release()

    await fan_out(lambda given: call(*given), (("first", 100), ("large", 100), ("small", 10)))
    assert order == ["first", "large", "small"]


async def test_a_waiter_that_leaves_lets_the_next_one_go() -> None:
    """The place at the head of the queue is not kept for whoever was cancelled there."""
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
    """What was settled counts as it was, what was cut off or not counted at its worst case."""
    held = budget(max_calls=10, max_tokens=1000)
    spent = [
        Spend(role="a", purpose="b", usage=Usage(calls=3, input_tokens=100, uncounted=1), unsettled=2),
        Spend(
            role="a", purpose="c", usage=Usage(), unsettled=2, worst_case=Usage(calls=2, output_tokens=850)
        ),
    ]
    held.begin(spent, 0.0)
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
    assert held.find_exceeded_limit(WORST) is None
    held.check()


async def test_time_is_a_limit_over_all_starts() -> None:
    """The deadline is what earlier starts left; after it nothing is admitted."""
    held = budget(max_seconds=10)
    held.begin([], 7.5)
    assert held.deadline == 2.5
    async with held.reserve(WORST):
        pass
    await anyio.sleep(2.5)
    assert "budget.max_seconds is 10" in await refused(held)


async def test_a_start_without_time_may_look_but_not_ask() -> None:
    """There is no deadline then, and no call."""
    held = budget(max_seconds=10)
    held.begin([], 10.0)
    assert held.deadline == math.inf
    assert "the time is over" in await refused(held)


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


def configured(
    budget: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any] | None = None, **target: Any
) -> TrainerConfig:
    """Return a configuration of a budget and one model in both roles."""
    models = {"target": model, "optimizer": {**model, **(optimizer or {})}}
    return TrainerConfig.model_validate({"budget": budget, "models": models, "target": target})


def refusal_of(config: TrainerConfig, passed: Collection[str]) -> ConfigError | None:
    """Return the error of a budget that could not hold; None if it can."""
    try:
        require_caps(config, passed=passed)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("config", "passed"),
    [
        (configured({}, {"model": "own"}), ()),
        (configured({"max_seconds": 1, "max_calls": 1}, {"model": "own"}), ()),
        (configured({"max_tokens": 1, "max_usd": 1}, CAPPED), ()),
        (configured({"max_tokens": 1}, LOCAL), ()),
        (configured({"max_tokens": 1}, {"model": "own", "extra_body": {"max_completion_tokens": 5}}), ()),
        (configured({"max_usd": 1}, {**LOCAL, "price": {"input": 0, "output": 0}}), ()),
        (configured({"max_usd": 1}, {**LOCAL, "price": {"input": 1, "output": 2}}), ()),
        (configured({"max_seconds": 1}, {}), ("target", "optimizer")),
    ],
)
def test_a_budget_that_can_hold_is_accepted(config: TrainerConfig, passed: Collection[str]) -> None:
    """Calls and time need nothing; tokens need caps; money needs prices, too, or to be told of none."""
    assert refusal_of(config, passed) is None


@pytest.mark.parametrize(
    ("config", "passed", "words"),
    [
        (
            configured({"max_tokens": 1}, {"model": "own"}),
            (),
            "budget.max_tokens needs models.target.max_tokens",
        ),
        (
            configured({"max_usd": 1}, CAPPED, {"max_tokens": None}),
            (),
            "budget.max_usd needs models.optimizer.max_tokens",
        ),
        (configured({"max_usd": 1}, LOCAL), (), "budget.max_usd needs models.target.price: no list price"),
        (
            configured({"max_usd": 1}, CAPPED, LOCAL),
            (),
            "budget.max_usd needs models.optimizer.price: no list price",
        ),
        (configured({"max_usd": 1}, CAPPED), ("target",), "budget.max_usd is not possible with a target"),
        (configured({"max_calls": 1}, CAPPED), ("target",), "budget.max_calls is not possible with a target"),
        (
            configured({"max_calls": 1}, CAPPED),
            ("optimizer",),
            "budget.max_calls is not possible with an optimizer",
        ),
    ],
)
def test_a_budget_that_cannot_hold_names_the_key_that_is_missing(
    config: TrainerConfig, passed: Collection[str], words: str
) -> None:
    """Before any call."""
    assert words in str(refusal_of(config, passed))


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
    """What it returns after swallowing the error is no result."""
    budget = Budget(BudgetConfig(max_calls=0))
    account = account_of(InMemoryRunStore(), budget)
    environment = EnvironmentAdapter(Swallowing()).surround(lambda item, seed: cover_rollout(account))
    (item, *_) = environment.items(Split.train)
    with pytest.raises(BudgetSpent):
        await environment.run(item, Refusing(budget), seed=1)


class Busy(ToyEnvironment):
    """Takes a second for each rollout, and breaks on some items.

    Args:
        broken: Their ids.
    """

    def __init__(self, *broken: str) -> None:
        super().__init__(train=6)
        self._broken = broken
        self.running = self.most = 0

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await anyio.sleep(1)
            if item.id in self._broken:
                raise ValueError("broken")
            return await super().run(item, session, seed=seed)
        finally:
            self.running -= 1


async def rolled(environment: Busy, store: InMemoryRunStore, budget: Budget, size: int) -> Sequence[object]:
    """Run as many items at once, with 100 tokens and 2 calls declared for each."""
    worst = Usage(calls=2, input_tokens=100)
    cover = partial(cover_rollout, account=account_of(store, budget), worst=worst)
    unseen = EnvironmentAdapter(environment).surround(cover)
    target = ToyTarget()

    async def one(item: Item) -> object:
        try:
            return await unseen.run(item, target.session(Skill(text=""), rollout=item.id), seed=1)
        except (ValueError, BudgetSpent) as error:
            return type(error)

    return await fan_out(one, unseen.items(Split.train)[:size])
