"""Caches: of values by contrast pair, and of results that equal callers share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from reflact.memory.models import ContrastPair

T = TypeVar("T")


class PairCache(Generic[T]):
    """The values of the ``size`` most recently used pairs, for several threads; equal pairs share a value."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._values: OrderedDict[str, tuple[ContrastPair, T]] = OrderedDict()

    def get(self, pair: ContrastPair) -> T | None:
        """Return the value of a pair, or None."""
        known = self._values.get(pair.id)
        if known is None or (known[0] is not pair and known[0] != pair):
            return None
        self.put(pair, known[1])
        return known[1]

    def put(self, pair: ContrastPair, value: T) -> None:
        """Keep the value of a pair."""
        with self._lock:
            self._values[pair.id] = pair, value
            self._values.move_to_end(pair.id)
            while len(self._values) > self._size:
                self._values.popitem(last=False)

    def ensure_size(self, size: int) -> None:
        """Keep at least so many from now on."""
        self._size = max(self._size, size)


class ResultCache(Generic[T]):
    """Computes each result once, and keeps the ``size`` most recently used ones; callers that ask meanwhile wait.

    An error goes to all who wait and is not kept. If the caller that computes is cancelled, the next one does.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: OrderedDict[str, T] = OrderedDict()
        self._in_progress: dict[str, _PendingResult[T]] = {}

    async def get_or_compute(self, key: str, compute: Callable[[], Awaitable[T]]) -> T:
        """Return the result for a key."""
        while key not in self._results:
            pending = self._in_progress.get(key)
            if pending is None:
                return await self._compute(key, compute)
            await pending.is_done.wait()
            if pending.error is not None:
                raise pending.error
            if pending.results:
                return pending.results[0]
        self._results.move_to_end(key)
        return self._results[key]

    async def _compute(self, key: str, compute: Callable[[], Awaitable[T]]) -> T:
        pending = self._in_progress[key] = _PendingResult()
        try:
            result = self._results[key] = await compute()
        except Exception as error:  # those who wait for the result get it too
            pending.error = error
            raise
        else:
            pending.results.append(result)
            while len(self._results) > self._size:
                self._results.popitem(last=False)
            return result
        finally:
            del self._in_progress[key]
            pending.is_done.set()


class _PendingResult(Generic[T]):
    def __init__(self) -> None:
        self.is_done = anyio.Event()
        self.results: list[T] = []
        self.error: Exception | None = None
