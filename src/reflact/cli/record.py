"""``reflact record``."""

from __future__ import annotations

from reflact.cli.running import (
    CassetteOption,
    ConfigArgument,
    OverrideOption,
    add_cassette_overrides,
    load_trainer_config,
    train_and_show,
)
from reflact.cli.showing import ShowMode, ShowOption, TimesOption


def record(
    config: ConfigArgument,
    cassette: CassetteOption,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
) -> None:
    """Train against the live endpoint and write every response to a cassette."""
    train_and_show(load_trainer_config(config, add_cassette_overrides(overrides, cassette, "record")), show=show, times=times)
