"""Whole runs under budgets: never over, killed or not, and a larger budget goes on to the same result."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

import virtual_time
from pure_world import URL, PureNetwork, differences, left_by, rows, settings, write_world
from reflact import Trainer
from reflact.config.training import BudgetConfig
from reflact.llm.budget import RAISE_HINT
from reflact.records import RunSummary
from reflact.testing import InMemoryRunStore
from toll_world import NEED, WIDE, Provider, Story, planned, started, unbroken


@pytest.mark.slow
def test_no_limit_is_exceeded_and_more_of_it_goes_on_to_the_same_result(
    tmp_path: Path, thorough: bool
) -> None:
    async def main() -> None:
        plan = planned(tmp_path)
        whole = await unbroken(plan)
        runs = 40 if thorough else 5
        ends: Counter[str] = Counter()
        most = 0
        for seed in range(runs):
            story = Story(plan, seed)
            await story.tell(whole)
            ends.update(story.ends)
            most = max(most, story.most)
        assert ends.keys() == {"completed", "budget", "killed"}
        assert min(ends.values()) >= runs
        assert most == WIDE

    virtual_time.run(main)


@pytest.mark.parametrize("key", ["max_tokens", "max_usd"])
def test_a_provider_that_ignores_caps_stops_the_run(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        plan, store = planned(tmp_path), InMemoryRunStore()
        network = Provider(random.Random(1), honest=False)
        summary = await started(plan, store, network, BudgetConfig.model_validate({key: NEED[key]}))
        assert summary.status == "budget"
        assert "ignores caps: it wrote 41 tokens, and the request allowed 40" in summary.reason
        assert summary.steps == 0
        assert sum(entry.unsettled for entry in summary.spend) == 0

    virtual_time.run(main)


def test_time_ends_what_is_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        plan, store, network = planned(tmp_path), InMemoryRunStore(), Provider(random.Random(1))
        summary = await started(plan, store, network, BudgetConfig(max_seconds=2.0))
        assert anyio.current_time() == 2.0
        assert summary.status == "budget"
        assert summary.seconds == 2.0
        assert summary.reason.startswith("budget.max_seconds is 2, and the time is over")
        (entry,) = summary.spend
        assert entry.unsettled == entry.worst_case.calls > 0
        before = network.requests
        again = await started(plan, store, network, BudgetConfig(max_seconds=2.0))
        assert (again.status, network.requests) == ("budget", before)

    virtual_time.run(main)


def test_a_completed_run_is_looked_at_without_a_budget(tmp_path: Path) -> None:
    async def main() -> None:
        plan, store, network = planned(tmp_path), InMemoryRunStore(), Provider(random.Random(1))
        await started(plan, store, network, BudgetConfig())
        before = network.requests
        nothing = BudgetConfig(max_usd=0, max_tokens=0, max_calls=0, max_seconds=0)
        summary = await started(plan, store, network, nothing)
        assert (summary.status, network.requests) == ("completed", before)

    virtual_time.run(main)


SMALL: dict[str, Any] = {
    "search": {"sources": ["edits"]},
    "train": {"num_epochs": 1, "batch_size": 6, "accumulation": 1},
    "models": {
        "target": {
            "model": "pure",
            "base_url": f"{URL}/v1",
            "api_key_env": None,
            "call_id_header": "x-sample",
            "max_tokens": 50,
        },
        "optimizer": {"call_id_header": "x-sample", "max_tokens": 900},
    },
}


def test_a_trainer_stops_at_its_budget_and_goes_on_with_more(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", train=6, val=3, test=2)
    network = PureNetwork()

    def train(folder: str, **budget: float) -> RunSummary:
        plain = settings(world, tmp_path / folder, **SMALL, budget=budget)
        return anyio.run(Trainer(plain, transport=network).train)

    assert train("whole").status == "completed"
    whole = left_by(tmp_path / "whole")
    network.samples.clear()
    stopped = train("again", max_tokens=300_000, max_calls=15)
    assert stopped.status == "budget"
    assert stopped.reason == f"budget.max_calls is 15: 15 are used, and the next call may use 1; {RAISE_HINT}"
    assert rows(tmp_path / "again", "SELECT * FROM outcomes WHERE key LIKE '%/unmeasured%'") == ()
    assert train("again", max_tokens=3_000_000).status == "completed"
    assert differences(left_by(tmp_path / "again"), whole) == []
    assert len(set(network.samples)) == len(network.samples)
