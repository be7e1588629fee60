"""Calls of many rollouts that a simulator or a model computes together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import anyio

from reflact.concurrency import open_task_group
from reflact.errors import ConfigError

T = TypeVar("T")
U = TypeVar("U")


class CallBatcher(Generic[T, U]):
    """Joins calls that happen at the same time: each caller passes one value, and ``compute`` gets many.

    For a simulator, a grader or a model whose step costs about as much for many worlds as for one. The callers stay
    rollouts of their own: each is stored, cancelled and resumed by itself. A batch goes on as long as one of its
    callers waits. Batches are computed one after the other, and the next one collects values meanwhile.

    Args:
        compute: Returns one result for each value, in order. An exception in the place of a result is raised to the
            caller of that value alone. Results must not depend on which values share a batch.
        size: The most values of a batch.
        seconds: How long the first value of a batch waits for others.

    Raises:
        ConfigError: ``size`` is below 1.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[T]], Awaitable[Sequence[U | Exception]]],
        *,
        size: int,
        seconds: float = 0.01,
    ) -> None:
        if size < 1:
            raise ConfigError(f"the size of a batch must be at least 1, and is {size}")
        self._compute = compute
        self._size = size
        self._seconds = seconds
        self._open: _Batch[T, U] | None = None
        self._last_ended: anyio.Event | None = None

    async def __call__(self, value: T) -> U:
        """Return the result of a value; raises what ``compute`` raises or returns in its place."""
        batch = self._open
        if batch is None:
            batch = self._open = _Batch(self._last_ended)
            self._last_ended = batch.ended
        number = len(batch.values)
        batch.values.append(value)
        if len(batch.values) == self._size:
            batch.full.set()
            self._open = None
        if number:
            await self._wait(batch)
        else:
            async with open_task_group() as tasks:
                tasks.start_soon(self._run, batch)
                await self._wait(batch)
        result = batch.results[number]
        if isinstance(result, Exception):
            raise result
        return result

    async def _wait(self, batch: _Batch[T, U]) -> None:
        """Wait for the end of a batch; the last caller that is cancelled ends it."""
        batch.waiting += 1
        try:
            await batch.ended.wait()
        finally:
            batch.waiting -= 1
            if not batch.waiting:
                self._close(batch)
                batch.scope.cancel()

    async def _run(self, batch: _Batch[T, U]) -> None:
        """Collect and compute a batch, whatever happens to the caller whose task this is."""
        try:
            with batch.scope:
                with anyio.move_on_after(self._seconds):
                    await batch.full.wait()
                if batch.after is not None:
                    await batch.after.wait()
                self._close(batch)
                try:
                    batch.results = await self._compute(tuple(batch.values))
                    if len(batch.results) != len(batch.values):
                        raise ValueError(f"{len(batch.results)} results for {len(batch.values)} values")
                except Exception as error:  # noqa: BLE001 - raised to each caller
                    batch.results = [error] * len(batch.values)
        finally:
            batch.ended.set()

    def _close(self, batch: _Batch[T, U]) -> None:
        if self._open is batch:
            self._open = None


class _Batch(Generic[T, U]):
    """Values that are computed together; ``after`` is the end of the batch before, ``waiting`` counts callers."""

    def __init__(self, after: anyio.Event | None) -> None:
        self.after = after
        self.values: list[T] = []
        self.results: Sequence[U | Exception] = ()
        self.waiting = 0
        self.full, self.ended = anyio.Event(), anyio.Event()
        self.scope = anyio.CancelScope(shield=True)
