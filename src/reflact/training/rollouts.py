"""Schedules the rollouts of a run with its collaborators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NamedTuple

import anyio

from reflact import events
from reflact.adapters import CatchExits, EnvironmentAdapter
from reflact.errors import EnvironmentFailure, ModelError, RunFailed
from reflact.protocols import Target
from reflact.records import SkillScore
from reflact.stages.evaluate import PassRunner
from reflact.stages.final_test import score_skill
from reflact.stages.null_answers import ConstantTarget, NullAnswer, list_null_answers
from reflact.stages.rollout import RolloutRunner, require_coverage
from reflact.training.run import Run
from reflact.training.trouble import FailureLog
from reflact.types import Item, Rollout, Skill, Split

# The first trial for reported scores; the gate uses only trials below it.
FIRST_REPORT_TRIAL = 1_000_000_000

# New trials for the validation scores of a noisy target without a test split: fewer decide on few
# gains.
REPORT_TRIALS = 4

# Errors that leave a measurement beside the training out; all others end the run.
UNMEASURABLE = (ModelError, EnvironmentFailure, RunFailed)

# How long the environment of a cancelled run may take to close.
CLOSE_SECONDS = 0.4


def make_runner(
    run: Run,
    step: int,
    stage: events.Stage,
    total: int,
    *,
    note: str = "",
    target: Target | None = None,
) -> RolloutRunner:
    """Return a runner of a step's rollouts, which reports the progress of a stage to ``total``.

    All rollouts of the run share its ``train.rollout_concurrency`` slots; those that are asked for
    first go first. Rollouts for decisions and scores carry no feedback.
    """
    done = 0
    n_stored = 0

    async def count(_: Rollout, from_store: bool) -> None:
        nonlocal done, n_stored
        done += 1
        n_stored += from_store
        progress = events.StageProgressed(
            run_id=run.id,
            step=step,
            stage=stage,
            total=total,
            note=note,
            done=done,
            from_store=n_stored,
        )
        await run.on_event(progress)

    return RolloutRunner(
        target=target or run.target,
        environment=run.plan.environment,
        store=run.store,
        decision_log=run.decision_log,
        step=step,
        feedback=stage in {"rollout", "slow_update"},
        limit=run.slots,
        on_rollout=count,
        on_exception=partial(run.failures.record_rollout, step=step),
    )


async def roll_out_trials(
    run: Run,
    skill: Skill,
    split: Split,
    *,
    step: int,
    trials: Sequence[int] = (0,),
    items: Sequence[Item] | None = None,
    note: str = "",
    target: Target | None = None,
) -> tuple[tuple[Rollout, ...], ...]:
    """Roll a skill out on a split, or some of its ``items``, once for each trial, all together.

    A ``target`` takes the place of the run's own. ``note`` says in progress what is measured.
    """
    items = run.plan.data.items(split) if items is None else items
    stage: events.Stage = "final_test" if split is Split.test else "evaluate"
    total = len(trials) * len(items)
    runner = make_runner(run, step, stage, total, note=note, target=target)
    measured = await runner.roll_out_trials(items, skill, trials)
    for rollouts in measured:
        require_coverage(rollouts, run.config.gate.coverage)
    for rollouts in measured:
        await run.log_unmeasured(rollouts, step)
    return measured


class MeasuredSkill(NamedTuple):
    """The score of a document on a split, and its rollouts."""

    score: SkillScore
    rollouts: tuple[Rollout, ...]


async def measure_skill(
    run: Run,
    name: str,
    skill: Skill,
    split: Split,
    *,
    step: int,
    trials: Sequence[int] = (0,),
    items: Sequence[Item] | None = None,
    target: Target | None = None,
) -> MeasuredSkill:
    """Return the score of a document under a name; see ``roll_out_trials``."""
    measured = await roll_out_trials(
        run, skill, split, step=step, trials=trials, items=items, note=name, target=target
    )
    rollouts = tuple(rollout for trial in measured for rollout in trial)
    items = items or run.plan.data.items(split)
    score = score_skill(name, skill, split, rollouts, items, metric=run.plan.metric)
    return MeasuredSkill(score, rollouts)


def list_constants(run: Run) -> tuple[NullAnswer, ...]:
    """Return the constants that are graded in place of the target's answers."""
    return list_null_answers(run.plan.environment, run.plan.data.train)


async def measure_constant(
    run: Run, answer: NullAnswer, split: Split, *, step: int, items: Sequence[Item] | None = None
) -> MeasuredSkill:
    """Return the score of a constant in place of the target's answers; no target is called."""
    target = ConstantTarget(answer.text)
    document = answer.document
    measured = await measure_skill(
        run, answer.name, document, split, step=step, items=items, target=target
    )
    score = measured.score.model_copy(update={"answer": answer.text})
    return measured._replace(score=score)


def make_pass_runner(run: Run, step: int, part: str, passes: list[list[Rollout]]) -> PassRunner:
    """Return the function that rolls a skill out for a decision, and adds each pass to ``passes``.

    The passes stand in the order in which they are asked for.
    """

    async def roll(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        n = len(item_ids)
        runner = make_runner(run, step, "evaluate", n, note=f"{skill.hash}, trial {trial}")
        requested = events.TrialRequested(run_id=run.id, step=step, part=part, trial=trial, n=n)
        rollouts: list[Rollout] = []
        passes.append(rollouts)
        await run.on_event(requested)
        rollouts += await runner.roll_out_pass(_find_items(run, item_ids), skill, trial=trial)
        return rollouts

    return roll


def make_pass_reader(run: Run) -> PassRunner:
    """Return the function that reads the stored rollouts of an earlier pass."""

    async def read(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        runner = make_runner(run, 0, "evaluate", len(item_ids))
        return await runner.read_stored(_find_items(run, item_ids), skill, trial=trial)

    return read


def _find_items(run: Run, item_ids: Sequence[str]) -> list[Item]:
    validation = {item.id: item for item in run.plan.data.val}
    return [validation[item_id] for item_id in item_ids]


@asynccontextmanager
async def manage_environment(
    environment: EnvironmentAdapter, failures: FailureLog
) -> AsyncIterator[None]:
    """Set an environment up and close it; cancelled runs give it ``CLOSE_SECONDS``."""
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
