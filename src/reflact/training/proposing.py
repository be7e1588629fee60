"""How a step's items become a candidate: the stages reflect to update, or a proposer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from reflact.messages import NoReply, RenderedPrompt
from reflact.protocols import Proposer, R, StepEvidence
from reflact.records import RunState, StepBufferEntry, StepRecord
from reflact.skills.document import apply_edits, editable_text
from reflact.skills.rejected_edits import (
    RejectedEdit,
    collect_rejected_edits,
    deduplicate_edits,
    select_relevant_edits,
)
from reflact.stages.aggregate import aggregate
from reflact.stages.context import StageContext
from reflact.stages.execution_notes import LapseTriage
from reflact.stages.overlap import roll_out_and_reflect
from reflact.stages.prompt_sections import (
    join_sections,
    show_buffer,
    show_cases,
    show_figures,
    show_memory,
    show_meta,
    show_step_cases,
)
from reflact.stages.reflect import Analyst, Minibatch, annotate_failures, list_edit_kinds
from reflact.stages.rollout import RolloutRunner, log_unmeasured
from reflact.stages.select import choose_step_size, edit_budget, select
from reflact.stages.update import update
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.timing import StageTimer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Candidate,
    Case,
    Edit,
    Fallback,
    FrozenModel,
    Item,
    Patch,
    Rewrite,
    Rollout,
    SelectResult,
    Skill,
    Verdict,
    is_failure,
)


class StepProposal(FrozenModel):
    """A step's candidate, and what led to it; a ``verdict`` says why there is no candidate to judge."""

    rollouts: tuple[Rollout, ...]
    candidate: Candidate
    reports: tuple[AnalystReport, ...] = ()
    merged: AggregateResult
    chosen: SelectResult
    rewrites: tuple[Rewrite, ...] = ()
    verdict: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """What a step begins with: its batches, the current document, and what the run knows.

    ``attempts`` are the epoch's earlier steps, ``rejected_edits`` the changes of earlier epochs that did not help;
    both are empty if the configuration says so. ``max_edits`` is the edit budget.
    """

    context: StageContext
    skill: Skill
    batches: tuple[tuple[Item, ...], ...]
    attempts: tuple[StepBufferEntry, ...]
    rejected_edits: tuple[RejectedEdit, ...]
    meta_skill: str
    max_edits: int | None

    @property
    def step(self) -> int:
        """The step."""
        return self.context.step

    @property
    def items(self) -> tuple[Item, ...]:
        """The items of all batches, in order."""
        return tuple(item for batch in self.batches for item in batch)


class CandidateSource(Protocol):
    """Rolls out a step's items and makes a candidate."""

    async def propose(self, work: StepInput) -> StepProposal:
        """Return the candidate and what led to it."""


def build_step_input(
    runtime: Runtime,
    *,
    step: int,
    epoch: int,
    skill: Skill,
    batches: tuple[tuple[Item, ...], ...],
    state: RunState,
    earlier: Sequence[StepRecord],
    pinned: Sequence[RejectedEdit],
) -> StepInput:
    """Return what a step begins with; ``earlier`` are the records before it, ``pinned`` edits of other runs."""
    reflect, sizes = runtime.config.reflect, runtime.config.select
    cards = deduplicate_edits((*pinned, *collect_rejected_edits([r for r in earlier if r.epoch < epoch])))
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
        rejected_edits=() if reflect.memory == "off" else cards,
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
            return await analyse(
                batch if annotator is None else await annotate_failures(batch, annotator, context)
            )

        return await roll_out_and_reflect(
            work.batches,
            work.skill,
            runner=_make_train_runner(self.scheduler, work),
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
            text = show_cases(batch.rollouts, batch.items, failed=batch.source == "failure", tokens=tokens)
            memory = show_memory(select_relevant_edits(cards, text)) if cards else ""
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


@dataclass(frozen=True)
class ProposerAdapter:
    """Makes a candidate by a proposer, which sees the finished rollouts of the step."""

    runtime: Runtime
    scheduler: RolloutScheduler
    timer: StageTimer
    proposer: Proposer

    async def propose(self, work: StepInput) -> StepProposal:
        """Return the first document of the proposer as the candidate."""
        step = work.step
        async with self.timer.stage("rollout", step=step):
            runner = _make_train_runner(self.scheduler, work)
            (rollouts,) = await runner.roll_out_batches(work.batches, [work.skill])
        async with self.timer.stage("update", step=step):
            evidence = await self._collect_evidence(work, rollouts)
            budget = StepAllowance(work, self.scheduler)
            rewrites = tuple(await self.proposer.propose(work.skill, evidence, budget))
            await log_unmeasured(rollouts, decision_log=work.context.decision_log, step=step)
        return build_proposal(work.skill, rollouts, rewrites, cases=max(1, len(evidence.cases)))

    async def _collect_evidence(self, work: StepInput, rollouts: Sequence[Rollout]) -> StepEvidence:
        config = self.runtime.config
        pairs = [(item, r) for item, r in zip(work.items, rollouts, strict=True) if r.score is not None]
        is_failed = partial(is_failure, threshold=config.train.success_threshold)
        failed = await self._annotate(work, [(item, r) for item, r in pairs if is_failed(r)])
        solved = [(item, r) for item, r in pairs if not is_failed(r) and not config.reflect.failure_only]
        order = {rollout.key: n for n, (_, rollout) in enumerate(pairs)}
        cases = [Case(item=i, rollout=r, failed=True) for i, r in failed]
        cases += [Case(item=i, rollout=r, failed=False) for i, r in solved]
        text = show_step_cases(cases, (), tokens=config.reflect.trajectory_tokens * len(cases))
        return StepEvidence(
            step=work.step,
            cases=tuple(sorted(cases, key=lambda case: order[case.rollout.key])),
            attempts=work.attempts,
            rejected_edits=select_relevant_edits(work.rejected_edits, text),
            meta_skill=work.meta_skill,
            task=work.context.task,
        )

    async def _annotate(
        self, work: StepInput, failed: Sequence[tuple[Item, Rollout]]
    ) -> list[tuple[Item, Rollout]]:
        annotator = self.runtime.plan.annotator
        if annotator is None:
            return [*failed]
        items, rollouts = tuple(item for item, _ in failed), tuple(rollout for _, rollout in failed)
        batch = Minibatch(source="failure", index=0, items=items, rollouts=rollouts)
        batch = await annotate_failures(batch, annotator, work.context)
        return [*zip(batch.items, batch.rollouts, strict=True)]


@dataclass(frozen=True)
class StepAllowance:
    """Implements ``protocols.StepBudget`` with the collaborators of a step."""

    work: StepInput
    scheduler: RolloutScheduler

    @property
    def max_edits(self) -> int | None:
        """The edit budget of the step."""
        return self.work.max_edits

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        purpose: str = "proposal",
        part: str = "",
        check: Callable[[R], None] | None = None,
        shorten: Callable[[], RenderedPrompt] | None = None,
    ) -> R | NoReply:
        """Ask the optimizer; a missing reply is logged before it is used."""
        return await self.work.context.ask_rendered(
            prompt, reply_type, purpose=purpose, part=part, check=check, shorten=shorten
        )

    async def roll_out(self, documents: Sequence[str]) -> tuple[tuple[Rollout, ...], ...]:
        """Roll documents out on the step's items, with the protected regions of the current document."""
        skills = [_apply_document(self.work.skill, document).skill for document in documents]
        runner = _make_train_runner(self.scheduler, self.work, times=len(documents))
        rolled = await runner.roll_out_batches(self.work.batches, skills)
        for rollouts in rolled:
            await log_unmeasured(rollouts, decision_log=self.work.context.decision_log, step=self.work.step)
        return rolled


def build_proposal(
    skill: Skill, rollouts: tuple[Rollout, ...], rewrites: tuple[Rewrite, ...], *, cases: int
) -> StepProposal:
    """Return a proposer's first document as the candidate; ``cases`` are behind it. Others are in the record."""
    fallbacks = tuple(
        Fallback(label=f"proposer/{r.number}", reason=r.reason, replacement="one document less")
        for r in rewrites
        if r.document is None and r.reason is not None
    )
    first = next((rewrite for rewrite in rewrites if rewrite.document is not None), None)
    if first is None or first.document is None:
        reason = fallbacks[0].reason if fallbacks else "it gave no reason"
        return StepProposal(
            rollouts=rollouts,
            candidate=Candidate(skill=skill),
            merged=AggregateResult(fallbacks=fallbacks),
            chosen=SelectResult(),
            rewrites=rewrites,
            verdict=Verdict(action="no_rewrite", reason=f"The proposer wrote no document: {reason}"),
        )
    candidate = _apply_document(skill, first.document, cases)
    patch = Patch(reasoning=first.reasoning, edits=tuple(result.edit for result in candidate.results))
    return StepProposal(
        rollouts=rollouts,
        candidate=candidate,
        merged=AggregateResult(patch=patch, fallbacks=fallbacks),
        chosen=SelectResult(patch=patch, pool_size=len(rewrites) - len(fallbacks)),
        rewrites=(first, *(rewrite for rewrite in rewrites if rewrite is not first)),
    )


def _apply_document(skill: Skill, document: str, cases: int = 1) -> Candidate:
    """Return the skill with a new text; protected regions that the text repeats are left out of it."""
    return apply_edits(skill, [Edit(op="rewrite", content=editable_text(document), support_count=cases)])


def _make_train_runner(scheduler: RolloutScheduler, work: StepInput, times: int = 1) -> RolloutRunner:
    total = times * len(work.items)
    return scheduler.make_runner(
        work.step,
        feedback=True,
        phase=f"step/{work.step}",
        on_rollout=scheduler.make_progress_counter("rollout", work.step, total),
    )
