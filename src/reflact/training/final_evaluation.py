"""The end of a run: comparison of the last skill with the best one, and final measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reflact import events
from reflact.errors import EnvironmentFailure, ModelError, RunFailed, Unmeasured
from reflact.protocols import DecisionLog, EventCallback, RunStore
from reflact.records import Improvement, OpenComparison, PromotionRecord, RunState, SkillScore
from reflact.stages.final_test import make_placebo, measure_improvement, score_skill
from reflact.training.gating import GateKeeper
from reflact.training.rollouts import FIRST_REPORT_TRIAL, RolloutScheduler
from reflact.training.setup import RunPlan
from reflact.training.state import is_better
from reflact.types import FrozenModel, Rollout, Skill, Split


class FinalMeasurements(FrozenModel):
    """The final measurements; ``missing`` names each measurement that failed, with the reason."""

    scores: tuple[SkillScore, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    missing: tuple[str, ...] = ()

    def __add__(self, other: FinalMeasurements) -> FinalMeasurements:
        return FinalMeasurements(
            scores=self.scores + other.scores,
            improvements=self.improvements + other.improvements,
            missing=self.missing + other.missing,
        )


class FinalEvaluator:
    """Evaluates the skills at the end of a run, for one start.

    Args:
        plan: The run's plan.
        store: Reads skills.
        decision_log: Counts openings of the test split.
        scheduler: Rolls skills out.
        gate_keeper: Decides whether the last skill replaces the best one.
        on_event: Receives durable events.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        store: RunStore,
        decision_log: DecisionLog,
        scheduler: RolloutScheduler,
        gate_keeper: GateKeeper,
        on_event: EventCallback,
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._store = store
        self._decision_log = decision_log
        self._scheduler = scheduler
        self._gate_keeper = gate_keeper
        self._on_event = on_event
        self.openings = 0

    async def judge_promotion(self, state: RunState) -> tuple[PromotionRecord, OpenComparison | None] | None:
        """Compare the last skill with the best one; return the record and the comparison if inconclusive.

        Returns None if they are the same document.

        Raises:
            Unmeasured: Too little could be measured to decide.
        """
        if state.current.skill_hash == state.best.skill_hash:
            return None
        last = await self._store.skill(state.current.skill_hash)
        against = state.model_copy(update={"current": state.best})
        evaluated, undecided = await self._gate_keeper.judge(last, against, step=state.step, part="promotion")
        verdict = evaluated.verdict
        if verdict.action == "unmeasured":
            raise Unmeasured(f"the last skill could not be compared with the best: {verdict.reason}")
        measured = {"score": verdict.candidate_score, "inherited": False}
        current = state.current.model_copy(update=measured)
        best = current if is_better(verdict, state.best) else state.best
        return PromotionRecord(step=state.step, verdict=verdict, current=current, best=best), undecided

    async def measure(self, state: RunState) -> FinalMeasurements:
        """Measure baseline, placebo, best and last skill on the validation and the test split.

        A failed measurement is recorded in ``missing`` and does not affect the others.
        """
        documents = await self._documents(state)
        splits = [Split.val]
        if self._config.test.enabled:
            shown = ", ".join(f"{name} {skill.hash}" for name, skill in documents.items())
            await self.open_test_split(f"step {state.step}: {shown}")
            splits.append(Split.test)
        measured = FinalMeasurements()
        for split in splits:
            measured += await self._measure_split(split, documents, state)
        return measured

    async def open_test_split(self, reason: str) -> None:
        """Count an opening of the sealed test split; the same reason counts once."""
        reasons: list[str] = []
        while (logged := await self._decision_log.get(0, f"opening/{len(reasons) + 1}")) is not None:
            reasons.append(str(logged))
        if reason not in reasons:
            reasons.append(reason)
            await self._decision_log.put(0, f"opening/{len(reasons)}", reason)
        self.openings = len(reasons)
        await self._on_event(
            events.TestSplitOpened(run_id=self._plan.run_id, count=reasons.index(reason) + 1)
        )

    async def _documents(self, state: RunState) -> dict[str, Skill]:
        best = await self._store.skill(state.best.skill_hash)
        last = await self._store.skill(state.current.skill_hash)
        documents = {"baseline": self._plan.initial_skill}
        if self._config.test.placebo:
            text = self._plan.prompts.prompts["placebo"].system
            documents["placebo"] = make_placebo(text, best)
        return {**documents, "best": best, "final": last}

    async def _measure_split(
        self, split: Split, documents: Mapping[str, Skill], state: RunState
    ) -> FinalMeasurements:
        rollouts: dict[str, tuple[Rollout, ...]] = {}
        measured = FinalMeasurements()
        for name, skill in documents.items():
            try:
                rolled = await self._roll_out(split, skill, state)
            except (ModelError, EnvironmentFailure, RunFailed) as error:
                measured += FinalMeasurements(missing=(f"{name} on {split.value}: {error}",))
                continue
            rollouts[name] = rolled
            score = score_skill(name, skill, split, rolled, self._plan.data.items(split))
            score = score.model_copy(update={"selected_on": self._is_selected(name, skill, split)})
            measured += FinalMeasurements(scores=(score,))
            await self._on_event(
                events.FinalScoreMeasured(run_id=self._plan.run_id, step=state.step, score=score)
            )
        return measured + await self._measure_improvements(split, rollouts, state)

    async def _roll_out(self, split: Split, skill: Skill, state: RunState) -> tuple[Rollout, ...]:
        trials = [
            await self._scheduler.roll_out_split(split, skill, step=state.step, phase="final", trial=trial)
            for trial in self._trials(split, state)
        ]
        return tuple(rollout for trial in trials for rollout in trial)

    async def _measure_improvements(
        self, split: Split, rollouts: Mapping[str, Sequence[Rollout]], state: RunState
    ) -> FinalMeasurements:
        gained = FinalMeasurements()
        for name in ("best", "final"):
            if name not in rollouts:
                continue
            gain = measure_improvement(name, split, rollouts.get("baseline", ()), rollouts[name])
            if gain is None:
                message = f"improvement of {name} on {split.value}: the baseline has no score on its items"
                gained += FinalMeasurements(missing=(message,))
                continue
            gained += FinalMeasurements(improvements=(gain,))
            await self._on_event(
                events.ImprovementMeasured(run_id=self._plan.run_id, step=state.step, improvement=gain)
            )
        return gained

    def _trials(self, split: Split, state: RunState) -> tuple[int, ...]:
        gate = self._config.gate
        noisy = gate.enabled and gate.policy == "paired" and not state.deterministic
        if split is Split.val and noisy:
            return tuple(range(FIRST_REPORT_TRIAL, FIRST_REPORT_TRIAL + gate.report_trials))
        return (0,)

    def _is_selected(self, name: str, skill: Skill, split: Split) -> bool:
        """Whether the reported trials also selected the document."""
        gate, reused = self._config.gate, self._config.train.reuse_rollouts
        if split is not Split.val or not reused or skill.hash == self._plan.initial_skill.hash:
            return False
        if not gate.enabled:
            return name == "best"
        return gate.policy == "strict" and name in {"best", "final"}
