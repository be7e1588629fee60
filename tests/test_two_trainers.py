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

import pure_server
from processes import Stopwatch
from reflact import Trainer
from reflact.concurrency import open_task_group
from reflact.records import RunSummary
from reflact.store.runs import open_store
from reflact.types import Split

Expected = dict[str, tuple[str, ...]]


class PureNetwork(httpx.AsyncBaseTransport):
    """The pure server's answers without a server; refuses other keys and models than its own.

    Args:
        name: The model, whose key is this name with ``-key`` behind it.
        after: Requests after which ``then`` is called.
        then: What to do then.
    """

    def __init__(self, name: str, *, after: int = 0, then: Callable[[], None] | None = None) -> None:
        self.seen: list[tuple[str, str]] = []
        self.in_flight = self.most = 0
        self._name = name
        self._after = after
        self._then = then

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        assert request.headers["authorization"] == f"Bearer {self._name}-key"
        assert body["model"] == self._name
        call_id = request.headers["x-sample"]
        self.seen.append((json.dumps(body), call_id))
        if self._then is not None and len(self.seen) == self._after:
            self._then()
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            for _ in range(3 + len(call_id) % 7):
                await checkpoint()
        finally:
            self.in_flight -= 1
        return httpx.Response(200, json=pure_server.completion(body, pure_server.answer(body, call_id)))


def configuration(folder: Path, name: str) -> dict[str, Any]:
    """Return a configuration of a model of its own, on data of its own."""
    data = folder / f"data-{name}"
    for number, split in enumerate(Split):
        rows = [
            {"id": f"{split}-{n}", "input": f"{rule} {number}{n}", "reference": f"{rule}:{number}{n}"}
            for n, rule in enumerate(("alpha", "beta", "gamma", "delta") * (2 if split is Split.train else 1))
        ]
        (data / split).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (data / split / "items.jsonl").write_text(lines, encoding="utf-8")

    async def key() -> str:
        await checkpoint()
        return f"{name}-key"

    model = {"model": name, "base_url": f"http://{name}.test/v1", "key": key, "call_id_header": "x-sample"}
    return {
        "seed": len(name),
        "out_dir": folder / f"run-{name}",
        "report": False,
        "data": {"path": data},
        "environment": {"grader": "exact"},
        "models": {"target": model, "optimizer": {"call_id_header": "x-sample"}},
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 2, "batch_size": 4},
        "reflect": {"minibatch_size": 2},
        "select": {"max_edits": 1, "min_edits": 1},
    }


async def kept(config: dict[str, Any], run_id: str) -> tuple[str, ...]:
    """Return what a run left, as text."""
    async with open_store(config["out_dir"] / "run.db") as store:
        summary = await store.summary(run_id)
        assert summary.status == "completed"
        return (
            *(e.canonical_content for e in await store.events(run_id)),
            *(r.model_dump_json() for r in await store.records(run_id)),
            *(s.model_dump_json(exclude={"unsettled", "worst_case"}) for s in summary.spend),
        )


def own_threads() -> set[threading.Thread]:
    """Return all threads but idle workers, which the event loop and AnyIO end themselves."""
    idle = ("asyncio_", "AnyIO worker")
    return {thread for thread in threading.enumerate() if not thread.name.startswith(idle)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What each trainer leaves with nothing beside it."""

    async def train(name: str) -> tuple[str, ...]:
        config = configuration(tmp_path_factory.mktemp("alone"), name)
        trainer = Trainer(config, transport=PureNetwork(name))
        await trainer.train()
        return await kept(config, trainer.run_id)

    return {name: anyio.run(train, name) for name in ("small", "larger")}


async def test_two_trainers_give_what_each_gives_alone(tmp_path: Path, expected: Expected) -> None:
    environment, threads = dict(os.environ), own_threads()
    configs = {name: configuration(tmp_path / "both", name) for name in expected}
    networks = {name: PureNetwork(name) for name in expected}
    trainers = {name: Trainer(configs[name], transport=networks[name]) for name in expected}
    tasks = asyncio.all_tasks()
    async with open_task_group() as running:
        for trainer in trainers.values():
            running.start_soon(trainer.train)
    assert asyncio.all_tasks() == tasks
    assert own_threads() <= threads
    for name, trainer in trainers.items():
        assert await kept(configs[name], trainer.run_id) == expected[name]
    assert expected["small"] != expected["larger"]
    assert dict(os.environ) == environment


async def test_limits_of_a_tenant_hold_for_its_key_alone(tmp_path: Path) -> None:
    configs = {name: configuration(tmp_path, name) for name in ("small", "larger")}
    networks = {name: PureNetwork(name) for name in configs}
    for name, concurrency in (("small", 1), ("larger", 4)):
        configs[name]["models"]["target"] |= {"base_url": "http://one.test/v1", "concurrency": concurrency}
    async with open_task_group() as running:
        for name, config in configs.items():
            running.start_soon(Trainer(config, transport=networks[name]).train)
    assert (networks["small"].most, networks["larger"].most) == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("after", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 45))])
async def test_cancelling_one_leaves_the_other_untouched(
    tmp_path: Path, expected: Expected, after: int
) -> None:
    configs = {name: configuration(tmp_path / "both", name) for name in expected}
    other = Trainer(configs["larger"], transport=PureNetwork("larger"))
    scope = anyio.CancelScope()
    stopwatches: list[Stopwatch] = []
    took: list[float] = []

    def cut() -> None:
        stopwatches.append(Stopwatch())
        scope.cancel()

    network = PureNetwork("small", after=after, then=cut)

    async def run_cut() -> None:
        with scope:
            await Trainer(configs["small"], transport=network).train()
        took.append(stopwatches[0].read())

    tasks = asyncio.all_tasks()
    async with open_task_group() as running:
        running.start_soon(run_cut)
        running.start_soon(other.train)
    assert scope.cancelled_caught
    assert took[0] < 1
    assert asyncio.all_tasks() == tasks
    assert await kept(configs["larger"], other.run_id) == expected["larger"]
    stopped = RunSummary.model_validate_json(
        (configs["small"]["out_dir"] / "summary.json").read_text("utf-8")
    )
    assert stopped.status == "cancelled"

    again = PureNetwork("small")
    resumed = Trainer(configs["small"], transport=again)
    await resumed.train()
    assert await kept(configs["small"], resumed.run_id) == expected["small"]
    in_flight = set(network.seen) & set(again.seen)
    assert len(in_flight) <= 8
