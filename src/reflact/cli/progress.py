"""A calibration while it goes on: a line for each thing that matters, or its events as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from reflact.cli.showing import Shown

if TYPE_CHECKING:
    from reflact.calibration.events import CalibrationEvent, CriticMeasured, Figures, PairsMade, Tell
    from reflact.llm.rate_limit import LimitChange
    from reflact.results import Usage

LINES = 20
"""Lines about the pairs of one round, at most."""


def telling(show: Shown) -> Tell | None:
    """Return what is told of a calibration's events; None: nobody.

    Lines go to standard error, so that the report has standard output to itself; a live view is lines here.
    """
    if show is Shown.quiet:
        return None
    if show is Shown.json:
        return _as_json
    return Progress()


def retelling(show: Shown | None, *, as_json: bool, terminal: bool) -> Callable[[LimitChange], None] | None:
    """Return what is told of back-offs and repeats, in lines on standard error; None: nobody.

    They are told among other lines, and beside the report as JSON where standard error is a ``terminal``.
    """
    if show in {Shown.lines, Shown.live} or (show is None and (not as_json or terminal)):
        return Retries()
    return None


class Retries:
    """Prints a line where an endpoint backs off, or is not reached and tried again; the same one once."""

    def __init__(self) -> None:
        from reflact.report.story import Story

        self._story = Story()

    def __call__(self, change: LimitChange) -> None:
        """Print the line that a change is worth."""
        from reflact.events import BackedOff
        from reflact.report.visible import visible

        line = self._story.tell(BackedOff(run_id="", **change._asdict()))
        if line is not None:
            typer.echo(visible(line), err=True)


def _as_json(event: CalibrationEvent) -> None:
    typer.echo(event.model_dump_json(ensure_ascii=True))


class Progress:
    """Prints a line for each event that matters, and for every twentieth part of a round's traces."""

    def __init__(self) -> None:
        self._traces = 0
        self._done = 0
        self._candidates = 0
        self._kept = 0
        self._drops: Counter[str] = Counter()

    def __call__(self, event: CalibrationEvent) -> None:
        """Print the line that an event is worth."""
        from reflact.report.visible import visible

        line = self.line(event)
        if line is not None:
            typer.echo(visible(line), err=True)

    def line(self, event: CalibrationEvent) -> str | None:
        """Return the line that an event is worth, or None."""
        from reflact.calibration import events
        from reflact.cli.calibrated import tested

        line = None
        match event:
            case events.Began():
                line = (
                    f"began     {event.learn} traces to learn from; held out: {event.held_out} traces with "
                    f"{event.steps} known steps; anchors: {event.anchors} steps"
                )
            case events.CriticMeasured():
                line = _measured(event)
            case events.RoundBegan():
                self._traces, self._done, self._candidates, self._kept = event.traces, 0, 0, 0
                self._drops.clear()
                line = f"round {event.number:<3} {event.traces} traces{_so_far(event.usage)}"
            case events.PairsMade():
                line = self._pairs(event)
            case events.BatchTested():
                line = f"test      {tested(event.evidence)}{_so_far(event.usage)}"
            case events.NotTested():
                line = f"no test   of {event.pairs} pairs: {event.words}{_so_far(event.usage)}"
        return line

    def _pairs(self, event: PairsMade) -> str | None:
        """Return how far the round is, at every so-many-th trace and at the last."""
        before = self._done * LINES // max(self._traces, 1)
        self._done += 1
        self._candidates += event.candidates
        self._kept += event.kept
        self._drops.update({drop.reason: drop.candidates for drop in event.drops})
        if self._done * LINES // max(self._traces, 1) == before:
            return None
        lost = ", ".join(f"{reason} {count}" for reason, count in sorted(self._drops.items()))
        return (
            f"pairs     {self._done} of {self._traces} traces: {self._kept} of {self._candidates} candidates"
            f"{f'; dropped: {lost}' if lost else ''}{_so_far(event.usage)}"
        )


def _measured(event: CriticMeasured) -> str:
    about = [
        f"{name}: {_figures(figures)}"
        for name, figures in (("held-out steps", event.held_out), ("anchors", event.anchors))
        if figures.steps or figures.unscored
    ]
    return f"{event.when:<9} {'; '.join(about) or 'nothing to measure on'}{_so_far(event.usage)}"


def _figures(figures: Figures) -> str:
    words = [f"{figures.steps} scored"]
    if figures.unscored:
        words.append(f"{figures.unscored} without a valid score")
    if figures.error is not None:
        words.append(f"error {figures.error:.2f}")
    if figures.accuracy is not None:
        words.append(f"pairwise accuracy {figures.accuracy:.2f}")
    return ", ".join(words)


def _so_far(usage: Usage) -> str:
    money = "" if usage.usd is None else f", ${usage.usd:.4f}"
    return f" ({usage.calls:,} calls{money} so far)"
