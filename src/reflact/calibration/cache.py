"""Results that are kept for a while, what is known of pairs, and work that equal callers share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from reflact.memory.models import ContrastPair

T = TypeVar("T")


class PairCache(Generic[T]):
    """What is known of pairs, by their ids; several threads may use it.

    Pairs that are equal share it; of two with one id that differ elsewhere the last one is known.

    Args:
        size: Pairs kept; the one that was longest not asked for goes first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._values: OrderedDict[str, tuple[ContrastPair, T]] = OrderedDict()

    def get(self, pair: ContrastPair) -> T | None:
        """Return what is known of a pair, or None."""
        known = self._values.get(pair.id)
        if known is None or (known[0] is not pair and known[0] != pair):
            return None
        self.put(pair, known[1])
        return known[1]

    def put(self, pair: ContrastPair, value: T) -> None:
        """Keep what is known of a pair."""
        with self._lock:
            self._values[pair.id] = pair, value
            self._values.move_to_end(pair.id)
            while len(self._values) > self._size:
                self._values.popitem(last=False)

    def ensure_size(self, size: int) -> None:
        """Keep at least so many from now on: fewer than are gone through each time would be of no use."""
        self._size = max(self._size, size)


class ResultCache(Generic[T]):
    """Does each piece of work once: those who ask while it is under way wait for it, later ones find it.

    The first who asks does the work. An error goes to all who wait and is not kept. If the first one is
    cancelled, the next in line does the work.

    Args:
        size: Results kept; the one that was longest not asked for goes first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: OrderedDict[str, T] = OrderedDict()
        self._in_progress: dict[str, _PendingResult[T]] = {}

    async def get_or_compute(self, key: str, compute: Callable[[], Awaitable[T]]) -> T:
        """Return the result for a key, from what is kept, from who is at it, or from doing the work."""
        while key not in self._results:
            flight = self._in_progress.get(key)
            if flight is None:
                return await self._compute(key, compute)
            await flight.is_done.wait()
            if flight.error is not None:
                raise flight.error
            if flight.results:
                return flight.results[0]
        self._results.move_to_end(key)
        return self._results[key]

    async def _compute(self, key: str, compute: Callable[[], Awaitable[T]]) -> T:
        flight = self._in_progress[key] = _PendingResult()
        try:
            result = await compute()
        except Exception as error:  # whatever it is, those who wait are told as well
            flight.error = error
            raise
        else:
            flight.results.append(result)
            self._store(key, result)
            return result
        finally:
            del self._in_progress[key]
            flight.is_done.set()

    def _store(self, key: str, result: T) -> None:
        self._results[key] = result
        while len(self._results) > self._size:
            self._results.popitem(last=False)


class _PendingResult(Generic[T]):
    def __init__(self) -> None:
        self.is_done = anyio.Event()
        self.results: list[T] = []
        self.error: Exception | None = None
