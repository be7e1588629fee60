"""The end of an epoch: comparison of skills, meta skill and slow update."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.concurrency import open_task_group
from reflact.messages import NoReply
from reflact.records import EpochRecord, RunState, SkillVersion, SlowUpdate
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
from reflact.training.state import choose_best, find_current, inherit_version, replaces_best
from reflact.types import Fallback, Item, Rollout, Skill


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

    Raises:
        RunFailed: No train item could be measured under both skills.
        Unmeasured: Too little could be measured to decide on the guidance.
    """
    epoch = state.step // run.plan.steps_per_epoch
    current = await run.find_skill(state.current.skill_hash)
    record = EpochRecord(
        epoch=epoch, step=state.step, last_hash=current.hash, current=state.current, best=state.best
    )
    slow = run.config.slow_update
    async with run.timer.stage("slow_update", step=state.step, name="epoch end"):
        if epoch > 1 and state.last_hash is not None:
            earlier = await run.find_skill(state.last_hash)
            record = await _compare_epochs(run, earlier, current, state, record)
        elif slow.enabled and not slow.gated:
            skill = replace_guidance(current, read_guidance(current.text))
            update = SlowUpdate(action="reserved", candidate_hash=skill.hash)
            record = _write_guidance(run, record, update, skill, state)
    return choose_best(state, record)


async def _compare_epochs(
    run: Run, earlier: Skill, current: Skill, state: RunState, record: EpochRecord
) -> EpochRecord:
    """Return the record after the skills of two epochs were compared, with memory and guidance.

    Unmeasured rollouts are logged only after a model has answered about the items. If one outage
    affects both, a restart then retries both.
    """
    config = run.config
    step = state.step
    context = run.make_context(step)
    sides: dict[str, list[Rollout]] = {earlier.hash: [], current.hash: []}

    async def roll(items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
        runner = make_runner(run, step, "slow_update", len(items))
        (measured,) = await runner.roll_out_trials(items, skill, (0,))
        sides[skill.hash].extend(measured)
        return measured

    async def ask_for_memory() -> MemoryReply | NoReply | None:
        if not config.meta_skill.enabled:
            return None
        async with run.timer.announce_stage("meta_skill", step=step):
            reply = await update_meta_skill(
                earlier,
                current,
                context=context,
                epoch=record.epoch,
                comparison=shown,
                attempts=show_buffer(state.step_buffer),
                memory=state.meta_skill,
            )
        await run.log_unmeasured(rollouts, step)
        return reply

    async def ask_for_guidance() -> GuidanceReply | NoReply | None:
        if not config.slow_update.enabled:
            return None
        reply = await slow_update(
            earlier,
            current,
            context=context,
            epoch=record.epoch,
            comparison=shown,
            guidance=read_guidance(current.text),
        )
        await run.log_unmeasured(rollouts, step)
        return reply

    compared = await compare_skills(
        run.plan.data.train,
        earlier,
        current,
        roll=roll,
        config=config.slow_update,
        threshold=config.train.success_threshold,
        seed=config.seed,
        epoch=record.epoch,
    )
    update: dict[str, object] = {
        "comparisons": tuple(pair.comparison for pair in compared.chosen),
        "left_out": tuple(pair.comparison for pair in compared.left_out),
    }
    if config.slow_update.enabled:
        update["slow_update"] = SlowUpdate(action="unchanged")
    if not compared.chosen:
        reason = "no item has an outcome of the selected kind"
        fallback = Fallback(label="comparison", reason=reason, replacement="nothing changes")
        return record.model_copy(update={**update, "fallbacks": (fallback,)})

    rollouts = [rollout for side in sides.values() for rollout in side]
    shown = show_comparison(compared.chosen, tokens=config.reflect.trajectory_tokens)
    async with open_task_group() as tasks:
        asking_for_memory = tasks.start_soon(ask_for_memory)
        asking_for_guidance = tasks.start_soon(ask_for_guidance)
    memory = asking_for_memory.return_value
    reply = asking_for_guidance.return_value
    fallbacks: list[Fallback] = []
    if isinstance(memory, MemoryReply):
        update |= {"meta_skill": memory.memory, "meta_skill_reasoning": memory.reasoning}
    elif isinstance(memory, NoReply):
        kept = "the meta skill stays unchanged"
        fallbacks.append(Fallback(label="meta_skill", reason=memory.reason, replacement=kept))
    if isinstance(reply, NoReply):
        kept = "the guidance stays unchanged"
        fallbacks.append(Fallback(label="slow_update", reason=reply.reason, replacement=kept))
        update["slow_update"] = SlowUpdate(action="no_reply")
    record = record.model_copy(update={**update, "fallbacks": tuple(fallbacks)})
    if isinstance(reply, GuidanceReply):
        record = await _judge_guidance(run, reply, current, state, record)
    return record


async def _judge_guidance(
    run: Run, reply: GuidanceReply, current: Skill, state: RunState, record: EpochRecord
) -> EpochRecord:
    """Return the record with what becomes of new guidance, which the gate judges if it is gated."""
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
        return record.model_copy(update={"slow_update": slow})
    if not gated:
        slow = slow.model_copy(update={"action": "forced"})
        return _write_guidance(run, record, slow, skill, state)

    subject = f"the slow update of epoch {record.epoch}"
    verdict = await judge(run, skill, state, step=state.step, part="slow update", subject=subject)
    slow = slow.model_copy(update={"verdict": verdict})
    if verdict.accepted:
        slow = slow.model_copy(update={"action": "accepted"})
        return _write_guidance(run, record, slow, skill, state)
    run.add_document(skill)
    version = find_current(state, verdict)
    created: tuple[SkillVersion, ...] = ()
    if version.skill_hash != current.hash:
        # An earlier version is current again; it gets the notes that it lacks.
        returned = await run.find_skill(version.skill_hash)
        noted = carry_notes(returned, current)
        if noted.hash != returned.hash:
            origin = f"slow update {record.epoch} notes"
            number = state.latest_version + 1
            version = inherit_version(version, number=number, skill=noted, origin=origin)
            created = (version,)
            run.add_document(noted)
    return record.model_copy(
        update={"slow_update": slow, "created_versions": created, "current": version}
    )


def _write_guidance(
    run: Run, record: EpochRecord, slow: SlowUpdate, skill: Skill, state: RunState
) -> EpochRecord:
    """Return the record with guidance that is written: a new version, unless the text stays."""
    if skill.hash == state.current.skill_hash:
        return record.model_copy(update={"slow_update": slow})
    number = state.latest_version + 1
    origin = f"slow update {record.epoch}"
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
        if replaces_best(slow.verdict, best):
            best = version
    run.add_document(skill)
    return record.model_copy(
        update={
            "slow_update": slow,
            "created_versions": (version,),
            "current": version,
            "best": best,
        }
    )
