"""Bounded, ordered fan-out. No other module starts tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

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
