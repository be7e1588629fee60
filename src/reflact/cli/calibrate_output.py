"""What a calibration takes, what it does meanwhile, and what it did: tables and lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from reflact.cli.common import ShowMode

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from reflact.calibration.cost_estimate import CalibrationCostEstimate
    from reflact.calibration.events import (
        CalibrationEvent,
        CalibrationEventCallback,
        CriticMeasured,
        PairsGenerated,
        ScoreSummary,
    )
    from reflact.calibration.metrics import CriticMetrics
    from reflact.calibration.report import CalibrationReport, MetricsChange, PurposeUsage
    from reflact.llm.rate_limit import LimitChange
    from reflact.memory.models import PromotionEvidence
    from reflact.records import IntervalEstimate, Spend, Usage


MIN_QUESTIONS = 10


"""Questions without any valid reply from which on it is said that there was none."""


def print_calibration(console: Console, report: CalibrationReport) -> None:
    """Print what was made, what was tested, and the critic before and after."""
    from reflact.calibration.report import describe_tests_left
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
    n_pairs = sum(kind.n_pairs for kind in report.pairs)
    yield (
        f"{report.n_training_traces} traces, {report.n_candidates} candidates, rounds made: {report.n_rounds}; "
        f"{n_pairs} pairs, {report.n_candidates - n_pairs} dropped, {report.n_promoted} promoted"
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
    from reflact.calibration.report import describe_gain

    if change.gain is not None:
        yield f"Averaged within each trace, the error {describe_gain(change.gain)}."
    if change.n_unscored:
        steps = "1 step" if change.n_unscored == 1 else f"{change.n_unscored:,} steps"
        yield f"In neither column: {steps} without a valid score before or after."


def print_calibration_spend(console: Console, before: Sequence[Spend], after: Sequence[Spend]) -> None:
    """Print the spend of this start, and of all starts together."""
    from reflact.reporting.summary import format_spend

    books = [_subtract_spend("paid by all starts", after, ())] if before else []
    for line in format_spend([*books, _subtract_spend("paid by this start", after, before)]):
        console.print(line, highlight=False)


def print_estimate(console: Console, estimate: CalibrationCostEstimate, spent: Sequence[Spend]) -> None:
    """Print how many calls a calibration takes, and what can come of it."""
    from reflact.calibration.report import describe_tests_left as tests_left

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
    from reflact.calibration.call_policies import sum_usage

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
    """Return the spend since an earlier state, under a name.

    Calls that another process had in flight at the earlier look are settled by now: they leave nothing open.
    """
    from reflact.calibration.call_policies import subtract_usage
    from reflact.records import Spend, Usage

    def between(part: str) -> Usage:
        later, earlier = (sum((getattr(one, part) for one in look), Usage()) for look in (after, before))
        return subtract_usage(later, earlier)

    unsettled = sum(one.unsettled for one in after) - sum(one.unsettled for one in before)
    usage, unsettled = between("usage"), max(0, unsettled)
    worst = between("worst_case") if unsettled or usage.uncounted else Usage()
    return Spend(role=name, purpose="", usage=usage, unsettled=unsettled, worst_case=worst)


def describe_test(test: PromotionEvidence) -> str:
    """Return how a test of a batch came out, in a sentence without its full stop."""
    from reflact.calibration.report import describe_gain, describe_outcome
    from reflact.records import IntervalEstimate

    effect = IntervalEstimate(value=test.effect, low=test.low, high=test.high)
    return (
        f"Batch {test.n_earlier_tests + 1} on these traces, {len(test.pair_ids)} pairs: the error "
        f"{describe_gain(effect)} over {test.n_traces} traces, p = {test.p_value:.2g} of {test.alpha:.2g}: "
        f"{describe_outcome(test)}"
    )


def _describe_unanswered(report: CalibrationReport) -> Iterator[str]:
    """Yield who never gave a valid reply; what was asked of them is among the drops under another reason."""
    from reflact.calibration.report import capitalize_first

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

    from reflact.calibration.report import METRIC_DESCRIPTIONS, format_number

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
        table.add_row(
            label, _format_interval(getattr(before, field)), _format_interval(getattr(after, field)), constant
        )
    return table


def _format_interval(estimate: IntervalEstimate | None) -> str:
    from reflact.calibration.report import format_interval, format_number

    return "" if estimate is None else f"{format_number(estimate.value)} {format_interval(estimate)}"


MAX_PAIR_LINES = 20


"""The most lines about the pairs of one round."""


def choose_event_printer(show: ShowMode) -> CalibrationEventCallback | None:
    """Return the callback that shows the events of a calibration; None if nothing is shown.

    Lines go to standard error, because the report goes to standard output. There is no live display.
    """
    if show is ShowMode.quiet:
        return None
    if show is ShowMode.json:
        return lambda event: typer.echo(event.model_dump_json(ensure_ascii=True))
    return CalibrationLines()


def choose_pause_printer(
    show: ShowMode | None, *, as_json: bool, terminal: bool
) -> Callable[[LimitChange], None] | None:
    """Return the callback that shows pauses of endpoints; None if they are not shown.

    They are shown among other lines. Beside a report as JSON they are shown if standard error is a terminal.
    """
    if show in {ShowMode.lines, ShowMode.live} or (show is None and (not as_json or terminal)):
        return PausePrinter()
    return None


class PausePrinter:
    """Prints a line when an endpoint pauses or cannot be reached; each line once."""

    def __init__(self) -> None:
        from reflact.reporting.lines import EventLines

        self._event_lines = EventLines()

    def __call__(self, change: LimitChange) -> None:
        """Print the line of a pause."""
        from reflact.events import RateLimited

        _print_line(self._event_lines.format_event(RateLimited(run_id="", **change._asdict())))


class CalibrationLines:
    """Prints a line for each important event, and for every twentieth part of a round's traces."""

    def __init__(self) -> None:
        self._traces = self._done = self._candidates = self._pairs = 0
        self._dropped: Counter[str] = Counter()

    def __call__(self, event: CalibrationEvent) -> None:
        """Print the line of an event."""
        _print_line(self.format_event(event))

    def format_event(self, event: CalibrationEvent) -> str | None:
        """Return the line of an event; None if the event has no line."""
        from reflact.calibration import events

        line = None
        match event:
            case events.CalibrationStarted():
                line = (
                    f"began     {event.n_training_traces} traces to learn from; {event.n_held_out_traces} held-out traces with "
                    f"{event.n_held_out_steps} labelled steps; {event.n_anchor_steps} anchor steps"
                )
            case events.CriticMeasured():
                line = _format_measurement(event)
            case events.RoundStarted():
                self._traces, self._done, self._candidates, self._pairs = event.n_traces, 0, 0, 0
                self._dropped.clear()
                line = f"round {event.number:<3} {event.n_traces} traces{_format_usage(event.usage)}"
            case events.PairsGenerated():
                line = self._format_pairs(event)
            case events.PairBatchTested():
                line = f"test      {describe_test(event.evidence)}{_format_usage(event.usage)}"
            case events.BatchTestPostponed():
                line = f"no test   of {event.n_pairs} pairs: {event.explanation}{_format_usage(event.usage)}"
        return line

    def _format_pairs(self, event: PairsGenerated) -> str | None:
        before = self._done * MAX_PAIR_LINES // max(self._traces, 1)
        self._done += 1
        self._candidates += event.n_candidates
        self._pairs += event.n_pairs
        self._dropped.update({drop.reason: drop.n_candidates for drop in event.dropped})
        if self._done * MAX_PAIR_LINES // max(self._traces, 1) == before:
            return None
        dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(self._dropped.items()))
        return (
            f"pairs     {self._done} of {self._traces} traces: {self._pairs} of {self._candidates} candidates"
            f"{f'; dropped: {dropped}' if dropped else ''}{_format_usage(event.usage)}"
        )


def _print_line(line: str | None) -> None:
    from reflact.reporting.lines import escape_controls

    if line is not None:
        typer.echo(escape_controls(line), err=True)


def _format_measurement(event: CriticMeasured) -> str:
    parts = [
        f"{name}: {_format_figures(figures)}"
        for name, figures in (("held-out steps", event.held_out), ("anchors", event.anchors))
        if figures.n_steps or figures.n_unscored
    ]
    return (
        f"{event.when:<9} {'; '.join(parts) or 'no labelled steps to measure on'}{_format_usage(event.usage)}"
    )


def _format_figures(figures: ScoreSummary) -> str:
    words = [f"{figures.n_steps} scored"]
    if figures.n_unscored:
        words.append(f"{figures.n_unscored} without a valid score")
    if figures.error is not None:
        words.append(f"error {figures.error:.2f}")
    if figures.accuracy is not None:
        words.append(f"pairwise accuracy {figures.accuracy:.2f}")
    return ", ".join(words)


def _format_usage(usage: Usage) -> str:
    money = "" if usage.usd is None else f", ${usage.usd:.4f}"
    return f" ({usage.calls:,} calls{money} so far)"
