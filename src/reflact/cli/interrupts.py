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

IMMEDIATE_SECONDS = 1.0
MARGIN_SECONDS = 2.0
"""What a run may take to tidy up after its grace, before the process is ended whatever hangs."""


class _BoundRun(NamedTuple):
    loop: asyncio.AbstractEventLoop
    stop: Callable[[str], None]
    cancel: Callable[[], None]


class InterruptHandler:
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
        on_signal: Callable[[str], None] | None = None,
        build_cleanup: Callable[[], str] | None = None,
    ) -> None:
        self.exit_code: int | None = None
        self._grace = grace
        self._on_signal = on_signal or write_line
        self._build_cleanup = build_cleanup
        self._bound_run: _BoundRun | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._previous_handlers[number] = before
                signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._previous_handlers.items():
            signal.signal(number, before)
        if self.exit_code is not None:
            self._exit_after(IMMEDIATE_SECONDS)

    def bind(self, *, stop: Callable[[str], None], cancel: Callable[[], None]) -> None:
        """Say how the run of this event loop is stopped in order, given a reason, and how it is cancelled."""
        self._bound_run = _BoundRun(asyncio.get_running_loop(), stop, cancel)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        first = self.exit_code is None
        name = signal.Signals(number).name
        if first:
            self.exit_code = 128 + number
            self._on_signal(
                f"{name}: what is under way may finish, for {self._grace:g} s at most (a second one ends it "
                "at once); the same command goes on from where it was"
            )
        self._exit_after(self._grace + MARGIN_SECONDS if first else IMMEDIATE_SECONDS)
        if self._bound_run is None:
            raise KeyboardInterrupt
        if first:
            self._bound_run.loop.call_soon_threadsafe(self._bound_run.stop, f"stopped by {name}")
        else:
            self._bound_run.loop.call_soon_threadsafe(self._bound_run.cancel)

    def _exit_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._exit_process)
        timer.daemon = True
        timer.start()

    def _exit_process(self) -> None:
        if self._build_cleanup is not None:
            os.write(1, self._build_cleanup().encode())
        os._exit(self.exit_code or 1)


def write_line(line: str) -> None:
    """Write a line to standard error past the buffers, which may be in use."""
    os.write(2, f"{line}\n".encode())
