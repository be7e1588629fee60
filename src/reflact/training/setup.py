"""Builds the collaborators of a run from its configuration; the only module that connects them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from reflact.adapters import (
    REQUIRED_PARTS,
    EnvironmentAdapter,
    ObjectRole,
    TargetAdapter,
    adapt_environment,
    adapt_target,
    check_object,
    check_texts,
    explain_exceptions,
    find_critic,
    load_named_environment,
    load_named_proposer,
    load_named_target,
    read_dataset,
)
from reflact.concurrency import open_outbox
from reflact.config.loading import config_identity, list_set_keys
from reflact.config.models import PRICING_KEYS, ModelConfig
from reflact.config.training import TrainerConfig
from reflact.data import TRAINING_SPLITS, DataSet, check_dataset, count_steps_per_epoch
from reflact.errors import ConfigError
from reflact.events import BudgetUpdated, Event, RateLimited
from reflact.lazy import CLIENT_MODULES, import_all
from reflact.llm.budget import Account, Budget, cover_rollout, require_caps, worst_rollout_cost
from reflact.llm.pricing import usd_of
from reflact.prompts import PromptBook, list_used_prompts, load_run_prompts
from reflact.protocols import LLM, Annotator, DecisionLog, Environment, EventCallback, Proposer, Target
from reflact.records import CriticDescription, Spend, Usage
from reflact.skills.document import check_document
from reflact.skills.package import load_skill
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_task
from reflact.store.artifacts import choose_exports, resolve_inside
from reflact.training.cost_estimate import RunCostEstimate, RunCostEstimator
from reflact.training.shutdown import GracefulStop, StoppableAnnotator, StoppableLLM
from reflact.training.trouble import RunWatch
from reflact.types import Grade, Item, Skill, Split, digest_json

if TYPE_CHECKING:
    import httpx

    from reflact.calibration.critic import Critic
    from reflact.integrations.opentelemetry import Telemetry, Tracing
    from reflact.llm.client import Client
    from reflact.llm.rate_limit import LimitChange
    from reflact.protocols import RequestSender
    from reflact.store.runs import SQLiteRunStore


ROLES = ("target", "optimizer")
"""The roles of every run."""

ROLLOUTS_PER_STEP = 6
"""The fewest rollouts that a step usually takes."""


@dataclass(frozen=True)
class Overrides:
    """Collaborators that the caller brings instead of having them built."""

    environment: Environment | None = None
    target: Target | None = None
    optimizer: LLM | None = None
    transport: httpx.AsyncBaseTransport | None = None
    telemetry: Telemetry | None = None
    annotator: Annotator | None = None
    proposer: Proposer | None = None
    label: str = ""

    @property
    def objects(self) -> tuple[tuple[ObjectRole, object], ...]:
        """The targets, environments and so on that the caller brings, with their roles."""
        return tuple((role, value) for role in REQUIRED_PARTS if (value := getattr(self, role)) is not None)

    @property
    def brought_roles(self) -> frozenset[str]:
        """The roles that the caller brings."""
        return frozenset(role for role in ROLES if getattr(self, role) is not None)

    @property
    def unseen_roles(self) -> frozenset[str]:
        """The roles whose calls are not seen."""
        return self.brought_roles - ({"target"} if self.is_target_seen else set())

    def with_target(self, target: TargetAdapter | None) -> Overrides:
        """Return the collaborators with the target of the plan, which the configuration may have named."""
        return self if target is None else replace(self, target=target.own)

    @property
    def is_target_seen(self) -> bool:
        """Whether a target of the caller sends its requests through the run."""
        return self.target is not None and adapt_target(self.target).is_connectable


@dataclass(frozen=True)
class RunPlan:
    """All of a run that is known before anything is opened or sent."""

    config: TrainerConfig
    environment: EnvironmentAdapter
    data: DataSet
    prompts: PromptBook
    initial_skill: Skill
    identity: Mapping[str, JsonValue]
    run_id: str
    critic: CriticDescription | None = None
    annotator: Annotator | None = None
    proposer: Proposer | None = None
    target: TargetAdapter | None = None
    label: str = ""

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch."""
        train = self.config.train
        return count_steps_per_epoch(len(self.data.train), train.batch_size, train.accumulation)

    @property
    def total_steps(self) -> int:
        """The steps of the run; with a budget of rollouts it usually ends before."""
        train, planned = self.config.train, self.steps_per_epoch * self.config.train.num_epochs
        return (
            planned if train.max_rollouts is None else max(planned, train.max_rollouts // ROLLOUTS_PER_STEP)
        )

    @property
    def notes_critic(self) -> CriticDescription | None:
        """The critic whose opinion failure analysts are shown, where there is one."""
        return find_critic(self.annotator)

    def estimate_cost(self, *, done: int, skill: str | None, spent: Sequence[Spend]) -> RunCostEstimate:
        """Return what the run will take from a step on; without a skill it starts with the initial one."""
        predicted = RunCostEstimator(
            self.config,
            self.data,
            prompts={name: len(p.system + p.user) for name, p in self.prompts.prompts.items()},
            skill=self.initial_skill.text if skill is None else skill,
            done=done,
            spent=spent,
            own_proposer=self.proposer is not None,
        ).estimate()
        models = self.config.models
        rows = (row.with_price(partial(usd_of, config=getattr(models, row.role))) for row in predicted.rows)
        return predicted.model_copy(update={"rows": tuple(rows)})


@dataclass(frozen=True)
class Runtime:
    """The collaborators of one run, open.

    ``control_environment`` grades null answers, which cost no calls of the target; None: that of the plan.
    """

    plan: RunPlan
    store: SQLiteRunStore
    target: TargetAdapter
    optimizer: LLM
    budget: Budget
    tracing: Tracing
    critic: Critic | None = None
    graceful_stop: GracefulStop = field(default_factory=GracefulStop)
    rejected: Sequence[str] = ()
    control_environment: EnvironmentAdapter | None = None
    exports: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the run's exported files."""
        return self.exports or self.config.out_dir

    @property
    def run_id(self) -> str:
        """The run's identity."""
        return self.plan.run_id

    @property
    def config(self) -> TrainerConfig:
        """The run's configuration."""
        return self.plan.config

    @property
    def decision_log(self) -> DecisionLog:
        """The run's decision log."""
        return self.store.decision_log(self.plan.run_id)

    def make_context(self, step: int) -> StageContext:
        """Return the collaborators of the optimizer's calls; a small one, which copies, sees the own description alone."""
        own, profile = self.config.environment.description, self.config.prompt_profile
        described = [self.plan.environment.description, self.target.description]
        described = [] if own.strip() and profile == "small" else described
        return StageContext(
            llm=self.optimizer,
            prompts=self.plan.prompts,
            decision_log=self.decision_log,
            step=step,
            task=show_task(own, *described),
        )


def check_config(config: TrainerConfig, overrides: Overrides) -> None:
    """Refuse a configuration that cannot work with what the caller passes; reads no data.

    Raises:
        ConfigError: A model, a cap or a package is missing, an object lacks a method, or two settings contradict each
            other.
    """
    for each, value in overrides.objects:
        check_object(each, value)
    named = {"target"} if config.target.kind != "chat" else set()
    for role in ROLES:
        if role not in overrides.brought_roles | named and not getattr(config.models, role).model:
            raise ConfigError(f"models.{role}.model is required: name the model that plays this role")
    _require_critic(config, overrides)
    if overrides.brought_roles >= named:
        require_caps(_add_agent_model(config, overrides), passed=overrides.unseen_roles)
    if overrides.proposer is not None and config.search.own is not None:
        raise ConfigError("search.sources names a proposer, and one is passed in Python: choose one of them")
    if config.executor.name == "ray" and find_spec("ray") is None:
        raise ConfigError("executor.name: ray needs Ray: pip install 'reflact[ray]'")


def refuse_idle_keys(config: TrainerConfig, overrides: Overrides) -> None:
    """Refuse keys of the configuration that have no effect, because an object takes their place.

    Raises:
        ConfigError: There is such a key; names all of them.
    """
    idle = {
        "environment": ("environment.", "data."),
        "target": ("target.kind", "target.options", "target.preamble", "target.postamble"),
    }
    if not overrides.is_target_seen:
        idle["target"] += ("models.target.",)
    used = {"environment.description", "data.train_size", *(f"models.target.{name}" for name in PRICING_KEYS)}
    heirs = {*_list_roles(config)} - overrides.brought_roles - {"target"}
    used |= {f"models.target.{name}" for role in heirs for name in _list_inherited(config, role)}
    used_starts = tuple(f"{name}." for name in used)
    keys = [key for key in list_set_keys(config) if not f"{key}.".startswith(used_starts)]
    for role, value in overrides.objects:
        if wrong := [key for key in keys if key.startswith(idle.get(role, ()))]:
            raise ConfigError(
                f"{', '.join(sorted(wrong))}: no effect, because the {role} is passed in Python, of type "
                f"{type(value).__name__}; remove the key, or set it in that object"
            )


def _list_inherited(config: TrainerConfig, role: str) -> set[str]:
    """Return the settings of a role's model that are those of the target's."""
    own, target = getattr(config.models, role), config.models.target
    names = own.model_fields_set & target.model_fields_set
    return {name for name in names if getattr(own, name) == getattr(target, name)}


def import_collaborators(config: TrainerConfig, overrides: Overrides) -> None:
    """Import the slow libraries that a run will use; call it on a worker thread."""
    names = ["reflact.integrations.opentelemetry", "reflact.store.lock", "reflact.store.runs"]
    if _sends_requests(config, overrides):
        names += [*CLIENT_MODULES, "reflact.targets.chat"]
    import_all(names)


def _list_roles(config: TrainerConfig) -> tuple[str, ...]:
    return (*ROLES, "critic") if config.uses_critic else ROLES


def _sends_requests(config: TrainerConfig, overrides: Overrides) -> bool:
    return config.uses_critic or len(overrides.unseen_roles) < len(ROLES)


def prepare_run(
    config: TrainerConfig, overrides: Overrides, needed: Sequence[Split] = TRAINING_SPLITS
) -> RunPlan:
    """Read and check all that a run on the needed splits takes, without opening or sending anything.

    Raises:
        UsageError: Something is missing, malformed or contradictory.
    """
    from reflact.environments.dataset import build_environment

    overrides = replace(
        overrides,
        target=overrides.target or load_named_target(config),
        environment=overrides.environment or load_named_environment(config),
    )
    check_config(config, overrides)
    overrides = replace(overrides, proposer=overrides.proposer or load_named_proposer(config))
    explain = partial(explain_exceptions, pass_on=config.train.raise_on_exception)
    for each, value in overrides.objects:
        with explain(f"the {each}, of type {type(value).__name__},"):
            check_texts(each, value)
    environment = adapt_environment(overrides.environment or build_environment(config, needed))
    target = None if overrides.target is None else adapt_target(overrides.target)
    with explain(f"`items` of {type(environment.own).__name__}"):
        data = read_dataset(environment)
    check_dataset(data, config.data.train_size, needed)
    if not data.test:
        config = config.model_copy(update={"test": config.test.model_copy(update={"enabled": False})})
    prompts = load_run_prompts(config, environment.prompt_folder)
    initial = load_initial_skill(config, target)
    identity: dict[str, JsonValue] = {
        **config_identity(config),
        **prompts.identity(list_used_prompts(config)),
        "data": data.fingerprint,
        "environment": environment.identity,
        "skill": initial.hash,
    }
    for name in ("target", "optimizer", "annotator", "proposer"):
        if (collaborator := getattr(overrides, name)) is not None:
            identity[name] = collaborator.identity
    if target is not None and target.is_connectable:
        identity["target"] = _identify_connected(target, _add_agent_model(config, overrides))
    if config.uses_critic:
        identity["critic.memory"] = config.critic.memory is not None
    return RunPlan(
        _add_agent_model(config, overrides),
        environment,
        data,
        prompts,
        initial,
        identity,
        f"r{digest_json(identity)[:12]}",
        environment.scored_by,
        overrides.annotator,
        overrides.proposer,
        target,
        overrides.label,
    )


def load_initial_skill(config: TrainerConfig, target: TargetAdapter | None) -> Skill:
    """Return the document that ``skill`` names, or else the target's own instructions.

    Raises:
        SkillError: It cannot be read, or is malformed.
    """
    if config.skill is not None:
        return load_skill(config.skill, config.skill_files)
    instructions = "" if target is None else target.instructions
    check_document(instructions)
    return Skill(text=instructions)


def _identify_connected(target: TargetAdapter, config: TrainerConfig) -> str:
    """Return the identity that a target has in the run, and so in the keys of its rollouts."""
    from reflact.llm.client import identify_model

    sender = SimpleNamespace(identity=identify_model(config.models.target))
    return target.connect(cast("RequestSender", sender), config.models.target).identity


def _add_agent_model(config: TrainerConfig, overrides: Overrides) -> TrainerConfig:
    """Return the configuration with the model of an agent that brings its own."""
    if overrides.target is None:
        return config
    described = adapt_target(overrides.target).describe_model(config.models.target)
    models = config.models.model_copy(update={"target": described})
    return config.model_copy(update={"models": models})


def _require_critic(config: TrainerConfig, overrides: Overrides) -> None:
    if not config.uses_critic:
        return
    reason = "critic.annotate" if config.critic.annotate else "environment.grader: critic"
    if not config.models.critic.model:
        raise ConfigError(f"models.critic.model is required for {reason}: name the model that scores")
    if config.environment.grader == "critic" and overrides.environment is not None:
        raise ConfigError(
            "environment.grader: critic grades the environment of the configuration, and another one is "
            "passed in Python: give that one a CriticGrader"
        )
    if config.critic.annotate and overrides.annotator is not None:
        raise ConfigError("critic.annotate is on, and an annotator is passed in Python: choose one of them")


async def ignore_event(event: Event) -> None:
    """Do nothing with an event."""


@asynccontextmanager
async def open_runtime(
    plan: RunPlan,
    overrides: Overrides,
    on_event: EventCallback = ignore_event,
    *,
    graceful_stop: GracefulStop | None = None,
) -> AsyncIterator[Runtime]:
    """Own the run, open its store and connect its models; closes all of them.

    Its paths are absolute, since code of the caller may change the current folder.

    Args:
        plan: The prepared run.
        overrides: Collaborators that the caller passes in place of configured ones.
        on_event: Called with the events of models, budget and endpoints.
        graceful_stop: Stops the run's work; None: nothing stops it but cancellation.

    Raises:
        RunConflict: The folder holds another run, or another process works in it or owns the run.
        ConfigError: A key is missing.
        CassetteError: The cassette is missing or malformed.
        StoreError: The database cannot be opened, or is damaged.
    """
    from reflact.store.lock import own_run
    from reflact.store.runs import open_store

    config, overrides = plan.config, overrides.with_target(plan.target)
    async with AsyncExitStack() as stack:
        path = (config.store or resolve_inside(config.out_dir, "run.db")).absolute()
        ownership = stack.enter_context(own_run(config.out_dir.absolute(), path, plan.run_id))
        if config.replay.cassette is not None and _sends_requests(config, overrides):
            from reflact.llm.cassettes import open_cassette

            opening = open_cassette(
                config.replay.cassette, mode=config.replay.mode, inner=overrides.transport
            )
            overrides = replace(overrides, transport=await stack.enter_async_context(opening))
        store = await stack.enter_async_context(open_store(path, ownership=ownership))
        await store.check_integrity()
        if overrides.transport is not None:
            await _refuse_gaps(config, overrides, store)
        if config.store is None and not config.fork:
            await store.refuse_other_runs(plan.run_id, plan.identity)
        connecting = connect_models(plan, overrides, store, on_event, graceful_stop=graceful_stop)
        exports = await _choose_exports(plan, store)
        yield replace(await stack.enter_async_context(connecting), exports=exports)


async def _choose_exports(plan: RunPlan, store: SQLiteRunStore) -> Path:
    """Return the folder for the files of a run, which replace those of no other run in the same ``out_dir``."""
    config = plan.config
    out_dir = config.model_dump(mode="json")["out_dir"]
    others = [
        row.run_id
        for row in await store.runs()
        if row.run_id != plan.run_id
        and (row.steps or row.status)
        and (config.store is None or (isinstance(row.config, dict) and row.config.get("out_dir") == out_dir))
    ]
    return choose_exports(config.out_dir.absolute(), plan.run_id, others)


async def _refuse_gaps(config: TrainerConfig, overrides: Overrides, store: SQLiteRunStore) -> None:
    """Refuse to record a run that would use stored replies which the recording lacks, since no replay has them."""
    from reflact.llm.cassettes import RecordTransport

    if isinstance(transport := overrides.transport, RecordTransport):
        lacking = await store.answered_calls() - transport.call_ids
        if lacking:
            raise ConfigError(
                f"the store of the run has {len(lacking)} replies that the cassette {config.replay.cassette} lacks, "
                "so the recording could not be replayed; record into another out_dir, with a store of its own"
            )


@asynccontextmanager
async def connect_models(
    plan: RunPlan,
    overrides: Overrides,
    store: SQLiteRunStore,
    on_event: EventCallback = ignore_event,
    *,
    graceful_stop: GracefulStop | None = None,
) -> AsyncIterator[Runtime]:
    """Connect a run's models and environment to an open store, under the run's budget.

    What surrounds a model or a rollout is composed here and nowhere else.

    Raises:
        ConfigError: A key is missing.
    """
    from reflact.integrations.opentelemetry import TracedLLM, TracedResponseStore, Tracing

    config, overrides = plan.config, overrides.with_target(plan.target)
    stop = graceful_stop or GracefulStop()
    async with AsyncExitStack() as stack:
        hide = await _make_redactor(plan, overrides) if config.telemetry.content else None
        tracing = Tracing(plan.run_id, overrides.telemetry, hide=hide)
        post = await stack.enter_async_context(open_outbox(on_event))
        account, watch = _open_account(plan, store, post)

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
                on_event=None if on_event is ignore_event else watch.follow(on_event),
                on_limit=post_back_off,
            )
            return await stack.enter_async_context(client)

        async def connect(role: str) -> LLM:
            return TracedLLM(await open_client(role), tracing, _model_settings(plan, role))

        critic = None
        if config.uses_critic:
            plan, critic = await _connect_critic(plan, store, await connect("critic"))
        target = plan.target or adapt_target(_build_chat_target(config, await connect("target")))
        if target.is_connectable:
            target = target.connect(await open_client("target"), config.models.target)
        optimizer = StoppableLLM(
            await connect("optimizer")
            if overrides.optimizer is None
            else TracedLLM(overrides.optimizer, tracing, None),
            stop,
        )
        worst = worst_rollout_cost(config) if "target" in overrides.unseen_roles else None
        placed = plan.environment
        if config.executor.name != "local":
            from reflact.executors.environment import place_environment

            opening = place_environment(placed, config, target, named=overrides.environment is None)
            placed = await stack.enter_async_context(opening)
        control = placed.surround(partial(surround_rollout, stop=stop, account=account))
        environment = placed.surround(
            partial(surround_rollout, stop=stop, account=account, worst=worst, tracing=tracing)
        )
        annotator = None if plan.annotator is None else StoppableAnnotator(plan.annotator, stop)
        plan = replace(plan, environment=environment, annotator=annotator)
        budget, rejected = account.budget, account.rejected
        runtime = Runtime(plan, store, target, optimizer, budget, tracing, critic, stop, rejected, control)
        yield runtime


@asynccontextmanager
async def surround_rollout(
    item: Item,
    seed: int,
    *,
    stop: GracefulStop,
    account: Account,
    worst: Usage | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[Callable[[Grade], None] | None]:
    """Surround a rollout: a stopping run does not begin it, a span shows it, and the budget covers it."""
    span = nullcontext() if tracing is None else tracing.rollout(item.id)
    async with stop.begin_unless_stopping():
        with span as add_score:
            async with cover_rollout(item, seed, account=account, worst=worst):
                yield add_score


def _open_account(
    plan: RunPlan, store: SQLiteRunStore, post: Callable[[Event], None]
) -> tuple[Account, RunWatch]:
    """Return the account of a run's calls, which posts each change of the budget, and what watches the calls."""
    limits = plan.config.budget
    watch = RunWatch(plan.run_id, post, plan.config, plan.label)

    def post_usage(usage: Usage, worst: Usage, seconds: float) -> None:
        update = BudgetUpdated(run_id=plan.run_id, usage=usage, worst_case=worst, seconds=seconds)
        post(update.model_copy(update=limits.model_dump()))

    account = Account(
        plan.run_id,
        store,
        store.decision_log(plan.run_id),
        Budget(limits, on_usage=post_usage),
        on_attempt=watch.observe_attempt,
    )
    return account, watch


def _build_chat_target(config: TrainerConfig, llm: LLM) -> Target:
    from reflact.targets.chat import ChatTarget

    return ChatTarget(llm, preamble=config.target.preamble, postamble=config.target.postamble)


async def _connect_critic(plan: RunPlan, store: SQLiteRunStore, llm: LLM) -> tuple[RunPlan, Critic]:
    """Return the critic of a run, and a plan in which it does what the configuration asks it for."""
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
    plan = replace(plan, environment=graded, critic=graded.scored_by)
    return plan if annotator is None else replace(plan, annotator=annotator), critic


def _model_settings(plan: RunPlan, role: str) -> ModelConfig:
    """Return a role's settings; a run that is replayed needs no key."""
    settings: ModelConfig = getattr(plan.config.models, role)
    if plan.config.replay.cassette is not None and plan.config.replay.mode == "replay":
        settings = settings.model_copy(update={"api_key_env": None, "key": None})
    return settings


async def _make_redactor(plan: RunPlan, overrides: Overrides) -> Callable[[str], str]:
    """Return a function that removes the keys of all roles from a text."""
    from reflact.llm.redaction import is_key, remove_keys, resolve_key

    roles = sorted({*_list_roles(plan.config)} - overrides.unseen_roles)
    keys = [await resolve_key(_model_settings(plan, role), role) for role in roles]
    return partial(remove_keys, [key for key in keys if key is not None and is_key(key)])
