"""One training step: the six stages from rollout to evaluation, and the appendix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reflact.data import plan_epoch
from reflact.records import RunState, StepRecord
from reflact.skills.rejected_edits import (
    RejectedEdit,
    collect_rejected_edits,
    deduplicate_edits,
    select_relevant_edits,
)
from reflact.stages.aggregate import aggregate
from reflact.stages.context import StageContext
from reflact.stages.evaluate import build_measurement, decide_without_evaluation
from reflact.stages.execution_notes import LapseTriage, update_appendix
from reflact.stages.overlap import roll_out_and_reflect
from reflact.stages.prompt_sections import show_buffer, show_cases, show_figures, show_memory, show_meta
from reflact.stages.reflect import (
    Analyst,
    Minibatch,
    annotate_failures,
    group_failures,
    list_edit_kinds,
)
from reflact.stages.select import choose_step_size, edit_budget, select
from reflact.stages.update import update
from reflact.training.gating import CommitOutcome, GateKeeper
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.state import create_versions, find_current, replaces_best
from reflact.training.timing import StageTimer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    AppendixResult,
    Fallback,
    Item,
    Rollout,
    SelectResult,
    Skill,
    Split,
    is_failure,
)


@dataclass(frozen=True)
class StepRunner:
    """Runs steps, for one start of a run; ``pinned_edits`` are rejected edits of other runs."""

    runtime: Runtime
    scheduler: RolloutScheduler
    gate_keeper: GateKeeper
    timer: StageTimer
    pinned_edits: tuple[RejectedEdit, ...]

    def list_batches(self, step: int) -> tuple[tuple[Item, ...], ...]:
        """Return the batches of a step."""
        epoch, index = self.locate_step(step)
        items = {item.id: item for item in self.runtime.plan.data.train}
        train = self.runtime.config.train
        plan = plan_epoch(
            items,
            epoch=epoch,
            seed=self.runtime.config.seed,
            batch_size=train.batch_size,
            accumulation=train.accumulation,
        )
        return tuple(tuple(items[i] for i in batch) for batch in plan[index])

    def locate_step(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, from 1, and its index in the epoch, from 0."""
        epoch, index = divmod(step - 1, self.runtime.plan.steps_per_epoch)
        return epoch + 1, index

    async def run(self, step: int, state: RunState, earlier: Sequence[StepRecord]) -> CommitOutcome:
        """Run a step and return its outcome; ``earlier`` are the records of the steps before it.

        Raises:
            Unmeasured: Too little could be measured to decide on the candidate.
        """
        epoch, index = self.locate_step(step)
        skill = await self.runtime.store.skill(state.current.skill_hash)
        context = self.runtime.make_context(step)
        async with self.timer.stage("rollout", "reflect", step=step):
            rollouts, reports = await self._roll_out_and_reflect(context, skill, state, earlier)
        notes = show_meta(state.meta_skill)
        async with self.timer.stage("aggregate", step=step):
            merged = await aggregate(
                reports,
                skill,
                context=context,
                config=self.runtime.config.aggregate,
                operations=list_edit_kinds(self.runtime.config.update),
                notes=notes,
            )
        async with self.timer.stage("select", step=step):
            chosen = await self._select(context, merged, skill, state, notes=notes, rollouts=rollouts)
        async with self.timer.stage("update", step=step):
            attempts = self._show_attempts(step, state)
            candidate = await update(skill, chosen, context=context, attempts=attempts)
        async with self.timer.stage("evaluate", step=step):
            verdict = decide_without_evaluation(candidate, skill, merged=merged, known=state.seen_hashes)
            undecided = None
            if verdict is None:
                subject = f"step {step} is unmeasured"
                verdict, undecided = await self.gate_keeper.judge(
                    candidate.skill, state, step=step, part="step", subject=subject
                )
        kept = candidate.skill
        if not verdict.accepted:
            kept = await self.runtime.store.skill(find_current(state, verdict).skill_hash)
        appended = await self._update_appendix(context, kept, reports)
        created = create_versions(state, step, candidate.skill, verdict, appended.skill)
        record = StepRecord(
            step=step,
            epoch=epoch,
            step_in_epoch=index + 1,
            skill_before=skill.hash,
            item_ids=tuple(r.item_id for r in rollouts),
            rollout=build_measurement(skill.hash, Split.train, rollouts),
            n_failures=sum(is_failure(r, self.runtime.config.train.success_threshold) for r in rollouts),
            reports=reports,
            merged=merged,
            chosen=chosen,
            edits=candidate.results,
            rewrite_summary=candidate.summary,
            candidate_hash=candidate.skill.hash,
            verdict=verdict,
            created_versions=created,
            notes=appended.notes,
            current=created[-1] if created else find_current(state, verdict),
            best=created[0] if replaces_best(verdict, state.best) else state.best,
            fallbacks=(*candidate.fallbacks, *appended.fallbacks),
            fail_reasons=()
            if any(report.patterns for report in reports)
            else group_failures(rollouts, self.runtime.config.train.success_threshold),
        )
        return CommitOutcome(record=record, skills=(candidate.skill, appended.skill), undecided=undecided)

    async def _roll_out_and_reflect(
        self, context: StageContext, skill: Skill, state: RunState, earlier: Sequence[StepRecord]
    ) -> tuple[tuple[Rollout, ...], tuple[AnalystReport, ...]]:
        config, step = self.runtime.config, context.step
        batches, most = self.list_batches(step), self._edit_budget(step)
        analyst = Analyst(
            context=context,
            skill=skill,
            config=config.update,
            max_edits=config.select.max_edits if most is None else most,
            tokens=config.reflect.trajectory_tokens,
            notes=self._make_notes(step, state, earlier),
        )
        analyse = analyst.report
        if config.appendix.enabled:
            analyse = LapseTriage(
                context=context,
                skill=skill,
                analyse=analyse,
                successes=config.appendix.source == "both",
                tokens=config.reflect.trajectory_tokens,
            ).report
        annotator = self.runtime.plan.annotator

        async def annotate_and_analyse(batch: Minibatch) -> AnalystReport:
            return await analyse(
                batch if annotator is None else await annotate_failures(batch, annotator, context)
            )

        total = sum(len(batch) for batch in batches)
        return await roll_out_and_reflect(
            batches,
            skill,
            runner=self.scheduler.make_runner(
                step,
                feedback=True,
                phase=f"step/{step}",
                on_rollout=self.scheduler.make_progress_counter("rollout", step, total),
            ),
            analyse=annotate_and_analyse,
            config=config.reflect,
            seed=config.seed,
            threshold=config.train.success_threshold,
        )

    def _make_notes(
        self, step: int, state: RunState, earlier: Sequence[StepRecord]
    ) -> Callable[[Minibatch], str]:
        """Return a function that builds an analyst's notes: attempts, rejected edits and the meta skill."""
        epoch, _ = self.locate_step(step)
        config = self.runtime.config.reflect
        own = [r for r in earlier if r.epoch < epoch]
        cards = deduplicate_edits((*self.pinned_edits, *collect_rejected_edits(own)))
        if config.memory == "off":
            cards = ()
        attempts, meta = self._show_attempts(step, state), show_meta(state.meta_skill)

        def notes(batch: Minibatch) -> str:
            text = show_cases(
                batch.rollouts, batch.items, failed=batch.source == "failure", tokens=config.trajectory_tokens
            )
            return _join(attempts, show_memory(select_relevant_edits(cards, text)) if cards else "", meta)

        return notes

    def _show_attempts(self, step: int, state: RunState) -> str:
        """Return the prompt section about the earlier steps of the epoch."""
        is_shown = self.runtime.config.reflect.step_buffer and state.epoch == self.locate_step(step)[0]
        return show_buffer(state.step_buffer if is_shown else ())

    async def _select(
        self,
        context: StageContext,
        merged: AggregateResult,
        skill: Skill,
        state: RunState,
        *,
        notes: str,
        rollouts: Sequence[Rollout],
    ) -> SelectResult:
        attempts = self._show_attempts(context.step, state)
        most, decision = self._edit_budget(context.step), None
        fallbacks: tuple[Fallback, ...] = ()
        if self.runtime.config.update.mode == "full_rewrite":
            return SelectResult(patch=merged.patch, pool_size=len(merged.patch.edits))
        if self.runtime.config.select.lr_control == "autonomous" and merged.patch.edits:
            assert most is not None
            size = await choose_step_size(
                merged,
                skill,
                context=context,
                notes=_join(attempts, notes),
                figures=self._show_figures(context.step, rollouts),
                default=most,
            )
            if isinstance(size, Fallback):
                fallbacks = (size,)
            else:
                most, decision = size.count, size
        chosen = await select(merged, skill, context=context, budget=most, attempts=attempts, notes=notes)
        return chosen.model_copy(update={"decision": decision, "fallbacks": fallbacks + chosen.fallbacks})

    def _show_figures(self, step: int, rollouts: Sequence[Rollout]) -> str:
        items = [item for batch in self.list_batches(step) for item in batch]
        threshold = self.runtime.config.train.success_threshold
        return show_figures(rollouts, items, [r.item_id for r in rollouts if is_failure(r, threshold)])

    async def _update_appendix(
        self, context: StageContext, skill: Skill, reports: Sequence[AnalystReport]
    ) -> AppendixResult:
        if not self.runtime.config.appendix.enabled:
            return AppendixResult(skill=skill)
        async with self.timer.stage("appendix", step=context.step):
            return await update_appendix(
                skill, reports, context=context, threshold=self.runtime.config.appendix.consolidate_threshold
            )

    def _edit_budget(self, step: int) -> int | None:
        sizes = self.runtime.config.select
        if sizes.lr_control == "none":
            return None
        return edit_budget(
            step,
            self.runtime.plan.total_steps,
            scheduler=sizes.scheduler,
            max_edits=sizes.max_edits,
            floor=sizes.floor,
        )


def _join(*sections: str) -> str:
    return "\n\n".join(section for section in sections if section)
