"""The service of examples/service.py in a process of its own, and a provider that can be held up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import doubles
import pure_server
from pure_world import settings, write_world
from served import asked_of, send, serving

SERVICE = Path(__file__).parents[1] / "examples" / "service.py"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
PATIENCE = 30.0
"""Seconds after which something that was waited for counts as missing."""


class Provider:
    """A provider that streams where it is asked to, and may stop just before the end of an answer.

    Args:
        holds: The beginning of the samples whose answers wait before their end until ``released`` is set.
        hostile: What every proposed edit says in its second line.

    Attributes:
        held: Is set when an answer waits.
        asked: The samples that were asked for, in order.
    """

    def __init__(self, *, holds: str | None = None, hostile: str = "") -> None:
        self._holds = holds
        self._hostile = hostile
        self.held = threading.Event()
        self.released = threading.Event()
        self.asked: list[str] = []

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        body, call_id = asked_of(handler), str(handler.headers["x-sample"])
        self.asked.append(call_id)
        text = self._said(body, call_id)
        if not body.get("stream"):
            self._may_hold(call_id)
            send(handler, pure_server.completion(body, text))
            return
        pieces = doubles.stream(text)
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for piece in pieces[:-3]:
            handler.wfile.write(piece)
        handler.wfile.flush()
        self._may_hold(call_id)
        handler.wfile.write(b"".join(pieces[-3:]))

    def _said(self, body: dict[str, Any], call_id: str) -> str:
        text = pure_server.answer(body, call_id, spoiled=None)
        if not self._hostile or '"edits"' not in text:
            return text
        reply = json.loads(text)
        for edit in reply["edits"]:
            edit["content"] += f"\n{self._hostile}"
        return json.dumps(reply)

    def _may_hold(self, call_id: str) -> None:
        if self._holds is not None and call_id.startswith(self._holds) and not self.released.is_set():
            self.held.set()
            self.released.wait(PATIENCE)


@contextmanager
def configured(folder: Path, provider: Provider) -> Iterator[Path]:
    """Write a world and a configuration of a short run in it, for a provider that answers meanwhile."""
    world = write_world(folder / "world", train=6)
    off = {"enabled": False}
    with serving(provider) as url:
        config = settings(
            world,
            folder / "run",
            url=url.removesuffix("/v1"),
            train={"num_epochs": 1, "batch_size": 3, "accumulation": 1},
            slow_update=off,
            meta_skill=off,
            appendix=off,
        )
        path = folder / "run.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        try:
            yield path
        finally:
            provider.released.set()


@contextmanager
def service(folder: Path, *arguments: object) -> Iterator[str]:
    """Run the service in a folder for the length of the block; gives its address."""
    command = [sys.executable, str(SERVICE), "--port", "0", "--delay", "0", *map(str, arguments)]
    log: list[str] = []
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        try:
            address = next((found[0] for line in lines if (found := ADDRESS.search(line))), None)
            assert address, "the service did not start"
            copying = threading.Thread(target=log.extend, args=(lines,))
            copying.start()
            yield address
        finally:
            process.terminate()
            process.wait(PATIENCE)
        copying.join()
    assert [line for line in log if not line.startswith("INFO")] == []


def seconds_until_free(folder: Path) -> float:
    """Wait until nobody holds a run's folder and return how long that took."""
    import fcntl

    began = time.monotonic()
    with (folder / "run.lock").open("rb") as lock:
        waiting = threading.Thread(target=fcntl.flock, args=(lock, fcntl.LOCK_EX), daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive(), "the run is still under way"
    return time.monotonic() - began
