"""The trainer's side: an environment whose rollouts take place in workers of Ray."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio

from reflact.adapters import CatchExits, EnvironmentAdapter, TargetAdapter
from reflact.agents.gateway import open_gateway
from reflact.agents.gateway_session import GatewaySession, GatewayTarget
from reflact.concurrency import fan_out
from reflact.config.models import ModelsConfig, is_secret_name
from reflact.config.training import EnvironmentConfig, TrainerConfig
from reflact.errors import ConfigError, RunFailed, WorkerLost
from reflact.executors.worker import (
    Worker,
    WorkerJob,
    WorkerResult,
    WorkerSetup,
    describe_error,
    rebuild_error,
)
from reflact.llm.client import identify_model
from reflact.protocols import Environment, Session
from reflact.types import Grade, Item

# How long the environment of a worker may take to close, and that of a failed or cancelled run.
CLOSE_SECONDS = 10.0
HURRY_SECONDS = 0.3

# The most jobs that a worker runs at a time.
JOBS_OF_A_WORKER = 1000

# A job that lost so many workers gets one of its own.
LOSSES = 2

# Shorter values of a key's variable are placeholders, which other variables may contain as a word.
MIN_KEY_CHARACTERS = 12


class ExecutedEnvironment(EnvironmentAdapter):
    """An environment whose rollouts run in workers.

    A chat model and an object stay in the trainer's process: a worker's session sends them each
    message. A command or a function that the configuration names runs in the worker, and the
    requests of its agent are sent here. Both go through a gateway with an address and a token of
    its own for each rollout, so calls, limits, stored replies and records are as in any run.
    """

    def __init__(self, own: Environment, pool: WorkerPool, *, host: str, runs_target: bool) -> None:
        super().__init__(own)
        self._pool = pool
        self._host = host
        self._runs_target = runs_target

    async def set_up(self) -> None:
        """Do nothing: each worker sets its own environment up."""

    async def close(self) -> None:
        """Do nothing: each worker closes its own environment."""

    async def _start_run(self, item: Item, session: Session, seed: int) -> Grade:
        """Run an item in a worker; raises what the session or the environment raised."""
        failures: list[Exception] = []

        async def answer(body: Mapping[str, Any]) -> str:
            try:
                with CatchExits():
                    return json.dumps({"answer": await _answer(session, body)})
            except Exception as error:  # noqa: BLE001 - the session in the worker raises it
                failures.append(error)
                return json.dumps({"failure": describe_error(error).model_dump(mode="json")})

        async with open_gateway(answer, model="target", host=self._host) as address:
            job = WorkerJob(item=item, seed=seed, **address._asdict())
            if self._runs_target and isinstance(session, GatewaySession):
                agent = {"skill": session.skill.text, "rollout": session.rollout}
                result = await self._pool.run(job.model_copy(update=agent))
                session.adopt(result.turns)
            else:
                result = await self._pool.run(job)

        if result.grade is not None:
            return result.grade
        assert result.error is not None
        for failure in failures:  # what the session raised here passed through the worker
            if (type(failure).__name__, str(failure)) == (result.error.kind, result.error.message):
                raise failure
        raise rebuild_error(result.error)


async def _answer(session: Session, body: Mapping[str, Any]) -> str:
    """Return the target's answer to a message, or its model's to a request of a worker's agent."""
    if "forwarded" in body and isinstance(session, GatewaySession):
        return await session.forward(body["forwarded"], **body["call"])
    return await session.reply(str(body["messages"][-1]["content"]))


class WorkerPool:
    """Gives each job to the worker with the fewest jobs; workers start when they are needed.

    If a worker ends, nobody knows which of its jobs was the reason. A job that lost two workers is
    run in one of its own, so that a job that ends every worker does not leave others unmeasured.
    """

    def __init__(self, start_worker: Callable[[], Any], workers: int) -> None:
        self._start_worker = start_worker
        self._size = workers
        self._in_flight: dict[Any, int] = {}
        self._losses: Counter[tuple[str, int]] = Counter()
        self._alone = anyio.Semaphore(workers)

    async def run(self, job: WorkerJob) -> WorkerResult:
        """Run a job; raises WorkerLost if the worker ended, after which it may run again."""
        rollout = (job.item.id, job.seed)
        if self._losses[rollout] >= LOSSES:
            async with self._alone:
                worker = self._start_worker()
                try:
                    return await _run_job(worker, job)
                finally:
                    await _end_worker(worker, 0.0)

        worker = self._choose()
        self._in_flight[worker] += 1
        try:
            return await _run_job(worker, job)
        except WorkerLost:
            self._losses[rollout] += 1
            self._in_flight.pop(worker, None)
            raise
        finally:
            if worker in self._in_flight:
                self._in_flight[worker] -= 1

    async def close(self, *, seconds: float) -> None:
        """End all workers; each is killed after some seconds."""
        await fan_out(lambda worker: _end_worker(worker, seconds), [*self._in_flight])

    def _choose(self) -> Any:
        """Return the worker with the fewest jobs; a new one if all have some and there is room."""
        fewest = min(self._in_flight.values(), default=1)
        if fewest and len(self._in_flight) < self._size:
            worker = self._start_worker()
            self._in_flight[worker] = 0
            return worker
        return next(worker for worker, count in self._in_flight.items() if count == fewest)


async def _run_job(worker: Any, job: WorkerJob) -> WorkerResult:
    import ray
    from ray.exceptions import RayActorError, RayError

    running = worker.run.remote(job)
    try:
        result: WorkerResult = await running
    except RayActorError:
        raise WorkerLost("the worker of Ray ended during the rollout") from None
    except RayError as error:
        raise RunFailed(f"Ray could not run a rollout: {error}") from error
    except anyio.get_cancelled_exc_class():
        ray.cancel(running)
        raise
    return result


async def _end_worker(worker: Any, seconds: float) -> None:
    """Let a worker close its environment, and kill it after some seconds."""
    import ray
    from ray.exceptions import RayError

    with anyio.move_on_after(seconds, shield=True):
        with suppress(RayError):
            await worker.close.remote()
    ray.kill(worker)


@asynccontextmanager
async def place_environment(
    environment: EnvironmentAdapter, config: TrainerConfig, target: TargetAdapter, *, named: bool
) -> AsyncIterator[ExecutedEnvironment]:
    """Yield an environment that runs in workers; ``named``: the configuration describes it."""
    setup = describe_setup(environment, config, target, named=named)
    async with open_workers(setup, config) as pool:
        yield ExecutedEnvironment(
            environment.own, pool, host=config.executor.host, runs_target=setup.target is not None
        )


def describe_setup(
    environment: EnvironmentAdapter, config: TrainerConfig, target: TargetAdapter, *, named: bool
) -> WorkerSetup:
    """Return what workers make before their first rollout; ConfigError if they cannot."""
    grader = config.environment.grader
    if environment.scored_by is not None or grader in {"critic", "rubric"}:
        raise ConfigError(
            "executor.name: ray cannot run a model as the grader, because workers have no key for "
            "its model; set executor.name to local"
        )
    from ray import cloudpickle

    dump: Callable[[object], bytes] = cloudpickle.dumps
    source: bytes | EnvironmentConfig = config.environment
    try:
        if not named or config.environment.name == "dataset":
            source = dump(environment.own)
    except Exception as error:
        raise ConfigError(
            f"executor.name: ray cannot send the environment, of type "
            f"{type(environment.own).__name__}, to workers: {type(error).__name__}: {error}. Make "
            "what cannot be pickled in its `set_up`, or set executor.name to local"
        ) from error
    setup = WorkerSetup(environment=source, environment_identity=environment.identity)
    if config.target.kind == "chat" or not isinstance(target.own, GatewayTarget):
        return setup
    model = config.models.target
    agent = {
        "target": config.target,
        "target_identity": target.identity,
        "model": model.model,
        "llm": identify_model(model),
    }
    return setup.model_copy(update=agent)


@asynccontextmanager
async def open_workers(setup: WorkerSetup, config: TrainerConfig) -> AsyncIterator[WorkerPool]:
    """Open a pool of actors of Ray, which end with the block.

    A cluster to which this process is already connected is used as it is. Without an address, one
    is started on this machine, which ends with the block.
    """
    import ray

    settings = config.executor
    workers = settings.workers or os.cpu_count() or 1
    was_connected = ray.is_initialized()
    if not was_connected:
        start = partial(
            ray.init, configure_logging=False, logging_level=logging.ERROR, log_to_driver=False
        )
        if settings.address is None:
            start = partial(start, num_cpus=workers, include_dashboard=False)
        try:
            await anyio.to_thread.run_sync(partial(start, address=settings.address))
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = f"executor.address: Ray cannot be reached or started: {error}"
            raise ConfigError(reason) from error

    hidden = os.environ.keys() - select_variables(config).keys()
    variables = dict.fromkeys(sorted(hidden), "")
    if settings.address is None:
        variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    actor = ray.remote(Worker).options(
        num_cpus=1, max_concurrency=JOBS_OF_A_WORKER, runtime_env={"env_vars": variables}
    )
    pool = WorkerPool(partial(actor.remote, setup), workers)
    seconds = HURRY_SECONDS
    try:
        yield pool
        seconds = CLOSE_SECONDS
    finally:
        with anyio.CancelScope(shield=True):
            await pool.close(seconds=seconds)
            if not was_connected:
                await anyio.to_thread.run_sync(ray.shutdown)


def select_variables(config: TrainerConfig) -> dict[str, str]:
    """Return the environment variables that workers get: none with a key or a secret."""
    key_names = {getattr(config.models, role).api_key_env for role in ModelsConfig.model_fields}
    values = [os.environ.get(name or "", "") for name in key_names]
    keys = [key for key in values if len(key) >= MIN_KEY_CHARACTERS]
    selected = {}
    for name, value in os.environ.items():
        is_secret = is_secret_name(name) or name.endswith("_TOKEN")
        is_allowed = name in config.executor.variables or not is_secret
        if is_allowed and name not in key_names and not any(key in value for key in keys):
            selected[name] = value
    return selected
