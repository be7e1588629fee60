"""Worker processes on this machine."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from subprocess import PIPE

import anyio
from anyio.abc import Process, TaskGroup
from pydantic import ValidationError

from reflact.concurrency import open_task_group
from reflact.errors import WorkerLost
from reflact.executors.jobs import EnvironmentReference, ExecutorJob, ExecutorResult
from reflact.executors.pool import WorkerPool
from reflact.executors.worker import CLOSE_SECONDS, WorkerMessage

HURRY_SECONDS = 0.3
"""How long the workers of a failed or cancelled run may take to end."""


class ProcessWorker:
    """A worker process: a fresh interpreter in a session of its own, so that Ctrl-C reaches the trainer alone."""

    def __init__(self, environment: EnvironmentReference, process: Process) -> None:
        self._process = process
        self._send, self._lines = anyio.create_memory_object_stream[WorkerMessage](math.inf)
        self._waiting: dict[str, asyncio.Future[ExecutorResult]] = {}
        self._ended = anyio.Event()
        self._send.send_nowait(WorkerMessage(environment=environment))

    @classmethod
    async def open(
        cls, environment: EnvironmentReference, group: TaskGroup, variables: Mapping[str, str]
    ) -> ProcessWorker:
        """Start a process with some environment variables; its tasks run in a group."""
        command = [sys.executable, "-m", "reflact.executors.worker"]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = await anyio.open_process(
            command, stdin=PIPE, stdout=PIPE, stderr=None, env={**variables, **path}, start_new_session=True
        )
        worker = cls(environment, process)
        group.start_soon(worker.serve)
        return worker

    async def serve(self) -> None:
        """Send messages and read results until the process ends."""
        try:
            async with open_task_group() as group:
                group.start_soon(self._write)
                await self._read()
                group.cancel_scope.cancel()
        finally:
            _kill_group(self._process)
            with anyio.CancelScope(shield=True):
                code = await self._process.wait()
                await self._process.aclose()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(WorkerLost(f"the worker process ended {how} during the rollout"))
            self._send.close()
            self._lines.close()
            self._ended.set()

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job; see ``Executor.run``."""
        if self._ended.is_set():
            raise WorkerLost("the worker process ended before the rollout")
        future: asyncio.Future[ExecutorResult] = asyncio.get_running_loop().create_future()
        self._waiting[job.key] = future
        try:
            self._send.send_nowait(WorkerMessage(job=job.model_dump(mode="json", exclude={"environment"})))
            return await future
        finally:
            del self._waiting[job.key]
            if future.cancelled() and not self._ended.is_set():
                self._send.send_nowait(WorkerMessage(cancelled=job.key))

    async def close(self, *, seconds: float) -> None:
        """End the process; see ``pool.Worker.close``."""
        self._send.close()
        with anyio.move_on_after(seconds, shield=True):
            await self._ended.wait()
        _kill_group(self._process)
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    async def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            async for message in self._lines:
                line = message.model_dump_json(exclude_none=True).encode("utf-8") + b"\n"
                await self._process.stdin.send(line)
            await self._process.stdin.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the end of its output says so too

    async def _read(self) -> None:
        assert self._process.stdout is not None
        pieces: list[bytes] = []
        async for piece in self._process.stdout:
            *whole, last = piece.split(b"\n")
            for line in whole:
                try:
                    result = ExecutorResult.model_validate_json(b"".join([*pieces, line]))
                except ValidationError:
                    return  # the environment wrote into the worker's own output
                pieces.clear()
                future = self._waiting.get(result.key)
                if future is not None and not future.done():
                    future.set_result(result)
            pieces.append(last)


@asynccontextmanager
async def open_processes(workers: int, variables: Mapping[str, str]) -> AsyncIterator[WorkerPool]:
    """Open an executor over processes, which start when they are needed and end with the block.

    Args:
        workers: The most processes.
        variables: Their environment variables.
    """
    async with open_task_group() as group:

        async def open_worker(environment: EnvironmentReference) -> ProcessWorker:
            return await ProcessWorker.open(environment, group, variables)

        pool = WorkerPool(open_worker, workers)
        seconds = HURRY_SECONDS
        try:
            yield pool
            seconds = CLOSE_SECONDS
        finally:
            with anyio.CancelScope(shield=True):
                await pool.close(seconds=seconds)


def _kill_group(process: Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
