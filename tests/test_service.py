"""The example service over real sockets and in a browser: events, cancellation, and refused requests."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest

import doubles
import pure_server
from pure_world import rows, settings, write_world
from reflact import Trainer
from reflact.config.loading import load_config
from served import asked_of, send, serving

SERVICE = Path(__file__).parents[1] / "examples" / "service.py"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
PATIENCE = 30.0
"""Seconds after which something that was waited for counts as missing."""

HELD = "optimizer/analyst_failure/step=2/"
LOG = "SELECT key FROM outcomes WHERE kind = 'event' ORDER BY rowid"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="waits for a lock of the folder with flock"),
]


class Provider:
    """A provider that streams on request.

    Args:
        holds: The beginning of the call ids whose answers wait before their end until ``released`` is set.
    """

    def __init__(self, *, holds: str | None = None) -> None:
        self._holds = holds
        self.held = threading.Event()
        self.released = threading.Event()
        self.asked: list[str] = []

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
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
        if call_id.startswith("target/"):  # the keys of rollouts hold the port, by which no answer may differ
            call_id = "target/"
        return pure_server.answer(body, call_id, spoiled=None)

    def _may_hold(self, call_id: str) -> None:
        if self._holds is not None and call_id.startswith(self._holds) and not self.released.is_set():
            self.held.set()
            self.released.wait(PATIENCE)


@contextmanager
def configured(folder: Path, provider: Provider) -> Iterator[Path]:
    """Write a world and a configuration of a short run in it, for a provider that answers meanwhile."""
    world = write_world(folder / "world", train=6)
    off = {name: {"enabled": False} for name in ("slow_update", "meta_skill", "appendix")}
    train = {"num_epochs": 1, "batch_size": 3, "accumulation": 1}
    with serving(provider) as url:
        config = settings(world, folder / "run", url=url.removesuffix("/v1"), train=train, **off)
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
    told = [line for line in log if not line.startswith("INFO")]
    assert [line for line in told if "were cut off at models.target.max_tokens (64)" not in line] == []


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


class Told(NamedTuple):
    """A server-sent event; ``id`` is None for a live one."""

    id: str | None
    kind: str
    data: Any


@contextmanager
def listening(url: str, name: str, after: str | None = None) -> Iterator[Iterator[Told]]:
    """Hold a connection to a run's events for the length of the block."""
    headers = {} if after is None else {"last-event-id": after}
    with httpx.stream("GET", f"{url}/trainers/{name}/events", headers=headers, timeout=PATIENCE) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        yield read(response.iter_lines())


def read(lines: Iterable[str]) -> Iterator[Told]:
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield Told(fields.get("id"), fields["event"], json.loads(fields["data"]))
            fields = {}


def ids(told: Iterable[Told]) -> list[str]:
    return [event.id for event in told if event.id is not None]


def logged(folder: Path) -> list[str]:
    return [str(event_id) for (event_id,) in rows(folder, LOG)]


def unbroken(config: Path, folder: Path) -> list[str]:
    """Train without a service and return the ids of the stored events."""
    asyncio.run(Trainer(load_config(config, overrides=[f"out_dir={folder}"])).train())
    return logged(folder)


def until(events: Iterator[Told], kind: str) -> Iterator[Told]:
    for event in events:
        yield event
        if event.kind == kind:
            return


def test_leaving_cancels_the_run_and_coming_back_goes_on(tmp_path: Path) -> None:
    provider = Provider(holds=HELD)
    with configured(tmp_path, provider) as config, service(tmp_path, f"mine={config}") as url:
        with listening(url, "mine") as events:
            first = list(until(events, "step_committed"))
            assert provider.held.wait(PATIENCE)
        assert seconds_until_free(tmp_path / "run") < 3
        assert rows(tmp_path / "run", "SELECT status FROM runs") == (("cancelled",),)
        asked = len(provider.asked)
        provider.released.set()
        with listening(url, "mine", after=ids(first)[-1]) as events:
            second = list(events)
        assert not [call_id for call_id in provider.asked[asked:] if "/step=1/" in call_id]
        whole = unbroken(config, tmp_path / "unbroken")
    assert second[-1].data["summary"]["status"] == "completed"
    assert ids([*first, *second]) == whole == logged(tmp_path / "run")


def test_what_was_missed_is_told_again(tmp_path: Path) -> None:
    with configured(tmp_path, Provider()) as config, service(tmp_path, f"mine={config}") as url:
        with listening(url, "mine") as events:
            whole = ids(events)
        for after, missed in ((whole[0], 1), (whole[7], 8), (whole[-1], len(whole)), ("nonsense", 0)):
            with listening(url, "mine", after=after) as events:
                told = list(events)
            assert ids(told) == whole[missed:]
            assert told[-1].kind == "run_finished"


def test_requests_name_configured_runs_alone(tmp_path: Path) -> None:
    with configured(tmp_path, Provider()) as config, service(tmp_path, f"mine={config}") as url:
        for name in ("nothing", "mine=", "..%2Fmine", "%2Fetc%2Fpasswd", quote(str(config), safe="")):
            assert httpx.get(f"{url}/trainers/{name}/events").status_code == 404, name
        for site in ("cross-site", "same-site"):
            answer = httpx.get(f"{url}/trainers/mine/events", headers={"sec-fetch-site": site})
            assert answer.status_code == 403
        assert httpx.get(f"{url}/trainers/mine/events", headers={"host": "rebound.test"}).status_code == 400
        assert httpx.post(f"{url}/trainers/mine/events").status_code == 404
    assert not (tmp_path / "run").exists()
