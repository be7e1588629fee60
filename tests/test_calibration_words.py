"""What a calibration's results are called is the same at the terminal and on the page."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from calibration_reports import everything
from html_page import read
from reflact.calibration.report import (
    METRIC_DESCRIPTIONS,
    describe_gain,
    describe_outcome,
    describe_tests_left,
    format_number,
)
from reflact.cli.calibrate_output import print_calibration
from reflact.records import IntervalEstimate
from reflact.reporting.html.calibration import render_calibration_page


def shown() -> tuple[str, str]:
    """Return what a terminal and what a page show of one report, each on one line and typeset alike."""
    out = io.StringIO()
    print_calibration(Console(file=out, width=200), everything())
    page = read(render_calibration_page(everything())).text
    return tuple(
        " ".join(text.replace("−", "-").replace("\N{NO-BREAK SPACE}", " ").split())
        for text in (out.getvalue(), page)
    )


def test_outcomes_figures_and_changes_have_one_name() -> None:
    """Every outcome, every figure's name with its values, and every change stands in both, rounded alike."""
    report, both = everything(), shown()
    before, after, gain = report.held_out.before, report.held_out.after, report.held_out.gain
    assert before is not None
    assert after is not None
    assert gain is not None
    said = [describe_outcome(test) for test in report.tests]
    said += [name for name, _, _ in METRIC_DESCRIPTIONS]
    said += [
        f"the error {describe_gain(gain)}",
        format_number(before.error.value),
        format_number(after.error.value),
    ]
    assert [(one, [one in text for text in both]) for one in said] == [(one, [True, True]) for one in said]


def test_the_headline_has_the_figures_of_its_table() -> None:
    """Before and after are those of the table, over the same steps; what is averaged otherwise says so."""
    terminal, page = shown()
    change = report_change()
    assert f"mean absolute error {change[0]} -> {change[1]}" in terminal
    assert f"mean absolute error went from {change[0]} to {change[1]}; averaged within each trace it" in page


def report_change() -> tuple[str, str]:
    """Return the errors before and after, as they are shown."""
    before, after = everything().held_out.before, everything().held_out.after
    assert before is not None
    assert after is not None
    return format_number(before.error.value), format_number(after.error.value)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((1.204, 0.8, 1.6), "fell by 1.20 points [0.80, 1.60]"),
        ((-0.5, -0.75, 0.25), "rose by 0.50 points [-0.25, 0.75]"),
        ((0.0, 0.0, 0.0), "did not change"),
        ((-0.0004, -0.0004, 0.0), "rose by 0.00 points [0.00, 0.00]"),
    ],
)
def test_a_change_is_said_by_its_direction(gain: tuple[float, float, float], words: str) -> None:
    """An error falls or rises by a positive number, and nothing is minus zero."""
    value, low, high = gain
    assert describe_gain(IntervalEstimate(value=value, low=low, high=high)) == words


def test_what_tests_leave_is_said() -> None:
    """One batch, or several, with the level of the next."""
    assert describe_tests_left(1).startswith(
        "1 batch was tested on these held-out traces: another one passes at p of at most"
    )
    assert describe_tests_left(2).startswith("2 batches were tested")
