"""Schedules the rollouts of a run with its collaborators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import anyio

from reflact import events
from reflact.adapters import CatchExits, EnvironmentAdapter
from reflact.concurrency import Slots
from reflact.protocols import EventCallback
from reflact.stages.evaluate import PassRunner
from reflact.stages.null_answers import ConstantTarget, NullAnswer
from reflact.stages.rollout import RolloutCallback, RolloutRunner, log_unmeasured, require_coverage
from reflact.training.setup import Runtime
from reflact.training.trouble import FailureLog
from reflact.types import Item, Rollout, Skill, Split

FIRST_REPORT_TRIAL = 1_000_000_000
"""The first trial for reported scores; the gate uses only trials below it."""

GATE_PHASE = "gate"
"""The phase of passes that all decisions of a run share, even if rollouts are not reused."""


def choose_stage(split: Split) -> events.Stage:
    """Return the stage that a measurement of a whole split belongs to."""
    return "final_test" if split is Split.test else "evaluate"


@dataclass
class RolloutScheduler:
    """Rolls skills out for one start of a run.

    All rollouts of the run share its ``train.rollout_concurrency`` slots; those that are asked for first go first.
    """

    runtime: Runtime
    on_event: EventCallback
    failures: FailureLog

    def __post_init__(self) -> None:
        self._slots = Slots(self.runtime.config.train.rollout_concurrency)

    def make_runner(
        self, step: int, *, feedback: bool, phase: str, on_rollout: RolloutCallback | None
    ) -> RolloutRunner:
        """Return a runner of rollouts for a step; unless rollouts are reused everywhere, only in the phase."""
        return RolloutRunner(
            target=self.runtime.target,
            environment=self.runtime.plan.environment,
            store=self.runtime.store,
            decision_log=self.runtime.decision_log,
            step=step,
            feedback=feedback,
            limit=self._slots,
            phase=None if self.runtime.config.train.reuse_rollouts else phase,
            on_rollout=on_rollout,
            on_exception=partial(self.failures.record_rollout, step=step),
        )

    async def roll_out_split(
        self, split: Split, skill: Skill, *, step: int, phase: str
    ) -> tuple[Rollout, ...]:
        """Roll a skill out on a whole split, without feedback.

        Raises:
            RunFailed: Too few items could be measured.
        """
        trials = await self.roll_out_trials(split, skill, (0,), step=step, phase=phase)
        await self.require_trials(trials, step=step)
        return trials[0]

    async def roll_out_trials(
        self, split: Split, skill: Skill, trials: Sequence[int], *, step: int, phase: str, note: str = ""
    ) -> tuple[tuple[Rollout, ...], ...]:
        """Roll a skill out on a whole split, once for each trial and without feedback; all trials run together.

        The caller passes the rollouts to ``require_trials`` before it uses them.
        """
        items = self.runtime.plan.data.items(split)
        count = self.make_progress_counter(choose_stage(split), step, len(trials) * len(items), note=note)
        runner = self.make_runner(step, feedback=False, phase=phase, on_rollout=count)
        return await runner.roll_out_trials(items, skill, trials)

    async def announce(self, split: Split, trials: Sequence[int], *, step: int, note: str) -> None:
        """Report the size of a measurement of a whole split that begins later, so that its stage has its whole total."""
        await self.on_event(
            events.StageProgressed(
                run_id=self.runtime.run_id,
                step=step,
                stage=choose_stage(split),
                done=0,
                total=len(trials) * len(self.runtime.plan.data.items(split)),
                note=note,
            )
        )

    async def require_trials(self, trials: Sequence[Sequence[Rollout]], *, step: int) -> None:
        """Check that enough items of each trial were measured, and log the others.

        Raises:
            RunFailed: Too few items could be measured; nothing is logged.
        """
        for rollouts in trials:
            require_coverage(rollouts, self.runtime.config.gate.coverage)
        for rollouts in trials:
            await log_unmeasured(rollouts, decision_log=self.runtime.decision_log, step=step)

    async def roll_out_constant(
        self, split: Split, items: Sequence[Item], answer: NullAnswer, *, step: int
    ) -> tuple[Rollout, ...]:
        """Grade a constant in place of the target's answers to items of a split; no call of the target is made.

        Raises:
            RunFailed: Too few items could be measured.
        """
        counter = self.make_progress_counter(choose_stage(split), step, len(items), note=answer.name)
        runner = replace(
            self.make_runner(step, feedback=False, phase="null_answers", on_rollout=counter),
            target=ConstantTarget(answer.text),
            environment=self.runtime.control_environment or self.runtime.plan.environment,
        )
        coverage = self.runtime.config.gate.coverage
        return await runner.roll_out(items, answer.document, coverage=coverage)

    async def roll_out_train_items(
        self, items: Sequence[Item], skill: Skill, *, step: int, phase: str
    ) -> tuple[Rollout, ...]:
        """Roll a skill out on train items, with feedback; the caller logs unmeasured rollouts."""
        count = self.make_progress_counter("slow_update", step, len(items))
        runner = self.make_runner(step, feedback=True, phase=phase, on_rollout=count)
        return await runner.roll_out(items, skill, coverage=None)

    def make_pass_runner(self, *, step: int, part: str) -> PassRunner:
        """Return the function that rolls a skill out on one trial for a decision, without feedback."""

        async def roll(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
            size = len(item_ids)
            await self.on_event(
                events.TrialRequested(run_id=self.runtime.run_id, step=step, part=part, trial=trial, n=size)
            )
            count = self.make_progress_counter("evaluate", step, size, note=f"{skill.hash}, trial {trial}")
            runner = self.make_runner(step, feedback=False, phase=GATE_PHASE, on_rollout=count)
            return await runner.roll_out_pass(self._find_items(item_ids), skill, trial=trial)

        return roll

    async def read_pass(self, skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        """Return the stored rollouts of an earlier trial."""
        runner = self.make_runner(0, feedback=False, phase=GATE_PHASE, on_rollout=None)
        return await runner.read_stored(self._find_items(item_ids), skill, trial=trial)

    def _find_items(self, item_ids: Sequence[str]) -> list[Item]:
        validation = {item.id: item for item in self.runtime.plan.data.val}
        return [validation[item_id] for item_id in item_ids]

    def make_progress_counter(
        self, stage: events.Stage, step: int, total: int, *, note: str = ""
    ) -> RolloutCallback:
        """Return a function that reports one more finished rollout of a stage."""
        build_event = partial(
            events.StageProgressed, run_id=self.runtime.run_id, step=step, stage=stage, total=total, note=note
        )
        done = n_stored = 0

        async def count(_: Rollout, from_store: bool) -> None:
            nonlocal done, n_stored
            done += 1
            n_stored += from_store
            await self.on_event(build_event(done=done, from_store=n_stored))

        return count


CLOSE_SECONDS = 0.4
"""How long the environment of a cancelled run may take to close."""


@asynccontextmanager
async def manage_environment(environment: EnvironmentAdapter, failures: FailureLog) -> AsyncIterator[None]:
    """Set an environment up and close it; cancelled runs give it ``CLOSE_SECONDS``.

    Raises:
        RunFailed: It could not be set up, or not be closed after work without an error.
    """
    async with failures.explain("the environment could not be set up"):
        await environment.set_up()
    try:
        yield
    except BaseException:  # cancellation too must close it
        with anyio.move_on_after(CLOSE_SECONDS, shield=True), suppress(Exception), CatchExits():
            await environment.close()
        raise
    async with failures.explain("the environment could not be closed"):
        await environment.close()
