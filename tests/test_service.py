"""The example service over real sockets: events of the recorded demo, what was missed, and refused requests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest

from pure_world import rows, settings, write_world

SERVICE = Path(__file__).parents[1] / "examples" / "service.py"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
PATIENCE = 30.0
"""Seconds after which something that was waited for counts as missing."""

pytestmark = pytest.mark.slow


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


class Told(NamedTuple):
    """A server-sent event; ``id`` is None for a live one."""

    id: str | None
    kind: str
    data: Any


def listen(url: str, name: str, after: str | None = None, until: str = "run_finished") -> list[Told]:
    """Hold a connection to a run's events until one of a kind, and return them."""
    headers = {} if after is None else {"last-event-id": after}
    told = []
    with httpx.stream("GET", f"{url}/trainers/{name}/events", headers=headers, timeout=PATIENCE) as response:
        assert response.headers["content-type"] == "text/event-stream"
        for event in read(response.iter_lines()):
            told.append(event)
            if event.kind == until:
                break
    return told


def read(lines: Iterable[str]) -> Iterator[Told]:
    """Yield the events of a stream, comments left out."""
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


def test_a_client_that_leaves_gets_later_what_it_missed(tmp_path: Path) -> None:
    """The recorded demo goes on where its only viewer left; all events come in the log's order, each once."""
    with service(tmp_path) as url:
        assert httpx.get(f"{url}/trainers").json() == ["demo"]
        first = listen(url, "demo", until="step_committed")
        second = listen(url, "demo", after=ids(first)[-1])
        logged = [
            str(event_id)
            for (event_id,) in rows(tmp_path / "demo-run", "SELECT id FROM events ORDER BY sequence")
        ]
        assert ids([*first, *second]) == logged
        assert second[-1].data["summary"]["status"] == "completed"
        for after, missed in ((logged[0], 1), (logged[7], 8), (logged[-1], len(logged)), ("nonsense", 0)):
            told = listen(url, "demo", after=after)
            assert ids(told) == logged[missed:]
            assert told[-1].kind == "run_finished"


def test_requests_name_configured_runs_alone(tmp_path: Path) -> None:
    """Other names, other sites and other hosts get nothing, and nothing starts."""
    config = tmp_path / "run.yaml"
    plain = settings(write_world(tmp_path / "world"), tmp_path / "run")
    config.write_text(json.dumps(plain), encoding="utf-8")
    with service(tmp_path, f"mine={config}") as url:
        for name in ("nothing", "mine=", "..%2Fmine", "%2Fetc%2Fpasswd", quote(str(config), safe="")):
            assert httpx.get(f"{url}/trainers/{name}/events").status_code == 404, name
        for site in ("cross-site", "same-site"):
            answer = httpx.get(f"{url}/trainers/mine/events", headers={"sec-fetch-site": site})
            assert answer.status_code == 403
        assert httpx.get(f"{url}/trainers/mine/events", headers={"host": "rebound.test"}).status_code == 400
        assert httpx.post(f"{url}/trainers/mine/events").status_code == 404
    assert not (tmp_path / "run").exists()
