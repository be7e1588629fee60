"""What `reflact calibrate` prints at its end: its books, and tables at a narrow terminal."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from calibration_reports import everything
from reflact.calibration.report import CalibrationReport, PurposeUsage
from reflact.cli.calibrate_output import print_calibration, print_calibration_spend
from reflact.records import Spend, Usage
from test_calibrate_cli import configured, flattering, record, reflact


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
