"""What budgets need to know beforehand, and rollouts whose calls are not seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import anyio
import pytest

import virtual_time
from reflact.concurrency import fan_out
from reflact.config.training import BudgetConfig, TrainerConfig
from reflact.errors import BudgetSpent, ConfigError
from reflact.llm.budget import (
    Budget,
    BudgetedEnvironment,
    DeclaredCostEnvironment,
    declared_rollout_cost,
    require_caps,
)
from reflact.protocols import Session
from reflact.records import Usage
from reflact.testing import InMemoryRunStore, ToyEnvironment, ToyTarget
from reflact.types import Grade, Item, Score, Skill, Split

pytestmark = pytest.mark.anyio

CAPPED: dict[str, Any] = {"model": "gpt-4o-mini", "max_tokens": 100}
LOCAL: dict[str, Any] = {"model": "own", "base_url": "http://127.0.0.1:8000/v1", "max_tokens": 100}
RUN = "r"


def configured(
    budget: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any] | None = None, **target: Any
) -> TrainerConfig:
    """Return a configuration of a budget and one model in both roles."""
    models = {"target": model, "optimizer": {**model, **(optimizer or {})}}
    return TrainerConfig.model_validate({"budget": budget, "models": models, "target": target})


@pytest.mark.parametrize(
    ("config", "passed"),
    [
        (configured({}, {"model": "own"}), ()),
        (configured({"max_seconds": 1, "max_calls": 1}, {"model": "own"}), ()),
        (configured({"max_tokens": 1, "max_usd": 1}, CAPPED), ()),
        (configured({"max_tokens": 1}, LOCAL), ()),
        (configured({"max_tokens": 1}, {"model": "own", "extra_body": {"max_completion_tokens": 5}}), ()),
        (configured({"max_usd": 1}, {**LOCAL, "unpriced": True}), ()),
        (configured({"max_usd": 1}, {**LOCAL, "price": {"input": 1, "output": 2}}), ()),
        (configured({"max_calls": 1}, CAPPED, max_calls_per_rollout=2), ("target",)),
        (configured({"max_usd": 1}, CAPPED, max_tokens_per_rollout=2), ("target",)),
        (configured({"max_seconds": 1}, {}), ("target", "optimizer")),
    ],
)
def test_a_budget_that_can_hold_is_accepted(config: TrainerConfig, passed: Collection[str]) -> None:
    """Calls and time need nothing; tokens need caps; money needs prices, too, or to be told of none."""
    require_caps(config, passed=passed)


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
        (configured({"max_usd": 1}, CAPPED, LOCAL), (), "set models.optimizer.unpriced to true"),
        (configured({"max_usd": 1}, CAPPED), ("target",), "needs target.max_tokens_per_rollout"),
        (
            configured({"max_calls": 1}, CAPPED, max_tokens_per_rollout=1),
            ("target",),
            "budget.max_calls needs target.max_calls_per_rollout",
        ),
        (
            configured({"max_usd": 1}, LOCAL, max_tokens_per_rollout=1),
            ("target",),
            "budget.max_usd needs models.target.price",
        ),
        (
            configured({"max_calls": 1}, CAPPED),
            ("optimizer",),
            "budget.max_calls cannot hold for an optimizer",
        ),
    ],
)
def test_a_budget_that_cannot_hold_names_the_key_that_is_missing(
    config: TrainerConfig, passed: Collection[str], words: str
) -> None:
    """Before any call."""
    with pytest.raises(ConfigError) as error:
        require_caps(config, passed=passed)
    assert words in str(error.value)


def test_declared_tokens_count_as_the_dearest_kind() -> None:
    """Nobody knows how many of them are written; with no declaration there is nothing to count."""
    price = {"input": 1, "cached_input": 0.5, "output": 9}
    config = configured({}, {**LOCAL, "price": price}, max_tokens_per_rollout=1000, max_calls_per_rollout=3)
    assert declared_rollout_cost(config) == Usage(calls=3, input_tokens=1000, usd=0.009)
    assert declared_rollout_cost(configured({}, CAPPED)) is None


# ------------------------------------------------------------------------------------------------- rollouts


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
    environment = BudgetedEnvironment(Swallowing(), budget=budget)
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
    unseen = DeclaredCostEnvironment(environment, budget=budget, responses=store, run_id=RUN, worst=worst)
    target = ToyTarget()

    async def one(item: Item) -> object:
        try:
            return await unseen.run(item, target.session(Skill(text=""), rollout=item.id), seed=1)
        except (ValueError, BudgetSpent) as error:
            return type(error)

    return await fan_out(one, unseen.items(Split.train)[:size])


def test_unseen_rollouts_take_what_was_declared() -> None:
    """So many at once as fit, each booked in full; the ledger says that nobody counted."""

    async def main() -> None:
        store, environment = InMemoryRunStore(), Busy("train-001")
        await store.open_run(RUN, {}, {})
        budget = Budget(BudgetConfig(max_tokens=350))
        outcomes = await rolled(environment, store, budget, 3)
        assert [type(o) if isinstance(o, Grade) else o for o in outcomes] == [Grade, ValueError, Grade]
        (spent,) = await store.spend(RUN)
        assert spent.usage == Usage(calls=4, uncounted=4)
        assert (spent.unsettled, spent.worst_case) == (1, Usage(calls=2, input_tokens=300))
        again = Budget(BudgetConfig(max_tokens=350))
        again.begin([spent], 0.0)
        assert await rolled(environment, store, again, 1) == (BudgetSpent,)

    virtual_time.run(main)


def test_unseen_rollouts_wait_for_each_other_and_end_with_the_budget() -> None:
    """Declared caps are never undercut, so those that do not fit are refused when the others are through."""

    async def main() -> None:
        store, environment = InMemoryRunStore(), Busy()
        await store.open_run(RUN, {}, {})
        outcomes = await rolled(environment, store, Budget(BudgetConfig(max_calls=5)), 6)
        assert sum(isinstance(outcome, Grade) for outcome in outcomes) == 2
        assert outcomes.count(BudgetSpent) == 4
        assert environment.most == 2
        assert anyio.current_time() == 1

    virtual_time.run(main)
