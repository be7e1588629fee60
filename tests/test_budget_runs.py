"""Whole runs under budgets: never over, killed or not, and a larger budget goes on to the same result."""

from __future__ import annotations

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import virtual_time
from pure_world import URL, PureNetwork, differences, left_by, rows, settings, write_world
from reflact import Trainer, wiring
from reflact.config import BudgetConfig
from reflact.errors import ConfigError
from reflact.llm.budget import MORE, Amount, amount_of, lacking
from reflact.results import RunSummary, Usage
from reflact.testing import MemoryStore, ToyEnvironment, ToyTarget
from toll_world import WIDE, Provider, planned, started

RUNS = 40
"""Of the 200 that `benchmarks/budgets.py` takes through the same story."""

NEED = {"max_calls": 150.0, "max_tokens": 60_000.0, "max_usd": 0.25, "max_seconds": 60.0}
"""About what a run takes, with what it reserves."""


class Killed(BaseException):
    """The process is gone."""


class Left(NamedTuple):
    """What a run has committed and told."""

    records: tuple[str, ...]
    events: tuple[str, ...]

    def begins(self, whole: Left) -> bool:
        """Whether this is how another run began."""
        records, events = len(self.records), len(self.events)
        return whole.records[:records] == self.records and whole.events[:events] == self.events


async def left_in(store: MemoryStore, run_id: str) -> Left:
    """Read what a run left."""
    return Left(
        records=tuple(record.model_dump_json() for record in await store.records(run_id)),
        events=tuple(event.model_dump_json() for event in await store.events(run_id)),
    )


class Story:
    """A run under random limits that is started again until it completes, each time with more.

    Args:
        plan: The run.
        seed: Of everything random: limits, kills, latencies, usages and faults.

    Attributes:
        ends: How each start ended.
        most: The most requests in flight at once.
    """

    def __init__(self, plan: wiring.Plan, seed: int) -> None:
        self._plan = plan
        self._chance = random.Random(seed)
        self._network = Provider(random.Random(seed + 1), faults=0.1)
        self._store = MemoryStore()
        self._seconds = 0.0
        chosen = self._chance.sample(sorted(NEED), self._chance.randint(1, 2))
        self._limits = {key: NEED[key] * self._chance.uniform(0.05, 1) for key in chosen}
        self.ends: list[str] = []

    @property
    def most(self) -> int:
        """The most requests that were in flight at once."""
        return self._network.most

    async def tell(self, whole: Left) -> None:
        """Start the run until it completes, and hold what each start leaves against an unbroken run."""
        while "completed" not in self.ends:
            before = anyio.current_time()
            end = await self._start()
            self._seconds += anyio.current_time() - before
            self.ends.append(end)
            left = await left_in(self._store, self._plan.run_id)
            assert left == whole if end == "completed" else left.begins(whole)
            await self._audit()
            if end == "budget":
                self._limits = {key: 1.5 * limit for key, limit in self._limits.items()}

    async def _start(self) -> str:
        last = self._network.requests + self._chance.randint(1, 100)
        kept: list[MemoryStore] = []

        def kill(number: int) -> None:
            if number == last and self.ends.count("killed") < 2:
                kept.append(copy.deepcopy(self._store))
            if kept:
                raise Killed

        self._network.kill = kill
        try:
            summary = await started(self._plan, self._store, self._network, self._budget)
        except BaseExceptionGroup:
            (self._store,) = kept
            return "killed"
        if summary.status == "budget":
            assert summary.reason is not None
            assert summary.reason.startswith(tuple(f"budget.{key} is" for key in self._limits))
        return summary.status

    @property
    def _budget(self) -> BudgetConfig:
        counts = {"max_calls", "max_tokens"}
        return BudgetConfig.model_validate(
            {key: int(n) if key in counts else n for key, n in self._limits.items()}
        )

    async def _audit(self) -> None:
        """The ledger holds all that the provider charged, and no more than was allowed."""
        spend = await self._store.spend(self._plan.run_id)
        booked = sum((amount_of(s.usage) + amount_of(s.worst) for s in spend), Amount())
        bill = self._network.bill
        assert lacking(self._budget, booked, Amount()) is None
        assert booked.calls >= bill.calls
        assert booked.tokens >= bill.tokens
        assert booked.billionths >= bill.billionths
        assert self._seconds <= self._limits.get("max_seconds", self._seconds) + 1e-6


async def unbroken(plan: wiring.Plan) -> Left:
    """Return what a run without limits and faults leaves."""
    store, network = MemoryStore(), Provider(random.Random(0))
    summary = await started(plan, store, network, BudgetConfig())
    assert summary.status == "completed"
    assert network.most == WIDE
    return await left_in(store, plan.run_id)


def test_no_limit_is_exceeded_and_more_of_it_goes_on_to_the_same_result(tmp_path: Path) -> None:
    """At 64 calls in flight, with faults and kills: the provider itself looks after each charge."""

    async def main() -> None:
        plan = planned(tmp_path)
        whole = await unbroken(plan)
        ends: Counter[str] = Counter()
        most = 0
        for seed in range(RUNS):
            story = Story(plan, seed)
            await story.tell(whole)
            ends.update(story.ends)
            most = max(most, story.most)
        assert ends.keys() == {"completed", "budget", "killed"}
        assert min(ends.values()) >= RUNS
        assert most == WIDE

    virtual_time.run(main)


@pytest.mark.parametrize("key", ["max_tokens", "max_usd"])
def test_a_provider_that_ignores_caps_stops_the_run(tmp_path: Path, key: str) -> None:
    """Its first overrun is booked as it was, and the run ends with that reason once all have answered."""

    async def main() -> None:
        plan, store = planned(tmp_path), MemoryStore()
        network = Provider(random.Random(1), honest=False)
        summary = await started(plan, store, network, BudgetConfig.model_validate({key: NEED[key]}))
        assert summary.status == "budget"
        assert summary.reason is not None
        assert "does not keep to caps: it wrote 41 tokens where 40 were the most" in summary.reason
        assert summary.steps == 0
        assert sum(entry.unsettled for entry in summary.spend) == 0

    virtual_time.run(main)


def test_time_ends_what_is_in_flight(tmp_path: Path) -> None:
    """At once: what was sent is booked at its worst case, and the summary says so."""

    async def main() -> None:
        plan, store, network = planned(tmp_path), MemoryStore(), Provider(random.Random(1))
        summary = await started(plan, store, network, BudgetConfig(max_seconds=2.0))
        assert anyio.current_time() == 2.0
        assert summary.status == "budget"
        assert summary.seconds == 2.0
        assert summary.reason is not None
        assert summary.reason.startswith("budget.max_seconds is 2, and the time is over")
        (entry,) = summary.spend
        assert entry.unsettled == entry.worst.calls > 0
        before = network.requests
        again = await started(plan, store, network, BudgetConfig(max_seconds=2.0))
        assert (again.status, network.requests) == ("budget", before)

    virtual_time.run(main)


def test_a_completed_run_is_looked_at_without_a_budget(tmp_path: Path) -> None:
    """Started again with nothing left of any limit it completes again: everything is stored."""

    async def main() -> None:
        plan, store, network = planned(tmp_path), MemoryStore(), Provider(random.Random(1))
        await started(plan, store, network, BudgetConfig())
        before = network.requests
        nothing = BudgetConfig(max_usd=0, max_tokens=0, max_calls=0, max_seconds=0)
        summary = await started(plan, store, network, nothing)
        assert (summary.status, network.requests) == ("completed", before)

    virtual_time.run(main)


# ------------------------------------------------------------------------------------------------ trainers

SMALL: dict[str, Any] = {
    "train": {"num_epochs": 1, "batch_size": 6, "accumulation": 1},
    "models": {
        "target": {
            "model": "pure",
            "base_url": f"{URL}/v1",
            "api_key_env": None,
            "sample_header": "x-sample",
            "max_tokens": 50,
        },
        "optimizer": {"sample_header": "x-sample", "max_tokens": 900},
    },
}


def test_a_trainer_stops_at_its_budget_and_goes_on_with_more(tmp_path: Path) -> None:
    """On a real store: the stop is a status with a reason, nothing is unmeasured, nothing is asked twice."""
    world = write_world(tmp_path / "world", train=6, val=3, test=2)
    network = PureNetwork()

    def train(folder: str, **budget: float) -> RunSummary:
        plain = settings(world, tmp_path / folder, **SMALL, budget=budget)
        return anyio.run(Trainer(plain, transport=network).train)

    assert train("whole").status == "completed"
    whole = left_by(tmp_path / "whole")
    network.samples.clear()
    stopped = train("again", max_tokens=300_000, max_calls=20)
    assert stopped.status == "budget"
    assert stopped.reason == f"budget.max_calls is 20: 20 are taken, and the next call may take 1; {MORE}"
    assert rows(tmp_path / "again", "SELECT * FROM journal WHERE label LIKE 'unmeasured%'") == ()
    assert train("again", max_tokens=3_000_000).status == "completed"
    assert differences(left_by(tmp_path / "again"), whole) == []
    assert len(set(network.samples)) == len(network.samples)


def test_a_target_passed_in_python_takes_what_was_declared(tmp_path: Path) -> None:
    """Its rollouts are booked in full, and end with the budget as calls do."""
    world = write_world(tmp_path / "world")
    plain = settings(world, tmp_path / "run", **SMALL, budget={"max_calls": 7})
    passed: dict[str, Any] = {
        "environment": ToyEnvironment(),
        "target": ToyTarget(),
        "transport": PureNetwork(),
    }
    with pytest.raises(ConfigError, match=r"needs target\.max_calls_per_rollout"):
        Trainer(plain, **passed)
    plain["target"] = {"max_calls_per_rollout": 2}
    summary = anyio.run(Trainer(plain, **passed).train)
    assert summary.status == "budget"
    assert summary.reason == f"budget.max_calls is 7: 6 are taken, and the next call may take 2; {MORE}"
    (entry,) = summary.spend
    assert entry.usage == Usage(calls=6, uncounted=6)
