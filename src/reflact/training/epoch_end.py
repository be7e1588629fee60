"""The end of an epoch: comparison of skills, meta skill and slow update."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.concurrency import open_task_group
from reflact.messages import NoReply
from reflact.records import EpochRecord, RunState, SkillVersion, SlowUpdate
from reflact.skills.document import read_guidance, replace_guidance
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
from reflact.training.gating import judge
from reflact.training.rollouts import make_progress_counter, make_runner
from reflact.training.run import Run
from reflact.training.state import choose_best, find_current, inherit_version, replaces_best
from reflact.types import Fallback, FrozenModel, Item, Rollout, Skill


class Guidance(FrozenModel):
    """The outcome of the slow update, and the versions after it."""

    slow_update: SlowUpdate | None = None
    created_versions: tuple[SkillVersion, ...] = ()
    current: SkillVersion
    best: SkillVersion


def is_epoch_end_due(run: Run, state: RunState) -> bool:
    """Whether the run has come to the end of an epoch that has any work; the first one has none if
    no other follows.

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
    async with run.timer.stage("slow_update", step=state.step, name="epoch end"):
        if epoch == 1 or state.last_hash is None:
            guidance = reserve_guidance(run, current, state)
        else:
            earlier = await run.find_skill(state.last_hash)
            record, guidance = await compare_epochs(run, earlier, current, state, record)
    return choose_best(state, record.model_copy(update=dict(guidance)))


def reserve_guidance(run: Run, current: Skill, state: RunState) -> Guidance:
    """Return the first epoch's guidance: an empty region, if guidance is written without a gate."""
    config = run.config.slow_update
    if not config.enabled or config.gated:
        return Guidance(current=state.current, best=state.best)
    skill = replace_guidance(current, read_guidance(current.text))
    slow = SlowUpdate(action="reserved", candidate_hash=skill.hash)
    return _create_version(run, slow, skill, state, epoch=1)


async def compare_epochs(
    run: Run, earlier: Skill, current: Skill, state: RunState, record: EpochRecord
) -> tuple[EpochRecord, Guidance]:
    """Compare the skills of two epochs; return the record with the optimizer's memory, and its
    guidance.
    """
    compared, rollouts = await _compare_skills(
        run, earlier, current, epoch=record.epoch, step=state.step
    )
    guidance = Guidance(current=state.current, best=state.best)
    if run.config.slow_update.enabled:
        guidance = guidance.model_copy(update={"slow_update": SlowUpdate(action="unchanged")})
    memory: MemoryReply | NoReply | None = None
    fallbacks: tuple[Fallback, ...] = ()
    if not compared.chosen:
        reason = "no item has an outcome of the selected kind"
        fallbacks = (Fallback(label="comparison", reason=reason, replacement="nothing changes"),)
    else:
        shown = show_comparison(compared.chosen, tokens=run.config.reflect.trajectory_tokens)
        memory, reply = await _ask_optimizer(
            run, earlier, current, state, shown=shown, rollouts=rollouts, epoch=record.epoch
        )
        if isinstance(memory, NoReply):
            fallbacks += (_build_fallback("meta_skill", memory, "the meta skill stays unchanged"),)
        if isinstance(reply, NoReply):
            fallbacks += (_build_fallback("slow_update", reply, "the guidance stays unchanged"),)
            guidance = guidance.model_copy(update={"slow_update": SlowUpdate(action="no_reply")})
        elif reply is not None:
            guidance = await judge_guidance(run, reply, current, state, epoch=record.epoch)

    update: dict[str, object] = {
        "comparisons": tuple(pair.comparison for pair in compared.chosen),
        "left_out": tuple(pair.comparison for pair in compared.left_out),
        "fallbacks": fallbacks,
    }
    if isinstance(memory, MemoryReply):
        update |= {"meta_skill": memory.memory, "meta_skill_reasoning": memory.reasoning}
    return record.model_copy(update=update), guidance


async def _compare_skills(
    run: Run, earlier: Skill, current: Skill, *, epoch: int, step: int
) -> tuple[Comparison, Sequence[Rollout]]:
    """Return the comparison and its rollouts.

    The caller logs unmeasured rollouts only after a model has answered about the items. If one
    outage affects both, a restart then retries both.
    """
    sides: dict[str, list[Rollout]] = {earlier.hash: [], current.hash: []}

    async def roll(items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
        count = make_progress_counter(run, "slow_update", step, len(items))
        runner = make_runner(run, step, feedback=True, on_rollout=count)
        (measured,) = await runner.roll_out_trials(items, skill, (0,))
        sides[skill.hash].extend(measured)
        return measured

    compared = await compare_skills(
        run.plan.data.train,
        earlier,
        current,
        roll=roll,
        config=run.config.slow_update,
        threshold=run.config.train.success_threshold,
        seed=run.config.seed,
        epoch=epoch,
    )
    return compared, [rollout for side in sides.values() for rollout in side]


async def _ask_optimizer(
    run: Run,
    earlier: Skill,
    current: Skill,
    state: RunState,
    *,
    shown: str,
    rollouts: Sequence[Rollout],
    epoch: int,
) -> tuple[MemoryReply | NoReply | None, GuidanceReply | NoReply | None]:
    """Ask for the memory and the guidance at the same time; None for one that is switched off."""
    context = run.make_context(state.step)

    async def ask_for_memory() -> MemoryReply | NoReply | None:
        if not run.config.meta_skill.enabled:
            return None
        async with run.timer.announce_stage("meta_skill", step=state.step):
            reply = await update_meta_skill(
                earlier,
                current,
                context=context,
                epoch=epoch,
                comparison=shown,
                attempts=show_buffer(state.step_buffer),
                memory=state.meta_skill,
            )
        await log_unmeasured(rollouts, decision_log=run.decision_log, step=state.step)
        return reply

    async def ask_for_guidance() -> GuidanceReply | NoReply | None:
        if not run.config.slow_update.enabled:
            return None
        guidance = read_guidance(current.text)
        reply = await slow_update(
            earlier, current, context=context, epoch=epoch, comparison=shown, guidance=guidance
        )
        await log_unmeasured(rollouts, decision_log=run.decision_log, step=state.step)
        return reply

    async with open_task_group() as tasks:
        memory = tasks.start_soon(ask_for_memory)
        guidance = tasks.start_soon(ask_for_guidance)
    return memory.return_value, guidance.return_value


async def judge_guidance(
    run: Run, reply: GuidanceReply, current: Skill, state: RunState, *, epoch: int
) -> Guidance:
    """Return what becomes of new guidance: the gate decides about it, unless it is written without
    one.
    """
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
        return Guidance(slow_update=slow, current=state.current, best=state.best)
    if not gated:
        return _create_version(
            run, slow.model_copy(update={"action": "forced"}), skill, state, epoch=epoch
        )

    subject = f"the slow update of epoch {epoch}"
    verdict = await judge(run, skill, state, step=state.step, part="slow update", subject=subject)
    slow = slow.model_copy(update={"verdict": verdict})
    if verdict.accepted:
        return _create_version(
            run, slow.model_copy(update={"action": "accepted"}), skill, state, epoch=epoch
        )
    run.add_document(skill)
    return await _keep_notes(run, slow, find_current(state, verdict), current, state, epoch=epoch)


async def _keep_notes(
    run: Run, slow: SlowUpdate, version: SkillVersion, before: Skill, state: RunState, *, epoch: int
) -> Guidance:
    """Return the version that is current after refused guidance; an earlier one that lacks notes
    gets them.
    """
    created: tuple[SkillVersion, ...] = ()
    if version.skill_hash != before.hash:
        skill = await run.find_skill(version.skill_hash)
        noted = carry_notes(skill, before)
        if noted.hash != skill.hash:
            origin = f"slow update {epoch} notes"
            version = inherit_version(
                version, number=state.latest_version + 1, skill=noted, origin=origin
            )
            created = (version,)
            run.add_document(noted)
    return Guidance(slow_update=slow, created_versions=created, current=version, best=state.best)


def _create_version(
    run: Run, slow: SlowUpdate, skill: Skill, state: RunState, *, epoch: int
) -> Guidance:
    """Return the outcome of guidance that is written: a new version, unless the text stays as it
    is.
    """
    if skill.hash == state.current.skill_hash:
        return Guidance(slow_update=slow, current=state.current, best=state.best)
    number = state.latest_version + 1
    origin = f"slow update {epoch}"
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
    run.add_document(skill)
    return Guidance(slow_update=slow, created_versions=(version,), current=version, best=best)


def _build_fallback(label: str, reply: NoReply, replacement: str) -> Fallback:
    return Fallback(label=label, reason=reply.reason, replacement=replacement)
