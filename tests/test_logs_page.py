"""The page that leads from logs to a critic: its programs print what it says, again and again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from reflact.calibration.config import CalibrateConfig
from reflact.config.loading import load_section

PAGE = (Path(__file__).parent.parent / "docs" / "logs.md").read_text(encoding="utf-8")
PROGRAM, HALF_GOLD = re.findall(r"^```python runnable\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def printed(program: str, folder: Path) -> list[str]:
    """Run a program in a folder and return its lines."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_program_prints_what_the_page_says_and_can_be_run_again(tmp_path: Path) -> None:
    """A second start finds its runs and anchors in the memory, and says the same of them."""
    said = re.search(r"^This prints\n\n((?: {4}.*\n)+)", PAGE, re.MULTILINE)
    expected = [line.strip() for line in said[1].splitlines()]
    first = printed(PROGRAM, tmp_path)
    assert len(first) == len(expected)
    for line, wanted in zip(first, expected, strict=True):
        assert line.startswith(wanted.removesuffix("[...]").rstrip())
    again = printed(PROGRAM, tmp_path)
    assert again[0] == "new to the memory: 0 steps of 100 runs, 0 anchors of 20"
    assert " ".join(PAGE.split()).count(again[0]) == 1
    assert again[1:] == first[1:]


def test_half_gold_prints_what_the_page_says(tmp_path: Path) -> None:
    """What follows of the states before is what the page says."""
    (line,) = printed(HALF_GOLD, tmp_path)
    assert f"It prints `{line}`" in PAGE


def test_the_configuration_of_the_page_is_valid(tmp_path: Path) -> None:
    """Written mistakes and budget are set where the page sets them."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "calibrate.yaml").write_text(text, encoding="utf-8")
    config = load_section(CalibrateConfig, tmp_path / "calibrate.yaml")
    assert config.calibrator.max_asked == 8
    assert config.budget.max_calls == 20_000
