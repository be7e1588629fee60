"""Builds the collaborators of a run from its configuration; the only module that connects them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue, TypeAdapter

from reflact.calibration.critic import Critic
from reflact.calibration.grading import (
    CriticAnnotator,
    CriticGrader,
    describe_critic,
    measure_critic_on_steps,
)
from reflact.calibration.replay import list_pair_steps
from reflact.concurrency import open_outbox
from reflact.config.critic import CriticConfig
from reflact.config.loading import config_identity
from reflact.config.models import ModelConfig
from reflact.config.training import TrainerConfig
from reflact.data import DataSet, check_dataset
from reflact.errors import ConfigError, SkillError
from reflact.events import Event
from reflact.jsonutil import parse_stored
from reflact.llm.budget import (
    Budget,
    BudgetedEnvironment,
    DeclaredCostEnvironment,
    LimitEvents,
    declared_rollout_cost,
    require_caps,
)
from reflact.llm.middleware import compose
from reflact.llm.pricing import usd_of
from reflact.memory.models import ContrastPair
from reflact.prompts import PromptBook, list_used_prompts, load_prompts
from reflact.protocols import (
    LLM,
    Annotator,
    CriticBacked,
    DecisionLog,
    Environment,
    EventCallback,
    RunStore,
    Target,
)
from reflact.records import CriticAccuracy, CriticDescription, Spend
from reflact.skills.document import check_document
from reflact.store.artifacts import resolve_inside
from reflact.training.cost_estimate import RunCostEstimate, estimate_run_cost
from reflact.training.shutdown import GracefulStop, StoppableAnnotator, StoppableEnvironment, StoppableLLM
from reflact.types import Skill, Split, canonical_json, digest_json

if TYPE_CHECKING:
    import httpx

    from reflact.integrations.opentelemetry import Telemetry, Tracing
    from reflact.llm.client import Client


PAIRS_ADAPTER: TypeAdapter[tuple[ContrastPair, ...]] = TypeAdapter(tuple[ContrastPair, ...])


PAIRS_LABEL = "critic_pairs"


ACCURACY_LABEL = "critic_accuracy"


class RunCritic:
    """What a run asks its critic for, and what it says of it.

    Args:
        critic: The critic, pinned.
        config: What it is asked for.
        journal: Where it stands what it was measured to be worth.
        limit: Steps that are scored at a time where it is measured.
    """

    def __init__(
        self, critic: Critic, config: CriticConfig, *, decision_log: DecisionLog, max_concurrent: int
    ) -> None:
        self._critic = critic
        self._config = config
        self._decision_log = decision_log
        self._max_concurrent = max_concurrent

    @property
    def grader(self) -> CriticGrader:
        """The critic as grader."""
        return CriticGrader(self._critic, pass_threshold=self._config.pass_threshold)

    @property
    def annotator(self) -> CriticAnnotator:
        """The critic beside the failure analyst."""
        return CriticAnnotator(self._critic)

    async def measure_accuracy(self) -> CriticDescription:
        """Return the critic with its accuracy on anchors, which are scored where no earlier start did it.

        Raises:
            ProviderError, BudgetSpent: Its endpoint or the run's budget failed.
            StoreError: The memory cannot be read.
        """
        noted = await self._decision_log.get(0, ACCURACY_LABEL)
        if noted is not None:
            measured = CriticAccuracy.model_validate(noted)
            return describe_critic(self._critic, None).model_copy(update={"accuracy": measured})
        anchors = await _load_anchors(self._config)
        found = describe_critic(
            self._critic,
            await measure_critic_on_steps(
                self._critic, list_pair_steps(anchors), max_concurrent=self._max_concurrent
            ),
        )
        if found.accuracy is not None:
            await self._decision_log.put(0, ACCURACY_LABEL, found.accuracy.model_dump(mode="json"))
        return found


async def pin_critic(
    llm: LLM,
    config: CriticConfig,
    *,
    prompts: PromptBook,
    decision_log: DecisionLog,
    ensure_run: Callable[[], Awaitable[object]],
) -> Critic:
    """Return a run's critic with the pairs that it began with; at the first start, with those promoted now.

    Args:
        llm: The model that scores.
        config: Where its memory is, and how it works.
        prompts: The run's prompts.
        decision_log: Where the pairs are kept, whole, so that the memory is not needed again.
        ensure_run: Makes sure that the run is in its store, where something is about to be noted.

    Raises:
        ConfigError: There is no such memory.
        StoreError: The memory cannot be read, or what was kept.
    """
    critic = Critic(llm, settings=config.settings, prompts=prompts)
    noted = await decision_log.get(0, PAIRS_LABEL)
    if noted is None:
        pairs = await _load_promoted_pairs(llm, config)
        await ensure_run()
        await decision_log.put(0, PAIRS_LABEL, canonical_json(PAIRS_ADAPTER.dump_python(pairs, mode="json")))
        noted = await decision_log.get(0, PAIRS_LABEL)
    return critic.pin_to(
        parse_stored(
            lambda text: PAIRS_ADAPTER.validate_python(json.loads(text)), str(noted), "critic of this run"
        )
    )


async def _load_promoted_pairs(llm: LLM, config: CriticConfig) -> tuple[ContrastPair, ...]:
    if config.memory is None:
        return ()
    if not config.memory.is_file():
        raise ConfigError(
            f"critic.memory: there is no file {config.memory}; null is a critic without examples"
        )
    from reflact.memory.store import MemoryStore

    async with MemoryStore(config.memory) as memory:
        return (await Critic(llm, memory=memory).pin()).pairs or ()


async def _load_anchors(config: CriticConfig) -> tuple[ContrastPair, ...]:
    """Return the anchors to measure on; none where the memory is gone since the run began."""
    if config.memory is None or not config.max_anchors or not config.memory.is_file():
        return ()
    from reflact.memory.store import MemoryStore

    async with MemoryStore(config.memory) as memory:
        return (await memory.anchors())[: config.max_anchors]


ROLES = ("target", "optimizer")


"""The roles of every run."""


@dataclass(frozen=True)
class Overrides:
    """Collaborators that the caller brings instead of having them built."""

    environment: Environment | None = None
    target: Target | None = None
    optimizer: LLM | None = None
    transport: httpx.AsyncBaseTransport | None = None
    telemetry: Telemetry | None = None
    annotator: Annotator | None = None

    @property
    def roles(self) -> frozenset[str]:
        """The roles whose calls are not seen."""
        given = {"target": self.target, "optimizer": self.optimizer}
        return frozenset(role for role, model in given.items() if model is not None)


@dataclass(frozen=True)
class RunPlan:
    """All of a run that is known before anything is opened or sent."""

    config: TrainerConfig
    environment: Environment
    data: DataSet
    prompts: PromptBook
    initial_skill: Skill
    identity: Mapping[str, JsonValue]
    run_id: str
    critic: CriticDescription | None = None
    annotator: Annotator | None = None

    @property
    def notes_critic(self) -> CriticDescription | None:
        """The critic whose opinion failure analysts are shown, where there is one."""
        return _find_critic(self.annotator)

    def estimate_cost(self, *, done: int, skill: str | None, spent: Sequence[Spend]) -> RunCostEstimate:
        """Return what the run will take from a step on; without a skill it starts with the initial one."""
        predicted = estimate_run_cost(
            self.config,
            self.data,
            prompts={name: len(p.system + p.user) for name, p in self.prompts.prompts.items()},
            skill=self.initial_skill.text if skill is None else skill,
            done=done,
            spent=spent,
        )
        models = self.config.models
        rows = (row.with_price(partial(usd_of, config=getattr(models, row.role))) for row in predicted.rows)
        return predicted.model_copy(update={"rows": tuple(rows)})


@dataclass(frozen=True)
class Runtime:
    """The collaborators of one run, open."""

    plan: RunPlan
    store: RunStore
    target: Target
    optimizer: LLM
    budget: Budget
    tracing: Tracing
    critic: RunCritic | None = None


def check_config(config: TrainerConfig, overrides: Overrides) -> None:
    """Refuse a configuration that cannot work with what the caller passes; reads no data.

    Raises:
        ConfigError: A model, a cap or a package is missing, or two settings contradict each other.
    """
    for role, given in (("target", overrides.target), ("optimizer", overrides.optimizer)):
        if given is None and not getattr(config.models, role).model:
            raise ConfigError(f"models.{role}.model is required: name the model that plays this role")
    _require_critic(config, overrides)
    require_caps(config, passed=overrides.roles)
    if config.telemetry.mlflow is not None and find_spec("mlflow") is None:
        raise ConfigError("telemetry.mlflow needs MLflow's client: pip install 'reflact[mlflow]'")


def import_collaborators(config: TrainerConfig, overrides: Overrides) -> None:
    """Import the slow libraries that a run will use; call it on a worker thread."""
    names = ["integrations.opentelemetry", "store.lock", "store.runs"]
    if config.uses_critic or len(overrides.roles) < len(ROLES):
        names += ["llm.client", "targets.chat"]
    for name in names:
        import_module(f"reflact.{name}")
    if "llm.client" in names:  # these libraries import half of themselves at the first call
        for name in ("httpcore", "openai.resources.chat.completions", "genai_prices.data"):
            import_module(name)


def prepare_run(config: TrainerConfig, overrides: Overrides) -> RunPlan:
    """Read and check everything that a run needs, without opening or sending anything.

    Raises:
        UsageError: Something is missing, malformed or contradictory.
    """
    check_config(config, overrides)
    environment = overrides.environment or _build_environment(config)
    data = DataSet(
        train=tuple(environment.items(Split.train)),
        val=tuple(environment.items(Split.val)),
        test=tuple(environment.items(Split.test)),
    )
    check_dataset(data, config.data.train_size)
    prompts = load_prompts(config.prompts.versions, config.prompts.folder)
    initial = Skill(text="") if config.skill is None else load_skill(config.skill)
    identity: dict[str, JsonValue] = {
        **config_identity(config),
        **prompts.identity(list_used_prompts(config)),
        "data": data.fingerprint,
        "environment": environment.identity,
        "skill": initial.hash,
    }
    if overrides.target is not None:
        identity["target"] = overrides.target.identity
    if overrides.optimizer is not None:
        identity["optimizer"] = overrides.optimizer.identity
    if overrides.annotator is not None:
        identity["annotator"] = overrides.annotator.identity
    if config.uses_critic:
        identity["critic.memory"] = config.critic.memory is not None
    return RunPlan(
        config,
        environment,
        data,
        prompts,
        initial,
        identity,
        f"r{digest_json(identity)[:12]}",
        _find_critic(environment),
        overrides.annotator,
    )


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


def _find_critic(collaborator: object) -> CriticDescription | None:
    return collaborator.scored_by if isinstance(collaborator, CriticBacked) else None


async def ignore_event(event: Event) -> None:
    """Take an event and tell nobody."""


@asynccontextmanager
async def track_with_mlflow(plan: RunPlan, on_event: EventCallback) -> AsyncIterator[EventCallback]:
    """Give an emitter that lets MLflow know of events, where the configuration says so."""
    config = plan.config
    if config.telemetry.mlflow is None:
        yield on_event
        return
    from reflact.integrations.mlflow import MlflowTracker, report_to_mlflow

    async with report_to_mlflow(
        on_event,
        MlflowTracker(config.telemetry.mlflow, config.telemetry.experiment),
        run_id=plan.run_id,
        identity=plan.identity,
        out_dir=config.out_dir,
    ) as told:
        yield told


@asynccontextmanager
async def open_runtime(
    plan: RunPlan,
    overrides: Overrides,
    on_event: EventCallback = ignore_event,
    *,
    graceful_stop: GracefulStop | None = None,
) -> AsyncIterator[Runtime]:
    """Lock the run's folder, open its store and connect its models; closes all of them.

    Args:
        plan: The prepared run.
        overrides: Collaborators that the caller passes in place of configured ones.
        on_event: Called with the events of models, budget and endpoints.
        graceful_stop: Stops the run's work; None: nothing stops it but cancellation.

    Raises:
        RunConflict: The folder holds another run, or another process works in it.
        ConfigError: A key is missing.
        CassetteError: The cassette is missing or malformed.
        StoreError: The database cannot be opened, or is damaged.
    """
    from reflact.store.lock import lock_run
    from reflact.store.runs import open_store

    config = plan.config
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(lock_run(config.out_dir))
        transport = overrides.transport
        sends_requests = config.uses_critic or len(overrides.roles) < len(ROLES)
        if config.replay.cassette is not None and sends_requests:
            from reflact.llm.cassettes import open_cassette

            transport = await stack.enter_async_context(
                open_cassette(config.replay.cassette, mode=config.replay.mode, inner=transport)
            )
        if config.store is None:
            opening = open_store(resolve_inside(config.out_dir, "run.db"), run_lock=lock)
        else:
            opening = open_store(config.store)
        store = await stack.enter_async_context(opening)
        await store.check_integrity()
        if config.store is None and not config.fork:
            await store.refuse_other_runs(plan.run_id, plan.identity)
        connecting = connect_models(plan, overrides, store, transport, on_event, graceful_stop=graceful_stop)
        yield await stack.enter_async_context(connecting)


@asynccontextmanager
async def connect_models(
    plan: RunPlan,
    overrides: Overrides,
    store: RunStore,
    transport: httpx.AsyncBaseTransport | None,
    on_event: EventCallback = ignore_event,
    *,
    graceful_stop: GracefulStop | None = None,
) -> AsyncIterator[Runtime]:
    """Connect a run's models and environment to an open store, under the run's budget.

    Middleware is composed here and nowhere else: see the lists of ``compose``, outermost first.

    Raises:
        ConfigError: A key is missing.
    """
    from reflact.integrations.opentelemetry import TracedEnvironment, TracedLLM, Tracing

    config = plan.config
    async with AsyncExitStack() as stack:
        hide = await _make_redactor(plan, overrides) if config.telemetry.content else None
        tracing = Tracing(plan.run_id, overrides.telemetry, hide=hide)
        news = LimitEvents(plan.run_id, config.budget, await stack.enter_async_context(open_outbox(on_event)))
        budget = Budget(config.budget, on_usage=news.post_budget)

        async def connect(role: str) -> LLM:
            client = _build_client(
                plan, store, transport, role, budget=budget, on_event=on_event, news=news, tracing=tracing
            )
            return await stack.enter_async_context(client)

        critic = None
        if config.uses_critic:
            llm = compose(
                await connect("critic"), [lambda llm: TracedLLM(llm, tracing, config.models.critic)]
            )
            critic = await _pin_run_critic(plan, store, llm)
            plan = _add_critic(plan, critic)
        target = overrides.target
        if target is None:
            target = _build_chat_target(
                config,
                compose(await connect("target"), [lambda llm: TracedLLM(llm, tracing, config.models.target)]),
            )
        seen = None if overrides.optimizer is not None else config.models.optimizer
        stops: list[GracefulStop] = [] if graceful_stop is None else [graceful_stop]
        optimizer = compose(
            overrides.optimizer or await connect("optimizer"),
            [
                *(partial(StoppableLLM, graceful_stop=stop) for stop in stops),
                lambda llm: TracedLLM(llm, tracing, seen),
            ],
        )
        environment = compose(
            plan.environment,
            [
                *(partial(StoppableEnvironment, graceful_stop=stop) for stop in stops),
                lambda inner: TracedEnvironment(inner, tracing),
                lambda inner: _add_budget(inner, plan, overrides, store, budget),
            ],
        )
        annotator = plan.annotator
        if annotator is not None and graceful_stop is not None:
            annotator = StoppableAnnotator(annotator, graceful_stop)
        plan = replace(plan, environment=environment, annotator=annotator)
        yield Runtime(plan, store, target, optimizer, budget, tracing, critic)


def _add_budget(
    environment: Environment, plan: RunPlan, overrides: Overrides, store: RunStore, budget: Budget
) -> Environment:
    """Return an environment under the budget; the calls of a target that is passed in are not seen."""
    worst = declared_rollout_cost(plan.config)
    if overrides.target is None or worst is None:
        return BudgetedEnvironment(environment, budget=budget)
    return DeclaredCostEnvironment(
        environment, budget=budget, responses=store, run_id=plan.run_id, worst=worst
    )


def _build_chat_target(config: TrainerConfig, llm: LLM) -> Target:
    from reflact.targets.chat import ChatTarget

    return ChatTarget(llm, preamble=config.target.preamble, postamble=config.target.postamble)


async def _pin_run_critic(plan: RunPlan, store: RunStore, llm: LLM) -> RunCritic:

    config, journal = plan.config, store.decision_log(plan.run_id)
    plain = config.model_dump(mode="json")
    critic = await pin_critic(
        llm,
        config.critic,
        prompts=plan.prompts,
        decision_log=journal,
        ensure_run=lambda: store.open_run(plan.run_id, plan.identity, plain, resume=False),
    )
    return RunCritic(
        critic, config.critic, decision_log=journal, max_concurrent=config.models.critic.concurrency
    )


def _add_critic(plan: RunPlan, own: RunCritic) -> RunPlan:
    """Return a plan in which the run's own critic does what the configuration asks it for."""
    from reflact.environments.dataset import DatasetEnvironment

    config, environment = plan.config, plan.environment
    if config.environment.grader == "critic" and isinstance(environment, DatasetEnvironment):
        environment = environment.with_grader(own.grader)
    annotator = own.annotator if config.critic.annotate else plan.annotator
    return replace(plan, environment=environment, critic=_find_critic(environment), annotator=annotator)


def _build_client(
    plan: RunPlan,
    store: RunStore,
    transport: httpx.AsyncBaseTransport | None,
    role: str,
    *,
    budget: Budget,
    on_event: EventCallback,
    news: LimitEvents,
    tracing: Tracing,
) -> Client:
    from reflact.integrations.opentelemetry import TracedResponseStore
    from reflact.llm.client import Client

    settings = _model_settings(plan, role)
    return Client(
        settings,
        role=role,
        run_id=plan.run_id,
        responses=TracedResponseStore(store, tracing, settings),
        decision_log=store.decision_log(plan.run_id),
        budget=budget,
        transport=transport,
        on_event=None if on_event is ignore_event else on_event,
        on_limit=news.post_limit_change,
    )


def _model_settings(plan: RunPlan, role: str) -> ModelConfig:
    """Return a role's settings; a run that is replayed needs no key."""
    settings: ModelConfig = getattr(plan.config.models, role)
    if plan.config.replay.cassette is not None and plan.config.replay.mode == "replay":
        settings = settings.model_copy(update={"api_key_env": None, "key": None})
    return settings


async def _make_redactor(plan: RunPlan, overrides: Overrides) -> Callable[[str], str]:
    """Return what takes the keys of all roles out of a text."""
    from reflact.llm.redaction import is_key, remove_keys, resolve_key

    roles = sorted({*ROLES, *(["critic"] if plan.config.uses_critic else [])} - overrides.roles)
    keys = [await resolve_key(_model_settings(plan, role), role) for role in roles]
    return partial(remove_keys, [key for key in keys if key is not None and is_key(key)])


def _build_environment(config: TrainerConfig) -> Environment:
    from reflact.environments.dataset import build_environment

    return build_environment(config)


def load_skill(path: Path) -> Skill:
    """Return the skill document in a file.

    Raises:
        SkillError: The file cannot be read, or the document is malformed.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SkillError(f"cannot read the skill {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SkillError(f"the skill {path} is not UTF-8 text: {error.reason}") from None
    check_document(text)
    return Skill(text=text)
