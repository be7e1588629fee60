"""Opens a run: its folder, store, models, environment and budget, connected in one place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reflact.adapters import TargetAdapter, adapt_target
from reflact.concurrency import open_outbox
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError
from reflact.events import BudgetUpdated, Event, RateLimited
from reflact.llm.budget import Account, Budget, cover_rollout
from reflact.messages import CallReservation
from reflact.protocols import LLM, Approver, EventCallback
from reflact.records import FaultKind, Usage
from reflact.store.artifacts import choose_exports, resolve_inside
from reflact.training.plan import RunPlan, list_roles, sends_requests
from reflact.training.run import Run, ignore_event
from reflact.training.shutdown import GracefulStop, StoppableAnnotator, StoppableLLM
from reflact.training.trouble import RunWatch
from reflact.types import Grade, Item

if TYPE_CHECKING:
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

    Args:
        plan: The prepared run.
        on_event: Called with all events.
        approve: Asked about each candidate that would be accepted.
        graceful_stop: Stops the run's work; None: nothing stops it but cancellation.

    Raises:
        RunConflict: The folder holds another run, or another process works in it or owns the run.
        ConfigError: A key is missing.
        CassetteError: The cassette is missing or malformed.
        StoreError: The database cannot be opened, or is damaged.
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

    Raises:
        ConfigError: A key is missing.
    """
    from reflact.integrations.opentelemetry import TracedLLM, Tracing

    config = plan.config
    overrides = plan.overrides
    stop = graceful_stop or GracefulStop()

    async def emit_with_step(event: Event) -> None:
        """Pass an event on; a live one without a step, such as a call's, gets the current one."""
        if not (event.step or event.durable):
            event = event.model_copy(update={"step": budget.current_stage.step})
        await on_event(event)

    def post_usage(usage: Usage, worst: Usage, seconds: float) -> None:
        update = BudgetUpdated(run_id=plan.run_id, usage=usage, worst_case=worst, seconds=seconds)
        post(update.model_copy(update=config.budget.model_dump()))

    # One callback for all roles, so that an endpoint that they share calls it once.
    def post_back_off(change: LimitChange) -> None:
        post(RateLimited(run_id=plan.run_id, **change._asdict()))

    emit = on_event if on_event is ignore_event else emit_with_step
    async with AsyncExitStack() as stack:
        hide = await _make_redactor(plan) if config.telemetry.content else None
        tracing = Tracing(plan.run_id, overrides.telemetry, hide=hide)
        post = await stack.enter_async_context(open_outbox(emit))
        budget = Budget(config.budget, on_usage=post_usage)
        watch = RunWatch(plan.run_id, post, config, overrides.label)
        log = store.decision_log(plan.run_id)
        account = Account(plan.run_id, store, log, budget)
        models = _Models(
            plan=plan,
            account=account,
            watch=watch,
            tracing=tracing,
            stack=stack,
            on_event=None if emit is ignore_event else watch.follow(emit),
            on_limit=post_back_off,
        )

        critic = None
        if config.uses_critic:
            from reflact.training.critic import connect_critic

            plan, critic = await connect_critic(plan, store, await models.connect("critic"))

        target = await models.connect_target()
        optimizer = overrides.optimizer
        if optimizer is None:
            optimizer = await models.connect("optimizer")
        else:
            optimizer = TracedLLM(optimizer, tracing)

        environment = plan.environment
        if config.executor.name != "local":
            from reflact.executors.ray import place_environment

            is_named = overrides.environment is None
            placing = place_environment(environment, config, target, named=is_named)
            environment = await stack.enter_async_context(placing)
        surround = partial(_surround_rollout, stop=stop, account=account, tracing=tracing)
        plan = replace(plan, environment=environment.surround(surround))
        if plan.annotator is not None:
            plan = replace(plan, annotator=StoppableAnnotator(plan.annotator, stop))

        yield Run(
            plan,
            store,
            target,
            StoppableLLM(optimizer, stop),
            budget,
            tracing,
            on_event=tracing.count_events(emit),
            approve=approve,
            graceful_stop=stop,
            critic=critic,
            rejected=account.rejected,
        )


@dataclass(frozen=True, kw_only=True)
class _Models:
    """Opens the models of a run's roles: their calls are stored, charged, watched and traced."""

    plan: RunPlan
    account: Account
    watch: RunWatch
    tracing: Tracing
    stack: AsyncExitStack
    on_event: EventCallback | None
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
            on_event=self.on_event,
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


async def start(run: Run, *, resume: bool = True) -> None:
    """Start a run in its store, or read its last committed state."""
    config = run.config.model_dump(mode="json")
    run.state = await run.store.open_run(run.id, run.plan.identity, config, resume=resume)
    await run.store.store_items(run.plan.data)
    seconds = await run.store.add_seconds(run.id, 0.0)
    run.budget.begin(await run.store.spend(run.id), seconds)


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
        if row.run_id != plan.run_id and (row.steps or row.status) and is_here:
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
