"""``reflact record`` and ``reflact replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from reflact.cli.calibrate import calibrate_and_show
from reflact.cli.common import (
    CassetteOption,
    ConfigArgument,
    JsonOption,
    OverrideOption,
    ShowMode,
    ShowOption,
    TimesOption,
    add_cassette_overrides,
    load_trainer_config,
    resolve_show_mode,
    train_and_show,
)


def record(
    config: ConfigArgument,
    cassette: CassetteOption,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
) -> None:
    """Train and record each response in a cassette."""
    train_and_show(
        load_trainer_config(config, add_cassette_overrides(overrides, cassette, "record")),
        show=show,
        times=times,
    )


def replay(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    cassette: CassetteOption,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    as_json: JsonOption = False,
    times: TimesOption = False,
) -> None:
    """Train from a cassette, without network.

    If the cassette lacks a request, the run ends and reflact prints the difference.
    """
    settings = load_trainer_config(config, add_cassette_overrides(overrides, cassette, "replay"))
    train_and_show(settings, show=resolve_show_mode(show, as_json=as_json), times=times)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the run.")] = Path("demo-run"),
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Replay a recorded round of calibration instead.")
    ] = False,
) -> None:
    """Replay a recorded training run.

    The demo needs no key and no network.
    """
    from reflact.errors import ConfigError
    from reflact.prompts import find_data_folder

    if calibrate:
        memory = out / "memory.db"
        if memory.exists():
            raise ConfigError(
                f"{memory} exists, but the recording starts with an empty memory; choose another --out"
            )
        calibrate_and_show(
            find_data_folder("calibration") / "calibrate.yaml",
            [f"memory={json.dumps(str(memory))}"],
            show=ShowMode.quiet if show is ShowMode.live else show,
            html=out / "calibration.html",
        )
        return
    folder = find_data_folder("demo")
    overrides = add_cassette_overrides(
        [f"out_dir={json.dumps(str(out))}"], folder / "cassette.jsonl", "replay"
    )
    train_and_show(load_trainer_config(folder / "demo.yaml", overrides), show=show, times=times)
