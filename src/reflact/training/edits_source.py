"""The source ``edits``: the published algorithm, whose stages make one candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reflact.skills.rejected_edits import select_relevant_edits
from reflact.stages.aggregate import aggregate
from reflact.stages.execution_notes import LapseTriage
from reflact.stages.overlap import roll_out_and_reflect
from reflact.stages.prompt_sections import (
    join_sections,
    show_buffer,
    show_figures,
    show_memory,
    show_meta,
)
from reflact.stages.reflect import Analyst, Minibatch, annotate_failures, list_edit_kinds
from reflact.stages.select import choose_step_size, select
from reflact.stages.update import update
from reflact.training.proposals import (
    StepInput,
    StepProposal,
    limit_batches,
    make_contender,
    make_train_runner,
)
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.timing import StageTimer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Fallback,
    Rollout,
    SelectResult,
    is_failure,
)


@dataclass(frozen=True)
class EditsSource:
    """The published algorithm: the stages reflect, aggregate, select and update make one candidate."""

    runtime: Runtime
    scheduler: RolloutScheduler
    timer: StageTimer

    async def propose(self, work: StepInput) -> StepProposal:
        """Return the candidate of the stages."""
        context, skill, step = work.context, work.skill, work.step
        async with self.timer.stage("rollout", "reflect", step=step):
            rollouts, reports = await self._roll_out_and_reflect(work)
        notes = show_meta(work.meta_skill)
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
            chosen = await self._select(work, merged, notes=notes, rollouts=rollouts)
        async with self.timer.stage("update", step=step):
            candidate = await update(skill, chosen, context=context, attempts=show_buffer(work.attempts))
        contender = make_contender("edits", candidate)
        return StepProposal(
            rollouts=rollouts, contenders=(contender,), reports=reports, merged=merged, chosen=chosen
        )

    async def _roll_out_and_reflect(
        self, work: StepInput
    ) -> tuple[tuple[Rollout, ...], tuple[AnalystReport, ...]]:
        config, context = self.runtime.config, work.context
        analyst = Analyst(
            context=context,
            skill=work.skill,
            config=config.update,
            max_edits=config.select.max_edits if work.max_edits is None else work.max_edits,
            tokens=config.reflect.trajectory_tokens,
            notes=self._make_notes(work),
        )
        analyse = analyst.report
        if config.appendix.enabled:
            analyse = LapseTriage(
                context=context,
                skill=work.skill,
                analyse=analyse,
                successes=config.appendix.source == "both",
                tokens=config.reflect.trajectory_tokens,
            ).report
        annotator = self.runtime.plan.annotator

        async def annotate_and_analyse(batch: Minibatch) -> AnalystReport:
            if annotator is not None:
                words = f"the annotator failed in step {work.step}"
                async with self.scheduler.failures.explain(words, step=work.step):
                    batch = await annotate_failures(batch, annotator, context)
            return await analyse(batch)

        batches = limit_batches(work, len(work.items))
        return await roll_out_and_reflect(
            batches,
            work.skill,
            runner=make_train_runner(self.scheduler, work, n=sum(map(len, batches))),
            analyse=annotate_and_analyse,
            config=config.reflect,
            seed=config.seed,
            threshold=config.train.success_threshold,
        )

    def _make_notes(self, work: StepInput) -> Callable[[Minibatch], str]:
        """Return a function that builds an analyst's notes: attempts, rejected edits and the meta skill."""
        tokens, cards = self.runtime.config.reflect.trajectory_tokens, work.rejected_edits
        attempts, meta = show_buffer(work.attempts), show_meta(work.meta_skill)

        def notes(batch: Minibatch) -> str:
            memory = show_memory(select_relevant_edits(cards, batch.show_cases(tokens))) if cards else ""
            return join_sections(attempts, memory, meta)

        return notes

    async def _select(
        self, work: StepInput, merged: AggregateResult, *, notes: str, rollouts: Sequence[Rollout]
    ) -> SelectResult:
        attempts = show_buffer(work.attempts)
        most, decision = work.max_edits, None
        fallbacks: tuple[Fallback, ...] = ()
        if self.runtime.config.update.mode == "full_rewrite":
            return SelectResult(patch=merged.patch, pool_size=len(merged.patch.edits))
        if self.runtime.config.select.lr_control == "autonomous" and merged.patch.edits:
            assert most is not None
            size = await choose_step_size(
                merged,
                work.skill,
                context=work.context,
                notes=join_sections(attempts, notes),
                figures=self._show_figures(work, rollouts),
                default=most,
            )
            if isinstance(size, Fallback):
                fallbacks = (size,)
            else:
                most, decision = size.count, size
        chosen = await select(
            merged, work.skill, context=work.context, budget=most, attempts=attempts, notes=notes
        )
        return chosen.model_copy(update={"decision": decision, "fallbacks": fallbacks + chosen.fallbacks})

    def _show_figures(self, work: StepInput, rollouts: Sequence[Rollout]) -> str:
        threshold = self.runtime.config.train.success_threshold
        ids = {rollout.item_id for rollout in rollouts}
        items = [item for item in work.items if item.id in ids]
        return show_figures(rollouts, items, [r.item_id for r in rollouts if is_failure(r, threshold)])
