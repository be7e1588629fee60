"""Views of a run while it trains: JSON, event lines, or event lines above a live display."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Self

import anyio
from rich.console import Console
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from reflact import events
from reflact.config.training import TrainerConfig
from reflact.errors import StoreError
from reflact.records import RunSummary, Usage
from reflact.reporting.lines import EventLines, escape_controls, format_duration, name_count, wrap_line
from reflact.reporting.live_display import (
    LiveDisplay,
    LiveState,
    StageProgress,
    limit_height,
    name_stage,
    restore_state,
    update_state,
)
from reflact.reporting.verdict import format_usage
from reflact.store.artifacts import find_exports

SHOW_CURSOR = "\x1b[?25h"
PROGRESS_SECONDS, FIRST_PROGRESS_SECONDS = 30.0, 10.0
"""How long lines stay away before a line on the progress; the second number is for the first one in a stage."""

REPRINTED_LINES = 200
"""Event lines that are kept, to be printed again after the size of the terminal changed."""


class RunView:
    """Shows a run for the length of a ``with`` block. This base class shows nothing.

    Meanwhile records of the logger ``reflact`` reach only handlers of the program, since the view shows warnings.
    """

    def __enter__(self) -> Self:
        self._handler = logging.NullHandler()
        logging.getLogger("reflact").addHandler(self._handler)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("reflact").removeHandler(self._handler)

    def restore(self, earlier: Iterable[events.Event]) -> None:
        """Take the durable events of earlier starts."""

    def leave_out(self, spent: Usage) -> None:
        """Take what the run used before a measurement outside its training, which is not shown."""

    def show_event(self, event: events.Event) -> None:
        """Show an event."""

    def show_interrupt(self, text: str) -> bool:
        """Show the effect of a signal without locks or buffers; return whether this view can."""
        return False

    def build_cleanup(self) -> str:
        """Return the control sequences that clean the terminal if the process must exit inside the block."""
        return ""


class JsonView(RunView):
    """Writes each event as one line of JSON in ASCII, which every terminal, pipe and encoding can take."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def show_event(self, event: events.Event) -> None:
        """Write an event."""
        self._write(event.model_dump_json(ensure_ascii=True))


class LineView(RunView):
    """Prints a line for each event that matters, and lines on the progress while no such event comes.

    A progress line appears after ``PROGRESS_SECONDS`` without a line, or after ``FIRST_PROGRESS_SECONDS`` if the run
    works on another stage than the last such line said. So short runs have none.

    Args:
        console: Where to print.
        state: What is known in advance.
        clock: Returns seconds of a monotonic clock.
        times: Whether each line begins with the local time of its event.
        with_timer: Whether a thread prints the progress; if not, only events do, as while a person answers a question.
        refreshes_per_second: How often the thread looks.
    """

    def __init__(
        self,
        console: Console,
        state: LiveState | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        times: bool = False,
        with_timer: bool = True,
        refreshes_per_second: float = 1.0,
    ) -> None:
        self._console = console
        self._clock = clock
        self._state = LiveState(opened_at=clock()) if state is None else state
        self._times = times
        self._event_lines = EventLines()
        self._printed_at = clock()
        self._reported_stage: tuple[int, str] | None = None
        self._finished = Event()
        self._seconds_per_refresh = 1 / refreshes_per_second
        self._thread: Thread | None = None
        if with_timer:
            self._thread = Thread(target=self._refresh_until_finished, name="reflact-view", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._finished.set()
        if self._thread is not None:
            self._thread.join()

    def restore(self, earlier: Iterable[events.Event]) -> None:
        """Restore the state of the run, and print how far it came."""
        earlier = tuple(earlier)
        self._show(self._event_lines.format_resume(earlier), datetime.now(UTC))
        self._state = restore_state(self._state, earlier)

    def leave_out(self, spent: Usage) -> None:
        """Show only what is used beyond this."""
        self._state = replace(self._state, spent_before=spent)

    def show_event(self, event: events.Event) -> None:
        """Update the state, and print the line of the event."""
        self._state = update_state(self._state, event, self._clock())
        self._show(self._event_lines.format_event(event), event.at)
        if self._thread is None:
            self.refresh()

    def refresh(self) -> None:
        """Print the progress if it is time for it."""
        state, now = self._state, self._clock()
        stage = (state.step, state.stages[-1].name) if state.stages else None
        wait = PROGRESS_SECONDS if stage == self._reported_stage else FIRST_PROGRESS_SECONDS
        if now - self._printed_at >= wait:
            self._reported_stage = stage
            self._show(describe_progress(state, now), datetime.now(UTC))

    def _show(self, line: str | None, at: datetime) -> None:
        if line is not None:
            self._printed_at = self._clock()
            stamp = f"{at.astimezone():%Y-%m-%d %H:%M:%S} " if self._times else ""
            self._print(escape_controls(stamp + line))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _refresh_until_finished(self) -> None:
        with suppress(OSError):
            while not self._finished.wait(self._seconds_per_refresh):
                self.refresh()


class LiveView(LineView):
    """Prints the same lines above a display of the current state.

    Events only change a value in memory, and a thread draws it. So a slow terminal never delays the run. If
    the terminal is gone, drawing ends and the run continues. A change of size moves the drawn text differently
    in each terminal. So the view then clears the screen and prints the last lines again.

    Args:
        console: A terminal that can move its cursor.
        state: What is known in advance.
        clock: Returns seconds of a monotonic clock.
        times: Whether each line begins with the local time of its event.
        with_errors: Whether standard error is the same terminal; if so, its lines stay above the display.
        frames_per_second: How often the thread draws.
    """

    def __init__(
        self,
        console: Console,
        state: LiveState,
        *,
        clock: Callable[[], float],
        times: bool = False,
        with_errors: bool = False,
        frames_per_second: float = 4.0,
    ) -> None:
        super().__init__(console, state, clock=clock, times=times, refreshes_per_second=frames_per_second)
        self._with_errors = with_errors
        self._pending: deque[str] = deque()
        self._printed: deque[str] = deque(maxlen=REPRINTED_LINES)
        self._size = console.size
        self._frame: list[list[Segment]] = []
        self._live = self._build_live()

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        """Remove the display; the lines stay."""
        super().__exit__(*exception)
        with suppress(OSError):
            self._print_pending()
            self._live.stop()

    def show_interrupt(self, text: str) -> bool:
        """Show a line above the display if standard error is the same terminal."""
        if self._with_errors:
            self._show(text, datetime.now(UTC))
        return self._with_errors

    def build_cleanup(self) -> str:
        """Return the control sequences that remove the display and show the cursor."""
        if self._finished.is_set():
            return SHOW_CURSOR
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (len(self._frame) - 1) + SHOW_CURSOR

    def refresh(self) -> None:
        """Print pending lines, and draw the display if it changed. Only one thread may draw at a time."""
        if self._console.size != self._size:
            self._restart()
        display = LiveDisplay(self._state, self._clock())
        frame = self._console.render_lines(display, pad=False)
        with self._console:
            self._print_pending()
            if frame != self._frame:
                self._frame = frame
                self._live.update(SegmentLines(frame, new_lines=True), refresh=True)

    def _print(self, line: str) -> None:
        self._pending.append(line)

    def _print_pending(self) -> None:
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        self._printed.extend(lines)
        if lines:
            self._console.print(*(wrap_line(line, self._console) for line in lines), sep="\n")

    def _build_live(self) -> Live:
        return Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stderr=self._with_errors
        )

    def _restart(self) -> None:
        """Clear the screen and print the last lines that fit above the display."""
        self._live.stop()
        self._console.clear()
        self._size, self._frame, self._live = self._console.size, [], self._build_live()
        self._live.start()
        free = max(self._size.height - limit_height(self._size.height) - 1, 0)
        rows = [row for line in self._printed for row in wrap_line(line, self._console).split("\n")]
        rows = rows[max(len(rows) - free, 0) :]
        self._console.print(*rows, sep="\n", end="\n" if rows else "")


def choose_view(
    console: Console,
    *,
    name: str,
    epochs: int | None = None,
    times: bool = False,
    live: bool = True,
    asks: bool = False,
) -> RunView:
    """Return a live view, or lines if the console is no terminal that can move its cursor, as in a notebook.

    Args:
        console: Where to show the run.
        name: The name of the run's folder.
        epochs: The planned epochs; None if they are not known.
        times: Whether each line begins with a time.
        live: False: lines also at a terminal.
        asks: Whether a person is asked something meanwhile.
    """
    state = LiveState(name=name, epochs=epochs, opened_at=time.monotonic())
    if not (live and console.is_interactive and console.file.isatty()):
        return LineView(console, state, times=times, with_timer=not asks)
    is_shared = Console(stderr=True).file.isatty()
    return LiveView(console, state, clock=time.monotonic, times=times, with_errors=is_shared)


async def show_events(
    stream: AsyncIterable[events.Event], view: RunView, store: Path
) -> AsyncIterator[events.Event]:
    """Show the events of a run, those of its earlier starts first, and yield each event after it is shown."""
    has_begun = False
    async for event in stream:
        if not (has_begun or isinstance(event, events.RunStarted)):
            view.restore(await _read_earlier_events(store, event.run_id))
        has_begun = True
        view.show_event(event)
        yield event


async def show_run(
    stream: AsyncIterable[events.Event], config: TrainerConfig, *, asks: bool = False
) -> RunSummary:
    """Show a run on standard output until its end, and print its closing lines; returns its summary.

    ``asks``: a person may be asked something meanwhile.
    """
    from reflact.reporting.summary import print_summary

    console = Console(force_jupyter=False)
    name, epochs = config.out_dir.name, config.train.planned_epochs
    try:
        with choose_view(console, name=name, epochs=epochs, asks=asks) as view:
            async for event in show_events(stream, view, config.store or config.out_dir / "run.db"):
                last = event
    except anyio.get_cancelled_exc_class():
        console.print("Interrupted. Run the program again to resume the run.")
        raise
    assert isinstance(last, events.RunFinished)
    print_summary(console, last.summary, find_exports(config.out_dir, last.run_id))
    return last.summary


async def _read_earlier_events(path: Path, run_id: str) -> tuple[events.Event, ...]:
    """Return the durable events of earlier starts; nothing if the store cannot be read."""
    from reflact.store.runs import open_store

    try:
        async with open_store(path) as store:
            return await store.events(run_id)
    except StoreError:
        return ()


def describe_progress(state: LiveState, now: float) -> str:
    """Return a run's progress in one line: active stages with their counts, what is spent, and the estimated rest."""
    place = f"step {state.step}" if state.total_steps is None else f"step {state.step} of {state.total_steps}"
    if state.step <= state.last_committed_step:
        place = f"after {place}"
    parts = [place] if state.step else []
    parts += [f"{name_stage(stage, state)} {_count_parts(stage, now)}" for stage in state.active_stages]
    words = [", ".join(parts) or "starting"]
    if state.spent.calls:
        words.append(format_usage(state.spent))
    if state.failed_calls:
        words.append(f"{name_count(state.failed_calls, 'call')} failed")
    left = state.estimate_seconds_left(now)
    if left is not None:
        words.append(f"about {format_duration(left)} to the last step")
    return f"progress  {'; '.join(words)}"


def _count_parts(stage: StageProgress, now: float) -> str:
    """Return a stage's counts, and its remaining time if it goes on as fast as so far; no less than the last pause.

    Rollouts that were found in the store are named, since they say nothing about the pace.
    """
    elapsed, total, done = max(now - stage.started_at, 0.0), stage.total, stage.done
    if total is None:
        calls = f" ({name_count(stage.calls, 'call')} done)" if stage.calls else ""
        return f"for {format_duration(elapsed)}{calls}"
    counts = f"{done} of {total}{'' if stage.name == 'rollout' else ' rollouts'}"
    notes = [f"{stage.n_from_store:,} from the store"] if stage.n_from_store else []
    made = done - stage.n_at_once
    if 0 < made < total - stage.n_at_once:
        pause = 0.0 if stage.progressed_at is None else now - stage.progressed_at
        notes.append(f"about {format_duration(max(elapsed / made * (total - done), pause))} left")
    return f"{counts} ({', '.join(notes)})" if notes else counts
