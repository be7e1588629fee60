"""Counts where a run's time goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class Clock:
    """Counts active time, in seconds of the event loop, in all and by stage, since it was last read."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._since = anyio.current_time()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block for a stage, however it ends."""
        start = anyio.current_time()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + anyio.current_time() - start

    def read(self, ahead: float = 0.0) -> tuple[float, dict[str, float]]:
        """Return the time since the last reading, in all and by stage, and start anew.

        ``ahead`` seconds that are still to come are added; the next reading is that much shorter, and below
        0 where it comes earlier.
        """
        now = anyio.current_time() + ahead
        read = (now - self._since, self._spent)
        self._since, self._spent = now, {}
        return read
