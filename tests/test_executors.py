"""Executors: rollouts in workers of Ray, whose results are those of the event loop."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import anyio
import pytest

from processes import is_gone, list_children, until
from pure_world import PureNetwork, differences, left_by, rows, write_world
from pure_world import settings as pure_settings
from reflact import Trainer
from reflact.config.loading import load_config
from reflact.config.training import ALL_SOURCES
from reflact.environments import DatasetEnvironment
from reflact.errors import ConfigError, ProviderDown
from reflact.executors.ray import select_variables
from reflact.executors.worker import Worker, WorkerJob, WorkerResult, WorkerSetup
from reflact.records import RunSummary
from reflact.testing import ToyEnvironment
from test_command_target import Endpoint, describe_run
from toy_runs import Actor, build_trainer, settings

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is an extra of 260 MB")

CANARY = "sk-canary-0123456789"
RAY = {"name": "ray", "workers": 2}


class Farm:
    """Runs each job in a worker of its own in this process, by pickled values alone."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = pickle.dumps(setup)

    async def run(self, job: WorkerJob) -> WorkerResult:
        worker = Worker(pickle.loads(self._setup))
        try:
            result = pickle.dumps(await worker.run(pickle.loads(pickle.dumps(job))))
        finally:
            await worker.close()
        return WorkerResult.model_validate(pickle.loads(result))


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def open_farm(setup: WorkerSetup, config: object) -> AsyncIterator[Farm]:
        yield Farm(setup)

    monkeypatch.setattr("reflact.executors.ray.open_workers", open_farm)


def world(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the section of an environment that notes into a folder."""
    folder.mkdir(exist_ok=True)
    return {"name": "worker_world:WorkerWorld", "options": {"folder": str(folder), **options}}


def trainer(folder: Path, executor: dict[str, Any], *, target: Any = None, **options: Any) -> Trainer:
    """Return a trainer of one epoch in the world that notes what happens."""
    folder.mkdir(exist_ok=True)
    environment = world(folder / "notes", **options)
    config = settings(folder / "run", environment=environment, executor=executor)
    return build_trainer(config, target=target, environment=None)


def list_noted(folder: Path, what: str) -> set[str]:
    return {path.name.split("-")[-2] for path in (folder / "notes").glob(f"{what}-*")}


def describe(summary: RunSummary) -> tuple[Any, ...]:
    return summary.status, summary.reason, summary.steps, str(summary.best)


async def compare_histories(folder: Path, epochs: int, sources: tuple[str, ...]) -> None:
    """Check that a run leaves in workers what it leaves in the loop."""
    data = write_world(folder / "world")
    ended = []
    for name, section in (("local", {}), ("workers", RAY)):
        more = {"train": {"num_epochs": epochs}, "search": {"sources": sources}}
        config = pure_settings(data, folder / name, executor=section, **more)
        network = PureNetwork()
        assert (await Trainer(config, transport=network).train()).status == "completed"
        ended.append((left_by(folder / name), sorted(network.samples)))
    assert differences(ended[0][0], ended[1][0]) == []
    assert ended[0][1] == ended[1][1]


async def test_a_run_in_workers_leaves_the_same_history(tmp_path: Path, farm: None) -> None:
    """With one epoch and the edits alone."""
    await compare_histories(tmp_path, 1, ("edits",))


@pytest.mark.slow
async def test_a_run_in_ray_leaves_the_same_history(tmp_path: Path) -> None:
    """Also with all sources, several epochs, a final test and controls."""
    await compare_histories(tmp_path, 3, ALL_SOURCES)


@pytest.mark.slow
async def test_workers_set_the_environment_up_once_and_close_it(tmp_path: Path) -> None:
    before = list_children()
    assert (await trainer(tmp_path, RAY).train()).status == "completed"
    ran = list_noted(tmp_path, "ran")
    assert len(ran) == 2
    assert str(os.getpid()) not in ran
    assert list_noted(tmp_path, "set-up") == list_noted(tmp_path, "closed") == ran
    assert len(list((tmp_path / "notes").glob("set-up-*"))) == 2
    assert list_children() == before


@pytest.mark.parametrize("broken", ["set_up", "code", "exit", "model"])
async def test_failures_are_those_of_the_event_loop(tmp_path: Path, broken: str, farm: None) -> None:
    """A failure of the environment's code, of its start, or of the target has the same effect."""

    async def fail(*_: object) -> None:
        raise ProviderDown("the model is down")

    ended = []
    for name, section in (("local", {}), ("workers", RAY)):
        target = Actor(lambda skill, message, n: fail() if broken == "model" else None)
        run = trainer(tmp_path / name, section, target=target, broken=broken)
        ended.append((describe(await run.train()), target.asked))
    (local, asked), (remote, asked_by_workers) = ended
    if broken == "set_up":
        assert local[0] == remote[0] == "failed"
        assert "OSError: the port is taken" in str(remote[1])
    else:
        assert remote == local
        assert sorted(asked) == sorted(asked_by_workers)


async def test_a_run_resumes_with_another_executor(tmp_path: Path, farm: None) -> None:
    """A second start in workers finds the complete run."""
    first = await trainer(tmp_path, {}).train()
    again = await trainer(tmp_path, RAY, target=(target := Actor())).train()
    assert again.run_id == first.run_id
    assert describe(again) == describe(first)
    assert target.asked == []


async def test_an_agent_that_the_configuration_names_runs_in_the_workers(tmp_path: Path, farm: None) -> None:
    """Its requests are those of the loop, and so is the history."""
    for split, word in {"train": "red", "val": "green", "test": "blue"}.items():
        (tmp_path / "data" / split).mkdir(parents=True)
        line = json.dumps({"id": word, "input": f"Say {word}", "reference": word.upper()})
        (tmp_path / "data" / split / "items.jsonl").write_text(line, encoding="utf-8")
    (tmp_path / "notes").mkdir()
    target = {"kind": "worker_world:make_agent", "options": {"folder": str(tmp_path / "notes")}}
    ended, asked = [], []
    for name, executor in (("local", {}), ("workers", RAY)):
        config, _ = describe_run(
            tmp_path / name, data={"path": str(tmp_path / "data")}, executor=executor, target=target
        )
        endpoint = Endpoint()
        run = Trainer({**config, "environment": {"grader": "exact"}}, transport=endpoint)
        assert (await run.train()).status == "completed"
        ended.append(left_by(tmp_path / name))
        asked.append(sorted(json.dumps(body) for body in endpoint.bodies))
    assert differences(*ended) == []
    assert asked[0] == asked[1]
    assert ended[0].summary.best is not None
    assert ended[0].summary.best.score == 1.0


@pytest.mark.slow
async def test_a_budget_ends_a_run_in_workers_and_the_loop_completes_it(tmp_path: Path, farm: None) -> None:
    """The limit is reached in a worker's session, and nothing is lost."""
    data = write_world(tmp_path / "world")
    train = {"num_epochs": 1}
    whole = pure_settings(data, tmp_path / "whole", train=train)
    assert (await Trainer(whole, transport=PureNetwork()).train()).status == "completed"
    budget = {"max_calls": 25}
    limited = pure_settings(data, tmp_path / "broken", train=train, executor=RAY, budget=budget)
    summary = await Trainer(limited, transport=(first := PureNetwork())).train()
    assert (summary.status, len(first.samples)) == ("budget", 25)
    rest = pure_settings(data, tmp_path / "broken", train=train)
    assert (await Trainer(rest, transport=(second := PureNetwork())).train()).status == "completed"
    assert differences(left_by(tmp_path / "broken"), left_by(tmp_path / "whole")) == []
    assert not {*first.samples} & {*second.samples}


async def test_an_object_is_sent_if_it_can_be(tmp_path: Path, farm: None) -> None:
    """A function of a script travels with it; a lock is refused with advice."""
    data = ToyEnvironment()._data
    simple = DatasetEnvironment(data, grade=lambda item, answer: float(bool(answer)))
    trained = build_trainer(settings(tmp_path / "a", executor=RAY), environment=simple)
    assert (await trained.train()).status == "completed"
    lock = Lock()
    locked = DatasetEnvironment(data, grade=lambda item, answer: float(lock.locked()))
    refused = build_trainer(settings(tmp_path / "b", executor=RAY), environment=locked)
    with pytest.raises(ConfigError, match="cannot be pickled in its `set_up`"):
        await refused.train()


def test_no_key_reaches_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable with a model's key or a secret's name does, unless it is allowed by name."""
    variables = {
        "MY_MODEL": CANARY,
        "COPY_OF_IT": f"Bearer {CANARY}",
        "DATABASE_PASSWORD": "hunter2",
        "GAME_TOKEN": "needed",
        "GAME_FOLDER": "/games",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    models = {"target": {"api_key_env": "MY_MODEL"}}
    executor = {"variables": ["GAME_TOKEN", "MY_MODEL"]}
    selected = select_variables(load_config({"models": models, "executor": executor}))
    assert CANARY not in str(selected)
    assert "DATABASE_PASSWORD" not in selected
    assert (selected["GAME_TOKEN"], selected["GAME_FOLDER"]) == ("needed", "/games")


@pytest.mark.slow
async def test_a_worker_finds_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that searches its process, its item and its session finds none."""
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    data = write_world(tmp_path / "world")
    environment = {"name": "worker_world:Searching", "options": {"folder": str(data)}}
    config = pure_settings(
        data, tmp_path / "run", executor=RAY, environment=environment, train={"num_epochs": 1}
    )
    config["models"]["target"]["api_key_env"] = "OPENAI_API_KEY"
    summary = await Trainer(config, transport=PureNetwork()).train()
    assert summary.status == "completed", summary.reason
    found = "".join(path.read_text(encoding="utf-8") for path in data.glob("searched-*"))
    assert "base_url" in found
    assert CANARY not in found


def order_kills(folder: Path, item_id: str, n: int) -> None:
    for number in range(n):
        (folder / f"kill-{item_id}-{number}").touch()


@pytest.mark.slow
async def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """It is replaced, and the run leaves the same history."""
    section = world(tmp_path / "notes")
    ended = []
    for name, chosen in (("local", {}), ("killed", RAY)):
        config = settings(tmp_path / name, environment=section, executor=chosen, test={"enabled": True})
        assert (await build_trainer(config, environment=None).train()).status == "completed"
        ended.append(left_by(tmp_path / name))
        order_kills(tmp_path / "notes", "val-002", 1)
    assert (tmp_path / "notes/kill-val-002-0").exists()  # ordered once more after the end
    assert len(list_noted(tmp_path, "ran")) == 4
    assert differences(*ended) == []


@pytest.mark.slow
async def test_an_item_that_kills_its_workers_is_unmeasured(tmp_path: Path) -> None:
    run = trainer(tmp_path, {**RAY, "workers": 1})
    order_kills(tmp_path / "notes", "train-003", 9)
    assert (await run.train()).status == "completed"
    assert len(list((tmp_path / "notes").glob("kill-*"))) in {6, 3}
    query = "SELECT value FROM outcomes WHERE key LIKE '%/unmeasured/%'"
    ((reason,),) = rows(tmp_path / "run", query)
    assert "the worker of Ray ended" in reason


@pytest.mark.slow
async def test_a_cancelled_run_ends_its_busy_workers(tmp_path: Path) -> None:
    """Also in the middle of a rollout."""
    async with anyio.create_task_group() as group:
        group.start_soon(trainer(tmp_path, RAY, busy=120.0).train)
        await until(lambda: bool(list_noted(tmp_path, "ran")))
        workers = list_noted(tmp_path, "ran")
        group.cancel_scope.cancel()
    assert all(is_gone(worker) for worker in workers)
