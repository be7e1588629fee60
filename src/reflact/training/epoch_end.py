"""The end of an epoch: comparison of skills, meta skill and slow update."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.errors import Unmeasured
from reflact.protocols import LLM, DecisionLog, RunStore
from reflact.records import EpochRecord, OpenComparison, RunState, SkillVersion, SlowUpdate
from reflact.skills.document import read_guidance, replace_guidance, reserve_guidance_region
from reflact.stages.context import NoReply, StageContext
from reflact.stages.prompt_sections import show_buffer
from reflact.stages.rollout import log_unmeasured
from reflact.stages.slow_update import (
    ComparedItem,
    compare_skills,
    show_comparison,
    slow_update,
    update_meta_skill,
)
from reflact.training.gating import GateKeeper
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import RunPlan
from reflact.training.state import inherit_version, is_better
from reflact.training.timing import StageTimer
from reflact.types import Fallback, FrozenModel, Item, Rollout, Skill


class EpochOutcome(FrozenModel):
    """The record of an epoch's end, its new documents, and its comparison if that was inconclusive."""

    record: EpochRecord
    skills: tuple[Skill, ...] = ()
    undecided: OpenComparison | None = None


class EpochFinalizer:
    """Runs the end of epochs, for one start of a run.

    Args:
        plan: The run's plan.
        store: Reads skills.
        decision_log: Records missing replies.
        llm: The optimizer.
        scheduler: Rolls skills out.
        gate_keeper: Decides on gated guidance.
        timer: Announces stages.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        store: RunStore,
        decision_log: DecisionLog,
        llm: LLM,
        scheduler: RolloutScheduler,
        gate_keeper: GateKeeper,
        timer: StageTimer,
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._store = store
        self._decision_log = decision_log
        self._llm = llm
        self._scheduler = scheduler
        self._gate_keeper = gate_keeper
        self._timer = timer

    @property
    def is_needed(self) -> bool:
        """Whether the end of an epoch has any work."""
        return self._config.slow_update.enabled or self._config.meta_skill.enabled

    async def finalize(self, state: RunState, *, epoch: int) -> EpochOutcome:
        """Return the outcome of the end of an epoch.

        The first epoch has no predecessor, so it only reserves the region of ungated guidance. Gated guidance
        brings its region along: an empty region before would leave a current skill without a measurement.
        Later epochs compare the skills after the last steps of this and the previous epoch, before any slow
        update.

        Raises:
            RunFailed: No train item could be measured under both skills.
            Unmeasured: Too little could be measured to decide on the guidance.
        """
        current = await self._store.skill(state.current.skill_hash)
        record = EpochRecord(
            epoch=epoch, step=state.step, last_hash=current.hash, current=state.current, best=state.best
        )
        if epoch == 1 or state.last_hash is None:
            return self._reserve_guidance_region(record, current, state)
        earlier = await self._store.skill(state.last_hash)
        pairs, rollouts = await self._compare_skills(earlier, current, epoch=epoch, step=state.step)
        record = record.model_copy(update={"comparisons": tuple(pair.comparison for pair in pairs)})
        if not pairs:
            fallback = Fallback(
                label="comparison",
                reason="no item has an outcome of the selected kind",
                replacement="nothing changes",
            )
            slow = SlowUpdate(action="kept") if self._config.slow_update.enabled else None
            return EpochOutcome(
                record=record.model_copy(update={"slow_update": slow, "fallbacks": (fallback,)})
            )
        shown = show_comparison(pairs, tokens=self._config.reflect.trajectory_tokens)
        if self._config.meta_skill.enabled:
            async with self._timer.announce_stage("meta_skill", step=state.step):
                record = await self._update_meta_skill(record, earlier, current, shown, state)
            await log_unmeasured(rollouts, decision_log=self._decision_log, step=state.step)
        if not self._config.slow_update.enabled:
            return EpochOutcome(record=record)
        return await self._update_guidance(record, earlier, current, shown, state, rollouts=rollouts)

    def _reserve_guidance_region(self, record: EpochRecord, current: Skill, state: RunState) -> EpochOutcome:
        if not self._config.slow_update.enabled or self._config.slow_update.gated:
            return EpochOutcome(record=record)
        skill = reserve_guidance_region(current)
        slow = SlowUpdate(action="reserved", candidate_hash=skill.hash)
        return self._create_version(record, slow, skill, state)

    async def _compare_skills(
        self, earlier: Skill, current: Skill, *, epoch: int, step: int
    ) -> tuple[tuple[ComparedItem, ...], Sequence[Rollout]]:
        """Return the compared items and their rollouts.

        The caller logs unmeasured rollouts only after a model has answered about the items. If one outage
        affects both, a restart then retries both.
        """
        rollouts: list[Rollout] = []

        async def roll(items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
            measured = await self._scheduler.roll_out_train_items(
                items, skill, step=step, phase=f"epoch/{epoch}"
            )
            rollouts.extend(measured)
            return measured

        pairs = await compare_skills(
            self._plan.data.train,
            earlier,
            current,
            roll=roll,
            config=self._config.slow_update,
            threshold=self._config.train.success_threshold,
            seed=self._config.seed,
            epoch=epoch,
        )
        return pairs, rollouts

    def _make_context(self, step: int) -> StageContext:
        return StageContext(
            llm=self._llm, prompts=self._plan.prompts, decision_log=self._decision_log, step=step
        )

    async def _update_meta_skill(
        self, record: EpochRecord, earlier: Skill, current: Skill, shown: str, state: RunState
    ) -> EpochRecord:
        reply = await update_meta_skill(
            earlier,
            current,
            context=self._make_context(record.step),
            epoch=record.epoch,
            comparison=shown,
            attempts=show_buffer(state.step_buffer),
            memory=state.meta_skill,
        )
        if isinstance(reply, NoReply):
            return _with_fallback(record, "meta_skill", reply, "the meta skill stays unchanged")
        return record.model_copy(update={"meta_skill": reply.memory})

    async def _update_guidance(
        self,
        record: EpochRecord,
        earlier: Skill,
        current: Skill,
        shown: str,
        state: RunState,
        *,
        rollouts: Sequence[Rollout],
    ) -> EpochOutcome:
        reply = await slow_update(
            earlier,
            current,
            context=self._make_context(record.step),
            epoch=record.epoch,
            comparison=shown,
            guidance=read_guidance(current.text),
        )
        await log_unmeasured(rollouts, decision_log=self._decision_log, step=record.step)
        if isinstance(reply, NoReply):
            record = _with_fallback(record, "slow_update", reply, "the guidance stays unchanged")
            return EpochOutcome(
                record=record.model_copy(update={"slow_update": SlowUpdate(action="refused")})
            )
        skill = replace_guidance(current, reply.guidance)
        slow = SlowUpdate(
            action="kept",
            helped=reply.helped,
            reasoning=reply.reasoning,
            guidance=reply.guidance,
            candidate_hash=skill.hash,
        )
        gated = self._config.slow_update.gated
        if skill.hash == current.hash or (gated and skill.hash in state.seen_hashes):
            return EpochOutcome(record=record.model_copy(update={"slow_update": slow}))
        if not gated:
            return self._create_version(record, slow.model_copy(update={"action": "forced"}), skill, state)
        evaluated, undecided = await self._gate_keeper.judge(
            skill, state, step=record.step, part="slow update"
        )
        verdict = evaluated.verdict
        if verdict.action == "unmeasured":
            raise Unmeasured(f"the slow update of epoch {record.epoch}: {verdict.reason}")
        slow = slow.model_copy(update={"verdict": verdict})
        if not verdict.accepted:
            record = record.model_copy(update={"slow_update": slow})
            return EpochOutcome(record=record, skills=(skill,), undecided=undecided)
        return self._create_version(record, slow.model_copy(update={"action": "accepted"}), skill, state)

    def _create_version(
        self, record: EpochRecord, slow: SlowUpdate, skill: Skill, state: RunState
    ) -> EpochOutcome:
        record = record.model_copy(update={"slow_update": slow})
        if skill.hash == state.current.skill_hash:
            return EpochOutcome(record=record)
        number, origin = state.latest_version + 1, f"slow update {record.epoch}"
        best = state.best
        if slow.verdict is None:
            version = inherit_version(state.current, number=number, skill=skill, origin=origin)
        else:
            score = slow.verdict.candidate_score
            version = SkillVersion(number=number, skill_hash=skill.hash, origin=origin, score=score)
            best = version if is_better(slow.verdict, best) else best
        record = record.model_copy(update={"created_versions": (version,), "current": version, "best": best})
        return EpochOutcome(record=record, skills=(skill,))


def _with_fallback(record: EpochRecord, label: str, reply: NoReply, replacement: str) -> EpochRecord:
    fallback = Fallback(label=label, reason=reply.reason, replacement=replacement)
    return record.model_copy(update={"fallbacks": (*record.fallbacks, fallback)})
