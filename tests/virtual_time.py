"""An event loop whose clock jumps to the next timer, so that sleeps take no real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

WAKE_SECONDS = 5.0
"""Real seconds to wait for another thread to wake a loop whose tasks all wait."""


class _Jumps(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            ready = super().select(WAKE_SECONDS)
            if not ready:
                raise RuntimeError("all tasks wait for each other")
            return ready
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs tasks and timers. Its time starts at 0 and does not wait for sockets or threads."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


HURRY = 50
"""How much faster time passes on a hurried loop."""

NEVER = 1e6
"""A time-out in seconds that passes on no loop, however slow the machine is."""


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop on which waits are short."""

    def __init__(self) -> None:
        super().__init__(_Hurried())

    def time(self) -> float:
        return super().time() * HURRY


class _Hurried(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else timeout / HURRY)


def run(main: Callable[..., Awaitable[T]], *given: Any) -> T:
    return anyio.run(main, *given, backend_options={"loop_factory": VirtualLoop})
