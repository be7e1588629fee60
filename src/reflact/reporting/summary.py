"""A run for a terminal: a step in full, and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from reflact.jsonutil import flatten_fields
from reflact.messages import name_minibatch
from reflact.records import (
    CriticDescription,
    EpochRecord,
    IntervalEstimate,
    RunSummary,
    SkillScore,
    SkillVersion,
    Spend,
    StageCost,
    StepRecord,
    Usage,
)
from reflact.reporting.lines import (
    escape_controls,
    format_duration,
    format_epoch,
    format_fallback,
    name_count,
    wrap_line,
)
from reflact.reporting.tables import CATEGORY_WORDS, build_score_table
from reflact.reporting.verdict import (
    SCORE_NAMES,
    SPLIT_WORDS,
    count_decisions,
    describe_decisions,
    describe_entry,
    describe_gain,
    describe_outcome,
    describe_score_name,
    describe_version,
    has_better_skill,
    list_gains,
)
from reflact.training.history import StepDetails
from reflact.types import AnalystReport, Edit, EditResult, Rewrite, SelectResult, Split


def format_costs(costs: Sequence[StageCost]) -> tuple[str, ...]:
    """Return the time and the spend of each stage, one line each; stages without calls share a line."""
    times = {cost.stage: f"{cost.stage} {format_duration(cost.seconds)}" for cost in costs}
    spending = [f"took: {'; '.join((times[c.stage], *format_spend(c.spend)))}" for c in costs if c.spend]
    others = ", ".join(times[cost.stage] for cost in costs if not cost.spend)
    return (*spending, *((f"took: {others}",) if others else ()))


def format_details(details: StepDetails) -> tuple[str, ...]:
    """Return a step with the memory that its prompts showed, and the end of the epoch if one followed."""
    memory = () if not details.memory else (f"memory of the optimizer: {details.memory}",)
    end = () if details.epoch_end is None else tuple(_list_epoch_lines(details.epoch_end))
    return (*format_step(details.record), *memory, *end, *format_costs(details.costs))


def format_step(record: StepRecord) -> tuple[str, ...]:
    """Return a step's verdict, failure patterns, pool, choice, fallbacks and edits, one line each."""
    refusals = (r for r in record.reports if r.no_reply_reason is not None)
    untriaged = (r for r in record.reports if r.triage_no_reply_reason is not None)
    fallbacks = (*record.merged.fallbacks, *record.chosen.fallbacks, *record.fallbacks)
    return (
        f"verdict: {record.verdict.reason}",
        *(f"pattern in {name_count(p.count, 'case')}: {p.type}: {p.description}" for p in record.patterns),
        *(f"no report on {_name_minibatch(r)}: {r.no_reply_reason}" for r in refusals),
        *(f"no triage of {_name_minibatch(r)}: {r.triage_no_reply_reason}" for r in untriaged),
        *(f"reminder: {reminder}" for report in record.reports for reminder in report.reminders),
        *_list_rewrite_lines(record.rewrites),
        *(f"raced: {describe_entry(entry)}" for entry in record.race),
        *_list_pool_lines(record),
        *(() if record.rewrites else _list_choice_lines(record.chosen)),
        *((f"rewrite: {record.rewrite_summary}",) if record.rewrite_summary else ()),
        *(f"fallback: {format_fallback(fallback)}" for fallback in fallbacks),
        *(_format_edit_result(result) for result in record.edits),
    )


def _name_minibatch(report: AnalystReport) -> str:
    return name_minibatch(report.source_type, report.index, report.batch)


def _list_rewrite_lines(rewrites: Sequence[Rewrite]) -> Iterator[str]:
    for rewrite in rewrites:
        if rewrite.document is None:
            yield f"rewrite {rewrite.number + 1}: none, because {rewrite.reason}"
        elif rewrite.reasoning:
            yield f"reasoning of rewrite {rewrite.number + 1}: {rewrite.reasoning}"


def _list_pool_lines(record: StepRecord) -> Iterator[str]:
    proposals = sum(len(report.patch.edits) for report in record.reports)
    pool, chosen = record.merged.patch.edits, record.chosen.patch.edits
    if not proposals:
        return
    sources = f"{name_count(proposals, 'proposal')} in {name_count(len(record.reports), 'report')}"
    yield f"proposed: {name_count(len(pool), 'edit')}, out of {sources}"
    if record.merged.patch.reasoning:
        label = "merge" if any(edit.merge_level for edit in pool) else "reasoning"
        yield f"{label}: {record.merged.patch.reasoning}"
    for number, edit in enumerate(pool, start=1):
        kind = "" if edit.source_type is None else f"{edit.source_type} "
        source = name_count(edit.support_count, f"{kind}case")
        rank = chosen.index(edit) + 1 if edit in chosen else None
        words = f"not chosen: {_format_edit(edit)}" if rank is None else f"chosen as number {rank}"
        evidence = f"; evidence: {edit.evidence}" if edit.evidence else ""
        yield f"edit {number}: supported by {source}, {words}{evidence}"


def _list_choice_lines(chosen: SelectResult) -> Iterator[str]:
    if chosen.decision is not None:
        size = chosen.decision
        risks = f"; risks: {size.risks}" if size.risks else ""
        yield (
            f"step size: {size.count} of {name_count(chosen.pool_size, 'edit')}, confidence {size.confidence:.2f}: "
            f"{size.reasoning}{risks}"
        )
    elif chosen.pool_size:
        limit = "sets no limit" if chosen.budget is None else f"allows {chosen.budget}"
        taken = len(chosen.patch.edits)
        yield f"step size: {taken} of {name_count(chosen.pool_size, 'edit')}; the schedule {limit}"
    if chosen.ranked:
        yield f"ranking: {chosen.patch.reasoning or 'without a reason'}"


def _list_epoch_lines(end: EpochRecord) -> Iterator[str]:
    yield format_epoch(end)
    if end.comparisons:
        counts = Counter(comparison.category for comparison in end.comparisons)
        words = ", ".join(f"{count} {CATEGORY_WORDS[category]}" for category, count in counts.items())
        yield f"compared with the epoch before: {words}"
    slow = end.slow_update
    if slow is not None:
        if slow.verdict is not None:
            yield f"slow update verdict: {slow.verdict.reason}"
        if slow.helped != "none":
            yield f"earlier guidance: {slow.helped}"
        if slow.reasoning:
            yield f"slow update reasoning: {slow.reasoning}"
        if slow.guidance:
            yield f"guidance: {slow.guidance}"
    if end.meta_skill_reasoning:
        yield f"memory reasoning: {end.meta_skill_reasoning}"
    if end.meta_skill:
        yield f"new memory of the optimizer: {end.meta_skill}"


def _format_edit_result(result: EditResult) -> str:
    reason = "" if result.reason is None else f" ({result.reason})"
    return f"edit {result.status}{reason}: {_format_edit(result.edit)}"


def _format_edit(edit: Edit) -> str:
    texts = " ".join(repr(text) for text in (edit.target, edit.content) if text)
    return f"{edit.op} {texts}"


def format_spend(spend: Sequence[Spend]) -> tuple[str, ...]:
    """Return the spend of each role, one line each."""
    roles = sorted({entry.role for entry in spend})
    return tuple(_format_role(role, [entry for entry in spend if entry.role == role]) for role in roles)


def _format_role(role: str, entries: Sequence[Spend]) -> str:
    usage = sum((entry.usage for entry in entries), Usage())
    worst = sum((entry.worst_case for entry in entries), Usage())
    unsettled = sum(entry.unsettled for entry in entries)
    uncertain = [name_count(unsettled, "interrupted call")] if unsettled else []
    uncertain += [f"{usage.uncounted:,} not counted by the provider"] if usage.uncounted else []
    counts = (
        f"{name_count(usage.calls, 'call')}, {usage.input_tokens:,} tokens in, {usage.output_tokens:,} out"
    )
    line = f"{role}: {counts}{_format_price(usage)}"
    if not uncertain:
        return line
    tokens = worst.input_tokens + worst.output_tokens
    return f"{line}; at most {tokens:,} tokens{_format_price(worst)} more for {' and '.join(uncertain)}"


def _describe_critic(critic: CriticDescription) -> str:
    line = f"{critic.prompt} pinned to {name_count(critic.pairs, 'pair')} ({critic.snapshot[:12]}): "
    measured = critic.accuracy
    if measured is None:
        return f"{line}its accuracy was not measured"
    line += f"mean absolute error {_format_estimate(measured.error)} of 10"
    if measured.accuracy is not None:
        line += f", pairwise accuracy {_format_estimate(measured.accuracy)}"
    return f"{line}, on {name_count(measured.traces, 'trace')}"


def _format_estimate(estimate: IntervalEstimate) -> str:
    return f"{estimate.value:.2f} (95% interval {estimate.low:.2f} to {estimate.high:.2f})"


def _format_price(usage: Usage) -> str:
    return "" if usage.usd is None else f", ${usage.usd:.4f}"


def print_summary(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print how a run ended: counts, scores, spend and files.

    Of a run that stopped, nothing is printed again that the closing lines said.
    """

    def say(line: str) -> None:
        line = escape_controls(line)
        if console.is_terminal:
            console.print(wrap_line(line, console))
        else:
            console.print(Text(line), soft_wrap=True)

    for line in describe_outcome(summary, folder):
        say(line)
    is_complete = summary.status == "completed"
    if is_complete:
        say(f"completed: {describe_decisions(summary)}; {format_duration(summary.seconds)}")
    elif summary.steps:
        say(f"decisions: {count_decisions(summary)}")
    if is_complete and summary.reason is not None:
        say(f"ended early: {summary.reason}")
    for name, version in _list_versions(summary):
        if is_complete or name == "final":
            say(f"{name}: {describe_version(version)}")
    if summary.scores:
        console.print(build_score_table(summary.scores))
    for line in (*_list_caveats(summary), *_list_measurements(summary), *format_spend(summary.spend)):
        say(line)
    if summary.faults:
        kinds = ", ".join(f"{fault.count} x {fault.kind}" for fault in summary.faults)
        say(f"faults of calls: {kinds}")
    for name, what in RUN_FILES:
        if (folder / name).exists() and (is_complete or name != "best_skill.md"):
            is_initial = name == "best_skill.md" and not has_better_skill(summary)
            say(f"{folder / name}  {'the initial skill' if is_initial else what}")


def _list_measurements(summary: RunSummary) -> Iterator[str]:
    for score in summary.scores:
        if score.buckets and score.name in {"baseline", "best"}:
            types = ", ".join(f"{b.task_type} {b.hard:.3f} of {b.n}" for b in score.buckets)
            yield f"{score.name} on {SPLIT_WORDS[score.split]} by task type: {types}"
    for gain in list_gains(summary):
        yield describe_gain(gain.name, "baseline", gain)
    for line in summary.missing:
        yield f"not measured: {line}"


def _list_caveats(summary: RunSummary) -> Iterator[str]:
    yield from (f"warning: {warning}" for warning in summary.warnings)
    controls = {score.name: describe_score_name(score) for score in summary.scores if score.name in CONTROLS}
    if controls:
        words = (f"{SCORE_NAMES.get(name, name)} is {meaning}" for name, meaning in controls.items())
        yield f"controls: {'; '.join(words)}"
    is_initial = summary.best is not None and summary.best.number == 0
    if is_initial and summary.scores and dict(flatten_fields(summary.config)).get("test.placebo"):
        yield "placebo: not measured, since there is no better document to compare it with"
    if summary.critic is not None:
        yield f"scores come from {_describe_critic(summary.critic)}"
    if summary.annotated_by is not None:
        yield f"failure analysts saw the scores of {_describe_critic(summary.annotated_by)}"
    if any(score.selected_on for score in summary.scores):
        yield "best and final were selected on the validation items, so expect lower scores on new items"


CONTROLS = {"placebo", *SCORE_NAMES}

RUN_FILES = (
    ("best_skill.md", "the best skill"),
    ("skills", "every version"),
    ("summary.json", "this summary"),
    ("report.html", "a page on the run"),
    ("run.db", "everything"),
)


def _list_versions(summary: RunSummary) -> Iterator[tuple[str, SkillVersion]]:
    """Yield the best and the last version with their names, as one if they are the same.

    Each has its score at the end of the run if it was measured there.
    """
    best, final = (
        _use_final_score(summary.score(name, Split.val), version)
        for name, version in (("best", summary.best), ("final", summary.final))
    )
    if best is not None and best == final:
        yield "best and final", best
        return
    yield from (
        (name, version) for name, version in (("best", best), ("final", final)) if version is not None
    )


def _use_final_score(score: SkillScore | None, version: SkillVersion | None) -> SkillVersion | None:
    if version is None or score is None or score.hard is None:
        return version
    measured = {"score": score.hard, "n": None, "trials": None, "inherited": False}
    return version.model_copy(update=measured)
