"""One training step: the six stages from rollout to evaluation, and the appendix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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
from reflact.stages.prompt_sections import (
    join_sections,
    show_buffer,
    show_figures,
    show_memory,
    show_meta,
)
from reflact.stages.reflect import Analyst, Minibatch, annotate_failures, group_failures, list_edit_kinds
from reflact.stages.select import choose_step_size, edit_budget, select
from reflact.stages.update import update
from reflact.training.gating import CommitOutcome, GateKeeper
from reflact.training.proposing import (
    CandidateSource,
    ProposerAdapter,
    StepInput,
    StepProposal,
    build_proposer,
    make_train_runner,
)
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.state import create_versions, find_current, name_documents, replaces_best
from reflact.training.timing import StageTimer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    AppendixResult,
    Fallback,
    Item,
    Measurement,
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
    _collected_edits: dict[int, tuple[RejectedEdit, ...]] = field(default_factory=dict, init=False)
    """The rejected edits that the steps of the latest epoch begin with, by that epoch."""

    @property
    def _candidate_source(self) -> CandidateSource:
        plan = self.runtime.plan
        proposer = plan.proposer or build_proposer(plan, self.gate_keeper.metric)
        if proposer is None:
            return StageProposer(self.runtime, self.scheduler, self.timer)
        return ProposerAdapter(self.runtime, self.scheduler, self.timer, proposer)

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
        work = build_step_input(
            self.runtime,
            step=step,
            epoch=epoch,
            skill=skill,
            batches=self.list_batches(step),
            state=state,
            rejected=self._collect_edits(earlier, epoch),
        )
        proposed = await self._candidate_source.propose(work)
        rollouts, reports, candidate = proposed.rollouts, proposed.reports, proposed.candidate
        async with self.timer.stage("evaluate", step=step):
            verdict = proposed.verdict
            if verdict is None:
                verdict = decide_without_evaluation(
                    candidate,
                    skill,
                    merged=proposed.merged,
                    chosen=proposed.chosen,
                    known=name_documents(state, earlier),
                )
            if verdict is None:
                subject = f"step {step} is unmeasured"
                verdict = await self.gate_keeper.judge(
                    candidate.skill, state, step=step, part="step", subject=subject
                )
        kept = candidate.skill
        if not verdict.accepted:
            kept = await self.runtime.store.skill(find_current(state, verdict).skill_hash)
        appended = await self._update_appendix(work.context, kept, reports)
        created = create_versions(state, step, candidate.skill, verdict, appended.skill)
        record = StepRecord(
            step=step,
            epoch=epoch,
            step_in_epoch=index + 1,
            skill_before=skill.hash,
            item_ids=tuple(r.item_id for r in rollouts),
            rollout=build_measurement(skill.hash, Split.train, rollouts),
            batches=_measure_batches(work.batches, skill, rollouts),
            n_failures=sum(is_failure(r, self.runtime.config.train.success_threshold) for r in rollouts),
            reports=reports,
            merged=proposed.merged,
            chosen=proposed.chosen,
            edits=candidate.results,
            rewrite_summary=candidate.summary,
            candidate_hash=candidate.skill.hash,
            verdict=verdict,
            created_versions=created,
            notes=appended.notes,
            current=created[-1] if created else find_current(state, verdict),
            best=created[0] if replaces_best(verdict, state.best) else state.best,
            fallbacks=(*candidate.fallbacks, *appended.fallbacks),
            rewrites=proposed.rewrites,
        )
        if not record.patterns:
            reasons = group_failures(rollouts, self.runtime.config.train.success_threshold)
            record = record.model_copy(update={"fail_reasons": reasons})
        return CommitOutcome(record=record, skills=(candidate.skill, appended.skill))

    def _collect_edits(self, earlier: Sequence[StepRecord], epoch: int) -> tuple[RejectedEdit, ...]:
        """Return the rejected edits of other runs and of the epochs before this one."""
        if epoch not in self._collected_edits:
            first, known = self._collected_edits.popitem() if self._collected_edits else (0, ())
            new = [record for record in earlier if first <= record.epoch < epoch]
            self._collected_edits[epoch] = collect_rejected_edits(new, known=known)
        return deduplicate_edits((*self.pinned_edits, *self._collected_edits[epoch]))

    async def _update_appendix(
        self, context: StageContext, skill: Skill, reports: Sequence[AnalystReport]
    ) -> AppendixResult:
        if not self.runtime.config.appendix.enabled:
            return AppendixResult(skill=skill)
        async with self.timer.stage("appendix", step=context.step):
            return await update_appendix(
                skill, reports, context=context, threshold=self.runtime.config.appendix.consolidate_threshold
            )


def build_step_input(
    runtime: Runtime,
    *,
    step: int,
    epoch: int,
    skill: Skill,
    batches: tuple[tuple[Item, ...], ...],
    state: RunState,
    rejected: tuple[RejectedEdit, ...],
) -> StepInput:
    """Return what a step begins with; ``rejected`` are the edits of other runs and earlier epochs that did not help."""
    reflect, sizes = runtime.config.reflect, runtime.config.select
    most = None
    if sizes.lr_control != "none":
        most = edit_budget(
            step,
            runtime.plan.total_steps,
            scheduler=sizes.scheduler,
            max_edits=sizes.max_edits,
            floor=sizes.floor,
        )
    return StepInput(
        context=runtime.make_context(step),
        skill=skill,
        batches=batches,
        attempts=state.step_buffer if reflect.step_buffer and state.epoch == epoch else (),
        rejected_edits=() if reflect.memory == "off" else rejected,
        meta_skill=state.meta_skill,
        max_edits=most,
    )


@dataclass(frozen=True)
class StageProposer:
    """Makes a candidate by the stages reflect, aggregate, select and update."""

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
        return StepProposal(
            rollouts=rollouts, candidate=candidate, reports=reports, merged=merged, chosen=chosen
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

        return await roll_out_and_reflect(
            work.batches,
            work.skill,
            runner=make_train_runner(self.scheduler, work),
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
        return show_figures(rollouts, work.items, [r.item_id for r in rollouts if is_failure(r, threshold)])


def _measure_batches(
    batches: Sequence[Sequence[Item]], skill: Skill, rollouts: Sequence[Rollout]
) -> tuple[Measurement, ...]:
    sizes = [len(batch) for batch in batches]
    return tuple(
        build_measurement(skill.hash, Split.train, rollouts[end - size : end])
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
