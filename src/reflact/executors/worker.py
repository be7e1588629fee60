"""The side of a worker: runs jobs in one event loop.

Its sessions ask the trainer's gateway, and so it needs no key of a provider.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import anyio
import httpx
from pydantic import JsonValue

from reflact.config.models import ModelConfig
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError, ProviderDown, RunFailed
from reflact.executors.jobs import (
    EnvironmentReference,
    ExecutorJob,
    ExecutorResult,
    TargetReference,
    WorkerError,
    describe_error,
    rebuild_environment,
    rebuild_error,
)
from reflact.llm.middleware import find_managed
from reflact.messages import AgentAnswer, CallId
from reflact.protocols import CatchExits, ConnectedTarget, Environment, Session
from reflact.stages.rollout import run_environment, start_session
from reflact.types import Skill, Turn

CLOSE_SECONDS = 10.0
"""How long the environment of a worker may take to close."""


class JobRunner:
    """Runs the jobs of one environment, which it makes and sets up before the first one."""

    def __init__(self, environment: EnvironmentReference) -> None:
        self._reference = environment
        self._lock = anyio.Lock()
        self._environment: Environment | None = None
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
        asking = WorkerSession(self._http, job)
        session: Session = asking
        try:
            if job.target is not None:
                target = self._targets.get(job.target.identity) or WorkerTarget(job.target)
                session = self._targets.setdefault(job.target.identity, target).start(job, asking)
            grade = await run_environment(environment, job.item, session, seed=job.seed)
            return ExecutorResult(key=job.key, grade=grade, turns=session.turns)
        except Exception as error:  # noqa: BLE001 - raised again by the trainer
            number = next((n for n, failure in asking.failures.items() if failure is error), None)
            described = describe_error(error, failure=number)
            return ExecutorResult(key=job.key, error=described, turns=session.turns)

    async def close(self) -> None:
        """Close the environment and the connections."""
        await self._http.aclose()
        managed = None if self._environment is None else find_managed(self._environment)
        if managed is not None:
            await managed.close()

    async def _open(self) -> Environment | None:
        """Return the environment; None if it could not be made or set up."""
        async with self._lock:
            if self._environment is None and self._broken is None:
                try:
                    with CatchExits():
                        self._environment = await _set_up(rebuild_environment(self._reference))
                except Exception as error:  # noqa: BLE001 - raised again by the trainer
                    reason = (
                        f"the environment could not be set up in a worker: {type(error).__name__}: {error}"
                    )
                    self._broken = describe_error(RunFailed(reason))
        return self._environment


async def _set_up(environment: Environment) -> Environment:
    managed = find_managed(environment)
    if managed is not None:
        await managed.set_up()
    return environment


class WorkerSession:
    """A target's conversation, which takes place in the trainer's process.

    Attributes:
        failures: The exceptions that it raised, by the trainer's number of the failure.
    """

    def __init__(self, http: httpx.AsyncClient, job: ExecutorJob) -> None:
        self._http = http
        self._address = f"{job.base_url}/chat/completions"
        self._headers = {"authorization": f"Bearer {job.token}"}
        self.turns: tuple[Turn, ...] = ()
        self.failures: dict[int, Exception] = {}

    async def reply(self, message: str) -> str:
        """Send the target a message and return its answer; raises what the target's own session raises."""
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
        if (failed := answered.get("failure")) is not None:
            read = WorkerError.model_validate(failed)
            failure = rebuild_error(read)
            self.failures[read.failure or 0] = failure
            raise failure
        return str(answered["answer"])


class WorkerTarget:
    """A target in a worker; it implements ``protocols.RequestSender``, which passes requests on to the trainer."""

    def __init__(self, reference: TargetReference) -> None:
        from reflact.training.named_objects import load_named_target

        self.identity = reference.llm
        self._asking: dict[str, WorkerSession] = {}
        target = load_named_target(TrainerConfig(target=reference.section))
        assert isinstance(target, ConnectedTarget)
        self._target = target.connect(self, ModelConfig(model=reference.model))
        if self._target.identity != reference.identity:
            raise ConfigError(
                "the target of a worker differs from the trainer's: install the same versions on all machines"
            )

    def start(self, job: ExecutorJob, asking: WorkerSession) -> Session:
        """Start the session of a job, whose requests go through the job's address."""
        self._asking[job.rollout] = asking
        return start_session(self._target, job.item, Skill(text=job.skill), rollout=job.rollout)

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a request of an agent to the trainer; see ``protocols.RequestSender``."""
        call: dict[str, JsonValue] = call_id.model_dump(mode="json", include={"purpose", "number", "part"})
        asking = self._asking[call_id.rollout or ""]
        return await asking.ask({"messages": [], "forwarded": {**body}, "call": call})

    async def send(
        self,
        body: Mapping[str, JsonValue],
        *,
        call_id: CallId,
        answer: Callable[[], Awaitable[AgentAnswer]],
    ) -> str:
        """Refuse: a worker has no key with which to ask an agent's own model."""
        raise ConfigError(
            "an agent that brings its model runs in the trainer's process: set executor.name to local"
        )
