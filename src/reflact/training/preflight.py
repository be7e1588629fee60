"""What a run checks before it pays for its baseline."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter

from reflact import events
from reflact.data import describe_near_copies
from reflact.errors import EnvironmentFailure, InterfaceError, ModelError, RunFailed
from reflact.messages import CallId, Message, RenderedPrompt, Text
from reflact.records import SkillScore
from reflact.stages.final_test import score_skill
from reflact.stages.null_answers import (
    NullAnswer,
    choose_checked_items,
    describe_high_scores,
    list_null_answers,
)
from reflact.training.rollouts import roll_out_constant
from reflact.training.run import Run
from reflact.training.trouble import PREFLIGHT
from reflact.types import Item, Split

# The label of the warning of a test of the skill in the decision log; empty if there is none.
SKILL_TEST_LABEL = "skill_test"

# The label of the null answers' scores on train items.
CHECK_LABEL = "null_answers"

SCORES_ADAPTER: TypeAdapter[tuple[SkillScore, ...]] = TypeAdapter(tuple[SkillScore, ...])

# Errors that leave a measurement beside the training out; all others end the run.
UNMEASURABLE = (ModelError, EnvironmentFailure, RunFailed)


async def check_run(run: Run) -> None:
    """Find what would waste the baseline: near copies, a lost skill, a task that constants solve, a
    wrong key.

    Raises:
        EnvironmentFailure: The skill does not reach the agent.
        ModelError: The optimizer or the critic cannot be asked.
    """
    if (warning := describe_near_copies(run.plan.data)) is not None:
        await run.warn(warning)
    await check_skill(run)
    await check_null_answers(run)
    await check_optimizer(run)
    await measure_critic(run)


async def check_skill(run: Run) -> None:
    """Find out once in a run whether the skill reaches the agent; on a cluster, the agent may be
    elsewhere.

    The outcome is logged, so that a resumed run has the same warning.

    Raises:
        EnvironmentFailure: It does not reach the agent.
    """
    plan = run.plan
    target = plan.target
    is_near = run.config.executor.name != "ray"
    warning = await run.decision_log.get(0, SKILL_TEST_LABEL)
    if warning is None and is_near and target is not None and target.preflight:
        items = plan.data.train or plan.data.val
        settings = run.config.models.target
        warning = (
            await target.test_skill(plan.environment, items, plan.initial_skill, settings) or ""
        )
        await run.decision_log.put(0, SKILL_TEST_LABEL, warning)
    if warning:
        await run.warn(str(warning))


async def check_null_answers(run: Run) -> None:
    """Warn if a constant answer has a high score on some train items; graded once in a run.

    Constants that are off, or that a critic would grade, which costs calls, are left out.
    """
    if not run.config.test.null_answers or run.plan.critic is not None:
        return
    stored = await run.decision_log.get(0, CHECK_LABEL)
    if stored is None:
        items = choose_checked_items(run.plan.data.train)
        scores: list[SkillScore] = []
        for answer in list_constants(run):
            try:
                scores.append(await grade_constant(run, answer, Split.train, items, step=0))
            except InterfaceError:
                raise
            except UNMEASURABLE:
                continue
        stored = SCORES_ADAPTER.dump_python(tuple(scores), mode="json")
        await run.decision_log.put(0, CHECK_LABEL, stored)
    graded = SCORES_ADAPTER.validate_python(stored)
    if graded:
        warning = describe_high_scores(graded)
        run.results.warnings += [] if warning is None else [warning]
        await run.emit(events.NullAnswersGraded(run_id=run.id, scores=graded, warning=warning))


def list_constants(run: Run) -> tuple[NullAnswer, ...]:
    """Return the constants that are graded in place of the target's answers."""
    return list_null_answers(run.plan.environment, run.plan.data.train)


async def grade_constant(
    run: Run, answer: NullAnswer, split: Split, items: Sequence[Item], *, step: int
) -> SkillScore:
    """Return the score of a constant on items of a split.

    Raises:
        RunFailed: Too few items could be measured.
    """
    rollouts = await roll_out_constant(run, split, items, answer, step=step)
    score = score_skill(
        answer.name, answer.document, split, rollouts, items, metric=run.plan.metric
    )
    return score.model_copy(update={"answer": answer.text})


async def check_optimizer(run: Run) -> None:
    """Find a wrong key, model or address of the optimizer by one small call, whose reply is stored.

    There is no call if the run has begun, if a recording or a transport of the caller answers, if
    the caller brings the optimizer, or if the optimizer has the connection of the target, which the
    baseline tests.
    """
    overrides = run.plan.overrides
    is_replayed = overrides.transport is not None or run.config.replay.cassette is not None
    if run.state is not None or is_replayed or overrides.optimizer is not None:
        return
    if run.plan.target is None and not run.config.models.is_optimizer_separate:
        return
    message = Message(
        role="user", content="This is a test of the connection. Reply with the word ready."
    )
    prompt = RenderedPrompt(name=PREFLIGHT, version=1, messages=(message,))
    await run.optimizer.ask(
        prompt, Text, call_id=CallId(role="optimizer", purpose=PREFLIGHT, step=0)
    )


async def measure_critic(run: Run) -> None:
    """Measure the run's critic on its anchors, if it has one."""
    if run.critic is None:
        return
    from reflact.training import critic

    step = 0 if run.state is None else run.state.step
    async with run.timer.stage("evaluate", step=step, name="critic"):
        run.results.critic = await critic.measure_critic(run.critic, run.config, run.decision_log)
