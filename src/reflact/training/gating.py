"""Gated decisions of a run: settings from the run's state, the gate, and the approver."""

from __future__ import annotations

from typing import get_args

from reflact.config.training import GateConfig
from reflact.data import count_steps_per_epoch, shuffle
from reflact.gate.betting import choose_trials, describe_power, detectable_effect
from reflact.gate.decision import SCORE_TOLERANCE, GateSettings, TrialRequest
from reflact.protocols import Approver, DecisionLog, RunStore
from reflact.records import AlphaBudget, CandidateReview, DecisionPoint, OpenComparison, RunState
from reflact.skills.document import diff_texts
from reflact.stages.evaluate import EvaluationResult, GateMetric, evaluate, force_accept
from reflact.stages.rollout import log_unmeasured
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import RunPlan
from reflact.training.state import find_alpha
from reflact.types import FrozenModel, Rollout, Skill, Verdict

DECISION_POINTS: tuple[DecisionPoint, ...] = get_args(DecisionPoint)


class GatePower(FrozenModel):
    """The gate's statistical power and the cost of a decision; see ``events.GatePowerEstimated``."""

    description: str
    effect: float | None
    trials: int
    rollouts: int


class GateKeeper:
    """Decides on candidates, for one start of a run.

    Args:
        plan: The run's plan.
        store: Reads skills.
        decision_log: Records approvals and unmeasured rollouts.
        scheduler: Rolls skills out.
        approve: Asked about each candidate that the gate would accept; None approves all.
        total: The steps of the run.
        per_epoch: The steps of an epoch.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        store: RunStore,
        decision_log: DecisionLog,
        scheduler: RolloutScheduler,
        approve: Approver | None,
        total: int,
        per_epoch: int,
    ) -> None:
        self._gate: GateConfig = plan.config.gate
        self._slow_gated = plan.config.slow_update.enabled and plan.config.slow_update.gated
        self._declared_deterministic = plan.config.target.deterministic
        self._rolls_out_anew = plan.config.gate.interleave or not plan.config.train.reuse_rollouts
        self._order = shuffle((item.id for item in plan.data.val), plan.config.seed, "gate")
        self._store = store
        self._decision_log = decision_log
        self._scheduler = scheduler
        self._approve = approve
        self._total = total
        self._per_epoch = per_epoch
        self.metric = GateMetric(
            metric=self._gate.metric,
            mixed_weight=self._gate.mixed_weight,
            threshold=plan.config.train.success_threshold,
        )

    @property
    def must_test_determinism(self) -> bool:
        """Whether the gate has to repeat rollouts to learn if the target is deterministic."""
        return self._gate.enabled and self._gate.policy == "paired" and self._declared_deterministic is None

    @property
    def presumes_deterministic(self) -> bool:
        """Whether the target counts as deterministic before any repeat."""
        return self._declared_deterministic is not False

    def scores_agree(self, first: tuple[Rollout, ...], second: tuple[Rollout, ...]) -> bool:
        """Return whether two trials of the same items gave the same scores; missing scores are skipped."""
        scores = [
            (self.metric.score_rollout(a), self.metric.score_rollout(b))
            for a, b in zip(first, second, strict=True)
        ]
        return all(abs(a - b) <= SCORE_TOLERANCE for a, b in scores if a is not None and b is not None)

    def find_alpha(self, state: RunState | None, *, step: int) -> AlphaBudget:
        """Return the error budget for the decisions of a step."""
        return find_alpha(
            step,
            () if state is None else state.alphas,
            alpha=self._gate.alpha,
            total=self._total,
            per_epoch=self._per_epoch,
            slow_gated=self._slow_gated,
        )

    def estimate_power(self, state: RunState | None) -> GatePower:
        """Return the gate's power in the next step; ``state`` is None before the first one."""
        step = 1 if state is None else min(state.step + 1, self._total)
        return estimate_gate_power(self._gate, len(self._order), self.find_alpha(state, step=step))

    async def judge(
        self, candidate: Skill, state: RunState, *, step: int, part: DecisionPoint
    ) -> tuple[EvaluationResult, OpenComparison | None]:
        """Return the verdict on a candidate, and the comparison if it was inconclusive.

        An ``unmeasured`` verdict is not logged, so that a retry can measure everything again.
        """
        current = await self._store.skill(state.current.skill_hash)
        best = await self._store.skill(state.best.skill_hash)
        run_pairs = self._scheduler.make_pair_runner(step=step, part=part, number=DECISION_POINTS.index(part))
        settings = self._build_settings(candidate, state, step)
        if self._gate.enabled:
            evaluated = await evaluate(
                candidate, current, best, settings=settings, metric=self.metric, run_pairs=run_pairs
            )
        else:
            pairs = await run_pairs(candidate, current, TrialRequest(trial=0, item_ids=self._order), None)
            evaluated = force_accept(candidate, current, pairs, settings=settings, metric=self.metric)
        if evaluated.verdict.action == "unmeasured":
            return evaluated, None
        await log_unmeasured(evaluated.unmeasured, decision_log=self._decision_log, step=step)
        if evaluated.verdict.action == "inconclusive":
            return evaluated, _build_open_comparison(candidate, current, settings)
        verdict = await self._ask_approver(evaluated.verdict, candidate, current, step=step, part=part)
        return evaluated.model_copy(update={"verdict": verdict}), None

    def _build_settings(self, candidate: Skill, state: RunState, step: int) -> GateSettings:
        gate, alpha = self._gate, self.find_alpha(state, step=step)
        trials = count_trials(gate, len(self._order), alpha)
        before = next(
            (
                u
                for u in state.open_comparisons
                if (u.skill_hash, u.against) == (candidate.hash, state.current.skill_hash)
            ),
            None,
        )
        if self._rolls_out_anew:
            before = None
        return GateSettings(
            item_ids=self._order,
            policy=gate.policy,
            trials=trials if before is None else before.trials + trials,
            level=alpha.level,
            planned_trials=None if before is None else before.planned_trials,
            planned_level=None if before is None else before.level,
            effect=gate.effect,
            min_improvement=gate.min_improvement if gate.policy == "paired" else 0.0,
            coverage=gate.coverage,
            no_regression=gate.no_regression,
            early_stop=gate.early_stop,
            deterministic=state.deterministic,
            declared_deterministic=self._declared_deterministic is True,
        )

    async def _ask_approver(
        self, verdict: Verdict, candidate: Skill, current: Skill, *, step: int, part: DecisionPoint
    ) -> Verdict:
        if self._approve is None or not verdict.accepted:
            return verdict
        label = f"approval/{part}/{candidate.hash}"
        answer = await self._decision_log.get(step, label)
        if answer is None:
            review = CandidateReview(
                step=step,
                part=part,
                current=current,
                candidate=candidate,
                diff=diff_texts(current.text, candidate.text),
                verdict=verdict,
            )
            reply = await self._approve(review)
            answer = reply if isinstance(reply, bool) else str(reply)
            await self._decision_log.put(step, label, answer)
        if answer is True:
            return verdict
        veto = answer if isinstance(answer, str) and answer else "no reason was given"
        return verdict.model_copy(
            update={"action": "reject", "reason": f"{verdict.reason} Vetoed: {veto}", "veto": veto}
        )


def count_trials(gate: GateConfig, n: int, alpha: AlphaBudget) -> int:
    """Return the largest number of trials for one decision on ``n`` items."""
    if gate.max_trials is not None:
        return gate.max_trials
    return choose_trials(n, decisions=alpha.decisions, alpha=alpha.alpha, effect=gate.effect)


def build_first_alpha(plan: RunPlan) -> AlphaBudget:
    """Return the error budget for the first decisions of a run."""
    train, slow = plan.config.train, plan.config.slow_update
    per_epoch = count_steps_per_epoch(len(plan.data.train), train.batch_size, train.accumulation)
    return find_alpha(
        1,
        (),
        alpha=plan.config.gate.alpha,
        total=per_epoch * train.num_epochs,
        per_epoch=per_epoch,
        slow_gated=slow.enabled and slow.gated,
    )


def estimate_gate_power(gate: GateConfig, n: int, alpha: AlphaBudget) -> GatePower:
    """Return the gate's power on a validation split of ``n`` items."""
    if not gate.enabled:
        words = "The gate is off: every candidate is accepted."
        return GatePower(description=words, effect=None, trials=1, rollouts=2 * n)
    if gate.policy == "strict":
        words = (
            f"The strict gate takes any gain on one pass of {n} items, noise included: treat its "
            "acceptances as unverified unless the target is deterministic."
        )
        return GatePower(description=words, effect=None, trials=1, rollouts=2 * n)
    trials = count_trials(gate, n, alpha)
    words = describe_power(n, trials, decisions=alpha.decisions, alpha=alpha.alpha, effect=gate.effect)
    return GatePower(
        description=words,
        effect=detectable_effect(n, trials, level=alpha.level),
        trials=trials,
        rollouts=2 * n * trials,
    )


def _build_open_comparison(candidate: Skill, current: Skill, settings: GateSettings) -> OpenComparison:
    return OpenComparison(
        skill_hash=candidate.hash,
        against=current.hash,
        trials=settings.trials,
        planned_trials=settings.trials if settings.planned_trials is None else settings.planned_trials,
        level=settings.level if settings.planned_level is None else settings.planned_level,
    )
