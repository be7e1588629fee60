"""One training step: the six stages from rollout to evaluation, and the appendix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from reflact.data import plan_epoch
from reflact.records import RunState, StepRecord
from reflact.skills.rejected_edits import RejectedEdit
from reflact.stages.context import StageContext
from reflact.stages.evaluate import build_measurement, decide_without_evaluation
from reflact.stages.execution_notes import update_appendix
from reflact.stages.reflect import group_failures
from reflact.training.gating import CommitOutcome, GateKeeper
from reflact.training.proposing import (
    CandidateSource,
    ProposerAdapter,
    StageProposer,
    build_step_input,
)
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.state import create_versions, find_current, replaces_best
from reflact.training.timing import StageTimer
from reflact.types import (
    AnalystReport,
    AppendixResult,
    Item,
    Measurement,
    Rollout,
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

    @property
    def _candidate_source(self) -> CandidateSource:
        proposer = self.runtime.proposer
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
            earlier=earlier,
            pinned=self.pinned_edits,
        )
        proposed = await self._candidate_source.propose(work)
        rollouts, reports, candidate = proposed.rollouts, proposed.reports, proposed.candidate
        async with self.timer.stage("evaluate", step=step):
            verdict, undecided = proposed.verdict, None
            if verdict is None:
                verdict = decide_without_evaluation(
                    candidate, skill, merged=proposed.merged, known=state.seen_hashes
                )
            if verdict is None:
                subject = f"step {step} is unmeasured"
                verdict, undecided = await self.gate_keeper.judge(
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
        return CommitOutcome(record=record, skills=(candidate.skill, appended.skill), undecided=undecided)

    async def _update_appendix(
        self, context: StageContext, skill: Skill, reports: Sequence[AnalystReport]
    ) -> AppendixResult:
        if not self.runtime.config.appendix.enabled:
            return AppendixResult(skill=skill)
        async with self.timer.stage("appendix", step=context.step):
            return await update_appendix(
                skill, reports, context=context, threshold=self.runtime.config.appendix.consolidate_threshold
            )


def _measure_batches(
    batches: Sequence[Sequence[Item]], skill: Skill, rollouts: Sequence[Rollout]
) -> tuple[Measurement, ...]:
    sizes = [len(batch) for batch in batches]
    return tuple(
        build_measurement(skill.hash, Split.train, rollouts[end - size : end])
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
