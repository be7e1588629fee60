"""Fan-out is bounded and ordered, and cancels everything on failure; pure work runs on one thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
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
    """Results stand where their inputs stood, whatever the order of completion."""

    async def call(indexed: tuple[int, int]) -> int:
        await checkpoints(indexed[1])
        return indexed[0]

    async def run() -> tuple[int, ...]:
        return await fan_out(call, list(enumerate(delays)), limit=limit)

    assert anyio.run(run) == tuple(range(len(delays)))


@pytest.mark.parametrize(("limit", "peak"), [(1, 1), (3, 3), (None, 8)])
async def test_no_more_than_the_limit_run_at_once(limit: int | None, peak: int) -> None:
    """The limit is reached and never passed; without one all run at once."""
    running = 0
    highest = 0

    async def call(turns: int) -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await checkpoints(turns)
        running -= 1

    await fan_out(call, [5] * 8, limit=limit)
    assert highest == peak


async def test_the_first_error_is_raised_bare_and_cancels_the_others() -> None:
    """A failing part ends the fan-out with its own error; parts that wait forever are cancelled."""
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


async def test_a_group_raises_one_error_out_of_nested_groups() -> None:
    """However deep an error arose, it leaves a group unwrapped."""

    async def fail() -> None:
        raise KeyError("deep")

    with pytest.raises(KeyError, match="deep"):
        async with open_task_group(), open_task_group() as inner:
            inner.start_soon(fail)


class Boom(Exception):
    """An error that a part raises."""


@given(
    lanes=st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=3),
    limits=st.tuples(st.none() | st.integers(1, 3), st.none() | st.integers(1, 3)),
)
def test_further_work_stands_in_the_order_of_prefixes(
    lanes: list[list[int]], limits: tuple[int | None, int | None]
) -> None:
    """Results of both kinds are the same whatever finishes first, and each prefix is asked about once."""
    asked: list[list[int]] = [[] for _ in lanes]

    async def call(delay: int) -> int:
        await checkpoints(delay)
        return delay

    def ready(lane: int, prefix: Sequence[int]) -> list[int]:
        asked[lane].append(len(prefix))
        return [sum(prefix)] * (prefix[-1] % 3)

    async def then(total: int) -> str:
        await checkpoints(total % 5)
        return f"sum {total}"

    async def run() -> Any:
        return await fan_out_then(call, lanes, ready=ready, then=then, limit=limits[0], then_limit=limits[1])

    sums = [
        tuple(f"sum {sum(lane[: n + 1])}" for n, last in enumerate(lane) for _ in range(last % 3))
        for lane in lanes
    ]
    assert anyio.run(run) == (tuple(tuple(lane) for lane in lanes), tuple(sums))
    assert asked == [list(range(1, len(lane) + 1)) for lane in lanes]


async def test_both_kinds_of_work_have_limits_of_their_own() -> None:
    """Each limit is reached and never passed, over all lanes together."""
    running = {"call": 0, "then": 0}
    highest = {"call": 0, "then": 0}

    async def work(kind: str) -> str:
        running[kind] += 1
        highest[kind] = max(highest[kind], running[kind])
        await checkpoints(6)
        running[kind] -= 1
        return kind

    async def call(number: int) -> str:
        return await work("call")

    def ready(lane: int, prefix: Sequence[str]) -> list[str]:
        return ["then"]

    await fan_out_then(call, [range(8), range(8)], ready=ready, then=work, limit=5, then_limit=3)
    assert highest == {"call": 5, "then": 3}


@pytest.mark.parametrize("failing", ["call", "ready", "then"])
async def test_an_error_in_any_part_of_overlapped_work_ends_all_of_it(failing: str) -> None:
    """The error leaves bare; earlier and further work that waits forever is cancelled, nothing is left."""
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
                raise Boom("call")
        return number

    def ready(lane: int, prefix: Sequence[int]) -> list[int]:
        if failing == "ready" and len(prefix) == 3:
            raise Boom("ready")
        return [len(prefix)]

    async def then(number: int) -> None:
        if failing == "then" and number == 3:
            raise Boom("then")
        await forever("then")

    before = asyncio.all_tasks()
    with anyio.fail_after(60), pytest.raises(Boom, match=failing):
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


async def only_left(tasks: set[asyncio.Task[Any]]) -> None:
    """Let the loop finalise what was dropped; fail unless these tasks alone remain."""
    gc.collect()
    with anyio.fail_after(60):
        while asyncio.all_tasks() != tasks:
            await anyio.lowlevel.checkpoint()


async def test_leaving_a_stream_waits_until_its_producer_has_cleaned_up() -> None:
    """After ``async with``, by break or by error, nothing is left running."""
    before = asyncio.all_tasks()
    for error in (None, LookupError("of the reader")):
        endless = Endless()
        with suppress(LookupError):
            async with Stream(endless, buffer=1) as stream:
                async for _ in stream:
                    if error is not None:
                        raise error
                    break
        assert endless.cleaned == 1
        await only_left(before)


async def test_a_bare_break_ends_the_producer_too() -> None:
    """The loop finalises a stream that was only broken out of."""
    before = asyncio.all_tasks()
    endless = Endless()

    async def read() -> None:
        async for _ in Stream(endless, buffer=1):
            break

    await read()
    await only_left(before)
    assert endless.cleaned == 1


async def test_work_is_seen_through_although_its_caller_is_cancelled() -> None:
    """Work under way when its caller is cancelled ends first; then the caller is cancelled all the same."""
    begun, go_on, ends = anyio.Event(), anyio.Event(), list[str]()

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
    """A cancelled caller does not wait for ever."""
    with anyio.fail_after(60):
        async with open_task_group() as tasks:
            tasks.start_soon(lambda: finish_if_cancelled(anyio.sleep_forever, seconds=0.01))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert tasks.cancel_scope.cancelled_caught


async def test_what_is_seen_through_gives_its_result_or_its_error() -> None:
    """Undisturbed, the result comes back, and an error comes out bare."""

    async def half(number: int) -> float:
        return 1 / number

    assert await finish_if_cancelled(lambda: half(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        await finish_if_cancelled(lambda: half(0))


LONG = "x" * (INLINE_LIMIT + 1)


async def test_what_is_short_is_done_in_place() -> None:
    """Work on little runs on the thread that asks."""
    assert await run_in_thread(threading.get_ident, "little") == threading.get_ident()
    assert await run_in_thread(threading.get_ident, LONG) != threading.get_ident()


async def test_one_piece_follows_the_other() -> None:
    """However many ask at once, one piece of long work is at work at a time."""
    at_work, most = 0, 0

    def work() -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.002)
        at_work -= 1

    await fan_out(lambda _: run_in_thread(work, LONG), range(10))
    assert most == 1


async def test_an_error_is_raised_where_it_was_asked_for() -> None:
    """What the work raises reaches the caller as it is."""

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_in_thread(fail, LONG)


async def test_a_caller_that_is_cancelled_leaves_at_once() -> None:
    """Cancelling does not wait for the work, and the next work waits for its end."""
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
    """All run together, or each when it is asked for; an early error waits for its turn and ends nothing else."""
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
    """Together they never have more calls at work than there are slots, and earlier ones come first."""
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
