"""Shows a calibration while it runs: event lines on standard error, or events as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from reflact.cli.showing import ShowMode

if TYPE_CHECKING:
    from reflact.calibration.events import (
        CalibrationEvent,
        CalibrationEventCallback,
        CriticMeasured,
        PairsGenerated,
        ScoreSummary,
    )
    from reflact.llm.rate_limit import LimitChange
    from reflact.results import Usage

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
        from reflact.cli.calibrated import describe_test

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
            case events.TestPostponed():
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
