"""The end of an epoch: comparison, slow update and the optimizer's memory, in the plan's order."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.clock import Clock
from reflact.errors import Unmeasured
from reflact.folding import heir, is_better
from reflact.judging import Judge
from reflact.ports import LLM, Journal, RunStore
from reflact.records import EpochRecord, RunState, SlowUpdate, Undecided, Version
from reflact.rolling import Rolls
from reflact.stages.compare import Compared, compare, show_comparison
from reflact.stages.material import show_buffer
from reflact.stages.meta_skill import meta_skill
from reflact.stages.rollout import note_unmeasured
from reflact.stages.settled import Refusal
from reflact.stages.slow_update import slow_update
from reflact.tail import guidance, reserved, with_guidance
from reflact.types import Fallback, Frozen, Item, Rollout, Skill
from reflact.wiring import Plan


class Closed(Frozen):
    """An epoch's end, the documents that it made or tried, and its comparison where that stayed open."""

    record: EpochRecord
    skills: tuple[Skill, ...] = ()
    undecided: Undecided | None = None


class EpochEnd:
    """Closes epochs, for one start of a run.

    Args:
        plan: The run's plan.
        store: Where skills are.
        journal: Where refusals are noted.
        llm: The optimizer.
        rolls: Rolls skills out.
        judge: Decides on gated guidance.
        clock: Tells of stages.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        store: RunStore,
        journal: Journal,
        llm: LLM,
        rolls: Rolls,
        judge: Judge,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._store = store
        self._journal = journal
        self._llm = llm
        self._rolls = rolls
        self._judge = judge
        self._clock = clock

    @property
    def needed(self) -> bool:
        """Whether anything happens at an epoch's end."""
        return self._config.slow_update.enabled or self._config.meta_skill.enabled

    async def close(self, state: RunState, *, epoch: int) -> Closed:
        """Return what the end of an epoch makes of the state at its last step.

        The first epoch has nothing to compare with; where guidance is not gated it reserves the region.
        (Gated guidance brings its region along when it is accepted: an empty one put in beforehand would
        leave a current skill that nobody measured.) Later epochs compare the skill with the one at the
        last step of the epoch before, both as they stood before any slow update.

        Raises:
            RunFailed: No train item could be measured under both skills.
            Unmeasured: Too little could be measured to decide on the guidance.
        """
        current = await self._store.skill(state.current.skill_hash)
        record = EpochRecord(
            epoch=epoch, step=state.step, last_hash=current.hash, current=state.current, best=state.best
        )
        if epoch == 1 or state.last_hash is None:
            return self._reserve(record, current, state)
        earlier = await self._store.skill(state.last_hash)
        pairs, used = await self._compared(earlier, current, epoch=epoch, step=state.step)
        record = record.model_copy(update={"compared": tuple(pair.outcome for pair in pairs)})
        if not pairs:
            nothing = Fallback(
                label="comparison",
                reason="no item has the outcome that is shown",
                instead="all stays as it was",
            )
            slow = SlowUpdate(action="kept") if self._config.slow_update.enabled else None
            return Closed(record=record.model_copy(update={"slow": slow, "fallbacks": (nothing,)}))
        shown = show_comparison(pairs, tokens=self._config.reflect.trajectory_tokens)
        if self._config.meta_skill.enabled:
            async with self._clock.telling("meta_skill", step=state.step):
                record = await self._remember(record, earlier, current, shown, state)
            await note_unmeasured(used, journal=self._journal, step=state.step)
        if not self._config.slow_update.enabled:
            return Closed(record=record)
        return await self._guide(record, earlier, current, shown, state, used=used)

    def _reserve(self, record: EpochRecord, current: Skill, state: RunState) -> Closed:
        if not self._config.slow_update.enabled or self._config.slow_update.gated:
            return Closed(record=record)
        skill = reserved(current)
        slow = SlowUpdate(action="reserved", candidate_hash=skill.hash)
        return self._made(record, slow, skill, state)

    async def _compared(
        self, earlier: Skill, current: Skill, *, epoch: int, step: int
    ) -> tuple[tuple[Compared, ...], Sequence[Rollout]]:
        """Return the pairs and the rollouts that they come from.

        Absences among these are noted when a model has answered to the pairs, not before: what the same
        outage cut off as the answer is then tried again.
        """
        slow = self._config.slow_update
        used: list[Rollout] = []

        async def roll(items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
            rolled = await self._rolls.train(items, skill, step=step, phase=f"epoch/{epoch}")
            used.extend(rolled)
            return rolled

        pairs = await compare(
            self._plan.data.train,
            earlier,
            current,
            roll=roll,
            policy=slow.pair_policy,
            samples=slow.samples,
            threshold=self._config.train.success_threshold,
            seed=self._config.seed,
            epoch=epoch,
        )
        return pairs, used

    async def _remember(
        self, record: EpochRecord, earlier: Skill, current: Skill, shown: str, state: RunState
    ) -> EpochRecord:
        reply = await meta_skill(
            earlier,
            current,
            comparison=shown,
            attempts=show_buffer(state.step_buffer),
            memory=state.meta,
            llm=self._llm,
            prompts=self._plan.prompts,
            journal=self._journal,
            step=record.step,
            epoch=record.epoch,
        )
        if isinstance(reply, Refusal):
            return _with_fallback(record, "meta_skill", reply, "the memory stays as it was")
        return record.model_copy(update={"meta": reply.memory})

    async def _guide(
        self,
        record: EpochRecord,
        earlier: Skill,
        current: Skill,
        shown: str,
        state: RunState,
        *,
        used: Sequence[Rollout],
    ) -> Closed:
        reply = await slow_update(
            earlier,
            current,
            comparison=shown,
            guidance=guidance(current.text),
            llm=self._llm,
            prompts=self._plan.prompts,
            journal=self._journal,
            step=record.step,
            epoch=record.epoch,
        )
        await note_unmeasured(used, journal=self._journal, step=record.step)
        if isinstance(reply, Refusal):
            record = _with_fallback(record, "slow_update", reply, "the guidance stays as it was")
            return Closed(record=record.model_copy(update={"slow": SlowUpdate(action="refused")}))
        skill = with_guidance(current, reply.guidance)
        slow = SlowUpdate(
            action="kept",
            helped=reply.helped,
            reasoning=reply.reasoning,
            guidance=reply.guidance,
            candidate_hash=skill.hash,
        )
        gated = self._config.slow_update.gated
        if skill.hash == current.hash or (gated and skill.hash in state.seen_hashes):
            return Closed(record=record.model_copy(update={"slow": slow}))
        if not gated:
            return self._made(record, slow.model_copy(update={"action": "forced"}), skill, state)
        evaluated, undecided = await self._judge.judge(skill, state, step=record.step, part="slow update")
        verdict = evaluated.verdict
        if verdict.action == "unmeasured":
            raise Unmeasured(f"the slow update of epoch {record.epoch}: {verdict.reason}")
        slow = slow.model_copy(update={"verdict": verdict})
        if not verdict.accepted:
            record = record.model_copy(update={"slow": slow})
            return Closed(record=record, skills=(skill,), undecided=undecided)
        return self._made(record, slow.model_copy(update={"action": "accepted"}), skill, state)

    def _made(self, record: EpochRecord, slow: SlowUpdate, skill: Skill, state: RunState) -> Closed:
        record = record.model_copy(update={"slow": slow})
        if skill.hash == state.current.skill_hash:
            return Closed(record=record)
        number, origin = state.latest_version + 1, f"slow update {record.epoch}"
        best = state.best
        if slow.verdict is None:
            version = heir(state.current, number=number, skill=skill, origin=origin)
        else:
            mark = slow.verdict.candidate_score
            version = Version(number=number, skill_hash=skill.hash, origin=origin, score=mark)
            best = version if is_better(slow.verdict, best) else best
        record = record.model_copy(update={"made": (version,), "current": version, "best": best})
        return Closed(record=record, skills=(skill,))


def _with_fallback(record: EpochRecord, label: str, refusal: Refusal, instead: str) -> EpochRecord:
    fallback = Fallback(label=label, reason=refusal.reason, instead=instead)
    return record.model_copy(update={"fallbacks": (*record.fallbacks, fallback)})
