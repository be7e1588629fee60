"""Ordered fan-out, and work beside the loop."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.concurrency import Slots, fan_out, finish_if_cancelled, open_task_group


async def checkpoints(count: int) -> None:
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
