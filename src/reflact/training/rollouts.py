"""Schedules the rollouts of a run with its collaborators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import anyio

from reflact import events
from reflact.adapters import CatchExits, EnvironmentAdapter
from reflact.stages.evaluate import PassRunner
from reflact.stages.null_answers import ConstantTarget, NullAnswer
from reflact.stages.rollout import RolloutCallback, RolloutRunner, log_unmeasured, require_coverage
from reflact.training.run import Run
from reflact.training.trouble import FailureLog
from reflact.types import Item, Rollout, Skill, Split

# The first trial for reported scores; the gate uses only trials below it.
FIRST_REPORT_TRIAL = 1_000_000_000


def choose_stage(split: Split) -> events.Stage:
    """Return the stage that a measurement of a whole split belongs to."""
    return "final_test" if split is Split.test else "evaluate"


def make_runner(
    run: Run, step: int, *, feedback: bool, on_rollout: RolloutCallback | None
) -> RolloutRunner:
    """Return a runner of rollouts for a step.

    All rollouts of the run share its ``train.rollout_concurrency`` slots; those that are asked for
    first go first.
    """
    return RolloutRunner(
        target=run.target,
        environment=run.plan.environment,
        store=run.store,
        decision_log=run.decision_log,
        step=step,
        feedback=feedback,
        limit=run.slots,
        on_rollout=on_rollout,
        on_exception=partial(run.failures.record_rollout, step=step),
    )


async def roll_out_split(run: Run, split: Split, skill: Skill, *, step: int) -> tuple[Rollout, ...]:
    """Roll a skill out on a whole split, without feedback.

    Raises:
        RunFailed: Too few items could be measured.
    """
    trials = await roll_out_trials(run, split, skill, (0,), step=step)
    await require_trials(run, trials, step=step)
    return trials[0]


async def roll_out_trials(
    run: Run, split: Split, skill: Skill, trials: Sequence[int], *, step: int, note: str = ""
) -> tuple[tuple[Rollout, ...], ...]:
    """Roll a skill out on a whole split, once for each trial and without feedback; all trials run
    together.

    The caller passes the rollouts to ``require_trials`` before it uses them.
    """
    items = run.plan.data.items(split)
    count = make_progress_counter(
        run, choose_stage(split), step, len(trials) * len(items), note=note
    )
    runner = make_runner(run, step, feedback=False, on_rollout=count)
    return await runner.roll_out_trials(items, skill, trials)


async def require_trials(run: Run, trials: Sequence[Sequence[Rollout]], *, step: int) -> None:
    """Check that enough items of each trial were measured, and log the others.

    Raises:
        RunFailed: Too few items could be measured; nothing is logged.
    """
    for rollouts in trials:
        require_coverage(rollouts, run.config.gate.coverage)
    for rollouts in trials:
        await log_unmeasured(rollouts, decision_log=run.decision_log, step=step)


async def roll_out_constant(
    run: Run, split: Split, items: Sequence[Item], answer: NullAnswer, *, step: int
) -> tuple[Rollout, ...]:
    """Grade a constant in place of the target's answers to items of a split; no call of the target
    is made.

    Raises:
        RunFailed: Too few items could be measured.
    """
    counter = make_progress_counter(run, choose_stage(split), step, len(items), note=answer.name)
    runner = replace(
        make_runner(run, step, feedback=False, on_rollout=counter),
        target=ConstantTarget(answer.text),
    )
    trials = await runner.roll_out_trials(items, answer.document, (0,))
    await require_trials(run, trials, step=step)
    return trials[0]


def make_pass_runner(run: Run, *, step: int, part: str) -> PassRunner:
    """Return the function that rolls a skill out on one trial for a decision, without feedback."""

    async def roll(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        size = len(item_ids)
        await run.on_event(
            events.TrialRequested(run_id=run.id, step=step, part=part, trial=trial, n=size)
        )
        count = make_progress_counter(
            run, "evaluate", step, size, note=f"{skill.hash}, trial {trial}"
        )
        runner = make_runner(run, step, feedback=False, on_rollout=count)
        return await runner.roll_out_pass(_find_items(run, item_ids), skill, trial=trial)

    return roll


def make_pass_reader(run: Run) -> PassRunner:
    """Return the function that reads the stored rollouts of an earlier trial."""

    async def read(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        runner = make_runner(run, 0, feedback=False, on_rollout=None)
        return await runner.read_stored(_find_items(run, item_ids), skill, trial=trial)

    return read


def _find_items(run: Run, item_ids: Sequence[str]) -> list[Item]:
    validation = {item.id: item for item in run.plan.data.val}
    return [validation[item_id] for item_id in item_ids]


def make_progress_counter(
    run: Run, stage: events.Stage, step: int, total: int, *, note: str = ""
) -> RolloutCallback:
    """Return a function that reports one more finished rollout of a stage."""
    done = 0
    n_stored = 0

    async def count(_: Rollout, from_store: bool) -> None:
        nonlocal done, n_stored
        done += 1
        n_stored += from_store
        await run.on_event(
            events.StageProgressed(
                run_id=run.id,
                step=step,
                stage=stage,
                total=total,
                note=note,
                done=done,
                from_store=n_stored,
            )
        )

    return count


# How long the environment of a cancelled run may take to close.
CLOSE_SECONDS = 0.4


@asynccontextmanager
async def manage_environment(
    environment: EnvironmentAdapter, failures: FailureLog
) -> AsyncIterator[None]:
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
