"""The end of an epoch: comparison of skills, meta skill and slow update."""

from __future__ import annotations

from collections.abc import Sequence
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
    epoch = state.step // run.plan.steps_per_epoch
    current = await run.find_skill(state.current.skill_hash)
    slow = run.config.slow_update
    fields: Fields = {"current": state.current, "best": state.best}
    async with run.timer.stage("slow_update", step=state.step, name="epoch end"):
        if epoch > 1 and state.last_hash is not None:
            fields |= await _compare_epochs(run, current, state, epoch)
        elif slow.enabled and not slow.gated:
            skill = replace_guidance(current, read_guidance(current.text))
            update = SlowUpdate(action="reserved", candidate_hash=skill.hash)
            fields |= _write_guidance(run, epoch, update, skill, state)
    record = EpochRecord(epoch=epoch, step=state.step, last_hash=current.hash, **fields)
    return choose_best(state, record)


async def _compare_epochs(run: Run, current: Skill, state: RunState, epoch: int) -> Fields:
    """Return what the comparison of two epochs' skills gives: their items, memory and guidance.

    Unmeasured rollouts are logged only after a model has answered about the items. If one outage
    affects both, a restart then retries both.
    """
    config = run.config
    step = state.step
    earlier = await run.find_skill(state.last_hash or "")
    rolled: dict[str, list[Rollout]] = {earlier.hash: [], current.hash: []}

    async def roll(items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
        runner = make_runner(run, step, "slow_update", len(items))
        (measured,) = await runner.roll_out_trials(items, skill, (0,))
        rolled[skill.hash].extend(measured)
        return measured

    compared = await compare_skills(
        run.plan.data.train,
        earlier,
        current,
        roll=roll,
        config=config.slow_update,
        threshold=config.train.success_threshold,
        seed=config.seed,
        epoch=epoch,
    )
    fields: Fields = {
        "comparisons": tuple(pair.comparison for pair in compared.chosen),
        "left_out": tuple(pair.comparison for pair in compared.left_out),
    }
    if config.slow_update.enabled:
        fields["slow_update"] = SlowUpdate(action="unchanged")
    if not compared.chosen:
        reason = "no item has an outcome of the selected kind"
        fallback = Fallback(label="comparison", reason=reason, replacement="nothing changes")
        return {**fields, "fallbacks": (fallback,)}

    rollouts = [rollout for side in rolled.values() for rollout in side]
    shared: Fields = {
        "context": run.make_context(step),
        "epoch": epoch,
        "comparison": show_comparison(compared.chosen, tokens=config.reflect.trajectory_tokens),
    }

    async def ask(mechanism: str) -> MemoryReply | GuidanceReply | NoReply:
        reply: MemoryReply | GuidanceReply | NoReply
        if mechanism == "slow_update":
            guidance = read_guidance(current.text)
            reply = await slow_update(earlier, current, guidance=guidance, **shared)
        else:
            attempts = show_buffer(state.step_buffer)
            memory = state.meta_skill
            async with run.timer.announce_stage("meta_skill", step=step):
                reply = await update_meta_skill(
                    earlier, current, attempts=attempts, memory=memory, **shared
                )
        await run.log_unmeasured(rollouts, step)
        return reply

    sections = {"meta_skill": config.meta_skill.enabled, "slow_update": config.slow_update.enabled}
    mechanisms = [name for name, is_on in sections.items() if is_on]
    fallbacks = []
    for name, reply in zip(mechanisms, await fan_out(ask, mechanisms), strict=True):
        if isinstance(reply, MemoryReply):
            fields |= {"meta_skill": reply.memory, "meta_skill_reasoning": reply.reasoning}
        elif isinstance(reply, GuidanceReply):
            fields |= await _judge_guidance(run, epoch, reply, current, state)
        else:
            subject = "the meta skill"
            if name == "slow_update":
                subject = "the guidance"
                fields["slow_update"] = SlowUpdate(action="no_reply")
            kept = f"{subject} stays unchanged"
            fallbacks.append(Fallback(label=name, reason=reply.reason, replacement=kept))
    return {**fields, "fallbacks": tuple(fallbacks)}


async def _judge_guidance(
    run: Run, epoch: int, reply: GuidanceReply, current: Skill, state: RunState
) -> Fields:
    """Return what becomes of new guidance, which the gate judges if it is gated."""
    gated = run.config.slow_update.gated
    skill = replace_guidance(current, reply.guidance)
    slow = SlowUpdate(
        action="unchanged",
        helped=reply.helped,
        reasoning=reply.reasoning,
        guidance=reply.guidance,
        candidate_hash=skill.hash,
    )
    if skill.hash == current.hash or (gated and skill.hash in state.seen_hashes):
        return {"slow_update": slow}
    if not gated:
        slow = slow.model_copy(update={"action": "forced"})
        return _write_guidance(run, epoch, slow, skill, state)

    verdict = await judge(run, skill, state, "slow update")
    if verdict.accepted:
        slow = slow.model_copy(update={"verdict": verdict, "action": "accepted"})
        return _write_guidance(run, epoch, slow, skill, state)
    run.add_document(skill)
    version = find_current(state, verdict)
    fields: Fields = {"slow_update": slow.model_copy(update={"verdict": verdict})}
    if version.skill_hash != current.hash:
        # An earlier version is current again; it gets the notes that it lacks.
        noted = carry_notes(await run.find_skill(version.skill_hash), current)
        if noted.hash != version.skill_hash:
            origin = f"slow update {epoch} notes"
            version = derive_version(version, state.latest_version + 1, noted, origin)
            fields["created_versions"] = (version,)
            run.add_document(noted)
    return {**fields, "current": version}


def _write_guidance(
    run: Run, epoch: int, slow: SlowUpdate, skill: Skill, state: RunState
) -> Fields:
    """Return what guidance that is written changes: a new version, unless the text stays."""
    if skill.hash == state.current.skill_hash:
        return {"slow_update": slow}
    number = state.latest_version + 1
    version = derive_version(state.current, number, skill, f"slow update {epoch}", slow.verdict)
    run.add_document(skill)
    is_best = slow.verdict is not None and replaces_best(slow.verdict, state.best)
    return {
        "slow_update": slow,
        "created_versions": (version,),
        "current": version,
        "best": version if is_best else state.best,
    }
