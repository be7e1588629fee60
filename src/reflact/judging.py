"""How a run decides on a candidate: the gate bound to the run's state, and the approver after it."""

from __future__ import annotations

from typing import get_args

from reflact.config import GateConfig
from reflact.data import shuffled, steps_per_epoch
from reflact.folding import alpha_at
from reflact.paired import ROUNDING, Ask, Setting
from reflact.planning import outlook, resolvable, trials_for
from reflact.ports import Approve, Journal, RunStore
from reflact.records import Alpha, Part, Review, RunState, Undecided
from reflact.rolling import Rolls
from reflact.skill import diff
from reflact.stages.evaluate import Evaluated, Scale, evaluate, forced
from reflact.stages.rollout import note_unmeasured
from reflact.types import Frozen, Rollout, Skill, Verdict
from reflact.wiring import Plan

PARTS: tuple[Part, ...] = get_args(Part)


class Outlook(Frozen):
    """What the validation split can resolve and what a decision may cost."""

    words: str
    effect: float | None
    trials: int
    rollouts: int


class Judge:
    """Decides on candidates, for one start of a run.

    Args:
        plan: The run's plan.
        store: Where skills are.
        journal: Where approvals and unmeasured rollouts are noted.
        rolls: Rolls skills out.
        approve: Asked about each candidate that the gate would accept; None approves all.
        total: The run's steps.
        per_epoch: Those of an epoch.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        store: RunStore,
        journal: Journal,
        rolls: Rolls,
        approve: Approve | None,
        total: int,
        per_epoch: int,
    ) -> None:
        self._gate: GateConfig = plan.config.gate
        self._slow_gated = plan.config.slow_update.enabled and plan.config.slow_update.gated
        self._declared = plan.config.target.deterministic
        self._afresh = plan.config.gate.interleave or not plan.config.train.reuse_rollouts
        self._order = shuffled((item.id for item in plan.data.val), plan.config.seed, "gate")
        self._store = store
        self._journal = journal
        self._rolls = rolls
        self._approve = approve
        self._total = total
        self._per_epoch = per_epoch
        self.scale = Scale(
            metric=self._gate.metric,
            mixed_weight=self._gate.mixed_weight,
            threshold=plan.config.train.success_threshold,
        )

    @property
    def learns(self) -> bool:
        """Whether the gate has to find out by repeats that the target is deterministic."""
        return self._gate.enabled and self._gate.policy == "paired" and self._declared is None

    @property
    def presumed(self) -> bool:
        """Whether the target counts as deterministic before any repeat was seen."""
        return self._declared is not False

    def agree(self, first: tuple[Rollout, ...], second: tuple[Rollout, ...]) -> bool:
        """Whether two trials of the same items gave the same scores, where both have one."""
        marks = [(self.scale.of(a), self.scale.of(b)) for a, b in zip(first, second, strict=True)]
        return all(abs(a - b) <= ROUNDING for a, b in marks if a is not None and b is not None)

    def alpha(self, state: RunState | None, *, step: int) -> Alpha:
        """Return the error probability that the decisions of a step are taken under."""
        return alpha_at(
            step,
            () if state is None else state.alphas,
            alpha=self._gate.alpha,
            total=self._total,
            per_epoch=self._per_epoch,
            slow_gated=self._slow_gated,
        )

    def outlook(self, state: RunState | None) -> Outlook:
        """Return what the validation split can resolve in the next step; None is before the first one."""
        step = 1 if state is None else min(state.step + 1, self._total)
        return foreseen(self._gate, len(self._order), self.alpha(state, step=step))

    async def judge(
        self, candidate: Skill, state: RunState, *, step: int, part: Part
    ) -> tuple[Evaluated, Undecided | None]:
        """Return the verdict on a candidate, and its comparison where that stayed inconclusive.

        Nothing is journalled for an ``unmeasured`` verdict, so that all of it can be tried again.
        """
        current = await self._store.skill(state.current.skill_hash)
        best = await self._store.skill(state.best.skill_hash)
        duel = self._rolls.duel(step=step, part=part, number=PARTS.index(part))
        setting = self._setting(candidate, state, step)
        if self._gate.enabled:
            evaluated = await evaluate(candidate, current, best, setting=setting, scale=self.scale, duel=duel)
        else:
            duels = await duel(candidate, current, Ask(trial=0, item_ids=self._order), None)
            evaluated = forced(candidate, current, duels, setting=setting, scale=self.scale)
        if evaluated.verdict.action == "unmeasured":
            return evaluated, None
        await note_unmeasured(evaluated.unmeasured, journal=self._journal, step=step)
        if evaluated.verdict.action == "inconclusive":
            return evaluated, _undecided(candidate, current, setting)
        verdict = await self._reviewed(evaluated.verdict, candidate, current, step=step, part=part)
        return evaluated.model_copy(update={"verdict": verdict}), None

    def _setting(self, candidate: Skill, state: RunState, step: int) -> Setting:
        gate, alpha = self._gate, self.alpha(state, step=step)
        trials = trials_of(gate, len(self._order), alpha)
        before = next(
            (
                u
                for u in state.undecided
                if (u.skill_hash, u.against) == (candidate.hash, state.current.skill_hash)
            ),
            None,
        )
        if self._afresh:
            before = None
        return Setting(
            item_ids=self._order,
            policy=gate.policy,
            trials=trials if before is None else before.trials + trials,
            level=alpha.level,
            planned=None if before is None else before.planned,
            planned_level=None if before is None else before.level,
            effect=gate.effect,
            min_improvement=gate.min_improvement if gate.policy == "paired" else 0.0,
            coverage=gate.coverage,
            no_regression=gate.no_regression,
            early_stop=gate.early_stop,
            deterministic=state.deterministic,
            declared=self._declared is True,
        )

    async def _reviewed(
        self, verdict: Verdict, candidate: Skill, current: Skill, *, step: int, part: Part
    ) -> Verdict:
        if self._approve is None or not verdict.accepted:
            return verdict
        label = f"approval/{part}/{candidate.hash}"
        answer = await self._journal.recall(step, label)
        if answer is None:
            review = Review(
                step=step,
                part=part,
                current=current,
                candidate=candidate,
                diff=diff(current.text, candidate.text),
                verdict=verdict,
            )
            said = await self._approve(review)
            answer = said if isinstance(said, bool) else str(said)
            await self._journal.note(step, label, answer)
        if answer is True:
            return verdict
        veto = answer if isinstance(answer, str) and answer else "no reason was given"
        return verdict.model_copy(
            update={"action": "reject", "reason": f"{verdict.reason} Vetoed: {veto}", "veto": veto}
        )


def trials_of(gate: GateConfig, n: int, alpha: Alpha) -> int:
    """Return the rounds that one decision may take, on ``n`` items."""
    if gate.max_trials is not None:
        return gate.max_trials
    return trials_for(n, decisions=alpha.decisions, alpha=alpha.alpha, effect=gate.effect)


def first_alpha(plan: Plan) -> Alpha:
    """Return the error probability that a run's first decisions are taken under."""
    train, slow = plan.config.train, plan.config.slow_update
    per_epoch = steps_per_epoch(len(plan.data.train), train.batch_size, train.accumulation)
    return alpha_at(
        1,
        (),
        alpha=plan.config.gate.alpha,
        total=per_epoch * train.num_epochs,
        per_epoch=per_epoch,
        slow_gated=slow.enabled and slow.gated,
    )


def foreseen(gate: GateConfig, n: int, alpha: Alpha) -> Outlook:
    """Return what a validation split of ``n`` items can resolve, and what a decision may cost."""
    if not gate.enabled:
        words = "The gate is off: every candidate is accepted."
        return Outlook(words=words, effect=None, trials=1, rollouts=2 * n)
    if gate.policy == "strict":
        words = (
            f"The strict gate takes any gain on one pass of {n} items, noise included: treat its "
            "acceptances as unverified unless the target is deterministic."
        )
        return Outlook(words=words, effect=None, trials=1, rollouts=2 * n)
    trials = trials_of(gate, n, alpha)
    words = outlook(n, trials, decisions=alpha.decisions, alpha=alpha.alpha, effect=gate.effect)
    return Outlook(
        words=words, effect=resolvable(n, trials, level=alpha.level), trials=trials, rollouts=2 * n * trials
    )


def _undecided(candidate: Skill, current: Skill, setting: Setting) -> Undecided:
    return Undecided(
        skill_hash=candidate.hash,
        against=current.hash,
        trials=setting.trials,
        planned=setting.trials if setting.planned is None else setting.planned,
        level=setting.level if setting.planned_level is None else setting.planned_level,
    )
