"""Stage 6: compares a candidate with the current skill on the validation split, and decides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from reflact.concurrency import fan_out
from reflact.gate.greater_mean import (
    VETO_TRIALS,
    GateSettings,
    ScorePair,
    check_coverage,
    choose_repeats,
    decide,
    explain_veto,
    has_disagreement,
)
from reflact.gate.ranked_decision import (
    REJECT_BELOW,
    Posterior,
    build_pass,
    choose_pass,
    choose_version,
)
from reflact.records import weigh_scores
from reflact.text import name_count, name_times
from reflact.types import (
    AggregateResult,
    Candidate,
    FrozenModel,
    GateAction,
    Item,
    Measurement,
    RankedDecision,
    Ranking,
    Rollout,
    SelectResult,
    Skill,
    Split,
    Verdict,
    is_failure,
)

RolloutPairs = Sequence[tuple[Rollout, Rollout]]

# Rolls a skill out on one trial of these validation items, in their order.
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
    measurement = Measurement(skill_hash=skill_hash, split=split, n=n, unmeasured=lost)
    if not n:
        return measurement
    hard = fmean(score.hard for score in scores)
    soft = fmean(score.soft for score in scores)
    return measurement.model_copy(update={"hard": hard, "soft": soft})


def decide_without_evaluation(
    candidate: Candidate,
    current: Skill,
    *,
    merged: AggregateResult,
    chosen: SelectResult,
    known: Mapping[str, str],
) -> Verdict | None:
    """Return the verdict on a candidate that needs no evaluation; None if it needs one.

    ``chosen`` are the edits of the pool ``merged`` that made the candidate. ``known`` are all
    documents that this run uses or has rejected, by hash, with the version or step they are from.
    """
    if not merged.patch.edits:
        return Verdict(action="no_patches", reason="No analyst proposed an edit.")
    if candidate.fallbacks:
        reason = f"The rewrite call gave no valid reply: {candidate.fallbacks[0].reason}"
        return Verdict(action="no_rewrite", reason=reason)
    if chosen.pool_size and not chosen.patch.edits:
        pool = f"{len(merged.patch.edits)} proposed edits"
        reason = f"The schedule allows no edit in this step, so none of the {pool} was applied."
        if chosen.decision is not None:
            reason = f"The optimizer chose to apply none of the {pool}: {chosen.decision.reasoning}"
        return Verdict(action="no_change", reason=reason)
    name = known.get(candidate.skill.hash)
    if candidate.skill.hash == current.hash:
        version = "" if name is None else f", {name}"
        reason = f"The edits leave the document as it is{version}."
        return Verdict(action="no_change", reason=reason)
    if name is None:
        return None
    reason = f"The document is the same as {name}, so it was not measured again."
    return Verdict(action="no_change", reason=reason, repeats=name)


# --------------------------------------------------------------------------------- a greater mean


async def evaluate(
    candidate: Skill,
    current: Skill,
    best: Skill,
    *,
    settings: GateSettings,
    metric: GateMetric,
    run_pass: PassRunner,
) -> Verdict | None:
    """Accept a greater mean of one pass; None if a repeat shows that the target is noisy.

    To become the best skill, a candidate must also have a greater mean than the best skill, unless
    that is the current one. An open gate accepts each one that could be measured.
    """
    pairs = await _roll_out_pairs(candidate, current, settings.item_ids, 0, run_pass)
    scores = [metric.score_pair(*pair) for pair in pairs]
    ruling = decide(settings, scores)
    if ruling.action == "accept" and settings.confirms and not settings.is_open:
        again = await _roll_out_pairs(candidate, current, choose_repeats(scores), 1, run_pass)
        if has_disagreement(scores, [metric.score_pair(*pair) for pair in again]):
            return None

    # Repeats can only contradict the first pass: the verdict has the scores of that one.
    verdict = _build_verdict(pairs, candidate, current, ruling, metric)
    if ruling.action != "accept":
        return verdict
    if settings.is_open or best.hash == current.hash:
        action: GateAction = "force_accept" if settings.is_open else "accept_new_best"
        return verdict.model_copy(update={"action": action})

    # The candidate is accepted; it is the new best one only if it beats the best one too. If that
    # cannot be measured, nothing is decided. A veto for regressions holds against the current skill
    # alone.
    of_best = await run_pass(best, 0, settings.item_ids)
    against_best = [
        metric.score_pair(new, old) for (new, _), old in zip(pairs, of_best, strict=True)
    ]
    second = decide(settings.model_copy(update={"no_regression": None}), against_best, other="best")
    actions: dict[str, GateAction] = {"accept": "accept_new_best", "unmeasured": "unmeasured"}
    return verdict.model_copy(
        update={
            "action": actions.get(second.action, "accept"),
            "reason": f"{ruling.reason} {second.reason}",
        }
    )


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

    settings = GateSettings(item_ids=tuple(by_id))
    metric = metric or GateMetric()
    verdict = await evaluate(
        candidate, current, current, settings=settings, metric=metric, run_pass=run_pass
    )
    assert verdict is not None, "only a repeat, which is off, finds out that a target is noisy"
    return verdict


async def _roll_out_pairs(
    candidate: Skill, current: Skill, item_ids: Sequence[str], trial: int, run_pass: PassRunner
) -> RolloutPairs:
    """Return one trial of the items under both skills, whose passes run at the same time."""
    new, old = await fan_out(lambda skill: run_pass(skill, trial, item_ids), (candidate, current))
    return tuple(zip(new, old, strict=True))


def _build_verdict(
    pairs: RolloutPairs, candidate: Skill, current: Skill, ruling: Verdict, metric: GateMetric
) -> Verdict:
    """Return the verdict with the mean scores of the pairs that are measured on both sides."""
    measured = [pair for pair in pairs if all(side.score is not None for side in pair)]
    lost = {side.item_id for pair in pairs for side in pair if side.score is None}
    update = {"unmeasured": tuple(sorted(lost))}
    new = build_measurement(candidate.hash, Split.val, [pair[0] for pair in measured])
    old = build_measurement(current.hash, Split.val, [pair[1] for pair in measured])
    return ruling.model_copy(
        update={
            "candidate": new.model_copy(update=update),
            "current": old.model_copy(update=update),
            "candidate_score": metric.score_measurement(new),
            "current_score": metric.score_measurement(old),
        }
    )


# ------------------------------------------------------------------------------ the ranked beliefs


@dataclass(kw_only=True)
class RankedEvaluator:
    """One decision of the ranked gate: passes over the items while one is worth its rollouts.

    ``read_pass`` returns the stored rollouts of an earlier pass.
    """

    candidate: Skill
    current: Skill
    settings: GateSettings
    metric: GateMetric
    run_pass: PassRunner
    read_pass: PassRunner
    _passes: dict[str, list[Sequence[Rollout]]] = field(default_factory=dict, init=False)
    _repeats: list[Rollout] = field(default_factory=list, init=False)

    async def evaluate(self, ranking: Ranking, *, measures_current: bool = False) -> Verdict:
        """Return the verdict on the candidate, which was made from the current skill.

        ``measures_current``: a current skill without a pass gets one first. It was accepted before
        the target showed noise, while no beliefs were kept.
        """
        items = self.settings.item_ids
        skills = {skill.hash: skill for skill in (self.candidate, self.current)}
        n_earlier = len(ranking.passes)
        ranking = ranking.add_version(self.candidate.hash, self.current.hash)
        for skill in skills.values():
            trials = range(ranking.count_passes(skill.hash))
            self._passes[skill.hash] = [await self.read_pass(skill, n, items) for n in trials]
        version = self._choose_pass(ranking)
        if measures_current and not self._passes[self.current.hash]:
            version = self.current.hash
        while version is not None:
            (other,) = skills.keys() - {version}
            earlier = self._score_passes(version)
            rollouts = await self.run_pass(skills[version], len(earlier), items)
            self._passes[version].append(rollouts)
            lack = self._find_lack(rollouts, is_candidate=version == self.candidate.hash)
            if lack is not None:
                return lack.model_copy(update={"deterministic": False})
            scores = self.metric.score_items(rollouts)
            others = self._score_passes(other)
            result = build_pass(ranking, version, scores, earlier=earlier, others=others)
            ranking = ranking.add_pass(result)
            version = self._choose_pass(ranking)
        return await self._decide(ranking, n_earlier)

    def _score_passes(self, skill_hash: str) -> list[dict[str, float | None]]:
        return [self.metric.score_items(rollouts) for rollouts in self._passes[skill_hash]]

    def _find_lack(self, rollouts: Sequence[Rollout], *, is_candidate: bool) -> Verdict | None:
        """Return the verdict if a pass measured too little.

        Items that are refused do not count, unless the candidate is refused alone.
        """
        measured: set[str] = set()
        if is_candidate:
            current = self._list_rollouts(self.current)
            measured = {rollout.item_id for rollout in current if rollout.score is not None}
        barred = sum(r.refused and r.item_id in measured for r in rollouts)
        return check_coverage(
            self.settings.coverage,
            total=sum(not r.refused for r in rollouts) + barred,
            measured=sum(r.score is not None for r in rollouts),
            barred=barred,
            other="current",
        )

    def _choose_pass(self, ranking: Ranking) -> str | None:
        worth = self.settings.worth
        n = len(self.settings.item_ids)
        return choose_pass(ranking, self.candidate.hash, self.current.hash, worth=worth, n=n)

    async def _decide(self, ranking: Ranking, n_earlier: int) -> Verdict:
        posterior = Posterior(ranking)
        kept = ranking.list_contenders(self.settings.kept)
        chosen = choose_version(posterior, (*kept, self.candidate.hash))
        veto = await self._find_veto() if chosen == self.candidate.hash else None
        if veto is not None:
            chosen = choose_version(posterior, kept)
        decision = RankedDecision(
            candidate=posterior.find_belief(self.candidate.hash),
            current=posterior.find_belief(self.current.hash),
            p_better=posterior.find_probability(self.candidate.hash, self.current.hash),
            chosen=chosen,
            passes=ranking.passes[n_earlier:],
        )
        action = choose_action(decision)
        reason = _explain(decision, ranking)
        if veto is not None:
            reason = f"{reason} {veto}"
            action = "reject" if chosen == self.current.hash else action
        new = build_measurement(self.candidate.hash, Split.val, self._list_rollouts(self.candidate))
        old = build_measurement(self.current.hash, Split.val, self._list_rollouts(self.current))
        return Verdict(
            action=action,
            reason=reason,
            candidate=new,
            current=old,
            candidate_score=self.metric.score_measurement(new),
            current_score=self.metric.score_measurement(old),
            ranked=decision,
            deterministic=False,
        )

    def _list_rollouts(self, skill: Skill) -> list[Rollout]:
        return [rollout for rollouts in self._passes[skill.hash] for rollout in rollouts]

    async def _find_veto(self) -> str | None:
        """Return the reason of a rejection by ``no_regression``; lost items are repeated first."""
        allowed = self.settings.no_regression
        if allowed is None:
            return None
        lost = self._find_lost_items()
        if len(lost) > allowed:
            for skill in (self.candidate, self.current):
                for trial in range(len(self._passes[skill.hash]), VETO_TRIALS):
                    self._repeats.extend(await self.run_pass(skill, trial, lost))
            lost = self._find_lost_items()
        return explain_veto(len(lost), allowed) if len(lost) > allowed else None

    def _find_lost_items(self) -> list[str]:
        """Return the items that the current skill always solved and the candidate never."""
        outcomes: dict[tuple[str, str], set[bool]] = {}
        passes = (*self._list_rollouts(self.candidate), *self._list_rollouts(self.current))
        for rollout in (*passes, *self._repeats):
            if rollout.score is not None:
                key = (rollout.skill_hash, rollout.item_id)
                outcomes.setdefault(key, set()).add(self.metric.is_solved(rollout))
        lost = []
        for item in self.settings.item_ids:
            was_solved = outcomes.get((self.current.hash, item)) == {True}
            if was_solved and outcomes.get((self.candidate.hash, item)) == {False}:
                lost.append(item)
        return lost


def choose_action(decision: RankedDecision) -> GateAction:
    """Return the action of a ranked decision; a candidate that may still be better is set aside."""
    if decision.chosen == decision.candidate.skill_hash:
        return "accept"
    if decision.chosen != decision.current.skill_hash:
        return "return"
    return "reject" if decision.p_better < REJECT_BELOW else "set_aside"


def _explain(decision: RankedDecision, ranking: Ranking) -> str:
    """Return the decision in words: measured scores, and the belief as a probability only."""
    score = ranking.find_score(decision.candidate.skill_hash)
    items = "" if score is None else f" on {name_count(score.n, 'item')}"
    sentence = (
        f"The candidate is better than the current skill with probability {decision.p_better:.2f}: "
        f"{_describe_score(ranking, decision.candidate.skill_hash)}{items}, against "
        f"{_describe_score(ranking, decision.current.skill_hash)}."
    )
    if choose_action(decision) != "return":
        return sentence
    earlier = _describe_score(ranking, decision.chosen)
    return f"{sentence} An earlier version ({earlier}) becomes current again."


def _describe_score(ranking: Ranking, skill_hash: str) -> str:
    measured = ranking.find_score(skill_hash)
    if measured is None:
        return "a score that was not measured"
    return f"{measured.score:.3f} measured {name_times(measured.trials)}"
