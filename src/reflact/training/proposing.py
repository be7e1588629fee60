"""Candidates of proposers: what a proposer gets in a step, what it returns, and those that rewrite documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from reflact.concurrency import fan_out
from reflact.config.training import ReflectConfig
from reflact.messages import NoReply, RenderedPrompt
from reflact.prompts import PromptBook
from reflact.protocols import Proposer, R, StepBudget, StepEvidence
from reflact.records import StepBufferEntry
from reflact.skills.document import apply_edits, editable_text
from reflact.skills.rejected_edits import RejectedEdit, select_relevant_edits
from reflact.stages.context import StageContext
from reflact.stages.evaluate import GateMetric, build_measurement
from reflact.stages.prompt_sections import (
    join_sections,
    list_material,
    show_buffer,
    show_memory,
    show_meta,
    show_skill,
    show_step_cases,
)
from reflact.stages.reflect import Minibatch, annotate_failures, build_pattern
from reflact.stages.reply_models import (
    DraftReply,
    ReasonedOneShotReply,
    check_document_rules,
    check_reply,
    one_shot_reply_type,
)
from reflact.stages.rollout import RolloutRunner, log_unmeasured
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import RunPlan, Runtime
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
    Split,
    Verdict,
    is_failure,
)

PURPOSE = "one_shot"
"""The prompt of a rewrite, and the purpose of its calls."""


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
            runner = make_train_runner(self.scheduler, work)
            (rollouts,) = await runner.roll_out_batches(work.batches, [work.skill])
        async with self.timer.stage("update", step=step):
            evidence = await self._collect_evidence(work, rollouts)
            budget = StepAllowance(work, self.scheduler)
            async with self.scheduler.failures.explain(f"the proposer failed in step {step}", step=step):
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
        async with self.scheduler.failures.explain(
            f"the annotator failed in step {work.step}", step=work.step
        ):
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
        runner = make_train_runner(self.scheduler, self.work, times=len(documents))
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


def make_train_runner(scheduler: RolloutScheduler, work: StepInput, times: int = 1) -> RolloutRunner:
    """Return the runner of a step's items, which counts the progress of ``times`` passes over them."""
    total = times * len(work.items)
    return scheduler.make_runner(
        work.step,
        feedback=True,
        phase=f"step/{work.step}",
        on_rollout=scheduler.make_progress_counter("rollout", work.step, total),
    )


@dataclass(frozen=True)
class RewritingProposer:
    """Asks for ``n`` documents in independent calls; several are rolled out on the step's items, the best first.

    ``metric`` is the gate's. Documents are compared on the items that were measured under all of them; among
    equals the earlier one comes first.
    """

    n: int
    prompts: PromptBook
    config: ReflectConfig
    metric: GateMetric

    @property
    def identity(self) -> str:
        """Its name; the configuration, which the run's identity holds, has the rest."""
        return PURPOSE if self.n == 1 else f"best_of_{self.n}"

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> tuple[Rewrite, ...]:
        """Return the documents, the best first, and then the calls without a valid reply."""
        if not evidence.cases:
            return (Rewrite(reason="there is no case to learn from"),)
        write = partial(self._write, skill, evidence, budget)
        rewrites = await fan_out(write, range(self.n), limit=self.config.concurrency)
        written = [rewrite for rewrite in rewrites if rewrite.document is not None]
        if len(written) > 1:
            written = await self._rank(written, budget)
        return (*written, *(rewrite for rewrite in rewrites if rewrite.document is None))

    async def _write(self, skill: Skill, evidence: StepEvidence, budget: StepBudget, number: int) -> Rewrite:
        failures = [case for case in evidence.cases if case.failed]
        successes = [case for case in evidence.cases if not case.failed]
        cases = (*failures, *successes)
        tokens = self.config.trajectory_tokens * math.ceil(len(cases) / self.config.minibatch_size)

        def render(tokens: int) -> RenderedPrompt:
            attempts = join_sections(
                show_buffer(evidence.attempts),
                show_memory(evidence.rejected_edits),
                show_meta(evidence.meta_skill),
            )
            values = {
                "task": evidence.task,
                "document": show_skill(skill),
                "attempts": attempts,
                "cases": show_step_cases(failures, successes, tokens=tokens),
            }
            return self.prompts.render(PURPOSE, values)

        def check(reply: DraftReply) -> None:
            items = [case.item for case in cases]
            material = list_material(items, [case.rollout for case in cases])
            check_reply(reply, skill=skill, material=material)
            check_document_rules(reply.document, skill, items)

        reply = await budget.ask(
            render(tokens),
            one_shot_reply_type(failures=len(failures), reasoned=self.prompts.is_reasoned(PURPOSE)),
            purpose=PURPOSE,
            part=str(number),
            check=check,
            shorten=lambda: render(min(tokens // 2, self.config.trajectory_tokens)),
        )
        if isinstance(reply, NoReply):
            return Rewrite(reason=reply.reason, number=number)
        return Rewrite(
            document=reply.document,
            reasoning=reply.reasoning if isinstance(reply, ReasonedOneShotReply) else "",
            patterns=tuple(
                build_pattern(pattern, [c.item.id for c in failures]) for pattern in reply.patterns
            ),
            number=number,
        )

    async def _rank(self, written: Sequence[Rewrite], budget: StepBudget) -> list[Rewrite]:
        """Return the documents with their means on the step's items, the best first."""
        rolled = await budget.roll_out([str(rewrite.document) for rewrite in written])
        scores = [[self.metric.score_rollout(rollout) for rollout in rollouts] for rollouts in rolled]
        common = [n for n, row in enumerate(zip(*scores, strict=True)) if None not in row]
        means = [math.fsum(row[n] or 0.0 for n in common) for row in scores]
        measured = [
            rewrite.model_copy(
                update={"measurement": build_measurement(rollouts[0].skill_hash, Split.train, rollouts)}
            )
            for rewrite, rollouts in zip(written, rolled, strict=True)
        ]
        return [measured[n] for n in sorted(range(len(measured)), key=lambda n: -means[n])]


def build_proposer(plan: RunPlan, metric: GateMetric) -> Proposer | None:
    """Return the proposer that the configuration names, with the gate's metric; None: the stages."""
    config = plan.config
    if not config.proposer.rewrites:
        return None
    return RewritingProposer(config.proposer.rewrites, plan.prompts, config.reflect, metric)
