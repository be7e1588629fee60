"""A bounded queue between an agent and what works beside it: offering never waits."""

from __future__ import annotations

from collections import deque
from typing import Generic, Literal, NamedTuple, TypeVar

import anyio

T = TypeVar("T")

WhenFull = Literal["block", "drop_oldest", "reject"]


class Offered(NamedTuple, Generic[T]):
    """What became of an offer: whether it was queued, and what had to leave for it."""

    taken: bool
    dropped: T | None = None


class Waiting(Generic[T]):
    """What waits to be taken, first come, first served.

    Args:
        size: Elements at most.
        when_full: ``drop_oldest`` makes room by dropping what waited longest; ``reject`` and ``block`` refuse
            an offer, and ``block`` means that ``put`` waits for room instead.
    """

    def __init__(self, size: int, when_full: WhenFull) -> None:
        self._size = size
        self._when_full = when_full
        self._elements: deque[T] = deque()
        self._changed = anyio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._elements)

    def offer(self, element: T) -> Offered[T]:
        """Queue an element if that is possible at once."""
        if self._closed:
            return Offered(taken=False)
        dropped = None
        if len(self._elements) >= self._size:
            if self._when_full != "drop_oldest":
                return Offered(taken=False)
            dropped = self._elements.popleft()
        self._elements.append(element)
        self._change()
        return Offered(taken=True, dropped=dropped)

    async def put(self, element: T) -> Offered[T]:
        """Queue an element; waits for room where the policy is ``block``."""
        while self._when_full == "block" and len(self._elements) >= self._size and not self._closed:
            await self._changed.wait()
        return self.offer(element)

    async def take(self) -> T:
        """Return what waited longest, once there is something."""
        while not self._elements:
            await self._changed.wait()
        element = self._elements.popleft()
        self._change()
        return element

    def close(self) -> None:
        """Refuse everything from now on, also what waits for room."""
        self._closed = True
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
