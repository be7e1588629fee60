"""The trainer: runs the corridor to its end, or tells what happens on the way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from reflact import events, loading, wiring
from reflact.config import TrainerConfig
from reflact.errors import BudgetSpent, EnvironmentFailure, ModelError, ReflactError, RunFailed, StoreError
from reflact.halting import Brake, braked, patient
from reflact.ports import LLM, Annotator, Approve, Emit, Environment, Target
from reflact.results import RunSummary, Scored, Status
from reflact.run import Run
from reflact.stages.final_test import Contender, scored
from reflact.tasks import Stream
from reflact.types import Skill, Split

if TYPE_CHECKING:
    import httpx

    from reflact.telemetry import Telemetry

LAST_WORDS_SECONDS = 0.4


class Trainer:
    """Trains a skill document.

    Args:
        config: A ``TrainerConfig``, a mapping, or the path of a YAML or TOML file.
        environment: Used instead of the one that the configuration names.
        target: Used instead of a chat model.
        optimizer: Used instead of the configured model.
        transport: Carries HTTP requests instead of the network.
        approve: Asked about each candidate that the gate would accept; it may veto (see ``ports.Approve``).
        telemetry: Takes spans and metrics instead of what this process has set for OpenTelemetry.
        annotate: Adds notes to what failure analysts are told of trajectories.

    Raises:
        UsageError: The configuration, the data, a prompt or the initial skill is wrong.
    """

    def __init__(
        self,
        config: TrainerConfig | Mapping[str, Any] | Path | str,
        *,
        environment: Environment | None = None,
        target: Target | None = None,
        optimizer: LLM | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        approve: Approve | None = None,
        telemetry: Telemetry | None = None,
        annotate: Annotator | None = None,
    ) -> None:
        self._approve = approve
        self._passed = wiring.Passed(environment, target, optimizer, transport, telemetry, annotate)
        self._plan = wiring.plan(loading.load(config), self._passed)
        self._brake = self._new_brake()

    @property
    def run_id(self) -> str:
        """The run's identity: equal for equal configuration, data, prompts and initial skill."""
        return self._plan.run_id

    async def train(self) -> RunSummary:
        """Run to the end, or go on where an earlier start stopped, and return the summary.

        A run that a provider or environment ended has the status ``failed`` and a reason, one that reached a
        limit of ``budget`` has the status ``budget``; both can be started again. Cancelling ends it within a
        second and loses nothing that had finished.

        Raises:
            RunConflict: The folder holds another run, or another process works in it.
            CassetteError: A recording is missing, malformed, or lacks a request.
            StoreError: The database cannot be opened, read or written.
        """
        return await self._train(wiring.unheard)

    def stream(self) -> Stream[events.Event]:
        """Run as ``train`` does and iterate over what happens; ``Finished`` comes last.

        ``async with trainer.stream() as happenings`` guarantees clean-up within a second of leaving;
        a bare ``break`` cancels the run as soon as the event loop finalises the iterator.
        """

        async def produce(emit: Emit) -> None:
            await self._train(emit)

        return Stream(produce, subject=lambda event: event.subject)

    def stop(self, reason: str) -> None:
        """Let the run under way end soon, as ``cancelled`` with a reason; the next start goes on from there.

        Nothing new is begun. What is under way may finish within ``train.grace_seconds``, and is committed
        where that completes a step. ``train`` returns the summary, ``stream`` ends with it. Call it in the
        event loop's thread; to end at once, cancel the task instead.
        """
        self._brake.pull(reason)

    def _new_brake(self) -> Brake:
        return Brake(self._plan.config.train.grace_seconds)

    async def _train(self, emit: Emit) -> RunSummary:
        async with wiring.followed(self._plan, emit) as told:
            return await self._start(told)

    async def _start(self, emit: Emit) -> RunSummary:
        brake = self._brake
        approve = None if self._approve is None else patient(self._approve, brake)
        try:
            placed = emit if emit is wiring.unheard else Placed(emit)
            async with wiring.compose(self._plan, self._passed, placed) as house:
                with house.tracing.run():
                    told = house.tracing.following(placed)
                    summary = await self._run(Run(braked(house, brake), told, approve, brake), brake)
                    house.tracing.ended(summary)
        finally:
            self._brake = self._new_brake()
        await emit(events.Finished(run_id=self.run_id, step=summary.steps, summary=summary))
        return summary

    async def _run(self, run: Run, brake: Brake) -> RunSummary:
        try:
            await run.open()
            with brake.run():
                summary = await run.complete()
            if brake.halted:
                summary = await run.finish("cancelled", brake.reason)
        except BudgetSpent as error:
            summary = await run.finish("budget", str(error))
        except (ModelError, EnvironmentFailure, RunFailed) as error:
            summary = await run.finish("failed", str(error))
        except ReflactError as error:
            await _last_words(run, "failed", str(error))
            raise
        except anyio.get_cancelled_exc_class():
            await _last_words(run, "cancelled", brake.reason or "cancelled by its caller")
            raise
        return summary


class Placed:
    """Hands events on; live ones that name no step are given that of the stage under way."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._step = 0

    async def __call__(self, event: events.Event) -> None:
        """Take one event."""
        if isinstance(event, events.StageStarted):
            self._step = event.step
        elif not (event.step or event.durable):
            event = event.model_copy(update={"step": self._step})
        await self._emit(event)


async def _last_words(run: Run, status: Status, reason: str) -> None:
    """Store how a run ended while an error passes by, where that can be done in time."""
    with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True), suppress(StoreError):
        await run.finish(status, reason)


async def evaluate_skill(
    config: TrainerConfig | Mapping[str, Any] | Path | str,
    skill: Skill,
    split: Split,
    *,
    passed: wiring.Passed | None = None,
    emit: Emit = wiring.unheard,
) -> Scored:
    """Measure one document on a split under a configuration; finished rollouts are reused.

    Raises:
        UsageError: The configuration or the data is wrong, or the folder holds another run.
        ModelError, RunFailed: Too few items could be measured.
        BudgetSpent: The run's budget has no room for a call.
    """
    given = passed or wiring.Passed()
    planned = wiring.plan(loading.load(config), given)
    async with wiring.compose(planned, given, emit) as house:
        run = Run(house, emit)
        await run.open(goes_on=False)
        with house.tracing.run("reflact.eval"):
            if split is Split.test:
                await run.ending.open_test(f"eval {skill.hash}")
            rollouts = await run.rolls.split(split, skill, step=0, phase="eval")
        return scored(Contender(name="skill", skill=skill), split, rollouts, planned.data.items(split))
