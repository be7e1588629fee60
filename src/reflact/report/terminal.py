"""What a run came to, at a terminal: tables, and lines beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflact.records import StepRecord, Version
from reflact.report.story import change, number
from reflact.report.visible import visible
from reflact.report.wrapping import hanging
from reflact.results import CriticUsed, Estimate, FaultCount, RunSummary, Scored, Spend, Usage
from reflact.types import EditResult


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
    lost = [f"{unsettled:,} calls cut off in flight"] if unsettled else []
    lost += [f"{usage.uncounted:,} that the provider did not count"] if usage.uncounted else []
    tokens = worst.input_tokens + worst.output_tokens
    risk = f"; at most {tokens:,} tokens{_price(worst)} more for {' and '.join(lost)}" if lost else ""
    given, written = usage.input_tokens, usage.output_tokens
    return f"{role}: {usage.calls:,} calls, {given:,} tokens in, {written:,} out{_price(usage)}{risk}"


def fault_line(faults: Sequence[FaultCount]) -> str:
    """Return how many attempts of calls failed, by kind."""
    kinds = ", ".join(f"{fault.count} x {fault.kind}" for fault in faults)
    return f"failed attempts of calls: {kinds}"


def described_critic(critic: CriticUsed) -> str:
    """Return who a critic is, and what its opinion is worth."""
    line = f"{critic.prompt} pinned to {critic.pairs} pairs ({critic.snapshot[:12]}): "
    measured = critic.measured
    if measured is None:
        return f"{line}its accuracy is not measured"
    line += f"mean absolute error {_with_interval(measured.error)} of 10"
    if measured.accuracy is not None:
        line += f", pairwise accuracy {_with_interval(measured.accuracy)}"
    return f"{line}, on {measured.traces} traces"


def _with_interval(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} (95% interval {estimate.low:.2f} to {estimate.high:.2f})"


def _price(usage: Usage) -> str:
    return "" if usage.usd is None else f", ${usage.usd:.4f}"


def print_summary(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print how a run ended: counts, scores, consumption and where its files are."""

    def say(line: str) -> None:
        shown = visible(line)
        if console.is_terminal:
            console.print(hanging(shown, console.width))
        else:
            console.print(Text(shown), soft_wrap=True)

    say(
        f"{summary.status}: {summary.steps} steps, {summary.accepts} accepted, {summary.rejects} rejected,"
        f"{_open_count(summary)} {summary.skips} without a change; {summary.seconds:.1f} s"
    )
    for name, version in (("best", summary.best), ("final", summary.final)):
        if version is not None:
            say(f"{name}: {_described(version)}")
    if summary.scores:
        console.print(score_table(summary.scores))
    for line in _caveats(summary):
        say(line)
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
    if summary.faults:
        say(fault_line(summary.faults))
    for name, what in FILES:
        if (folder / name).exists():
            say(f"{folder / name}  {what}")


def _caveats(summary: RunSummary) -> Iterator[str]:
    if summary.critic is not None:
        yield f"scores are the opinion of {described_critic(summary.critic)}"
    if summary.noted_by is not None:
        yield f"failure analysts were shown the opinion of {described_critic(summary.noted_by)}"
    if any(score.selected for score in summary.scores):
        yield "val scores of best and final are those that the gate selected by: expect less on fresh trials"


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
