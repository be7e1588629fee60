"""What `reflact calibrate` prints at its end: its books, and tables at a narrow terminal."""

from __future__ import annotations

import io
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from calibrate_command import configured, flattering, record, reflact
from calibration_reports import everything
from html_page import read
from reflact.calibration.report import (
    METRIC_DESCRIPTIONS,
    CalibrationReport,
    PurposeUsage,
    describe_gain,
    describe_outcome,
    describe_tests_left,
    format_number,
)
from reflact.cli.calibrate_output import print_calibration, print_calibration_spend
from reflact.records import IntervalEstimate, Spend, Usage
from reflact.reporting.html.calibration import render_calibration_page


def printed_books(before: Spend, after: Spend) -> list[str]:
    """Return what is printed of two looks at the books."""
    out = StringIO()
    print_calibration_spend(Console(file=out, width=200), [before], [after])
    return [line.strip() for line in out.getvalue().splitlines()]


def booked(calls: int, *, unsettled: int, at_risk: int) -> Spend:
    """Return books of some calls, some of them in flight."""
    return Spend(
        role="critic",
        purpose="score",
        usage=Usage(calls=calls, input_tokens=calls),
        unsettled=unsettled,
        worst_case=Usage(input_tokens=at_risk),
    )


def test_what_another_process_had_in_flight_leaves_nothing_negative() -> None:
    """Calls that were open at the first look and are settled at the second are no risk of this start."""
    lines = printed_books(booked(10, unsettled=8, at_risk=800), booked(30, unsettled=6, at_risk=600))
    assert lines == [
        "paid by all starts: 30 calls, 30 tokens in, 0 out; at most 600 tokens more for 6 interrupted calls",
        "paid by this start: 20 calls, 20 tokens in, 0 out",
    ]


def test_what_was_paid_is_written_like_other_figures() -> None:
    """Thousands are separated in the books as everywhere else in the report."""
    nothing = booked(0, unsettled=0, at_risk=0)
    lines = printed_books(nothing, booked(1234, unsettled=1000, at_risk=56789))
    assert lines[1] == (
        "paid by this start: 1,234 calls, 1,234 tokens in, 0 out; at most 56,789 tokens more for 1,000 "
        "interrupted calls"
    )


def test_who_never_answers_is_named() -> None:
    """Pairs that a mute judge lost look misjudged, so it is said that it gave no valid reply."""
    asked = [
        PurposeUsage(role="judge", purpose="compare", n_questions=12, n_unanswered=12),
        PurposeUsage(role="contrast", purpose="mistake", n_questions=12, n_unanswered=11),
    ]
    out = StringIO()
    report = everything().model_copy(update={"usage_by_purpose": tuple(asked)})
    print_calibration(Console(file=out, width=200), report)
    said = [line for line in out.getvalue().splitlines() if line.startswith("None of the")]
    assert len(said) == 1
    assert said[0].startswith("None of the 12 questions of judge, compare, got a valid reply")


def test_a_narrow_terminal_loses_no_figure(tmp_path: Path) -> None:
    """At 60 columns figures are wrapped and not cut."""
    record(tmp_path / "learn", 2)
    record(tmp_path / "held out", 3)
    with flattering() as (url, _):
        result = reflact(configured(tmp_path, url), "--anyway", "--json")
    assert result.exit_code == 0, result.output
    out = StringIO()
    print_calibration(Console(file=out, width=60), CalibrationReport.model_validate_json(result.stdout))
    assert "constant" in out.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()


# ---------- calibration words


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
