"""The side of a worker: runs jobs in one event loop.

Its sessions ask the trainer's gateway, and so it needs no key of a provider.
"""

from __future__ import annotations

import pickle
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping

import anyio
import httpx
from pydantic import JsonValue

from reflact.adapters import (
    CatchExits,
    EnvironmentAdapter,
    TargetAdapter,
    load_named_environment,
    load_named_target,
)
from reflact.config.models import ModelConfig
from reflact.config.training import TrainerConfig
from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment, build_grader
from reflact.errors import ConfigError, ProviderDown, RunFailed
from reflact.executors.jobs import (
    EnvironmentReference,
    ExecutorJob,
    ExecutorResult,
    TargetReference,
    WorkerError,
    describe_error,
    rebuild_error,
)
from reflact.messages import AgentAnswer, CallId
from reflact.protocols import Environment, Session
from reflact.types import Skill, Turn

# How long the environment of a worker may take to close.
CLOSE_SECONDS = 10.0


class JobRunner:
    """Runs the jobs of one environment, which it makes and sets up before the first one."""

    def __init__(self, environment: EnvironmentReference) -> None:
        self._reference = environment
        self._lock = anyio.Lock()
        self._environment: EnvironmentAdapter | None = None
        self._broken: WorkerError | None = None
        self._targets: dict[str, WorkerTarget] = {}
        # each rollout has an address of its own, to which no connection is worth keeping
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits, verify=False)  # noqa: S113, S501 - a model may be slow; no TLS

    def read_job(self, values: Mapping[str, JsonValue]) -> ExecutorJob:
        """Return a job that was sent without its environment."""
        return ExecutorJob.model_validate({**values, "environment": self._reference})

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job, and return its grade or the exception of the environment."""
        environment = await self._open()
        if environment is None:
            return ExecutorResult(key=job.key, error=self._broken)
        trainer = TrainerSession(self._http, job)
        session: Session = trainer
        try:
            if job.target is not None:
                if job.target.identity not in self._targets:
                    self._targets[job.target.identity] = WorkerTarget(job.target)
                session = self._targets[job.target.identity].start(job, trainer)
            grade = await environment.run(job.item, session, seed=job.seed)
            return ExecutorResult(key=job.key, grade=grade, turns=session.turns)
        except Exception as error:  # noqa: BLE001 - raised again by the trainer
            return ExecutorResult(key=job.key, error=describe_error(error), turns=session.turns)

    async def close(self) -> None:
        """Close the environment and the connections."""
        await self._http.aclose()
        if self._environment is not None:
            await self._environment.close()

    async def _open(self) -> EnvironmentAdapter | None:
        """Return the environment; None if it could not be made or set up."""
        async with self._lock:
            if self._environment is None and self._broken is None:
                try:
                    with CatchExits():
                        environment = EnvironmentAdapter(rebuild_environment(self._reference))
                        await environment.set_up()
                        self._environment = environment
                except Exception as error:  # noqa: BLE001 - raised again by the trainer
                    reason = f"{type(error).__name__}: {error}"
                    self._broken = describe_error(
                        RunFailed(f"the environment could not be set up in a worker: {reason}")
                    )
        return self._environment


def rebuild_environment(reference: EnvironmentReference) -> Environment:
    """Return the environment of a reference.

    Raises:
        ConfigError: It cannot be imported, or differs from the trainer's.
    """
    environment: Environment | None
    if reference.section is None:
        environment = pickle.loads(b64decode(reference.pickled or ""))  # noqa: S301 - it comes from the trainer
    else:
        config = TrainerConfig(environment=reference.section)
        environment = load_named_environment(config)
        if environment is None:  # a data set, without items: each comes with its job
            data = DataSet(train=(), val=(), test=())
            template = config.environment.template
            environment = DatasetEnvironment(data, grade=build_grader(config), template=template)
    if environment is None or environment.identity != reference.identity:
        raise ConfigError(
            "the environment of a worker differs from the trainer's: install the same versions of "
            "its packages on all machines"
        )
    return environment


class TrainerSession:
    """A target's conversation, which takes place in the trainer's process."""

    def __init__(self, http: httpx.AsyncClient, job: ExecutorJob) -> None:
        self._http = http
        self._address = f"{job.base_url}/chat/completions"
        self._headers = {"authorization": f"Bearer {job.token}"}
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        """Send the target a message and return its answer; raises what the target's own session
        raises.
        """
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


class WorkerTarget:
    """A target in a worker; it implements ``protocols.RequestSender``, which passes requests on to
    the trainer.
    """

    def __init__(self, reference: TargetReference) -> None:
        self.identity = reference.llm
        self._sessions: dict[str, TrainerSession] = {}
        own = load_named_target(TrainerConfig(target=reference.section))
        assert own is not None, "a chat model stays in the trainer's process"
        self._target = TargetAdapter(own).connect(self, ModelConfig(model=reference.model))
        if self._target.identity != reference.identity:
            raise ConfigError(
                "the target of a worker differs from the trainer's: install the same versions on "
                "all machines"
            )

    def start(self, job: ExecutorJob, trainer: TrainerSession) -> Session:
        """Start the session of a job, whose requests go through the job's address."""
        self._sessions[job.rollout] = trainer
        return self._target.session_for(job.item, Skill(text=job.skill), rollout=job.rollout)

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a request of an agent to the trainer; see ``protocols.RequestSender``."""
        call: dict[str, JsonValue] = call_id.model_dump(
            mode="json", include={"purpose", "number", "part"}
        )
        trainer = self._sessions[call_id.rollout or ""]
        return await trainer.ask({"messages": [], "forwarded": {**body}, "call": call})

    async def send(
        self,
        body: Mapping[str, JsonValue],
        *,
        call_id: CallId,
        answer: Callable[[], Awaitable[AgentAnswer]],
    ) -> str:
        """Refuse: a worker has no key with which to ask an agent's own model."""
        raise ConfigError(
            "an agent that brings its model runs in the trainer's process: set executor.name to "
            "local"
        )
