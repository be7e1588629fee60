"""Stage 6: the candidate and the current skill on the validation split, then the gate."""

from __future__ import annotations

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
from reflact.gate.scores import Metric, build_measurement, combine_scores, score_measurement
from reflact.types import (
    AggregateResult,
    Candidate,
    FrozenModel,
    Measurement,
    Rollout,
    Score,
    Skill,
    Split,
    Verdict,
    is_failure,
)

RolloutPairs = Sequence[tuple[Rollout, Rollout]]
StopCondition = Callable[[RolloutPairs], bool]
PairRunner = Callable[[Skill, Skill, TrialRequest, StopCondition | None], Awaitable[RolloutPairs]]
"""Rolls two skills out on what the gate asks for, up to the shortest prefix that is enough."""


class GateMetric(FrozenModel):
    """How a score becomes one number: ``(1 - mixed_weight) * hard + mixed_weight * soft`` if mixed.

    An item is solved where its hard score reaches ``threshold``; None: where it is above 0.
    """

    metric: Metric
    mixed_weight: float = 0.5
    threshold: float | None = None

    def score_rollout(self, rollout: Rollout) -> float | None:
        """Return a rollout's score on this scale, in 0..1; None where it is unmeasured."""
        return None if rollout.score is None else self.combine_score(rollout.score)

    def combine_score(self, value: Score) -> float:
        """Return a score on this scale, in 0..1."""
        return combine_scores(value.hard, value.soft, metric=self.metric, mixed_weight=self.mixed_weight)

    def is_solved(self, rollout: Rollout) -> bool | None:
        """Return whether a rollout solved its item; None where it is unmeasured."""
        return None if rollout.score is None else not is_failure(rollout, self.threshold)

    def score_measurement(self, measurement: Measurement) -> float | None:
        """Return a measurement on this scale; None where nothing was measured."""
        return score_measurement(measurement, metric=self.metric, mixed_weight=self.mixed_weight)


class GateComparison(FrozenModel):
    """The outcome of a comparison: the ruling, and the rollouts that its scores are means of.

    ``unmeasured`` are those without a score among all that it looked at, repeats included.
    """

    ruling: Ruling
    candidate: tuple[Rollout, ...]
    current: tuple[Rollout, ...]
    unmeasured: tuple[Rollout, ...]


class EvaluationResult(FrozenModel):
    """The verdict on a candidate, and the unmeasured rollouts whose absence it used."""

    verdict: Verdict
    unmeasured: tuple[Rollout, ...] = ()


def decide_without_evaluation(
    candidate: Candidate, current: Skill, *, merged: AggregateResult, known: Collection[str]
) -> Verdict | None:
    """Return the verdict on a candidate that needs no evaluation, None on one that does.

    Args:
        candidate: The new document.
        current: The document it would replace.
        merged: The pool of proposals that it came from.
        known: Hashes of all documents that this run holds or has rejected.
    """
    if not merged.patch.edits:
        return Verdict(action="no_patches", reason="No analyst proposed an edit.")
    if candidate.fallbacks:
        return Verdict(action="no_rewrite", reason=f"No rewrite was had: {candidate.fallbacks[0].reason}")
    if candidate.skill.hash == current.hash:
        return Verdict(action="no_change", reason="The edits leave the document as it is.")
    if candidate.skill.hash in known:
        return Verdict(action="no_change", reason="This run has held or rejected the same document before.")
    return None


async def evaluate(
    candidate: Skill,
    current: Skill,
    best: Skill,
    *,
    settings: GateSettings,
    scale: GateMetric,
    duel: PairRunner,
) -> EvaluationResult:
    """Return the gate's verdict on a candidate.

    It must win against the current skill to be accepted. To be the new best it must then win against the
    best one by the same rule, unless that is the current one. The second test is made only after the
    first was passed, and so needs no error probability of its own (a fixed sequence of hypotheses:
    Maurer, Hothorn and Lehmacher 1995).

    Args:
        candidate: The new document.
        current: The document it would replace.
        best: The best measured document.
        settings: How the gate decides.
        scale: What is compared.
        duel: Rolls two skills out on the validation split; stored rollouts are reused.
    """
    first = await run_gate(candidate, current, settings=settings, scale=scale, duel=duel)
    verdict = _build_verdict(first, candidate, current, scale)
    lost = first.unmeasured
    if verdict.action != "accept":
        return EvaluationResult(verdict=verdict, unmeasured=lost)
    if best.hash == current.hash:
        return EvaluationResult(verdict=_new_best(verdict, verdict.reason), unmeasured=lost)
    again = settings.model_copy(update={"deterministic": first.ruling.deterministic, "no_regression": None})
    second = await run_gate(candidate, best, settings=again, scale=scale, duel=duel)
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
    candidate: Skill, current: Skill, *, settings: GateSettings, scale: GateMetric, duel: PairRunner
) -> GateComparison:
    """Roll both skills out on what the gate asks for until it rules."""
    trials: dict[int, dict[str, ScorePair]] = {}
    asked: dict[int, list[tuple[Rollout, Rollout]]] = {}
    while True:
        next_look = decide(settings, trials)
        if isinstance(next_look, Ruling):
            return _build_comparison(next_look, asked)
        ask = next_look

        def pairs(duels: RolloutPairs) -> list[ScorePair]:
            return [_build_score_pair(scale, theirs, ours) for theirs, ours in duels]

        def enough(duels: RolloutPairs, ask: TrialRequest = ask) -> bool:
            return decide_early(settings, trials, ask, pairs(duels)) is not None

        done = await duel(candidate, current, ask, enough if settings.early_stop else None)
        asked.setdefault(ask.trial, []).extend(done)
        ruling = decide_early(settings, trials, ask, pairs(done)) if settings.early_stop else None
        if ruling is not None:
            return _build_comparison(ruling, asked)
        trials.setdefault(ask.trial, {}).update({pair.item_id: pair for pair in pairs(done)})


def force_accept(
    candidate: Skill, current: Skill, duels: RolloutPairs, *, settings: GateSettings, scale: GateMetric
) -> EvaluationResult:
    """Return the verdict where the gate is off: accepted, if enough of one pass could be measured."""
    sums = settings.new_statistics()
    for theirs, ours in duels:
        sums.add(scale.score_rollout(theirs), scale.score_rollout(ours))
    is_enough = has_coverage(settings, sums)
    ruling = build_ruling(
        settings,
        sums,
        "accept" if is_enough else "unmeasured",
        noisy=not settings.deterministic,
        reason="The gate is off: every candidate is accepted." if is_enough else None,
    )
    compared = _build_comparison(ruling, {0: list(duels)})
    verdict = _build_verdict(compared, candidate, current, scale).model_copy(update={"evidence": None})
    if is_enough:
        verdict = verdict.model_copy(update={"action": "force_accept"})
    return EvaluationResult(verdict=verdict, unmeasured=compared.unmeasured)


def _build_score_pair(scale: GateMetric, theirs: Rollout, ours: Rollout) -> ScorePair:
    return ScorePair(
        item_id=theirs.item_id,
        candidate=scale.score_rollout(theirs),
        current=scale.score_rollout(ours),
        candidate_solved=scale.is_solved(theirs),
        current_solved=scale.is_solved(ours),
    )


def _build_comparison(
    ruling: Ruling, asked: Mapping[int, Sequence[tuple[Rollout, Rollout]]]
) -> GateComparison:
    """Keep the trials that the ruling's scores are means of, and not those that only showed repeats."""
    kept = [
        duel for trial, duels in sorted(asked.items()) if trial < ruling.evidence.rounds for duel in duels
    ]
    return GateComparison(
        ruling=ruling,
        candidate=tuple(theirs for theirs, _ in kept),
        current=tuple(ours for _, ours in kept),
        unmeasured=tuple(r for duels in asked.values() for duel in duels for r in duel if r.score is None),
    )


def _build_verdict(compared: GateComparison, candidate: Skill, current: Skill, scale: GateMetric) -> Verdict:
    kept = [
        (theirs, ours)
        for theirs, ours in zip(compared.candidate, compared.current, strict=True)
        if theirs.score is not None and ours.score is not None
    ]
    lost = {r.item_id for r in (*compared.candidate, *compared.current) if r.score is None}
    left_out = tuple(sorted(lost))
    new = build_measurement(candidate.hash, Split.val, [theirs for theirs, _ in kept])
    old = build_measurement(current.hash, Split.val, [ours for _, ours in kept])
    action: Literal["accept", "reject", "inconclusive", "unmeasured"] = compared.ruling.action
    return Verdict(
        action=action,
        reason=compared.ruling.reason,
        candidate=new.model_copy(update={"unmeasured": left_out}),
        current=old.model_copy(update={"unmeasured": left_out}),
        candidate_score=scale.score_measurement(new),
        current_score=scale.score_measurement(old),
        evidence=compared.ruling.evidence,
        deterministic=compared.ruling.deterministic,
    )


def _new_best(verdict: Verdict, reason: str) -> Verdict:
    return verdict.model_copy(update={"action": "accept_new_best", "reason": reason})
