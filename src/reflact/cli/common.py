"""Options, views, signals and output that several commands share."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar

import anyio
import typer

from reflact.errors import (
    AccessDenied,
    BudgetSpent,
    EnvironmentFailure,
    ModelError,
    RunFailed,
    StoreError,
)
from reflact.text import escape_line

if TYPE_CHECKING:
    from rich.console import Console

    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.protocols import Approver
    from reflact.records import RunSummary
    from reflact.reporting.items import ItemMatrix
    from reflact.reporting.live import RunView
    from reflact.trainer import Trainer

# Seconds for clean-up after a second signal; then the process ends.
IMMEDIATE_SECONDS = 2.0

# Ctrl-C, the end of a service or a container, and a closed terminal.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)

# Seconds for clean-up after the grace period; then the process ends.
MARGIN_SECONDS = 5.0

_BoundRun = tuple[asyncio.AbstractEventLoop, Callable[[str], None], Callable[[], None]]


SIGNAL_NAMES = {"SIGINT": "Ctrl-C"}

# Signals in words, for those who did not send them by name.
STOP_CAUSES = {"SIGHUP": "the end of its terminal"}


class InterruptHandler:
    """Handles SIGINT, SIGTERM and SIGHUP during a block; use it in the main thread.

    Work under way may finish for ``grace`` seconds. If the event loop does not end in time, a
    thread ends the process: the loop may hang in other code, or wait for a person. Stored results
    are safe. The view shows the effects of the first and the second signal; without a view they are
    lines on standard error.

    Attributes:
        exit_code: The exit code of the first signal: 130, 143 or 129; None before any signal.
    """

    def __init__(self, grace: float, view: RunView | None = None) -> None:
        self.exit_code: int | None = None
        self._was_repeated = False
        self._grace = grace
        self._view = view
        self._bound_run: _BoundRun | None = None
        self._terminals: list[int] = []
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        for number in STOP_SIGNALS:
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
        """Set the functions that stop the run of this event loop, and that cancel it."""
        self._bound_run = asyncio.get_running_loop(), stop, cancel

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        first = self.exit_code is None
        signal_name = signal.Signals(number).name
        name = SIGNAL_NAMES.get(signal_name, signal_name)
        self._leave_lost_terminals()
        if first:
            self.exit_code = 128 + number
            self._show(
                f"{name}: work under way may finish for at most {self._grace:g} s (a second {name} "
                "ends it at once); run the same command again to resume"
            )
        elif not self._was_repeated:
            self._was_repeated = True
            self._show(f"{name} again: the run ends at once; finished calls are stored")
        self._exit_after(self._grace + MARGIN_SECONDS if first else IMMEDIATE_SECONDS)
        if self._bound_run is None:
            raise KeyboardInterrupt
        loop, stop, cancel = self._bound_run
        with suppress(RuntimeError):  # the loop is closed, and the process about to end
            loop.call_soon_threadsafe(
                partial(stop, f"stopped by {STOP_CAUSES.get(signal_name, name)}")
                if first
                else cancel
            )

    def _leave_lost_terminals(self) -> None:
        """Discard what is written to a terminal that has been closed."""
        for stream in self._terminals:
            if not os.isatty(stream):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, stream)
                os.close(null)

    def _show(self, line: str) -> None:
        """Show a line without locks and buffers, whose use the signal may have interrupted."""
        if self._view is None or not self._view.show_interrupt(line):
            os.write(2, f"{line}\n".encode())

    def _exit_after(self, seconds: float) -> None:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._exit_process)
        timer.daemon = True
        timer.start()

    def _exit_process(self) -> None:
        if self._view is not None:
            os.write(1, self._view.build_cleanup().encode())
        os._exit(self.exit_code or 1)


class ShowMode(StrEnum):
    """How a command shows a run."""

    live = "live"
    lines = "lines"
    quiet = "quiet"
    json = "json"


ShowOption = Annotated[
    ShowMode,
    typer.Option(
        metavar="live|lines|quiet|json",
        help="live: a live view of the run, or lines if there is no terminal; lines: one line for "
        "each important event; quiet: only the summary; json: only events, one per line.",
    ),
]

TimesOption = Annotated[
    bool, typer.Option("--times", help="Begin each line with the date and the time.")
]


def build_view(
    show: ShowMode,
    console: Console,
    *,
    name: str,
    epochs: int | None = None,
    times: bool = False,
    asks: bool = False,
) -> RunView:
    """Build the view of a run, with the name of its folder and its planned epochs."""
    from reflact.reporting.live import JsonView, RunView, choose_view

    if show is ShowMode.quiet:
        return RunView()
    if show is ShowMode.json:
        return JsonView(guard_callback(typer.echo))
    live = show is ShowMode.live and not asks
    return choose_view(console, name=name, epochs=epochs, times=times, live=live)


ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A .yaml or .toml file.", show_default=False)
]

OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, such as budget.max_calls=500. Repeatable.",
    ),
]


ItemsOption = Annotated[
    bool, typer.Option("--items", help="List what the target answered to each item.")
]

ChangedOption = Annotated[bool, typer.Option("--changed", help="Only items whose score differs.")]

WrongOption = Annotated[bool, typer.Option("--wrong", help="Only items that are not solved.")]

TaskTypeOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only items of this task type.", show_default=False),
]

CsvOption = Annotated[bool, typer.Option("--csv", help="Print the items as CSV.")]


class ItemFilter(NamedTuple):
    """Which items a command shows."""

    changed: bool = False
    wrong: bool = False
    task_type: str | None = None


def print_matrix_items(
    matrix: ItemMatrix,
    chosen: ItemFilter,
    *,
    as_table: bool = False,
    as_json: bool = False,
    as_csv: bool = False,
) -> None:
    """Print the chosen items of a matrix: with their texts, as a table, as JSON or as CSV."""
    from rich.console import Console

    from reflact.reporting.terminal import print_items, print_matrix

    shown = matrix.select(**chosen._asdict())
    if as_csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(shown.list_csv_rows())
        typer.echo(text.getvalue(), nl=False)
    elif as_json:
        typer.echo(shown.model_dump_json(ensure_ascii=True))
    elif as_table:
        print_matrix(Console(), shown, len(matrix.rows))
    else:
        print_items(Console(), shown)
        typer.echo(matrix.describe_outcomes())


def load_trainer_config(path: Path, overrides: Sequence[str] | None) -> TrainerConfig:
    """Return the configuration of a file with overrides.

    Modules that it names as ``module:name`` are also looked for in the file's folder, last.
    """
    from reflact.config.loading import load_config

    config = load_config(path, overrides=overrides or ())
    folder = str(path.resolve().parent)
    names = (config.target.kind, config.environment.name, *config.search.sources)
    if any(":" in name for name in names) and folder not in sys.path:
        sys.path.append(folder)
    return config


def train_and_show(
    config: TrainerConfig,
    *,
    show: ShowMode = ShowMode.live,
    times: bool = False,
    approve: Approver | None = None,
) -> None:
    """Run a training to its end and show it; with an approver, show lines instead of a live view.

    Raises:
        typer.Exit: The run did not complete. The code is 1; 2 if no call was booked, for example
            because a key, model or port is wrong; 128 plus the signal's number if a signal stopped
            it.
    """
    from reflact.reporting.terminal import print_summary
    from reflact.store.artifacts import find_exports
    from reflact.trainer import Trainer

    trainer = Trainer(config, approve=approve)
    console = open_console()
    name = config.out_dir.name
    epochs = config.train.planned_epochs
    asks = approve is not None
    view = build_view(show, console, name=name, epochs=epochs, times=times, asks=asks)
    store = (config.store or config.out_dir / "run.db").absolute()
    with InterruptHandler(config.train.grace_seconds, view) as interrupts:
        try:
            with view:
                summary = anyio.run(_follow_run, trainer, store, view, interrupts)
        except (KeyboardInterrupt, SystemExit) as error:
            if interrupts.exit_code is None:
                raise RunFailed(
                    f"code of yours raised {error!r:.200}, which ended the run; let it raise "
                    "another exception, and run the same command again to resume"
                ) from None
            raise typer.Exit(interrupts.exit_code) from None
        if summary is None and interrupts.exit_code is None:
            raise RunFailed(
                f"run {trainer.run_id} stopped without a summary; start it again to resume"
            )
        if summary is not None and show is not ShowMode.json:
            print_summary(console, summary, find_exports(config.out_dir, summary.run_id))
        if summary is None or (summary.status == "cancelled" and interrupts.exit_code is not None):
            raise typer.Exit(interrupts.exit_code or 1)
    if summary.status != "completed":
        is_read = show is not ShowMode.json and _is_shared_output()
        cause = "; the cause is above" if is_read else f": {summary.reason}"
        print_error(f"the run ended as {summary.status}{cause}")
        raise typer.Exit(choose_exit_code(summary))


def choose_exit_code(summary: RunSummary) -> int:
    """Return the exit code of a run that did not complete: 2 if no call may have been charged."""
    is_paid = any(entry.usage.calls or entry.unsettled for entry in summary.spend)
    return 1 if is_paid else 2


def _is_shared_output() -> bool:
    """Whether standard output and standard error are read together."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        return True
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # a stream is no file
        return False


class PaidCalls:
    """Notes whether a measurement sends calls that may be charged, from its events."""

    def __init__(self) -> None:
        self._answered = set[int]()
        self._open = set[int]()

    def observe(self, event: Event) -> None:
        """Note the calls of the run so far."""
        from reflact.events import BudgetUpdated

        if isinstance(event, BudgetUpdated):
            self._answered.add(event.usage.calls)
            self._open.add(event.worst_case.calls)

    @contextmanager
    def exit_if_none(self) -> Iterator[None]:
        """End the command with code 2 on an error before any call that may be charged."""
        try:
            yield
        except (ModelError, RunFailed, EnvironmentFailure, BudgetSpent) as error:
            # A refused key cancels the calls beside it, which would be refused as well.
            is_open = len(self._open) > 1 and not isinstance(error, AccessDenied)
            if is_open or len(self._answered) > 1:
                raise
            print_error(str(error))
            raise typer.Exit(2) from None


async def _follow_run(
    trainer: Trainer, store: Path, view: RunView, interrupts: InterruptHandler
) -> RunSummary | None:
    """Run the training, show each event, and return the summary if the run reached its end."""
    from reflact.events import RunFinished
    from reflact.reporting.live import show_events

    has_begun = False
    summary = None
    try:
        with anyio.CancelScope() as scope:
            interrupts.bind(stop=trainer.stop, cancel=scope.cancel)
            async with trainer.stream() as stream:
                async for event in show_events(stream, view, store):
                    has_begun = True
                    if isinstance(event, RunFinished):
                        summary = event.summary
    except StoreError as error:
        if not has_begun:
            raise
        raise RunFailed(str(error)) from None
    return summary


def print_error(text: str, details: Sequence[str] = ()) -> None:
    """Print an error, and its details below it, to standard error."""
    for line in (f"error: {text}", *details):
        typer.echo(escape_line(line), err=True)


T = TypeVar("T")


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """End the block silently if the reader of its output has gone.

    Later output is discarded, so that the exit of the process raises no error either.
    """
    try:
        yield
    except BrokenPipeError:
        discard_output()


def open_console() -> Console:
    """Return a console on standard output that is silent after its reader has gone."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            discard_output()  # rich would end the process with code 1

    return PipeConsole()


def discard_output() -> None:
    """Discard what is written from now on to standard streams that cannot be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)


def guard_callback(on_event: Callable[[T], None]) -> Callable[[T], None]:
    """Return a callback that ignores a broken pipe."""
    return ignore_broken_pipe()(on_event)
