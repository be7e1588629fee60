"""What a calibration came to, in plain sentences. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from reflact.calibration import words
from reflact.calibration.results import CalibrationReport, Change
from reflact.calibration.words import outcome_of
from reflact.memory import Promotion
from reflact.pages.frame import counted, number, safe, typeset
from reflact.results import IntervalEstimate

Tone = Literal["better", "worse", "even"]

DROPS = {
    "unverified": "There is neither gold nor a critic whose samples could agree on what is right.",
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


class Verdict(NamedTuple):
    """What a calibration came to: a sentence, what else has to be known, and which way it went."""

    headline: str
    more: tuple[str, ...]
    tone: Tone


def verdict(report: CalibrationReport) -> Verdict:
    """Return what was promoted and what that changed, or why nothing was."""
    if not report.tests:
        reason = "" if report.not_tested is None else f": {safe(report.not_tested)}"
        headline = f"No batch was tested, so nothing was promoted{reason}."
    elif not report.promoted:
        headline = _refused(report.tests)
    else:
        pairs = counted(report.promoted, "pair was", "pairs were")
        headline = f"{pairs} promoted{_changed(report.held_out)}."
    return Verdict(headline=headline, more=tuple(_more(report)), tone=_tone(report))


def outcome(test: Promotion) -> str:
    """Return how a test ended."""
    return safe(outcome_of(test))


def drop_meaning(reason: str) -> str:
    """Return what a reason to drop a candidate means; nothing for one that is not known."""
    return DROPS.get(reason, "")


def moved(gain: IntervalEstimate) -> str:
    """Return how an error moved: ``fell by 1.20 points [0.80, 1.60]``."""
    return typeset(words.moved(gain))


def _changed(change: Change) -> str:
    before, after, gain = change.before, change.after, change.gain
    if before is None or after is None or gain is None:
        return ""
    chance = "; the interval includes no change" if gain.low <= 0 <= gain.high else ""
    return (
        f", and on {counted(before.traces, 'held-out trace')} the critic's mean absolute error went from "
        f"{number(before.error.value)} to {number(after.error.value)}; averaged within each trace it "
        f"{moved(gain)}{chance}"
    )


def _refused(tests: tuple[Promotion, ...]) -> str:
    if len(tests) > 1:
        best = max(tests, key=lambda test: test.effect)
        return (
            f"Nothing was promoted: none of {len(tests)} batches passed its test. With the best of them the "
            f"error {moved(_effect(best))} on {counted(best.traces, 'held-out trace')}."
        )
    (test,) = tests
    found = f"the error {moved(_effect(test))} on {counted(test.traces, 'held-out trace')}"
    batch = f"the batch of {counted(len(test.pair_ids), 'pair')}"
    if test.outcome == "accuracy_fell":
        fall = "" if test.accuracy_change is None else f" by {number(-test.accuracy_change)}"
        return f"Nothing was promoted: with {batch} {found}, but pairwise accuracy fell{fall}."
    if test.outcome == "not_shown":
        return f"Nothing was promoted: that {batch} helps was not shown. With it {found}."
    return f"Nothing was promoted: {batch} did not pass ({outcome(test)}). With it {found}."


def _more(report: CalibrationReport) -> list[str]:
    found = []
    passed = sum(test.promoted for test in report.tests)
    if passed and len(report.tests) > 1:
        found.append(f"{passed} of {len(report.tests)} tested batches passed.")
    if report.tests and report.not_tested is not None:
        found.append(f"A further batch was not tested: {safe(report.not_tested)}.")
    gain, anchors = report.anchors.gain, report.anchors.before
    if passed and gain is not None and anchors is not None:
        found.append(
            f"The held-out traces chose what was promoted. On {counted(anchors.traces, 'anchor trace')}, "
            f"which chose nothing, the error {moved(gain)}."
        )
    held = report.held_out.gain
    if not passed and held is not None and held.value:
        found.append(
            f"Between the two measurements the error on the held-out traces {moved(held)}, which no batch of "
            "this calibration accounts for: other pairs came into use or were taken back meanwhile."
        )
    if not passed and held is not None and not held.value:
        found.append("The critic is as it was before.")
    after = report.held_out.after
    if after is not None:
        constant = after.constant
        found.append(
            f"For scale: always answering {number(constant.phi)} would be off by {number(constant.error)} "
            f"points on the held-out steps, and the critic is off by {number(after.error.value)}"
            + (", so it knows no more than a constant." if after.error.value >= constant.error else ".")
        )
    return found


def _effect(test: Promotion) -> IntervalEstimate:
    return IntervalEstimate(value=test.effect, low=test.low, high=test.high)


def _tone(report: CalibrationReport) -> Tone:
    gain = report.held_out.gain
    if gain is None or gain.low <= 0 <= gain.high:
        return "even"
    return "better" if gain.low > 0 else "worse"
