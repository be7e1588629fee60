"""``reflact train``."""

from __future__ import annotations

from reflact.cli.running import Config, JsonLines, Overrides, configured, train_and_show


def train(config: Config, overrides: Overrides = None, as_json: JsonLines = False) -> None:
    """Train a skill, or go on with the run that the configuration describes.

    A run that was stopped goes on where it was; what it has paid for is not asked again.
    """
    train_and_show(configured(config, overrides), as_json=as_json)
