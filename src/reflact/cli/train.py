"""``reflact train``."""

from __future__ import annotations

from typing import Annotated

import typer

from reflact.cli.forecast import print_cost_estimate
from reflact.cli.running import ConfigArgument, OverrideOption, load_trainer_config, train_and_show
from reflact.cli.showing import JsonOption, ShowMode, ShowOption, TimesOption, resolve_show_mode


def train(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    as_json: JsonOption = False,
    times: TimesOption = False,
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
    from reflact.cli.review import create_approver

    settings = load_trainer_config(config, [*(overrides or ()), *(["fork=true"] if fork else [])])
    if dry_run:
        print_cost_estimate(settings)
        return
    shown = resolve_show_mode(show, as_json=as_json)
    train_and_show(settings, show=shown, times=times, approve=create_approver() if review else None)
