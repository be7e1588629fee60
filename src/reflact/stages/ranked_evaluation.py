"""Stage 6 for noisy targets: passes over the validation split while one is worth its rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reflact.gate.greater_mean import VETO_TRIALS, GateSettings, check_coverage, explain_veto
from reflact.gate.ranked_decision import (
    REJECT_BELOW,
    Posterior,
    build_pass,
    choose_pass,
    choose_version,
)
from reflact.stages.evaluate import EvaluationResult, GateMetric, PassRunner, build_measurement
from reflact.text import name_times
from reflact.types import (
    GateAction,
    Measurement,
    RankedDecision,
    Ranking,
    Rollout,
    Skill,
    Split,
    Verdict,
)


@dataclass(kw_only=True)
class RankedEvaluator:
    """One decision of the ranked gate on a candidate, which was made from the current skill.

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

    async def evaluate(
        self, ranking: Ranking, *, measures_current: bool = False
    ) -> EvaluationResult:
        """Return the verdict.

        ``measures_current``: a current skill without a pass gets one first. It was accepted before
        the target showed noise, while no beliefs were kept.
        """
        items = self.settings.item_ids
        skills = {skill.hash: skill for skill in (self.candidate, self.current)}
        earlier_passes = len(ranking.passes)
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
                return self._build_result(lack)
            scores = self.metric.score_items(rollouts)
            others = self._score_passes(other)
            result = build_pass(ranking, version, scores, earlier=earlier, others=others)
            ranking = ranking.add_pass(result)
            version = self._choose_pass(ranking)
        return self._build_result(await self._decide(ranking, earlier_passes))

    def _score_passes(self, skill_hash: str) -> list[dict[str, float | None]]:
        return [self.metric.score_items(rollouts) for rollouts in self._passes[skill_hash]]

    def _find_lack(self, rollouts: Sequence[Rollout], *, is_candidate: bool) -> Verdict | None:
        """Return the verdict if a pass measured too little.

        Items that are refused do not count, unless the candidate is refused alone.
        """
        current = [r for each in self._passes[self.current.hash] for r in each]
        measured = {r.item_id for r in current if r.score is not None and is_candidate}
        barred = sum(r.refused and r.item_id in measured for r in rollouts)
        ruling = check_coverage(
            self.settings.coverage,
            total=sum(not r.refused for r in rollouts) + barred,
            measured=sum(r.score is not None for r in rollouts),
            barred=barred,
            other="current",
        )
        if ruling is None:
            return None
        return Verdict(action=ruling.action, reason=ruling.reason, deterministic=False)

    def _choose_pass(self, ranking: Ranking) -> str | None:
        worth = self.settings.worth
        n = len(self.settings.item_ids)
        return choose_pass(ranking, self.candidate.hash, self.current.hash, worth=worth, n=n)

    async def _decide(self, ranking: Ranking, earlier_passes: int) -> Verdict:
        posterior = Posterior(ranking)
        kept = ranking.list_contenders(self.settings.kept)
        chosen = choose_version(posterior, (*kept, self.candidate.hash))
        veto = None
        if chosen == self.candidate.hash:
            veto = await self._find_veto()
        if veto is not None:
            chosen = choose_version(posterior, kept)
        decision = RankedDecision(
            candidate=posterior.find_belief(self.candidate.hash),
            current=posterior.find_belief(self.current.hash),
            p_better=posterior.find_probability(self.candidate.hash, self.current.hash),
            chosen=chosen,
            passes=ranking.passes[earlier_passes:],
        )
        action = choose_action(decision)
        reason = _explain(decision, ranking)
        if veto is not None:
            reason = f"{reason} {veto}"
            action = "reject" if chosen == self.current.hash else action
        new, old = (self._measure(skill) for skill in (self.candidate, self.current))
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

    def _measure(self, skill: Skill) -> Measurement:
        rollouts = [rollout for each in self._passes[skill.hash] for rollout in each]
        return build_measurement(skill.hash, Split.val, rollouts)

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

    def _find_lost_items(self) -> tuple[str, ...]:
        """Return the items that the current skill always solved and the candidate never."""
        outcomes: dict[tuple[str, str], set[bool]] = {}
        for rollout in self._list_rollouts():
            if rollout.score is not None:
                key = (rollout.skill_hash, rollout.item_id)
                outcomes.setdefault(key, set()).add(self.metric.is_solved(rollout))
        return tuple(
            item
            for item in self.settings.item_ids
            if outcomes.get((self.current.hash, item)) == {True}
            and outcomes.get((self.candidate.hash, item)) == {False}
        )

    def _list_rollouts(self) -> list[Rollout]:
        passes = [each for passes in self._passes.values() for each in passes]
        return [*(rollout for each in passes for rollout in each), *self._repeats]

    def _build_result(self, verdict: Verdict) -> EvaluationResult:
        lost = tuple(rollout for rollout in self._list_rollouts() if rollout.score is None)
        return EvaluationResult(verdict=verdict, unmeasured=lost)


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
    items = "" if score is None else f" on {score.n} item{'s' * (score.n != 1)}"
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
