"""A run for a terminal: lists of runs, its steps, a step in full, and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from reflact.llm.pricing import CostEstimate, EstimateRange
from reflact.records import (
    CriticDescription,
    EpochRecord,
    Improvement,
    IntervalEstimate,
    RunSummary,
    SkillScore,
    SkillVersion,
    Spend,
    StageCost,
    StepRecord,
    Usage,
    sum_step_costs,
)
from reflact.reporting.items import shorten_middle
from reflact.reporting.lines import (
    escape_controls,
    escape_line,
    format_change,
    format_count,
    format_duration,
    format_epoch,
    format_fallback,
    format_score,
    name_count,
    wrap_line,
)
from reflact.reporting.verdict import describe_outcome, format_usd
from reflact.stages.null_answers import describe_constant
from reflact.training.history import RunComparison, RunListing, StepDetails
from reflact.types import Belief, Edit, EditResult, Rewrite, SelectResult, Verdict, canonical_json

MAX_SETTING_CHARS = 40
"""The most characters of a setting's value in a comparison."""

FULL_WIDTH = 1_000
"""The cells in which every table has room."""

MIN_FOLDED_CELLS = 8
"""The least width of a column whose cells may take several lines."""

LEFT_COLUMNS = ("step", "epoch", "decision", "document", "split", "sha-256", "folder", "run", "status")
"""Columns of words, and those that lead a row."""


@dataclass(frozen=True)
class FittedTable:
    """A table that leaves out columns on a narrow terminal, so that names and numbers stay whole.

    Args:
        columns: The heading and the cells of each column; those of the first are left-aligned.
        optional: Headings of columns that may be left out, the first one first.
        caption: A line below the table.
        folded: The heading of a column whose cells may take several lines; the table then has narrow gaps.
    """

    columns: Mapping[str, Sequence[str]]
    optional: Sequence[str]
    caption: str | None = None
    folded: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=FULL_WIDTH)
        for count in range(len(self.optional) + 1):
            hidden = self.optional[:count]
            width = Measurement.get(console, wide, self._build(hidden, folded_width=MIN_FOLDED_CELLS)).maximum
            if width <= options.max_width:
                break
        yield self._build(hidden)

    def _build(self, hidden: Sequence[str], folded_width: int | None = None) -> Table:
        caption = None if self.caption is None else Text(self.caption)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption)
        table.caption_justify = "left"
        if self.folded is not None:
            table.padding, table.show_edge = 0, False
        shown = {heading: cells for heading, cells in self.columns.items() if heading not in hidden}
        for heading in shown:
            justify: Literal["left", "right"] = "left" if heading in LEFT_COLUMNS else "right"
            is_folded = heading == self.folded
            width = folded_width if is_folded else None
            table.add_column(
                heading, justify=justify, no_wrap=not is_folded, overflow="fold", max_width=width
            )
        for row in zip(*shown.values(), strict=True):
            table.add_row(*map(Text, row))
        return table


def build_score_table(scores: Sequence[SkillScore]) -> FittedTable:
    """Return the scores of documents on splits, each with its count and 95% interval."""

    def format_interval(score: SkillScore) -> str:
        return "-" if score.low is None else f"{format_score(score.low)} to {format_score(score.high)}"

    columns = {
        "document": [escape_controls(score.name) for score in scores],
        "split": [score.split.value for score in scores],
        "n": [f"{score.n}" for score in scores],
        "unmeasured": [f"{score.unmeasured}" for score in scores],
        "solved": [f"{score.successes:g}" if score.n else "-" for score in scores],
        "hard": [format_score(score.hard) for score in scores],
        "95% interval": [format_interval(score) for score in scores],
        "soft": [format_score(score.soft) for score in scores],
        "sha-256": [score.skill_hash[:8] for score in scores],
    }
    if not any(score.unmeasured for score in scores):
        del columns["unmeasured"]
    return FittedTable(columns, ("soft", "sha-256", "solved", "95% interval", "unmeasured"))


def build_run_table(runs: Sequence[RunListing], folder: Path) -> FittedTable:
    """Return a list of runs, one line each; their folders are shown as below ``folder``."""

    def format_folder(run: RunListing) -> str:
        path = Path(run.folder)
        return escape_line(str(path.relative_to(folder) if path.is_relative_to(folder) else path))

    def format_price(run: RunListing) -> str:
        return "-" if not run.calls else "unknown" if run.usd is None else format_usd(run.usd)

    columns: dict[str, list[str]] = {
        "folder": [format_folder(run) for run in runs],
        "run": [run.run_id for run in runs],
        "status": [run.status or ("measured" if run.measured and not run.steps else "open") for run in runs],
        "steps": [str(run.steps) for run in runs],
        "val": [format_score(run.val) for run in runs],
        "baseline": [format_score(run.baseline) for run in runs],
        "test": [format_score(run.test) for run in runs],
        "cost": [format_price(run) for run in runs],
        "date": [f"{run.created:%Y-%m-%d}" for run in runs],
    }
    return FittedTable(columns, ("date", "cost", "steps", "status", "baseline"), folded="folder")


def build_comparison_table(comparison: RunComparison) -> Table:
    """Return the runs of a comparison, one line each, with the scores of their best skills, cost and time."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("run", overflow="fold")
    table.add_column("status", no_wrap=True)
    for heading in ("steps", "val", "test", "calls", "cost", "time", "letters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in comparison.runs:
        calls, usd = run.usage.calls, run.usage.usd
        table.add_row(
            Text(escape_line(run.name)),
            run.status or "open",
            str(run.steps),
            *(format_score(None if score is None else score.hard) for score in (run.val, run.test)),
            format_count(calls),
            "-" if not calls else "unknown" if usd is None else format_usd(usd),
            "-" if run.seconds is None else format_duration(run.seconds),
            format_count(len(run.best.skill.text)),
        )
    return table


def build_settings_table(comparison: RunComparison) -> Table:
    """Return the settings that differ, one line each, with the value of each run."""
    table = Table("setting", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for run in comparison.runs:
        table.add_column(Text(escape_line(run.name)), overflow="fold")
    for setting in comparison.settings:
        values = (
            Text(shorten_middle(escape_line(canonical_json(v)), MAX_SETTING_CHARS)) for v in setting.values
        )
        table.add_row(Text(escape_line(setting.key)), *values)
    return table


def list_gain_lines(comparison: RunComparison) -> Iterator[str]:
    """Yield the gain of each further run over the first one, with its paired interval."""
    first = comparison.runs[0].name
    for gain in comparison.gains:
        low, high = 100 * gain.low, 100 * gain.high
        yield (
            f"{gain.split.value}: {gain.name} over {first} {100 * gain.mean:+.1f} points "
            f"(95% interval {low:+.1f} to {high:+.1f}, {gain.n} common items)"
        )
    if not comparison.gains:
        yield "the runs have no measured items in common"


def build_step_table(records: Sequence[StepRecord]) -> FittedTable:
    """Return a run's committed steps, one line each."""
    partial = any(record.verdict.partial for record in records)
    note = "* partial: the decision was certain before all items were measured" if partial else None
    verdicts = [record.verdict for record in records]
    columns: dict[str, list[str]] = {
        "step": [f"{record.step}" for record in records],
        "epoch": [f"{record.epoch}" for record in records],
        "decision": [verdict.action for verdict in verdicts],
        "val": [
            format_change(verdict.current_score, verdict.candidate_score) + ("*" if verdict.partial else "")
            for verdict in verdicts
        ],
        "solved": [f"{r.rollout.n - r.n_failures}/{r.rollout.n}" for r in records],
        "edits": [f"{sum(e.status == 'applied' for e in r.edits)}/{len(r.edits)}" for r in records],
        "skill": [f"v{record.current.number}" for record in records],
    }
    return FittedTable(columns, ("epoch", "edits", "solved", "skill"), caption=note)


def build_cost_table(costs: Sequence[StageCost]) -> Table:
    """Return the calls, tokens, dollars and time of each step, one line each; step 0 is the baseline."""
    steps = sum_step_costs(costs)
    priced, cut = any(cost.usage.usd is not None for cost in steps), any(cost.unsettled for cost in steps)
    table = Table("step", box=box.SIMPLE_HEAD, pad_edge=False)
    optional = (*(("interrupted",) if cut else ()), *(("dollars",) if priced else ()))
    for heading in ("calls", "tokens in", "tokens out", *optional, "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in steps:
        usage = cost.usage
        table.add_row(
            str(cost.step) if cost.step else "baseline",
            f"{usage.calls:,}",
            f"{usage.input_tokens:,}",
            f"{usage.output_tokens:,}",
            *((f"{cost.unsettled:,}",) if cut else ()),
            *(("-" if usage.usd is None else format_usd(usage.usd),) if priced else ()),
            format_duration(cost.seconds),
        )
    return table


def build_estimate_table(estimate: CostEstimate) -> Table:
    """Return a table of the least, likely and most calls, with tokens and, if priced, US dollars."""
    priced = any(row.usd is not None for row in estimate.rows)
    table = Table("role", "calls for", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    headings = ["calls\nleast", "calls\nlikely", "calls\nmost", "tokens\nlikely", "tokens\nmost"]
    for heading in [*headings, *(["$\nlikely", "$\nmost"] if priced else [])]:
        table.add_column(heading, justify="right", no_wrap=True)

    def format_dollars(usd: float) -> str:
        return f"{usd:.3f}" if usd < 99.9995 else format_count(round(usd))

    def add_row(
        role: str, purpose: str, calls: EstimateRange, tokens: EstimateRange, usd: EstimateRange | None
    ) -> None:
        counts = (calls.low, calls.expected, calls.high, tokens.expected, tokens.high)
        prices = ("-", "-") if usd is None else (format_dollars(usd.expected), format_dollars(usd.high))
        cells = (*(format_count(round(n)) for n in counts), *(prices if priced else ()))
        table.add_row(role, purpose.replace("_", " "), *cells)

    for row in estimate.rows:
        add_row(row.role, row.purpose, row.calls, row.input_tokens + row.output_tokens, row.usd)
    table.add_section()
    add_row("all", "", estimate.calls, estimate.tokens(), estimate.usd)
    return table


def format_costs(costs: Sequence[StageCost]) -> tuple[str, ...]:
    """Return the time and the spend of each stage, one line each."""
    return tuple(
        f"took: {'; '.join((f'{cost.stage} {format_duration(cost.seconds)}', *format_spend(cost.spend)))}"
        for cost in costs
    )


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
        *_list_belief_lines(record.verdict),
        *(f"pattern: {p.type} ({p.count}): {p.description}" for p in record.patterns),
        *(f"no report of {r.source_type} minibatch {r.index}: {r.no_reply_reason}" for r in refusals),
        *(f"no triage of {r.source_type} minibatch {r.index}: {r.triage_no_reply_reason}" for r in untriaged),
        *(f"reminder: {reminder}" for report in record.reports for reminder in report.reminders),
        *_list_rewrite_lines(record.rewrites),
        *_list_pool_lines(record),
        *(() if record.rewrites else _list_choice_lines(record.chosen)),
        *((f"rewrite: {record.rewrite_summary}",) if record.rewrite_summary else ()),
        *(f"fallback: {format_fallback(fallback)}" for fallback in fallbacks),
        *(_format_edit_result(result) for result in record.edits),
    )


def _list_belief_lines(verdict: Verdict) -> Iterator[str]:
    if (ranked := verdict.ranked) is not None:
        yield (
            f"belief: candidate {_format_belief(ranked.candidate)}, current {_format_belief(ranked.current)}; the "
            f"candidate is better with probability {ranked.p_better:.2f}, after {len(ranked.passes)} more passes"
        )


def _format_belief(belief: Belief) -> str:
    return f"{belief.mean:.3f} ± {belief.deviation:.3f}"


def _list_rewrite_lines(rewrites: Sequence[Rewrite]) -> Iterator[str]:
    for rank, rewrite in enumerate(rewrites):
        if rewrite.document is None:
            yield f"rewrite {rewrite.number + 1}: none, because {rewrite.reason}"
            continue
        measured = rewrite.measurement
        score = "" if measured is None else f", {format_score(measured.hard)} on the items of the step"
        yield f"rewrite {rewrite.number + 1}: {'not ' if rank else ''}chosen{score}"
        if rewrite.reasoning and not rank:
            yield f"reasoning: {rewrite.reasoning}"


def _list_pool_lines(record: StepRecord) -> Iterator[str]:
    proposals = sum(len(report.patch.edits) for report in record.reports)
    pool, chosen = record.merged.patch.edits, record.chosen.patch.edits
    if not proposals:
        return
    sources = f"{name_count(proposals, 'proposal')} of {name_count(len(record.reports), 'report')}"
    yield f"pool: {name_count(len(pool), 'edit')}, merged from {sources}"
    if record.merged.patch.reasoning:
        label = "merge" if any(edit.merge_level for edit in pool) else "reasoning"
        yield f"{label}: {record.merged.patch.reasoning}"
    for number, edit in enumerate(pool, start=1):
        source = "both sources" if edit.source_type is None else f"{edit.source_type} cases"
        rank = chosen.index(edit) + 1 if edit in chosen else None
        words = f"not chosen: {_format_edit(edit)}" if rank is None else f"chosen as number {rank}"
        evidence = f"; evidence: {edit.evidence}" if edit.evidence else ""
        yield f"pool {number}: support {edit.support_count} from {source}, {words}{evidence}"


def _list_choice_lines(chosen: SelectResult) -> Iterator[str]:
    if chosen.decision is not None:
        size = chosen.decision
        risks = f"; risks: {size.risks}" if size.risks else ""
        yield (
            f"step size: {size.count} of {name_count(chosen.pool_size, 'edit')}, confidence {size.confidence:.2f}: "
            f"{size.reasoning}{risks}"
        )
    elif chosen.pool_size:
        limit = "no limit" if chosen.budget is None else f"at most {chosen.budget}"
        yield f"step size: {limit} of {name_count(chosen.pool_size, 'edit')}, by the schedule"
    if chosen.ranked:
        yield f"ranking: {chosen.patch.reasoning or 'without a reason'}"


def _list_epoch_lines(end: EpochRecord) -> Iterator[str]:
    yield format_epoch(end)
    if end.comparisons:
        counts = Counter(comparison.category for comparison in end.comparisons)
        words = ", ".join(f"{count} {category.replace('_', ' ')}" for category, count in counts.items())
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
    """Print how a run ended: counts, scores, spend and files."""

    def say(line: str) -> None:
        line = escape_controls(line)
        if console.is_terminal:
            console.print(wrap_line(line, console))
        else:
            console.print(Text(line), soft_wrap=True)

    for line in describe_outcome(summary, folder):
        say(line)
    others = {a.action: a.count for a in summary.actions}
    unproven = [("set_aside", "set aside"), ("return", "returned"), ("inconclusive", "inconclusive")]
    say(
        f"{summary.status}: {name_count(summary.steps, 'step')}, {summary.accepts} accepted, {summary.rejects} rejected,"
        + "".join(f" {others[action]} {words}," for action, words in unproven if action in others)
        + f" {summary.skips} without a change; {summary.seconds:.1f} s"
    )
    if summary.status == "completed" and summary.reason is not None:
        say(f"ended early: {summary.reason}")
    for name, version in (("best", summary.best), ("final", summary.final)):
        if version is not None:
            say(f"{name}: {_describe_version(version)}")
    if summary.scores:
        console.print(build_score_table(summary.scores))
    for line in (*_list_caveats(summary), *_list_measurements(summary), *format_spend(summary.spend)):
        say(line)
    if summary.faults:
        kinds = ", ".join(f"{fault.count} x {fault.kind}" for fault in summary.faults)
        say(f"failed attempts of calls: {kinds}")
    for name, what in RUN_FILES:
        if (folder / name).exists():
            say(f"{folder / name}  {what}")


def describe_gain(skill: str, other: str, gain: Improvement) -> str:
    """Return a line about what a document gains over another one."""
    low, high = 100 * gain.low, 100 * gain.high
    return (
        f"{skill} over {other} on {gain.split.value}: {100 * gain.mean:+.1f} points "
        f"(95% interval {low:+.1f} to {high:+.1f}, {name_count(gain.n, 'item')})"
    )


def _list_measurements(summary: RunSummary) -> Iterator[str]:
    for score in summary.scores:
        if score.buckets and score.name in {"baseline", "best"}:
            types = ", ".join(f"{b.task_type} {b.hard:.3f} of {b.n}" for b in score.buckets)
            yield f"{score.name} on {score.split.value} by task type: {types}"
    claimed = None if summary.claim is None else summary.claim.improvement
    for gain in (gain for gain in summary.improvements if gain != claimed):
        yield describe_gain(gain.name, "baseline", gain)
    for line in summary.missing:
        yield f"not measured: {line}"


def _list_caveats(summary: RunSummary) -> Iterator[str]:
    yield from (f"warning: {warning}" for warning in summary.warnings)
    frequent = next((score for score in summary.scores if score.name == "null_frequent"), None)
    if frequent is not None:
        words = "the most frequent right answer of the train items"
        yield f"null_frequent: {describe_constant(frequent.answer or '')}, {words}"
    if summary.critic is not None:
        yield f"scores come from {_describe_critic(summary.critic)}"
    if summary.annotated_by is not None:
        yield f"failure analysts saw the scores of {_describe_critic(summary.annotated_by)}"
    if any(score.selected_on for score in summary.scores):
        yield "best and final were selected on the val items, so expect lower scores on new items"


RUN_FILES = (
    ("best_skill.md", "the best skill"),
    ("skills", "every version"),
    ("summary.json", "this summary"),
    ("report.html", "a page on the run"),
    ("run.db", "everything"),
)


def _describe_version(version: SkillVersion) -> str:
    score = "" if version.score is None else f", val {version.score:.3f}"
    score += "" if version.deviation is None else f" ± {version.deviation:.3f} (belief)"
    score += " (partial: not all items were measured)" if version.partial else ""
    score += " (inherited from an earlier version; this text was not measured)" if version.inherited else ""
    return f"v{version.number} from {version.origin}{score}"
