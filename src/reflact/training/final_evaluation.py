"""The end of a run: comparison of the last skill with the best one, and final measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reflact import events
from reflact.errors import EnvironmentFailure, ModelError, RunFailed
from reflact.protocols import EventCallback
from reflact.records import Claim, Improvement, PromotionRecord, RunState, SkillScore
from reflact.stages.final_test import judge_claim, make_placebo, measure_improvement, score_skill
from reflact.training.controls import UNMEASURABLE, NullAnswerGrader
from reflact.training.gating import CommitOutcome, GateKeeper
from reflact.training.rollouts import FIRST_REPORT_TRIAL, RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.state import find_current, replaces_best
from reflact.types import FrozenModel, Rollout, Skill, Split

ORDER = ("baseline", "placebo", "null_empty", "null_refusal", "null_frequent", "best", "final")
"""The names of final scores, in the order of reports."""


class FinalMeasurements(FrozenModel):
    """The final measurements; ``missing`` names each measurement that failed, with the reason."""

    scores: tuple[SkillScore, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    claim: Claim | None = None
    missing: tuple[str, ...] = ()


@dataclass
class FinalEvaluator:
    """Evaluates the skills at the end of a run; ``openings`` counts those of the sealed test split."""

    runtime: Runtime
    scheduler: RolloutScheduler
    gate_keeper: GateKeeper
    null_answers: NullAnswerGrader
    on_event: EventCallback
    openings: int = 0

    async def judge_promotion(self, state: RunState) -> CommitOutcome | None:
        """Compare the last skill with the best one; None if they are the same document.

        If beliefs choose the best skill, only a last skill without a pass is compared, with the one it was made from.

        Raises:
            Unmeasured: Too little could be measured to decide.
        """
        against = state.best
        if state.ranking is not None and not state.deterministic:
            measured = state.ranking.list_lineage(state.current.skill_hash)[-1]
            against = next(version for version in state.kept if version.skill_hash == measured)
        if state.current.skill_hash == against.skill_hash:
            return None
        last = await self.runtime.store.skill(state.current.skill_hash)
        before = state.model_copy(update={"current": against})
        verdict, undecided = await self.gate_keeper.judge(
            last,
            before,
            step=state.step,
            part="promotion",
            subject="the last skill could not be compared with the best",
        )
        update = {"score": verdict.candidate_score, "inherited": False}
        current = state.current.model_copy(update=update)
        if verdict.ranked is not None and not verdict.accepted:
            current = find_current(before, verdict)
        best = current if replaces_best(verdict, state.best) else state.best
        record = PromotionRecord(step=state.step, verdict=verdict, current=current, best=best)
        return CommitOutcome(record=record, undecided=undecided)

    async def measure(self, state: RunState) -> FinalMeasurements:
        """Measure baseline, best and last skill on the validation and the test split, and the controls on the last.

        A failed measurement is recorded in ``missing`` and does not affect the others.
        """
        documents, placebo = await self._documents(state)
        splits = [Split.val]
        if self.runtime.config.test.enabled:
            shown = [f"{name} {skill.hash}" for name, skill in (documents | placebo).items()]
            shown += [answer.name for answer in self.null_answers.list_answers()]
            await self.open_test_split(f"step {state.step}: {', '.join(shown)}")
            splits.append(Split.test)
        scores: list[SkillScore] = []
        improvements: list[Improvement] = []
        missing: list[str] = []
        claim: Claim | None = None
        for split in splits:
            rollouts: dict[str, tuple[Rollout, ...]] = {}
            for name, skill in documents.items():
                try:
                    rollouts[name] = await self._roll_out(split, skill, state)
                except (ModelError, EnvironmentFailure, RunFailed) as error:
                    missing.append(f"{name} on {split.value}: {error}")
                    continue
                scores.append(await self._score(name, skill, split, rollouts[name], state))
            for name in [name for name in ("best", "final") if name in rollouts]:
                gain = measure_improvement(name, split, rollouts.get("baseline", ()), rollouts[name])
                if gain is None:
                    missing.append(
                        f"improvement of {name} on {split.value}: the baseline has no score on its items"
                    )
                    continue
                improvements.append(gain)
                await self.on_event(
                    events.ImprovementMeasured(run_id=self.runtime.run_id, step=state.step, improvement=gain)
                )
            if split is splits[-1] and state.best.skill_hash != self.runtime.plan.initial_skill.hash:
                claim = judge_claim(
                    split,
                    rollouts.get("baseline", ()),
                    rollouts.get("best", ()),
                    on_these_items=split is Split.val and not state.deterministic,
                )
        controls, left_out = await self._measure_controls(splits[-1], placebo, state)
        scores = sorted(
            [*scores, *controls], key=lambda score: (splits.index(score.split), ORDER.index(score.name))
        )
        return FinalMeasurements(
            scores=tuple(scores),
            improvements=tuple(improvements),
            claim=claim,
            missing=(*missing, *left_out),
        )

    async def _measure_controls(
        self, split: Split, placebo: Mapping[str, Skill], state: RunState
    ) -> tuple[list[SkillScore], list[str]]:
        """Return the scores of null answers and placebo on a split, and the reasons for those that are missing."""
        scores, missing, items = list[SkillScore](), list[str](), self.runtime.plan.data.items(split)
        for answer in self.null_answers.list_answers():
            try:
                score = await self.null_answers.grade(answer, split, items, step=state.step)
            except UNMEASURABLE as error:
                missing.append(f"{answer.name} on {split.value}: {error}")
                continue
            scores.append(await self._emit_score(score, state))
        for name, skill in placebo.items():
            try:
                rollouts = await self._roll_out(split, skill, state)
            except UNMEASURABLE as error:
                missing.append(f"{name} on {split.value}: {error}")
                continue
            scores.append(await self._score(name, skill, split, rollouts, state))
        return scores, missing

    async def open_test_split(self, reason: str) -> None:
        """Count an opening of the sealed test split; the same reason counts once."""
        reasons, log = list[str](), self.runtime.decision_log
        while (logged := await log.get(0, f"test_opening/{len(reasons) + 1}")) is not None:
            reasons.append(str(logged))
        if reason not in reasons:
            reasons.append(reason)
            await log.put(0, f"test_opening/{len(reasons)}", reason)
        self.openings = len(reasons)
        await self.on_event(
            events.TestSplitOpened(run_id=self.runtime.run_id, count=reasons.index(reason) + 1)
        )

    async def _documents(self, state: RunState) -> tuple[dict[str, Skill], dict[str, Skill]]:
        """Return the documents by name, and the placebo if there is one."""
        best = await self.runtime.store.skill(state.best.skill_hash)
        last = await self.runtime.store.skill(state.current.skill_hash)
        documents = {"baseline": self.runtime.plan.initial_skill, "best": best, "final": last}
        if not self.runtime.config.test.placebo:
            return documents, {}
        text = self.runtime.plan.prompts.prompts["placebo"].system
        return documents, {"placebo": make_placebo(text, best)}

    async def _roll_out(self, split: Split, skill: Skill, state: RunState) -> tuple[Rollout, ...]:
        trials = [
            await self.scheduler.roll_out_split(split, skill, step=state.step, phase="final", trial=trial)
            for trial in self._trials(split, state)
        ]
        return tuple(rollout for trial in trials for rollout in trial)

    async def _score(
        self, name: str, skill: Skill, split: Split, rollouts: Sequence[Rollout], state: RunState
    ) -> SkillScore:
        score = score_skill(name, skill, split, rollouts, self.runtime.plan.data.items(split))
        return await self._emit_score(
            score.model_copy(update={"selected_on": self._is_selected(name, skill, split, state)}), state
        )

    async def _emit_score(self, score: SkillScore, state: RunState) -> SkillScore:
        await self.on_event(
            events.FinalScoreMeasured(run_id=self.runtime.run_id, step=state.step, score=score)
        )
        return score

    def _trials(self, split: Split, state: RunState) -> tuple[int, ...]:
        gate = self.runtime.config.gate
        claims_here = gate.policy == "ranked" and not self.runtime.config.test.enabled
        is_fresh = gate.enabled and (gate.policy == "paired" or claims_here) and not state.deterministic
        if split is Split.val and is_fresh:
            return tuple(range(FIRST_REPORT_TRIAL, FIRST_REPORT_TRIAL + gate.report_trials))
        return (0,)

    def _is_selected(self, name: str, skill: Skill, split: Split, state: RunState) -> bool:
        """Whether the reported trials also selected the document."""
        gate, reused = self.runtime.config.gate, self.runtime.config.train.reuse_rollouts
        is_initial = skill.hash == self.runtime.plan.initial_skill.hash
        if split is not Split.val or not reused or is_initial:
            return False
        if not gate.enabled:
            return name == "best"
        is_fresh = FIRST_REPORT_TRIAL in self._trials(split, state)
        return gate.policy != "paired" and not is_fresh and name in {"best", "final"}
