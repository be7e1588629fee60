"""``reflact record`` and ``reflact replay``."""

from __future__ import annotations

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
