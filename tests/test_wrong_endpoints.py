"""Endpoints that cannot work, from a terminal: one message that names what to change, after few requests."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from served import asked_of, configured, send, serving

pytestmark = pytest.mark.slow

CONCURRENCY = 3


def trained(folder: Path, url: str, *settings: str, key: str | None = None) -> Result:
    """Train against an address; ``key`` is what REFLACT_TEST_KEY holds."""
    chosen = (f"models.target.concurrency={CONCURRENCY}", *settings)
    arguments = ["train", str(configured(folder, url)), *(part for s in chosen for part in ("--set", s))]
    return CliRunner().invoke(app, arguments, env={"REFLACT_TEST_KEY": key}, prog_name="reflact")


def assert_one_message(result: Result, *words: str) -> None:
    """Check that a run failed with one message that holds the words; the exit code says if a call is booked."""
    is_booked = "interrupted call" in result.output
    assert result.exit_code == (1 if is_booked else 2), result.output
    assert result.stderr.startswith(("error: the run ended as failed: ", "error: the run ended as budget: "))
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


class Refusing:
    """Refuses every request, and counts them."""

    def __init__(self, status: int, body: dict[str, object]) -> None:
        self.requests = 0
        self._status = status
        self._body = body

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Refuse a request."""
        self.requests += 1
        asked_of(handler)
        send(handler, {"error": self._body}, self._status)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key(tmp_path: Path, status: int) -> None:
    """A key that is refused ends the run within a request for each worker, and the variable is named."""
    refusing = Refusing(status, {"message": "Incorrect API key provided: sk-of-nobody."})
    with serving(refusing.answer) as url:
        done = trained(tmp_path, url, "models.target.api_key_env=REFLACT_TEST_KEY", key="sk-of-nobody")
    assert_one_message(done, f"({status})", "set REFLACT_TEST_KEY to a valid key", "models.target")
    assert "sk-of-nobody" not in done.output
    assert refusing.requests <= CONCURRENCY


def test_calls_that_are_booked_are_no_free_failure(tmp_path: Path) -> None:
    """If calls were cut off, and may cost something, the exit code is not the one for a run that paid nothing."""
    over = threading.Event()
    with serving(lambda _: over.wait(60) and None) as url:
        try:
            done = trained(tmp_path, url, "models.target.timeout=1")
        finally:
            over.set()
    assert done.exit_code == 1, done.output
    assert "did not answer within 1 seconds" in done.stderr


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        (
            {"message": "The model `small` does not exist.", "code": "model_not_found"},
            "",
            ("small", "set models.target.model"),
        ),
        ({"message": "Not Found"}, "/chat", ()),
    ],
    ids=["an unknown model", "an address without an API"],
)
def test_what_an_endpoint_does_not_have(
    tmp_path: Path, body: dict[str, object], path: str, words: tuple[str, ...]
) -> None:
    """A model that it does not serve, or a path that it does not know, ends the run as soon, and is named."""
    refusing = Refusing(404, body)
    with serving(refusing.answer) as url:
        done = trained(tmp_path, url + path)
    assert_one_message(done, "models.target", "(404)", *words, *([url + path] if path else []))
    assert refusing.requests <= CONCURRENCY


def test_a_port_where_nobody_listens(tmp_path: Path) -> None:
    """A closed port is told by its address and the key to change."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        assert_one_message(trained(tmp_path, url), url, "cannot be reached", "check models.target.base_url")
