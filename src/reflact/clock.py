"""Counts where a run's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts active time, in seconds, in all and by stage, since it was last read."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._since = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block for a stage, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.monotonic() - start

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the time since the last reading, in all and by stage, and start anew."""
        now = time.monotonic()
        read = (now - self._since, self._spent)
        self._since, self._spent = now, {}
        return read
