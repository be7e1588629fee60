"""Several consumers of one stream."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import pytest
from anyio import TaskHandle
from hypothesis import given
from hypothesis import strategies as st

from reflact.concurrency import Stream, Subscription

Hand = Callable[[int], Awaitable[None]]


class Said(NamedTuple):
    """An element: about something that changes, or about nothing."""

    about: str | None
    number: int


def counted(size: int, made: list[int] | None = None) -> Callable[[Hand], Awaitable[None]]:
    async def produce(hand: Hand) -> None:
        for number in range(size):
            await hand(number)
            if made is not None:
                made.append(number)

    return produce


async def read(view: Subscription[int], into: list[int]) -> None:
    into.extend([number async for number in view])


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_view_that_leaves_holds_nobody(breaks: bool) -> None:
    stream = Stream(counted(50), buffer=1)

    async def leave(view: Subscription[int]) -> None:
        async with view:
            if breaks:
                await anext(aiter(view))

    async with anyio.create_task_group() as tasks, stream:
        tasks.start_soon(leave, stream.subscribe())
        with anyio.fail_after(60):
            assert [number async for number in stream] == list(range(50))


async def test_views_end_when_the_stream_is_left() -> None:

    async def produce(hand: Hand) -> None:
        await hand(1)
        await anyio.sleep_forever()

    stream, seen = Stream(produce), list[int]()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks, stream:
            tasks.start_soon(read, stream.subscribe(), seen)
            async for _ in stream:
                await anyio.wait_all_tasks_blocked()
                break
    assert seen == [1]
    assert [number async for number in stream.subscribe()] == []


async def test_an_error_is_raised_to_the_owner_alone() -> None:

    async def produce(hand: Hand) -> None:
        await hand(1)
        raise LookupError("no second")

    stream = Stream(produce)
    view = stream.subscribe()
    with pytest.raises(LookupError, match="no second"):
        [number async for number in stream]
    assert [number async for number in view] == [1]


async def test_a_dropped_iteration_detaches() -> None:
    stream = Stream(counted(20), buffer=2)

    async def glance(view: Subscription[int]) -> None:
        async for _ in view:
            break

    async with stream:
        numbers = aiter(stream)
        view = stream.subscribe()
        assert await anext(numbers) == 0
        await glance(view)
        gc.collect()
        with anyio.fail_after(60):
            assert [number async for number in numbers] == list(range(1, 20))


@asynccontextmanager
async def emitting(buffer: int) -> AsyncIterator[tuple[Stream[Said], Callable[[Said], Awaitable[None]]]]:
    emits, begun = [], anyio.Event()

    async def produce(emit: Callable[[Said], Awaitable[None]]) -> None:
        emits.append(emit)
        begun.set()
        await anyio.sleep_forever()

    async def read_all() -> None:
        async for _ in stream:
            pass

    stream = Stream(produce, buffer=buffer, subject=lambda said: said.about)
    async with anyio.create_task_group() as tasks, stream:
        tasks.start_soon(read_all)
        await begun.wait()
        yield stream, emits[0]


@given(st.lists(st.builds(Said, st.sampled_from([None, "a", "b"]), st.integers()), max_size=40), st.data())
def test_the_latest_view_drops_only_what_is_old(elements: list[Said], data: st.DataObject) -> None:
    numbered = [said._replace(number=number) for number, said in enumerate(elements)]

    async def follow() -> None:
        since = list[Said]()
        async with emitting(100) as (stream, emit):
            reader = aiter(stream.subscribe(latest_only=True))
            for element in numbered:
                await emit(element)
                since.append(element)
                if data.draw(st.booleans()):
                    newest = {said.about: said for said in since if said.about is not None}
                    waiting = [said for said in since if newest.get(said.about or "", said) is said]
                    some = data.draw(st.integers(0, len(waiting)))
                    assert [await anext(reader) for _ in range(some)] == waiting[:some]
                    since = waiting[some:]
        newest = {said.about: said for said in since if said.about is not None}
        rest = [said async for said in reader]
        assert rest == [said for said in since if newest.get(said.about or "", said) is said]

    asyncio.run(follow())


async def test_what_gets_old_never_holds_the_stream() -> None:
    async with emitting(3) as (stream, emit):
        view = stream.subscribe(latest_only=True)
        with anyio.fail_after(60):
            for number in range(1000):
                await emit(Said("ab"[number % 2], number))
        await emit(Said(None, 1000))
        async with anyio.create_task_group() as tasks:
            waiting = tasks.start_soon(emit, Said(None, 1001))
            await anyio.wait_all_tasks_blocked()
            assert waiting.status is TaskHandle.Status.PENDING, "what is never dropped still waits for room"
            reader = aiter(view)
            assert [(await anext(reader)).number for _ in range(4)] == [998, 999, 1000, 1001]
