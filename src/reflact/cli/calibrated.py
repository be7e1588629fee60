"""What a calibration takes, what it does meanwhile, and what it did: tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from reflact.calibration.cost_estimate import CostEstimate
    from reflact.calibration.metrics import Measures
    from reflact.calibration.results import CalibrationReport, Change, Consumed
    from reflact.memory import Promotion
    from reflact.results import IntervalEstimate, Spend, Usage
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reflact.results import Usage


FEW = 10
"""Questions without any valid reply from which on it is said that there was none."""


def print_calibration(console: Console, report: CalibrationReport) -> None:
    """Print what was made, what was tested, and the critic before and after."""
    from reflact.calibration.words import spent
    from reflact.reporting.lines import escape_controls

    if report.earlier:
        console.print(
            "Nothing has changed since this calibration was made: no call was made now and no test opened. "
            "--again makes further pairs of the same traces and tests them."
        )
    for line in _made(report):
        console.print(line)
    for test in report.tests:
        console.print(f"{tested(test)}.")
    if report.not_tested is not None:
        console.print(f"Not tested: {report.not_tested}.")
    for name, change in (("held-out traces", report.held_out), ("anchors", report.anchors)):
        if change.before is not None and change.after is not None:
            console.print(_table(name, change.before, change.after))
        for line in _notes(change):
            console.print(line, highlight=False)
    console.print(f"{report.outlook}.")
    if report.tests_so_far is not None:
        console.print(f"{spent(report.tests_so_far)}.", highlight=False)
    for line in (*_consumed(report.consumed), *_silent(report)):
        console.print(escape_controls(line), highlight=False, markup=False)


def _made(report: CalibrationReport) -> Iterator[str]:
    """Yield what was made of the traces, and what became of it before any test."""
    kept = sum(kind.pairs for kind in report.pairs)
    yield (
        f"{report.learned_from} traces, {report.candidates} candidates, rounds made: {report.rounds}; "
        f"{kept} pairs, {report.candidates - kept} dropped, {report.promoted} promoted"
    )
    for kind in report.pairs:
        hard = "" if kind.difficulty is None else f", mean difficulty {kind.difficulty:.2f}"
        yield f"  {kind.mistake}: {kind.pairs} pairs{hard}"
    for drop in report.drops:
        yield f"  dropped, {drop.reason}: {drop.candidates}"
    if report.held:
        yield f"  held back by the scan: {report.held}"
    if report.archived:
        yield f"  put away before a test, since the memory was full: {report.archived}"
    if report.left_out:
        yield f"  traces of which nothing was made, since the memory was full: {report.left_out}"


def _notes(change: Change) -> Iterator[str]:
    """Yield what stands under a table."""
    from reflact.calibration.words import moved

    if change.gain is not None:
        yield f"Averaged within each trace, the error {moved(change.gain)}."
    if change.unscored:
        steps = "1 step" if change.unscored == 1 else f"{change.unscored:,} steps"
        yield f"In neither column: {steps} without a valid score before or after."


def print_paid(console: Console, before: Sequence[Spend], after: Sequence[Spend]) -> None:
    """Print what the books of a store say: what this start has paid for, and all starts together."""
    from reflact.reporting.summary import format_spend

    books = [_booked("paid by all starts", after, ())] if before else []
    for line in format_spend([*books, _booked("paid by this start", after, before)]):
        console.print(line, highlight=False)


def print_estimate(console: Console, estimate: CostEstimate, spent: Sequence[Spend]) -> None:
    """Print how many calls a calibration takes, and what can come of it."""
    from reflact.calibration.words import spent as tests_left

    if estimate.over:
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
        f"{estimate.learn} traces to learn from; held out: {estimate.held_out} traces with {estimate.steps} "
        f"known steps; anchors: {estimate.anchors} steps",
        f"It takes {estimate.calls_low:,} to {estimate.calls_high:,} calls, with at most {estimate.rounds:,} "
        f"rounds and {estimate.candidates:,} candidates. The high count is a bound: each reply is sent back "
        "as often as may be, and each candidate takes the dearest way.",
    ]
    paid = sum(one.usage.calls for one in spent)
    if paid:
        lines.append(f"{paid:,} calls are paid for already; those that come again cost nothing.")
    if estimate.missing is None:
        lines.append(f"{estimate.outlook}.")
        if estimate.tests_before:
            lines.append(f"{tests_left(estimate.tests_before)}.")
    else:
        lines.append(f"Nothing can be tested or promoted: {estimate.missing}.")
        lines.append("Without --anyway the command stops there, before it asks anything.")
    for line in lines:
        console.print(line, highlight=False)


def _consumed(entries: Sequence[Consumed]) -> Iterator[str]:
    """Yield what questions took, in all and by purpose."""
    from reflact.calibration.limited import total

    questions, lost = sum(one.questions for one in entries), sum(one.unanswered for one in entries)
    refused = sum(one.refused for one in entries)
    yield (
        f"{questions:,} questions took {_usage(total(entries))}, replies found "
        f"in the store included; {refused:,} replies were refused, {lost:,} questions got no valid one."
    )
    for one in entries:
        more = "".join(
            f", {count:,} {what}"
            for what, count in (
                ("refused", one.refused),
                ("without a valid reply", one.unanswered),
            )
            if count
        )
        yield f"  {one.role}, {one.purpose}: {one.questions:,} questions, {_usage(one.usage)}{more}"


def _usage(usage: Usage) -> str:
    money = "" if usage.usd is None else f", ${usage.usd:.4f}"
    return f"{usage.calls:,} calls, {usage.input_tokens:,} tokens in, {usage.output_tokens:,} out{money}"


def _booked(name: str, after: Sequence[Spend], before: Sequence[Spend]) -> Spend:
    """Return what stands in the books beyond an earlier look, under a name.

    Calls that another process had in flight at the earlier look are settled by now: they leave nothing open.
    """
    from reflact.calibration.limited import difference
    from reflact.results import Spend, Usage

    def between(part: str) -> Usage:
        later, earlier = (sum((getattr(one, part) for one in look), Usage()) for look in (after, before))
        return difference(later, earlier)

    unsettled = sum(one.unsettled for one in after) - sum(one.unsettled for one in before)
    usage, unsettled = between("usage"), max(0, unsettled)
    worst = between("worst") if unsettled or usage.uncounted else Usage()
    return Spend(role=name, purpose="", usage=usage, unsettled=unsettled, worst_case=worst)


def tested(test: Promotion) -> str:
    """Return how a test of a batch came out, in a sentence without its full stop."""
    from reflact.calibration.words import moved, outcome_of
    from reflact.results import IntervalEstimate

    effect = IntervalEstimate(value=test.effect, low=test.low, high=test.high)
    return (
        f"Batch {test.batches_before + 1} on these traces, {len(test.pair_ids)} pairs: the error "
        f"{moved(effect)} over {test.traces} traces, p = {test.p_value:.2g} of {test.alpha:.2g}: "
        f"{outcome_of(test)}"
    )


def _silent(report: CalibrationReport) -> Iterator[str]:
    """Yield who never gave a valid reply; what was asked of them is among the drops under another reason."""
    from reflact.calibration.words import first_up

    whose = {"mistake": "bad_reply", "other_purpose": "bad_reply", "compare": "judged_wrong"}
    if report.writer_given_up is not None:
        whose = {"compare": "judged_wrong"}
        yield f"{first_up(report.writer_given_up)}."
    for one in report.consumed:
        if one.purpose in whose and one.questions >= FEW and one.unanswered == one.questions:
            yield (
                f"None of the {one.questions:,} questions of {one.role}, {one.purpose}, got a valid reply, "
                f"which is why candidates were dropped as {whose[one.purpose]}: the model cannot write that "
                "form."
            )


def _table(name: str, before: Measures, after: Measures) -> Table:
    from rich.table import Table

    from reflact.calibration.words import FIGURES, number

    title = (
        f"{name}: {before.traces} traces, {before.transitions} steps; mean absolute error "
        f"{number(before.error.value)} -> {number(after.error.value)}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "before", "after", "constant"):
        table.add_column(column, justify="right" if column else "left")
    always = before.constant
    same = {"error": always.error, "accuracy": always.accuracy, "brier": always.brier}
    for label, field, _ in FIGURES:
        constant = number(same[field]) if field in same else ""
        table.add_row(label, _shown(getattr(before, field)), _shown(getattr(after, field)), constant)
    return table


def _shown(estimate: IntervalEstimate | None) -> str:
    from reflact.calibration.words import number, span

    return "" if estimate is None else f"{number(estimate.value)} {span(estimate)}"
