"""Consumers that stop reading, fail or leave: the run waits or ends, nothing leaks, and it can go on."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from processes import until
from pure_world import Ended, PureNetwork, differences, left_by, settings, write_world
from reflact import Trainer, events, read_run
from reflact.concurrency import Stream

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")]

BUFFER = 256
IN_FLIGHT = 16
"""Calls that both roles together may have in flight."""
SHORT: dict[str, Any] = {"train": {"num_epochs": 2}}


class Open(NamedTuple):
    tasks: frozenset[asyncio.Task[object]]
    threads: frozenset[threading.Thread]
    files: int


def opened() -> Open:
    pools = ("asyncio_", "AnyIO worker thread")
    threads = (thread for thread in threading.enumerate() if not thread.name.startswith(pools))
    files = len(list(Path("/proc/self/fd").iterdir()))
    return Open(frozenset(asyncio.all_tasks()), frozenset(threads), files)


class Whole(NamedTuple):
    """The data of all runs, and what an unbroken one leaves."""

    world: Path
    ended: Ended

    def trainer(self, folder: Path, network: PureNetwork | None = None) -> Trainer:
        return Trainer(settings(self.world, folder, **SHORT), transport=network or PureNetwork())

    async def goes_on(self, folder: Path) -> None:
        told = [event async for event in self.trainer(folder).stream()]
        assert isinstance(told[-1], events.RunFinished)
        assert told[-1].summary.status == "completed"
        assert differences(self.ended, left_by(folder)) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    world = write_world(folder / "world")

    async def kinds() -> list[str]:
        trainer = Trainer(settings(world, folder / "run", **SHORT), transport=PureNetwork())
        return [event.kind async for event in trainer.stream()]

    told = anyio.run(kinds)
    assert len(told) > 2 * BUFFER
    assert told[-1] == "run_finished"
    return Whole(world, left_by(folder / "run"))


class Left(Exception):
    """A consumer's own error."""


async def leave(how: str, kind: str, happenings: Stream[events.Event]) -> None:
    if how == "beside an unread view":
        happenings.subscribe()
    async with AsyncExitStack() as stack:
        stack.enter_context(suppress(Left))
        if how != "without a block":
            await stack.enter_async_context(happenings)
        async for event in happenings:
            if event.kind == kind:
                if how == "by an error":
                    raise Left
                break


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        pytest.param(how, kind, marks=[] if n % 3 == number else [pytest.mark.slow])
        for n, how in enumerate(("without a block", "by a break", "by an error", "beside an unread view"))
        for number, kind in enumerate(("run_started", "model_call_finished", "candidate_judged"))
    ],
)
async def test_a_consumer_that_leaves_ends_the_run(how: str, kind: str, tmp_path: Path, whole: Whole) -> None:
    before = opened()
    network = PureNetwork()
    await leave(how, kind, whole.trainer(tmp_path, network).stream())
    await until(lambda: opened() == before)
    asked = len(network.samples)
    await whole.goes_on(tmp_path)
    await until(lambda: opened() == before)
    assert len(network.samples) == asked


async def held(happenings: Stream[events.Event]) -> None:
    await until(happenings._turn.locked)


async def test_a_consumer_that_stops_reading_holds_the_run(tmp_path: Path, whole: Whole) -> None:
    before = opened()
    network = PureNetwork()
    async with whole.trainer(tmp_path, network).stream() as happenings:
        reader = aiter(happenings)
        await anext(reader)
        await held(happenings)
        asked = len(network.samples)
        assert 0 < asked <= BUFFER
        for _ in range(100):
            await anext(reader)
        await until(lambda: len(network.samples) > asked)
        await held(happenings)
        assert len(network.samples) <= asked + 100 + IN_FLIGHT
        read_on = len(network.samples)
        rest = [event async for event in reader]
    assert read_on < len(network.samples)
    assert len(rest) > BUFFER
    assert isinstance(rest[-1], events.RunFinished)
    assert differences(whole.ended, left_by(tmp_path)) == []
    await until(lambda: opened() == before)


async def test_a_run_that_nobody_reads_can_be_cancelled(tmp_path: Path, whole: Whole) -> None:
    before = opened()
    happenings = whole.trainer(tmp_path, PureNetwork()).stream()

    async def hold() -> None:
        async with happenings:
            reader = aiter(happenings)
            await anext(reader)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await held(happenings)
        tasks.cancel_scope.cancel()
    await until(lambda: opened() == before)
    assert (await read_run(tmp_path)).status == "cancelled"
    await whole.goes_on(tmp_path)


async def test_all_consumers_of_a_run_hear_the_same(tmp_path: Path, whole: Whole) -> None:
    heard: list[events.Event] = []
    latest: list[events.Event] = []
    many_heard = anyio.Event()

    async def listen(view: AsyncIterator[events.Event]) -> None:
        async for event in view:
            heard.append(event)
            if len(heard) == BUFFER // 2:
                many_heard.set()

    async def glance(view: AsyncIterator[events.Event]) -> None:
        await many_heard.wait()
        latest.extend([event async for event in view])

    async with anyio.create_task_group() as tasks, whole.trainer(tmp_path).stream() as happenings:
        tasks.start_soon(listen, aiter(happenings.subscribe()))
        tasks.start_soon(glance, aiter(happenings.subscribe(latest_only=True)))
        own = [event async for event in happenings]
    assert heard == own
    assert [event for event in latest if event.durable] == [event for event in own if event.durable]
    assert latest[-1] == own[-1]
    assert len(latest) < len(own)
