"""A run in lines: one for each step, and one for whatever else matters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reflact import events
from reflact.records import EpochRecord, Version
from reflact.report.figures import about
from reflact.types import EditResult, Verdict


class Story:
    """Turns events into lines; a step's line is complete when the step is committed.

    An endpoint that backs off again and again is told once in a step.
    """

    def __init__(self) -> None:
        self._rollouts: events.RolloutsDone | None = None
        self._edits: tuple[EditResult, ...] = ()
        self._verdict: Verdict | None = None
        self._backed_off: set[tuple[str, int | None]] = set()

    def tell(self, event: events.Event) -> str | None:
        """Return the line that an event is worth, or None."""
        match event:
            case events.StepStarted():
                self._rollouts, self._edits, self._verdict = None, (), None
                self._backed_off.clear()
            case events.RolloutsDone():
                self._rollouts = event
            case events.EditsApplied():
                self._edits = event.results
            case events.Decided():
                self._verdict = event.verdict
            case events.StepCommitted():
                return self._step(event)
            case events.BackedOff():
                return self._back_off(event)
        return _line(event)

    def _back_off(self, event: events.BackedOff) -> str | None:
        """Return a line for the first of a step's back-offs of an endpoint with a status, or without."""
        said = (event.endpoint, event.status)
        if said in self._backed_off:
            return None
        self._backed_off.add(said)
        if event.status is None:
            return f"retries   {event.endpoint} cannot be reached: tries again"
        then = "" if event.rate is None else f", then {event.rate:.3g} calls/s"
        return f"limits    {event.endpoint} answered {event.status}: waits {about(event.seconds, '')}{then}"

    def recall(self, told: Iterable[events.Event]) -> str | None:
        """Return a line that says how far an earlier start has come; None where it committed nothing."""
        line = None
        for event in told:
            self.tell(event)
            if isinstance(event, events.StepCommitted):
                line = f"run {event.run_id} goes on: {event.step} steps are committed"
            elif isinstance(event, events.BaselineMeasured):
                line = f"run {event.run_id} goes on: no step is committed yet"
        return line

    def _step(self, event: events.StepCommitted) -> str:
        verdict, rollouts = self._verdict, self._rollouts
        scores = ""
        if verdict is not None and verdict.current_score is not None:
            scores = f"val {change(verdict.current_score, verdict.candidate_score)}"
        words = [f"step {event.step:<4}", f"{event.action:<15} ", f"{scores:<18}"]
        if rollouts is not None:
            words.append(f" solved {rollouts.n - rollouts.failures}/{rollouts.n}")
        words.append(f" {edit_count(self._edits)}")
        words.append(f" {versions(event.current, event.best)}")
        return " ".join(words)


def _line(event: events.Event) -> str | None:
    """The line of an event that stands by itself."""
    line: str | None = None
    match event:
        case events.RunStarted(n_train=train, n_val=val, n_test=test, steps_per_epoch=steps):
            line = f"run {event.run_id}: {train} train, {val} val, {test} test items; {steps} steps an epoch"
        case events.Outlook():
            line = f"outlook   {event.words} (At most {event.rollouts} rollouts a decision.)"
        case events.BaselineMeasured():
            line = f"baseline  val {event.score:.3f} on {event.n} items"
        case events.FallbackTaken(fallback=fallback):
            line = f"fallback  {fallback.label}: {fallback.reason}; instead: {fallback.instead}"
        case events.EpochClosed():
            line = epoch_line(event)
        case events.Promoted():
            line = f"last      {event.verdict.action}: {event.verdict.reason}"
        case events.TestOpened():
            line = f"test split opened (opening {event.count} of this run)"
        case events.Repeated():
            line = f"again     {event.reason}"
        case events.Warned():
            line = f"warning   {event.message}"
    return line


def number(value: float | None) -> str:
    """Return a score with three digits, or a dash for none."""
    return "-" if value is None else f"{value:.3f}"


def change(before: float | None, after: float | None) -> str:
    """Return ``before -> after``, or what is known of it."""
    return number(before) if after is None else f"{number(before)} -> {number(after)}"


def edit_count(results: Sequence[EditResult]) -> str:
    """Return how many of a step's edits were applied."""
    applied = sum(result.status == "applied" for result in results)
    return f"edits {applied}/{len(results)}" if results else "no edits "


def versions(current: Version, best: Version) -> str:
    """Return the current version, and the best one where that is another."""
    return f"v{current.number}" + (f", best v{best.number}" if best.number != current.number else "")


def epoch_line(record: EpochRecord | events.EpochClosed) -> str:
    """Return what happened after an epoch's last step."""
    words = [f"epoch {record.epoch:<2}"]
    if record.slow is not None:
        scores = record.slow.verdict
        words.append(f"slow update {record.slow.action}")
        if scores is not None:
            words.append(f"val {change(scores.current_score, scores.candidate_score)}")
    if record.meta is not None:
        words.append("memory written")
    words.extend(f"fallback {f.label}: {f.reason}; instead: {f.instead}" for f in record.fallbacks)
    return "  ".join([*words, f"current v{record.current.number}, best v{record.best.number}"])
