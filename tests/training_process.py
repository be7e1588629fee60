"""The whole of a process that trains, for tests that end it."""

from __future__ import annotations

from typing import Any

import anyio

from reflact import Trainer


def train(config: dict[str, Any]) -> None:
    """Train to the end."""
    summary = anyio.run(Trainer(config).train)
    if summary.status != "completed":
        raise SystemExit(f"{summary.status}: {summary.reason}")
