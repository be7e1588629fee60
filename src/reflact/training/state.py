"""Pure functions that build records and events, and apply records to a run's state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reflact import events
from reflact.records import (
    AlphaBudget,
    EpochRecord,
    OpenComparison,
    PromotionRecord,
    RunState,
    SkillVersion,
    StepBufferEntry,
    StepRecord,
)
from reflact.types import Skill, Verdict


def build_first_state(initial: Skill, score: float | None, *, deterministic: bool = True) -> RunState:
    """Return the state before the first step; the initial skill is version 0, current and best."""
    version = SkillVersion(number=0, skill_hash=initial.hash, origin="initial", score=score)
    return RunState(
        current=version, best=version, seen_hashes=(initial.hash,), deterministic=deterministic, commits=1
    )


def create_versions(
    state: RunState, step: int, candidate: Skill, verdict: Verdict, appended: Skill
) -> tuple[SkillVersion, ...]:
    """Return the versions that a step creates: of an accepted candidate, and of the document with new notes."""
    current = state.current
    created: tuple[SkillVersion, ...] = ()
    if verdict.accepted:
        current = SkillVersion(
            number=state.latest_version + 1,
            skill_hash=candidate.hash,
            origin=f"step {step}",
            score=verdict.candidate_score,
        )
        created = (current,)
    if appended.hash == current.skill_hash:
        return created
    number = state.latest_version + len(created) + 1
    return (*created, inherit_version(current, number=number, skill=appended, origin=f"step {step} notes"))


def is_better(verdict: Verdict, best: SkillVersion) -> bool:
    """Return whether an accepted document replaces the best one; without a gate its score decides."""
    if verdict.action != "force_accept":
        return verdict.action == "accept_new_best"
    score = verdict.candidate_score
    return score is not None and (best.score is None or score > best.score)


def inherit_version(parent: SkillVersion, *, number: int, skill: Skill, origin: str) -> SkillVersion:
    """Return the version of an unmeasured text, with its parent's score marked as inherited."""
    return SkillVersion(
        number=number, skill_hash=skill.hash, origin=origin, score=parent.score, inherited=True
    )


def apply_step(
    state: RunState, record: StepRecord, alpha: AlphaBudget, undecided: OpenComparison | None = None
) -> RunState:
    """Return the state after a step.

    Args:
        state: The state before the step.
        record: The record of the step.
        alpha: The error budget of its decision.
        undecided: Its comparison if that was inconclusive.
    """
    verdict = record.verdict
    buffer = state.step_buffer if state.epoch == record.epoch else ()
    seen = {v.skill_hash for v in record.created_versions}
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
            "step_buffer": (*buffer, build_buffer_entry(record)),
            "seen_hashes": _merge_hashes(state.seen_hashes, seen),
            "deterministic": state.deterministic and verdict.deterministic,
            "alphas": add_alpha(state.alphas, alpha),
            "open_comparisons": update_open_comparisons(
                state.open_comparisons, record.candidate_hash, undecided
            ),
        }
    )


def apply_epoch(
    state: RunState, record: EpochRecord, alpha: AlphaBudget, undecided: OpenComparison | None = None
) -> RunState:
    """Return the state after the end of an epoch; see ``apply_step``."""
    slow = record.slow_update
    seen = {v.skill_hash for v in record.created_versions}
    deterministic = state.deterministic
    if slow is not None:
        if slow.verdict is not None:
            deterministic = deterministic and slow.verdict.deterministic
        if slow.candidate_hash is not None and slow.action == "unchanged" and undecided is None:
            seen.add(slow.candidate_hash)
    return state.model_copy(
        update={
            "commits": state.commits + 1,
            "current": record.current,
            "best": record.best,
            "latest_version": max(state.latest_version, record.current.number),
            "seen_hashes": _merge_hashes(state.seen_hashes, seen),
            "deterministic": deterministic,
            "alphas": add_alpha(state.alphas, alpha),
            "open_comparisons": update_open_comparisons(
                state.open_comparisons, None if slow is None else slow.candidate_hash, undecided
            ),
            "last_committed_epoch": record.epoch,
            "last_hash": record.last_hash,
            "meta_skill": state.meta_skill if record.meta_skill is None else record.meta_skill,
        }
    )


def apply_promotion(
    state: RunState, promotion: PromotionRecord, alpha: AlphaBudget, undecided: OpenComparison | None = None
) -> RunState:
    """Return the state after the promotion at the end of the run; see ``apply_step``."""
    return state.model_copy(
        update={
            "commits": state.commits + 1,
            "current": promotion.current,
            "best": promotion.best,
            "deterministic": state.deterministic and promotion.verdict.deterministic,
            "alphas": add_alpha(state.alphas, alpha),
            "open_comparisons": update_open_comparisons(
                state.open_comparisons, promotion.current.skill_hash, undecided
            ),
        }
    )


def find_alpha(
    step: int, alphas: Sequence[AlphaBudget], *, alpha: float, total: int, per_epoch: int, slow_gated: bool
) -> AlphaBudget:
    """Return the error budget for the decisions of a step.

    The first budget covers a whole run: its steps, its gated slow updates (one at the end of each epoch but
    the first) and the final promotion. If an extension adds steps, a further budget of ``alpha`` covers the
    added decisions. Decisions planned earlier keep theirs.

    Args:
        step: The step; at the end of an epoch or of the run, its last step.
        alphas: The budgets so far.
        alpha: The error probability of a new budget.
        total: The steps of the run as currently planned.
        per_epoch: The steps of an epoch.
        slow_gated: Whether the gate decides on slow updates.
    """
    known = next((opened for opened in alphas if opened.until_step >= step), None)
    if known is not None:
        return known
    done = alphas[-1].until_step if alphas else 0
    epochs, before = -(-total // per_epoch), -(-done // per_epoch)
    slow = max(0, epochs - max(1, before)) if slow_gated else 0
    return AlphaBudget(alpha=alpha, decisions=total - done + slow + 1, until_step=total)


def add_alpha(alphas: tuple[AlphaBudget, ...], alpha: AlphaBudget) -> tuple[AlphaBudget, ...]:
    """Return the budgets with one more, unless it is among them."""
    return alphas if alpha in alphas else (*alphas, alpha)


def update_open_comparisons(
    undecided: tuple[OpenComparison, ...], candidate_hash: str | None, again: OpenComparison | None
) -> tuple[OpenComparison, ...]:
    """Return the open comparisons after a decision on a candidate; ``again`` is its own if inconclusive."""
    others = tuple(u for u in undecided if u.skill_hash != candidate_hash)
    return others if again is None else (*others, again)


def version_hashes(
    initial: Skill, records: Sequence[StepRecord], epochs: Sequence[EpochRecord] = ()
) -> dict[int, str]:
    """Return the hashes of all skill versions by number, the initial skill first."""
    created = [record.created_versions for record in records] + [e.created_versions for e in epochs]
    hashes = {v.number: v.skill_hash for versions in created for v in versions}
    return {0: initial.hash} | dict(sorted(hashes.items()))


def _merge_hashes(seen: tuple[str, ...], more: Collection[str]) -> tuple[str, ...]:
    return (*seen, *sorted(set(more) - set(seen)))


def build_buffer_entry(record: StepRecord) -> StepBufferEntry:
    """Return the entry that the prompts of later steps in the epoch show."""
    verdict = record.verdict
    return StepBufferEntry(
        step=record.step,
        action=verdict.action,
        n_failures=record.n_failures,
        n_total=record.rollout.n,
        patterns=tuple(p for report in record.reports for p in report.patterns),
        rejected_edits=record.chosen.patch.edits if verdict.action == "reject" else (),
        score_before=verdict.current_score,
        score_after=verdict.candidate_score,
    )


def build_step_events(run_id: str, record: StepRecord) -> tuple[events.Event, ...]:
    """Return the durable events of a committed step, in order."""
    fallbacks = (*record.merged.fallbacks, *record.chosen.fallbacks, *record.fallbacks)
    return (
        events.StepStarted(run_id=run_id, step=record.step, epoch=record.epoch, item_ids=record.item_ids),
        events.RolloutsFinished(
            run_id=run_id,
            step=record.step,
            n=record.rollout.n,
            failures=record.n_failures,
            unmeasured=len(record.rollout.unmeasured),
        ),
        *(
            events.AnalystReported(run_id=run_id, step=record.step, report=report)
            for report in record.reports
        ),
        *(events.FallbackUsed(run_id=run_id, step=record.step, fallback=fallback) for fallback in fallbacks),
        events.EditsApplied(
            run_id=run_id,
            step=record.step,
            pool_size=record.chosen.pool_size,
            budget=record.chosen.budget,
            results=record.edits,
        ),
        events.CandidateJudged(run_id=run_id, step=record.step, verdict=record.verdict),
        *(
            events.SkillVersionCreated(run_id=run_id, step=record.step, version=version)
            for version in record.created_versions
        ),
        events.StepCommitted(
            run_id=run_id,
            step=record.step,
            epoch=record.epoch,
            action=record.verdict.action,
            current=record.current,
            best=record.best,
        ),
    )


def build_epoch_events(run_id: str, record: EpochRecord) -> tuple[events.Event, ...]:
    """Return the durable events of an epoch's end."""
    closed = events.EpochCommitted(
        run_id=run_id,
        step=record.step,
        epoch=record.epoch,
        slow_update=record.slow_update,
        meta_skill=record.meta_skill,
        fallbacks=record.fallbacks,
        current=record.current,
        best=record.best,
    )
    created = (
        events.SkillVersionCreated(run_id=run_id, step=record.step, version=version)
        for version in record.created_versions
    )
    return (*created, closed)
