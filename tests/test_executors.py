"""Executors: rollouts in worker processes, whose results are those of the event loop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from processes import is_gone, list_children, until
from pure_world import PureNetwork, differences, left_by, rows, write_world
from pure_world import settings as pure_settings
from reflact import Trainer
from reflact.concurrency import fan_out
from reflact.config.loading import load_config
from reflact.config.training import ALL_SOURCES
from reflact.environments import DatasetEnvironment
from reflact.errors import ConfigError, ProviderDown, WorkerLost
from reflact.executors import EnvironmentReference, ExecutorJob, ExecutorResult
from reflact.executors.environment import refer_to_named_environment, select_variables
from reflact.executors.ray import WorkerPool
from reflact.records import RunSummary
from reflact.testing import ToyEnvironment
from reflact.types import Grade, Item, Score
from test_command_target import AGENT, Endpoint, describe_run
from toy_runs import Actor, build_trainer, settings
from worker_world import WorkerWorld

CANARY = "sk-canary-0123456789"
FARM = {"name": "worker_world:open_farm"}
"""Runs jobs in this process, by their values alone."""

RAY = {"name": "ray", "workers": 2}
has_no_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is an extra, which takes 260 MB")
needs_ray = [pytest.mark.slow, has_no_ray]


def world(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the section of an environment that notes into a folder."""
    folder.mkdir(exist_ok=True)
    return {"name": "worker_world:WorkerWorld", "options": {"folder": str(folder), **options}}


def trainer(folder: Path, executor: dict[str, Any], *, target: Any = None, **options: Any) -> Trainer:
    """Return a trainer of one epoch in the world that notes what happens."""
    folder.mkdir()
    config = settings(folder / "run", environment=world(folder / "notes", **options), executor=executor)
    return build_trainer(config, target=target, environment=None)


def list_noted(folder: Path, what: str) -> set[str]:
    """Return the processes in which something happened."""
    return {path.name.split("-")[-2] for path in (folder / "notes").glob(f"{what}-*")}


def describe(summary: RunSummary) -> tuple[Any, ...]:
    """Return what a run came to."""
    best = summary.best
    return summary.status, summary.reason, summary.steps, str(best)


@pytest.mark.parametrize(
    ("executor", "epochs", "sources"),
    [
        pytest.param(FARM, 1, ("edits",), id="farm"),
        pytest.param(FARM, 3, ALL_SOURCES, marks=pytest.mark.slow, id="farm, all sources"),
        pytest.param(RAY, 3, ("edits",), marks=needs_ray, id="ray"),
        pytest.param(RAY, 3, ALL_SOURCES, marks=needs_ray, id="ray, all sources"),
    ],
)
async def test_a_run_in_workers_leaves_the_same_history(
    tmp_path: Path, executor: dict[str, Any], epochs: int, sources: tuple[str, ...]
) -> None:
    """A run with its ends of epochs, final test and controls leaves in workers what it leaves in the loop."""
    data = write_world(tmp_path / "world")
    ended = []
    for name, section in (("local", {}), ("workers", executor)):
        more = {"train": {"num_epochs": epochs}, "search": {"sources": sources}}
        config = pure_settings(data, tmp_path / name, executor=section, **more)
        network = PureNetwork()
        assert (await Trainer(config, transport=network).train()).status == "completed"
        ended.append((left_by(tmp_path / name), sorted(network.samples)))
    assert differences(ended[0][0], ended[1][0]) == []
    assert ended[0][1] == ended[1][1]


@pytest.mark.slow
@has_no_ray
async def test_workers_set_the_environment_up_once_and_close_it(tmp_path: Path) -> None:
    """Each worker has an environment of its own, the trainer's is not set up, and no worker is left."""
    before = list_children()
    summary = await trainer(tmp_path / "a", RAY).train()
    assert summary.status == "completed"
    ran = list_noted(tmp_path / "a", "ran")
    assert len(ran) == 2
    assert str(os.getpid()) not in ran
    assert list_noted(tmp_path / "a", "set-up") == list_noted(tmp_path / "a", "closed") == ran
    assert len(list((tmp_path / "a/notes").glob("set-up-*"))) == 2
    assert list_children() == before


@pytest.mark.parametrize("broken", ["set_up", "code", "exit", "model"])
async def test_failures_are_those_of_the_event_loop(tmp_path: Path, broken: str) -> None:
    """A failure of the environment's code, of its start, or of the target has in a worker the effect it has here."""

    async def fail(*_: object) -> None:
        raise ProviderDown("the model is down")

    ended = []
    for name, section in (("local", {}), ("workers", FARM)):
        target = Actor(lambda skill, message, n: fail() if broken == "model" else None)
        run = trainer(tmp_path / name, section, target=target, broken=broken)
        ended.append((describe(await run.train()), target.asked))
    (local, asked), (remote, asked_by_workers) = ended
    if broken == "set_up":
        assert local[0] == remote[0] == "failed"
        assert "the environment could not be set up" in str(remote[1])
        assert "OSError: the port is taken" in str(remote[1])
    else:
        assert remote == local
        assert sorted(asked) == sorted(asked_by_workers)


async def test_a_run_resumes_with_another_executor(tmp_path: Path) -> None:
    """The executor is no part of a run's identity: a second start in workers finds the complete run."""
    first = await trainer(tmp_path / "a", {}).train()
    config = settings(tmp_path / "a/run", environment=world(tmp_path / "a/notes"), executor=FARM)
    target = Actor()
    again = await build_trainer(config, target=target, environment=None).train()
    assert again.run_id == first.run_id
    assert describe(again) == describe(first)
    assert target.asked == []


COMMAND = {
    "kind": "reflact.targets:CommandTarget",
    "options": {"command": AGENT, "skill_file": "SKILL.md"},
}


@pytest.mark.parametrize("kind", [pytest.param("command", marks=pytest.mark.slow), "function"])
async def test_an_agent_that_the_configuration_names_runs_in_the_workers(tmp_path: Path, kind: str) -> None:
    """A command or a function runs in the worker, its requests are those of the loop, and so is the history."""
    for split, word in {"train": "red", "val": "green", "test": "blue"}.items():
        (tmp_path / "data" / split).mkdir(parents=True)
        line = json.dumps({"id": word, "input": f"Say {word}", "reference": word.upper()})
        (tmp_path / "data" / split / "items.jsonl").write_text(line, encoding="utf-8")
    (tmp_path / "notes").mkdir()
    target = COMMAND
    if kind == "function":
        target = {"kind": "worker_world:make_agent", "options": {"folder": str(tmp_path / "notes")}}
    ended, asked = [], []
    for name, executor in (("local", {}), ("workers", FARM)):
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
async def test_a_budget_ends_a_run_in_workers_and_the_loop_completes_it(tmp_path: Path) -> None:
    """A limit that is reached in a worker's session ends the run, which then resumes in the loop with nothing lost."""
    data = write_world(tmp_path / "world")
    train = {"num_epochs": 1}
    whole = pure_settings(data, tmp_path / "whole", train=train)
    assert (await Trainer(whole, transport=PureNetwork()).train()).status == "completed"
    limited = pure_settings(data, tmp_path / "broken", train=train, executor=FARM, budget={"max_calls": 25})
    first = PureNetwork()
    summary = await Trainer(limited, transport=first).train()
    assert (summary.status, len(first.samples)) == ("budget", 25)
    rest = pure_settings(data, tmp_path / "broken", train=train)
    second = PureNetwork()
    assert (await Trainer(rest, transport=second).train()).status == "completed"
    assert differences(left_by(tmp_path / "broken"), left_by(tmp_path / "whole")) == []
    assert not {*first.samples} & {*second.samples}


async def test_an_object_is_sent_if_it_can_be(tmp_path: Path) -> None:
    """An environment that is passed in Python is pickled; one that cannot be is refused with advice."""
    (tmp_path / "notes").mkdir()
    config = settings(tmp_path / "run", executor=FARM)
    trained = build_trainer(config, environment=WorkerWorld(str(tmp_path / "notes")))
    assert (await trained.train()).status == "completed"
    data = ToyEnvironment()
    for grade in (lambda item, answer: 1.0, _main_function()):
        environment = DatasetEnvironment(data._data, grade=grade)
        refused = build_trainer(settings(tmp_path / "refused", executor=FARM), environment=environment)
        with pytest.raises(ConfigError, match="that workers can import"):
            await refused.train()


def _main_function() -> Callable[[Item, str], float]:
    """Return a function as a script defines it."""
    import __main__

    def grade_in_script(item: Item, answer: str) -> float:
        return 1.0

    grade_in_script.__module__ = "__main__"
    grade_in_script.__qualname__ = "grade_in_script"
    __main__.grade_in_script = grade_in_script  # type: ignore[attr-defined]
    return grade_in_script


async def test_an_own_executor_is_named_and_its_rollouts_are_the_same(tmp_path: Path) -> None:
    """The executor of the documentation runs jobs by values alone, and lost workers are replaced."""
    local = await trainer(tmp_path / "local", {}).train()
    own = {"name": "worker_world:open_farm", "options": {"losses": 1}}
    assert describe(await trainer(tmp_path / "own", own).train()) == describe(local)
    with pytest.raises(ConfigError, match="there are: local, ray"):
        await trainer(tmp_path / "b", {"name": "procesess"}).train()
    with pytest.raises(ConfigError, match="async context manager"):
        await trainer(tmp_path / "d", {"name": "worker_world:Farm"}).train()


async def test_a_critic_does_not_grade_in_workers() -> None:
    """Workers have no key for the critic's model, so a critic's grades are refused with advice."""
    config = load_config({"environment": {"grader": "critic"}, "executor": FARM})
    with pytest.raises(ConfigError, match="no key for the critic"):
        refer_to_named_environment(ToyEnvironment(), config)


async def test_no_key_reaches_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get no variable that holds a model's key or has the name of a secret, unless it is allowed by name."""
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
    config = load_config({"models": models, "executor": {"variables": ["GAME_TOKEN", "MY_MODEL"]}})
    selected = select_variables(config)
    assert CANARY not in str(selected)
    assert "DATABASE_PASSWORD" not in selected
    assert (selected["GAME_TOKEN"], selected["GAME_FOLDER"]) == ("needed", "/games")


@pytest.mark.slow
@has_no_ray
async def test_a_worker_finds_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that searches its process, its item and its session for the model's key finds none."""
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    data = write_world(tmp_path / "world")
    config = pure_settings(
        data,
        tmp_path / "run",
        executor=RAY,
        environment={"name": "worker_world:Searching", "options": {"folder": str(data)}},
        train={"num_epochs": 1},
    )
    config["models"]["target"]["api_key_env"] = "OPENAI_API_KEY"
    summary = await Trainer(config, transport=PureNetwork()).train()
    assert summary.status == "completed", summary.reason
    searched = list(data.glob("searched-*"))
    assert searched
    found = "".join(path.read_text(encoding="utf-8") for path in searched)
    assert CANARY not in found
    assert "base_url" in found


class FakeWorker:
    """A worker that ends when it is asked to run a fatal job, and with it all of its jobs."""

    def __init__(self) -> None:
        self.is_lost = False

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        self.is_lost = self.is_lost or job.item.id == "fatal"
        await anyio.lowlevel.checkpoint()
        if self.is_lost:
            raise WorkerLost("it ended")
        return ExecutorResult(key=job.key, grade=Grade(score=Score.of(1), answer=""))

    async def close(self, *, seconds: float) -> None:
        await anyio.lowlevel.checkpoint()


async def test_a_job_that_ends_every_worker_takes_no_other_with_it() -> None:
    """With each job begun three times, all are done but the one that ends its workers."""
    pool = WorkerPool(lambda _: FakeWorker(), 1)
    reference = EnvironmentReference(identity="e")

    async def run(name: str) -> bool:
        item = Item(id=name, input="")
        job = ExecutorJob(key=name, environment=reference, item=item, seed=1, base_url="", token="t")
        for _ in range(3):
            with suppress(WorkerLost):
                return (await pool.run(job)).grade is not None
        return False

    names = [*"abcdefgh", "fatal", *"ijk"]
    done = await fan_out(run, names)
    assert [name for name, is_done in zip(names, done, strict=True) if not is_done] == ["fatal"]


@pytest.mark.slow
@has_no_ray
async def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """A worker that is killed in the middle is replaced, and the run leaves the same history."""
    section = world(tmp_path / "notes")
    ended = []
    for name, chosen in (("local", {}), ("killed", RAY)):
        config = settings(tmp_path / name, environment=section, executor=chosen, test={"enabled": True})
        run = build_trainer(config, environment=None)
        assert (await run.train()).status == "completed"
        ended.append(left_by(tmp_path / name))
        order_kills(tmp_path / "notes", "val-002", 1)
    assert (tmp_path / "notes/kill-val-002-0").exists()  # ordered once more after the end
    assert len(list_noted(tmp_path, "ran")) == 4
    assert differences(*ended) == []


@pytest.mark.slow
@has_no_ray
async def test_an_item_that_kills_its_workers_is_unmeasured(tmp_path: Path) -> None:
    """Three workers are lost to it, and all other items are measured."""
    run = trainer(tmp_path / "a", {**RAY, "workers": 1})
    order_kills(tmp_path / "a/notes", "train-003", 9)
    summary = await run.train()
    assert summary.status == "completed"
    assert len(list((tmp_path / "a/notes").glob("kill-*"))) in {6, 3}
    unmeasured = rows(tmp_path / "a/run", "SELECT value FROM decision_log WHERE label LIKE 'unmeasured/%'")
    assert len(unmeasured) == 1
    assert "the worker of Ray ended" in unmeasured[0][0]


def order_kills(folder: Path, item_id: str, n: int) -> None:
    """Let the next rollouts of an item end their process."""
    for number in range(n):
        (folder / f"kill-{item_id}-{number}").touch()


@pytest.mark.slow
@has_no_ray
async def test_a_cancelled_run_ends_its_busy_workers(tmp_path: Path) -> None:
    """A run that is cancelled while its workers compute ends them in the middle of a rollout."""
    async with anyio.create_task_group() as group:
        group.start_soon(trainer(tmp_path / "a", RAY, busy=120.0).train)
        await until(lambda: bool(list_noted(tmp_path / "a", "ran")))
        workers = list_noted(tmp_path / "a", "ran")
        group.cancel_scope.cancel()
    assert all(is_gone(worker) for worker in workers)
