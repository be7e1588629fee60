"""Fan-out: bounded, ordered, and gone when one part fails."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.tasks import fan_out, group

pytestmark = pytest.mark.anyio


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


async def test_cancelling_the_caller_cancels_all_parts() -> None:
    """Cancellation from outside reaches every part and no result comes back."""
    started = 0

    async def call(_: int) -> None:
        nonlocal started
        started += 1
        await anyio.sleep_forever()

    with anyio.move_on_after(5) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fan_out, call, range(4))
            while started < 4:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert started == 4
    assert not scope.cancelled_caught


async def test_a_group_raises_one_error_out_of_nested_groups() -> None:
    """However deep an error arose, it leaves a group unwrapped."""

    async def fail() -> None:
        raise KeyError("deep")

    with pytest.raises(KeyError, match="deep"):
        async with group(), group() as inner:
            inner.start_soon(fail)
