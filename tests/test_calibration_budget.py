"""A calibration whose budget is too small: what is said when it stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_calibrate_cli import configured, flattering, one_line, record, reflact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with traces to learn from and others that are held out."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    return tmp_path


def test_the_command_says_what_is_kept_and_goes_on(folder: Path) -> None:
    """When its budget is spent it says what is kept, and the same command goes on."""
    with flattering() as (url, asked):
        path, small = configured(folder, url), ("--set", "budget.max_calls=30")
        stopped = reflact(path, *small)
        again = one_line(reflact(path, "--dry-run").stdout)
        whole = reflact(path)
        assert len(set(asked)) == len(asked)
    assert stopped.exit_code == 1
    *_, kept, error = stopped.stderr.splitlines()
    assert kept.startswith(
        "stopped in round 1, with 6 of its 6 traces done, 6 pairs made in all, and batches"
    )
    assert "the answers of the 30 calls that were paid for are in the store" in kept
    assert "goes on with the test of round 1" in kept
    assert error.startswith("error: budget.max_calls is 30: 30 are used")
    assert "was begun and stopped: it goes on from there" in again
    assert whole.exit_code == 0, whole.output


def test_one_that_cannot_begin_says_so(folder: Path) -> None:
    """Without any call nothing is done, and that is what is said."""
    with flattering() as (url, asked):
        stopped = reflact(configured(folder, url), "--set", "budget.max_calls=0", "--show", "quiet")
        assert asked == []
    assert (
        "stopped before the first round: no call was answered, so there is nothing to keep" in stopped.stderr
    )
