"""Simulators: worlds are made from seeds, and calls of many rollouts are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact.concurrency import fan_out
from reflact.environments import CallBatcher, SimulatorEnvironment
from reflact.errors import ConfigError
from reflact.protocols import Session
from reflact.testing import ToyEnvironment, ToyTarget, toy_optimizer
from reflact.types import Grade, Item, Score, Skill, Split
from toy_runs import build_trainer, settings

SQUARE = "- square: answer with the number times itself."


async def play(seed: int, session: Session) -> Grade:
    """Ask the toy target for a rule that the seed draws, and grade its answer."""
    name, number = ("double", "square")[seed % 2], 10 + seed
    answer = await session.reply(f"{name} {number}")
    right = answer == str(number * 2 if name == "double" else number * number)
    feedback = None if right else f"missing rule: {name}"
    return Grade(score=Score.of(right), answer=answer, feedback=feedback)


async def test_a_run_deals_the_seeds_of_a_simulator(tmp_path: Path) -> None:
    """Each seed is in one split, and plays its own world, whatever the trial's seed is."""
    world = SimulatorEnvironment(play, name="toy-worlds", train=8, val=4, test=4)
    assert [item.input for split in Split for item in world.items(split)] == list(range(16))
    item = world.items(Split.train)[3]
    for seed in range(2):
        session = ToyTarget().session(Skill(text=SQUARE), rollout=str(seed))
        graded = await world.run(item, session, seed=seed)
        assert (graded.answer, graded.score) == ("169", Score.of(1))
    config = settings(tmp_path, train={"batch_size": 4, "num_epochs": 1}, test={"enabled": True})
    summary = await build_trainer(config, environment=world, script=toy_optimizer(edits=2)).train()
    assert summary.score("best", Split.test).hard == 1
    with pytest.raises(ConfigError, match="val split needs at least one world"):
        SimulatorEnvironment(play, name="toy-worlds", train=8, val=0, test=4)


LONG = 60.0
"""Longer than any test: such a batch starts when it is full."""


class Doubler:
    """Doubles numbers in batches, which it notes; ``block`` keeps the first one until ``go`` is set."""

    def __init__(self, *, block: bool = False) -> None:
        self.batches: list[tuple[int, ...]] = []
        self.computing = self.most = 0
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.cancelled = False
        if not block:
            self.go.set()

    async def compute(self, values: Sequence[int]) -> list[int | Exception]:
        """Return the doubles; an odd number above 100 has an error in its place, and 666 none for any."""
        self.batches.append(tuple(values))
        self.computing += 1
        self.most = max(self.most, self.computing)
        self.begun.set()
        try:
            await self.go.wait()
            await anyio.lowlevel.checkpoint()
        except BaseException:
            self.cancelled = True
            raise
        finally:
            self.computing -= 1
        if 666 in values:
            raise OSError("the simulator broke")
        if 888 in values:
            raise SystemExit("the simulator is over")
        results: list[int | Exception] = [
            KeyError(value) if value > 100 and value % 2 else 2 * value for value in values
        ]
        return results[: None if 777 not in values else -1]


async def test_calls_are_computed_together() -> None:
    doubler = Doubler()
    double = CallBatcher(doubler.compute, size=4, seconds=LONG)
    assert await fan_out(double, range(12)) == tuple(range(0, 24, 2))
    assert doubler.batches == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert doubler.most == 1


async def test_an_error_of_one_value_is_that_of_its_caller() -> None:
    """An exception in the place of a result is raised to one caller; one that is raised, or a lost result, to all."""

    async def attempt(value: int) -> Any:
        try:
            return await double(value)
        except Exception as error:  # noqa: BLE001 - compared below
            return type(error).__name__

    double = CallBatcher(Doubler().compute, size=3, seconds=LONG)
    assert await fan_out(attempt, (1, 101, 2)) == (2, "KeyError", 4)
    assert await fan_out(attempt, (1, 666, 2)) == ("OSError",) * 3
    assert await fan_out(attempt, (1, 777, 2)) == ("ValueError",) * 3
    assert await fan_out(attempt, (1, 888, 2)) == ("ExitRaised",) * 3
    with pytest.raises(ConfigError, match="at least 1"):
        CallBatcher(Doubler().compute, size=0)


@pytest.mark.parametrize("first", [0, 1])
async def test_a_batch_goes_on_while_one_caller_waits(first: int) -> None:
    doubler = Doubler(block=True)
    double = CallBatcher(doubler.compute, size=2, seconds=LONG)
    scopes = [anyio.CancelScope(), anyio.CancelScope()]
    results = {}

    async def call(n: int) -> None:
        with scopes[n]:
            results[n] = await double(n + 1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 0)
        tasks.start_soon(call, 1)
        await doubler.begun.wait()
        scopes[first].cancel()
        await anyio.wait_all_tasks_blocked()
        doubler.go.set()
    assert results == {1 - first: 2 * (2 - first)}
    assert (doubler.batches, doubler.cancelled) == ([(1, 2)], False)


async def test_a_batch_without_callers_is_cancelled() -> None:
    doubler = Doubler(block=True)
    double = CallBatcher(doubler.compute, size=2, seconds=LONG)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(double, 1)
        tasks.start_soon(double, 2)
        await doubler.begun.wait()
        tasks.cancel_scope.cancel()
    assert doubler.cancelled
    doubler.go.set()
    assert await fan_out(double, (5, 6)) == (10, 12)


class BatchedWorld(ToyEnvironment):
    """The toy world with a simulator that grades many answers in one step; one item's step fails for a while."""

    def __init__(self, *, broken: str = "") -> None:
        super().__init__(train=8, val=8, test=8)
        self.sizes: list[int] = []
        self.broken = broken
        self._step = CallBatcher(self._grade_all, size=4)

    async def _grade_all(self, grades: Sequence[tuple[Item, Grade]]) -> list[Grade | Exception]:
        self.sizes.append(len(grades))
        await anyio.lowlevel.checkpoint()
        return [OSError("no world") if item.id == self.broken else grade for item, grade in grades]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        return await self._step((item, await super().run(item, session, seed=seed)))


async def test_a_run_over_batches_is_the_same_run(tmp_path: Path) -> None:
    """A training whose environment computes batches has the history of one without; a failure costs one rollout."""

    async def train(folder: Path, environment: ToyEnvironment) -> tuple[str, int]:
        trainer = build_trainer(
            settings(folder, train={"num_epochs": 1, "batch_size": 4}, gate={"coverage": 0.5}),
            environment=environment,
        )
        summary = await trainer.train()
        skill = (folder / "best_skill.md").read_text(encoding="utf-8")
        return skill + str([score.model_dump() for score in summary.scores]), sum(
            score.unmeasured for score in summary.scores if score.name == "best"
        )

    plain = await train(tmp_path / "plain", ToyEnvironment(train=8, val=8, test=8))
    world = BatchedWorld()
    assert await train(tmp_path / "batched", world) == plain
    assert max(world.sizes) == 4
    broken = BatchedWorld(broken="val-002")
    assert (await train(tmp_path / "broken", broken))[1] == 1
