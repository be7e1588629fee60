"""``reflact replay``."""

from __future__ import annotations

from reflact.cli.running import (
    CassetteOption,
    ConfigArgument,
    OverrideOption,
    add_cassette_overrides,
    load_trainer_config,
    train_and_show,
)
from reflact.cli.showing import JsonOption, ShowMode, ShowOption, TimesOption, resolve_show_mode


def replay(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    cassette: CassetteOption,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    as_json: JsonOption = False,
    times: TimesOption = False,
) -> None:
    """Train from a cassette; the network is never asked.

    A request that the cassette lacks ends the run and names what differs.
    """
    settings = load_trainer_config(config, add_cassette_overrides(overrides, cassette, "replay"))
    train_and_show(settings, show=resolve_show_mode(show, as_json=as_json), times=times)
