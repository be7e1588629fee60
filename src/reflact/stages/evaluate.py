"""Stage 6: compares a candidate with the current skill on the validation split, and decides."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from reflact.concurrency import fan_out
from reflact.gate.greater_mean import (
    GateSettings,
    Ruling,
    ScorePair,
    check_pairs,
    choose_repeats,
    decide,
    has_disagreement,
)
from reflact.records import weigh_scores
from reflact.types import (
    AggregateResult,
    Candidate,
    FrozenModel,
    GateAction,
    Item,
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

    metric: Literal["hard", "soft", "mixed"] = "hard"
    mixed_weight: float = 0.5
    threshold: float | None = None

    @property
    def soft_weight(self) -> float:
        """The weight of the soft score, 0..1; the hard score has the rest."""
        return {"hard": 0.0, "soft": 1.0, "mixed": self.mixed_weight}[self.metric]

    def score_rollout(self, rollout: Rollout) -> float | None:
        """Return a rollout's score in the metric, in 0..1; None if it is unmeasured."""
        if rollout.score is None:
            return None
        return weigh_scores(rollout.score.hard, rollout.score.soft, self.soft_weight)

    def score_items(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        """Return the scores of one pass by item."""
        return {rollout.item_id: self.score_rollout(rollout) for rollout in rollouts}

    def score_measurement(self, measurement: Measurement) -> float | None:
        """Return a measurement in the metric; None if nothing was measured."""
        if measurement.hard is None or measurement.soft is None:
            return None
        return weigh_scores(measurement.hard, measurement.soft, self.soft_weight)

    def is_solved(self, rollout: Rollout) -> bool:
        """Whether a rollout is measured and no failure."""
        return rollout.score is not None and not is_failure(rollout, self.threshold)

    def score_pair(self, candidate: Rollout, current: Rollout) -> ScorePair:
        """Return the scores of two rollouts of an item."""
        return ScorePair(
            item_id=candidate.item_id,
            candidate=self.score_rollout(candidate),
            current=self.score_rollout(current),
            is_lost=is_failure(candidate, self.threshold) and self.is_solved(current),
            candidate_refused=candidate.refused,
            current_refused=current.refused,
        )


def build_measurement(skill_hash: str, split: Split, rollouts: Sequence[Rollout]) -> Measurement:
    """Return the means of one skill's rollouts on a split; their order does not matter.

    Raises:
        ValueError: A rollout belongs to another skill.
    """
    if any(rollout.skill_hash != skill_hash for rollout in rollouts):
        raise ValueError(f"rollouts of another skill than {skill_hash} cannot measure it")
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    lost = tuple(sorted({rollout.item_id for rollout in rollouts if rollout.score is None}))
    n = len(scores)
    if not n:
        return Measurement(skill_hash=skill_hash, split=split, n=0, unmeasured=lost)
    return Measurement(
        skill_hash=skill_hash,
        split=split,
        n=n,
        unmeasured=lost,
        hard=math.fsum(score.hard for score in scores) / n,
        soft=math.fsum(score.soft for score in scores) / n,
    )


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
        reason = f"The schedule allows no edit in this step, so none of the {pool} was applied."
        if chosen.decision is not None:
            reason = f"The optimizer chose to apply none of the {pool}: {chosen.decision.reasoning}"
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
    """Accept a greater mean of one pass; None if a repeat shows that the target is noisy.

    To become the best skill, a candidate must also have a greater mean than the best skill, unless
    that is the current one. ``run_pass`` rolls a skill out on the validation split.
    """
    first = await _roll_out_pairs(candidate, current, settings.item_ids, 0, run_pass)
    scores = [metric.score_pair(*pair) for pair in first]
    ruling = decide(settings, scores)
    used = first
    if ruling.action == "accept" and settings.confirms:
        again = await _roll_out_pairs(candidate, current, choose_repeats(scores), 1, run_pass)
        if has_disagreement(scores, [metric.score_pair(*pair) for pair in again]):
            return None
        used = [*used, *again]

    # Repeats can only contradict the first pass: the verdict has the scores of that one.
    lost = tuple(side for pair in used for side in pair if side.score is None)
    verdict = _build_verdict(first, candidate, current, ruling, metric)
    if ruling.action != "accept":
        return EvaluationResult(verdict=verdict, unmeasured=lost)

    action: GateAction = "accept_new_best"
    reason = ruling.reason
    # The candidate is accepted; it is the new best one only if it beats the best one too. If that
    # cannot be measured, nothing is decided. A veto for regressions holds against the current skill
    # alone.
    if best.hash != current.hash:
        of_best = await run_pass(best, 0, settings.item_ids)
        pairs = [metric.score_pair(new, old) for (new, _), old in zip(first, of_best, strict=True)]
        second = decide(settings.model_copy(update={"no_regression": None}), pairs, other="best")
        actions: dict[str, GateAction] = {"accept": "accept_new_best", "unmeasured": "unmeasured"}
        action = actions.get(second.action, "accept")
        reason = f"{reason} {second.reason}"
        lost += tuple(rollout for rollout in of_best if rollout.score is None)
    verdict = verdict.model_copy(update={"action": action, "reason": reason})
    return EvaluationResult(verdict=verdict, unmeasured=lost)


async def force_accept(
    candidate: Skill,
    current: Skill,
    *,
    settings: GateSettings,
    metric: GateMetric,
    run_pass: PassRunner,
) -> EvaluationResult:
    """Return the verdict if the gate is off: accepted if enough of one pass could be measured."""
    pairs = await _roll_out_pairs(candidate, current, settings.item_ids, 0, run_pass)
    lost = tuple(side for pair in pairs for side in pair if side.score is None)
    ruling = check_pairs(settings.coverage, [metric.score_pair(*pair) for pair in pairs])
    if ruling is not None:
        verdict = _build_verdict(pairs, candidate, current, ruling, metric)
    else:
        ruling = Ruling(action="accept", reason="The gate is off: every candidate is accepted.")
        verdict = _build_verdict(pairs, candidate, current, ruling, metric)
        verdict = verdict.model_copy(update={"action": "force_accept"})
    return EvaluationResult(verdict=verdict, unmeasured=lost)


async def evaluate_once(
    candidate: Skill,
    current: Skill,
    items: Sequence[Item],
    *,
    roll_out: Callable[[Sequence[Item], Skill], Awaitable[Sequence[Rollout]]],
    metric: GateMetric | None = None,
) -> Verdict:
    """Return the verdict on whether a candidate has a greater mean score, for a loop of your own.

    ``items`` are those of the validation split. ``roll_out`` returns one rollout for each item
    under a document, in their order. Without a ``metric``, the hard score counts.
    """
    by_id = {item.id: item for item in items}

    async def run_pass(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        return await roll_out([by_id[item_id] for item_id in item_ids], skill)

    result = await evaluate(
        candidate,
        current,
        current,
        settings=GateSettings(item_ids=tuple(by_id)),
        metric=metric or GateMetric(),
        run_pass=run_pass,
    )
    assert result is not None, "only a repeat, which is off, finds out that a target is noisy"
    return result.verdict


async def _roll_out_pairs(
    candidate: Skill, current: Skill, item_ids: Sequence[str], trial: int, run_pass: PassRunner
) -> RolloutPairs:
    """Return one trial of the items under both skills, whose passes run at the same time."""
    new, old = await fan_out(lambda skill: run_pass(skill, trial, item_ids), (candidate, current))
    return tuple(zip(new, old, strict=True))


def _build_verdict(
    pairs: RolloutPairs, candidate: Skill, current: Skill, ruling: Ruling, metric: GateMetric
) -> Verdict:
    """Return the verdict with the mean scores of the pairs that are measured on both sides."""
    measured = [pair for pair in pairs if all(side.score is not None for side in pair)]
    lost = {side.item_id for pair in pairs for side in pair if side.score is None}
    unmeasured = {"unmeasured": tuple(sorted(lost))}
    new = build_measurement(
        candidate.hash, Split.val, [of_candidate for of_candidate, _ in measured]
    )
    old = build_measurement(current.hash, Split.val, [of_current for _, of_current in measured])
    return Verdict(
        action=ruling.action,
        reason=ruling.reason,
        candidate=new.model_copy(update=unmeasured),
        current=old.model_copy(update=unmeasured),
        candidate_score=metric.score_measurement(new),
        current_score=metric.score_measurement(old),
    )
