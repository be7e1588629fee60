"""Checks a configuration: its data, its likely cost, and what its budget buys.

If requests may be sent, the target answers one train item, and each other role a small call.
"""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
from pydantic import Field

from reflact import events
from reflact.adapters import describe_exception
from reflact.config.models import ModelConfig
from reflact.config.training import ReplayConfig, TrainerConfig
from reflact.errors import EnvironmentFailure, ReflactError, ReplyError, RunConflict
from reflact.llm.pricing import usd_of
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel
from reflact.protocols import Session
from reflact.records import Spend, Usage
from reflact.training.cost_estimate import (
    BudgetForecast,
    RunCostEstimate,
    estimate_run,
    forecast_budget,
)
from reflact.training.gating import estimate_gate_power
from reflact.training.open_run import connect_run, start
from reflact.training.plan import Overrides, RunPlan, list_roles, prepare_run
from reflact.training.preflight import test_skill
from reflact.training.rollouts import manage_environment
from reflact.training.run import Run
from reflact.training.trouble import list_answer_faults
from reflact.types import FrozenModel, Grade, Item, Rollout

CHECK_PROMPT = RenderedPrompt(
    name="check",
    version=1,
    messages=(
        Message(
            role="user",
            content="This is a test of the connection. Reply with this JSON object: "
            '{"word": "ready"}',
        ),
    ),
)

# Retries during a check, since a person waits for it.
CHECK_RETRIES = 1


class ReadyReply(ReplyModel):
    """The reply of the optimizer."""

    word: str = Field(min_length=1, description="The word ready.")


class RoleCheck(FrozenModel):
    """The answers of one role.

    ``title`` is the model and where it is asked. ``seconds`` is the mean time of a call, with its
    retries. ``usage.usd`` is None if no price is known. ``mode`` is the format of typed replies;
    None if the role gave none.
    """

    role: str
    title: str
    seconds: float
    usage: Usage
    mode: str | None = None


class Trial(FrozenModel):
    """What a check found by requests: ``grade`` is that of the target's answer to ``item``.

    ``seconds`` is the time of the rollout. ``skill`` says in words if the skill reaches an agent
    behind a gateway; None if that was not tested. ``warnings`` say if a prompt or an answer was
    cut, or an answer was empty.
    """

    roles: tuple[RoleCheck, ...]
    item: Item
    grade: Grade
    seconds: float
    skill: str | None = None
    warnings: tuple[str, ...] = ()


class SetupCheck(FrozenModel):
    """What a check of a configuration found.

    ``estimate`` is the likely cost of the run's remaining steps, after ``n_done`` ones, and
    ``forecast`` what its budget buys of them. ``gate`` says what the gate can decide. ``conflict``
    is why a start would be refused. ``trial`` is None if nothing was sent.
    """

    run_id: str
    n_train: int
    n_val: int
    n_test: int
    n_done: int
    estimate: RunCostEstimate
    forecast: BudgetForecast | None
    gate: str
    conflict: str | None = None
    trial: Trial | None = None


class _Progress(NamedTuple):
    """What a run has done: its steps, its skill, its spend, and why it cannot go on."""

    n_done: int = 0
    skill: str | None = None
    spent: tuple[Spend, ...] = ()
    conflict: RunConflict | None = None


async def check_setup(
    config: TrainerConfig, overrides: Overrides | None = None, *, sends: bool = True
) -> SetupCheck:
    """Return what a run would do and cost; unless ``sends`` is False, also ask each model once.

    The target answers one train item, and each other role a small call. The calls have a temporary
    store: nothing is written to the run's folder. Recordings are ignored. The estimate counts with
    the mean consumption of the run's earlier calls, or else with that of the target's answer.

    Raises:
        UsageError: The configuration, the data, a prompt or a key is wrong.
        ModelError: A role gave no usable reply.
        EnvironmentFailure: The item could not be graded, or the skill does not reach the agent.
        RunFailed: The environment could not be set up or closed.
    """
    plan = prepare_run(config, overrides or Overrides())
    progress = await _read_progress(plan)
    trial = None
    spent = progress.spent
    if sends:
        trial = await _try_setup(plan)
        known = {entry.role for entry in spent}
        # The optimizer's small call tells nothing of its prompts in a run.
        spent += tuple(
            Spend(role=one.role, purpose="check", usage=one.usage)
            for one in trial.roles
            if one.role not in {*known, "optimizer"}
        )
    rollout_calls = 1.0
    for one in () if trial is None else trial.roles:
        if one.role == "target":
            rollout_calls = float(max(1, one.usage.calls))
    guess = partial(
        estimate_run, plan, skill=progress.skill, spent=spent, rollout_calls=rollout_calls
    )
    conflict = None
    if progress.conflict is not None and config.store is None and not config.fork:
        conflict = str(progress.conflict)
    return SetupCheck(
        run_id=plan.run_id,
        n_train=len(plan.data.train),
        n_val=len(plan.data.val),
        n_test=len(plan.data.test),
        n_done=progress.n_done,
        estimate=guess(done=progress.n_done),
        forecast=forecast_budget(plan, guess, done=progress.n_done, spent=progress.spent),
        gate=estimate_gate_power(plan).description,
        conflict=conflict,
        trial=trial,
    )


async def _read_progress(plan: RunPlan) -> _Progress:
    from reflact.store.runs import open_store

    path = plan.config.store or plan.config.out_dir / "run.db"
    if not path.is_file():
        return _Progress()
    async with open_store(path) as store:
        records = await store.records(plan.run_id)
        text = (await store.skill(records[-1].current.skill_hash)).text if records else None
        conflict = await store.find_conflict(plan.run_id, plan.identity)
        return _Progress(len(records), text, await store.spend(plan.run_id), conflict)


async def _try_setup(plan: RunPlan) -> Trial:
    """Ask each model of a run once."""
    from reflact.store.runs import open_store

    models = plan.config.models
    for role in list_roles(plan.config):
        settings: ModelConfig = getattr(models, role)
        retries = min(CHECK_RETRIES, settings.max_retries)
        limited = settings.model_copy(update={"max_retries": retries})
        models = models.model_copy(update={role: limited})
    config = plan.config.model_copy(update={"replay": ReplayConfig(), "models": models})
    plan = replace(plan, config=config)
    item = plan.data.train[0]
    finished: list[events.ModelCallFinished] = []

    async def collect(event: events.Event) -> None:
        if isinstance(event, events.ModelCallFinished):
            finished.append(event)

    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="reflact-check-"))
        store = await stack.enter_async_context(open_store(Path(folder) / "run.db"))
        run = await stack.enter_async_context(connect_run(plan, store, collect))
        await start(run)
        async with manage_environment(run.plan.environment, run.failures):
            warning = await test_skill(run)
            started = anyio.current_time()
            grade = await _grade_item(item, run)
            seconds = anyio.current_time() - started
        if plan.overrides.optimizer is None:
            await _ask_optimizer(run)
        asked = dict.fromkeys(event.role for event in finished)
        roles = [await _describe_role(role, finished, run) for role in asked]
        warnings = await list_answer_faults(store, plan.run_id, plan.config)
    skill = None
    if warning is not None:
        skill = warning or "the agent's request has it, so it is in force"
    return Trial(
        roles=tuple(roles),
        item=item,
        grade=grade,
        seconds=seconds,
        skill=skill,
        warnings=warnings,
    )


async def _ask_optimizer(run: Run) -> None:
    """Let the optimizer give one reply; raises if it gives none that is valid."""
    call_id = CallId(role="optimizer", purpose="check", step=0)
    try:
        await run.optimizer.ask(CHECK_PROMPT, ReadyReply, call_id=call_id)
    except ReplyError as error:
        raise ReplyError(
            f"models.optimizer: {run.config.models.optimizer.title} was asked for a reply in JSON "
            f"of a given form, and none of its {len(error.reasons)} replies had it "
            f"({error.reasons[-1]}); name another model with models.optimizer.model, or another "
            "way to ask with models.optimizer.mode",
            reasons=error.reasons,
        ) from None


async def _grade_item(item: Item, run: Run) -> Grade:
    """Return the grade of the target's answer, after the annotator has seen it, if there is one."""
    plan = run.plan
    skill = plan.initial_skill
    session: Session | None = None
    try:
        session = run.target.session_for(item, skill, rollout="check")
        grade = await plan.environment.run(item, session, seed=0)
        if plan.annotator is not None:
            rollout = Rollout(
                key="check",
                item_id=item.id,
                skill_hash=skill.hash,
                turns=session.turns,
                answer=grade.answer,
                score=grade.score,
            )
            await plan.annotator.annotate(item, rollout)
    except ReflactError:
        raise
    except Exception as error:  # the caller's grader may raise anything
        raise EnvironmentFailure(describe_exception(item, error, run.target, session)) from error
    return grade


async def _describe_role(
    role: str, finished: list[events.ModelCallFinished], run: Run
) -> RoleCheck:
    settings: ModelConfig = getattr(run.config.models, role)
    calls = [event for event in finished if event.role == role]
    usage = sum((event.usage for event in calls), Usage())
    if usd_of(Usage(calls=1, input_tokens=1, output_tokens=1), settings) is None:
        usage = usage.model_copy(update={"usd": None})
    mode: object = settings.mode
    if settings.mode == "auto":
        mode = await run.decision_log.get(0, f"mode/{role}")
    return RoleCheck(
        role=role,
        title=settings.title,
        seconds=sum(event.seconds for event in calls) / len(calls),
        usage=usage,
        mode=None if role == "target" or mode is None else str(mode),
    )
