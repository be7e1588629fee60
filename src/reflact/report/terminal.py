"""A run at a terminal: a line for each step, bars for what is under way, tables at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from reflact import events
from reflact.records import EpochRecord, StepRecord, Version
from reflact.report.visible import visible
from reflact.results import RunSummary, Scored, Spend, Usage
from reflact.types import EditResult, Verdict

Show = Callable[[events.Event], None]


class Story:
    """Turns events into lines; a step's line is complete when the step is committed."""

    def __init__(self) -> None:
        self._rollouts: events.RolloutsDone | None = None
        self._edits: tuple[EditResult, ...] = ()
        self._verdict: Verdict | None = None

    def tell(self, event: events.Event) -> str | None:
        """Return the line that an event is worth, or None."""
        match event:
            case events.StepStarted():
                self._rollouts, self._edits, self._verdict = None, (), None
            case events.RolloutsDone():
                self._rollouts = event
            case events.EditsApplied():
                self._edits = event.results
            case events.Decided():
                self._verdict = event.verdict
            case events.StepCommitted():
                return self._step(event)
        return _line(event)

    def _step(self, event: events.StepCommitted) -> str:
        words = [f"step {event.step:<3}", f"{event.action:<15}"]
        if self._verdict is not None and self._verdict.current_score is not None:
            words.append(f"val {change(self._verdict.current_score, self._verdict.candidate_score)}")
        if self._rollouts is not None:
            failures = self._rollouts.failures
            words.append(f"train {self._rollouts.n - failures}/{self._rollouts.n} solved")
        words.append(edit_count(self._edits))
        words.append(f"current v{event.current.number}, best v{event.best.number}")
        return "  ".join(words)


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
    return f"{applied} of {len(results)} edits" if results else "no edits"


@contextmanager
def watching(console: Console, *, bars: bool = True) -> Iterator[Show]:
    """Give a function that shows events as they come: with bars at a terminal, else in lines alone."""
    story = Story()

    def say(event: events.Event) -> None:
        line = story.tell(event)
        if line is not None:
            console.print(Text(visible(line)), soft_wrap=True)

    if not console.is_terminal or not bars:
        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = _Bars(progress)

        def show(event: events.Event) -> None:
            shown.move(event)
            say(event)

        yield show


class _Bars:
    """One bar for each stage of a step that is under way."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: dict[tuple[int, events.Stage], TaskID] = {}

    def move(self, event: events.Event) -> None:
        """Move, open or close the bar that an event is about."""
        if not isinstance(event, events.Progress):
            return
        place = (event.step, event.stage)
        if place not in self._open:
            title = f"step {event.step:<3} {event.stage}"
            self._open[place] = self._progress.add_task(title, total=event.total)
        self._progress.update(self._open[place], completed=event.done, total=event.total)
        if event.done >= event.total:
            self._progress.remove_task(self._open.pop(place))


def score_table(scores: Sequence[Scored]) -> Table:
    """Return the scores of documents on splits, each with its count and 95% interval."""
    table = Table("document", "split", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("n", "solved", "hard", "95% interval", "soft"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("sha-256", no_wrap=True)
    for score in scores:
        interval = "-" if score.low is None else f"{number(score.low)} to {number(score.high)}"
        n = f"{score.n}" if not score.unmeasured else f"{score.n} (+{score.unmeasured} unmeasured)"
        solved = f"{score.successes:g}" if score.n else "-"
        table.add_row(
            Text(visible(score.name)),
            score.split.value,
            n,
            solved,
            number(score.hard),
            interval,
            number(score.soft),
            score.skill_hash[:8],
        )
    return table


def step_table(records: Sequence[StepRecord]) -> Table:
    """Return a run's committed steps, one line each."""
    table = Table("step", "epoch", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("decision", no_wrap=True)
    for heading in ("val", "solved", "edits", "skill"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        verdict = record.verdict
        solved = record.rollout.n - record.n_failures
        table.add_row(
            str(record.step),
            str(record.epoch),
            verdict.action,
            change(verdict.current_score, verdict.candidate_score),
            f"{solved}/{record.rollout.n}",
            f"{sum(result.status == 'applied' for result in record.edits)}/{len(record.edits)}",
            f"v{record.current.number}",
        )
    return table


def step_lines(record: StepRecord) -> tuple[str, ...]:
    """Return a step's verdict, failure patterns, fallbacks and edits, one line each."""
    patterns = (p for report in record.reports for p in report.patterns)
    refusals = (r for r in record.reports if r.refusal is not None)
    untold = (r for r in record.reports if r.triage_refusal is not None)
    fallbacks = (*record.merged.fallbacks, *record.chosen.fallbacks, *record.fallbacks)
    return (
        f"verdict: {record.verdict.reason}",
        *(f"pattern: {p.type} ({p.count}): {p.description}" for p in patterns),
        *(f"no report of {r.source_type} minibatch {r.index}: {r.refusal}" for r in refusals),
        *(f"no lapses of {r.source_type} minibatch {r.index}: {r.triage_refusal}" for r in untold),
        *(f"reminder: {reminder}" for report in record.reports for reminder in report.reminders),
        *(f"fallback: {f.label}: {f.reason}; instead: {f.instead}" for f in fallbacks),
        *(_edit_line(result) for result in record.edits),
    )


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


def _edit_line(result: EditResult) -> str:
    edit = result.edit
    what = " ".join(repr(text) for text in (edit.target, edit.content) if text)
    reason = "" if result.reason is None else f" ({result.reason})"
    return f"edit {result.status}{reason}: {edit.op} {what}"


def spend_lines(spend: Sequence[Spend]) -> tuple[str, ...]:
    """Return what each role consumed, one line each."""
    return tuple(
        _consumed(role, [entry for entry in spend if entry.role == role])
        for role in sorted({entry.role for entry in spend})
    )


def _consumed(role: str, entries: Sequence[Spend]) -> str:
    usage = sum((entry.usage for entry in entries), Usage())
    worst = sum((entry.worst for entry in entries), Usage())
    unsettled = sum(entry.unsettled for entry in entries)
    lost = [f"{unsettled} calls cut off in flight"] if unsettled else []
    lost += [f"{usage.uncounted} that the provider did not count"] if usage.uncounted else []
    tokens = worst.input_tokens + worst.output_tokens
    risk = f"; at most {tokens} tokens{_price(worst)} more for {' and '.join(lost)}" if lost else ""
    given, written = usage.input_tokens, usage.output_tokens
    return f"{role}: {usage.calls} calls, {given} tokens in, {written} out{_price(usage)}{risk}"


def _price(usage: Usage) -> str:
    return "" if usage.usd is None else f", ${usage.usd:.4f}"


def print_summary(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print how a run ended: counts, scores, consumption and where its files are."""

    def say(line: str) -> None:
        console.print(Text(visible(line)), soft_wrap=True)

    say(
        f"{summary.status}: {summary.steps} steps, {summary.accepts} accepted, {summary.rejects} rejected,"
        f"{_open_count(summary)} {summary.skips} without a change; {summary.seconds:.1f} s"
    )
    for name, version in (("best", summary.best), ("final", summary.final)):
        if version is not None:
            say(f"{name}: {_described(version)}")
    if summary.scores:
        console.print(score_table(summary.scores))
    if any(score.selected for score in summary.scores):
        say("val scores of best and final are those that the gate selected by: expect less on fresh trials")
    for score in summary.scores:
        if score.buckets and score.name in {"baseline", "best"}:
            say(_by_type(score))
    for gain in summary.improvements:
        low, high = 100 * gain.low, 100 * gain.high
        say(
            f"{gain.name} over baseline on {gain.split.value}: {100 * gain.mean:+.1f} points "
            f"(95% interval {low:+.1f} to {high:+.1f}, {gain.n} items)"
        )
    for line in summary.missing:
        say(f"not measured: {line}")
    for line in spend_lines(summary.spend):
        say(line)
    for name, what in FILES:
        if (folder / name).exists():
            say(f"{folder / name}  {what}")


def _by_type(score: Scored) -> str:
    parts = (f"{b.task_type} {b.hard:.3f} of {b.n}" for b in score.buckets)
    return f"{score.name} on {score.split.value} by task type: {', '.join(parts)}"


def _open_count(summary: RunSummary) -> str:
    count = sum(a.count for a in summary.actions if a.action == "inconclusive")
    return f" {count} inconclusive," if count else ""


FILES = (
    ("best_skill.md", "the best skill"),
    ("skills", "every version"),
    ("summary.json", "this summary"),
    ("run.db", "everything"),
)


def _described(version: Version) -> str:
    score = "" if version.score is None else f", val {version.score:.3f}"
    score += " (inherited: this text was not measured)" if version.inherited else ""
    return f"v{version.number} from {version.origin}{score}"
