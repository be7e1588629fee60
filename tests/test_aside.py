"""Pure work beside the event loop: in place where it is short, one after the other on a thread where not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import anyio
import pytest

from reflact.concurrency import INLINE_LIMIT, fan_out, run_in_thread

pytestmark = pytest.mark.anyio
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
        go_on.wait(10)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_in_thread, work, LONG)
        await anyio.to_thread.run_sync(begun.wait)
        tasks.cancel_scope.cancel()
    assert not go_on.is_set()
    go_on.set()
    done: Callable[[], bool] = go_on.is_set
    assert await run_in_thread(done, LONG)
