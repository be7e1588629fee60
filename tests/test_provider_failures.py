"""Providers that fail, in passing or for good: no failure is a score, and no run ends as "no improvement"."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import pytest

from pure_world import URL, Ended, PureNetwork, differences, left_by, rows, settings, write_world
from reflact import Trainer, events
from reflact.records import RunSummary
from reflact.testing import Fault, FaultyTransport
from virtual_time import NEVER, HurriedLoop

DEATHS = 8


def impatient(world: Path, out_dir: Path, *, url: str = URL) -> dict[str, Any]:
    config = settings(world, out_dir, url=url, train={"num_epochs": 2})
    for role in config["models"].values():
        role["max_retries"] = 0
    return config


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


class Clean(NamedTuple):
    """What a run leaves whose provider never fails, and the samples that it asked for, in order."""

    ended: Ended
    samples: list[str]

    def asked(self, words: str) -> int:
        """Return how many requests came before the last one whose sample begins with words."""
        return max(n for n, call_id in enumerate(self.samples) if call_id.startswith(words))


@pytest.fixture(scope="module")
def clean(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    folder, network = tmp_path_factory.mktemp("clean"), PureNetwork()
    anyio.run(Trainer(impatient(world, folder), transport=network).train)
    return Clean(left_by(folder), network.samples)


class Passing:
    """Fails the first time for every tenth rollout: half of them are refused, half get no answer."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def __call__(self, request: httpx.Request, number: int) -> Fault | None:
        call_id = request.headers["x-sample"]
        share = int(call_id.split("=")[1][:4], 16) if call_id.startswith("target/") else 1
        if share % 10 or call_id in self.failed:
            return None
        self.failed.append(call_id)
        refusal = httpx.Response(429, headers={"retry-after": "0"}, json={"error": {"message": "injected"}})
        return refusal if len(self.failed) % 2 else httpx.ReadTimeout("injected", request=request)


def test_failures_in_passing_change_nothing(world: Path, clean: Clean, tmp_path: Path) -> None:
    config = impatient(world, tmp_path)
    for role in config["models"].values():
        role |= {"max_retries": 3, "timeout": NEVER}
    passing = Passing()
    trainer = Trainer(config, transport=FaultyTransport(PureNetwork(), passing))
    summary = anyio.run(trainer.train, backend_options={"loop_factory": HurriedLoop})
    assert summary.status == "completed"
    assert differences(left_by(tmp_path), clean.ended) == []
    calls = sum(entry.usage.calls for entry in clean.ended.spend if entry.role == "target")
    assert len(passing.failed) > calls / 20


class Mortal(PureNetwork):
    """Answers so many requests, and none after them."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self._left = answers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._left -= 1
        if self._left < 0:
            raise httpx.ConnectError("the line is dead", request=request)
        return await super().handle_async_request(request)


def assert_nothing_is_lost(world: Path, clean: Clean, folder: Path, *, answers: int) -> None:
    summary = anyio.run(Trainer(impatient(world, folder), transport=Mortal(answers)).train)
    assert summary.status == "failed"
    anyio.run(Trainer(impatient(world, folder), transport=PureNetwork()).train)
    assert differences(left_by(folder), clean.ended) == []


@pytest.mark.parametrize(
    "moment", [pytest.param(n, marks=[pytest.mark.slow] if n % 8 != 2 else []) for n in range(DEATHS)]
)
def test_what_an_outage_cut_off_is_tried_again(
    world: Path, clean: Clean, tmp_path: Path, moment: int
) -> None:
    """Whenever a provider dies, a restart leaves nothing unmeasured and goes on to the unbroken end."""
    answers = 2 + moment * clean.asked("optimizer/") // DEATHS
    assert_nothing_is_lost(world, clean, tmp_path, answers=answers)


class Outage(PureNetwork):
    """Loses every rollout of a validation item from the first request on whose sample begins with words."""

    def __init__(self, world: Path, words: str) -> None:
        super().__init__()
        lines = (world / "val" / "items.jsonl").read_text(encoding="utf-8").splitlines()
        self._val = {json.loads(line)["input"] for line in lines}
        self._words = words
        self._begun = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self._begun |= request.headers["x-sample"].startswith(self._words)
        if self._begun and body["messages"][-1]["content"] in self._val:
            raise httpx.ConnectError("the line is dead", request=request)
        return await super().handle_async_request(request)


Heard = Callable[[events.Event], None]


async def _told(trainer: Trainer, hear: Heard) -> RunSummary:
    async for event in trainer.stream():
        hear(event)
    assert isinstance(event, events.RunFinished)
    return event.summary


class Decision(NamedTuple):
    """A decision: the sample from which on nothing of it is measured, its commit, what it is called."""

    words: str
    commit: tuple[str, int]
    name: str


@pytest.mark.parametrize(
    "decision",
    [
        Decision("optimizer/merge/step=2", ("step", 2), "step 2 is unmeasured"),
        pytest.param(
            Decision("optimizer/slow_update/step=4", ("epoch", 4), "the slow update of epoch 2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_unmeasured_decision_stops_the_run(
    world: Path, clean: Clean, tmp_path: Path, decision: Decision
) -> None:
    """Below coverage a decision is tried once more, then the run fails with nothing of it committed."""
    heard: list[events.Event] = []
    trainer = Trainer(impatient(world, tmp_path), transport=Outage(world, decision.words))
    summary = anyio.run(_told, trainer, heard.append)
    repeated = [event for event in heard if isinstance(event, events.StepRetried)]
    assert [(e.step, e.reason[: len(decision.name)]) for e in repeated] == [
        (decision.commit[1], decision.name)
    ]
    assert summary.status == "failed"
    assert str(summary.reason).startswith(decision.name)
    assert " The first failure: " in str(summary.reason)
    commits = rows(tmp_path, "SELECT number, kind, step, record FROM commits ORDER BY number")
    assert commits == clean.ended.commits[: len(commits)]
    assert clean.ended.commits[len(commits)][1:3] == decision.commit
    assert not rows(tmp_path, "SELECT 1 FROM outcomes WHERE key LIKE '%/unmeasured/%'")

    anyio.run(Trainer(impatient(world, tmp_path), transport=PureNetwork()).train)
    assert differences(left_by(tmp_path), clean.ended) == []
