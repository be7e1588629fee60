"""Ordered fan-out, and streams with several subscribers. No other module starts tasks."""

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
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Generic, Self, TypeAlias, TypeVar

import anyio
from anyio import CapacityLimiter, TaskHandle, to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import RunVar
from pydantic import JsonValue

from reflact.errors import UsageError
from reflact.jsonutil import is_short

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
K = TypeVar("K", bound=Hashable)
W = TypeVar("W")


# Slots for calls of several fan-outs. A free one goes to the call that asked first.
Slots: TypeAlias = CapacityLimiter

# How many calls of a fan-out run at a time.
Limit: TypeAlias = int | Slots | None

# Returns the subject of an element; a newer element with the same subject replaces it. None: never.
Subject = Callable[[T], Hashable | None]


class Subscription(Generic[T]):
    """One consumer's iterator over a stream; it can be iterated once.

    When its buffer is full, the stream waits. Leaving the iteration, or ``async with``, detaches
    the subscription and does not affect the others.
    """

    def __init__(self, size: int, subject: Subject[T] | None) -> None:
        self._size = size
        self._subject = subject
        self._waiting: OrderedDict[Hashable, T] = OrderedDict()
        # Its producer waits for room and its consumer for elements, so never both at once.
        self._changed = asyncio.Event()
        self._has_started = False
        self.over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.unsubscribe()

    def unsubscribe(self) -> None:
        """Detach from the stream and discard the buffer."""
        self._waiting.clear()
        self.end()

    def end(self) -> None:
        """End the iteration after the buffered elements."""
        self.over = True
        self._changed.set()

    def has_room(self, element: T) -> bool:
        """Return whether the buffer has room for an element."""
        return self.over or len(self._waiting) < self._size or self._key(element) in self._waiting

    async def wait_for_change(self) -> None:
        """Wait until an element was added or taken, or the subscription has ended."""
        self._changed.clear()
        await self._changed.wait()

    def put(self, element: T) -> None:
        """Add an element and remove an older one with the same subject."""
        if not self.over:
            key = self._key(element)
            self._waiting.pop(key, None)
            self._waiting[object() if key is None else key] = element
            self._changed.set()

    def _key(self, element: T) -> Hashable | None:
        return None if self._subject is None else self._subject(element)

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        if self._has_started:
            raise RuntimeError("a stream or subscription can be iterated once; open another one")
        self._has_started = True
        try:
            while self._waiting or not self.over:
                if self._waiting:
                    _, element = self._waiting.popitem(last=False)
                    self._changed.set()
                    yield element
                else:
                    await self.wait_for_change()
        finally:
            self.unsubscribe()


async def fan_out(
    call: Callable[[T], Awaitable[U]], inputs: Sequence[T], *, limit: Limit = None
) -> tuple[U, ...]:
    """Apply an async function to all inputs and return the results in the order of the inputs.

    At most ``limit`` calls run at a time (None: all), or as many as there are slots, which others
    may share. Calls begin in the order of the inputs. The first error cancels the others and is
    raised bare.
    """
    limited = _limit_calls(call, limit)
    async with open_task_group() as tasks:
        handles = [tasks.start_soon(limited, value) for value in inputs]
    return tuple(handle.return_value for handle in handles)


async def fan_out_then(
    call: Callable[[T], Awaitable[U]],
    lanes: Sequence[Sequence[T]],
    *,
    ready: Callable[[int, Sequence[U]], Iterable[V]],
    then: Callable[[V], Awaitable[W]],
    limit: Limit = None,
    then_limit: Limit = None,
) -> tuple[tuple[tuple[U, ...], ...], tuple[tuple[W, ...], ...]]:
    """Fan out over lanes of inputs, and start further work on finished prefixes of each lane.

    ``ready`` is called once for each finished prefix of a lane, in order of length, with the lane's
    index. ``then`` is called at once on each value that it returns. ``limit`` and ``then_limit``
    count calls of all lanes. The first error of either cancels everything and is raised bare.

    Returns:
        The results of each lane in order, and those of its further work in the order of ``ready``.
    """
    finished: list[dict[int, U]] = [{} for _ in lanes]
    results: list[list[U]] = [[] for _ in lanes]
    further: list[list[TaskHandle[W]]] = [[] for _ in lanes]
    first = _limit_calls(call, limit)
    second = _limit_calls(then, then_limit)

    async def one(lane: int, index: int) -> None:
        finished[lane][index] = await first(lanes[lane][index])
        while len(results[lane]) in finished[lane]:
            results[lane].append(finished[lane].pop(len(results[lane])))
            for value in ready(lane, tuple(results[lane])):
                further[lane].append(tasks.start_soon(second, value))

    async with open_task_group() as tasks:
        for lane, inputs in enumerate(lanes):
            for index in range(len(inputs)):
                tasks.start_soon(one, lane, index)
    return (
        tuple(tuple(lane) for lane in results),
        tuple(tuple(handle.return_value for handle in lane) for lane in further),
    )


@asynccontextmanager
async def start_ahead(
    calls: Mapping[K, Callable[[], Awaitable[T]]], *, lazily: bool = False
) -> AsyncIterator[Callable[[K], Awaitable[T]]]:
    """Start async functions together, and yield a function that waits for one result by its key.

    An error is raised to the caller that waits for it, so it does not depend on which function ends
    first. The end of the block cancels the functions whose results nobody has waited for.
    ``lazily`` starts a function only when somebody asks for its result.
    """
    handles: dict[K, TaskHandle[tuple[list[T], Exception | None]]] = {}

    async def attempt(call: Callable[[], Awaitable[T]]) -> tuple[list[T], Exception | None]:
        try:
            return [await call()], None
        except Exception as error:  # noqa: BLE001 - raised to the caller that waits for it
            return [], error

    async with open_task_group() as tasks:

        async def take(key: K) -> T:
            if key not in handles:
                handles[key] = tasks.start_soon(attempt, calls[key])
            await handles[key].wait()
            results, error = handles[key].return_value
            if error is not None:
                raise error
            return results[0]

        if not lazily:
            handles |= {key: tasks.start_soon(attempt, call) for key, call in calls.items()}
        yield take
        tasks.cancel_scope.cancel()


async def finish_if_cancelled(work: Callable[[], Awaitable[T]], *, seconds: float = 0.2) -> T:
    """Do work; if the caller is cancelled, let it continue for at most ``seconds``."""
    shield = anyio.CancelScope(shield=True)

    async def finish() -> T:
        with shield:
            return await work()
        raise AssertionError("a shield that ended is only left by the caller's cancellation")

    async with open_task_group() as tasks:
        handle = tasks.start_soon(finish)
        try:
            await handle.wait()
        except anyio.get_cancelled_exc_class():
            shield.deadline = anyio.current_time() + seconds
            raise
    return handle.return_value


def _limit_calls(
    call: Callable[[T], Awaitable[U]], limit: Limit
) -> Callable[[T], Coroutine[Any, Any, U]]:
    slots = CapacityLimiter(limit) if isinstance(limit, int) else limit

    async def one(value: T) -> U:
        async with nullcontext() if slots is None else slots:
            return await call(value)

    return one


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group that raises its first error bare, unless it ends the process."""
    first: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        first = _first_error(errors)
        if isinstance(first, KeyboardInterrupt | SystemExit):
            raise  # alone, it would end the clean-up of the event loop, too
    if first is not None:
        raise first


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = errors.exceptions[0]
    return _first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner


@asynccontextmanager
async def open_outbox(
    deliver: Callable[[T], Awaitable[None]],
) -> AsyncIterator[Callable[[T], None]]:
    """Yield a function that queues elements without waiting; a task delivers them in order.

    The end of the block waits until all are delivered. An error of ``deliver`` cancels the block.
    Elements that are queued after a cancellation are dropped.
    """
    send, receive = anyio.create_memory_object_stream[T](math.inf)

    async def empty() -> None:
        with receive:
            async for element in receive:
                await deliver(element)

    def post(element: T) -> None:
        with suppress(anyio.BrokenResourceError):
            send.send_nowait(element)

    async with open_task_group() as tasks:
        tasks.start_soon(empty)
        with send:
            yield post


class SharedTask:
    """A task of several callers, each of which may be cancelled by itself; the last one ends it.

    It starts at once. A caller that ends it waits until it has cleaned up. ``work`` handles its own
    errors.
    """

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._n_waiting = 0
        self._scope = anyio.CancelScope()
        self._task = asyncio.create_task(self._run())

    @property
    def is_cancelled(self) -> bool:
        """Whether its last caller has left before its end."""
        return self._scope.cancel_called

    async def wait(self) -> None:
        """Wait for its end; also if it was cancelled from inside, nothing is raised."""
        self._n_waiting += 1
        try:
            await asyncio.wait({self._task})
        finally:
            self._n_waiting -= 1
            if not self._n_waiting and not self._task.done():
                self._scope.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({self._task})

    async def _run(self) -> None:
        with self._scope:
            await self._work()


def require_asyncio() -> None:
    """Raise UsageError if the caller runs on another library than asyncio, such as trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "reflact needs a running asyncio event loop; trio is not supported: use "
            "asyncio.run(...), or anyio.run(..., backend='asyncio')"
        ) from None


class Stream(Generic[T]):
    """An iterator over the elements of one producer task, with back-pressure and without loss.

    The task starts with the first step of the iteration. Leaving ``async with`` cancels it and
    waits for it; after a bare ``break`` the event loop does so. An error of the producer is raised
    after its last element was taken. A stream can be iterated once. The producer waits for the
    slowest of its consumers, which ``subscribe`` adds, and continues without those that left.

    Args:
        produce: Runs in a task of its own; its argument emits an element.
        buffer: The buffer size of each consumer, in elements.
        subject: Returns the subject of an element, for ``subscribe(latest_only=True)``.
    """

    def __init__(
        self,
        produce: Callable[[Callable[[T], Awaitable[None]]], Awaitable[object]],
        *,
        buffer: int = 256,
        subject: Subject[T] | None = None,
    ) -> None:
        self._produce = produce
        self._buffer = buffer
        self._subject = subject
        self._subscriptions: list[Subscription[T]] = []
        self._turn = anyio.Lock(fast_acquire=True)
        self._over = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def subscribe(self, *, latest_only: bool = False) -> Subscription[T]:
        """Return another iterator over all elements from now on.

        No element comes before another task begins the stream's own iteration. ``latest_only`` is
        for slow consumers: of buffered elements with one subject only the newest is kept.
        """
        subject = self._subject if latest_only else None
        subscription = Subscription[T](self._buffer, subject)
        if self._over:
            subscription.end()
        self._subscriptions.append(subscription)
        return subscription

    async def aclose(self) -> None:
        """Cancel the producer if it still runs, once, and wait until it has cleaned up."""
        self._end_subscriptions()
        if self._task is None:
            return
        if not self._task.done():
            if not self._task.cancelling():
                self._task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({self._task})
        if self._task.done() and not self._task.cancelled():
            self._task.exception()

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        require_asyncio()
        if self._task is not None:
            raise RuntimeError("a stream can be iterated once; open another one")
        try:
            async with self.subscribe() as own:
                self._task = asyncio.create_task(self._run())
                async for element in own:
                    yield element
            await self._task
        finally:
            await self.aclose()

    async def _run(self) -> None:
        try:
            await self._produce(self._emit)
        finally:
            self._end_subscriptions()

    async def _emit(self, element: T) -> None:
        """Give an element to all subscriptions, when each has room."""
        async with self._turn:
            while full := [s for s in self._subscriptions if not s.has_room(element)]:
                await full[0].wait_for_change()
            self._subscriptions = [s for s in self._subscriptions if not s.over]
            for subscription in self._subscriptions:
                subscription.put(element)

    def _end_subscriptions(self) -> None:
        """End all subscriptions, including later ones."""
        self._over = True
        for subscription in self._subscriptions:
            subscription.end()


# Up to this many characters and values, starting a thread would take longer than the work.
INLINE_LIMIT = 2_000
_THREAD_LIMITER: RunVar[CapacityLimiter] = RunVar("reflact_thread_limiter")


async def run_in_thread(
    work: Callable[[], T], *inputs: JsonValue, inline_limit: int = INLINE_LIMIT
) -> T:
    """Call a pure function on a worker thread, or in place if its ``inputs`` are short.

    A cancelled caller leaves at once. The function then finishes without effect.
    """
    return work() if is_short(inputs, inline_limit) else await run_beside_loop(work)


async def run_beside_loop(work: Callable[[], T]) -> T:
    """Call a pure function on a worker thread, one such call after the other."""
    limiter = _THREAD_LIMITER.get(None)
    if limiter is None:
        limiter = CapacityLimiter(1)
        _THREAD_LIMITER.set(limiter)
    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
