"""Reports a run to MLflow: its identity, the scores of each step, its documents and its end.

MLflow's client blocks, so it runs in a thread. The run waits for it only at its end, and for a limited time.
After the first error reflact emits one warning and reports nothing more.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
from pydantic import JsonValue

from reflact import events
from reflact.concurrency import open_outbox
from reflact.protocols import EventCallback
from reflact.records import RunSummary, SkillVersion, Usage
from reflact.store.artifacts import find_exports, resolve_inside

TIMEOUT_SECONDS = 20.0
"""Seconds that MLflow may take for one event, and for all that is left when the run has ended."""

BATCH, LONGEST = 100, 500
"""The most parameters in a request, and the longest value, that every server accepts."""

MLFLOW_STATUSES = {"completed": "FINISHED", "budget": "FINISHED", "cancelled": "KILLED", "failed": "FAILED"}
"""MLflow's names for the final status of a run."""

ReportedEvent = (
    events.BaselineMeasured
    | events.EpochCommitted
    | events.RunFinished
    | events.PromotionJudged
    | events.RunStarted
    | events.StepCommitted
)


class MlflowTracker:
    """Records one run with MLflow's client. Every method blocks."""

    def __init__(self, uri: str, experiment: str) -> None:
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._mlflow_run_id = ""

    def open_run(self, run_id: str, name: str) -> None:
        """Connect; find the record of a run, or create it."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = getattr(experiment, "experiment_id", None)
        if experiment_id is None:
            experiment_id = self._client.create_experiment(self._experiment)
        runs = self._client.search_runs([experiment_id], f"tags.`reflact.run_id` = '{run_id}'", max_results=1)
        if runs:
            self._mlflow_run_id = runs[0].info.run_id
            self.set_status("RUNNING")
        else:
            run = self._client.create_run(experiment_id, run_name=name, tags={"reflact.run_id": run_id})
            self._mlflow_run_id = run.info.run_id

    def log_params(self, values: Mapping[str, str]) -> None:
        """Record the identity of the run; recording the same again changes nothing."""
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in values.items()]
        for first in range(0, len(params), BATCH):
            self._client.log_batch(self._mlflow_run_id, params=params[first : first + BATCH])

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Record numbers at a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._mlflow_run_id, metrics)

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Upload a copy of a file."""
        self._client.log_artifact(self._mlflow_run_id, str(path), folder)

    def set_status(self, status: str) -> None:
        """Record the status, by MLflow's name. ``set_terminated`` would print to standard output."""
        self._client.update_run(self._mlflow_run_id, status=status)


@asynccontextmanager
async def report_to_mlflow(
    on_event: EventCallback,
    tracker: MlflowTracker,
    *,
    run_id: str,
    identity: Mapping[str, JsonValue],
    out_dir: Path,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> AsyncIterator[EventCallback]:
    """Yield a callback that passes events to ``on_event`` and reports them to MLflow.

    ``on_event`` gets a warning after the first error. ``timeout_seconds`` limits the time for one event.
    """
    reporter, usage = _RunReporter(tracker, run_id, identity, out_dir), Usage()
    finished, failed, deadline = anyio.Event(), False, math.inf

    async def report(entry: tuple[ReportedEvent, Usage]) -> None:
        nonlocal failed
        event = entry[0]
        try:
            if not failed:
                with anyio.fail_after(min(timeout_seconds, deadline - anyio.current_time())):
                    await _run_in_thread(partial(reporter.report, *entry))
        except Exception as error:  # noqa: BLE001 - an error of MLflow never ends the run
            failed = True
            words = " ".join(str(error).split())[:LONGEST] or f"no answer in {timeout_seconds:g} seconds"
            reason = f"reflact reports nothing more of this start to MLflow: {type(error).__name__}: {words}"
            await on_event(events.WarningIssued(run_id=run_id, step=event.step, message=reason))
        if isinstance(event, events.RunFinished):
            finished.set()

    async with open_outbox(report) as post:

        async def emit(event: events.Event) -> None:
            nonlocal usage, deadline
            if isinstance(event, events.BudgetUpdated):
                usage = event.usage
            if isinstance(event, ReportedEvent):
                post((event, usage))
            if isinstance(event, events.RunFinished):
                deadline = anyio.current_time() + timeout_seconds
                await finished.wait()
            await on_event(event)

        yield emit


async def _run_in_thread(work: Callable[[], None]) -> None:
    """Do blocking work in a daemon thread; after a cancellation nothing waits for it."""
    loop, done, errors = asyncio.get_running_loop(), anyio.Event(), list[Exception]()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised in the event loop
            errors.append(error)
        with suppress(RuntimeError):  # the loop may be closed by then
            loop.call_soon_threadsafe(done.set)

    Thread(target=run, name="mlflow", daemon=True).start()
    await done.wait()
    if errors:
        raise errors[0]


class _RunReporter:
    """Reports the events of one start of a run; its methods block."""

    def __init__(
        self, tracker: MlflowTracker, run_id: str, identity: Mapping[str, JsonValue], out_dir: Path
    ) -> None:
        self._tracker = tracker
        self._run_id = run_id
        self._identity = identity
        self._out_dir = out_dir
        self._is_open = False
        self._uploaded: set[Path] = set()

    def report(self, event: ReportedEvent, usage: Usage) -> None:
        """Report an event and the usage before it."""
        if not self._is_open:
            self._tracker.open_run(self._run_id, self._out_dir.name)
            self._tracker.log_params({name: _format_param(value) for name, value in self._identity.items()})
            self._is_open = True
        metrics = _build_metrics(event, usage)
        if metrics:
            self._tracker.log_metrics(metrics, step=event.step)
        if not isinstance(event, events.RunStarted | events.BaselineMeasured):
            self._upload_skills()
        if isinstance(event, events.RunFinished):
            self._tracker.log_file(find_exports(self._out_dir, self._run_id) / "summary.json")
            self._tracker.set_status(MLFLOW_STATUSES[event.summary.status])

    def _upload_skills(self) -> None:
        """Upload the best document and the new versions."""
        for path in sorted(resolve_inside(find_exports(self._out_dir, self._run_id), "skills").glob("v*.md")):
            if path not in self._uploaded:
                self._tracker.log_file(path, "skills")
                self._uploaded.add(path)
        self._tracker.log_file(find_exports(self._out_dir, self._run_id) / "best_skill.md")


def _build_metrics(event: ReportedEvent, usage: Usage) -> dict[str, float]:
    match event:
        case events.BaselineMeasured():
            return dict.fromkeys(("score.current", "score.best"), event.score)
        case events.StepCommitted():
            accepted = event.action in {"accept", "accept_new_best", "force_accept"}
            spent = _build_spend_metrics(usage)
            return {**_build_score_metrics(event), "accepted": float(accepted), **spent}
        case events.EpochCommitted() | events.PromotionJudged():
            return _build_score_metrics(event)
        case events.RunFinished():
            return _build_summary_metrics(event.summary)
        case events.RunStarted():
            return {}


def _build_score_metrics(
    event: events.StepCommitted | events.EpochCommitted | events.PromotionJudged,
) -> dict[str, float]:
    versions: dict[str, SkillVersion] = {"score.best": event.best}
    if not isinstance(event, events.PromotionJudged):
        versions["score.current"] = event.current
    return {name: version.score for name, version in versions.items() if version.score is not None}


def _build_spend_metrics(usage: Usage) -> dict[str, float]:
    tokens = usage.input_tokens + usage.output_tokens
    spent = {"spend.calls": float(usage.calls), "spend.tokens": float(tokens)}
    return spent if usage.usd is None else {**spent, "spend.usd": usage.usd}


def _build_summary_metrics(summary: RunSummary) -> dict[str, float]:
    """Return the numbers of a run's end."""
    usage = sum((entry.usage for entry in summary.spend), Usage())
    scores = {f"{s.split}.{s.name}.hard": s.hard for s in summary.scores if s.hard is not None}
    gains = {f"{gain.split}.{gain.name}.improvement": gain.mean for gain in summary.improvements}
    decisions = {f"decisions.{entry.action}": float(entry.count) for entry in summary.actions}
    return {**scores, **gains, **decisions, **_build_spend_metrics(usage), "seconds": summary.seconds}


def _format_param(value: JsonValue) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST]
