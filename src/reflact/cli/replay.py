"""``reflact replay``."""

from __future__ import annotations

from reflact.cli.running import (
    Cassette,
    Config,
    JsonLines,
    Overrides,
    configured,
    train_and_show,
    with_cassette,
)


def replay(
    config: Config, cassette: Cassette, overrides: Overrides = None, as_json: JsonLines = False
) -> None:
    """Train from a cassette; the network is never asked.

    A request that the cassette lacks ends the run and names what differs.
    """
    train_and_show(configured(config, with_cassette(overrides, cassette, "replay")), as_json=as_json)
