"""``reflact train``."""

from __future__ import annotations

from typing import Annotated

import typer

from reflact.cli.forecast import print_forecast
from reflact.cli.running import Config, Overrides, configured, train_and_show
from reflact.cli.showing import Json, Show, Shown, Times, chosen


def train(  # noqa: PLR0917 - one for each option of the command
    config: Config,
    overrides: Overrides = None,
    show: Show = Shown.live,
    as_json: Json = False,
    times: Times = False,
    review: Annotated[
        bool, typer.Option("--review", help="Show each candidate that the gate would accept, and ask.")
    ] = False,
    fork: Annotated[
        bool,
        typer.Option("--fork", help="Start a changed run beside the one in out_dir; what matches is reused."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what it will take, and call nothing.")
    ] = False,
) -> None:
    """Train a skill, or go on with the run that the configuration describes.

    A run that was stopped goes on where it was; what it has paid for is not asked again.
    """
    from reflact.cli.review import asking

    settings = configured(config, [*(overrides or ()), *(["fork=true"] if fork else [])])
    if dry_run:
        print_forecast(settings)
        return
    shown = chosen(show, as_json=as_json)
    train_and_show(settings, show=shown, times=times, approve=asking() if review else None)
