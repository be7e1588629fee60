"""The examples that need no model run as they stand, and show what they say they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_critic_learns_beside_its_agent(tmp_path: Path) -> None:
    """The critic believes the claim on the first desk and counts on the last one."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "agent_with_critic.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    first, last, learned = done.stdout.splitlines()
    assert first == "desk 0: 2 of 10 letters are filed; the critic says 9"
    assert last == "desk 90: 2 of 10 letters are filed; the critic says 2"
    assert learned.startswith("90 traces were taken, ")
