"""What several consumers see of one stream, each through a bounded buffer of its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from typing import Generic, Self, TypeVar

import anyio

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
