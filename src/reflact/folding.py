"""How a step and an epoch's end change a run's state. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reflact import events
from reflact.gate import measure
from reflact.records import (
    Alpha,
    BufferEntry,
    EpochRecord,
    Promotion,
    RunState,
    StepRecord,
    Undecided,
    Version,
)
from reflact.types import (
    Candidate,
    Chosen,
    Merged,
    Noted,
    Report,
    Rollout,
    Skill,
    Split,
    Verdict,
)


def first_state(initial: Skill, score: float | None, *, deterministic: bool = True) -> RunState:
    """Return the state before the first step; the initial skill is version 0, current and best."""
    version = Version(number=0, skill_hash=initial.hash, origin="initial", score=score)
    return RunState(
        current=version, best=version, seen_hashes=(initial.hash,), deterministic=deterministic, commits=1
    )


def record_of(
    state: RunState,
    *,
    step: int,
    epoch: int,
    step_in_epoch: int,
    rollouts: Sequence[Rollout],
    n_failures: int,
    reports: Sequence[Report],
    merged: Merged,
    chosen: Chosen,
    candidate: Candidate,
    verdict: Verdict,
    noted: Noted,
) -> StepRecord:
    """Put a step's outcomes together into the record that is committed."""
    current, best = state.current, state.best
    made: tuple[Version, ...] = ()
    if verdict.accepted:
        current = Version(
            number=state.latest_version + 1,
            skill_hash=candidate.skill.hash,
            origin=f"step {step}",
            score=verdict.candidate_score,
        )
        made += (current,)
        best = current if is_better(verdict, best) else best
    if noted.skill.hash != current.skill_hash:
        current = heir(
            current,
            number=state.latest_version + len(made) + 1,
            skill=noted.skill,
            origin=f"step {step} notes",
        )
        made += (current,)
    return StepRecord(
        step=step,
        epoch=epoch,
        step_in_epoch=step_in_epoch,
        skill_before=state.current.skill_hash,
        item_ids=tuple(r.item_id for r in rollouts),
        rollout=measure(state.current.skill_hash, Split.train, rollouts),
        n_failures=n_failures,
        reports=tuple(reports),
        merged=merged,
        chosen=chosen,
        edits=candidate.results,
        candidate_hash=candidate.skill.hash,
        verdict=verdict,
        made=made,
        notes=noted.notes,
        current=current,
        best=best,
        fallbacks=(*candidate.fallbacks, *noted.fallbacks),
    )


def is_better(verdict: Verdict, best: Version) -> bool:
    """Return whether an accepted document takes the place of the best; without a gate, by its bare score."""
    if verdict.action != "force_accept":
        return verdict.action == "accept_new_best"
    mark = verdict.candidate_score
    return mark is not None and (best.score is None or mark > best.score)


def heir(parent: Version, *, number: int, skill: Skill, origin: str) -> Version:
    """Return the version of a text that was not measured: it shows its parent's score as inherited."""
    return Version(number=number, skill_hash=skill.hash, origin=origin, score=parent.score, inherited=True)


def after(state: RunState, record: StepRecord, alpha: Alpha, undecided: Undecided | None = None) -> RunState:
    """Return the state after a step.

    Args:
        state: The state before it.
        record: What it did.
        alpha: The error probability that its decision was taken under.
        undecided: Its comparison, where that stayed inconclusive.
    """
    verdict = record.verdict
    buffer = state.step_buffer if state.epoch == record.epoch else ()
    seen = {v.skill_hash for v in record.made}
    if undecided is None:
        seen.add(record.candidate_hash)
    return state.model_copy(
        update={
            "step": record.step,
            "epoch": record.epoch,
            "commits": state.commits + 1,
            "current": record.current,
            "best": record.best,
            "latest_version": max(state.latest_version, record.current.number),
            "step_buffer": (*buffer, buffer_entry(record)),
            "seen_hashes": _together(state.seen_hashes, seen),
            "deterministic": state.deterministic and verdict.deterministic,
            "alphas": opened(state.alphas, alpha),
            "undecided": still_open(state.undecided, record.candidate_hash, undecided),
        }
    )


def after_epoch(
    state: RunState, record: EpochRecord, alpha: Alpha, undecided: Undecided | None = None
) -> RunState:
    """Return the state after an epoch's end; the arguments are those of ``after``."""
    slow = record.slow
    seen = {v.skill_hash for v in record.made}
    deterministic = state.deterministic
    if slow is not None:
        if slow.verdict is not None:
            deterministic = deterministic and slow.verdict.deterministic
        if slow.candidate_hash is not None and slow.action == "kept" and undecided is None:
            seen.add(slow.candidate_hash)
    return state.model_copy(
        update={
            "commits": state.commits + 1,
            "current": record.current,
            "best": record.best,
            "latest_version": max(state.latest_version, record.current.number),
            "seen_hashes": _together(state.seen_hashes, seen),
            "deterministic": deterministic,
            "alphas": opened(state.alphas, alpha),
            "undecided": still_open(
                state.undecided, None if slow is None else slow.candidate_hash, undecided
            ),
            "closed_epoch": record.epoch,
            "last_hash": record.last_hash,
            "meta": state.meta if record.meta is None else record.meta,
        }
    )


def after_promotion(
    state: RunState, promotion: Promotion, alpha: Alpha, undecided: Undecided | None = None
) -> RunState:
    """Return the state after the last skill met the best; the arguments are those of ``after``."""
    return state.model_copy(
        update={
            "commits": state.commits + 1,
            "current": promotion.current,
            "best": promotion.best,
            "deterministic": state.deterministic and promotion.verdict.deterministic,
            "alphas": opened(state.alphas, alpha),
            "undecided": still_open(state.undecided, promotion.current.skill_hash, undecided),
        }
    )


def alpha_at(
    step: int, alphas: Sequence[Alpha], *, alpha: float, total: int, per_epoch: int, slow_gated: bool
) -> Alpha:
    """Return the error probability under which the decisions of a step are taken.

    The first is opened for a whole run: its steps, its gated slow updates (one at the end of each epoch
    but the first) and the promotion at its end. Steps beyond it, which an extension adds, open another one,
    with ``alpha`` anew, for the decisions that are added; those that were planned before keep theirs.

    Args:
        step: The step; for the end of an epoch or of the run, the last one before it.
        alphas: Those opened so far.
        alpha: The error probability to open another one with.
        total: The run's steps, as it is planned now.
        per_epoch: Those of an epoch.
        slow_gated: Whether slow updates go through the gate.
    """
    known = next((opened for opened in alphas if opened.until_step >= step), None)
    if known is not None:
        return known
    done = alphas[-1].until_step if alphas else 0
    epochs, before = -(-total // per_epoch), -(-done // per_epoch)
    slow = max(0, epochs - max(1, before)) if slow_gated else 0
    return Alpha(alpha=alpha, decisions=total - done + slow + 1, until_step=total)


def opened(alphas: tuple[Alpha, ...], alpha: Alpha) -> tuple[Alpha, ...]:
    """Return the error probabilities with one more, unless it is the last of them."""
    return alphas if alpha in alphas else (*alphas, alpha)


def still_open(
    undecided: tuple[Undecided, ...], candidate_hash: str | None, again: Undecided | None
) -> tuple[Undecided, ...]:
    """Return the comparisons that are open after one of a candidate, ``again`` if it is open itself."""
    others = tuple(u for u in undecided if u.skill_hash != candidate_hash)
    return others if again is None else (*others, again)


def versions(
    initial: Skill, records: Sequence[StepRecord], epochs: Sequence[EpochRecord] = ()
) -> dict[int, str]:
    """Return the hashes of all skill versions by number, the initial skill first."""
    made = {v.number: v.skill_hash for record in records for v in record.made}
    made |= {v.number: v.skill_hash for record in epochs for v in record.made}
    return {0: initial.hash} | dict(sorted(made.items()))


def _together(seen: tuple[str, ...], more: Collection[str]) -> tuple[str, ...]:
    return (*seen, *sorted(set(more) - set(seen)))


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


def step_events(run_id: str, record: StepRecord) -> tuple[events.Event, ...]:
    """Return the durable events of a committed step, in the plan's order."""
    fallbacks = (*record.merged.fallbacks, *record.chosen.fallbacks, *record.fallbacks)
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
        *(events.SkillMade(run_id=run_id, step=record.step, version=version) for version in record.made),
        events.StepCommitted(
            run_id=run_id,
            step=record.step,
            epoch=record.epoch,
            action=record.verdict.action,
            current=record.current,
            best=record.best,
        ),
    )


def epoch_events(run_id: str, record: EpochRecord) -> tuple[events.Event, ...]:
    """Return the durable events of an epoch's end."""
    closed = events.EpochClosed(
        run_id=run_id,
        step=record.step,
        epoch=record.epoch,
        slow=record.slow,
        meta=record.meta,
        fallbacks=record.fallbacks,
        current=record.current,
        best=record.best,
    )
    made = (events.SkillMade(run_id=run_id, step=record.step, version=version) for version in record.made)
    return (*made, closed)
