"""A run against a mock provider that others wrote, with a third of the requests failing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "chaos.py"
CERTAIN = ("malformed", "reset", "timeout", "truncated")
"""The kinds that come in each 20 requests, whatever the mock provider's own chance does."""


def test_a_run_in_chaos_ends_as_a_calm_one(tmp_path: Path) -> None:
    """Scores and skills are those of the calm run, streams are whole, and each fault is counted by kind."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--short"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calm, chaos = re.findall(
        r"^(?:calm|chaos): completed after 1 steps in .*?; (.*)$", done.stdout, re.MULTILINE
    )
    assert calm == chaos
    assert "best val 0.375" in calm
    run, streams = done.stdout.split("streamed calls:")
    counted = {
        kind: int(count) for kind, count in re.findall(r"^\| (.+?) \| \d+ \| (\d+) \|$", run, re.MULTILINE)
    }
    assert all(counted[kind] >= 2 for kind in CERTAIN), counted
    assert "| broken stream |" in streams
