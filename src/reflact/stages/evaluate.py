"""Stage 6: compares a candidate with the current skill on the validation split, and lets the gate
decide.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from reflact.concurrency import fan_out
from reflact.gate.greater_mean import (
    GateSettings,
    Ruling,
    ScorePair,
    check_coverage,
    choose_repeats,
    decide,
    find_unconfirmed,
    has_disagreement,
)
from reflact.records import weigh_scores
from reflact.types import (
    AggregateResult,
    Candidate,
    FrozenModel,
    GateAction,
    Measurement,
    Rollout,
    SelectResult,
    Skill,
    Split,
    Verdict,
    is_failure,
)

RolloutPairs = Sequence[tuple[Rollout, Rollout]]

# Rolls a skill out on one trial of these items, in their order.
PassRunner = Callable[[Skill, int, Sequence[str]], Awaitable[Sequence[Rollout]]]


class GateMetric(FrozenModel):
    """How a score becomes one number: ``(1 - mixed_weight) * hard + mixed_weight * soft`` if mixed.

    An item is solved if its hard score reaches ``threshold``; None: if it is above 0.
    """

    metric: Literal["hard", "soft", "mixed"]
    mixed_weight: float = 0.5
    threshold: float | None = None

    def score_rollout(self, rollout: Rollout) -> float | None:
        """Return a rollout's score in the metric, in 0..1; None if it is unmeasured."""
        return (
            None if rollout.score is None else self._combine(rollout.score.hard, rollout.score.soft)
        )

    def score_pair(self, candidate: Rollout, current: Rollout) -> ScorePair:
        """Return the scores of two rollouts of an item."""
        return ScorePair(
            item_id=candidate.item_id,
            candidate=self.score_rollout(candidate),
            current=self.score_rollout(current),
            candidate_solved=None
            if candidate.score is None
            else not is_failure(candidate, self.threshold),
            current_solved=None
            if current.score is None
            else not is_failure(current, self.threshold),
            candidate_refused=candidate.refused,
            current_refused=current.refused,
        )

    def score_measurement(self, measurement: Measurement) -> float | None:
        """Return a measurement in the metric; None if nothing was measured."""
        if measurement.hard is None or measurement.soft is None:
            return None
        return self._combine(measurement.hard, measurement.soft)

    @property
    def soft_weight(self) -> float:
        """The weight of the soft score, 0..1; the hard score has the rest."""
        return {"hard": 0.0, "soft": 1.0, "mixed": self.mixed_weight}[self.metric]

    def _combine(self, hard: float, soft: float) -> float:
        return weigh_scores(hard, soft, self.soft_weight)


def build_measurement(skill_hash: str, split: Split, rollouts: Sequence[Rollout]) -> Measurement:
    """Return the means of one skill's rollouts on a split; their order does not matter.

    Raises:
        ValueError: A rollout belongs to another skill.
    """
    if any(rollout.skill_hash != skill_hash for rollout in rollouts):
        raise ValueError(f"rollouts of another skill than {skill_hash} cannot measure it")
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    return Measurement(
        skill_hash=skill_hash,
        split=split,
        n=len(scores),
        unmeasured=tuple(
            sorted({rollout.item_id for rollout in rollouts if rollout.score is None})
        ),
        hard=_mean([score.hard for score in scores]),
        soft=_mean([score.soft for score in scores]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


class EvaluationResult(FrozenModel):
    """The verdict on a candidate, and the unmeasured rollouts of its passes."""

    verdict: Verdict
    unmeasured: tuple[Rollout, ...] = ()


def decide_without_evaluation(
    candidate: Candidate,
    current: Skill,
    *,
    merged: AggregateResult,
    chosen: SelectResult,
    known: Mapping[str, str],
) -> Verdict | None:
    """Return the verdict on a candidate that needs no evaluation; None if it needs one.

    ``chosen`` are the edits of the pool ``merged`` that the candidate was made with. ``known`` are
    all documents that this run uses or has rejected, by hash, each with the version or the step
    that it is from.
    """
    if not merged.patch.edits:
        return Verdict(action="no_patches", reason="No analyst proposed an edit.")
    if candidate.fallbacks:
        return Verdict(
            action="no_rewrite",
            reason=f"The rewrite call gave no valid reply: {candidate.fallbacks[0].reason}",
        )
    if chosen.pool_size and not chosen.patch.edits:
        pool = f"{len(merged.patch.edits)} proposed edits"
        if chosen.decision is not None:
            reason = f"The optimizer chose to apply none of the {pool}: {chosen.decision.reasoning}"
        else:
            reason = f"The schedule allows no edit in this step, so none of the {pool} was applied."
        return Verdict(action="no_change", reason=reason)
    name = known.get(candidate.skill.hash)
    if candidate.skill.hash == current.hash:
        version = "" if name is None else f", {name}"
        return Verdict(
            action="no_change", reason=f"The edits leave the document as it is{version}."
        )
    if name is not None:
        reason = f"The document is the same as {name}, so it was not measured again."
        return Verdict(action="no_change", reason=reason, repeats=name)
    return None


async def evaluate(
    candidate: Skill,
    current: Skill,
    best: Skill,
    *,
    settings: GateSettings,
    metric: GateMetric,
    run_pass: PassRunner,
) -> EvaluationResult | None:
    """Return the verdict on a candidate by the greater mean of one pass; None if a repeat shows a
    noisy target.

    A candidate with a greater mean than the current skill is accepted. To become the best skill, it
    must also have a greater mean than the best skill, unless that is the current one. ``run_pass``
    rolls a skill out on the validation split.
    """
    first = await roll_out_pairs(candidate, current, settings.item_ids, trial=0, run_pass=run_pass)
    scores = [metric.score_pair(*pair) for pair in first]
    ruling = decide(settings, scores)
    used = first

    if ruling.action == "accept" and settings.confirms:
        repeats = choose_repeats(scores)
        again = await roll_out_pairs(candidate, current, repeats, trial=1, run_pass=run_pass)
        repeated = [metric.score_pair(*pair) for pair in again]
        if has_disagreement(scores, repeated):
            return None
        ruling = find_unconfirmed(scores, repeated) or ruling
        used = [*used, *again]

    result = _build_result(first, used, candidate, current, ruling, metric=metric)
    if ruling.action != "accept":
        return result
    if best.hash == current.hash:
        return _change_verdict(result, action="accept_new_best", reason=ruling.reason)

    theirs = await run_pass(best, 0, settings.item_ids)
    pairs = [metric.score_pair(side, other) for (side, _), other in zip(first, theirs, strict=True)]
    second = decide(settings.model_copy(update={"no_regression": None}), pairs, other="best")
    actions: dict[str, GateAction] = {"accept": "accept_new_best", "unmeasured": "unmeasured"}
    action = actions.get(second.action, "accept")
    lost = tuple(rollout for rollout in theirs if rollout.score is None)
    result = result.model_copy(update={"unmeasured": result.unmeasured + lost})
    return _change_verdict(result, action=action, reason=f"{ruling.reason} {second.reason}")


async def force_accept(
    candidate: Skill,
    current: Skill,
    *,
    settings: GateSettings,
    metric: GateMetric,
    run_pass: PassRunner,
) -> EvaluationResult:
    """Return the verdict if the gate is off: accepted if enough of one pass could be measured."""
    pairs = await roll_out_pairs(candidate, current, settings.item_ids, trial=0, run_pass=run_pass)
    scores = [metric.score_pair(*pair) for pair in pairs]
    ruling = check_coverage(settings.coverage, scores)
    if ruling is not None:
        return _build_result(pairs, pairs, candidate, current, ruling, metric=metric)
    ruling = Ruling(action="accept", reason="The gate is off: every candidate is accepted.")
    result = _build_result(pairs, pairs, candidate, current, ruling, metric=metric)
    return _change_verdict(result, action="force_accept", reason=ruling.reason)


async def roll_out_pairs(
    candidate: Skill, current: Skill, item_ids: Sequence[str], *, trial: int, run_pass: PassRunner
) -> RolloutPairs:
    """Return one trial of the items under both skills, whose passes run at the same time."""
    new, old = await fan_out(lambda skill: run_pass(skill, trial, item_ids), (candidate, current))
    return tuple(zip(new, old, strict=True))


def _build_result(
    pairs: RolloutPairs,
    used: RolloutPairs,
    candidate: Skill,
    current: Skill,
    ruling: Ruling,
    *,
    metric: GateMetric,
) -> EvaluationResult:
    """Return the verdict with the mean scores of one pass, without the repeats that are among the
    ``used`` pairs.
    """
    measured = [pair for pair in pairs if all(side.score is not None for side in pair)]
    lost = tuple(sorted({side.item_id for pair in pairs for side in pair if side.score is None}))
    new = build_measurement(candidate.hash, Split.val, [theirs for theirs, _ in measured])
    old = build_measurement(current.hash, Split.val, [ours for _, ours in measured])
    verdict = Verdict(
        action=ruling.action,
        reason=ruling.reason,
        candidate=new.model_copy(update={"unmeasured": lost}),
        current=old.model_copy(update={"unmeasured": lost}),
        candidate_score=metric.score_measurement(new),
        current_score=metric.score_measurement(old),
    )
    unmeasured = tuple(side for pair in used for side in pair if side.score is None)
    return EvaluationResult(verdict=verdict, unmeasured=unmeasured)


def _change_verdict(
    result: EvaluationResult, *, action: GateAction, reason: str
) -> EvaluationResult:
    verdict = result.verdict.model_copy(update={"action": action, "reason": reason})
    return result.model_copy(update={"verdict": verdict})
