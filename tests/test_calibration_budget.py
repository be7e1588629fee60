"""A calibration and its budget: whether it will hold, and what is said where it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reflact.calibration.affording import afforded
from reflact.calibration.forecast import CalibrationForecast
from reflact.config import BudgetConfig
from reflact.estimates import Amount, Row
from reflact.results import Spend, Usage
from test_calibrate_cli import configured, flattering, one_line, record, reflact

TAKEN = (Spend(role="critic", purpose="score", usage=Usage(calls=200, input_tokens=900, output_tokens=100)),)


def foreseen(*, resumed: bool = False, over: bool = False, usd: float | None = None) -> CalibrationForecast:
    """Return a forecast of 500 to 3,000 calls, of which 1,000 are expected, of ten tokens each."""
    calls = Amount(low=500, expected=1000, high=3000)
    tokens = calls * Amount(low=5, expected=5, high=5)
    money = None if usd is None else calls * Amount(low=usd, expected=usd, high=usd)
    row = Row(role="critic", purpose="p", calls=calls, input_tokens=tokens, output_tokens=tokens, usd=money)
    return CalibrationForecast(
        rows=(row,),
        assumptions=(),
        learn=1,
        held_out=20,
        steps=20,
        anchors=0,
        candidates=Amount(),
        pairs=Amount(),
        rounds=Amount(),
        tests=Amount(),
        testable=True,
        outlook="",
        resumed=resumed,
        over=over,
    )


@pytest.mark.parametrize(
    ("limit", "resumed", "words"),
    [
        (3200, False, "budget.max_calls is 3,200, and 200 are taken: it will hold, since at most 3,000"),
        (3199, False, "it should hold, since 1,000 are expected; at most 3,000 may be needed"),
        (1199, False, "it will not do, since 1,000 are expected and 999 are left; .* such as 1,200 or more"),
        (1199, True, "budget.max_calls is 1,199: it should hold, since 1,000 are expected"),
    ],
    ids=["holds", "should hold", "will not do", "goes on"],
)
def test_calls_are_compared(limit: int, resumed: bool, words: str) -> None:
    """What was taken before comes on top, unless it was taken by this calibration, which counts it."""
    (said,) = afforded(foreseen(resumed=resumed), BudgetConfig(max_calls=limit), TAKEN)
    assert re.search(words, said), said


def test_each_limit_has_its_sentence() -> None:
    """Tokens, money and time too; no price means no word on money, and one that is over takes nothing."""
    limits = BudgetConfig(max_tokens=5000, max_usd=20, max_seconds=60)
    tokens, money, seconds = afforded(foreseen(usd=0.01), limits, ())
    assert tokens.startswith("budget.max_tokens is 5,000: it will not do, since 10,000 are expected")
    assert money.startswith("budget.max_usd is $20.00: it should hold, since $10.00 are expected")
    assert "max_seconds is 60: whether that holds is not known" in seconds
    assert len(afforded(foreseen(), limits, ())) == 2
    assert afforded(foreseen(over=True), limits, ()) == ()
    assert afforded(foreseen(), BudgetConfig(), ()) == ()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with traces to learn from and others that are held out."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    return tmp_path


def test_the_command_says_it_before_and_what_is_done_after(folder: Path) -> None:
    """Too small a budget is told by the dry run; where it stops it says what is kept, and it goes on."""
    with flattering() as (url, asked):
        path, small = configured(folder, url), ("--set", "budget.max_calls=30")
        before = one_line(reflact(path, "--dry-run", *small).stdout)
        stopped = reflact(path, *small)
        again = one_line(reflact(path, "--dry-run").stdout)
        whole = reflact(path)
        assert len(set(asked)) == len(asked)
    assert "budget.max_calls is 30: it will not do" in before
    assert stopped.exit_code == 1
    *_, kept, error = stopped.stderr.splitlines()
    assert kept.startswith(
        "stopped in round 1, with 6 of its 6 traces done, 6 pairs made in all, and batches"
    )
    assert "the answers of the 30 calls that were paid for are in the store" in kept
    assert "goes on with the test of round 1" in kept
    assert error.startswith("error: budget.max_calls is 30: 30 are taken")
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
