"""Trainers in one event loop know nothing of each other and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint

from processes import Stopwatch
from pure_world import Ended, PureNetwork, differences, left_by, settings, write_world
from reflact import Trainer
from reflact.concurrency import open_task_group
from reflact.records import RunSummary

NAMES = ("small", "larger")


class TenantNetwork(PureNetwork):
    """The pure server's answers to one model and key; ``then`` is called at the request ``after``."""

    def __init__(self, name: str, *, after: int = 0, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.in_flight = self.most = 0
        self._name = name
        self._after = after
        self._then = then

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == f"Bearer {self._name}-key"
        assert json.loads(await request.aread())["model"] == self._name
        if self._then is not None and len(self.samples) + 1 == self._after:
            self._then()
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            return await super().handle_async_request(request)
        finally:
            self.in_flight -= 1


def configuration(folder: Path, name: str) -> dict[str, Any]:
    async def key() -> str:
        await checkpoint()
        return f"{name}-key"

    world = folder / f"world-{name}"
    if not world.exists():
        write_world(world, train=4 + len(name))
    model = {"model": name, "base_url": "http://one.test/v1", "key": key, "call_id_header": "x-sample"}
    return settings(
        world,
        folder / f"run-{name}",
        models={"target": model},
        train={"num_epochs": 2, "batch_size": 4, "accumulation": 1},
    )


def own_threads() -> set[threading.Thread]:
    """Return all threads but idle workers, which the event loop and AnyIO end themselves."""
    idle = ("asyncio_", "AnyIO worker")
    return {thread for thread in threading.enumerate() if not thread.name.startswith(idle)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("alone")
    ended = {}
    for name in NAMES:
        anyio.run(Trainer(configuration(folder, name), transport=TenantNetwork(name)).train)
        ended[name] = left_by(folder / f"run-{name}")
    return ended


async def test_two_trainers_give_what_each_gives_alone(tmp_path: Path, expected: dict[str, Ended]) -> None:
    environment, threads, tasks = dict(os.environ), own_threads(), asyncio.all_tasks()
    async with open_task_group() as running:
        for name in NAMES:
            trainer = Trainer(configuration(tmp_path, name), transport=TenantNetwork(name))
            running.start_soon(trainer.train)
    assert asyncio.all_tasks() == tasks
    assert own_threads() <= threads
    for name in NAMES:
        assert differences(left_by(tmp_path / f"run-{name}"), expected[name]) == []
    assert dict(os.environ) == environment


async def test_limits_of_a_tenant_hold_for_its_key_alone(tmp_path: Path) -> None:
    networks = {name: TenantNetwork(name) for name in NAMES}
    async with open_task_group() as running:
        for name, concurrency in zip(NAMES, (1, 4), strict=True):
            config = configuration(tmp_path, name)
            config["models"]["target"]["concurrency"] = concurrency
            running.start_soon(Trainer(config, transport=networks[name]).train)
    assert [networks[name].most for name in NAMES] == [1, 4]


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 20, 45])
async def test_cancelling_one_leaves_the_other_untouched(
    tmp_path: Path, expected: dict[str, Ended], after: int
) -> None:
    """A cancelled trainer ends within a second; the other goes on; the cancelled one resumes to its end."""
    small, larger = (configuration(tmp_path, name) for name in NAMES)
    scope = anyio.CancelScope()
    took: list[float] = []
    stopwatches: list[Stopwatch] = []

    def cut() -> None:
        stopwatches.append(Stopwatch())
        scope.cancel()

    network = TenantNetwork("small", after=after, then=cut)

    async def run_cut() -> None:
        with scope:
            await Trainer(small, transport=network).train()
        took.append(stopwatches[0].read())

    tasks = asyncio.all_tasks()
    async with open_task_group() as running:
        running.start_soon(run_cut)
        running.start_soon(Trainer(larger, transport=TenantNetwork("larger")).train)
    assert took[0] < 1
    assert asyncio.all_tasks() == tasks
    assert differences(left_by(tmp_path / "run-larger"), expected["larger"]) == []
    stopped = RunSummary.model_validate_json((tmp_path / "run-small" / "summary.json").read_text("utf-8"))
    assert stopped.status == "cancelled"

    again = TenantNetwork("small")
    await Trainer(small, transport=again).train()
    assert differences(left_by(tmp_path / "run-small"), expected["small"]) == []
    assert len(set(network.samples) & set(again.samples)) <= 8
