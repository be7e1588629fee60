"""Stage 6 for noisy targets: passes over the validation split until no further one is worth its
rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from reflact.gate.greater_mean import MAX_UNMEASURED_GAP, VETO_TRIALS, count_required, explain_veto
from reflact.gate.ranked_decision import (
    REJECT_BELOW,
    ItemScores,
    Posterior,
    build_pass,
    choose_pass,
    choose_version,
)
from reflact.stages.evaluate import EvaluationResult, GateMetric, PassRunner, build_measurement
from reflact.text import name_times
from reflact.types import (
    FrozenModel,
    GateAction,
    MeasuredScore,
    RankedDecision,
    Ranking,
    Rollout,
    Skill,
    Split,
    Verdict,
    is_failure,
)


class RankSettings(FrozenModel):
    """The inputs of a ranked decision beside the beliefs; see ``GateConfig`` for the settings.

    ``kept`` are the hashes of the versions that were ever current, the initial one first.
    """

    item_ids: tuple[str, ...] = Field(min_length=1)
    kept: tuple[str, ...] = Field(min_length=1)
    worth: float = Field(ge=0)
    max_passes: int = Field(ge=1)
    coverage: float = Field(gt=0, le=1)
    no_regression: int | None = Field(default=None, ge=0)


class RankedEvaluator:
    """One decision of the ranked gate; ``read_pass`` returns the stored rollouts of an earlier
    pass.
    """

    def __init__(
        self,
        settings: RankSettings,
        metric: GateMetric,
        run_pass: PassRunner,
        read_pass: PassRunner,
    ) -> None:
        self._settings = settings
        self._metric = metric
        self._run_pass = run_pass
        self._read_pass = read_pass
        self._passes: dict[str, list[Sequence[Rollout]]] = {}
        self._repeats: list[Rollout] = []

    async def evaluate(
        self, candidate: Skill, current: Skill, ranking: Ranking, *, measures_current: bool = False
    ) -> EvaluationResult:
        """Return the verdict on a candidate, which was made from the current skill.

        ``measures_current``: a current skill without a pass gets one first. It was accepted before
        the target showed noise, while no beliefs were kept.
        """
        settings = self._settings
        skills = {skill.hash: skill for skill in (candidate, current)}
        known = len(ranking.passes)
        ranking = ranking.add_version(candidate.hash, current.hash)
        for skill in skills.values():
            trials = range(ranking.count_passes(skill.hash))
            self._passes[skill.hash] = [
                await self._read_pass(skill, t, settings.item_ids) for t in trials
            ]
        n = len(settings.item_ids)
        worth = settings.worth
        first = (
            current.hash if measures_current and not ranking.count_passes(current.hash) else None
        )
        while version := first or choose_pass(
            ranking, candidate.hash, current.hash, worth=worth, n=n, most=settings.max_passes
        ):
            first = None
            passes = self._passes[version]
            rollouts = await self._run_pass(skills[version], len(passes), settings.item_ids)
            other = next(iter(skills.keys() - {version}))
            usual = self._passes[other] if version == candidate.hash else ()
            if (lack := self._check_coverage(rollouts, usual)) is not None:
                passes.append(rollouts)
                return self._build_result(lack)
            result = build_pass(
                ranking,
                version,
                self._score(rollouts),
                earlier=[self._score(each) for each in passes],
                others=[self._score(each) for each in self._passes[other]],
            )
            ranking = ranking.add_pass(result)
            passes.append(rollouts)
        return self._build_result(await self._decide(candidate, current, ranking, known))

    def _check_coverage(
        self, rollouts: Sequence[Rollout], others: Sequence[Sequence[Rollout]]
    ) -> Verdict | None:
        """Return the verdict if a pass measured too little; as a rejection if only this version's
        items are refused.
        """
        n = len(rollouts)
        share = self._settings.coverage
        usual = {r.item_id for each in others for r in each if r.score is not None}
        own = sum(r.refused and r.item_id in usual for r in rollouts)
        measured = sum(r.score is not None for r in rollouts)
        is_barred = 100 * own > MAX_UNMEASURED_GAP * n
        if not is_barred and measured >= count_required(
            share, sum(not r.refused for r in rollouts)
        ):
            return None
        refused = f" The endpoint refuses {own} that the other skill has." if own else ""
        return Verdict(
            action="reject" if is_barred else "unmeasured",
            reason=f"Only {measured} of {n} items are measured; the gate needs a share of "
            f"{share:g}.{refused}",
            deterministic=False,
        )

    async def _decide(
        self, candidate: Skill, current: Skill, ranking: Ranking, known: int
    ) -> Verdict:
        posterior = Posterior(ranking)
        kept = ranking.list_contenders(self._settings.kept)
        chosen = choose_version(posterior, (*kept, candidate.hash))
        veto = None
        if chosen == candidate.hash:
            veto = await self._find_veto(candidate, current)
        if veto is not None:
            chosen = choose_version(posterior, kept)
        decision = RankedDecision(
            candidate=posterior.find_belief(candidate.hash),
            current=posterior.find_belief(current.hash),
            p_better=posterior.find_probability(candidate.hash, current.hash),
            chosen=chosen,
            passes=ranking.passes[known:],
        )
        reason = _explain(decision, ranking)
        new, old = (
            build_measurement(
                skill.hash, Split.val, [r for each in self._passes[skill.hash] for r in each]
            )
            for skill in (candidate, current)
        )
        return Verdict(
            action="reject"
            if veto is not None and chosen == current.hash
            else choose_action(decision),
            reason=reason if veto is None else f"{reason} {veto}",
            candidate=new,
            current=old,
            candidate_score=self._metric.score_measurement(new),
            current_score=self._metric.score_measurement(old),
            ranked=decision,
            deterministic=False,
        )

    async def _find_veto(self, candidate: Skill, current: Skill) -> str | None:
        """Return the reason of a rejection by ``no_regression``; lost items are repeated first."""
        allowed = self._settings.no_regression
        if allowed is None:
            return None
        lost = self._find_lost_items(candidate, current)
        if len(lost) > allowed:
            for skill in (candidate, current):
                for trial in range(len(self._passes[skill.hash]), VETO_TRIALS):
                    self._repeats.extend(await self._run_pass(skill, trial, lost))
            lost = self._find_lost_items(candidate, current)
        return explain_veto(len(lost), allowed) if len(lost) > allowed else None

    def _find_lost_items(self, candidate: Skill, current: Skill) -> tuple[str, ...]:
        """Return the items that the current skill always solved and the candidate never, as far as
        measured.
        """
        solved, failed = (self._count_solved(skill) for skill in (current, candidate))
        return tuple(
            item
            for item in self._settings.item_ids
            if item in solved and all(solved[item]) and item in failed and not any(failed[item])
        )

    def _count_solved(self, skill: Skill) -> dict[str, list[bool]]:
        found: dict[str, list[bool]] = {}
        repeats = [rollout for rollout in self._repeats if rollout.skill_hash == skill.hash]
        for rollout in (*(r for each in self._passes[skill.hash] for r in each), *repeats):
            if rollout.score is not None:
                found.setdefault(rollout.item_id, []).append(
                    not is_failure(rollout, self._metric.threshold)
                )
        return found

    def _score(self, rollouts: Sequence[Rollout]) -> ItemScores:
        return {rollout.item_id: self._metric.score_rollout(rollout) for rollout in rollouts}

    def _build_result(self, verdict: Verdict) -> EvaluationResult:
        rollouts = [r for passes in self._passes.values() for each in passes for r in each]
        lost = tuple(r for r in (*rollouts, *self._repeats) if r.score is None)
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
    new, old = (
        ranking.find_score(belief.skill_hash) for belief in (decision.candidate, decision.current)
    )
    items = "" if new is None else f" on {new.n} item{'s' * (new.n != 1)}"
    sentence = (
        f"The candidate is better than the current skill with probability {decision.p_better:.2f}: "
        f"{_describe_score(new)}{items}, against {_describe_score(old)}."
    )
    if decision.chosen in {decision.candidate.skill_hash, decision.current.skill_hash}:
        return sentence
    earlier = _describe_score(ranking.find_score(decision.chosen))
    return f"{sentence} An earlier version ({earlier}) becomes current again."


def _describe_score(measured: MeasuredScore | None) -> str:
    if measured is None:
        return "a score that was not measured"
    return f"{measured.score:.3f} measured {name_times(measured.trials)}"
