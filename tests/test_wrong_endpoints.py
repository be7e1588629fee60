"""Endpoints that cannot work, from a terminal: one message that names what to change, after few requests."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from served import configured, serving

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


def test_a_port_where_nobody_listens(tmp_path: Path) -> None:
    """A closed port is told by its address and the key to change."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        assert_one_message(trained(tmp_path, url), url, "cannot be reached", "check models.target.base_url")
