"""Runs are reported to MLflow, which never delays or ends them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
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
from reflact.records import RunSummary
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.training import setup as wiring
from reflact.types import Split
from toy_runs import settings

pytestmark = pytest.mark.anyio

INSTALLED = find_spec("mlflow") is not None
"""The suite does without MLflow's client, which is large; with it, one test more runs."""


class Notes(MlflowTracker):
    """A tracker that records all reports.

    Args:
        broken: Called before each report with the method's name.
    """

    def __init__(self, broken: Callable[[str], None] = lambda _: None) -> None:
        self._broken = broken
        self.opened: list[tuple[str, str]] = []
        self.told: dict[str, str] = {}
        self.numbers: dict[str, dict[int, float]] = {}
        self.files: dict[str, str] = {}
        self.status: str | None = None

    def open_run(self, run_id: str, name: str) -> None:
        self._broken("open_run")
        self.opened.append((run_id, name))

    def log_params(self, values: Mapping[str, str]) -> None:
        self._broken("log_params")
        self.told.update(values)

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


async def trained(
    folder: Path, tracker: MlflowTracker, *, timeout_seconds: float = 20.0
) -> tuple[RunSummary, list[Event]]:
    """Train in the toy world and return the summary and what happened."""
    plan, passed = planned(folder)
    trainer = Trainer(
        configured(folder), environment=passed.environment, target=passed.target, optimizer=passed.optimizer
    )
    seen: list[Event] = []

    async def hear(event: Event) -> None:
        seen.append(event)

    telling = report_to_mlflow(
        hear,
        tracker,
        run_id=plan.run_id,
        identity=plan.identity,
        out_dir=plan.config.out_dir,
        timeout_seconds=timeout_seconds,
    )
    async with telling as tell, trainer.stream() as happenings:
        async for event in happenings:
            await tell(event)
    last = seen[-1]
    assert isinstance(last, RunFinished)
    return last.summary, seen


async def test_a_run_is_recorded_with_all_that_it_made(tmp_path: Path) -> None:
    """Parameters, the scores and decisions of each step, the documents, the summary and how it ended."""
    notes = Notes()
    summary, _ = await trained(tmp_path, notes)
    assert notes.opened == [(summary.run_id, "run")]
    assert notes.told["train.batch_size"] == "4"
    assert notes.told["target"] == ToyTarget().identity
    assert summary.best is not None
    assert notes.numbers["score.best"][0] == 0.0
    assert (
        notes.numbers["score.best"][summary.steps]
        == summary.best.score
        == max(notes.numbers["score.current"].values())
    )
    assert sum(notes.numbers["accepted"].values()) == summary.accepts
    assert sum(sum(v.values()) for n, v in notes.numbers.items() if n.startswith("decisions.")) == len(
        notes.numbers["accepted"]
    )
    tested = summary.score("best", Split.test)
    assert tested is not None
    assert notes.numbers["test.best.hard"] == {summary.steps: tested.hard}
    out_dir = tmp_path / "run"
    for name in (
        "best_skill.md",
        "summary.json",
        *(f"skills/{p.name}" for p in (out_dir / "skills").iterdir()),
    ):
        assert notes.files[name] == (out_dir / name).read_text("utf-8")
    assert notes.status == "FINISHED"


async def test_a_start_after_another_goes_on_in_the_same_record(tmp_path: Path) -> None:
    """What an earlier start told is not told again, and the end is."""
    await trained(tmp_path, Notes())
    again = Notes()
    summary, _ = await trained(tmp_path, again)
    assert again.opened == [(summary.run_id, "run")]
    assert "accepted" not in again.numbers
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
        with anyio.fail_after(30):
            summary, seen = await trained(tmp_path, Notes(hang), timeout_seconds=0.2)
    finally:
        release.set()
    (warning,) = [event for event in seen if isinstance(event, WarningIssued)]
    assert "no answer in 0.2 seconds" in warning.message
    assert summary.status == "completed"


async def test_a_slow_server_is_left_behind_at_the_end(tmp_path: Path) -> None:
    """What a slow server has not taken when the run ends gets no more time than a single event does."""
    never, told = Flag(), list[Event]()
    plan, _ = planned(tmp_path)

    def slow(_: str) -> None:
        never.wait(0.05)

    async def hear(event: Event) -> None:
        told.append(event)

    async with report_to_mlflow(
        hear,
        Notes(slow),
        run_id=plan.run_id,
        identity=plan.identity,
        out_dir=plan.config.out_dir,
        timeout_seconds=1.0,
    ) as tell:
        for _ in range(100):
            await tell(BaselineMeasured(run_id=plan.run_id, score=0.5, n=4))
        assert len(told) == 100
        await tell(
            RunFinished(run_id=plan.run_id, summary=RunSummary(run_id=plan.run_id, status="completed"))
        )
    warning, last = told[100:]
    assert isinstance(warning, WarningIssued)
    assert "no answer" in warning.message
    assert isinstance(last, RunFinished)


async def test_whoever_cancels_is_not_held_up(tmp_path: Path) -> None:
    """A cancelled run does not wait for a server that hangs, and the last event is not told."""
    release, reached = Flag(), anyio.Event()
    plan, _ = planned(tmp_path)
    loop = asyncio.get_running_loop()
    told: list[Event] = []

    def hang(_: str) -> None:
        loop.call_soon_threadsafe(reached.set)
        release.wait(60)

    async def hear(event: Event) -> None:
        told.append(event)

    finished = RunFinished(run_id=plan.run_id, summary=RunSummary(run_id=plan.run_id, status="completed"))
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            async with report_to_mlflow(
                hear,
                Notes(hang),
                run_id=plan.run_id,
                identity=plan.identity,
                out_dir=plan.config.out_dir,
            ) as tell:
                await tell(finished)

    try:
        with anyio.fail_after(10):
            async with open_task_group() as tasks:
                tasks.start_soon(run)
                await reached.wait()
                scope.cancel()
    finally:
        release.set()
    assert scope.cancelled_caught
    assert told == []


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path) -> None:
    """A configuration that asks for MLflow is refused where its client is not installed."""
    if INSTALLED:
        planned(tmp_path, mlflow="http://127.0.0.1:1")
        return
    with pytest.raises(ConfigError, match=r"pip install 'reflact\[mlflow\]'"):
        planned(tmp_path, mlflow="http://127.0.0.1:1")


def test_an_address_holds_no_password(tmp_path: Path) -> None:
    """Names and passwords in MLflow's address are refused, since settings are stored with the run."""
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        planned(tmp_path, mlflow="https://me:hunter2@mlflow.test")
    assert "hunter2" not in str(refused.value)


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
