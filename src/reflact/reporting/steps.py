"""A step in full for a terminal: verdict, patterns, pool of edits, choice, edits, guidance and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from reflact.records import EpochRecord, StepRecord
from reflact.reporting.lines import format_epoch, format_fallback
from reflact.training.history import StepDetails
from reflact.types import Belief, Edit, EditResult, SelectResult, Verdict


def format_details(details: StepDetails) -> tuple[str, ...]:
    """Return a step with the memory that its prompts showed, and the end of the epoch if one followed."""
    memory = () if not details.memory else (f"memory of the optimizer: {details.memory}",)
    end = () if details.epoch_end is None else tuple(_list_epoch_lines(details.epoch_end))
    return (*format_step(details.record), *memory, *end)


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
        *_list_pool_lines(record),
        *_list_choice_lines(record.chosen),
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


def _list_pool_lines(record: StepRecord) -> Iterator[str]:
    proposals = sum(len(report.patch.edits) for report in record.reports)
    pool, chosen = record.merged.patch.edits, record.chosen.patch.edits
    if not proposals:
        return
    yield f"pool: {len(pool)} edits, merged from {proposals} proposals of {len(record.reports)} reports"
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
            f"step size: {size.count} of {chosen.pool_size} edits, confidence {size.confidence:.2f}: "
            f"{size.reasoning}{risks}"
        )
    elif chosen.pool_size:
        limit = "no limit" if chosen.budget is None else f"at most {chosen.budget}"
        yield f"step size: {limit} of {chosen.pool_size} edits, by the schedule"
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
