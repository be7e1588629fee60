"""What events say, when, and what a run tells."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import anyio
import httpx
import pytest

from doubles import PROMPT, Endpoint, call_id, config, connected, opened
from pure_world import PureNetwork, settings, write_world
from reflact import Trainer, events
from reflact.concurrency import open_task_group
from reflact.records import Usage
from reflact.stages.reply_models import ReasonedRankReply
from reflact.store.runs import open_store

STARTED = events.StepStarted(run_id="r", step=2, epoch=1, item_ids=("a", "b"))
SAMPLE = call_id("all", purpose="ranking")


def test_the_time_is_no_part_of_what_an_event_says() -> None:
    later = STARTED.model_copy(update={"at": STARTED.at + timedelta(days=1)})
    assert later == STARTED
    assert hash(later) == hash(STARTED)
    assert (later.id, later.canonical_content) == (STARTED.id, STARTED.canonical_content)
    assert STARTED.model_copy(update={"epoch": 2}) != STARTED
    assert events.RolloutsFinished(run_id="r", step=2, n=1, failures=0, unmeasured=0) != STARTED
    assert STARTED != "step_started"


def test_identities_and_bytes_are_those_of_older_logs() -> None:
    assert (
        STARTED.canonical_content
        == '{"run_id":"r","step":2,"kind":"step_started","epoch":1,"item_ids":["a","b"]}'
    )
    assert STARTED.id == "e7f0950a226e6499"


class Hanging(Endpoint):
    """Sets ``reached`` when a request arrives, and never answers it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = anyio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.reached.set()
        await anyio.sleep_forever()
        raise AssertionError


async def test_an_interrupted_call_is_not_reported_as_failed() -> None:
    told: list[events.Event] = []

    async def emit(event: events.Event) -> None:
        told.append(event)

    endpoint = Hanging()
    async with (
        connected(endpoint, config(), store=await opened(), emit=emit) as client,
        open_task_group() as tasks,
    ):
        tasks.start_soon(lambda: client.ask(PROMPT, ReasonedRankReply, call_id=SAMPLE))
        await endpoint.reached.wait()
        tasks.cancel_scope.cancel()
    assert not any(isinstance(event, events.ModelCallFinished) for event in told)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def network() -> PureNetwork:
    return PureNetwork()


@pytest.fixture(scope="module")
def told(folder: Path, network: PureNetwork) -> list[events.Event]:
    async def run() -> list[events.Event]:
        sections: dict[str, Any] = {"train": {"num_epochs": 2}, "budget": {"max_calls": 5000}}
        trainer = Trainer(
            settings(write_world(folder / "world"), folder / "run", **sections), transport=network
        )
        return [event async for event in trainer.stream()]

    return anyio.run(run)


def of(told: list[events.Event], kind: type[Any]) -> list[Any]:
    return [event for event in told if isinstance(event, kind)]


def test_every_model_call_is_told(told: list[events.Event], network: PureNetwork) -> None:
    calls, summary = of(told, events.ModelCallFinished), of(told, events.RunFinished)[0].summary
    asked = Counter(call_id.rpartition("/")[0] for call_id in network.samples)
    assert Counter({event.call_id.rpartition("/")[0]: event.attempts for event in calls}) == asked
    used = sum((event.usage for event in calls), Usage())
    assert used.output_tokens == sum(entry.usage.output_tokens for entry in summary.spend) > 0


def test_the_budget_is_told_as_it_moves(told: list[events.Event]) -> None:
    """What was taken grows call by call up to what the summary says, beside the limits."""
    moves, summary = of(told, events.BudgetUpdated), of(told, events.RunFinished)[0].summary
    calls = [event.usage.calls for event in moves]
    assert calls == sorted(calls)
    assert calls[-1] == sum(entry.usage.calls for entry in summary.spend)
    assert {(event.max_calls, event.max_usd) for event in moves} == {(5000, None)}
    assert 0 < moves[0].seconds <= moves[-1].seconds


def test_stages_begin_and_end(told: list[events.Event]) -> None:
    begun = [event.stage for event in of(told, events.StageStarted) if event.step == 1]
    assert begun == ["rollout", "reflect", "aggregate", "select", "update", "evaluate", "appendix"]
    ended = [event.stage for event in of(told, events.StageFinished) if event.step == 1]
    assert sorted(ended) == sorted(begun)
    stages = {event.stage for event in of(told, events.StageStarted)}
    assert stages == set(get_args(events.Stage))
    assert all(event.seconds >= 0 for event in of(told, events.StageFinished))


async def test_the_log_reads_as_it_was_told(told: list[events.Event], folder: Path) -> None:
    async with open_store(folder / "run" / "run.db") as store:
        (run,) = await store.runs()
        log = await store.events(run.run_id)
    durable = [event for event in told if event.durable]
    assert list(log) == durable
    assert [event.at for event in log] == [event.at for event in durable]


async def test_a_run_has_let_go_when_its_last_event_comes(tmp_path: Path) -> None:
    """Whoever hears ``Finished`` may start another run in the same folder at once."""
    chosen = settings(write_world(tmp_path / "world"), tmp_path / "run", train={"num_epochs": 1})
    async for event in Trainer(chosen, transport=PureNetwork()).stream():
        if isinstance(event, events.RunFinished):
            again = await Trainer(chosen, transport=PureNetwork()).train()
            assert again.status == event.summary.status == "completed"


class Bodies(PureNetwork):
    """A network that notes which requests asked for a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.streamed: set[bool] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.streamed.add(b'"stream":true' in (await request.aread()).replace(b" ", b""))
        return await super().handle_async_request(request)


async def test_nothing_is_drafted_for_nobody(tmp_path: Path) -> None:
    """``train`` asks for whole answers; ``stream`` has typed replies streamed."""
    world, networks = write_world(tmp_path / "world"), (Bodies(), Bodies())
    one = {"num_epochs": 1}
    await Trainer(settings(world, tmp_path / "a", train=one), transport=networks[0]).train()
    async for _ in Trainer(settings(world, tmp_path / "b", train=one), transport=networks[1]).stream():
        pass
    assert [network.streamed for network in networks] == [{False}, {False, True}]
