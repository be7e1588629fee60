"""The benchmark of the gate runs, and deterministic targets are decided as the strict rule decides them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "gate.py"


def test_a_quick_run_of_the_benchmark_misses_nothing(tmp_path: Path) -> None:
    """It ends without a miss, every deterministic sequence equals strict's, and every row has its cells."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--workers", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    equal = re.findall(
        r"^deterministic.*: (\d+) of (\d+) sequences of 8 decisions", done.stdout, re.MULTILINE
    )
    assert equal == [("20", "20")] * 6
    header, rule, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) >= 14
    assert {line.count("|") for line in (header, rule, *rows)} == {16}
