"""Stage 6: compares a candidate with the current skill on the validation split, and lets the gate decide."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Literal

from reflact.gate.decision import (
    GateSettings,
    Ruling,
    ScorePair,
    TrialRequest,
    build_ruling,
    decide,
    has_coverage,
)
from reflact.gate.early_stop import decide_early
from reflact.types import (
    AggregateResult,
    Candidate,
    FrozenModel,
    Measurement,
    Rollout,
    Skill,
    Split,
    Verdict,
    is_failure,
)

RolloutPairs = Sequence[tuple[Rollout, Rollout]]
StopCondition = Callable[[RolloutPairs], bool]
PairRunner = Callable[[Skill, Skill, TrialRequest, StopCondition | None], Awaitable[RolloutPairs]]
"""Rolls out the candidate and the current skill on a requested trial, up to the shortest sufficient prefix."""


class GateMetric(FrozenModel):
    """How a score becomes one number: ``(1 - mixed_weight) * hard + mixed_weight * soft`` if mixed.

    An item is solved if its hard score reaches ``threshold``; None: if it is above 0.
    """

    metric: Literal["hard", "soft", "mixed"]
    mixed_weight: float = 0.5
    threshold: float | None = None

    def score_rollout(self, rollout: Rollout) -> float | None:
        """Return a rollout's score in the metric, in 0..1; None if it is unmeasured."""
        return None if rollout.score is None else self._combine(rollout.score.hard, rollout.score.soft)

    def is_solved(self, rollout: Rollout) -> bool | None:
        """Return whether a rollout solved its item; None if it is unmeasured."""
        return None if rollout.score is None else not is_failure(rollout, self.threshold)

    def score_measurement(self, measurement: Measurement) -> float | None:
        """Return a measurement in the metric; None if nothing was measured."""
        if measurement.hard is None or measurement.soft is None:
            return None
        return self._combine(measurement.hard, measurement.soft)

    def _combine(self, hard: float, soft: float) -> float:
        match self.metric:
            case "hard":
                return hard
            case "soft":
                return soft
            case "mixed":
                return (1 - self.mixed_weight) * hard + self.mixed_weight * soft


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
        unmeasured=tuple(sorted({rollout.item_id for rollout in rollouts if rollout.score is None})),
        hard=_mean([score.hard for score in scores]),
        soft=_mean([score.soft for score in scores]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


class GateComparison(FrozenModel):
    """The ruling of a comparison, and the rollouts behind its mean scores.

    ``unmeasured`` holds all rollouts without a score, repeats included.
    """

    ruling: Ruling
    candidate: tuple[Rollout, ...]
    current: tuple[Rollout, ...]
    unmeasured: tuple[Rollout, ...]


class EvaluationResult(FrozenModel):
    """The verdict on a candidate, and the unmeasured rollouts of its comparisons."""

    verdict: Verdict
    unmeasured: tuple[Rollout, ...] = ()


def decide_without_evaluation(
    candidate: Candidate, current: Skill, *, merged: AggregateResult, known: Collection[str]
) -> Verdict | None:
    """Return the verdict on a candidate that needs no evaluation; None if it needs one.

    Args:
        candidate: The new document.
        current: The document it would replace.
        merged: The proposals behind the candidate.
        known: Hashes of all documents that this run uses or has rejected.
    """
    if not merged.patch.edits:
        return Verdict(action="no_patches", reason="No analyst proposed an edit.")
    if candidate.fallbacks:
        return Verdict(
            action="no_rewrite",
            reason=f"The rewrite call gave no valid reply: {candidate.fallbacks[0].reason}",
        )
    if candidate.skill.hash == current.hash:
        return Verdict(action="no_change", reason="The edits leave the document as it is.")
    if candidate.skill.hash in known:
        return Verdict(action="no_change", reason="This run has used or rejected the same document before.")
    return None


async def evaluate(
    candidate: Skill,
    current: Skill,
    best: Skill,
    *,
    settings: GateSettings,
    metric: GateMetric,
    run_pairs: PairRunner,
) -> EvaluationResult:
    """Return the gate's verdict on a candidate.

    A candidate that wins against the current skill is accepted. To become the best skill, it must then win
    against the best skill by the same rule, unless that is the current one. The second test runs only after
    the first succeeded, so it needs no error probability of its own (a fixed sequence of hypotheses: Maurer,
    Hothorn and Lehmacher 1995).

    Args:
        candidate: The new document.
        current: The document it would replace.
        best: The best measured document.
        settings: How the gate decides.
        metric: How scores become numbers.
        run_pairs: Rolls out two skills on the validation split; stored rollouts are reused.
    """
    first = await run_gate(candidate, current, settings=settings, metric=metric, run_pairs=run_pairs)
    verdict = _build_verdict(first, candidate, current, metric)
    lost = first.unmeasured
    if verdict.action != "accept":
        return EvaluationResult(verdict=verdict, unmeasured=lost)
    if best.hash == current.hash:
        return EvaluationResult(verdict=_new_best(verdict, verdict.reason), unmeasured=lost)
    settings_again = settings.model_copy(
        update={"deterministic": first.ruling.deterministic, "no_regression": None}
    )
    second = await run_gate(candidate, best, settings=settings_again, metric=metric, run_pairs=run_pairs)
    verdict = verdict.model_copy(
        update={
            "against_best": second.ruling.evidence,
            "deterministic": verdict.deterministic and second.ruling.deterministic,
        }
    )
    against = f"{verdict.reason} Against the best skill: {second.ruling.reason}"
    if second.ruling.action == "accept":
        verdict = _new_best(verdict, against)
    elif second.ruling.action == "unmeasured":
        verdict = verdict.model_copy(update={"action": "unmeasured", "reason": against})
    else:
        verdict = verdict.model_copy(update={"reason": against})
    return EvaluationResult(verdict=verdict, unmeasured=lost + second.unmeasured)


async def run_gate(
    candidate: Skill, current: Skill, *, settings: GateSettings, metric: GateMetric, run_pairs: PairRunner
) -> GateComparison:
    """Roll out both skills on the trials that the gate requests, until it decides."""
    trials: dict[int, dict[str, ScorePair]] = {}
    asked: dict[int, list[tuple[Rollout, Rollout]]] = {}
    while True:
        ask = decide(settings, trials)
        if isinstance(ask, Ruling):
            return _build_comparison(ask, asked)

        def score_pairs(pairs: RolloutPairs) -> list[ScorePair]:
            return [_build_score_pair(metric, theirs, ours) for theirs, ours in pairs]

        def enough(pairs: RolloutPairs, ask: TrialRequest = ask) -> bool:
            return decide_early(settings, trials, ask, score_pairs(pairs)) is not None

        done = await run_pairs(candidate, current, ask, enough if settings.early_stop else None)
        asked.setdefault(ask.trial, []).extend(done)
        ruling = decide_early(settings, trials, ask, score_pairs(done)) if settings.early_stop else None
        if ruling is not None:
            return _build_comparison(ruling, asked)
        trials.setdefault(ask.trial, {}).update({pair.item_id: pair for pair in score_pairs(done)})


def force_accept(
    candidate: Skill, current: Skill, pairs: RolloutPairs, *, settings: GateSettings, metric: GateMetric
) -> EvaluationResult:
    """Return the verdict if the gate is off: accepted if enough of one pass could be measured."""
    sums = settings.new_statistics()
    for theirs, ours in pairs:
        sums.add(metric.score_rollout(theirs), metric.score_rollout(ours))
    is_enough = has_coverage(settings, sums)
    ruling = build_ruling(
        settings,
        sums,
        "accept" if is_enough else "unmeasured",
        noisy=not settings.deterministic,
        reason="The gate is off: every candidate is accepted." if is_enough else None,
    )
    compared = _build_comparison(ruling, {0: list(pairs)})
    verdict = _build_verdict(compared, candidate, current, metric).model_copy(update={"evidence": None})
    if is_enough:
        verdict = verdict.model_copy(update={"action": "force_accept"})
    return EvaluationResult(verdict=verdict, unmeasured=compared.unmeasured)


def _build_score_pair(metric: GateMetric, theirs: Rollout, ours: Rollout) -> ScorePair:
    return ScorePair(
        item_id=theirs.item_id,
        candidate=metric.score_rollout(theirs),
        current=metric.score_rollout(ours),
        candidate_solved=metric.is_solved(theirs),
        current_solved=metric.is_solved(ours),
    )


def _build_comparison(
    ruling: Ruling, asked: Mapping[int, Sequence[tuple[Rollout, Rollout]]]
) -> GateComparison:
    """Select the trials behind the ruling's mean scores; repeats that only test for noise are left out."""
    counted = [
        pair for trial, pairs in sorted(asked.items()) if trial < ruling.evidence.rounds for pair in pairs
    ]
    return GateComparison(
        ruling=ruling,
        candidate=tuple(theirs for theirs, _ in counted),
        current=tuple(ours for _, ours in counted),
        unmeasured=tuple(r for pairs in asked.values() for pair in pairs for r in pair if r.score is None),
    )


def _build_verdict(compared: GateComparison, candidate: Skill, current: Skill, metric: GateMetric) -> Verdict:
    measured = [
        (theirs, ours)
        for theirs, ours in zip(compared.candidate, compared.current, strict=True)
        if theirs.score is not None and ours.score is not None
    ]
    lost = {r.item_id for r in (*compared.candidate, *compared.current) if r.score is None}
    left_out = tuple(sorted(lost))
    new = build_measurement(candidate.hash, Split.val, [theirs for theirs, _ in measured])
    old = build_measurement(current.hash, Split.val, [ours for _, ours in measured])
    return Verdict(
        action=compared.ruling.action,
        reason=compared.ruling.reason,
        candidate=new.model_copy(update={"unmeasured": left_out}),
        current=old.model_copy(update={"unmeasured": left_out}),
        candidate_score=metric.score_measurement(new),
        current_score=metric.score_measurement(old),
        evidence=compared.ruling.evidence,
        deterministic=compared.ruling.deterministic,
    )


def _new_best(verdict: Verdict, reason: str) -> Verdict:
    return verdict.model_copy(update={"action": "accept_new_best", "reason": reason})
