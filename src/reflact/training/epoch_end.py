"""The end of an epoch: comparison of skills, meta skill and slow update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reflact.concurrency import run_both
from reflact.messages import NoReply
from reflact.records import EpochRecord, RunState, SkillVersion, SlowUpdate
from reflact.skills.document import read_guidance, replace_guidance, reserve_guidance_region
from reflact.stages.execution_notes import carry_notes
from reflact.stages.prompt_sections import show_buffer
from reflact.stages.rollout import log_unmeasured
from reflact.stages.slow_update import (
    Comparison,
    GuidanceReply,
    MemoryReply,
    compare_skills,
    show_comparison,
    slow_update,
    update_meta_skill,
)
from reflact.training.gating import CommitOutcome, GateKeeper
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.state import find_current, inherit_version, replaces_best
from reflact.training.timing import StageTimer
from reflact.types import Fallback, Item, Rollout, Skill


@dataclass(frozen=True)
class EpochFinalizer:
    """Runs the end of epochs, for one start of a run."""

    runtime: Runtime
    scheduler: RolloutScheduler
    gate_keeper: GateKeeper
    timer: StageTimer

    @property
    def is_needed(self) -> bool:
        """Whether the end of an epoch has any work."""
        return self.runtime.config.slow_update.enabled or self.runtime.config.meta_skill.enabled

    async def finalize(self, state: RunState, *, epoch: int) -> CommitOutcome:
        """Return the outcome of the end of an epoch.

        The first epoch has no predecessor, so it only reserves the region of ungated guidance. Gated guidance
        brings its region along: an empty region before would leave a current skill without a measurement.
        Later epochs compare the skills after the last steps of this and the previous epoch, before any slow
        update.

        Raises:
            RunFailed: No train item could be measured under both skills.
            Unmeasured: Too little could be measured to decide on the guidance.
        """
        current = await self.runtime.store.skill(state.current.skill_hash)
        record = EpochRecord(
            epoch=epoch, step=state.step, last_hash=current.hash, current=state.current, best=state.best
        )
        if epoch == 1 or state.last_hash is None:
            return self._reserve_guidance_region(record, current, state)
        earlier = await self.runtime.store.skill(state.last_hash)
        compared, rollouts = await self._compare_skills(earlier, current, epoch=epoch, step=state.step)
        pairs = compared.chosen
        record = record.model_copy(
            update={
                "comparisons": tuple(pair.comparison for pair in pairs),
                "left_out": tuple(pair.comparison for pair in compared.left_out),
            }
        )
        if not pairs:
            fallback = Fallback(
                label="comparison",
                reason="no item has an outcome of the selected kind",
                replacement="nothing changes",
            )
            slow = SlowUpdate(action="unchanged") if self.runtime.config.slow_update.enabled else None
            return CommitOutcome(
                record=record.model_copy(update={"slow_update": slow, "fallbacks": (fallback,)})
            )
        shown = show_comparison(pairs, tokens=self.runtime.config.reflect.trajectory_tokens)
        memory, guidance = await self._ask_optimizer(earlier, current, shown, rollouts, state, epoch=epoch)
        record = _add_memory(record, memory)
        if guidance is None:
            return CommitOutcome(record=record)
        return await self._judge_guidance(record, guidance, current, state)

    async def _ask_optimizer(
        self,
        earlier: Skill,
        current: Skill,
        shown: str,
        rollouts: Sequence[Rollout],
        state: RunState,
        *,
        epoch: int,
    ) -> tuple[MemoryReply | NoReply | None, GuidanceReply | NoReply | None]:
        """Ask for the memory and the guidance at the same time; None for one that is switched off."""
        context, log = self.runtime.make_context(state.step), self.runtime.decision_log

        async def ask_for_memory() -> MemoryReply | NoReply | None:
            if not self.runtime.config.meta_skill.enabled:
                return None
            async with self.timer.announce_stage("meta_skill", step=state.step):
                reply = await update_meta_skill(
                    earlier,
                    current,
                    context=context,
                    epoch=epoch,
                    comparison=shown,
                    attempts=show_buffer(state.step_buffer),
                    memory=state.meta_skill,
                )
            await log_unmeasured(rollouts, decision_log=log, step=state.step)
            return reply

        async def ask_for_guidance() -> GuidanceReply | NoReply | None:
            if not self.runtime.config.slow_update.enabled:
                return None
            guidance = read_guidance(current.text)
            reply = await slow_update(
                earlier, current, context=context, epoch=epoch, comparison=shown, guidance=guidance
            )
            await log_unmeasured(rollouts, decision_log=log, step=state.step)
            return reply

        return await run_both(ask_for_memory, ask_for_guidance)

    def _reserve_guidance_region(self, record: EpochRecord, current: Skill, state: RunState) -> CommitOutcome:
        if not self.runtime.config.slow_update.enabled or self.runtime.config.slow_update.gated:
            return CommitOutcome(record=record)
        skill = reserve_guidance_region(current)
        slow = SlowUpdate(action="reserved", candidate_hash=skill.hash)
        return self._create_version(record, slow, skill, state)

    async def _compare_skills(
        self, earlier: Skill, current: Skill, *, epoch: int, step: int
    ) -> tuple[Comparison, Sequence[Rollout]]:
        """Return the comparison and its rollouts.

        The caller logs unmeasured rollouts only after a model has answered about the items. If one outage
        affects both, a restart then retries both.
        """
        sides: dict[str, list[Rollout]] = {earlier.hash: [], current.hash: []}

        async def roll(items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
            measured = await self.scheduler.roll_out_train_items(
                items, skill, step=step, phase=f"epoch/{epoch}"
            )
            sides[skill.hash].extend(measured)
            return measured

        compared = await compare_skills(
            self.runtime.plan.data.train,
            earlier,
            current,
            roll=roll,
            config=self.runtime.config.slow_update,
            threshold=self.runtime.config.train.success_threshold,
            seed=self.runtime.config.seed,
            epoch=epoch,
        )
        return compared, [rollout for side in sides.values() for rollout in side]

    async def _judge_guidance(
        self, record: EpochRecord, reply: GuidanceReply | NoReply, current: Skill, state: RunState
    ) -> CommitOutcome:
        if isinstance(reply, NoReply):
            record = _with_fallback(record, "slow_update", reply, "the guidance stays unchanged")
            return CommitOutcome(
                record=record.model_copy(update={"slow_update": SlowUpdate(action="no_reply")})
            )
        skill = replace_guidance(current, reply.guidance)
        slow = SlowUpdate(
            action="unchanged",
            helped=reply.helped,
            reasoning=reply.reasoning,
            guidance=reply.guidance,
            candidate_hash=skill.hash,
        )
        gated = self.runtime.config.slow_update.gated
        record = record.model_copy(update={"slow_update": slow})
        if skill.hash == current.hash or (gated and skill.hash in state.seen_hashes):
            return CommitOutcome(record=record)
        if not gated:
            return self._create_version(record, slow.model_copy(update={"action": "forced"}), skill, state)
        subject = f"the slow update of epoch {record.epoch}"
        verdict = await self.gate_keeper.judge(
            skill, state, step=record.step, part="slow update", subject=subject
        )
        slow = slow.model_copy(update={"verdict": verdict})
        if not verdict.accepted:
            record = record.model_copy(update={"slow_update": slow})
            record, skills = await self._keep_notes(record, find_current(state, verdict), current, state)
            return CommitOutcome(record=record, skills=(skill, *skills))
        return self._create_version(record, slow.model_copy(update={"action": "accepted"}), skill, state)

    async def _keep_notes(
        self, record: EpochRecord, version: SkillVersion, before: Skill, state: RunState
    ) -> tuple[EpochRecord, tuple[Skill, ...]]:
        """Return the record with the version that is current now, and a new document if that one lacks notes."""
        if version.skill_hash == before.hash:
            return record.model_copy(update={"current": version}), ()
        skill = await self.runtime.store.skill(version.skill_hash)
        noted = carry_notes(skill, before)
        if noted.hash == skill.hash:
            return record.model_copy(update={"current": version}), ()
        number, origin = state.latest_version + 1, f"slow update {record.epoch} notes"
        created = inherit_version(version, number=number, skill=noted, origin=origin)
        return record.model_copy(update={"created_versions": (created,), "current": created}), (noted,)

    def _create_version(
        self, record: EpochRecord, slow: SlowUpdate, skill: Skill, state: RunState
    ) -> CommitOutcome:
        record = record.model_copy(update={"slow_update": slow})
        if skill.hash == state.current.skill_hash:
            return CommitOutcome(record=record)
        number, origin = state.latest_version + 1, f"slow update {record.epoch}"
        best = state.best
        if slow.verdict is None:
            version = inherit_version(state.current, number=number, skill=skill, origin=origin)
        else:
            version = SkillVersion(
                number=number,
                skill_hash=skill.hash,
                origin=origin,
                score=slow.verdict.candidate_score,
                examples=state.current.examples,
            )
            best = version if replaces_best(slow.verdict, best) else best
        record = record.model_copy(update={"created_versions": (version,), "current": version, "best": best})
        return CommitOutcome(record=record, skills=(skill,))


def _add_memory(record: EpochRecord, reply: MemoryReply | NoReply | None) -> EpochRecord:
    if reply is None:
        return record
    if isinstance(reply, NoReply):
        return _with_fallback(record, "meta_skill", reply, "the meta skill stays unchanged")
    return record.model_copy(update={"meta_skill": reply.memory, "meta_skill_reasoning": reply.reasoning})


def _with_fallback(record: EpochRecord, label: str, reply: NoReply, replacement: str) -> EpochRecord:
    fallback = Fallback(label=label, reason=reply.reason, replacement=replacement)
    return record.model_copy(update={"fallbacks": (*record.fallbacks, fallback)})
