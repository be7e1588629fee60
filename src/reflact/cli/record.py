"""``reflact record``."""

from __future__ import annotations

from reflact.cli.running import Cassette, Config, Overrides, configured, train_and_show, with_cassette
from reflact.cli.showing import Show, Shown, Times


def record(
    config: Config,
    cassette: Cassette,
    overrides: Overrides = None,
    show: Show = Shown.live,
    times: Times = False,
) -> None:
    """Train against the live endpoint and write every response to a cassette."""
    train_and_show(configured(config, with_cassette(overrides, cassette, "record")), show=show, times=times)
