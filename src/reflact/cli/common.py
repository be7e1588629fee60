"""Options, views, signals and output that several commands share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.protocols import Approver
    from reflact.records import RunSummary
    from reflact.reporting.live import RunView
    from reflact.trainer import Trainer


SIGNALS = (signal.SIGINT, signal.SIGTERM)
IMMEDIATE_SECONDS = 1.0
MARGIN_SECONDS = 2.0
"""Seconds for clean-up after the grace period; then the process ends."""


class _BoundRun(NamedTuple):
    loop: asyncio.AbstractEventLoop
    stop: Callable[[str], None]
    cancel: Callable[[], None]


class InterruptHandler:
    """Handles SIGINT and SIGTERM during a block; use it in the main thread.

    If the event loop does not end in time, a thread ends the process with the exit code of the signal. The
    loop may hang in other code, or in a thread that waits for a person. Stored results are safe.

    Args:
        grace: Seconds in which work under way may finish.
        on_signal: Called with a line about the effect of the first signal. It may interrupt any other code, so
            it must not use locks or buffers.
        build_cleanup: Returns text for standard output before the process is ended, to restore the terminal.

    Attributes:
        exit_code: The exit code of the first signal, 130 or 143; None before any signal.
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
        """Set the functions that stop the run of this event loop with a reason, and that cancel it."""
        self._bound_run = _BoundRun(asyncio.get_running_loop(), stop, cancel)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        first = self.exit_code is None
        name = signal.Signals(number).name
        if first:
            self.exit_code = 128 + number
            self._on_signal(
                f"{name}: work under way may finish for at most {self._grace:g} s (a second {name} ends it at once); "
                "run the same command again to resume"
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
    """Write a line to standard error without buffers, because a signal may have interrupted their use."""
    os.write(2, f"{line}\n".encode())


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
        help="live: a display of the run, or lines if there is no terminal; lines: one line for each "
        "important event; quiet: only the summary; json: only events, one per line.",
    ),
]

TimesOption = Annotated[bool, typer.Option("--times", help="Begin each line with the date and the time.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as --show json.")]


def resolve_show_mode(show: ShowMode, *, as_json: bool) -> ShowMode:
    """Return what to show, given ``--show`` and ``--json``.

    Raises:
        UsageError: The two contradict each other.
    """
    from reflact.errors import UsageError

    if as_json and show not in {ShowMode.live, ShowMode.json}:
        raise UsageError(f"--json and --show {show} contradict each other; leave one of them out")
    return ShowMode.json if as_json else show


def build_view(
    show: ShowMode, console: Console, *, name: str, epochs: int | None = None, times: bool = False
) -> RunView:
    """Build the view of a run.

    Args:
        show: The requested kind. ``live`` falls back to lines if standard output is not a terminal that can
            move its cursor.
        console: Where to print.
        name: The name of the run's folder.
        epochs: The planned number of epochs, if it is known.
        times: Whether lines begin with the time.
    """
    import time

    from reflact.reporting.live import JsonView, LineView, LiveView, RunView
    from reflact.reporting.live_state import LiveState

    if show is ShowMode.quiet:
        return RunView()
    if show is ShowMode.json:
        return JsonView(typer.echo)
    if show is ShowMode.live and console.is_interactive and sys.stdout.isatty():
        state = LiveState(name=name, epochs=epochs, opened_at=time.monotonic())
        return LiveView(console, state, clock=time.monotonic, times=times, with_errors=sys.stderr.isatty())
    return LineView(console, times=times)


def show_interrupt(view: RunView, text: str) -> None:
    """Show the effect of a signal, on standard error or in a live view of the same terminal."""
    from reflact.reporting.live import LiveView

    if isinstance(view, LiveView) and view.with_errors:
        view.show_line(text)
    else:
        write_line(text)


ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A .yaml or .toml file.", show_default=False)
]

OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, such as budget.max_calls=500. Repeatable."
    ),
]

CassetteOption = Annotated[Path, typer.Option(metavar="FILE", help="The recording.", show_default=False)]


def load_trainer_config(path: Path, overrides: Sequence[str] | None) -> TrainerConfig:
    """Return the configuration of a file with overrides.

    Raises:
        ConfigError: The file, a key or a value is wrong.
    """
    from reflact.config.loading import load_config

    return load_config(path, overrides=overrides or ())


def add_cassette_overrides(overrides: Sequence[str] | None, cassette: Path, mode: str) -> list[str]:
    """Return overrides that make a run use a cassette; a relative path counts from the current folder."""
    path = json.dumps(str(cassette.expanduser().absolute()))
    return [*(overrides or ()), f"replay.cassette={path}", f"replay.mode={mode}"]


def train_and_show(
    config: TrainerConfig,
    *,
    show: ShowMode = ShowMode.live,
    times: bool = False,
    approve: Approver | None = None,
) -> None:
    """Run a training to its end and show it; with an approver, show lines instead of a live view.

    Raises:
        typer.Exit: The run did not complete. The code is 1; 2 if no call was answered, for example because a
            key, model or port is wrong; 128 plus the signal's number if a signal stopped it.
    """
    from rich.console import Console

    from reflact.reporting.summary import print_summary
    from reflact.trainer import Trainer

    trainer = Trainer(config, approve=approve)
    console = Console()
    if approve is not None and show is ShowMode.live:
        show = ShowMode.lines
    view = build_view(show, console, name=config.out_dir.name, epochs=config.train.num_epochs, times=times)
    grace, tell = config.train.grace_seconds, partial(show_interrupt, view)
    with InterruptHandler(grace, on_signal=tell, build_cleanup=view.build_cleanup) as interrupts:
        with view:
            summary = _run_training(_RunFollower(trainer, config, view), interrupts)
        if show is not ShowMode.json:
            print_summary(console, summary, config.out_dir)
        if summary.status == "cancelled" and interrupts.exit_code is not None:
            raise typer.Exit(interrupts.exit_code)
    if summary.status != "completed":
        print_error(f"the run ended as {summary.status}: {summary.reason}")
        raise typer.Exit(1 if any(entry.usage.calls for entry in summary.spend) else 2)


def _run_training(follower: _RunFollower, interrupts: InterruptHandler) -> RunSummary:
    import anyio

    from reflact.errors import RunFailed, StoreError

    try:
        anyio.run(follower.follow, interrupts)
    except StoreError as error:
        if not follower.has_begun:
            raise
        raise RunFailed(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupts.exit_code or 130) from None
    if follower.summary is not None:
        return follower.summary
    if interrupts.exit_code is not None:
        raise typer.Exit(interrupts.exit_code)
    raise RunFailed(f"run {follower.run_id} stopped without a summary; start it again to resume")


class _RunFollower:
    """Shows the events of a run and keeps its summary."""

    def __init__(self, trainer: Trainer, config: TrainerConfig, view: RunView) -> None:
        self.has_begun = False
        self.summary: RunSummary | None = None
        self.run_id = trainer.run_id
        self._trainer = trainer
        self._store = config.out_dir / "run.db"
        self._view = view

    async def follow(self, interrupts: InterruptHandler) -> None:
        """Run the training and show each event."""
        import anyio

        from reflact.events import RunFinished, RunStarted
        from reflact.reporting.live import LineView

        with anyio.CancelScope() as scope:
            interrupts.bind(stop=self._trainer.stop, cancel=scope.cancel)
            async with self._trainer.stream() as stream:
                async for event in stream:
                    if isinstance(self._view, LineView) and not (
                        self.has_begun or isinstance(event, RunStarted)
                    ):
                        self._view.restore(await self._read_earlier_events())
                    self.has_begun = True
                    self._view.show_event(event)
                    if isinstance(event, RunFinished):
                        self.summary = event.summary

    async def _read_earlier_events(self) -> tuple[Event, ...]:
        """Return the durable events of earlier starts; nothing if the store cannot be read."""
        from reflact.errors import StoreError
        from reflact.store.runs import open_store

        try:
            async with open_store(self._store) as store:
                return await store.events(self.run_id)
        except StoreError:
            return ()


def print_error(text: str, details: Sequence[str] = ()) -> None:
    """Print an error, and its details below it, to standard error."""
    from reflact.reporting.lines import escape_line

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
        _redirect_to_null()


def guard_callback(on_event: Callable[[T], None]) -> Callable[[T], None]:
    """Return a callback that ignores a broken pipe."""

    def call(event: T) -> None:
        with ignore_broken_pipe():
            on_event(event)

    return call


def _redirect_to_null() -> None:
    """Redirect standard output and standard error to the null device if nobody reads them."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(null, stream.fileno())
    os.close(null)
