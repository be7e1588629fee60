"""Builds real collaborators from a configuration: the one place where rooms meet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import JsonValue

from reflact.config import TrainerConfig
from reflact.data import DataSet, check
from reflact.errors import ConfigError, SkillError
from reflact.events import Event
from reflact.exports import inside
from reflact.forecast import Forecast, forecast
from reflact.llm.allowance import SeenRollouts, UnseenRollouts, declared, require_caps
from reflact.llm.budget import Budget
from reflact.llm.news import News
from reflact.llm.pricing import usd_of
from reflact.loading import identity as config_identity
from reflact.ports import LLM, Annotator, Emit, Environment, RunStore, ScoredByCritic, Target
from reflact.prompts import PromptBook, load_book, prompts_of
from reflact.results import CriticUsed, Spend
from reflact.roles import ModelConfig
from reflact.skill import check_document
from reflact.tasks import outbox
from reflact.types import Skill, Split, digest

if TYPE_CHECKING:
    import httpx

    from reflact.critics import RunCritic
    from reflact.telemetry import Telemetry, Tracing


ROLES = ("target", "optimizer")
"""The roles of every run."""


@dataclass(frozen=True)
class Passed:
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
class Plan:
    """All of a run that is known before anything is opened or sent."""

    config: TrainerConfig
    environment: Environment
    data: DataSet
    prompts: PromptBook
    initial: Skill
    identity: Mapping[str, JsonValue]
    run_id: str
    critic: CriticUsed | None = None
    annotator: Annotator | None = None

    @property
    def noted_by(self) -> CriticUsed | None:
        """The critic whose opinion failure analysts are shown, where there is one."""
        return _critic_of(self.annotator)

    def forecast(self, *, done: int, skill: str | None, spent: Sequence[Spend]) -> Forecast:
        """Return what the run will take from a step on; without a skill it starts with the initial one."""
        predicted = forecast(
            self.config,
            self.data,
            prompts={name: len(p.system + p.user) for name, p in self.prompts.prompts.items()},
            skill=self.initial.text if skill is None else skill,
            done=done,
            spent=spent,
        )
        models = self.config.models
        rows = (row.priced(partial(usd_of, config=getattr(models, row.role))) for row in predicted.rows)
        return predicted.model_copy(update={"rows": tuple(rows)})


@dataclass(frozen=True)
class House:
    """The collaborators of one run, open."""

    plan: Plan
    store: RunStore
    target: Target
    optimizer: LLM
    budget: Budget
    tracing: Tracing
    critic: RunCritic | None = None


def check_config(config: TrainerConfig, passed: Passed) -> None:
    """Refuse a configuration that cannot work with what the caller passes; reads no data.

    Raises:
        ConfigError: A model, a cap or a package is missing, or two settings contradict each other.
    """
    for role, given in (("target", passed.target), ("optimizer", passed.optimizer)):
        if given is None and not getattr(config.models, role).model:
            raise ConfigError(f"models.{role}.model is required: name the model that plays this role")
    _require_critic(config, passed)
    require_caps(config, passed=passed.roles)
    if config.telemetry.mlflow is not None and find_spec("mlflow") is None:
        raise ConfigError("telemetry.mlflow needs MLflow's client: pip install 'reflact[mlflow]'")


def import_collaborators(config: TrainerConfig, passed: Passed) -> None:
    """Import the slow libraries that a run will use; call it on a worker thread."""
    names = ["telemetry", "traced", "store.lock", "store.runs"]
    if config.asks_critic or len(passed.roles) < len(ROLES):
        names += ["llm.client", "targets.chat"]
    for name in names:
        import_module(f"reflact.{name}")


def plan(config: TrainerConfig, passed: Passed) -> Plan:
    """Read and check everything that a run needs, without opening or sending anything.

    Raises:
        UsageError: Something is missing, malformed or contradictory.
    """
    check_config(config, passed)
    environment = passed.environment or _dataset(config)
    data = DataSet(
        train=tuple(environment.items(Split.train)),
        val=tuple(environment.items(Split.val)),
        test=tuple(environment.items(Split.test)),
    )
    check(data, config.data.train_size)
    prompts = load_book(config.prompts.versions, config.prompts.folder)
    initial = _initial(config)
    identity: dict[str, JsonValue] = {
        **config_identity(config),
        **prompts.identity(prompts_of(config)),
        "data": data.fingerprint,
        "environment": environment.identity,
        "skill": initial.hash,
    }
    if passed.target is not None:
        identity["target"] = passed.target.identity
    if passed.optimizer is not None:
        identity["optimizer"] = passed.optimizer.identity
    if passed.annotator is not None:
        identity["annotator"] = passed.annotator.identity
    if config.asks_critic:
        identity["critic.memory"] = config.critic.memory is not None
    return Plan(
        config,
        environment,
        data,
        prompts,
        initial,
        identity,
        f"r{digest(identity)[:12]}",
        _critic_of(environment),
        passed.annotator,
    )


def _require_critic(config: TrainerConfig, passed: Passed) -> None:
    if not config.asks_critic:
        return
    reason = "critic.notes" if config.critic.notes else "environment.grader: critic"
    if not config.models.critic.model:
        raise ConfigError(f"models.critic.model is required for {reason}: name the model that scores")
    if config.environment.grader == "critic" and passed.environment is not None:
        raise ConfigError(
            "environment.grader: critic grades the environment of the configuration, and another one is "
            "passed in Python: give that one a CriticGrader"
        )
    if config.critic.notes and passed.annotator is not None:
        raise ConfigError("critic.notes is on, and an annotator is passed in Python: choose one of them")


def _critic_of(collaborator: object) -> CriticUsed | None:
    return collaborator.scored_by if isinstance(collaborator, ScoredByCritic) else None


async def unheard(event: Event) -> None:
    """Take an event and tell nobody."""


@asynccontextmanager
async def followed(planned: Plan, emit: Emit) -> AsyncIterator[Emit]:
    """Give an emitter that lets MLflow know of events, where the configuration says so."""
    config = planned.config
    if config.telemetry.mlflow is None:
        yield emit
        return
    from reflact.integrations.mlflow import MlflowTracker, report_to_mlflow

    async with report_to_mlflow(
        emit,
        connect=partial(MlflowTracker, config.telemetry.mlflow, config.telemetry.experiment),
        run_id=planned.run_id,
        identity=planned.identity,
        out_dir=config.out_dir,
    ) as told:
        yield told


@asynccontextmanager
async def compose(planned: Plan, passed: Passed, emit: Emit = unheard) -> AsyncIterator[House]:
    """Lock the run's folder, open its store and connect its models; closes all of them.

    ``emit`` is told of what its models, its budget and its endpoints do.

    Raises:
        RunConflict: The folder holds another run, or another process works in it.
        ConfigError: A key is missing.
        CassetteError: The cassette is missing or malformed.
        StoreError: The database cannot be opened, or is damaged.
    """
    from reflact.store.lock import run_lock
    from reflact.store.runs import open_store

    config = planned.config
    async with AsyncExitStack() as stack:
        lease = stack.enter_context(run_lock(config.out_dir))
        transport = passed.transport
        seen = config.asks_critic or len(passed.roles) < len(ROLES)
        if config.replay.cassette is not None and seen:
            from reflact.llm.cassettes import open_cassette

            transport = await stack.enter_async_context(
                open_cassette(config.replay.cassette, mode=config.replay.mode, inner=transport)
            )
        if config.store is None:
            opening = open_store(inside(config.out_dir, "run.db"), lease=lease)
        else:
            opening = open_store(config.store)
        store = await stack.enter_async_context(opening)
        await store.check()
        if config.store is None and not config.fork:
            await store.refuse_others(planned.run_id, planned.identity)
        yield await stack.enter_async_context(furnished(planned, passed, store, transport, emit))


@asynccontextmanager
async def furnished(
    planned: Plan,
    passed: Passed,
    store: RunStore,
    transport: httpx.AsyncBaseTransport | None,
    emit: Emit = unheard,
) -> AsyncIterator[House]:
    """Connect a run's models to an open store, under the run's budget; ``emit`` as for ``compose``.

    Raises:
        ConfigError: A key is missing.
    """
    from reflact.telemetry import Tracing
    from reflact.traced import TracedEnvironment, TracedLLM

    config, worst = planned.config, declared(planned.config)
    async with AsyncExitStack() as stack:
        hide = await _hider(planned, passed) if config.telemetry.content else None
        tracing = Tracing(planned.run_id, passed.telemetry, hide=hide)
        news = News(planned.run_id, config.budget, await stack.enter_async_context(outbox(emit)))
        budget = Budget(config.budget, on_usage=news.budget_moved)
        client = partial(
            _client, planned, store, transport, budget=budget, emit=emit, news=news, tracing=tracing
        )
        critic = None
        if config.asks_critic:
            critic = await _pinned(planned, store, await stack.enter_async_context(client("critic")))
            planned = _with_critic(planned, critic)
        environment: Environment = SeenRollouts(planned.environment, budget=budget)
        target = passed.target
        if target is None:
            from reflact.targets.chat import ChatTarget

            llm = await stack.enter_async_context(client("target"))
            target = ChatTarget(llm, preamble=config.target.preamble, postamble=config.target.postamble)
        elif worst is not None:
            environment = UnseenRollouts(
                planned.environment, budget=budget, effects=store, run_id=planned.run_id, worst=worst
            )
        optimizer = passed.optimizer
        if optimizer is None:
            optimizer = await stack.enter_async_context(client("optimizer"))
        else:
            optimizer = TracedLLM(optimizer, tracing)
        planned = replace(planned, environment=TracedEnvironment(environment, tracing))
        yield House(planned, store, target, optimizer, budget, tracing, critic)


async def _pinned(planned: Plan, store: RunStore, llm: LLM) -> RunCritic:
    from reflact.critics import RunCritic, pinned

    config, journal = planned.config, store.journal(planned.run_id)
    plain = config.model_dump(mode="json")
    critic = await pinned(
        llm,
        config.critic,
        prompts=planned.prompts,
        journal=journal,
        begin=lambda: store.open_run(planned.run_id, planned.identity, plain, goes_on=False),
    )
    return RunCritic(critic, config.critic, journal=journal, limit=config.models.critic.concurrency)


def _with_critic(planned: Plan, own: RunCritic) -> Plan:
    """Return a plan in which the run's own critic does what the configuration asks it for."""
    from reflact.environments.dataset import DatasetEnvironment

    config, environment = planned.config, planned.environment
    if config.environment.grader == "critic" and isinstance(environment, DatasetEnvironment):
        environment = environment.graded_by(own.grader)
    annotator = own.notes if config.critic.notes else planned.annotator
    return replace(planned, environment=environment, critic=_critic_of(environment), annotator=annotator)


@asynccontextmanager
async def _client(
    planned: Plan,
    store: RunStore,
    transport: httpx.AsyncBaseTransport | None,
    role: str,
    *,
    budget: Budget,
    emit: Emit,
    news: News,
    tracing: Tracing,
) -> AsyncIterator[LLM]:
    from reflact.llm.client import Client
    from reflact.traced import TracedLedger, TracedLLM

    settings = _settings(planned, role)
    client = Client(
        settings,
        role=role,
        run_id=planned.run_id,
        effects=TracedLedger(store, tracing, settings),
        journal=store.journal(planned.run_id),
        budget=budget,
        transport=transport,
        on_event=None if emit is unheard else emit,
        on_limit=news.backed_off,
    )
    async with client:
        yield TracedLLM(client, tracing, settings)


def _settings(planned: Plan, role: str) -> ModelConfig:
    """Return a role's settings; a run that is replayed needs no key."""
    settings: ModelConfig = getattr(planned.config.models, role)
    if planned.config.replay.cassette is not None and planned.config.replay.mode == "replay":
        settings = settings.model_copy(update={"api_key_env": None, "key": None})
    return settings


async def _hider(planned: Plan, passed: Passed) -> Callable[[str], str]:
    """Return what takes the keys of all roles out of a text."""
    from reflact.llm.redaction import is_key, key_for, without

    roles = sorted({*ROLES, *(["critic"] if planned.config.asks_critic else [])} - passed.roles)
    keys = [await key_for(_settings(planned, role), role) for role in roles]
    return partial(without, [key for key in keys if key is not None and is_key(key)])


def _dataset(config: TrainerConfig) -> Environment:
    from reflact.environments.dataset import from_config

    return from_config(config)


def _initial(config: TrainerConfig) -> Skill:
    if config.skill is None:
        return Skill(text="")
    try:
        text = config.skill.read_bytes().decode("utf-8")
    except OSError as error:
        raise SkillError(f"cannot read the skill {config.skill}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SkillError(f"the skill {config.skill} is not UTF-8 text: {error.reason}") from None
    check_document(text)
    return Skill(text=text)
