"""Pure functions that build records, versions and events of a run's commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from reflact import events
from reflact.gate.ranked_decision import BEST_ABOVE, Posterior
from reflact.records import (
    ActionCount,
    CommitRecord,
    EpochRecord,
    PromotionRecord,
    RunState,
    RunSummary,
    SkillVersion,
    StepRecord,
)
from reflact.types import Candidate, GateAction, Ranking, Skill, Verdict

ACTIONS: tuple[GateAction, ...] = get_args(GateAction)
Record = TypeVar("Record", StepRecord, EpochRecord, PromotionRecord)

UNCHANGED: tuple[GateAction, ...] = ("no_change", "no_patches", "no_rewrite")


def build_first_state(
    initial: Skill, score: float | None, *, deterministic: bool, ranking: Ranking | None
) -> RunState:
    """Return the state before the first step; the initial skill is version 0, current and best."""
    version = SkillVersion(number=0, skill_hash=initial.hash, origin="initial", score=score)
    if ranking is not None and not deterministic:
        version = add_measured_score(version, ranking)
    return RunState(
        current=version,
        best=version,
        seen_hashes=(initial.hash,),
        deterministic=deterministic,
        commits=1,
        kept=(version,),
        ranking=ranking,
    )


def derive_version(
    parent: SkillVersion, number: int, skill: Skill, origin: str, verdict: Verdict | None = None
) -> SkillVersion:
    """Return the version of a text that was made from a parent.

    Without a verdict on the text, its score is the parent's, marked as inherited.
    """
    return parent.model_copy(
        update={
            "number": number,
            "skill_hash": skill.hash,
            "origin": origin,
            "score": parent.score if verdict is None else verdict.candidate_score,
            "inherited": verdict is None,
            "n": None,
            "trials": None,
        }
    )


def create_versions(
    state: RunState, step: int, candidate: Candidate, verdict: Verdict, appended: Skill
) -> tuple[SkillVersion, ...]:
    """Return the versions of an accepted candidate, and of the document with new notes."""
    current = find_current(state, verdict)
    number = state.latest_version + 1
    created: tuple[SkillVersion, ...] = ()
    if verdict.accepted:
        current = derive_version(state.current, number, candidate.skill, f"step {step}", verdict)
        if candidate.examples is not None:
            current = current.model_copy(update={"examples": candidate.examples})
        created = (current,)
        number += 1
    if appended.hash != current.skill_hash:
        created += (derive_version(current, number, appended, f"step {step} notes"),)
    return created


def name_documents(state: RunState, earlier: Sequence[StepRecord]) -> dict[str, str]:
    """Return where each document that was decided on is from, by hash: a version or a step."""
    names = dict.fromkeys(state.seen_hashes, "in a slow update")
    steps = {record.candidate_hash: f"in step {record.step}" for record in reversed(earlier)}
    names |= {document: name for document, name in steps.items() if document in names}
    return names | {version.skill_hash: f"v{version.number}" for version in reversed(state.kept)}


def find_current(state: RunState, verdict: Verdict) -> SkillVersion:
    """Return the version on which the run goes on, unless it goes on with an accepted candidate."""
    if verdict.ranked is None or verdict.action != "return":
        return state.current
    return next(version for version in state.kept if version.skill_hash == verdict.ranked.chosen)


def replaces_best(verdict: Verdict, best: SkillVersion) -> bool:
    """Return whether an accepted document replaces the best one; without a gate by score."""
    if verdict.action != "force_accept":
        return verdict.action == "accept_new_best"
    score = verdict.candidate_score
    return score is not None and (best.score is None or score > best.score)


def choose_best(state: RunState, record: Record) -> Record:
    """Return a record with the best version by belief, and measured scores; for the ranked gate.

    The current version is the best one if it is better than the initial one with a probability of
    at least 0.9; otherwise the initial one is. While the current version has no pass, the one it
    was made from stands for it.
    """
    later: RunState = state.after([record])
    verdict = record.verdict
    ranking = later.ranking
    if ranking is None or (state.deterministic and (verdict is None or verdict.deterministic)):
        return record
    posterior = Posterior(ranking)
    best = state.kept[0]
    measured = ranking.list_lineage(record.current.skill_hash)[-1]
    if posterior.find_probability(measured, best.skill_hash) >= BEST_ABOVE:
        versions = (record.current, *later.kept)
        best = next(version for version in versions if version.skill_hash == measured)

    update: dict[str, object] = {
        "current": add_measured_score(record.current, ranking),
        "best": add_measured_score(best, ranking),
    }
    if not isinstance(record, PromotionRecord):
        created = (add_measured_score(version, ranking) for version in record.created_versions)
        update["created_versions"] = tuple(created)
    return record.model_copy(update=update)


def add_measured_score(version: SkillVersion, ranking: Ranking) -> SkillVersion:
    """Return a version with the mean of all its passes, or else of those of its origin."""
    source = ranking.list_lineage(version.skill_hash)[-1]
    measured = ranking.find_score(source)
    if measured is None:
        return version
    update: dict[str, object] = {"score": measured.score, "inherited": True}
    update |= {"n": None, "trials": None}
    if source == version.skill_hash:
        update = {**measured.model_dump(), "inherited": False}
    return version.model_copy(update=update)


def version_hashes(
    initial: Skill, records: Sequence[StepRecord], epochs: Sequence[EpochRecord] = ()
) -> dict[int, str]:
    """Return the hashes of all skill versions by number, the initial skill first."""
    created = [r.created_versions for r in records] + [e.created_versions for e in epochs]
    hashes = {v.number: v.skill_hash for versions in created for v in versions}
    return {0: initial.hash} | dict(sorted(hashes.items()))


def build_commit_events(
    run_id: str, record: CommitRecord | None, state: RunState
) -> Iterator[events.Event]:
    """Yield the durable events of a commit; without a record, of the first one with its state."""
    if record is None:
        yield events.SkillVersionCreated(run_id=run_id, version=state.current)
        return
    base: dict[str, Any] = {"run_id": run_id, "step": record.step}
    verdict = record.verdict
    if isinstance(record, PromotionRecord):
        yield events.PromotionJudged(**base, verdict=record.verdict, best=record.best)
        return
    if isinstance(record, StepRecord):
        yield from _build_step_events(base, record)
    if verdict is not None and verdict.action == "return" and verdict.ranked is not None:
        chosen = verdict.ranked.chosen
        yield events.VersionReturned(**base, skill_hash=chosen, reason=verdict.reason)
    for version in record.created_versions:
        yield events.SkillVersionCreated(**base, version=version)
    base |= {"epoch": record.epoch, "current": record.current, "best": record.best}
    if isinstance(record, StepRecord):
        yield events.StepCommitted(**base, action=record.verdict.action)
    else:
        yield events.EpochCommitted(
            **base,
            slow_update=record.slow_update,
            meta_skill=record.meta_skill,
            fallbacks=record.fallbacks,
        )


def _build_step_events(base: dict[str, Any], record: StepRecord) -> Iterator[events.Event]:
    chosen = record.chosen
    yield events.StepStarted(**base, epoch=record.epoch, item_ids=record.item_ids)
    yield events.RolloutsFinished(
        **base,
        n=record.rollout.n,
        failures=record.n_failures,
        unmeasured=len(record.rollout.unmeasured),
    )
    for report in record.reports:
        yield events.AnalystReported(**base, report=report)
    for fallback in (*record.merged.fallbacks, *chosen.fallbacks, *record.fallbacks):
        yield events.FallbackUsed(**base, fallback=fallback)
    yield events.EditsApplied(
        **base, pool_size=chosen.pool_size, budget=chosen.budget, results=record.edits
    )
    yield events.CandidateJudged(**base, verdict=record.verdict)


def summarize_history(summary: RunSummary, records: Sequence[StepRecord]) -> RunSummary:
    """Return a summary with counts of the committed steps."""
    actions: Counter[str] = Counter(record.verdict.action for record in records)
    return summary.model_copy(
        update={
            "steps": len(records),
            "accepts": sum(record.verdict.accepted for record in records),
            "rejects": actions["reject"],
            "skips": sum(actions[action] for action in UNCHANGED),
            "actions": tuple(
                ActionCount(action=a, count=actions[a]) for a in ACTIONS if actions[a]
            ),
        }
    )


def find_unmeasured(records: Sequence[StepRecord]) -> tuple[str, ...]:
    """Return the train items that have no score in the last step that drew them."""
    is_lost: dict[str, bool] = {}
    for record in records:
        for item_id in record.item_ids:
            is_lost[item_id] = item_id in record.rollout.unmeasured
    return tuple(item_id for item_id, lost in is_lost.items() if lost)
