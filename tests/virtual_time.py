"""An event loop on which nothing is waited for: its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


class _Jumps(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait for each other")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs tasks and timers alone: no input, no threads. Its time starts at 0."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Return the seconds that all sleeps so far would have taken."""
        return self._jumps.now


def run(main: Callable[..., Awaitable[T]], *given: Any) -> T:
    """Run an async function on virtual time."""
    return anyio.run(main, *given, backend_options={"loop_factory": VirtualLoop})
