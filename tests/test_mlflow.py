"""Runs are reported to MLflow, which never delays or ends them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from threading import Event as Flag
from typing import Any

import anyio
import pytest

from reflact import Trainer
from reflact.concurrency import open_task_group
from reflact.config.loading import load_config
from reflact.errors import ConfigError
from reflact.events import BaselineMeasured, Event, RunFinished, WarningIssued
from reflact.integrations.mlflow import MlflowTracker, report_to_mlflow
from reflact.protocols import EventCallback
from reflact.records import RunSummary
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.training import setup as wiring
from reflact.types import Split
from toy_runs import settings

INSTALLED = find_spec("mlflow") is not None
"""The suite does without MLflow's client, which is large; with it, one test more runs."""


FINISHED = RunFinished(run_id="r1", summary=RunSummary(run_id="r1", status="completed"))


class Notes(MlflowTracker):
    """A tracker that keeps all reports; ``broken`` is called before each one with the method's name."""

    def __init__(self, broken: Callable[[str], None] = lambda _: None) -> None:
        self._broken = broken
        self.opened: list[tuple[str, str]] = []
        self.params: dict[str, str] = {}
        self.numbers: dict[str, dict[int, float]] = {}
        self.files: dict[str, str] = {}
        self.status: str | None = None

    def open_run(self, run_id: str, name: str) -> None:
        self._broken("open_run")
        self.opened.append((run_id, name))

    def log_params(self, values: Mapping[str, str]) -> None:
        self._broken("log_params")
        self.params.update(values)

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._broken("log_metrics")
        for name, value in values.items():
            self.numbers.setdefault(name, {})[step] = value

    def log_file(self, path: Path, folder: str | None = None) -> None:
        self._broken("log_file")
        self.files[path.name if folder is None else f"{folder}/{path.name}"] = path.read_text("utf-8")

    def set_status(self, status: str) -> None:
        self._broken("set_status")
        self.status = status


def configured(folder: Path, **telemetry: str) -> dict[str, Any]:
    """Return the configuration of a short run with two epochs and a final test."""
    return settings(folder / "run", train={"num_epochs": 2}, test={"enabled": True}, telemetry=telemetry)


def planned(folder: Path, **telemetry: str) -> tuple[wiring.RunPlan, wiring.Overrides]:
    """Return the plan of a run in the toy world, and what it is given."""
    passed = wiring.Overrides(
        ToyEnvironment(train=8, val=4, test=4), ToyTarget(), ScriptedLLM(toy_optimizer())
    )
    return wiring.prepare_run(load_config(configured(folder, **telemetry)), passed), passed


def report(
    folder: Path, tracker: MlflowTracker, happened: list[Event], timeout_seconds: float = 20.0
) -> AbstractAsyncContextManager[EventCallback]:
    """Return a callback that reports events of the planned run and keeps them."""
    plan, _ = planned(folder)

    async def keep(event: Event) -> None:
        happened.append(event)

    return report_to_mlflow(
        keep,
        tracker,
        run_id=plan.run_id,
        identity=plan.identity,
        out_dir=plan.config.out_dir,
        timeout_seconds=timeout_seconds,
    )


async def trained(
    folder: Path, tracker: MlflowTracker, *, timeout_seconds: float = 20.0
) -> tuple[RunSummary, list[Event]]:
    """Train in the toy world and return the summary and all events."""
    _, passed = planned(folder)
    trainer = Trainer(
        configured(folder), environment=passed.environment, target=passed.target, optimizer=passed.optimizer
    )
    happened: list[Event] = []
    async with report(folder, tracker, happened, timeout_seconds) as emit, trainer.stream() as stream:
        async for event in stream:
            await emit(event)
    last = happened[-1]
    assert isinstance(last, RunFinished)
    return last.summary, happened


async def test_a_run_is_recorded_with_all_that_it_made(tmp_path: Path) -> None:
    """Parameters, the scores and decisions of each step, the documents, the summary and how it ended."""
    notes = Notes()
    summary, _ = await trained(tmp_path, notes)
    assert notes.opened == [(summary.run_id, "run")]
    assert notes.params["train.batch_size"] == "4"
    assert notes.params["target"] == ToyTarget().identity
    best, current = notes.numbers["score.best"], notes.numbers["score.current"]
    assert best[0] == 0.0
    assert best[summary.steps] == summary.best.score == max(current.values())
    accepted = notes.numbers["accepted"]
    assert sum(accepted.values()) == summary.accepts
    decisions = [values for name, values in notes.numbers.items() if name.startswith("decisions.")]
    assert sum(sum(values.values()) for values in decisions) == len(accepted)
    tested = summary.score("best", Split.test)
    assert notes.numbers["test.best.hard"] == {summary.steps: tested.hard}
    out_dir = tmp_path / "run"
    skills = [f"skills/{path.name}" for path in (out_dir / "skills").iterdir()]
    for name in ("best_skill.md", "summary.json", *skills):
        assert notes.files[name] == (out_dir / name).read_text("utf-8")
    assert notes.status == "FINISHED"
    again = Notes()
    await trained(tmp_path, again)
    assert again.opened == [(summary.run_id, "run")]
    assert "accepted" not in again.numbers, "earlier starts are not reported again"
    assert again.status == "FINISHED"


@pytest.mark.parametrize("where", ["open_run", "log_params", "log_metrics", "log_file", "set_status"])
async def test_whatever_fails_there_is_one_warning(tmp_path: Path, where: str) -> None:
    """A failure anywhere is told once, before the run's last event, and the run is as it would have been."""

    def broken(place: str) -> None:
        if place == where:
            raise ConnectionError("no\nserver")

    summary, seen = await trained(tmp_path, Notes(broken))
    (warning,) = [event for event in seen if isinstance(event, WarningIssued)]
    assert "ConnectionError: no server" in warning.message
    assert summary.status == "completed"
    assert (tmp_path / "run" / "summary.json").is_file()


async def test_a_server_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    """A run waits for MLflow at its end alone, and for at most `timeout_seconds`."""
    release = Flag()

    def hang(_: str) -> None:
        release.wait(60)

    try:
        with anyio.fail_after(60):
            summary, seen = await trained(tmp_path, Notes(hang), timeout_seconds=0.2)
    finally:
        release.set()
    (warning,) = [event for event in seen if isinstance(event, WarningIssued)]
    assert "no answer in 0.2 seconds" in warning.message
    assert summary.status == "completed"


@pytest.mark.slow
async def test_a_slow_server_is_left_behind_at_the_end(tmp_path: Path) -> None:
    """At the end of the run, all events that a slow server has not taken get no more time than a single one."""
    never, happened = Flag(), list[Event]()

    def slow(_: str) -> None:
        never.wait(0.05)

    async with report(tmp_path, Notes(slow), happened, timeout_seconds=1.0) as emit:
        for _ in range(100):
            await emit(BaselineMeasured(run_id="r1", score=0.5, n=4))
        assert len(happened) == 100
        await emit(FINISHED)
    warning, last = happened[100:]
    assert isinstance(warning, WarningIssued)
    assert "no answer" in warning.message
    assert isinstance(last, RunFinished)


async def test_a_cancelled_run_does_not_wait(tmp_path: Path) -> None:
    """A cancelled run does not wait for a server that hangs, and its last event is not passed on."""
    release, reached, scope = Flag(), anyio.Event(), anyio.CancelScope()
    loop = asyncio.get_running_loop()
    happened: list[Event] = []

    def hang(_: str) -> None:
        loop.call_soon_threadsafe(reached.set)
        release.wait(60)

    async def run() -> None:
        with scope:
            async with report(tmp_path, Notes(hang), happened) as emit:
                await emit(FINISHED)

    try:
        with anyio.fail_after(60):
            async with open_task_group() as tasks:
                tasks.start_soon(run)
                await reached.wait()
                scope.cancel()
    finally:
        release.set()
    assert scope.cancelled_caught
    assert happened == []


def test_a_wrong_configuration_is_refused(tmp_path: Path) -> None:
    """MLflow's address must not contain a password, since settings are stored; the client must be installed."""
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        planned(tmp_path, mlflow="https://me:hunter2@mlflow.test")
    assert "hunter2" not in str(refused.value)
    if INSTALLED:
        planned(tmp_path, mlflow="http://127.0.0.1:1")
        return
    with pytest.raises(ConfigError, match=r"pip install 'reflact\[mlflow\]'"):
        planned(tmp_path, mlflow="http://127.0.0.1:1")


TRAINING = """
import sys
import anyio
from reflact import Trainer
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.types import Split
from toy_runs import settings

folder, address = sys.argv[1:]
for epochs in (1, 2):
    trainer = Trainer(
        settings(folder, train={"num_epochs": epochs}, telemetry={"mlflow": address, "experiment": "toys"}),
        environment=ToyEnvironment(train=8, val=4, test=4),
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
    )
    anyio.run(trainer.train)
"""

READING = """
import json
import sys
from pathlib import Path
from mlflow import MlflowClient

client = MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("toys").experiment_id])
names = ("score.best", "accepted")
steps = {name: [m.step for m in client.get_metric_history(run.info.run_id, name)] for name in names}
files = [file.path for folder in (None, "skills") for file in client.list_artifacts(run.info.run_id, folder)]
print(json.dumps([run.info.status, run.data.tags["reflact.run_id"], run.data.params, steps, files]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="MLflow is not installed")
def test_the_real_client_keeps_both_starts_of_a_run_in_one_record(tmp_path: Path) -> None:
    """Through ``telemetry.mlflow``, into MLflow's own store; nothing is printed on the way."""
    address = (tmp_path / "mlflow").as_uri()
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)

    def python(code: str, *arguments: object) -> str:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout

    assert python(TRAINING, tmp_path / "run", address) == ""
    status, run_id, params, steps, files = json.loads(python(READING, address))
    summary = RunSummary.model_validate_json((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert (status, run_id) == ("FINISHED", summary.run_id)
    assert params["train.batch_size"] == "4"
    assert steps["accepted"] == list(range(1, summary.steps + 1))
    assert steps["score.best"][:2] == [0, 1]
    assert {"best_skill.md", "summary.json", "skills/v0000.md"} <= set(files)
