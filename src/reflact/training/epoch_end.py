"""The end of an epoch: comparison of skills, meta skill and slow update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reflact.concurrency import fan_out
from reflact.messages import NoReply
from reflact.records import EpochRecord, RunState, SlowUpdate
from reflact.skills.document import read_guidance, replace_guidance
from reflact.stages.execution_notes import carry_notes
from reflact.stages.prompt_sections import show_buffer
from reflact.stages.slow_update import (
    GuidanceReply,
    MemoryReply,
    compare_skills,
    show_comparison,
    slow_update,
    update_meta_skill,
)
from reflact.training.gating import judge
from reflact.training.rollouts import make_runner
from reflact.training.run import Run
from reflact.training.state import choose_best, derive_version, find_current, replaces_best
from reflact.types import Fallback, Item, Rollout, Skill

# The fields of an epoch's record that one of its parts decides.
Fields = dict[str, Any]


def is_epoch_end_due(run: Run, state: RunState) -> bool:
    """Whether the run has come to the end of an epoch that has any work.

    The comparison belongs to the source of edits: beside other sources, an epoch in which no edit
    was accepted has nothing to compare.
    """
    config = run.config
    epoch, rest = divmod(state.step, run.plan.steps_per_epoch)
    is_only = epoch == 1 and state.step >= run.plan.total_steps
    is_on = config.slow_update.enabled or config.meta_skill.enabled
    if rest or epoch <= state.last_committed_epoch or is_only or not is_on:
        return False
    edited = [r.epoch for r in run.records if r.source == "edits" and r.verdict.accepted]
    return config.search.is_published or epoch in edited


async def finish_epoch(run: Run, state: RunState) -> EpochRecord:
    """Return the record of the end of an epoch.

    The first epoch has no predecessor, so it only reserves the region of ungated guidance. Gated
    guidance brings its region along: an empty region before would leave a current skill without a
    measurement. Later epochs compare the skills after the last steps of this and the previous
    epoch, before any slow update.
    """
    current = await run.find_skill(state.current.skill_hash)
    end = _EpochEnd(run, state, state.step // run.plan.steps_per_epoch, current)
    slow = run.config.slow_update
    fields: Fields = {"current": state.current, "best": state.best}
    async with run.timer.stage("slow_update", step=state.step, name="epoch end"):
        if end.epoch > 1 and state.last_hash is not None:
            fields |= await end.compare(await run.find_skill(state.last_hash))
        elif slow.enabled and not slow.gated:
            skill = replace_guidance(current, read_guidance(current.text))
            update = SlowUpdate(action="reserved", candidate_hash=skill.hash)
            fields |= end.write_guidance(update, skill)
    record = EpochRecord(epoch=end.epoch, step=state.step, last_hash=current.hash, **fields)
    return choose_best(state, record)


@dataclass(frozen=True)
class _EpochEnd:
    """The end of an epoch, with the document that is current; its methods return record fields."""

    run: Run
    state: RunState
    epoch: int
    current: Skill

    async def compare(self, earlier: Skill) -> Fields:
        """Compare the current document with the last one of the epoch before, and learn from it."""
        run = self.run
        slow = run.config.slow_update
        rolled: dict[str, list[Rollout]] = {earlier.hash: [], self.current.hash: []}

        async def roll(items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
            runner = make_runner(run, self.state.step, "slow_update", len(items))
            (measured,) = await runner.roll_out_trials(items, skill, (0,))
            rolled[skill.hash].extend(measured)
            return measured

        compared = await compare_skills(
            run.plan.data.train,
            earlier,
            self.current,
            roll=roll,
            config=slow,
            threshold=run.config.train.success_threshold,
            seed=run.config.seed,
            epoch=self.epoch,
        )
        fields: Fields = {
            "comparisons": tuple(pair.comparison for pair in compared.chosen),
            "left_out": tuple(pair.comparison for pair in compared.left_out),
        }
        if slow.enabled:
            fields["slow_update"] = SlowUpdate(action="unchanged")
        if not compared.chosen:
            reason = "no item has an outcome of the selected kind"
            fallback = Fallback(label="comparison", reason=reason, replacement="nothing changes")
            return {**fields, "fallbacks": (fallback,)}
        shown = show_comparison(compared.chosen, tokens=run.config.reflect.trajectory_tokens)
        rollouts = [rollout for side in rolled.values() for rollout in side]
        return fields | await self._learn(earlier, shown, rollouts)

    async def _learn(self, earlier: Skill, shown: str, rollouts: Sequence[Rollout]) -> Fields:
        """Ask for the meta skill and for guidance about a comparison.

        Unmeasured rollouts are logged only after a model has answered about the items. If one
        outage affects both, a restart then retries both.
        """
        run = self.run
        state = self.state
        shared: Fields = {
            "context": run.make_context(state.step),
            "epoch": self.epoch,
            "comparison": shown,
        }

        async def ask(mechanism: str) -> MemoryReply | GuidanceReply | NoReply:
            reply: MemoryReply | GuidanceReply | NoReply
            if mechanism == "slow_update":
                guidance = read_guidance(self.current.text)
                reply = await slow_update(earlier, self.current, guidance=guidance, **shared)
            else:
                attempts = show_buffer(state.step_buffer)
                memory = state.meta_skill
                async with run.timer.announce_stage("meta_skill", step=state.step):
                    reply = await update_meta_skill(
                        earlier, self.current, attempts=attempts, memory=memory, **shared
                    )
            await run.log_unmeasured(rollouts, state.step)
            return reply

        config = run.config
        on = {"meta_skill": config.meta_skill.enabled, "slow_update": config.slow_update.enabled}
        mechanisms = [name for name, is_on in on.items() if is_on]
        fields: Fields = {}
        fallbacks = []
        for name, reply in zip(mechanisms, await fan_out(ask, mechanisms), strict=True):
            if isinstance(reply, MemoryReply):
                fields |= {"meta_skill": reply.memory, "meta_skill_reasoning": reply.reasoning}
            elif isinstance(reply, GuidanceReply):
                fields |= await self._judge_guidance(reply)
            else:
                subject = "the meta skill"
                if name == "slow_update":
                    subject = "the guidance"
                    fields["slow_update"] = SlowUpdate(action="no_reply")
                kept = f"{subject} stays unchanged"
                fallbacks.append(Fallback(label=name, reason=reply.reason, replacement=kept))
        return {**fields, "fallbacks": tuple(fallbacks)}

    async def _judge_guidance(self, reply: GuidanceReply) -> Fields:
        """Return what becomes of new guidance, which the gate judges if it is gated."""
        run = self.run
        state = self.state
        gated = run.config.slow_update.gated
        skill = replace_guidance(self.current, reply.guidance)
        slow = SlowUpdate(
            action="unchanged",
            helped=reply.helped,
            reasoning=reply.reasoning,
            guidance=reply.guidance,
            candidate_hash=skill.hash,
        )
        if skill.hash == self.current.hash or (gated and skill.hash in state.seen_hashes):
            return {"slow_update": slow}
        if not gated:
            return self.write_guidance(slow.model_copy(update={"action": "forced"}), skill)

        verdict = await judge(run, skill, state, "slow update")
        slow = slow.model_copy(update={"verdict": verdict})
        if verdict.accepted:
            return self.write_guidance(slow.model_copy(update={"action": "accepted"}), skill)
        run.add_document(skill)
        version = find_current(state, verdict)
        fields: Fields = {"slow_update": slow}
        if version.skill_hash != self.current.hash:
            # An earlier version is current again; it gets the notes that it lacks.
            noted = carry_notes(await run.find_skill(version.skill_hash), self.current)
            if noted.hash != version.skill_hash:
                origin = f"slow update {self.epoch} notes"
                version = derive_version(version, state.latest_version + 1, noted, origin)
                fields["created_versions"] = (version,)
                run.add_document(noted)
        return {**fields, "current": version}

    def write_guidance(self, slow: SlowUpdate, skill: Skill) -> Fields:
        """Return what written guidance changes: a new version, unless the text stays."""
        state = self.state
        if skill.hash == state.current.skill_hash:
            return {"slow_update": slow}
        origin = f"slow update {self.epoch}"
        number = state.latest_version + 1
        version = derive_version(state.current, number, skill, origin, slow.verdict)
        self.run.add_document(skill)
        is_best = slow.verdict is not None and replaces_best(slow.verdict, state.best)
        return {
            "slow_update": slow,
            "created_versions": (version,),
            "current": version,
            "best": version if is_best else state.best,
        }
