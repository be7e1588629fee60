"""What Ctrl-C and SIGTERM do to a run: the first lets it end in order, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

AT_ONCE_SECONDS = 1.0
MARGIN_SECONDS = 2.0
"""What a run may take to tidy up after its grace, before the process is ended whatever hangs."""


class _Heard(NamedTuple):
    loop: asyncio.AbstractEventLoop
    stop: Callable[[str], None]
    cancel: Callable[[], None]


class Interrupts:
    """Hears SIGINT and SIGTERM for the length of a block; use it in the main thread.

    A thread of its own ends the process with the signal's exit code where the event loop does not come to
    that in time: it hangs in foreign code, or in a thread that waits for a person. What is stored is safe.

    Args:
        grace: Seconds that the run lets what is under way finish.

        say: Told in a line what the first signal brings about. It is called in the middle of anything, and
            must not use what that may be using.
        leave: Returns what is to be written to standard output before the process is ended from outside, so
            that a terminal is left clean.

    Attributes:
        code: The exit code that the first signal asks for, 130 or 143; None while none came.
    """

    def __init__(
        self,
        grace: float,
        *,
        say: Callable[[str], None] | None = None,
        leave: Callable[[], str] | None = None,
    ) -> None:
        self.code: int | None = None
        self._grace = grace
        self._say = say or write_line
        self._leave = leave
        self._run: _Heard | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.code is not None:
            self._end_within(AT_ONCE_SECONDS)

    def bind(self, *, stop: Callable[[str], None], cancel: Callable[[], None]) -> None:
        """Say how the run of this event loop is stopped in order, given a reason, and how it is cancelled."""
        self._run = _Heard(asyncio.get_running_loop(), stop, cancel)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        first = self.code is None
        name = signal.Signals(number).name
        if first:
            self.code = 128 + number
            self._say(
                f"{name}: what is under way may finish, for {self._grace:g} s at most (a second one ends it "
                "at once); the same command goes on from where it was"
            )
        self._end_within(self._grace + MARGIN_SECONDS if first else AT_ONCE_SECONDS)
        if self._run is None:
            raise KeyboardInterrupt
        if first:
            self._run.loop.call_soon_threadsafe(self._run.stop, f"stopped by {name}")
        else:
            self._run.loop.call_soon_threadsafe(self._run.cancel)

    def _end_within(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        if self._leave is not None:
            os.write(1, self._leave().encode())
        os._exit(self.code or 1)


def write_line(line: str) -> None:
    """Write a line to standard error past the buffers, which may be in use."""
    os.write(2, f"{line}\n".encode())
