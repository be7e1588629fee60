"""The side of a worker: rollouts in one event loop, with the values that it gets and returns.

Its sessions ask the trainer's gateway, and so it needs no key of a provider.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from typing import Any, cast

import anyio
import httpx
from pydantic import Field, JsonValue

from reflact import errors
from reflact.adapters import (
    CatchExits,
    EnvironmentAdapter,
    TargetAdapter,
    load_named_environment,
    load_named_target,
)
from reflact.agents.gateway_session import GatewayTarget
from reflact.config.models import ModelConfig
from reflact.config.training import EnvironmentConfig, TargetConfig, TrainerConfig
from reflact.errors import ConfigError, ProviderDown, ReflactError, RunFailed
from reflact.messages import CallId
from reflact.protocols import Environment, Session
from reflact.types import FrozenModel, Grade, Item, Skill, Turn

OTHER_VERSIONS = (
    "of a worker differs from the trainer's: install the same versions of its packages on all "
    "machines"
)


class WorkerSetup(FrozenModel):
    """What a worker makes before its first rollout; identities must equal the trainer's.

    ``environment`` is pickled, unless its section names an object to import. ``target`` is the
    section of an agent that runs in the worker; without it, sessions send each message to the
    trainer's target.
    """

    environment: bytes | EnvironmentConfig = Field(repr=False)
    environment_identity: str
    target: TargetConfig | None = None
    target_identity: str = ""
    model: str = ""
    llm: str = ""


class WorkerJob(FrozenModel):
    """A rollout for a worker.

    ``rollout`` is its key, empty if the target stays with the trainer; ``seed`` is the trial's.
    """

    item: Item
    seed: int
    base_url: str
    token: str = Field(repr=False)
    skill: str = ""
    rollout: str = ""


class WorkerError(FrozenModel):
    """An exception; ``traceback`` is empty for those of reflact."""

    kind: str
    message: str
    traceback: str = ""
    cause: WorkerError | None = None


class WorkerResult(FrozenModel):
    """The grade of a rollout, or what it raised; ``turns`` are those of the worker's session."""

    turns: tuple[Turn, ...] = ()
    grade: Grade | None = None
    error: WorkerError | None = None


class CodeError(Exception):
    """An exception of the caller's own code in a worker; subclasses have the name of its class."""


def describe_error(error: BaseException) -> WorkerError:
    """Return an exception as a value."""
    described = WorkerError(kind=type(error).__name__, message=str(error))
    if not isinstance(error, ReflactError):
        text = "".join(traceback.format_exception(error))
        described = described.model_copy(update={"traceback": text})
    if error.__cause__ is not None:
        described = described.model_copy(update={"cause": describe_error(error.__cause__)})
    return described


def rebuild_error(error: WorkerError) -> Exception:
    """Return an exception of reflact's own class, or a ``CodeError`` with the original's name."""
    kind = getattr(errors, error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, ReflactError)):
        kind = type(error.kind, (CodeError,), {"__module__": CodeError.__module__})
    rebuilt: Exception = kind(error.message)
    if error.cause is not None:
        rebuilt.__cause__ = rebuild_error(error.cause)
    if error.traceback:
        rebuilt.add_note(f"In the worker:\n{error.traceback}")
    return rebuilt


class Worker:
    """Runs rollouts of one environment, which it sets up before the first one."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._lock = anyio.Lock()
        self._environment: EnvironmentAdapter | None = None
        self._target: TargetAdapter | None = None
        self._broken: WorkerError | None = None
        self._requests = _ForwardedRequests(setup.llm)
        # each rollout has an address of its own, to which no connection is worth keeping
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits, verify=False)  # noqa: S113, S501 - a model may be slow; no TLS

    async def run(self, job: WorkerJob) -> WorkerResult:
        """Run a job, and return its grade or the exception of the environment."""
        async with self._lock:
            if self._environment is None and self._broken is None:
                await self._start()
        if self._environment is None:
            return WorkerResult(error=self._broken)
        trainer = TrainerSession(self._http, job)
        session: Session = trainer
        try:
            if job.rollout and self._target is not None:
                self._requests.trainers[job.rollout] = trainer
                skill = Skill(text=job.skill)
                session = self._target.session_for(job.item, skill, rollout=job.rollout)
            grade = await self._environment.run(job.item, session, seed=job.seed)
            return WorkerResult(grade=grade, turns=session.turns)
        except Exception as error:  # noqa: BLE001 - raised again by the trainer
            return WorkerResult(error=describe_error(error), turns=session.turns)
        finally:
            self._requests.trainers.pop(job.rollout, None)

    async def close(self) -> None:
        """Close the environment and the connections."""
        await self._http.aclose()
        if self._environment is not None:
            await self._environment.close()

    async def _start(self) -> None:
        """Make and set up the environment and the agent, or note why that failed."""
        try:
            with CatchExits():
                environment = EnvironmentAdapter(_load_environment(self._setup.environment))
                if environment.identity != self._setup.environment_identity:
                    raise ConfigError(f"the environment {OTHER_VERSIONS}")
                self._target = self._connect_target()
                await environment.set_up()
                self._environment = environment
        except Exception as error:  # noqa: BLE001 - raised again by the trainer
            reason = f"{type(error).__name__}: {error}"
            self._broken = describe_error(
                RunFailed(f"the environment could not be set up in a worker: {reason}")
            )

    def _connect_target(self) -> TargetAdapter | None:
        """Return the worker's own agent, whose requests go to the trainer."""
        setup = self._setup
        if setup.target is None:
            return None
        own: object = load_named_target(TrainerConfig(target=setup.target))
        assert isinstance(own, GatewayTarget), "others stay in the trainer's process"
        connected: Any = own.connect(self._requests, ModelConfig(model=setup.model))
        target = TargetAdapter(connected)
        if target.identity != setup.target_identity:
            raise ConfigError(f"the target {OTHER_VERSIONS}")
        return target


def _load_environment(source: bytes | EnvironmentConfig) -> Environment:
    if isinstance(source, bytes):
        environment = pickle.loads(source)  # noqa: S301 - it comes from the trainer
    else:
        environment = load_named_environment(TrainerConfig(environment=source))
    return cast("Environment", environment)


class TrainerSession:
    """A target's conversation, which takes place in the trainer's process."""

    def __init__(self, http: httpx.AsyncClient, job: WorkerJob) -> None:
        self._http = http
        self._address = f"{job.base_url}/chat/completions"
        self._headers = {"authorization": f"Bearer {job.token}"}
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        """Send the target a message and return its answer; raises what its own session raises."""
        answer = await self.ask({"messages": [{"role": "user", "content": message}]})
        self.turns += (Turn(role="user", content=message), Turn(role="assistant", content=answer))
        return answer

    async def ask(self, body: Mapping[str, JsonValue]) -> str:
        """Send the trainer a body and return its answer."""
        try:
            response = await self._http.post(self._address, json=body, headers=self._headers)
            answered = response.raise_for_status().json()
        except httpx.HTTPError as error:
            raise ProviderDown(f"the trainer's process cannot be asked: {error}") from error
        if "failure" in answered:
            raise rebuild_error(WorkerError.model_validate(answered["failure"]))
        return str(answered["answer"])


class _ForwardedRequests:
    """Passes requests of agents on to the trainer; see ``protocols.RequestForwarder``."""

    def __init__(self, llm: str) -> None:
        self.identity = llm
        self.trainers: dict[str, TrainerSession] = {}

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a request to the trainer."""
        call: dict[str, JsonValue] = call_id.model_dump(
            mode="json", include={"purpose", "number", "part"}
        )
        trainer = self.trainers[call_id.rollout or ""]
        return await trainer.ask({"messages": [], "forwarded": {**body}, "call": call})
