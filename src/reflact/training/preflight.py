"""What a run checks before it pays for its baseline."""

from __future__ import annotations

from functools import partial

from pydantic import TypeAdapter

from reflact import events
from reflact.data import describe_near_copies
from reflact.errors import InterfaceError
from reflact.messages import CallId, Message, RenderedPrompt, Text
from reflact.records import SkillScore
from reflact.stages.null_answers import describe_high_scores
from reflact.training.judge import check_judge
from reflact.training.rollouts import UNMEASURABLE, list_constants, measure_constant
from reflact.training.run import Run
from reflact.training.trouble import PREFLIGHT
from reflact.types import Split

# The most train items on which each constant is graded before the training.
MAX_CHECKED_ITEMS = 50

WARNING_ADAPTER: TypeAdapter[str | None] = TypeAdapter(str | None)
SCORES_ADAPTER: TypeAdapter[tuple[SkillScore, ...]] = TypeAdapter(tuple[SkillScore, ...])


async def check_run(run: Run) -> None:
    """Find what would waste the baseline, such as near copies, a lost skill, a wrong key.

    Raises:
        EnvironmentFailure: The skill does not reach the agent.
        ModelError: The optimizer or the critic cannot be asked.
    """
    warning = describe_near_copies(run.plan.data)
    for message in (*run.plan.environment.notes, *filter(None, [warning])):
        await run.warn(message)
    await check_skill(run)
    await check_null_answers(run)
    await check_optimizer(run)
    await check_judge(run)
    if run.critic is not None:
        from reflact.training.critic import measure_critic

        step = 0 if run.state is None else run.state.step
        async with run.timer.stage("evaluate", step=step, name="critic"):
            run.results.critic = await measure_critic(run, run.critic)


async def check_skill(run: Run) -> None:
    """Find out once in a run whether the skill reaches the agent; see ``test_skill``."""
    test = partial(test_skill, run)
    warning = await run.decision_log.once(0, "skill_test", test, WARNING_ADAPTER)
    if warning:
        await run.warn(warning)


async def test_skill(run: Run) -> str | None:
    """Return a warning if the skill may not reach the agent, "" if it does; None: not tested.

    On a cluster, the agent may be elsewhere. An evaluation takes the outcome of its run.

    Raises:
        EnvironmentFailure: It does not reach the agent.
    """
    plan = run.plan
    target = plan.target
    if target is None or not target.preflight or run.config.executor.name == "ray":
        return None
    outcome = await run.store.decision_log(plan.run_id).get(0, "skill_test")
    if outcome is not None:
        return str(outcome)
    items = plan.data.train or plan.data.val
    settings = run.config.models.target
    return await target.test_skill(plan.environment, items, plan.initial_skill, settings) or ""


async def check_null_answers(run: Run) -> None:
    """Warn if a constant answer has a high score on some train items; graded once in a run.

    Constants that are off, or that a model would grade, which costs calls, are left out.
    """
    is_judged = run.plan.critic is not None or run.judge is not None
    if not run.config.test.null_answers or is_judged:
        return

    async def grade() -> tuple[SkillScore, ...]:
        # The items are evenly spread, because data is often sorted.
        train = run.plan.data.train
        n = min(len(train), MAX_CHECKED_ITEMS)
        items = [train[number * len(train) // n] for number in range(n)]
        scores: list[SkillScore] = []
        for answer in list_constants(run):
            try:
                measured = await measure_constant(run, answer, Split.train, step=0, items=items)
            except InterfaceError:
                raise
            except UNMEASURABLE:
                continue
            scores.append(measured.score)
        return tuple(scores)

    graded = await run.decision_log.once(0, "null_answers", grade, SCORES_ADAPTER)
    if graded:
        warning = describe_high_scores(graded)
        if warning is not None:
            run.results.warnings.append(warning)
        await run.emit(events.NullAnswersGraded(run_id=run.id, scores=graded, warning=warning))


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
