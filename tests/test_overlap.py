"""Rollout and reflection overlap: what runs at the same time, and what a restart repeats.

That the order of completion changes nothing is tested with whole runs (``test_determinism``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from anyio.lowlevel import checkpoint

from doubles import RUN, opened
from reflact.config.training import ReflectConfig
from reflact.errors import EnvironmentFailure, ProviderDown
from reflact.protocols import Session
from reflact.stages.reflect import Minibatch, roll_out_and_reflect, shuffle_batch
from reflact.stages.rollout import RolloutRunner
from reflact.testing import InMemoryRunStore, ToyTarget
from reflact.types import AnalystReport, Grade, Item, Rollout, Score, Skill, Split

SEED, STEP = 7, 3


class World:
    """An environment whose items say how they end: a score, or ``lost``; ``ran`` are those of all attempts."""

    identity = "world"

    def __init__(self, on_run: Callable[[Item], Awaitable[None]] | None = None) -> None:
        self._on_run = on_run
        self.ran: list[str] = []

    def items(self, split: Split) -> Sequence[Item]:
        return ()

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        self.ran.append(item.id)
        await checkpoint()
        if self._on_run is not None:
            await self._on_run(item)
        if item.input == "lost":
            raise EnvironmentFailure(f"{item.id} broke")
        return Grade(score=Score.of(float(str(item.input))), answer="")


def items(*outcomes: str, name: str = "i") -> tuple[Item, ...]:
    return tuple(Item(id=f"{name}{n}", input=outcome) for n, outcome in enumerate(outcomes))


def list_lost(batch: Sequence[Item]) -> list[str]:
    return [item.id for item in batch if item.input == "lost"]


async def notes_of(store: InMemoryRunStore) -> list[str]:
    return [
        value
        for (value,) in await store._database.fetch_rows("SELECT value FROM outcomes WHERE kind = 'decision'")
    ]


async def silent(batch: Minibatch) -> AnalystReport:
    return batch.empty_report


async def gathered(
    batches: Sequence[Sequence[Item]],
    *,
    environment: World,
    store: InMemoryRunStore,
    overlap: bool = True,
    limit: int = 8,
    concurrency: int = 8,
    analyse: Callable[[Minibatch], Awaitable[AnalystReport]] = silent,
) -> tuple[tuple[Rollout, ...], tuple[AnalystReport, ...]]:
    return await roll_out_and_reflect(
        batches,
        Skill(text="Answer briefly.\n"),
        runner=RolloutRunner(
            target=ToyTarget(),
            environment=environment,
            store=store,
            decision_log=store.decision_log(RUN),
            step=STEP,
            feedback=True,
            limit=limit,
        ),
        analyse=analyse,
        config=ReflectConfig(minibatch_size=2, concurrency=concurrency, overlap=overlap),
        seed=SEED,
        threshold=0.5,
    )


def in_order(batch: Sequence[Item]) -> list[str]:
    return [item.id for item in shuffle_batch(batch, seed=SEED, step=STEP)]


async def test_analysts_work_while_rollouts_run() -> None:
    analysed = anyio.Event()
    batch = items(*["0"] * 6)
    first = set(in_order(batch)[:2])

    async def on_run(item: Item) -> None:
        if item.id not in first:
            await analysed.wait()

    async def analyse(part: Minibatch) -> AnalystReport:
        analysed.set()
        return part.empty_report

    with anyio.fail_after(60):
        _, reports = await gathered([batch], environment=World(on_run), store=await opened(), analyse=analyse)
    assert len(reports) == 3


async def test_a_restart_keeps_what_was_relied_on_and_tries_the_rest_again() -> None:
    batch = items(*["0", "lost", "0", "lost", "0", "0", "0", "lost"])
    order = in_order(batch)
    lost = [item for item in order if item in list_lost(batch)]
    store = await opened()
    asked: list[int] = []

    async def dies(part: Minibatch) -> AnalystReport:
        asked.append(part.index)
        if part.index == 1:
            raise ProviderDown("gone")
        return part.empty_report

    with pytest.raises(ProviderDown, match="gone"):
        await gathered([batch], environment=World(), store=store, limit=1, analyse=dies)
    notes = await notes_of(store)
    used = [item for item in lost if any(item in value for value in notes)]
    assert 0 < len(used) < len(lost)
    assert asked == [0, 1]
    again = World()
    await gathered([batch], environment=again, store=store, limit=1)
    assert not set(used) & set(again.ran)
    assert set(lost) - set(used) <= set(again.ran)


@pytest.mark.parametrize("overlap", [True, False])
async def test_rollouts_and_analysts_have_limits(overlap: bool) -> None:
    running = {"rollouts": 0, "analysts": 0}
    highest = {"rollouts": 0, "analysts": 0}

    async def work(kind: str) -> None:
        running[kind] += 1
        highest[kind] = max(highest[kind], running[kind])
        for _ in range(30):
            await checkpoint()
        running[kind] -= 1

    async def analyse(part: Minibatch) -> AnalystReport:
        await work("analysts")
        return part.empty_report

    await gathered(
        [items(*["0"] * 12), items(*["0"] * 12, name="o")],
        environment=World(on_run=lambda item: work("rollouts")),
        store=await opened(),
        overlap=overlap,
        limit=5,
        concurrency=2,
        analyse=analyse,
    )
    assert highest == {"rollouts": 5, "analysts": 2}
