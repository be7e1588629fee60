"""Long pure work, done on a thread beside the event loop, one piece after the other.

Python runs one thread at a time. Of several that compute, each would make the loop wait for its turn, so on
each loop there is one; what is handed over later waits in line. A function of C that works on a long text
keeps the turn until it returns: whoever hands over work looks at long texts in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from pydantic import JsonValue

from reflact.values import is_short

T = TypeVar("T")

INLINE_LIMIT = 2_000
"""Characters and values in what is looked at, up to which the way to a thread takes longer than the work."""

_THREAD_LIMITER: RunVar[CapacityLimiter] = RunVar("reflact_aside")


async def run_in_thread(work: Callable[[], T], *seen: JsonValue) -> T:
    """Return what a function returns that touches nothing but what it was given.

    A caller that is cancelled leaves at once; the function goes on to its end, for nothing.

    Args:
        work: The function.
        seen: What it looks at; where that is short the function is called in place.
    """
    if is_short(seen, INLINE_LIMIT):
        return work()
    turn = _THREAD_LIMITER.get(None)
    if turn is None:
        turn = CapacityLimiter(1)
        _THREAD_LIMITER.set(turn)
    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=turn)
