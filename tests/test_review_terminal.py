"""``reflact train --review`` at a real terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reflact.cli.app import app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals"),
]

DEMO = Path(__file__).parent.parent / "fixtures" / "demo" / "demo.yaml"
MAIN = "from reflact.cli import main; main()"


def reviewed(out_dir: Path, answers: Sequence[str]) -> tuple[int, str]:
    """Run the recorded demo under review in a pseudo-terminal, and return its exit code and what it said."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "train", str(DEMO), "--review", "--set", f"out_dir={out_dir}"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    said, waiting = "", list(answers)
    while True:
        try:
            chunk = os.read(ours, 65536).decode(errors="replace")
        except OSError:
            break
        if not chunk:
            break
        asked_before = said.count("take it?")
        said += chunk
        for _ in range(said.count("take it?") - asked_before):
            os.write(ours, (waiting.pop(0) + "\n").encode())
    os.close(ours)
    return process.wait(60), said


def test_a_person_approves_candidates(tmp_path: Path) -> None:
    """Each candidate that the gate would accept is shown with its diff; approved ones are taken."""
    code, said = reviewed(tmp_path / "run", ["y", ""])
    assert code == 0
    assert said.count("take it?") == 2
    assert "+++ after" in said
    assert (tmp_path / "run" / "skills" / "v0002.md").exists()


def test_a_person_vetoes_with_a_reason(tmp_path: Path) -> None:
    """Any other answer keeps the candidate out, and the reason stands in the record."""
    code, said = reviewed(tmp_path / "run", ["y", "too narrow"])
    assert code == 2
    assert "holds no answer" in said
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "2"], prog_name="reflact")
    assert "Vetoed: too narrow" in shown.output
    assert not (tmp_path / "run" / "skills" / "v0002.md").exists()


def test_review_needs_a_terminal(tmp_path: Path) -> None:
    """Without a terminal there is nobody to ask, and nothing is started."""
    result = CliRunner().invoke(
        app, ["train", str(DEMO), "--review", "--set", f"out_dir={tmp_path / 'run'}"], prog_name="reflact"
    )
    assert result.exit_code == 2
    assert "asks at a terminal" in result.output
    assert not (tmp_path / "run").exists()
