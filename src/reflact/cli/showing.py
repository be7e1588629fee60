"""Options and views that show a run while it trains."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from reflact.reporting.live import RunView


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
    from reflact.cli.interrupts import write_line
    from reflact.reporting.live import LiveView

    if isinstance(view, LiveView) and view.with_errors:
        view.show_line(text)
    else:
        write_line(text)
