"""Stage 6: compares a candidate with the current skill on the validation split, and lets the gate decide."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from reflact.gate.early_stop import EarlyStopMonitor
from reflact.gate.paired_decision import (
    GateSettings,
    Ruling,
    ScorePair,
    TrialRequest,
    Trials,
    build_ruling,
    decide,
    has_coverage,
)
from reflact.records import weigh_scores
from reflact.types import (
    AggregateResult,
    Candidate,
    FrozenModel,
    Measurement,
    Rollout,
    SelectResult,
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

    def score_pair(self, candidate: Rollout, current: Rollout) -> ScorePair:
        """Return the scores of two rollouts of an item."""
        return ScorePair(
            item_id=candidate.item_id,
            candidate=self.score_rollout(candidate),
            current=self.score_rollout(current),
            candidate_solved=None if candidate.score is None else not is_failure(candidate, self.threshold),
            current_solved=None if current.score is None else not is_failure(current, self.threshold),
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
        unmeasured=tuple(sorted({rollout.item_id for rollout in rollouts if rollout.score is None})),
        hard=_mean([score.hard for score in scores]),
        soft=_mean([score.soft for score in scores]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


class EvaluationResult(FrozenModel):
    """The verdict on a candidate, and the unmeasured rollouts of its comparisons."""

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

    ``chosen`` are the edits of the pool ``merged`` that the candidate was made with. ``known`` are all documents that
    this run uses or has rejected, by hash, each with the version or the step that it is from.
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
        return Verdict(action="no_change", reason=f"The edits leave the document as it is{version}.")
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
    run_pairs: PairRunner,
) -> EvaluationResult:
    """Return the gate's verdict on a candidate.

    A candidate that wins against the current skill is accepted. To become the best skill, it must then win
    against the best skill by the same rule, unless that is the current one. The second test runs only after
    the first succeeded, so it needs no error probability of its own (a fixed sequence of hypotheses: Maurer,
    Hothorn and Lehmacher 1995). ``run_pairs`` rolls out two skills on the validation split.
    """
    first = await _compare(candidate, current, settings, metric, run_pairs)
    verdict = first.verdict
    if verdict.action != "accept":
        return first
    if best.hash == current.hash:
        return first.model_copy(update={"verdict": verdict.model_copy(update={"action": "accept_new_best"})})
    again = settings.model_copy(update={"deterministic": verdict.deterministic, "no_regression": None})
    second = await _compare(candidate, best, again, metric, run_pairs)
    other = second.verdict
    actions = {"accept": "accept_new_best", "unmeasured": "unmeasured"}
    verdict = verdict.model_copy(
        update={
            "action": actions.get(other.action, "accept"),
            "reason": f"{verdict.reason} Against the best skill: {other.reason}",
            "against_best": other.evidence,
            "deterministic": verdict.deterministic and other.deterministic,
        }
    )
    return EvaluationResult(verdict=verdict, unmeasured=first.unmeasured + second.unmeasured)


class _PrefixJudge:
    """Decides on prefixes of a request; a prefix that extends the last one costs only its new pairs."""

    def __init__(self, settings: GateSettings, trials: Trials, ask: TrialRequest, metric: GateMetric) -> None:
        self._start = partial(EarlyStopMonitor, settings, trials, ask)
        self._metric = metric
        self._monitor = self._start()
        self._ruling: Ruling | None = None
        self._pairs: tuple[tuple[Rollout, Rollout], ...] = ()

    def is_decided(self, pairs: RolloutPairs) -> bool:
        """Return whether the pairs determine the decision."""
        return self.decide(pairs) is not None

    def decide(self, pairs: RolloutPairs) -> Ruling | None:
        """Return the decision of the shortest prefix of the pairs that determines it, else None."""
        known = len(self._pairs)
        if tuple(pairs[:known]) != self._pairs:
            known, self._monitor, self._ruling = 0, self._start(), None
        for pair in pairs[known:]:
            if self._ruling is None:
                self._ruling = self._monitor.add(self._metric.score_pair(*pair))
        self._pairs = tuple(pairs)
        return self._ruling


async def _compare(
    candidate: Skill, current: Skill, settings: GateSettings, metric: GateMetric, run_pairs: PairRunner
) -> EvaluationResult:
    """Roll out both skills on the trials that the gate requests, until it decides."""
    trials: dict[int, dict[str, ScorePair]] = {}
    asked: dict[int, list[tuple[Rollout, Rollout]]] = {}
    while True:
        ask = decide(settings, trials)
        if isinstance(ask, Ruling):
            return _build_result(ask, asked, candidate, current, metric)

        judge = _PrefixJudge(settings, trials, ask, metric)
        stop = judge.is_decided if settings.early_stop else None
        done = await run_pairs(candidate, current, ask, stop)
        asked.setdefault(ask.trial, []).extend(done)
        ruling = judge.decide(done) if settings.early_stop else None
        if ruling is not None:
            return _build_result(ruling, asked, candidate, current, metric)
        trials.setdefault(ask.trial, {}).update({pair[0].item_id: metric.score_pair(*pair) for pair in done})


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
    result = _build_result(ruling, {0: pairs}, candidate, current, metric)
    action = "force_accept" if is_enough else "unmeasured"
    verdict = result.verdict.model_copy(update={"action": action, "evidence": None})
    return result.model_copy(update={"verdict": verdict})


def _build_result(
    ruling: Ruling, asked: Mapping[int, RolloutPairs], candidate: Skill, current: Skill, metric: GateMetric
) -> EvaluationResult:
    """Return the verdict with the mean scores of the ruling's trials, without repeats that only test for noise."""
    counted = [pair for trial in sorted(asked) if trial < ruling.evidence.rounds for pair in asked[trial]]
    measured = [pair for pair in counted if all(side.score is not None for side in pair)]
    lost = tuple(sorted({side.item_id for pair in counted for side in pair if side.score is None}))
    new = build_measurement(candidate.hash, Split.val, [theirs for theirs, _ in measured])
    old = build_measurement(current.hash, Split.val, [ours for _, ours in measured])
    verdict = Verdict(
        action=ruling.action,
        reason=ruling.reason,
        candidate=new.model_copy(update={"unmeasured": lost}),
        current=old.model_copy(update={"unmeasured": lost}),
        candidate_score=metric.score_measurement(new),
        current_score=metric.score_measurement(old),
        evidence=ruling.evidence,
        deterministic=ruling.deterministic,
    )
    unmeasured = tuple(r for pairs in asked.values() for pair in pairs for r in pair if r.score is None)
    return EvaluationResult(verdict=verdict, unmeasured=unmeasured)
