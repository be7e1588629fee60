"""What a calibration takes, what it does meanwhile, and what it did: tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from reflact.calibration.cost_estimate import CalibrationCostEstimate
    from reflact.calibration.metrics import CriticMetrics
    from reflact.calibration.results import CalibrationReport, MetricsChange, PurposeUsage
    from reflact.memory import PromotionEvidence
    from reflact.results import IntervalEstimate, Spend, Usage
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reflact.results import Usage


MIN_QUESTIONS = 10
"""Questions without any valid reply from which on it is said that there was none."""


def print_calibration(console: Console, report: CalibrationReport) -> None:
    """Print what was made, what was tested, and the critic before and after."""
    from reflact.calibration.words import describe_tests_left
    from reflact.reporting.lines import escape_controls

    if report.is_earlier_result:
        console.print(
            "Nothing has changed since this calibration was made: no call was made now and no test opened. "
            "--again makes further pairs of the same traces and tests them."
        )
    for line in _describe_pairs(report):
        console.print(line)
    for test in report.tests:
        console.print(f"{describe_test(test)}.")
    if report.not_tested_reason is not None:
        console.print(f"Not tested: {report.not_tested_reason}.")
    for name, change in (("held-out traces", report.held_out), ("anchors", report.anchors)):
        if change.before is not None and change.after is not None:
            console.print(_build_measures_table(name, change.before, change.after))
        for line in _describe_change(change):
            console.print(line, highlight=False)
    console.print(f"{report.power_summary}.")
    if report.n_tests is not None:
        console.print(f"{describe_tests_left(report.n_tests)}.", highlight=False)
    for line in (*_describe_consumption(report.usage_by_purpose), *_describe_unanswered(report)):
        console.print(escape_controls(line), highlight=False, markup=False)


def _describe_pairs(report: CalibrationReport) -> Iterator[str]:
    """Yield what was made of the traces, and what became of it before any test."""
    kept = sum(kind.n_pairs for kind in report.pairs)
    yield (
        f"{report.n_training_traces} traces, {report.n_candidates} candidates, rounds made: {report.n_rounds}; "
        f"{kept} pairs, {report.n_candidates - kept} dropped, {report.n_promoted} promoted"
    )
    for kind in report.pairs:
        hard = "" if kind.difficulty is None else f", mean difficulty {kind.difficulty:.2f}"
        yield f"  {kind.mistake}: {kind.n_pairs} pairs{hard}"
    for drop in report.dropped:
        yield f"  dropped, {drop.reason}: {drop.n_candidates}"
    if report.n_quarantined:
        yield f"  held back by the scan: {report.n_quarantined}"
    if report.n_archived:
        yield f"  put away before a test, since the memory was full: {report.n_archived}"
    if report.n_left_out:
        yield f"  traces of which nothing was made, since the memory was full: {report.n_left_out}"


def _describe_change(change: MetricsChange) -> Iterator[str]:
    """Yield what stands under a table."""
    from reflact.calibration.words import describe_gain

    if change.gain is not None:
        yield f"Averaged within each trace, the error {describe_gain(change.gain)}."
    if change.n_unscored:
        steps = "1 step" if change.n_unscored == 1 else f"{change.n_unscored:,} steps"
        yield f"In neither column: {steps} without a valid score before or after."


def print_calibration_spend(console: Console, before: Sequence[Spend], after: Sequence[Spend]) -> None:
    """Print what the books of a store say: what this start has paid for, and all starts together."""
    from reflact.reporting.summary import format_spend

    books = [_subtract_spend("paid by all starts", after, ())] if before else []
    for line in format_spend([*books, _subtract_spend("paid by this start", after, before)]):
        console.print(line, highlight=False)


def print_estimate(console: Console, estimate: CalibrationCostEstimate, spent: Sequence[Spend]) -> None:
    """Print how many calls a calibration takes, and what can come of it."""
    from reflact.calibration.words import describe_tests_left as tests_left

    if estimate.is_finished:
        console.print(
            "Nothing has changed since this calibration was made: the command asks nothing, opens no test "
            "and prints its report. What follows is what --again takes."
        )
    if estimate.resumed:
        console.print(
            "This calibration was begun and stopped: it goes on from there. What follows is all of it; what "
            "was asked before is not asked again."
        )
    lines = [
        f"{estimate.n_training_traces} traces to learn from; held out: {estimate.n_held_out_traces} traces with {estimate.n_held_out_steps} "
        f"known steps; anchors: {estimate.n_anchor_steps} steps",
        f"It takes {estimate.min_calls:,} to {estimate.max_calls:,} calls, with at most {estimate.max_rounds:,} "
        f"rounds and {estimate.max_candidates:,} candidates. The high count is a bound: each reply is sent back "
        "as often as may be, and each candidate takes the dearest way.",
    ]
    paid = sum(one.usage.calls for one in spent)
    if paid:
        lines.append(f"{paid:,} calls are paid for already; those that come again cost nothing.")
    if estimate.missing_reason is None:
        lines.append(f"{estimate.power_summary}.")
        if estimate.n_earlier_tests:
            lines.append(f"{tests_left(estimate.n_earlier_tests)}.")
    else:
        lines.append(f"Nothing can be tested or promoted: {estimate.missing_reason}.")
        lines.append("Without --anyway the command stops there, before it asks anything.")
    for line in lines:
        console.print(line, highlight=False)


def _describe_consumption(entries: Sequence[PurposeUsage]) -> Iterator[str]:
    """Yield what questions took, in all and by purpose."""
    from reflact.calibration.limited import sum_usage

    questions, lost = sum(one.n_questions for one in entries), sum(one.n_unanswered for one in entries)
    refused = sum(one.n_invalid for one in entries)
    yield (
        f"{questions:,} questions took {_describe_usage(sum_usage(entries))}, replies found "
        f"in the store included; {refused:,} replies were refused, {lost:,} questions got no valid one."
    )
    for one in entries:
        more = "".join(
            f", {count:,} {what}"
            for what, count in (
                ("refused", one.n_invalid),
                ("without a valid reply", one.n_unanswered),
            )
            if count
        )
        yield f"  {one.role}, {one.purpose}: {one.n_questions:,} questions, {_describe_usage(one.usage)}{more}"


def _describe_usage(usage: Usage) -> str:
    money = "" if usage.usd is None else f", ${usage.usd:.4f}"
    return f"{usage.calls:,} calls, {usage.input_tokens:,} tokens in, {usage.output_tokens:,} out{money}"


def _subtract_spend(name: str, after: Sequence[Spend], before: Sequence[Spend]) -> Spend:
    """Return what stands in the books beyond an earlier look, under a name.

    Calls that another process had in flight at the earlier look are settled by now: they leave nothing open.
    """
    from reflact.calibration.limited import subtract_usage
    from reflact.results import Spend, Usage

    def between(part: str) -> Usage:
        later, earlier = (sum((getattr(one, part) for one in look), Usage()) for look in (after, before))
        return subtract_usage(later, earlier)

    unsettled = sum(one.unsettled for one in after) - sum(one.unsettled for one in before)
    usage, unsettled = between("usage"), max(0, unsettled)
    worst = between("worst_case") if unsettled or usage.uncounted else Usage()
    return Spend(role=name, purpose="", usage=usage, unsettled=unsettled, worst_case=worst)


def describe_test(test: PromotionEvidence) -> str:
    """Return how a test of a batch came out, in a sentence without its full stop."""
    from reflact.calibration.words import describe_gain, describe_outcome
    from reflact.results import IntervalEstimate

    effect = IntervalEstimate(value=test.effect, low=test.low, high=test.high)
    return (
        f"Batch {test.n_earlier_tests + 1} on these traces, {len(test.pair_ids)} pairs: the error "
        f"{describe_gain(effect)} over {test.n_traces} traces, p = {test.p_value:.2g} of {test.alpha:.2g}: "
        f"{describe_outcome(test)}"
    )


def _describe_unanswered(report: CalibrationReport) -> Iterator[str]:
    """Yield who never gave a valid reply; what was asked of them is among the drops under another reason."""
    from reflact.calibration.words import capitalize_first

    whose = {"mistake": "bad_reply", "other_purpose": "bad_reply", "compare": "judged_wrong"}
    if report.writer_stop_reason is not None:
        whose = {"compare": "judged_wrong"}
        yield f"{capitalize_first(report.writer_stop_reason)}."
    for one in report.usage_by_purpose:
        if one.purpose in whose and one.n_questions >= MIN_QUESTIONS and one.n_unanswered == one.n_questions:
            yield (
                f"None of the {one.n_questions:,} questions of {one.role}, {one.purpose}, got a valid reply, "
                f"which is why candidates were dropped as {whose[one.purpose]}: the model cannot write that "
                "form."
            )


def _build_measures_table(name: str, before: CriticMetrics, after: CriticMetrics) -> Table:
    from rich.table import Table

    from reflact.calibration.words import METRIC_DESCRIPTIONS, format_number

    title = (
        f"{name}: {before.n_traces} traces, {before.n_transitions} steps; mean absolute error "
        f"{format_number(before.error.value)} -> {format_number(after.error.value)}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "before", "after", "constant"):
        table.add_column(column, justify="right" if column else "left")
    always = before.constant
    same = {"error": always.error, "accuracy": always.accuracy, "brier": always.brier}
    for label, field, _ in METRIC_DESCRIPTIONS:
        constant = format_number(same[field]) if field in same else ""
        table.add_row(label, _format_interval(getattr(before, field)), _format_interval(getattr(after, field)), constant)
    return table


def _format_interval(estimate: IntervalEstimate | None) -> str:
    from reflact.calibration.words import format_interval, format_number

    return "" if estimate is None else f"{format_number(estimate.value)} {format_interval(estimate)}"
