"""Opens a run: owns its folder, opens its store, and connects models, environment and budget in one
place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reflact.adapters import adapt_target
from reflact.concurrency import open_outbox
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError
from reflact.events import BudgetUpdated, Event, RateLimited
from reflact.llm.budget import Account, Budget, cover_rollout
from reflact.protocols import LLM, Approver, EventCallback, Target
from reflact.records import Usage
from reflact.store.artifacts import choose_exports, resolve_inside
from reflact.training.plan import RunPlan, list_roles, sends_requests
from reflact.training.run import Run, ignore_event
from reflact.training.shutdown import (
    GracefulStop,
    StoppableAnnotator,
    StoppableLLM,
)
from reflact.training.trouble import RunWatch
from reflact.types import Grade, Item

if TYPE_CHECKING:
    import httpx

    from reflact.calibration.critic import Critic
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
    async with AsyncExitStack() as stack:
        path = (config.store or resolve_inside(config.out_dir, "run.db")).absolute()
        ownership = stack.enter_context(own_run(config.out_dir.absolute(), path, plan.run_id))
        plan = await _open_cassette(plan, stack)
        store = await stack.enter_async_context(open_store(path, ownership=ownership))
        await store.check_integrity()
        if plan.overrides.transport is not None:
            await _refuse_gaps(plan, plan.overrides.transport, store)
        if config.store is None and not config.fork:
            await store.refuse_other_runs(plan.run_id, plan.identity)
        connecting = connect_run(
            plan, store, on_event, approve=approve, graceful_stop=graceful_stop
        )
        run = await stack.enter_async_context(connecting)
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
    from reflact.integrations.opentelemetry import TracedLLM, TracedResponseStore, Tracing

    config = plan.config
    overrides = plan.overrides
    stop = graceful_stop or GracefulStop()

    async def emit_with_step(event: Event) -> None:
        """Pass an event on; a live one without a step, such as a call's, gets that of the current
        stage.
        """
        if not (event.step or event.durable):
            event = event.model_copy(update={"step": budget.current_stage.step})
        await on_event(event)

    emit = on_event if on_event is ignore_event else emit_with_step
    async with AsyncExitStack() as stack:
        hide = await _make_redactor(plan) if config.telemetry.content else None
        tracing = Tracing(plan.run_id, overrides.telemetry, hide=hide)
        post = await stack.enter_async_context(open_outbox(emit))
        watch = RunWatch(plan.run_id, post, config, plan.label)
        budget = _open_budget(plan, post)
        log = store.decision_log(plan.run_id)
        account = Account(plan.run_id, store, log, budget, on_attempt=watch.observe_attempt)

        # One callback for all roles, so that an endpoint that they share calls it once.
        def post_back_off(change: LimitChange) -> None:
            post(RateLimited(run_id=plan.run_id, **change._asdict()))

        async def open_client(role: str) -> Client:
            from reflact.llm.client import Client

            settings = _model_settings(plan, role)
            client = Client(
                settings,
                role,
                replace(account, responses=TracedResponseStore(store, tracing, settings)),
                transport=overrides.transport,
                on_event=None if emit is ignore_event else watch.follow(emit),
                on_limit=post_back_off,
            )
            return await stack.enter_async_context(client)

        async def connect_role(role: str) -> LLM:
            return TracedLLM(await open_client(role), tracing, _model_settings(plan, role))

        critic = None
        if config.uses_critic:
            plan, critic = await _connect_critic(plan, store, await connect_role("critic"))

        target = plan.target
        if target is None:
            target = adapt_target(_build_chat_target(plan, await connect_role("target")))
        elif target.is_connectable:
            target = target.connect(await open_client("target"), config.models.target)

        if overrides.optimizer is None:
            optimizer = await connect_role("optimizer")
        else:
            optimizer = TracedLLM(overrides.optimizer, tracing, None)

        environment = plan.environment
        if config.executor.name != "local":
            from reflact.executors.ray import place_environment

            placing = place_environment(
                environment, config, target, named=overrides.environment is None
            )
            environment = await stack.enter_async_context(placing)
        surround = partial(_surround_rollout, stop=stop, account=account, tracing=tracing)

        annotator = None
        if plan.annotator is not None:
            annotator = StoppableAnnotator(plan.annotator, stop)
        yield Run(
            replace(plan, environment=environment.surround(surround), annotator=annotator),
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


@asynccontextmanager
async def _surround_rollout(
    item: Item, seed: int, *, stop: GracefulStop, account: Account, tracing: Tracing
) -> AsyncIterator[Callable[[Grade], None] | None]:
    """Surround a rollout: a stopping run does not begin it, a span shows it, and the budget covers
    it.
    """
    async with stop.begin_unless_stopping():
        with tracing.rollout(item.id) as add_score:
            async with cover_rollout(account):
                yield add_score


def _open_budget(plan: RunPlan, post: Callable[[Event], None]) -> Budget:
    """Return the budget of a run, which posts each change."""
    limits = plan.config.budget

    def post_usage(usage: Usage, worst: Usage, seconds: float) -> None:
        update = BudgetUpdated(run_id=plan.run_id, usage=usage, worst_case=worst, seconds=seconds)
        post(update.model_copy(update=limits.model_dump()))

    return Budget(limits, on_usage=post_usage)


async def _open_cassette(plan: RunPlan, stack: AsyncExitStack) -> RunPlan:
    """Return the plan with the transport of its recording, if it has one."""
    replay = plan.config.replay
    if replay.cassette is None or not sends_requests(plan.config, plan.overrides):
        return plan
    from reflact.llm.cassettes import open_cassette

    opening = open_cassette(replay.cassette, mode=replay.mode, inner=plan.overrides.transport)
    transport = await stack.enter_async_context(opening)
    return replace(plan, overrides=replace(plan.overrides, transport=transport))


async def _refuse_gaps(
    plan: RunPlan, transport: httpx.AsyncBaseTransport, store: SQLiteRunStore
) -> None:
    """Refuse to record a run that would use stored replies which the recording lacks, since no
    replay has them.
    """
    from reflact.llm.cassettes import RecordTransport

    if isinstance(transport, RecordTransport):
        lacking = await store.answered_calls() - transport.call_ids
        if lacking:
            raise ConfigError(
                f"the store of the run has {len(lacking)} replies that the cassette "
                f"{plan.config.replay.cassette} lacks, so the recording could not be replayed; "
                "record into another out_dir, with a store of its own"
            )


async def _choose_exports(plan: RunPlan, store: SQLiteRunStore) -> Path:
    """Return the folder for the files of a run, which replace those of no other run in the same
    ``out_dir``.
    """
    config = plan.config
    out_dir = config.model_dump(mode="json")["out_dir"]
    others = [
        row.run_id
        for row in await store.runs()
        if row.run_id != plan.run_id
        and (row.steps or row.status)
        and (
            config.store is None
            or (isinstance(row.config, dict) and row.config.get("out_dir") == out_dir)
        )
    ]
    return choose_exports(config.out_dir.absolute(), plan.run_id, others)


def _build_chat_target(plan: RunPlan, llm: LLM) -> Target:
    from reflact.targets.chat import ChatTarget

    return ChatTarget(llm, preamble=plan.config.target.preamble)


async def _connect_critic(plan: RunPlan, store: SQLiteRunStore, llm: LLM) -> tuple[RunPlan, Critic]:
    """Return the critic of a run, and a plan in which it does what the configuration asks
    it for.
    """
    from reflact.training.critic import grade_with_critic, pin_critic

    critic = await pin_critic(
        llm,
        store,
        config=plan.config,
        prompts=plan.prompts,
        run_id=plan.run_id,
        identity=plan.identity,
    )
    graded, annotator = grade_with_critic(plan.environment, critic, plan.config)
    notes = annotator or plan.annotator
    return replace(plan, environment=graded, critic=graded.scored_by, annotator=notes), critic


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
