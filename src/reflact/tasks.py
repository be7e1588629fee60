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
        """Cancel the producer if it still runs, and wait until it has cleaned up.

        It is cancelled once, however often this is called: a second time would cut its clean-up short.
        """
        if self._task is not None and not self._task.done():
            if not self._task.cancelling():
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


class SingleFlight(Generic[T]):
    """Joins equal work in flight: callers with the same key share one task and its outcome.

    The task is cancelled only when its last waiter leaves. Use it as an async context manager; leaving
    it cancels what still runs.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def __aenter__(self) -> SingleFlight[T]:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def join(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return the outcome of the work under way for a key, starting it if there is none."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            self._tasks.start_soon(self._fly, key, flight, work)
        flight.waiters += 1
        try:
            await flight.landed.wait()
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.landed.is_set():
                self._flights.pop(key, None)
                flight.scope.cancel()
        return flight.outcome()

    async def _fly(self, key: str, flight: _Flight[T], work: Callable[[], Awaitable[T]]) -> None:
        with flight.scope:
            try:
                flight.results.append(await work())
            except Exception as error:  # noqa: BLE001 - handed to every waiter as it is
                flight.error = error
            finally:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.landed.set()


class _Flight(Generic[T]):
    def __init__(self) -> None:
        self.waiters = 0
        self.landed = anyio.Event()
        self.scope = anyio.CancelScope()
        self.results: list[T] = []
        self.error: Exception | None = None

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        if not self.results:
            raise RuntimeError("closed while work was under way and awaited")
        return self.results[0]
