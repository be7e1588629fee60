"""How a step changes a run's state, and how a run is summed up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from reflact import events
from reflact.gate import measure
from reflact.results import EpochStats, RunSummary, Scored, Spend, Status
from reflact.types import (
    BufferEntry,
    Candidate,
    Chosen,
    Merged,
    Report,
    Rollout,
    RunState,
    Skill,
    Split,
    StepRecord,
    Verdict,
    Version,
)

UNCHANGED = {"no_change", "no_patches"}


def first_state(initial: Skill, score: float | None) -> RunState:
    """Return the state before the first step; the initial skill is version 0, current and best."""
    version = Version(number=0, skill_hash=initial.hash, origin="initial", score=score)
    return RunState(current=version, best=version, seen_hashes=(initial.hash,))


def record_of(
    state: RunState,
    *,
    step: int,
    epoch: int,
    step_in_epoch: int,
    rollouts: Sequence[Rollout],
    reports: Sequence[Report],
    merged: Merged,
    chosen: Chosen,
    candidate: Candidate,
    verdict: Verdict,
) -> StepRecord:
    """Put a step's outcomes together into the record that is committed."""
    accepted = verdict.accepted
    mark, best = verdict.candidate_score, state.best.score
    best_is_new = accepted and mark is not None and (best is None or mark > best)
    number = state.latest_version + 1
    return StepRecord(
        step=step,
        epoch=epoch,
        step_in_epoch=step_in_epoch,
        skill_before=state.current.skill_hash,
        item_ids=tuple(r.item_id for r in rollouts),
        rollout=measure(state.current.skill_hash, Split.train, rollouts),
        n_failures=sum(r.failed for r in rollouts),
        reports=tuple(reports),
        merged=merged,
        chosen=chosen,
        edits=candidate.results,
        candidate_hash=candidate.skill.hash,
        verdict=verdict,
        skill_after=candidate.skill.hash if accepted else state.current.skill_hash,
        version_after=number if accepted else state.current.number,
        score_after=verdict.candidate_score if accepted else state.current.score,
        best_hash=candidate.skill.hash if best_is_new else state.best.skill_hash,
        best_score=verdict.candidate_score if best_is_new else state.best.score,
    )


def after(state: RunState, record: StepRecord) -> RunState:
    """Return the state after a step."""
    verdict = record.verdict
    current, best = state.current, state.best
    if verdict.accepted:
        current = Version(
            number=record.version_after,
            skill_hash=record.skill_after,
            origin=f"step {record.step}",
            score=record.score_after,
        )
        if record.best_hash == record.skill_after:
            best = current
    buffer = state.step_buffer if state.epoch == record.epoch else ()
    seen = state.seen_hashes
    if record.candidate_hash not in seen:
        seen = (*seen, record.candidate_hash)
    return RunState(
        step=record.step,
        epoch=record.epoch,
        current=current,
        best=best,
        latest_version=max(state.latest_version, current.number),
        step_buffer=(*buffer, buffer_entry(record)),
        seen_hashes=seen,
    )


def versions(initial: Skill, records: Sequence[StepRecord]) -> dict[int, str]:
    """Return the hashes of all skill versions by number, the initial skill first."""
    return {0: initial.hash} | {r.version_after: r.skill_after for r in records if r.verdict.accepted}


def buffer_entry(record: StepRecord) -> BufferEntry:
    """Return what later steps of the epoch are told of this one."""
    verdict = record.verdict
    return BufferEntry(
        step=record.step,
        action=verdict.action,
        n_failures=record.n_failures,
        n_total=record.rollout.n,
        patterns=tuple(p for report in record.reports for p in report.patterns),
        rejected_edits=record.chosen.patch.edits if verdict.action == "reject" else (),
        score_before=verdict.current_score,
        score_after=verdict.candidate_score,
    )


def step_events(run_id: str, record: StepRecord, state: RunState) -> tuple[events.Event, ...]:
    """Return the durable events of a committed step, in the plan's order."""
    fallbacks = (*record.merged.fallbacks, *record.chosen.fallbacks)
    return (
        events.StepStarted(run_id=run_id, step=record.step, epoch=record.epoch, item_ids=record.item_ids),
        events.RolloutsDone(
            run_id=run_id,
            step=record.step,
            n=record.rollout.n,
            failures=record.n_failures,
            unmeasured=len(record.rollout.unmeasured),
        ),
        *(events.ReportDone(run_id=run_id, step=record.step, report=report) for report in record.reports),
        *(events.FallbackTaken(run_id=run_id, step=record.step, fallback=fallback) for fallback in fallbacks),
        events.EditsApplied(
            run_id=run_id,
            step=record.step,
            pool_size=record.chosen.pool_size,
            budget=record.chosen.budget,
            results=record.edits,
        ),
        events.Decided(run_id=run_id, step=record.step, verdict=record.verdict),
        events.StepCommitted(
            run_id=run_id,
            step=record.step,
            epoch=record.epoch,
            action=record.verdict.action,
            current=state.current,
            best=state.best,
        ),
    )


def summarise(
    records: Sequence[StepRecord],
    state: RunState | None,
    *,
    run_id: str,
    status: Status,
    reason: str | None,
    scores: Sequence[Scored],
    spend: Sequence[Spend],
    openings: int,
    seconds: float,
    config: JsonValue,
) -> RunSummary:
    """Sum a run up; a run that ended before its first state has no best and no final skill."""
    epochs = sorted({r.epoch for r in records})
    return RunSummary(
        run_id=run_id,
        status=status,
        reason=reason,
        steps=len(records),
        accepts=sum(r.verdict.accepted for r in records),
        rejects=sum(r.verdict.action == "reject" for r in records),
        skips=sum(r.verdict.action in UNCHANGED for r in records),
        best=state.best if state is not None else None,
        final=state.current if state is not None else None,
        scores=tuple(scores),
        epochs=tuple(_epoch(e, [r for r in records if r.epoch == e]) for e in epochs),
        spend=tuple(spend),
        test_openings=openings,
        seconds=seconds,
        config=config,
    )


def _epoch(epoch: int, records: Sequence[StepRecord]) -> EpochStats:
    return EpochStats(
        epoch=epoch,
        steps=len(records),
        accepts=sum(r.verdict.accepted for r in records),
        rejects=sum(r.verdict.action == "reject" for r in records),
        skips=sum(r.verdict.action in UNCHANGED for r in records),
        current_score=records[-1].score_after,
        best_score=records[-1].best_score,
    )
