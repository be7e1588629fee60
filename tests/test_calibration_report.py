"""The report of a calibration at a terminal, on a page, and as one short line."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from calibration_reports import everything
from html_page import read
from reflact.calibration.report import (
    METRIC_DESCRIPTIONS,
    describe_gain,
    format_number,
    list_test_lines,
)
from reflact.cli.calibrate_output import print_calibration
from reflact.records import IntervalEstimate
from reflact.reporting.html.calibration import render_calibration_page


def shown() -> tuple[str, str]:
    """Return what a terminal and what a page show of one report, each on one line."""
    out = StringIO()
    print_calibration(Console(file=out, width=200), everything())
    page = read(render_calibration_page(everything())).text
    return " ".join(out.getvalue().split()), " ".join(page.split())


def test_outcomes_figures_and_changes_have_one_name() -> None:
    """Every outcome, every figure's name with its values, and every change stands in both, rounded alike."""
    report, both = everything(), shown()
    before, after, gain = report.held_out.before, report.held_out.after, report.held_out.gain
    assert gain is not None
    said = list(list_test_lines(report))
    said += [name for name, _, _ in METRIC_DESCRIPTIONS]
    said += [
        f"the error {describe_gain(gain)}",
        format_number(before.error.value),
        format_number(after.error.value),
    ]
    assert [(one, [one in text for text in both]) for one in said] == [(one, [True, True]) for one in said]


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
