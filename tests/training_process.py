"""The whole of a process that trains, for tests that end it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx

from reflact import Trainer
from reflact.errors import RunConflict

REFUSED, STOPPED = 3, 4
"""Exit codes of a process whose run has another owner, and of one whose run did not complete."""


class ToPort(httpx.AsyncHTTPTransport):
    """Sends every request to a port of this machine, so that a run's identity does not hold the port."""

    def __init__(self, port: int) -> None:
        super().__init__(limits=httpx.Limits(max_connections=None))
        self._port = port

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return await super().handle_async_request(request)


def train_below(folder: Path, config: dict[str, Any], port: int) -> None:
    """Train with a folder as the current one, from which a relative ``out_dir`` counts."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    train(config, port)


def train(config: dict[str, Any], port: int) -> None:
    async def main() -> None:
        async with ToPort(port) as transport:
            try:
                summary = await Trainer(config, transport=transport).train()
            except RunConflict:
                raise SystemExit(REFUSED) from None
        if summary.status != "completed":
            sys.stderr.write(f"{summary.status}: {summary.reason}\n")
            raise SystemExit(STOPPED)

    anyio.run(main)
