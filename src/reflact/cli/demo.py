"""``reflact demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from reflact.cli.calibrate import calibrate_and_show
from reflact.cli.common import (
    ShowMode,
    ShowOption,
    TimesOption,
    add_cassette_overrides,
    load_trainer_config,
    train_and_show,
)


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
