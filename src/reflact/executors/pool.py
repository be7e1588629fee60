"""An executor over workers that are started when they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

from reflact.concurrency import fan_out
from reflact.errors import WorkerLost
from reflact.executors.jobs import EnvironmentReference, ExecutorJob, ExecutorResult

LOSSES = 2
"""A job that lost so many workers gets one of its own."""


class Worker(Protocol):
    """A process with one event loop, which runs many jobs at a time."""

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job; raise WorkerLost if the worker ends before."""

    async def close(self, *, seconds: float) -> None:
        """End the worker: let it close its environment, and kill it after some seconds."""


class WorkerPool:
    """Gives each job to the worker with the fewest jobs.

    If a worker ends, nobody knows which of its jobs was the reason. A job that lost two workers is run in one of its
    own, so that a job that ends every worker does not leave others unmeasured.

    Args:
        open_worker: Starts a worker for an environment.
        workers: The most workers.
    """

    def __init__(
        self, open_worker: Callable[[EnvironmentReference], Awaitable[Worker]], workers: int
    ) -> None:
        self._open_worker = open_worker
        self._size = workers
        self._members: list[_Member] = []
        self._losses: Counter[tuple[str, int]] = Counter()
        self._alone = anyio.Semaphore(workers)

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job in a worker; see ``Executor.run``."""
        work = (job.item.id, job.seed)
        if self._losses[work] >= LOSSES:
            return await self._run_alone(job)
        member = self._choose()
        member.in_flight += 1
        try:
            async with member.lock:
                if member.worker is None:
                    member.worker = await self._open_worker(job.environment)
            return await member.worker.run(job)
        except WorkerLost:
            self._losses[work] += 1
            if member in self._members:
                self._members.remove(member)
            raise
        finally:
            member.in_flight -= 1

    async def close(self, *, seconds: float) -> None:
        """End all workers; each is killed after some seconds."""
        workers = [member.worker for member in self._members if member.worker is not None]
        await fan_out(lambda worker: worker.close(seconds=seconds), workers)

    def _choose(self) -> _Member:
        idle = next((member for member in self._members if not member.in_flight), None)
        if idle is None and len(self._members) < self._size:
            idle = _Member()
            self._members.append(idle)
        return idle or min(self._members, key=lambda member: member.in_flight)

    async def _run_alone(self, job: ExecutorJob) -> ExecutorResult:
        async with self._alone:
            worker = await self._open_worker(job.environment)
            try:
                return await worker.run(job)
            finally:
                with anyio.CancelScope(shield=True):
                    await worker.close(seconds=0.0)


class _Member:
    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.in_flight = 0
        self.lock = anyio.Lock()
