"""How a command shows a run while it goes on."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from reflact.report.live import Showing


class Shown(StrEnum):
    """What a command shows of a run."""

    live = "live"
    lines = "lines"
    quiet = "quiet"
    json = "json"


Show = Annotated[
    Shown,
    typer.Option(
        metavar="live|lines|quiet|json",
        help="live: a view of the run as it goes on, or lines where there is no terminal; lines: one for "
        "each thing that matters; quiet: only the end; json: events, one a line, and nothing else.",
    ),
]
Times = Annotated[bool, typer.Option("--times", help="Begin each line with the date and the time.")]
Json = Annotated[bool, typer.Option("--json", help="The same as --show json.")]


def chosen(show: Shown, *, as_json: bool) -> Shown:
    """Return what is shown where ``--json`` stands beside ``--show``.

    Raises:
        UsageError: The two contradict each other.
    """
    from reflact.errors import UsageError

    if as_json and show not in {Shown.live, Shown.json}:
        raise UsageError(f"--json and --show {show} contradict each other; leave one of them out")
    return Shown.json if as_json else show


def viewing(
    show: Shown, console: Console, *, name: str, epochs: int | None = None, times: bool = False
) -> Showing:
    """Return the view of a run.

    Args:
        show: What is asked for; ``live`` means lines where standard output is no terminal that can move its
            cursor.
        console: Where it is shown.
        name: What the run is called.
        epochs: How many it has, where that is known.
        times: Whether lines begin with the time.
    """
    import time

    from reflact.report.live import JsonLines, Lines, LiveView, Showing
    from reflact.report.watched import Watched

    if show is Shown.quiet:
        return Showing()
    if show is Shown.json:
        return JsonLines(typer.echo)
    if show is Shown.live and console.is_interactive and sys.stdout.isatty():
        watched = Watched(name=name, epochs=epochs, began=time.monotonic())
        return LiveView(console, watched, clock=time.monotonic, times=times, with_errors=sys.stderr.isatty())
    return Lines(console, times=times)


def tell_interrupt(view: Showing, text: str) -> None:
    """Show what a signal brings about: on standard error, or in a live view of the same terminal."""
    from reflact.cli.interrupts import write_line
    from reflact.report.live import LiveView

    if isinstance(view, LiveView) and view.with_errors:
        view.say(text)
    else:
        write_line(text)
