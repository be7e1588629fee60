"""The benchmarks of the schedule, of a provider in chaos and of attacks print what the docs say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HANGS = 600
"""Seconds after which a benchmark hangs; none takes as long on an idle machine."""

FOLDER = Path(__file__).parent.parent / "benchmarks"


def run(folder: Path, name: str, *arguments: str) -> str:
    """Run a benchmark in a folder and return its output."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_slots_change_how_long_a_run_takes_and_nothing_else(tmp_path: Path) -> None:
    """The schedule is exact: with more slots each workload is faster, and its records are the same bytes."""
    rows = [line.split("|") for line in run(tmp_path, "schedule.py").splitlines() if line.startswith("|")][1:]
    for few, many in zip(rows[::2], rows[1::2], strict=True):
        assert few[1] == many[1]
        assert few[-2] == many[-2]
        assert float(many[3].split()[0]) < float(few[3].split()[0])
    strict = [float(row[3].split()[0]) for row in rows if row[1].startswith(" strict")]
    assert strict[0] <= 13
    assert strict[1] <= 8


def test_a_run_in_chaos_ends_as_a_calm_one(tmp_path: Path) -> None:
    """Scores and skills are those of the calm run, streams are complete, and each fault is counted by kind.

    Four kinds come in each 20 requests, whatever the chance of the mock provider, which others wrote.
    """
    printed = run(tmp_path, "chaos.py", "--short")
    calm, chaos = re.findall(r"^(?:calm|chaos): completed after 1 steps in .*?; (.*)$", printed, re.MULTILINE)
    assert calm == chaos
    assert "best val 0.375" in calm
    table, streams = printed.split("streamed calls:")
    counted = {kind: int(n) for kind, n in re.findall(r"^\| (.+?) \| \d+ \| (\d+) \|$", table, re.MULTILINE)}
    assert all(counted[kind] >= 2 for kind in ("malformed", "reset", "timeout", "truncated")), counted
    assert "| broken stream |" in streams


def test_attacks_change_nothing_silently(tmp_path: Path) -> None:
    """In a short form of every campaign each case ends as the undisturbed run or with one sentence."""
    rows = [line.split("|") for line in run(tmp_path, "attack.py", "--short").splitlines()]
    counts = {row[1].strip(): [int(cell) for cell in row[2:6]] for row in rows[2:]}
    assert counts.keys() == {"kills", "corruptions", "cancellations", "ten trainers"}
    for cases, alike, refused, wrong in counts.values():
        assert cases == alike + refused > 0
        assert wrong == 0
