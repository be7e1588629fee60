"""``reflact calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reflact.cli.common import ConfigArgument, OverrideOption, ShowMode


def calibrate(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    overrides: OverrideOption = None,
    show: Annotated[
        ShowMode | None,
        typer.Option(
            metavar="live|lines|quiet|json",
            help="lines or live: one line for each important event, on standard error; quiet: only "
            "the report; json: only events, one per line, the last one with the report. Default: "
            "lines, or quiet with --json.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also write the report as a page.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the number of calls; call no model, write nothing."),
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Make pairs even if nothing can be tested yet.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Make and test further pairs of the same traces, even if nothing has changed.",
        ),
    ] = False,
) -> None:
    """Calibrate a critic from recorded traces.

    The command makes contrast pairs from the traces, promotes pairs that help the critic, and
    measures the critic before and after. A stopped calibration resumes and repeats no finished
    call.
    """
    from reflact.cli import calibrate_run  # here, because the start of other commands is waited for

    settings = calibrate_run.load_calibrate_config(config, overrides)
    if dry_run:
        calibrate_run.estimate_and_show(settings, as_json=as_json)
    else:
        calibrate_run.calibrate_and_show(
            settings, show=show, as_json=as_json, html=html, anyway=anyway, again=again
        )
