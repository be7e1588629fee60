"""Ordered fan-out, and work beside the loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.concurrency import (
    INLINE_LIMIT,
    Slots,
    Stream,
    fan_out,
    fan_out_then,
    finish_if_cancelled,
    open_task_group,
    run_in_thread,
    start_ahead,
)


async def checkpoints(count: int) -> None:
    """Give the other tasks ``count`` turns."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@given(delays=st.lists(st.integers(0, 5), max_size=12), limit=st.none() | st.integers(1, 4))
def test_results_keep_the_order_of_the_inputs(delays: list[int], limit: int | None) -> None:

    async def call(indexed: tuple[int, int]) -> int:
        await checkpoints(indexed[1])
        return indexed[0]

    async def run() -> tuple[int, ...]:
        return await fan_out(call, list(enumerate(delays)), limit=limit)

    assert anyio.run(run) == tuple(range(len(delays)))


async def test_the_first_error_is_raised_bare_and_cancels_the_others() -> None:
    cancelled: list[int] = []

    async def call(number: int) -> None:
        if number == 3:
            await checkpoints(3)
            raise LookupError("part 3")
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            cancelled.append(number)
            raise

    with pytest.raises(LookupError, match="part 3"):
        await fan_out(call, range(5))
    assert sorted(cancelled) == [0, 1, 2, 4]


@pytest.mark.parametrize("failing", ["call", "ready", "then"])
async def test_an_error_in_any_part_of_overlapped_work_ends_all_of_it(failing: str) -> None:
    ends: list[str] = []

    async def forever(name: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ends.append(name)

    async def call(number: int) -> int:
        if number == 3:
            await forever("call")
        if number == 2:
            await checkpoints(5)
            if failing == "call":
                raise LookupError("call")
        return number

    def ready(lane: int, prefix: Sequence[int]) -> list[int]:
        if failing == "ready" and len(prefix) == 3:
            raise LookupError("ready")
        return [len(prefix)]

    async def then(number: int) -> None:
        if failing == "then" and number == 3:
            raise LookupError("then")
        await forever("then")

    before = asyncio.all_tasks()
    with anyio.fail_after(60), pytest.raises(LookupError, match=failing):
        await fan_out_then(call, [range(4)], ready=ready, then=then)
    assert sorted(ends) == ["call", "then", "then"]
    assert asyncio.all_tasks() == before


class Endless:
    """Produces forever and notes how it was stopped; its clean-up takes several turns of the loop."""

    def __init__(self) -> None:
        self.cleaned = 0

    async def __call__(self, hand_over: Callable[[int], Awaitable[None]]) -> None:
        try:
            while True:
                await hand_over(1)
        finally:
            with anyio.CancelScope(shield=True):
                await checkpoints(10)
            await checkpoints(1)
            self.cleaned += 1


async def only_left(tasks: set[asyncio.Task[Any]], endless: Endless) -> int:
    """Let the loop finalise what was dropped; fail unless these tasks alone remain."""
    gc.collect()
    with anyio.fail_after(60):
        while asyncio.all_tasks() != tasks:
            await anyio.lowlevel.checkpoint()
    return endless.cleaned


async def test_a_stream_that_is_left_waits_until_its_producer_has_cleaned_up() -> None:
    """By a break, by an error, and without ``async with``, where the event loop does so."""
    before = asyncio.all_tasks()

    async def read(error: Exception | None, *, bare: bool) -> int:
        endless = Endless()
        stream = Stream(endless, buffer=1)
        with suppress(LookupError):
            async with nullcontext() if bare else stream:
                async for _ in stream:
                    if error is not None:
                        raise error
                    break
        return await only_left(before, endless) if bare else endless.cleaned

    assert await read(None, bare=False) == 1
    assert await read(LookupError("of the reader"), bare=False) == 1
    assert await read(None, bare=True) == 1


async def test_work_is_seen_through_although_its_caller_is_cancelled() -> None:
    begun = anyio.Event()
    go_on = anyio.Event()
    ends: list[str] = []

    async def work() -> None:
        begun.set()
        await go_on.wait()
        ends.append("work")

    async def caller() -> None:
        try:
            await finish_if_cancelled(work, seconds=60)
        finally:
            ends.append("caller")

    with anyio.fail_after(60):
        async with open_task_group() as tasks:
            tasks.start_soon(caller)
            await begun.wait()
            tasks.cancel_scope.cancel()
            go_on.set()
    assert ends == ["work", "caller"]


async def test_work_that_hangs_is_not_seen_through() -> None:
    with anyio.fail_after(60):
        async with open_task_group() as tasks:
            tasks.start_soon(lambda: finish_if_cancelled(anyio.sleep_forever, seconds=0.01))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert tasks.cancel_scope.cancelled_caught

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await finish_if_cancelled(fail)


LONG = "x" * (INLINE_LIMIT + 1)


async def test_long_work_is_done_on_one_thread_and_short_work_in_place() -> None:
    assert await run_in_thread(threading.get_ident, "little") == threading.get_ident()
    threads = await fan_out(lambda _: run_in_thread(work_long, LONG), range(10))
    assert threading.get_ident() not in threads
    assert AT_WORK == []


AT_WORK: list[int] = []


def work_long() -> int:
    """Fail if another call is at work."""
    assert AT_WORK == []
    AT_WORK.append(1)
    time.sleep(0.002)
    AT_WORK.clear()
    return threading.get_ident()


async def test_a_caller_that_is_cancelled_leaves_at_once() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(60)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_in_thread, work, LONG)
        await anyio.to_thread.run_sync(begun.wait)
        tasks.cancel_scope.cancel()
    assert not go_on.is_set()
    go_on.set()
    done: Callable[[], bool] = go_on.is_set
    assert await run_in_thread(done, LONG)


async def test_functions_that_start_ahead_fail_when_they_are_asked_for() -> None:
    started: list[str] = []

    async def slow() -> str:
        started.append("slow")
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return "done"

    async def fail() -> str:
        started.append("fail")
        raise ValueError("no")

    for lazily in (False, True):
        async with start_ahead(
            {"slow": slow, "fail": fail, "unused": anyio.sleep_forever}, lazily=lazily
        ) as take:
            assert await take("slow") == await take("slow") == "done"
            assert started == (["slow"] if lazily else ["slow", "fail"])
            with pytest.raises(ValueError, match="no"):
                await take("fail")
        started.clear()


async def test_fan_outs_share_slots() -> None:
    places, at_work, most, begun = Slots(3), 0, 0, list[int]()

    async def work(n: int) -> None:
        nonlocal at_work, most
        begun.append(n)
        at_work += 1
        most = max(most, at_work)
        await anyio.lowlevel.checkpoint()
        at_work -= 1

    async with anyio.create_task_group() as tasks:
        for start in (0, 10):
            tasks.start_soon(lambda start=start: fan_out(work, range(start, start + 10), limit=places))
    assert most == 3
    assert begun == list(range(20))
