"""Bounded, ordered fan-out. No other module starts tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

T = TypeVar("T")
U = TypeVar("U")


async def fan_out(
    call: Callable[[T], Awaitable[U]], inputs: Sequence[T], *, limit: int | None = None
) -> tuple[U, ...]:
    """Apply an async function to all inputs at once and return the results in the order of the inputs.

    At most ``limit`` run at a time (None: all). The first error cancels the others and is raised
    as it is, not wrapped in a group.
    """
    results: dict[int, U] = {}
    gate = anyio.Semaphore(limit) if limit is not None else None

    async def one(index: int) -> None:
        if gate is None:
            results[index] = await call(inputs[index])
        else:
            async with gate:
                results[index] = await call(inputs[index])

    async with group() as tasks:
        for index in range(len(inputs)):
            tasks.start_soon(one, index)
    return tuple(results[index] for index in range(len(inputs)))


@asynccontextmanager
async def group() -> AsyncIterator[TaskGroup]:
    """A task group whose error is raised bare: the only one, or the first of several."""
    first: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        first = _first(errors)
    if first is not None:
        raise first


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


class Stream(Generic[T]):
    """An iterator over what one task produces, with back-pressure and nothing dropped.

    The task starts with the first step of the iteration. Leaving ``async with`` cancels it and waits for
    it; after a bare ``break`` the event loop does so when it finalises the iterator. An error of the
    producer is raised once everything produced before it was taken. It can be iterated once.

    Args:
        produce: Called with the function that hands an element over; runs in a task of its own.
        buffer: Elements that may wait to be taken.
    """

    def __init__(
        self, produce: Callable[[Callable[[T], Awaitable[None]]], Awaitable[None]], *, buffer: int = 256
    ) -> None:
        self._produce = produce
        self._buffer = buffer
        self._task: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[T]:
        return self._iterate()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the producer if it still runs, and wait until it has cleaned up."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({self._task})
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.exception()

    async def _iterate(self) -> AsyncGenerator[T, None]:
        if self._task is not None:
            raise RuntimeError("a stream can be iterated once")
        send, receive = anyio.create_memory_object_stream[T](self._buffer)
        self._task = asyncio.create_task(self._run(send))
        try:
            with receive:
                async for element in receive:
                    yield element
                await self._task
        finally:
            await self.aclose()

    async def _run(self, send: MemoryObjectSendStream[T]) -> None:
        with send:
            await self._produce(send.send)
