"""Opens a run: its folder, store, models, environment and budget, connected in one place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from reflact.adapters import EnvironmentAdapter, TargetAdapter, adapt_target
from reflact.concurrency import open_outbox
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError
from reflact.events import BudgetUpdated, Event, ModelCallFinished, RateLimited
from reflact.llm.budget import Account, Budget, cover_rollout
from reflact.messages import CallReservation
from reflact.protocols import LLM, Approver, EventCallback
from reflact.records import FaultKind, Usage
from reflact.store.artifacts import choose_exports, resolve_inside
from reflact.training.judge import connect_judge
from reflact.training.plan import RunPlan, list_roles, sends_requests
from reflact.training.run import IDENTITIES_LABEL, Run, ignore_event
from reflact.training.shutdown import GracefulStop, StoppableAnnotator, StoppableLLM
from reflact.training.trouble import RunWatch
from reflact.types import Grade, Item

if TYPE_CHECKING:
    from reflact.calibration.critic import Critic
    from reflact.environments.rubric import RubricGrader
    from reflact.integrations.opentelemetry import Tracing
    from reflact.llm.client import Client
    from reflact.llm.rate_limit import LimitChange
    from reflact.store.runs import SQLiteRunStore


@asynccontextmanager
async def open_run(
    plan: RunPlan,
    on_event: EventCallback = ignore_event,
    *,
    approve: Approver | None = None,
    graceful_stop: GracefulStop | None = None,
) -> AsyncIterator[Run]:
    """Own the run, open its store and connect its models; closes all of them.

    Its paths are absolute, since code of the caller may change the current folder.
    """
    from reflact.store.lock import own_run
    from reflact.store.runs import open_store

    config = plan.config
    path = (config.store or resolve_inside(config.out_dir, "run.db")).absolute()
    async with AsyncExitStack() as stack:
        ownership = stack.enter_context(own_run(config.out_dir.absolute(), path, plan.run_id))
        plan = await _open_cassette(plan, stack)
        store = await stack.enter_async_context(open_store(path, ownership=ownership))
        await store.check_integrity()
        await _refuse_gaps(plan, store)
        if config.store is None and not config.fork:
            await store.refuse_other_runs(plan.run_id, plan.identity)
        run = await stack.enter_async_context(
            connect_run(plan, store, on_event, approve=approve, graceful_stop=graceful_stop)
        )
        run.exports = await _choose_exports(plan, store)
        yield run


@asynccontextmanager
async def connect_run(
    plan: RunPlan,
    store: SQLiteRunStore,
    on_event: EventCallback = ignore_event,
    *,
    approve: Approver | None = None,
    graceful_stop: GracefulStop | None = None,
) -> AsyncIterator[Run]:
    """Connect a run's models and environment to an open store, under the run's budget.

    Layers around models and environments are put on here and nowhere else.
    """
    from reflact.integrations.opentelemetry import TracedLLM, Tracing

    stop = graceful_stop or GracefulStop()
    async with AsyncExitStack() as stack:
        hide = await _make_redactor(plan) if plan.config.telemetry.content else None
        tracing = Tracing(plan.work_id, plan.overrides.telemetry, hide=hide)
        models = await _open_models(plan, store, on_event, tracing, stack)

        plan, critic, judge = await _connect_graders(plan, store, models)

        target = await models.connect_target()
        optimizer = plan.overrides.optimizer
        if optimizer is None:
            optimizer = await models.connect("optimizer")
        else:
            optimizer = TracedLLM(optimizer, tracing)

        account = models.account
        environment = await _place_environment(plan, target, stack)
        surround = partial(_surround_rollout, stop=stop, account=account, tracing=tracing)
        plan = replace(plan, environment=environment.surround(surround))
        if plan.annotator is not None:
            plan = replace(plan, annotator=StoppableAnnotator(plan.annotator, stop))
        yield Run(
            plan,
            store,
            target,
            StoppableLLM(optimizer, stop),
            account.budget,
            tracing,
            on_event=tracing.count_events(models.report),
            approve=approve,
            graceful_stop=stop,
            critic=critic,
            judge=judge,
            rejected=account.rejected,
        )


async def _connect_graders(
    plan: RunPlan, store: SQLiteRunStore, models: _Models
) -> tuple[RunPlan, Critic | None, RubricGrader | None]:
    """Return a plan whose environment has its critic or its judge, and these two, if any."""
    config = plan.config
    critic = None
    judge = None
    if not config.uses_critic:
        return plan, critic, judge
    llm = await models.connect("critic")
    if config.environment.grader == "rubric":
        plan, judge = connect_judge(plan, llm)
    if config.uses_progress:
        from reflact.training.critic import connect_critic

        plan, critic = await connect_critic(plan, store, llm)
    return plan, critic, judge


async def _open_models(
    plan: RunPlan,
    store: SQLiteRunStore,
    on_event: EventCallback,
    tracing: Tracing,
    stack: AsyncExitStack,
) -> _Models:
    """Return the opener of a run's models, under its budget, and with its events."""

    async def report(event: Event) -> None:
        """Pass an event on; a live one without a step, such as a call's, gets the current one."""
        if not (event.step or event.durable):
            event = event.model_copy(update={"step": budget.current_stage.step})
        await on_event(event)
        if isinstance(event, ModelCallFinished):
            watch.observe_call(event)

    def post_usage(usage: Usage, worst: Usage, seconds: float) -> None:
        update = BudgetUpdated(run_id=plan.work_id, usage=usage, worst_case=worst, seconds=seconds)
        post(update.model_copy(update=plan.config.budget.model_dump()))

    # One callback for all roles, so that an endpoint that they share calls it once.
    def post_back_off(change: LimitChange) -> None:
        post(RateLimited(run_id=plan.work_id, **change._asdict()))

    emit = on_event if on_event is ignore_event else report
    post = await stack.enter_async_context(open_outbox(emit))
    budget = Budget(plan.config.budget, on_usage=post_usage)
    watch = RunWatch(plan.work_id, post, plan.config, plan.overrides.label)
    return _Models(
        plan=plan,
        account=Account(plan.work_id, store, store.decision_log(plan.work_id), budget),
        watch=watch,
        tracing=tracing,
        stack=stack,
        report=emit,
        on_limit=post_back_off,
    )


@dataclass(frozen=True, kw_only=True)
class _Models:
    """Opens the models of a run's roles: their calls are stored, charged, watched and traced."""

    plan: RunPlan
    account: Account
    watch: RunWatch
    tracing: Tracing
    stack: AsyncExitStack
    report: EventCallback
    on_limit: Callable[[LimitChange], None]

    async def open_client(self, role: str) -> Client:
        """Open the client of a role."""
        from reflact.llm.client import Client

        settings = _model_settings(self.plan, role)

        def observe(call: CallReservation, usage: Usage, fault: FaultKind | None) -> None:
            self.watch.observe_attempt(call, usage, fault)
            self.tracing.count_usage(usage, role=role, purpose=call.purpose, config=settings)

        client = Client(
            settings,
            role,
            replace(self.account, on_attempt=observe),
            transport=self.plan.overrides.transport,
            on_event=None if self.report is ignore_event else self.report,
            on_limit=self.on_limit,
        )
        return await self.stack.enter_async_context(client)

    async def connect(self, role: str) -> LLM:
        """Open the client of a role, each of whose calls is a span."""
        from reflact.integrations.opentelemetry import TracedLLM

        client = await self.open_client(role)
        return TracedLLM(client, self.tracing, _model_settings(self.plan, role))

    async def connect_target(self) -> TargetAdapter:
        """Return the run's target: a chat model, or the caller's own with its requests seen."""
        target = self.plan.target
        config = self.plan.config
        if target is None:
            from reflact.targets.chat import ChatTarget

            llm = await self.connect("target")
            return adapt_target(ChatTarget(llm, preamble=config.target.preamble))
        if not target.is_connectable:
            return target
        return target.connect(await self.open_client("target"), config.models.target)


async def start(run: Run) -> None:
    """Start a run or an evaluation in its store, or read its last committed state."""
    config = run.config.model_dump(mode="json")
    identity = dict(run.plan.identity)
    if run.plan.evaluation is not None:
        identity["eval"] = run.plan.evaluation.model_dump(mode="json")
    run.state = await run.store.open_run(run.id, identity, config)
    await run.store.store_items(run.plan.data)
    identities: JsonValue = [run.target.identity, run.plan.environment.identity]
    await run.decision_log.put(0, IDENTITIES_LABEL, identities)
    seconds = await run.store.add_seconds(run.id, 0.0)
    run.budget.begin(await run.store.spend(run.id), seconds)


async def _place_environment(
    plan: RunPlan, target: TargetAdapter, stack: AsyncExitStack
) -> EnvironmentAdapter:
    """Return the run's environment, on the workers of its executor if it names one."""
    if plan.config.executor.name == "local":
        return plan.environment
    from reflact.executors.ray import place_environment

    is_named = plan.overrides.environment is None
    placing = place_environment(plan.environment, plan.config, target, named=is_named)
    return await stack.enter_async_context(placing)


@asynccontextmanager
async def _surround_rollout(
    item: Item, seed: int, *, stop: GracefulStop, account: Account, tracing: Tracing
) -> AsyncIterator[Callable[[Grade], None] | None]:
    """Surround a rollout with the stop, which may not let it begin, a span, and the budget."""
    async with stop.begin_unless_stopping():
        with tracing.rollout(item.id) as add_score:
            async with cover_rollout(account):
                yield add_score


async def _open_cassette(plan: RunPlan, stack: AsyncExitStack) -> RunPlan:
    """Return the plan with the transport of its recording, if it has one."""
    replay = plan.config.replay
    if replay.cassette is None or not sends_requests(plan.config, plan.overrides):
        return plan
    from reflact.llm.cassettes import RunIdentity, open_cassette
    from reflact.store.errors import describe_changes

    opening = open_cassette(
        replay.cassette,
        mode=replay.mode,
        inner=plan.overrides.transport,
        identity=RunIdentity(plan.identity, describe_changes),
    )
    transport = await stack.enter_async_context(opening)
    return replace(plan, overrides=replace(plan.overrides, transport=transport))


async def _refuse_gaps(plan: RunPlan, store: SQLiteRunStore) -> None:
    """Refuse to record a run whose store has replies that the recording lacks."""
    transport = plan.overrides.transport
    if transport is None:
        return
    from reflact.llm.cassettes import RecordTransport

    if not isinstance(transport, RecordTransport):
        return
    missing = await store.answered_calls() - transport.call_ids
    if missing:
        raise ConfigError(
            f"the store of the run has {len(missing)} replies that the cassette "
            f"{plan.config.replay.cassette} lacks, so the recording could not be replayed; "
            "record into another out_dir, with a store of its own"
        )


async def _choose_exports(plan: RunPlan, store: SQLiteRunStore) -> Path:
    """Return the folder for a run's files, which replace those of no other run in ``out_dir``."""
    config = plan.config
    out_dir = config.model_dump(mode="json")["out_dir"]
    others = []
    for row in await store.runs():
        is_here = config.store is None
        is_here |= isinstance(row.config, dict) and row.config.get("out_dir") == out_dir
        is_training = row.evaluation is None and bool(row.steps or row.status)
        if row.run_id != plan.run_id and is_training and is_here:
            others.append(row.run_id)
    return choose_exports(config.out_dir.absolute(), plan.run_id, others)


def _model_settings(plan: RunPlan, role: str) -> ModelConfig:
    """Return a role's settings; a run that is replayed needs no key."""
    settings: ModelConfig = getattr(plan.config.models, role)
    if plan.config.replay.cassette is not None and plan.config.replay.mode == "replay":
        settings = settings.model_copy(update={"api_key_env": None, "key": None})
    return settings


async def _make_redactor(plan: RunPlan) -> Callable[[str], str]:
    """Return a function that removes the keys of all roles from a text."""
    from reflact.llm.redaction import is_key, remove_keys, resolve_key

    roles = sorted({*list_roles(plan.config)} - plan.overrides.unseen_roles)
    keys = [await resolve_key(_model_settings(plan, role), role) for role in roles]
    return partial(remove_keys, [key for key in keys if key is not None and is_key(key)])
