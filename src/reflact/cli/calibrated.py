"""What a calibration takes, what it does meanwhile, and what it did: tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from reflact.calibration.cost_estimate import CostEstimate
    from reflact.calibration.events import CalibrationEvent, Tell
    from reflact.calibration.metrics import Measures
    from reflact.calibration.results import CalibrationReport, Change, Consumed
    from reflact.memory import Promotion
    from reflact.results import Estimate, Spend, Usage
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from reflact.cli.showing import Shown

if TYPE_CHECKING:
    from reflact.calibration.events import CalibrationEvent, CriticMeasured, Figures, PairsMade, Tell
    from reflact.llm.limits import LimitChange
    from reflact.results import Usage


FEW = 10
"""Questions without any valid reply from which on it is said that there was none."""


def print_calibration(console: Console, report: CalibrationReport) -> None:
    """Print what was made, what was tested, and the critic before and after."""
    from reflact.calibration.words import spent
    from reflact.report.visible import visible

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
        console.print(visible(line), highlight=False, markup=False)


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
    from reflact.report.terminal import spend_lines

    books = [_booked("paid by all starts", after, ())] if before else []
    for line in spend_lines([*books, _booked("paid by this start", after, before)]):
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
    return Spend(role=name, purpose="", usage=usage, unsettled=unsettled, worst=worst)


def tested(test: Promotion) -> str:
    """Return how a test of a batch came out, in a sentence without its full stop."""
    from reflact.calibration.words import moved, outcome_of
    from reflact.results import Estimate

    effect = Estimate(value=test.effect, low=test.low, high=test.high)
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


def _shown(estimate: Estimate | None) -> str:
    from reflact.calibration.words import number, span

    return "" if estimate is None else f"{number(estimate.value)} {span(estimate)}"


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
