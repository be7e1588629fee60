"""The benchmark of promotion runs and prints its whole table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "promotion.py"


def test_a_quick_run_of_the_benchmark_prints_every_row(tmp_path: Path) -> None:
    """Harmful batches are out and those that help fully are in already with a few seeds."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--workers", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    promoted = {row[1].strip(): row[5].strip() for row in rows}
    assert len(rows) == 11
    assert (promoted["harmful"], promoted["helpful, all"]) == ("0.0%", "100.0%")
