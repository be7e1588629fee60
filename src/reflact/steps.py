"""One step of the corridor: six doors in a row, and what they need from the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reflact.cards import RejectedEdit, distinct, rejected, relevant
from reflact.clock import Clock
from reflact.config import TrainerConfig
from reflact.data import epoch_plan
from reflact.errors import Unmeasured
from reflact.folding import record_of
from reflact.judging import Judge
from reflact.ports import Journal
from reflact.records import RunState, StepRecord, Undecided
from reflact.rolling import Rolls
from reflact.schedule import budget
from reflact.stages.aggregate import aggregate
from reflact.stages.annotate import Annotated
from reflact.stages.appendix import remind
from reflact.stages.evaluate import Evaluated, unevaluated
from reflact.stages.gather import gather
from reflact.stages.lapses import Triage
from reflact.stages.material import show_buffer, show_cases, show_memory, show_meta
from reflact.stages.modes import analyses, kinds_of
from reflact.stages.reflect import Analyst, Minibatch
from reflact.stages.select import select, step_size
from reflact.stages.update import update
from reflact.types import (
    Candidate,
    Chosen,
    Fallback,
    Frozen,
    Item,
    Merged,
    Noted,
    Report,
    Rollout,
    Skill,
    failed,
)
from reflact.wiring import House


class Stepped(Frozen):
    """A step's record, the documents it made or tried, and its comparison where that stayed open."""

    record: StepRecord
    skills: tuple[Skill, ...]
    undecided: Undecided | None = None


class Steps:
    """Takes steps, for one start of a run.

    Args:
        house: The run's collaborators.
        rolls: Rolls skills out.
        judge: Decides on candidates.
        clock: Counts the time of stages and tells of them.
        pinned: Rejected edits of other runs that this one may see.
        total: The run's steps.
        per_epoch: Those of an epoch.
    """

    def __init__(
        self,
        house: House,
        *,
        rolls: Rolls,
        judge: Judge,
        clock: Clock,
        pinned: Sequence[RejectedEdit],
        total: int,
        per_epoch: int,
    ) -> None:
        self._house = house
        self._plan = house.plan
        self._config: TrainerConfig = house.plan.config
        self._journal: Journal = house.store.journal(house.plan.run_id)
        self._rolls = rolls
        self._judge = judge
        self._clock = clock
        self._pinned = tuple(pinned)
        self._total = total
        self._per_epoch = per_epoch
        self._items = {item.id: item for item in house.plan.data.train}

    def batches(self, step: int) -> tuple[tuple[Item, ...], ...]:
        """Return the batches of a step."""
        epoch, place = self.place(step)
        train = self._config.train
        plan = epoch_plan(
            self._items,
            epoch=epoch,
            seed=self._config.seed,
            batch_size=train.batch_size,
            accumulation=train.accumulation,
        )
        return tuple(tuple(self._items[i] for i in batch) for batch in plan[place])

    def place(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, from 1, and its place in it, from 0."""
        return (step - 1) // self._per_epoch + 1, (step - 1) % self._per_epoch

    async def take(self, step: int, state: RunState, earlier: Sequence[StepRecord]) -> Stepped:
        """Return what a step makes of a state; ``earlier`` are the steps before it.

        Raises:
            Unmeasured: Too little could be measured to decide on the candidate.
        """
        epoch, place = self.place(step)
        skill = await self._house.store.skill(state.current.skill_hash)
        async with self._clock.stage("rollout", "reflect", step=step):
            rollouts, reports = await self._gather(step, skill, state, earlier)
        notes = show_meta(state.meta)
        async with self._clock.stage("aggregate", step=step):
            merged = await aggregate(
                reports,
                skill,
                llm=self._house.optimizer,
                prompts=self._plan.prompts,
                config=self._config.aggregate,
                operations=kinds_of(self._config.update),
                notes=notes,
                journal=self._journal,
                step=step,
            )
        async with self._clock.stage("select", step=step):
            chosen = await self._select(step, merged, skill, state, notes)
        async with self._clock.stage("update", step=step):
            candidate = await self._update(step, skill, chosen)
        async with self._clock.stage("evaluate", step=step):
            evaluated, undecided = await self._evaluate(step, candidate, skill, merged, state)
        noted = await self._remind(step, candidate.skill if evaluated.verdict.accepted else skill, reports)
        record = record_of(
            state,
            step=step,
            epoch=epoch,
            step_in_epoch=place + 1,
            rollouts=rollouts,
            n_failures=sum(failed(r, self._config.train.success_threshold) for r in rollouts),
            reports=reports,
            merged=merged,
            chosen=chosen,
            candidate=candidate,
            verdict=evaluated.verdict,
            noted=noted,
        )
        return Stepped(record=record, skills=(candidate.skill, noted.skill), undecided=undecided)

    async def _gather(
        self, step: int, skill: Skill, state: RunState, earlier: Sequence[StepRecord]
    ) -> tuple[tuple[Rollout, ...], tuple[Report, ...]]:
        config, batches = self._config, self.batches(step)
        most = self._budget(step)
        analyst = Analyst(
            llm=self._house.optimizer,
            prompts=self._plan.prompts,
            journal=self._journal,
            step=step,
            tokens=config.reflect.trajectory_tokens,
            analysis=analyses(
                config.update, skill, max_edits=config.select.max_edits if most is None else most
            ),
            notes=self._notes(step, state, earlier),
        )
        analyse = analyst.report
        if config.appendix.enabled:
            analyse = Triage(
                skill,
                analyse,
                successes=config.appendix.source == "both",
                llm=self._house.optimizer,
                prompts=self._plan.prompts,
                journal=self._journal,
                step=step,
                tokens=config.reflect.trajectory_tokens,
            ).report
        if self._plan.annotator is not None:
            analyse = Annotated(analyse, self._plan.annotator, journal=self._journal, step=step).report
        return await gather(
            batches,
            skill,
            target=self._house.target,
            environment=self._plan.environment,
            store=self._house.store,
            journal=self._journal,
            step=step,
            seed=config.seed,
            config=config.reflect,
            threshold=config.train.success_threshold,
            limit=config.train.rollout_concurrency,
            analyse=analyse,
            phase=self._rolls.phase(f"step/{step}"),
            rolled=self._rolls.counter("rollout", step, sum(len(batch) for batch in batches)),
        )

    def _notes(self, step: int, state: RunState, earlier: Sequence[StepRecord]) -> Callable[[Minibatch], str]:
        """What analysts are told beside their cases: this epoch's attempts, older ones, the memory."""
        epoch, _ = self.place(step)
        config = self._config.reflect
        own = [r for r in earlier if r.epoch < epoch]
        cards = distinct((*self._pinned, *rejected(own))) if config.memory != "off" else ()
        fixed = (self._attempts(step, state), show_meta(state.meta))

        def notes(batch: Minibatch) -> str:
            text = show_cases(
                batch.rollouts,
                batch.items,
                failed=batch.source == "failure",
                tokens=config.trajectory_tokens,
            )
            parts = (fixed[0], show_memory(relevant(cards, text)) if cards else "", fixed[1])
            return "\n\n".join(part for part in parts if part)

        return notes

    def _attempts(self, step: int, state: RunState) -> str:
        """Return what the epoch's earlier steps tried, as it is shown."""
        epoch, _ = self.place(step)
        return show_buffer(
            state.step_buffer if self._config.reflect.step_buffer and state.epoch == epoch else ()
        )

    async def _select(self, step: int, merged: Merged, skill: Skill, state: RunState, notes: str) -> Chosen:
        most, decision = self._budget(step), None
        fallbacks: tuple[Fallback, ...] = ()
        if self._config.update.mode == "full_rewrite":
            return Chosen(patch=merged.patch, pool_size=len(merged.patch.edits))
        if self._config.select.lr_control == "autonomous" and merged.patch.edits:
            assert most is not None
            parts = (self._attempts(step, state), notes)
            size = await step_size(
                merged,
                skill,
                notes="\n\n".join(part for part in parts if part),
                llm=self._house.optimizer,
                prompts=self._plan.prompts,
                journal=self._journal,
                step=step,
                otherwise=most,
            )
            if isinstance(size, Fallback):
                fallbacks = (size,)
            else:
                most, decision = size.count, size
        chosen = await select(
            merged,
            skill,
            budget=most,
            notes=notes,
            llm=self._house.optimizer,
            prompts=self._plan.prompts,
            journal=self._journal,
            step=step,
        )
        return chosen.model_copy(update={"decision": decision, "fallbacks": fallbacks + chosen.fallbacks})

    async def _update(self, step: int, skill: Skill, chosen: Chosen) -> Candidate:
        return await update(
            skill,
            chosen,
            llm=self._house.optimizer,
            prompts=self._plan.prompts,
            journal=self._journal,
            step=step,
        )

    async def _evaluate(
        self, step: int, candidate: Candidate, skill: Skill, merged: Merged, state: RunState
    ) -> tuple[Evaluated, Undecided | None]:
        verdict = unevaluated(candidate, skill, merged=merged, known=state.seen_hashes)
        if verdict is not None:
            return Evaluated(verdict=verdict), None
        evaluated, undecided = await self._judge.judge(candidate.skill, state, step=step, part="step")
        if evaluated.verdict.action == "unmeasured":
            raise Unmeasured(f"step {step} is unmeasured: {evaluated.verdict.reason}")
        return evaluated, undecided

    async def _remind(self, step: int, skill: Skill, reports: Sequence[Report]) -> Noted:
        if not self._config.appendix.enabled:
            return Noted(skill=skill)
        async with self._clock.stage("appendix", step=step):
            return await remind(
                skill,
                reports,
                threshold=self._config.appendix.consolidate_threshold,
                llm=self._house.optimizer,
                prompts=self._plan.prompts,
                journal=self._journal,
                step=step,
            )

    def _budget(self, step: int) -> int | None:
        sizes = self._config.select
        if sizes.lr_control == "none":
            return None
        return budget(
            step, self._total, scheduler=sizes.scheduler, max_edits=sizes.max_edits, floor=sizes.floor
        )
