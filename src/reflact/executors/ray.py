"""Workers on a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio

from reflact.errors import ConfigError, RunFailed, WorkerLost
from reflact.executors.jobs import EnvironmentReference, ExecutorJob, ExecutorResult
from reflact.executors.pool import WorkerPool
from reflact.executors.worker import CLOSE_SECONDS, JobRunner

HURRY_SECONDS = 0.3
"""How long the workers of a failed or cancelled run may take to end."""

JOBS_OF_A_WORKER = 1000
"""The most jobs that a worker runs at a time."""


class RayWorker:
    """An actor of Ray: a process with one event loop, on any machine of the cluster."""

    def __init__(self, actor: Any, environment: EnvironmentReference) -> None:
        self._environment = environment
        self._actor = actor

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job; see ``Executor.run``."""
        import ray
        from ray.exceptions import RayActorError, RayError

        running = self._actor.run.remote(job.model_dump_json(exclude={"environment"}))
        try:
            return ExecutorResult.model_validate_json(await running)
        except RayActorError:
            raise WorkerLost("the worker of Ray ended during the rollout") from None
        except RayError as error:
            raise RunFailed(f"Ray could not run a rollout: {error}") from error
        except anyio.get_cancelled_exc_class():
            ray.cancel(running)
            raise

    async def close(self, *, seconds: float) -> None:
        """End the actor; see ``pool.Worker.close``."""
        import ray
        from ray.exceptions import RayError

        with anyio.move_on_after(seconds, shield=True):
            with suppress(RayError):
                await self._actor.close.remote()
        ray.kill(self._actor)


class RayActor:
    """The side of the cluster: takes jobs and returns results in JSON."""

    def __init__(self, environment: str) -> None:
        self._runner = JobRunner(EnvironmentReference.model_validate_json(environment))

    async def run(self, job: str) -> str:
        """Run a job; both are JSON."""
        return (await self._runner.run(self._runner.read_job(json.loads(job)))).model_dump_json()

    async def close(self) -> None:
        """Close the environment."""
        await self._runner.close()


@asynccontextmanager
async def open_ray(
    workers: int, *, address: str | None, hidden: Collection[str]
) -> AsyncIterator[WorkerPool]:
    """Open an executor over actors of Ray, which start when they are needed and end with the block.

    A cluster to which this process is already connected is used as it is.

    Args:
        workers: The most actors; each takes one processor of the cluster.
        address: The address of a running cluster; None starts one on this machine, which ends with the block.
        hidden: Environment variables that workers do not get.

    Raises:
        ConfigError: The cluster cannot be reached.
    """
    import ray

    connected = ray.is_initialized()
    if not connected:
        start = partial(
            ray.init,
            address=address,
            num_cpus=None if address else workers,
            include_dashboard=False if address is None else None,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        try:
            await anyio.to_thread.run_sync(start)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"executor.address: Ray cannot be reached or started: {error}") from error
    variables = dict.fromkeys(sorted(hidden), "")
    if address is None:
        variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    kind = ray.remote(RayActor).options(
        num_cpus=1, max_concurrency=JOBS_OF_A_WORKER, runtime_env={"env_vars": variables}
    )

    async def open_worker(environment: EnvironmentReference) -> RayWorker:
        return RayWorker(kind.remote(environment.model_dump_json()), environment)

    pool = WorkerPool(open_worker, workers)
    seconds = HURRY_SECONDS
    try:
        yield pool
        seconds = CLOSE_SECONDS
    finally:
        with anyio.CancelScope(shield=True):
            await pool.close(seconds=seconds)
            if not connected:
                await anyio.to_thread.run_sync(ray.shutdown)
