"""A run at a terminal while it goes on: in lines, or in lines above a region that is drawn anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Self

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from reflact import events
from reflact.report.region import Screen, region
from reflact.report.story import Story
from reflact.report.visible import visible
from reflact.report.watched import Watched, fold, recalled
from reflact.report.wrapping import hanging

FRAMES_A_SECOND = 8
"""The most that the region is looked at anew."""

SHOW_CURSOR = "\x1b[?25h"

KEPT_LINES = 200
"""Lines that are kept to be shown again after the terminal's size has changed."""


class Showing:
    """Shows what happens in a run, for the length of a block. This one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def recall(self, told: Iterable[events.Event]) -> None:
        """Take in the durable events that an earlier start has told."""

    def show(self, event: events.Event) -> None:
        """Show an event."""

    def say(self, text: str) -> None:
        """Show a line beside the events."""

    def leave(self) -> str:
        """Return what leaves the terminal clean once it is written, where the block cannot be left."""
        return ""


class JsonLines(Showing):
    """Writes each event as a line of JSON, in ASCII: any terminal, pipe and encoding can take it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def show(self, event: events.Event) -> None:
        """Write an event."""
        self._write(event.model_dump_json(ensure_ascii=True))


class Lines(Showing):
    """Prints a line for each event that matters.

    Args:
        console: Where.
        times: Whether each line begins with the local time of what it tells.
    """

    def __init__(self, console: Console, *, times: bool = False) -> None:
        self._console = console
        self._times = times
        self._story = Story()

    def recall(self, told: Iterable[events.Event]) -> None:
        """Say how far the run had come."""
        self._tell(self._story.recall(told), datetime.now(UTC))

    def show(self, event: events.Event) -> None:
        """Print the line that an event is worth."""
        self._tell(self._story.tell(event), event.at)

    def say(self, text: str) -> None:
        """Print a line."""
        self._tell(text, datetime.now(UTC))

    def _tell(self, line: str | None, at: datetime) -> None:
        if line is not None:
            stamp = f"{at.astimezone():%Y-%m-%d %H:%M:%S} " if self._times else ""
            self._print(visible(stamp + line))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class Painter:
    """Owns what stands on a terminal: printed lines, and the region below them. For one thread at a time.

    After a change of the terminal's size, which moves what is drawn in ways that differ between terminals,
    the screen is cleared and the latest lines are printed again.
    """

    def __init__(self, console: Console, *, with_errors: bool = False) -> None:
        self._console = console
        self._with_errors = with_errors
        self._printed: deque[str] = deque(maxlen=KEPT_LINES)
        self._size = console.size
        self._rows: tuple[Text, ...] = ()
        self._live = self._new()

    def begin(self) -> None:
        """Take the terminal; what others print from now on goes above the region."""
        self._live.start()

    def paint(self, lines: Sequence[str], watched: Watched, now: float) -> None:
        """Print lines, and draw the region anew where its rows have changed."""
        size = self._console.size
        if size != self._size:
            self._begin_anew(size)
        rows = region(watched, Screen(size.width, size.height, self._console.encoding), now)
        with self._console:
            self._print(lines)
            if rows != self._rows:
                self._rows = rows
                self._live.update(Group(*rows), refresh=True)

    def leave(self) -> str:
        """Return the sequences that take away the region that was drawn last, and show the cursor."""
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (len(self._rows) - 1) + SHOW_CURSOR

    def end(self, lines: Sequence[str]) -> None:
        """Print the last lines and take the region away."""
        self._print(lines)
        self._live.stop()

    def _print(self, lines: Sequence[str]) -> None:
        self._printed.extend(lines)
        self._put(lines)

    def _put(self, lines: Sequence[str]) -> None:
        if lines:
            self._console.print(Group(*(hanging(line, self._console.width) for line in lines)))

    def _begin_anew(self, size: ConsoleDimensions) -> None:
        self._live.stop()
        self._console.clear()
        self._size, self._rows, self._live = size, (), self._new()
        self._live.start()
        self._put(self._fitting(size))

    def _fitting(self, size: ConsoleDimensions) -> list[str]:
        """Return the latest printed lines that fit above the region."""
        free = size.height - Screen(size.width, size.height).most - 1
        fitting: list[str] = []
        for line in reversed(self._printed):
            free -= hanging(line, size.width).plain.count("\n") + 1
            if free < 0:
                break
            fitting.insert(0, line)
        return fitting

    def _new(self) -> Live:
        return Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stderr=self._with_errors
        )


class LiveView(Lines):
    """Prints the same lines above a region that shows where the run is.

    Events only change a value in memory. A thread of its own draws it, at most ``FRAMES_A_SECOND`` times a
    second and only where rows have changed: neither a fast run nor a slow terminal waits for the other.

    Args:
        console: A terminal that can move its cursor.
        watched: What is known beforehand.
        clock: Gives seconds; it never goes back.
        times: See ``Lines``.
        with_errors: Whether standard error is this terminal, too: what others write there goes above the
            region.
    """

    def __init__(
        self,
        console: Console,
        watched: Watched,
        *,
        clock: Callable[[], float],
        times: bool = False,
        with_errors: bool = False,
    ) -> None:
        super().__init__(console, times=times)
        self.with_errors = with_errors
        self._watched = watched
        self._clock = clock
        self._waiting: deque[str] = deque()
        self._over = Event()
        self._painter = Painter(console, with_errors=with_errors)
        self._thread = Thread(target=self._keep_painting, name="reflact-view", daemon=True)

    def __enter__(self) -> Self:
        self._painter.begin()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the region away; the lines stay."""
        self._over.set()
        self._thread.join()
        with suppress(OSError):  # the terminal may be gone
            self._painter.end(self._take())

    def recall(self, told: Iterable[events.Event]) -> None:
        """Take in what was known, and say how far the run had come."""
        known = tuple(told)
        super().recall(known)
        self._watched = recalled(self._watched, known)

    def show(self, event: events.Event) -> None:
        """Take in an event, and its line."""
        self._watched = fold(self._watched, event, self._clock())
        super().show(event)

    def leave(self) -> str:
        """Return the sequences that take the region away and show the cursor."""
        return SHOW_CURSOR if self._over.is_set() else self._painter.leave()

    def _print(self, line: str) -> None:
        self._waiting.append(line)

    def _take(self) -> list[str]:
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _keep_painting(self) -> None:
        with suppress(OSError):  # the terminal may be gone
            while not self._over.wait(1 / FRAMES_A_SECOND):
                self._painter.paint(self._take(), self._watched, self._clock())
