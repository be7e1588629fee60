"""Views of a run while it goes on: JSON, a line for each event, or such lines above a display."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Self

import anyio
from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.rule import Rule
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from reflact import events
from reflact.config.training import TrainerConfig
from reflact.errors import StoreError
from reflact.records import RunSummary
from reflact.reporting import facts
from reflact.reporting.progress import LiveFile, RunProgress, list_draft_parts
from reflact.reporting.terminal import print_summary, wrap_line
from reflact.store.artifacts import find_exports
from reflact.store.runs import open_store
from reflact.text import MINUTE, escape_controls, format_duration, name_count

SHOW_CURSOR = "\x1b[?25h"

# A line on the progress comes after so many seconds without a line.
PROGRESS_SECONDS = 30.0

REASON_LABELS = {"version_returned": "return", "training_stopped": "stop", "step_retried": "retry"}

LABEL_WIDTH = 12

# Joiners and variation selectors: terminals disagree about the width of joined characters.
JOINERS = re.compile("[\u200c\u200d\ufe0e\ufe0f]")


# ------------------------------------------------------------------------------------------- lines


class EventLines:
    """Words events as lines. A step has one line, once it is committed.

    Repeated pauses of one endpoint have one line in each step.
    """

    def __init__(self) -> None:
        self._step: dict[str, object] = {}
        self._reports: list[bool] = []
        self._pauses: set[tuple[str, int | None]] = set()

    def format_event(self, event: events.Event) -> str | None:
        """Return the line of an event; None if the event has no line."""
        match event:
            case events.StepStarted():
                self._step = {}
                self._reports = []
                self._pauses.clear()
            case events.RolloutsFinished():
                self._step |= {"n_items": event.n, "n_failures": event.failures}
            case events.AnalystReported():
                self._reports.append(event.report.no_reply_reason is None)
            case events.EditsApplied():
                self._step["results"] = event.results
            case events.CandidateJudged():
                self._step["verdict"] = event.verdict
            case events.StepCommitted():
                committed = event.model_dump(include={"step", "epoch", "action"})
                versions = {"current": event.current, "best": event.best}
                counts = {"n_analysts": len(self._reports)}
                counts["n_unanswered"] = self._reports.count(False)
                parts = {**self._step, **committed, **versions, **counts}
                return facts.StepFact.model_validate(parts).line
            case events.RateLimited() if (event.endpoint, event.status) not in self._pauses:
                self._pauses.add((event.endpoint, event.status))
                return _describe_pause(event)
        return _describe_event(event)

    def format_resume(self, earlier: Iterable[events.Event]) -> str | None:
        """Return how far earlier starts of the run came; None if they committed nothing."""
        line = None
        for event in earlier:
            self.format_event(event)
            if isinstance(event, events.StepCommitted):
                steps = name_count(event.step, "committed step")
                line = f"run {event.run_id} resumes after {steps}"
            elif isinstance(event, events.BaselineMeasured):
                line = f"run {event.run_id} resumes before its first committed step"
        return line


def _describe_pause(event: events.RateLimited) -> str:
    if event.status is None:
        return f"retry     {event.endpoint} cannot be reached; trying again"
    rate = "" if event.rate is None else f", then {event.rate:.3g} calls/s"
    wait = format_duration(event.seconds)
    return f"limit     {event.endpoint} answered {event.status}; waiting {wait}{rate}"


def _describe_event(event: events.Event) -> str | None:
    line: str | None = None
    match event:
        case events.RunStarted(n_train=train, n_val=val, n_test=test, steps_per_epoch=n):
            steps = name_count(n, "step")
            items = f"{train} train, {val} val, {test} test items"
            line = f"run {event.run_id}: {items}; {steps} per epoch"
        case events.GatePowerEstimated():
            rollouts = name_count(event.rollouts, "rollout")
            line = f"gate      {event.description} A decision takes at most {rollouts}."
        case events.NullAnswersGraded() if event.warning is not None:
            line = f"warning   {event.warning}"
        case events.BaselineMeasured():
            line = f"baseline  val {event.score:.3f} on {name_count(event.n, 'item')}"
            if event.trials > 1:
                line += f", rolled out {event.trials} times, since answers may differ"
        case events.FallbackUsed():
            line = f"fallback  {facts.describe_fallback(event.fallback, is_short=True)}"
        case events.EpochCommitted():
            line = facts.describe_epoch(event)
        case events.VersionReturned() | events.TrainingStopped() | events.StepRetried():
            line = f"{REASON_LABELS[event.kind]:<10}{event.reason}"
        case events.PromotionJudged():
            line = f"promotion {facts.ACTION_WORDS[event.verdict.action]}: {event.verdict.reason}"
        case events.TestSplitOpened():
            openings = name_count(event.count, "opening")
            line = f"test      the sealed test split is opened ({openings} in this run)"
        case events.WarningIssued():
            line = f"warning   {event.message}"
    return line


# ------------------------------------------------------------------------------------- the display


def render_display(progress: RunProgress, console: Console, now: float) -> list[list[Segment]]:
    """Return the lines of the state of a run, in at most five eighths of the console's height.

    The most important rows come first; what does not fit is cut at the bottom. The end of the
    newest partial reply fills the rest.
    """
    options = console.options
    height = max(1, min(options.size.height - 1, options.size.height * 5 // 8))
    options = options.update(width=max(options.max_width - 2, 1))
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(width=LABEL_WIDTH - 1, style="dim", no_wrap=True, overflow="crop")
    grid.add_column(ratio=1, no_wrap=True, overflow="crop")
    for row in progress.list_rows(now):
        text = _escape(row.text, options.encoding).replace("\n", " ")
        style = "yellow" if row.is_alarm else ""
        grid.add_row(row.label, Text(text, style))
    content = Group(_build_title(progress, now, options), grid)
    lines = console.render_lines(content, options, pad=False)
    if progress.draft_event is not None:
        text = "\n".join(list_draft_parts(progress.draft))
        draft = render_draft(text, console, options, height=height - len(lines))
        lines += console.render_lines(Group(*draft), options, pad=False)
    return lines[:height]


def _build_title(progress: RunProgress, now: float, options: ConsoleOptions) -> Rule:
    run_id = "" if progress.plan is None else f" {progress.plan.run_id}"
    times = f"  {_format_clock(now - progress.opened_at)}"
    left = progress.estimate_seconds_left(now)
    if left is not None:
        times += f", about {format_duration(left)} left"
    name = _escape(progress.name, options.encoding).replace("\n", " ")
    title = Text(name + run_id, no_wrap=True)
    title.truncate(max(options.max_width - len(times) - 6, 0), overflow="crop")
    title.append(times)
    title.truncate(max(options.max_width - 6, 0), overflow="crop")
    line = "-" if options.ascii_only else "─"
    return Rule(title, align="left", style="dim", characters=line)


def render_draft(
    text: str, console: Console, options: ConsoleOptions, *, height: int
) -> list[Text]:
    """Return the end of a partial reply in at most ``height`` lines, without control characters."""
    width = options.max_width - 2
    if height < 2 or width < 8:
        return []
    shown = _escape(text[-width * height :], options.encoding)
    lines = [line for line in shown.splitlines() if line.strip()]
    wrapped = Text("\n".join(lines)).wrap(console, width)
    return [Text("  ") + line for line in list(wrapped)[-height:]]


def _escape(text: str, encoding: str) -> str:
    """Return untrusted text that a terminal with an encoding can show, without joined letters."""
    separate = JOINERS.sub("", escape_controls(text)).replace("\t", "    ")
    return separate.encode(encoding, "backslashreplace").decode(encoding)


def _format_clock(seconds: float) -> str:
    """Return elapsed time in complete seconds, as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(max(int(seconds), 0), MINUTE)
    hours, minutes = divmod(minutes, MINUTE)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --------------------------------------------------------------------------------------- the views


class RunView:
    """Shows a run for the length of a ``with`` block. This base class shows nothing.

    Meanwhile records of the logger ``reflact`` reach only handlers of the program, since the view
    shows warnings.
    """

    def __enter__(self) -> Self:
        self._handler = logging.NullHandler()
        logging.getLogger("reflact").addHandler(self._handler)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("reflact").removeHandler(self._handler)

    def restore(self, earlier: Iterable[events.Event]) -> None:
        """Take the durable events of earlier starts."""

    def show_event(self, event: events.Event) -> None:
        """Show an event."""

    def show_interrupt(self, text: str) -> bool:
        """Show the effect of a signal without locks or buffers; return whether this view can."""
        return False

    def build_cleanup(self) -> str:
        """Return the control sequences that clean the terminal if the process exits at once."""
        return ""


class JsonView(RunView):
    """Writes each event as one line of JSON in ASCII, which every terminal and pipe can take."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def show_event(self, event: events.Event) -> None:
        """Write an event."""
        self._write(event.model_dump_json(ensure_ascii=True))


class LineView(RunView):
    """Prints a line for each event that matters, and one on the progress after a silence.

    With ``times``, each line begins with the local time of its event.
    """

    progress_seconds = PROGRESS_SECONDS

    def __init__(
        self,
        console: Console,
        progress: RunProgress | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        times: bool = False,
    ) -> None:
        self._console = console
        self._clock = clock
        self._progress = progress or RunProgress(opened_at=clock())
        self._lock = Lock()
        self._times = times
        self._event_lines = EventLines()
        self._printed_at = clock()

    def restore(self, earlier: Iterable[events.Event]) -> None:
        """Restore the state of the run, and print how far it came."""
        earlier = tuple(earlier)
        self._show(self._event_lines.format_resume(earlier), datetime.now(UTC))
        with self._lock:
            self._progress.restore(earlier)

    def show_event(self, event: events.Event) -> None:
        """Update the state, and print the line of the event, or the progress after a silence."""
        now = self._clock()
        with self._lock:
            self._progress.update(event, now)
        line = self._event_lines.format_event(event)
        if line is None and now - self._printed_at >= self.progress_seconds:
            line = self._progress.describe(now)
        self._show(line, event.at)

    def _show(self, line: str | None, at: datetime) -> None:
        if line is not None:
            self._printed_at = self._clock()
            stamp = f"{at.astimezone():%Y-%m-%d %H:%M:%S} " if self._times else ""
            self._print(escape_controls(stamp + line))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LiveView(LineView):
    """Prints the same lines above a display of the current state.

    Events only change a value in memory, and a thread draws it. So a slow terminal never delays the
    run. ``with_errors``: standard error is the same terminal, so its lines stay above the display.
    """

    progress_seconds = math.inf  # the display shows it

    def __init__(
        self,
        console: Console,
        progress: RunProgress,
        *,
        clock: Callable[[], float],
        times: bool = False,
        with_errors: bool = False,
        frames_per_second: float = 4.0,
    ) -> None:
        super().__init__(console, progress, clock=clock, times=times)
        self._with_errors = with_errors
        self._seconds_per_frame = 1 / frames_per_second
        self._pending: deque[str] = deque()
        self._frame: list[list[Segment]] = []
        self._finished = Event()
        self._thread = Thread(target=self._draw_often, name="reflact-view", daemon=True)
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stderr=with_errors
        )

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        """Remove the display; the lines stay."""
        super().__exit__(*exception)
        self._finished.set()
        self._thread.join()
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

    def draw(self) -> None:
        """Print pending lines, and draw the display if it changed; only one thread may do so."""
        with self._lock:
            frame = render_display(self._progress, self._console, self._clock())
        with self._console:
            self._print_pending()
            if frame != self._frame:
                self._frame = frame
                self._live.update(SegmentLines(frame, new_lines=True), refresh=True)

    def _draw_often(self) -> None:
        with suppress(OSError):  # the terminal is gone, and the run continues
            while not self._finished.wait(self._seconds_per_frame):
                self.draw()

    def _print(self, line: str) -> None:
        self._pending.append(line)

    def _print_pending(self) -> None:
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if lines:
            self._console.print(*(wrap_line(line, self._console) for line in lines), sep="\n")


def choose_view(
    console: Console,
    *,
    name: str,
    epochs: int | None = None,
    times: bool = False,
    live: bool = True,
) -> RunView:
    """Return a live view, or lines if the console cannot move its cursor, as in a notebook.

    Without ``live``, a terminal gets lines too, as while a person is asked.
    """
    progress = RunProgress(name=name, epochs=epochs, opened_at=time.monotonic())
    if not (live and console.is_interactive and console.file.isatty()):
        return LineView(console, progress, times=times)
    is_shared = Console(stderr=True).file.isatty()
    return LiveView(console, progress, clock=time.monotonic, times=times, with_errors=is_shared)


async def show_events(
    stream: AsyncIterable[events.Event], view: RunView, store: Path
) -> AsyncIterator[events.Event]:
    """Show the events of a run, those of its earlier starts first, and yield each afterwards.

    Meanwhile a file beside the store has the live ones, for the pages of ``reflact serve``.
    """
    live_file: LiveFile | None = None
    try:
        async for event in stream:
            if live_file is None:
                live_file = LiveFile(store, event.run_id)
                if not isinstance(event, events.RunStarted):
                    # The run itself will say why its store cannot be read.
                    with suppress(StoreError):
                        async with open_store(store) as opened:
                            view.restore(await opened.events(event.run_id))
            live_file.update(event)
            view.show_event(event)
            yield event
    finally:
        if live_file is not None:
            live_file.remove()


async def show_run(
    stream: AsyncIterable[events.Event], config: TrainerConfig, *, asks: bool = False
) -> RunSummary:
    """Show a run on standard output until its end, print its closing lines, and return its summary.

    If a person may be asked something meanwhile, lines are shown.
    """
    console = Console(force_jupyter=False)
    name = config.out_dir.name
    try:
        with choose_view(
            console, name=name, epochs=config.train.planned_epochs, live=not asks
        ) as view:
            async for event in show_events(stream, view, config.store or config.out_dir / "run.db"):
                last = event
    except anyio.get_cancelled_exc_class():
        console.print("Interrupted. Run the program again to resume the run.")
        raise
    assert isinstance(last, events.RunFinished)
    print_summary(console, last.summary, find_exports(config.out_dir, last.run_id))
    return last.summary
