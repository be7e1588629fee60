"""A run that is told to stop, or is cancelled: what still happens, how soon it ends, what is kept."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from processes import Stopwatch
from pure_world import rows
from reflact import Trainer
from reflact.concurrency import open_task_group
from reflact.protocols import Target
from reflact.records import RunSummary
from reflact.testing import ToyEnvironment
from toy_runs import Actor, build_trainer

GRACE = 60.0
VALIDATION = 6


class Watched(Actor):
    """A toy target that reports each message it begins to answer, and waits where it is told to.

    Args:
        begun: Called with the number of the message, from 1, before it is answered.
        wait: Says whether a message is answered only once ``go_on`` is set.
    """

    def __init__(self, begun: Callable[[int], None], wait: Callable[[int], bool] = lambda _: False) -> None:
        async def act(*_: object) -> None:
            number = len(self.asked)
            begun(number)
            if wait(number):
                await self.go_on.wait()

        super().__init__(act)
        self.go_on = anyio.Event()


def settings(folder: Path, *, concurrency: int = 3, grace: float = GRACE) -> dict[str, Any]:
    return {
        "out_dir": folder / "run",
        "report": False,
        "search": {"sources": ["edits"]},
        "train": {
            "num_epochs": 2,
            "batch_size": 4,
            "rollout_concurrency": concurrency,
            "grace_seconds": grace,
        },
        "reflect": {"minibatch_size": 2},
        "test": {"null_answers": False},  # the tests count stored rollouts, and constants are rollouts too
    }


def trainer(config: dict[str, Any], target: Target | None = None) -> Trainer:
    return build_trainer(config, environment=ToyEnvironment(train=8, val=VALIDATION, test=4), target=target)


def kept(folder: Path, rows_of: str) -> int:
    ((count,),) = rows(folder / "run", f"SELECT count(*) FROM {rows_of}")
    return int(count)


async def goes_on_as_unbroken(config: dict[str, Any], folder: Path) -> RunSummary:
    """Check that a run goes on to the end of one that was never stopped, and return its summary."""
    again = await trainer(config).train()
    whole = await trainer({**config, "out_dir": folder / "whole"}).train()
    part = {"scores", "improvements", "actions", "steps", "best", "final", "status"}
    assert again.status == "completed"
    assert again.model_dump(include=part) == whole.model_dump(include=part)
    return again


async def test_what_is_under_way_finishes_and_nothing_new_begins(tmp_path: Path) -> None:
    config = settings(tmp_path)

    def begun(number: int) -> None:
        if number == 3:
            stopped.stop("enough for today")
            target.go_on.set()

    target = Watched(begun, wait=lambda number: number <= 3)
    stopped = trainer(config, target)
    summary = await stopped.train()
    assert (summary.status, summary.reason, summary.steps) == ("cancelled", "enough for today", 0)
    assert len(target.asked) == 3
    assert kept(tmp_path, "outcomes WHERE kind = 'rollout'") == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["status"] == "cancelled"
    again = await goes_on_as_unbroken(config, tmp_path)
    assert again.reuse.rollouts >= 3


@pytest.mark.parametrize("last", [pytest.param(1, marks=pytest.mark.slow), VALIDATION - 1, VALIDATION])
async def test_a_step_that_needs_nothing_new_is_committed(tmp_path: Path, last: int) -> None:
    config = {
        **settings(tmp_path, concurrency=2 * VALIDATION),
        "gate": {"policy": "strict"},
    }
    before_the_gate = VALIDATION + 4  # the baseline and the batch

    def begun(number: int) -> None:
        if number == before_the_gate + last:
            stopped.stop("while the gate evaluates")
            target.go_on.set()

    target = Watched(begun, wait=lambda number: number > before_the_gate)
    stopped = trainer(config, target)
    summary = await stopped.train()
    assert summary.status == "cancelled"
    whole = last == VALIDATION
    assert (summary.steps, kept(tmp_path, "commits")) == ((1, 2) if whole else (0, 1))
    await goes_on_as_unbroken(config, tmp_path)


async def test_a_call_that_hangs_is_cut_off_after_the_grace(tmp_path: Path) -> None:
    config = settings(tmp_path, grace=0.05)

    def begun(number: int) -> None:
        if number == 3:
            stopped.stop("hanging")

    stopped = trainer(config, Watched(begun, wait=lambda number: number == 2))
    with anyio.fail_after(60):
        summary = await stopped.train()
    assert (summary.status, summary.reason) == ("cancelled", "hanging")
    assert kept(tmp_path, "outcomes WHERE kind = 'rollout'") == 2
    await goes_on_as_unbroken(config, tmp_path)


async def test_stopping_before_the_start_begins_nothing(tmp_path: Path) -> None:
    target = Watched(lambda _: None)
    early = trainer(settings(tmp_path), target)
    early.stop("at the very start")
    summary = await early.train()
    assert (summary.status, summary.reason, target.asked) == ("cancelled", "at the very start", [])
    assert (await early.train()).status == "completed"


async def test_cancelling_stays_cancelling_where_nothing_can_be_stored(tmp_path: Path) -> None:
    def begun(number: int) -> None:
        if number == 3:
            with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as other:
                other.execute("DROP TABLE stage_times")
            task.cancel()

    task = asyncio.create_task(trainer(settings(tmp_path), Watched(begun)).train())
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "hanging", [pytest.param(1, marks=pytest.mark.slow), 2 * VALIDATION + 2, 2 * VALIDATION + 7]
)
async def test_cancelling_ends_a_run_although_a_call_hangs(tmp_path: Path, hanging: int) -> None:
    config = settings(tmp_path)

    def begun(number: int) -> None:
        if number == hanging:
            scope.cancel()

    with anyio.CancelScope() as scope:
        await trainer(config, Watched(begun, wait=lambda number: number >= hanging)).train()
    assert scope.cancelled_caught
    summary = RunSummary.model_validate_json((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert (summary.status, summary.reason) == ("cancelled", "cancelled by its caller")
    await goes_on_as_unbroken(config, tmp_path)


class Locking:
    """Locks a run's database, as another process would, once it is called so many times."""

    def __init__(self, folder: Path, calls: int) -> None:
        self._database = folder / "run" / "run.db"
        self._calls = calls
        self.other: sqlite3.Connection | None = None

    def __call__(self, *_: object) -> None:
        self._calls -= 1
        if self._calls == 0:
            self.other = sqlite3.connect(self._database, isolation_level=None)
            self.other.execute("BEGIN IMMEDIATE")

    async def cancelled(self, run: Trainer) -> float:
        async with open_task_group() as tasks:
            tasks.start_soon(run.train)
            while self.other is None:
                await checkpoint()
            await anyio.wait_all_tasks_blocked()
            stopwatch = Stopwatch()
            tasks.cancel_scope.cancel()
        took = stopwatch.read()
        self.other.execute("ROLLBACK")
        self.other.close()
        return took


@pytest.mark.slow
async def test_cancelling_does_not_wait_for_another_process(tmp_path: Path) -> None:
    config, lock = settings(tmp_path), Locking(tmp_path, 2 * VALIDATION + 2)
    assert await lock.cancelled(trainer(config, Watched(lock))) < 1
    await goes_on_as_unbroken(config, tmp_path)
