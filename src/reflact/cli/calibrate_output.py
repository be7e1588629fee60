"""What a calibration takes, its progress, and its report: lines and tables."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

from reflact.calibration import events
from reflact.calibration.events import (
    CalibrationEvent,
    CriticMeasured,
    ScoreSummary,
)
from reflact.calibration.report import (
    CalibrationCostEstimate,
    CalibrationReport,
    build_metric_table,
    describe_consumption,
    describe_test,
    describe_tests_left,
    describe_usage,
    format_price,
    list_change_lines,
    list_pair_lines,
    list_power_lines,
    list_test_lines,
)
from reflact.cli.common import ShowMode
from reflact.events import RateLimited
from reflact.llm.rate_limit import LimitChange
from reflact.records import Spend, Usage
from reflact.reporting.facts import format_spend
from reflact.reporting.live import EventLines
from reflact.text import escape_controls, name_count

# The approximate number of lines on the pairs of one round.
MAX_PAIR_LINES = 20


def print_calibration(console: Console, report: CalibrationReport) -> None:
    """Print what was made, what was tested, and the critic before and after."""
    if report.is_earlier_result:
        console.print(
            "Nothing has changed since this calibration, so no call was made and no test was "
            "opened. --again makes further pairs of the same traces and tests them."
        )
    _print_lines(console, *list_pair_lines(report), *list_test_lines(report))
    for name, change in (("held-out traces", report.held_out), ("anchors", report.anchors)):
        if change.before is not None and change.after is not None:
            figures = build_metric_table(name, change.before, change.after)
            table = Table(title=figures.caption, title_justify="left")
            for column in ("", "before", "after", "constant"):
                table.add_column(column, justify="right" if column else "left")
            for row in figures.rows:
                table.add_row(row.name, row.before, row.after, row.constant)
            console.print(table)
        _print_lines(console, *list_change_lines(change))
    _print_lines(console, *list_power_lines(report), describe_consumption(report))


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False)


def print_calibration_spend(
    console: Console, before: Sequence[Spend], after: Sequence[Spend]
) -> None:
    """Print what all starts have paid, and what this one has."""
    name = "paid by all starts" if before else "paid by this start"
    lines = list(format_spend([one.model_copy(update={"role": name}) for one in after]))
    if before:
        later, earlier = (sum((one.usage for one in spend), Usage()) for spend in (after, before))
        lines.append(f"paid by this start: {describe_usage(later - earlier)}")
    _print_lines(console, *lines)


def print_estimate(console: Console, estimate: CalibrationCostEstimate, *, paid: int) -> None:
    """Print how many calls a calibration takes, and what can come of it."""
    lines = []
    if estimate.is_finished:
        lines.append(
            "Nothing has changed since this calibration. The command makes no call, opens no test "
            "and prints the stored report. With --again, it would take the following."
        )
    if estimate.resumed:
        lines.append(
            "This calibration was stopped, and the command resumes it. The following counts the "
            "complete calibration; finished calls are not repeated."
        )
    lines += [
        f"{estimate.n_training_traces} traces to learn from; held out: "
        f"{estimate.n_held_out_traces} traces with {estimate.n_held_out_steps} labelled steps; "
        f"anchors: {estimate.n_anchor_steps} steps",
        f"It takes {estimate.min_calls:,} to {estimate.max_calls:,} calls. The high number is a "
        "bound: it assumes that all rounds take place, and that every reply is sent back as often "
        "as allowed.",
    ]
    if paid:
        lines.append(
            f"{paid:,} calls are already paid for and cost nothing if they are needed again."
        )
    if estimate.missing_reason is None:
        lines.append(f"{estimate.power_summary}.")
        if estimate.n_earlier_tests:
            lines.append(f"{describe_tests_left(estimate.n_earlier_tests)}.")
    else:
        lines.append(f"Nothing can be tested or promoted: {estimate.missing_reason}.")
        lines.append("Without --anyway, the command stops before the first call.")
    _print_lines(console, *lines)


class CalibrationDisplay:
    """Shows the events of a calibration as lines on standard error."""

    def __init__(self, show: ShowMode) -> None:
        self._show = show
        self._event_lines = EventLines()
        self._n_traces = 0
        self._n_done = 0
        self.round = 0
        """The round that began last; 0: none."""
        self.spend_before: Sequence[Spend] = ()
        """What all starts had paid when this one began."""
        self.spend_after: Sequence[Spend] = ()

    def show_event(self, event: CalibrationEvent) -> None:
        """Show an event."""
        line = self._format_event(event)
        if self._show is ShowMode.json:
            typer.echo(event.model_dump_json(ensure_ascii=True))
        else:
            self._print_line(line)

    def show_pause(self, change: LimitChange) -> None:
        """Show that an endpoint pauses or cannot be reached; once for each."""
        self._print_line(self._event_lines.format_event(RateLimited(run_id="", **change._asdict())))

    def _print_line(self, line: str | None) -> None:
        if line is not None and self._show in {ShowMode.lines, ShowMode.live}:
            typer.echo(escape_controls(line), err=True)

    def _format_event(self, event: CalibrationEvent) -> str | None:
        """Count an event and return its line; None if it has none."""
        line = None
        match event:
            case events.CalibrationStarted():
                line = (
                    f"began     {event.n_training_traces} traces to learn from; "
                    f"{event.n_held_out_traces} held-out traces with {event.n_held_out_steps} "
                    f"labelled steps; {event.n_anchor_steps} anchor steps"
                )
            case events.CriticMeasured():
                line = _format_measurement(event)
            case events.RoundStarted():
                self.round = event.number
                self._n_traces = event.n_traces
                self._n_done = 0
                line = (
                    f"round {event.number:<3} {event.n_traces} traces{_format_calls(event.usage)}"
                )
            case events.PairsGenerated():
                self._n_done += 1
                is_last = self._n_done == self._n_traces
                if is_last or self._n_done % (self._n_traces // MAX_PAIR_LINES or 1) == 0:
                    line = (
                        f"pairs     {self._n_done} of {self._n_traces} traces"
                        f"{_format_calls(event.usage)}"
                    )
            case events.PairBatchTested():
                line = f"test      {describe_test(event.evidence)}{_format_calls(event.usage)}"
            case events.BatchTestPostponed():
                line = (
                    f"no test   of {event.n_pairs} pairs: "
                    f"{event.explanation}{_format_calls(event.usage)}"
                )
        return line


def _format_measurement(event: CriticMeasured) -> str:
    parts = [
        f"{name}: {_format_figures(figures)}"
        for name, figures in (("held-out steps", event.held_out), ("anchors", event.anchors))
        if figures.n_steps or figures.n_unscored
    ]
    said = "; ".join(parts) or "no labelled steps to measure on"
    return f"{event.when:<9} {said}{_format_calls(event.usage)}"


def _format_figures(figures: ScoreSummary) -> str:
    words = [f"{figures.n_steps} scored"]
    if figures.n_unscored:
        words.append(f"{figures.n_unscored} without a valid score")
    if figures.error is not None:
        words.append(f"error {figures.error:.2f}")
    if figures.accuracy is not None:
        words.append(f"pairwise accuracy {figures.accuracy:.2f}")
    return ", ".join(words)


def _format_calls(usage: Usage) -> str:
    return f" ({name_count(usage.calls, 'call')}{format_price(usage)} so far)"
