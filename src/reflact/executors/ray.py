"""Workers on a Ray cluster, which are started when they are needed."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio

from reflact.concurrency import fan_out
from reflact.errors import ConfigError, RunFailed, WorkerLost
from reflact.executors.jobs import EnvironmentReference, ExecutorJob, ExecutorResult
from reflact.executors.worker import CLOSE_SECONDS, JobRunner

# How long the workers of a failed or cancelled run may take to end.
HURRY_SECONDS = 0.3

# The most jobs that a worker runs at a time.
JOBS_OF_A_WORKER = 1000

# A job that lost so many workers gets one of its own.
LOSSES = 2


class RayWorker:
    """An actor of Ray: a process with one event loop on any machine of the cluster, which runs many
    jobs at a time.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job; raises WorkerLost if the worker ends before."""
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
        """End the actor: let it close its environment, and kill it after some seconds."""
        import ray
        from ray.exceptions import RayError

        with anyio.move_on_after(seconds, shield=True):
            with suppress(RayError):
                await self._actor.close.remote()
        ray.kill(self._actor)


class WorkerPool:
    """Gives each job to the worker with the fewest jobs.

    If a worker ends, nobody knows which of its jobs was the reason. A job that lost two workers is
    run in one of its own, so that a job that ends every worker does not leave others unmeasured.

    Args:
        open_worker: Starts a worker for an environment.
        workers: The most workers.
    """

    def __init__(
        self, open_worker: Callable[[EnvironmentReference], RayWorker], workers: int
    ) -> None:
        self._open_worker = open_worker
        self._size = workers
        self._in_flight: dict[RayWorker, int] = {}
        self._losses: Counter[tuple[str, int]] = Counter()
        self._alone = anyio.Semaphore(workers)

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job in a worker; see ``Executor.run``."""
        rollout = (job.item.id, job.seed)
        if self._losses[rollout] >= LOSSES:
            return await self._run_alone(job)
        worker = self._choose(job.environment)
        self._in_flight[worker] += 1
        try:
            return await worker.run(job)
        except WorkerLost:
            self._losses[rollout] += 1
            self._in_flight.pop(worker, None)
            raise
        finally:
            if worker in self._in_flight:
                self._in_flight[worker] -= 1

    async def close(self, *, seconds: float) -> None:
        """End all workers; each is killed after some seconds."""
        await fan_out(lambda worker: worker.close(seconds=seconds), [*self._in_flight])

    def _choose(self, environment: EnvironmentReference) -> RayWorker:
        """Return the worker with the fewest jobs; a new one if all have some and there
        may be more.
        """
        fewest = min(self._in_flight.values(), default=1)
        if fewest and len(self._in_flight) < self._size:
            worker = self._open_worker(environment)
            self._in_flight[worker] = 0
            return worker
        return next(worker for worker, count in self._in_flight.items() if count == fewest)

    async def _run_alone(self, job: ExecutorJob) -> ExecutorResult:
        async with self._alone:
            worker = self._open_worker(job.environment)
            try:
                return await worker.run(job)
            finally:
                with anyio.CancelScope(shield=True):
                    await worker.close(seconds=0.0)


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
        address: The address of a running cluster; None starts one on this machine, which ends with
            the block.
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
            raise ConfigError(
                f"executor.address: Ray cannot be reached or started: {error}"
            ) from error
    variables = dict.fromkeys(sorted(hidden), "")
    if address is None:
        variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    kind = ray.remote(RayActor).options(
        num_cpus=1, max_concurrency=JOBS_OF_A_WORKER, runtime_env={"env_vars": variables}
    )

    def open_worker(environment: EnvironmentReference) -> RayWorker:
        return RayWorker(kind.remote(environment.model_dump_json()))

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
