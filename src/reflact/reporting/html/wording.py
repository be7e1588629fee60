"""What a calibration came to, in plain sentences. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from reflact.calibration import report as words
from reflact.calibration.report import CalibrationReport, MetricsChange, describe_outcome
from reflact.memory.models import PromotionEvidence
from reflact.records import IntervalEstimate
from reflact.reporting.html.page import escape_invisible, format_count, format_number, typeset_numbers

VerdictTone = Literal["better", "worse", "even"]

DROP_MEANINGS = {
    "unverified": "There is neither a label nor a critic whose samples could agree on what is right.",
    "disagreement": "The critic's samples lie too far apart to say what is right.",
    "not_applicable": "The step does not lend itself to this mistake within the round's distances.",
    "not_confirmed": "Samples do not bear out that the evaluation is wrong for the other purpose.",
    "bad_reply": "The model gave no valid mistaken evaluation, asked again or not.",
    "too_long": "The prompt exceeds the model's context.",
    "known": "The memory held this pair before.",
    "duplicate": "An earlier candidate of the round gave the same pair, or speaks of an equal step.",
    "judged_wrong": "Too few blind comparisons found the right side.",
    "decided_by_position": "Comparisons followed the side on which an evaluation stood.",
}
"""Why a candidate became no pair, in words."""


class CalibrationVerdict(NamedTuple):
    """What a calibration came to: a sentence, what else has to be known, and which way it went."""

    headline: str
    notes: tuple[str, ...]
    tone: VerdictTone


def build_verdict(report: CalibrationReport) -> CalibrationVerdict:
    """Return what was promoted and what that changed, or why nothing was."""
    if not report.tests:
        reason = "" if report.not_tested_reason is None else f": {escape_invisible(report.not_tested_reason)}"
        headline = f"No batch was tested, so nothing was promoted{reason}."
    elif not report.n_promoted:
        headline = _describe_rejected_tests(report.tests)
    else:
        pairs = format_count(report.n_promoted, "pair was", "pairs were")
        headline = f"{pairs} promoted{_describe_change(report.held_out)}."
    return CalibrationVerdict(headline=headline, notes=tuple(_list_notes(report)), tone=_choose_tone(report))


def format_outcome(test: PromotionEvidence) -> str:
    """Return how a test ended."""
    return escape_invisible(describe_outcome(test))


def describe_drop_reason(reason: str) -> str:
    """Return what a reason to drop a candidate means; nothing for one that is not known."""
    return DROP_MEANINGS.get(reason, "")


def format_gain(gain: IntervalEstimate) -> str:
    """Return how an error moved: ``fell by 1.20 points [0.80, 1.60]``."""
    return typeset_numbers(words.describe_gain(gain))


def _describe_change(change: MetricsChange) -> str:
    before, after, gain = change.before, change.after, change.gain
    if before is None or after is None or gain is None:
        return ""
    chance = "; the interval includes no change" if gain.low <= 0 <= gain.high else ""
    return (
        f", and on {format_count(before.n_traces, 'held-out trace')} the critic's mean absolute error went from "
        f"{format_number(before.error.value)} to {format_number(after.error.value)}; averaged within each trace it "
        f"{format_gain(gain)}{chance}"
    )


def _describe_rejected_tests(tests: tuple[PromotionEvidence, ...]) -> str:
    if len(tests) > 1:
        best = max(tests, key=lambda test: test.effect)
        return (
            f"Nothing was promoted: none of {len(tests)} batches passed its test. With the best of them the "
            f"error {format_gain(_find_effect(best))} on {format_count(best.n_traces, 'held-out trace')}."
        )
    (test,) = tests
    found = f"the error {format_gain(_find_effect(test))} on {format_count(test.n_traces, 'held-out trace')}"
    batch = f"the batch of {format_count(len(test.pair_ids), 'pair')}"
    if test.outcome == "accuracy_fell":
        fall = "" if test.accuracy_change is None else f" by {format_number(-test.accuracy_change)}"
        return f"Nothing was promoted: with {batch} {found}, but pairwise accuracy fell{fall}."
    if test.outcome == "not_shown":
        return f"Nothing was promoted: that {batch} helps was not shown. With it {found}."
    return f"Nothing was promoted: {batch} did not pass ({format_outcome(test)}). With it {found}."


def _list_notes(report: CalibrationReport) -> list[str]:
    found = []
    passed = sum(test.passed_test for test in report.tests)
    if passed and len(report.tests) > 1:
        found.append(f"{passed} of {len(report.tests)} tested batches passed.")
    if report.tests and report.not_tested_reason is not None:
        found.append(f"A further batch was not tested: {escape_invisible(report.not_tested_reason)}.")
    gain, anchors = report.anchors.gain, report.anchors.before
    if passed and gain is not None and anchors is not None:
        found.append(
            f"The held-out traces chose what was promoted. On {format_count(anchors.n_traces, 'anchor trace')}, "
            f"which chose nothing, the error {format_gain(gain)}."
        )
    held = report.held_out.gain
    if not passed and held is not None and held.value:
        found.append(
            f"Between the two measurements the error on the held-out traces {format_gain(held)}, which no batch of "
            "this calibration accounts for: other pairs came into use or were taken back meanwhile."
        )
    if not passed and held is not None and not held.value:
        found.append("The critic is as it was before.")
    after = report.held_out.after
    if after is not None:
        constant = after.constant
        found.append(
            f"For scale: always answering {format_number(constant.progress)} would be off by {format_number(constant.error)} "
            f"points on the held-out steps, and the critic is off by {format_number(after.error.value)}"
            + (", so it knows no more than a constant." if after.error.value >= constant.error else ".")
        )
    return found


def _find_effect(test: PromotionEvidence) -> IntervalEstimate:
    return IntervalEstimate(value=test.effect, low=test.low, high=test.high)


def _choose_tone(report: CalibrationReport) -> VerdictTone:
    gain = report.held_out.gain
    if gain is None or gain.low <= 0 <= gain.high:
        return "even"
    return "better" if gain.low > 0 else "worse"
