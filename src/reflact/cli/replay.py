"""``reflact replay``."""

from __future__ import annotations

from reflact.cli.running import (
    Cassette,
    Config,
    Overrides,
    configured,
    train_and_show,
    with_cassette,
)
from reflact.cli.showing import Json, Show, Shown, Times, chosen


def replay(  # noqa: PLR0917 - one for each option of the command
    config: Config,
    cassette: Cassette,
    overrides: Overrides = None,
    show: Show = Shown.live,
    as_json: Json = False,
    times: Times = False,
) -> None:
    """Train from a cassette; the network is never asked.

    A request that the cassette lacks ends the run and names what differs.
    """
    settings = configured(config, with_cassette(overrides, cassette, "replay"))
    train_and_show(settings, show=chosen(show, as_json=as_json), times=times)
