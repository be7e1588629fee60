"""Bounded, ordered fan-out. No other module starts tasks."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, Self, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import RunVar
from pydantic import JsonValue

from reflact.errors import UsageError
from reflact.jsonutil import is_short

T = TypeVar("T")


Subject = Callable[[T], Hashable | None]


"""Says what an element is about, so that a newer one makes it old; None: it never gets old."""


class Subscription(Generic[T]):
    """One consumer's iterator over a stream; it can be iterated once.

    It belongs to the stream from when it is made: whatever comes from then on waits in its buffer, and once
    that is full the stream waits. Leaving the iteration, or ``async with``, detaches it, which changes
    nothing for the others. It ends with the stream, after all that had come before.
    """

    def __init__(self, size: int, subject: Subject[T] | None) -> None:
        self._size = size
        self._subject = subject
        self._waiting: OrderedDict[Hashable, T] = OrderedDict()
        self._element_added, self._element_taken = asyncio.Event(), asyncio.Event()
        self._has_started = False
        self.over = False

    def __aiter__(self) -> AsyncIterator[T]:
        return self._iterate()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.unsubscribe()

    def unsubscribe(self) -> None:
        """Detach from the stream, and forget what was not taken."""
        self._waiting.clear()
        self.end()

    def end(self) -> None:
        """Let the iteration end after what waits."""
        self.over = True
        self._element_added.set()
        self._element_taken.set()

    def has_room(self, element: T) -> bool:
        """Return whether an element can be put in now."""
        return self.over or len(self._waiting) < self._size or self._key(element) in self._waiting

    async def wait_for_room(self) -> None:
        """Wait until something was taken, or the view is over."""
        self._element_taken.clear()
        await self._element_taken.wait()

    def put(self, element: T) -> None:
        """Add an element, in the place of what it makes old."""
        if not self.over:
            key = self._key(element)
            self._waiting.pop(key, None)
            self._waiting[object() if key is None else key] = element
            self._element_added.set()

    def _key(self, element: T) -> Hashable | None:
        return None if self._subject is None else self._subject(element)

    async def _iterate(self) -> AsyncGenerator[T, None]:
        if self._has_started:
            raise RuntimeError("a stream, or a view of it, can be iterated once")
        self._has_started = True
        try:
            while self._waiting or not self.over:
                if self._waiting:
                    _, element = self._waiting.popitem(last=False)
                    self._element_taken.set()
                    yield element
                else:
                    self._element_added.clear()
                    await self._element_added.wait()
        finally:
            self.unsubscribe()


class Subscribers(Generic[T]):
    """The views of one stream: each element goes to all of them at once, in one order.

    Args:
        size: How many elements may wait in each.
        subject: What makes elements old in a view that shows the latest alone.
    """

    def __init__(self, size: int, subject: Subject[T] | None) -> None:
        self._size = size
        self._subject = subject
        self._subscribers: list[Subscription[T]] = []
        self._turn = anyio.Lock(fast_acquire=True)
        self._over = False

    def subscribe(self, *, latest: bool) -> Subscription[T]:
        """Return another view, of all that is handed on from now."""
        view = Subscription[T](self._size, self._subject if latest else None)
        if self._over:
            view.end()
        self._subscribers.append(view)
        return view

    async def publish(self, element: T) -> None:
        """Give an element to all views, as soon as each has room."""
        async with self._turn:
            while full := [view for view in self._subscribers if not view.has_room(element)]:
                await full[0].wait_for_room()
            self._subscribers = [view for view in self._subscribers if not view.over]
            for view in self._subscribers:
                view.put(element)

    def close(self) -> None:
        """End all views, those that are added later included."""
        self._over = True
        for view in self._subscribers:
            view.end()


U = TypeVar("U")


V = TypeVar("V")


W = TypeVar("W")


async def fan_out(
    call: Callable[[T], Awaitable[U]], inputs: Sequence[T], *, limit: int | None = None
) -> tuple[U, ...]:
    """Apply an async function to all inputs at once and return the results in the order of the inputs.

    At most ``limit`` run at a time (None: all). The first error cancels the others and is raised
    as it is, not wrapped in a group.
    """
    results: dict[int, U] = {}
    bounded = _limit_calls(call, limit)

    async def one(index: int) -> None:
        results[index] = await bounded(inputs[index])

    async with open_task_group() as tasks:
        for index in range(len(inputs)):
            tasks.start_soon(one, index)
    return tuple(results[index] for index in range(len(inputs)))


async def fan_out_until(
    call: Callable[[T], Awaitable[U]],
    inputs: Sequence[T],
    *,
    enough: Callable[[Sequence[U]], bool],
    limit: int | None = None,
) -> tuple[U, ...]:
    """Fan out as ``fan_out`` does, up to the shortest finished prefix of the results that is enough.

    ``enough`` is asked once for each prefix, from the first result on, in order of length. At the first
    one for which it is true the rest is cancelled and exactly that prefix is returned, whatever had
    finished beyond it. An error stands at its place in the order as well: it cancels what comes after it
    and is raised, bare, once everything before it has finished without being enough. So the outcome
    follows from what the calls give and from their order alone, never from timing.
    """
    prefix = _OrderedPrefix[U | _FailedCall]()
    found: list[U] = []
    over = False
    scopes = [anyio.CancelScope() for _ in inputs]
    bounded = _limit_calls(call, limit)

    async def one(index: int) -> None:
        nonlocal over
        with scopes[index]:
            try:
                result: U | _FailedCall = await bounded(inputs[index])
            except Exception as error:  # noqa: BLE001 - raised at its place in the order
                result = _FailedCall(error)
                for later in scopes[index + 1 :]:
                    later.cancel()
            for last in prefix.grow(index, result):
                if over:
                    break
                if isinstance(last, _FailedCall):
                    over = True
                    raise last.error
                found.append(last)
                over = enough(tuple(found))
            if over:
                tasks.cancel_scope.cancel()

    async with open_task_group() as tasks:
        for index in range(len(inputs)):
            tasks.start_soon(one, index)
    return tuple(found)


async def fan_out_then(
    call: Callable[[T], Awaitable[U]],
    lanes: Sequence[Sequence[T]],
    *,
    ready: Callable[[int, Sequence[U]], Iterable[V]],
    then: Callable[[V], Awaitable[W]],
    limit: int | None = None,
    then_limit: int | None = None,
) -> tuple[tuple[tuple[U, ...], ...], tuple[tuple[W, ...], ...]]:
    """Fan out over lanes of inputs, and start further work while earlier work is still under way.

    ``ready`` is asked once for each finished prefix of a lane, in order of length, with the lane's number;
    ``then`` is called on whatever it returns, at once. Both kinds of work have limits of their own, over
    all lanes. The first error of either cancels everything and is raised bare.

    Returns:
        The results of each lane, in the order of its inputs, and those of the further work of each lane,
        in the order in which ``ready`` gave it: neither depends on timing.
    """
    prefixes = [_OrderedPrefix[U]() for _ in lanes]
    found: list[list[U]] = [[] for _ in lanes]
    further: list[dict[int, W]] = [{} for _ in lanes]
    started = [0 for _ in lanes]
    first, second = _limit_calls(call, limit), _limit_calls(then, then_limit)

    async def follow(lane: int, number: int, value: V) -> None:
        further[lane][number] = await second(value)

    async def one(lane: int, index: int) -> None:
        result = await first(lanes[lane][index])
        for last in prefixes[lane].grow(index, result):
            found[lane].append(last)
            for value in ready(lane, tuple(found[lane])):
                tasks.start_soon(follow, lane, started[lane], value)
                started[lane] += 1

    async with open_task_group() as tasks:
        for lane, inputs in enumerate(lanes):
            for index in range(len(inputs)):
                tasks.start_soon(one, lane, index)
    return (
        tuple(tuple(results) for results in found),
        tuple(tuple(results[n] for n in range(len(results))) for results in further),
    )


async def run_beside(
    work: Callable[[], Awaitable[T]],
    background: Callable[[], Coroutine[Any, Any, None]],
    *,
    wait: bool = False,
) -> T:
    """Do a piece of work with another beside it, which is then cancelled, or waited for.

    An error of either cancels the other and is raised bare.
    """
    async with open_task_group() as tasks:
        tasks.start_soon(background)
        result = await work()
        if not wait:
            tasks.cancel_scope.cancel()
    return result


async def finish_if_cancelled(work: Callable[[], Awaitable[T]], *, seconds: float = 0.2) -> T:
    """Do a piece of work to its end although its caller is cancelled, if that takes no more than so long."""
    results: list[T] = []
    shield, done = anyio.CancelScope(shield=True), anyio.Event()

    async def one() -> None:
        with shield:
            results.append(await work())
        done.set()

    async with open_task_group() as tasks:
        tasks.start_soon(one)
        try:
            await done.wait()
        except anyio.get_cancelled_exc_class():
            shield.deadline = anyio.current_time() + seconds
            raise
    return results[0]


def _limit_calls(call: Callable[[T], Awaitable[U]], limit: int | None) -> Callable[[T], Awaitable[U]]:
    if limit is None:
        return call
    gate = anyio.Semaphore(limit)

    async def one(value: T) -> U:
        async with gate:
            return await call(value)

    return one


class _OrderedPrefix(Generic[T]):
    """Results as they come, handed on in the order of their places."""

    def __init__(self) -> None:
        self._waiting: dict[int, T] = {}
        self._length = 0

    def grow(self, place: int, result: T) -> Iterator[T]:
        """Take a result and give those by which the finished prefix grows."""
        self._waiting[place] = result
        while self._length in self._waiting:
            self._length += 1
            yield self._waiting.pop(self._length - 1)


class _FailedCall(NamedTuple):
    error: Exception


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """A task group whose error is raised bare: the only one, or the first of several."""
    first: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        first = _first_error(errors)
    if first is not None:
        raise first


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = errors.exceptions[0]
    return _first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner


@asynccontextmanager
async def open_outbox(deliver: Callable[[T], Awaitable[None]]) -> AsyncIterator[Callable[[T], None]]:
    """Give a function that takes elements without waiting; they are delivered beside the block, in order.

    None is dropped: the end of the block waits until all are delivered. An error of ``deliver`` cancels the
    block and is raised bare.
    """
    send, receive = anyio.create_memory_object_stream[T](math.inf)

    async def empty() -> None:
        with receive:
            async for element in receive:
                await deliver(element)

    async with open_task_group() as tasks:
        tasks.start_soon(empty)
        with send:
            yield send.send_nowait


def require_asyncio() -> None:
    """Check that the caller runs on asyncio.

    Raises:
        UsageError: It runs on another library, such as trio.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "reflact needs a running asyncio event loop; trio is not supported: use asyncio.run(...), or "
            "anyio.run(..., backend='asyncio')"
        ) from None


class Stream(Generic[T]):
    """An iterator over what one task produces, with back-pressure and nothing dropped.

    The task starts with the first step of the iteration. Leaving ``async with`` cancels it and waits for
    it; after a bare ``break`` the event loop does so when it finalises the iterator. An error of the
    producer is raised once everything produced before it was taken. It can be iterated once.

    ``also`` and ``latest`` let others see the same elements. They start nothing and end nothing: the task
    waits for the slowest of all, goes on without those that left, and is cancelled when the stream itself
    is left, at which they end.

    Args:
        produce: Called with the function that hands an element over; runs in a task of its own.
        buffer: Elements that may wait to be taken, in each view.
        subject: Says what an element is about, for ``latest``.
    """

    def __init__(
        self,
        produce: Callable[[Callable[[T], Awaitable[None]]], Awaitable[object]],
        *,
        buffer: int = 256,
        subject: Subject[T] | None = None,
    ) -> None:
        self._produce = produce
        self._subscribers = Subscribers[T](buffer, subject)
        self._task: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[T]:
        return self._iterate()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def also(self) -> Subscription[T]:
        """Return another iterator over all elements that come from now on; it takes part at once.

        Nothing comes before the stream's own iteration begins, so whoever reads a view first waits for
        another task to begin it.
        """
        return self._subscribers.subscribe(latest=False)

    def latest(self) -> Subscription[T]:
        """Return one for slow consumers: of waiting elements with one subject it keeps the newest alone.

        Elements without a subject are all kept, in their order.
        """
        return self._subscribers.subscribe(latest=True)

    async def aclose(self) -> None:
        """Cancel the producer if it still runs, and wait until it has cleaned up.

        It is cancelled once, however often this is called: a second time would cut its clean-up short.
        """
        self._subscribers.close()
        if self._task is not None and not self._task.done():
            if not self._task.cancelling():
                self._task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({self._task})
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.exception()

    async def _iterate(self) -> AsyncGenerator[T, None]:
        require_asyncio()
        if self._task is not None:
            raise RuntimeError("a stream can be iterated once")
        try:
            async with self._subscribers.subscribe(latest=False) as own:
                self._task = asyncio.create_task(self._run())
                async for element in own:
                    yield element
            await self._task
        finally:
            await self.aclose()

    async def _run(self) -> None:
        try:
            await self._produce(self._subscribers.publish)
        finally:
            self._subscribers.close()


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


INLINE_LIMIT = 2_000


"""Characters and values in what is looked at, up to which the way to a thread takes longer than the work."""


_THREAD_LIMITER: RunVar[CapacityLimiter] = RunVar("reflact_aside")


async def run_in_thread(work: Callable[[], T], *seen: JsonValue) -> T:
    """Return what a function returns that touches nothing but what it was given.

    A caller that is cancelled leaves at once; the function goes on to its end, for nothing.

    Args:
        work: The function.
        seen: What it looks at; where that is short the function is called in place.
    """
    if is_short(seen, INLINE_LIMIT):
        return work()
    turn = _THREAD_LIMITER.get(None)
    if turn is None:
        turn = CapacityLimiter(1)
        _THREAD_LIMITER.set(turn)
    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=turn)
