"""What a step gives to its source of candidates, and what it gets back; the rollouts of its items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reflact.records import StepBufferEntry
from reflact.search.race import Contender
from reflact.skills.document import UNCHANGED_REASON, apply_edits, digest_form, editable_text
from reflact.skills.rejected_edits import RejectedEdit
from reflact.stages.context import StageContext
from reflact.stages.rollout import RolloutRunner
from reflact.training.rollouts import RolloutScheduler
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
    Rewrite,
    Rollout,
    SelectResult,
    Skill,
    Verdict,
    WorkedExample,
    is_failure,
)


class StepProposal(FrozenModel):
    """A step's candidates, and what led to them; a ``verdict`` says why there is none to judge.

    ``merged`` and ``chosen`` are those of the stages; other sources have None. ``barred`` are sources that can give
    nothing more.
    """

    rollouts: tuple[Rollout, ...] = ()
    contenders: tuple[Contender, ...] = ()
    reports: tuple[AnalystReport, ...] = ()
    merged: AggregateResult | None = None
    chosen: SelectResult | None = None
    rewrites: tuple[Rewrite, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    verdict: Verdict | None = None
    barred: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """What a step begins with: its batches, the current document, and what the run knows.

    ``attempts`` are the epoch's earlier steps, ``rejected_edits`` the changes of earlier epochs that did not help;
    both are empty if the configuration says so. ``max_edits`` is the edit budget. ``examples`` are the worked examples of
    the document. ``max_items`` is how many items the budget lets the step roll out; None: all of its batches.
    """

    context: StageContext
    skill: Skill
    batches: tuple[tuple[Item, ...], ...]
    attempts: tuple[StepBufferEntry, ...]
    rejected_edits: tuple[RejectedEdit, ...]
    meta_skill: str
    max_edits: int | None
    examples: tuple[WorkedExample, ...] = ()
    is_stalled: bool = False
    max_items: int | None = None

    @property
    def step(self) -> int:
        """The step."""
        return self.context.step

    @property
    def items(self) -> tuple[Item, ...]:
        """The items of all batches, in order."""
        return tuple(item for batch in self.batches for item in batch)


def build_proposal(
    skill: Skill, rollouts: tuple[Rollout, ...], rewrites: tuple[Rewrite, ...], *, cases: int
) -> StepProposal:
    """Return written documents as candidates; ``cases`` are behind each of them."""
    fallbacks = tuple(
        Fallback(label=f"document/{r.number}", reason=r.reason, replacement="one document less")
        for r in rewrites
        if r.document is None and r.reason is not None
    )
    written = [
        (rewrite, apply_document(skill, rewrite.document, cases))
        for rewrite in rewrites
        if rewrite.document is not None
    ]
    fallbacks += tuple(
        Fallback(label=f"document/{rewrite.number}", reason=reason, replacement="one document less")
        for rewrite, candidate in written
        if (reason := candidate.results[0].reason) not in {None, UNCHANGED_REASON}
    )
    contenders = tuple(
        make_contender(f"rewrite {rewrite.number + 1}", candidate)
        for rewrite, candidate in written
        if candidate.results[0].reason in {None, UNCHANGED_REASON}
    )
    verdict = None
    if not contenders:
        reason = fallbacks[0].reason if fallbacks else "no reason was given"
        verdict = Verdict(action="no_rewrite", reason=f"No document was written: {reason}")
    return StepProposal(
        rollouts=rollouts, contenders=contenders, rewrites=rewrites, fallbacks=fallbacks, verdict=verdict
    )


def make_contender(label: str, candidate: Candidate) -> Contender:
    """Return a candidate with its name in a race."""
    return Contender(label=label, candidate=candidate, form=digest_form(candidate.skill.text))


def build_cases(
    items: Sequence[Item], rollouts: Sequence[Rollout], threshold: float | None
) -> tuple[Case, ...]:
    """Return the measured rollouts with their items, in their order."""
    by_id = {item.id: item for item in items}
    return tuple(
        Case(item=by_id[rollout.item_id], rollout=rollout, failed=is_failure(rollout, threshold))
        for rollout in rollouts
        if rollout.score is not None
    )


def limit_batches(work: StepInput, most: int) -> tuple[tuple[Item, ...], ...]:
    """Return the batches with at most ``most`` items, those first that are no worked examples of the document."""
    allowed = most if work.max_items is None else min(most, work.max_items)
    if len(work.items) <= allowed:
        return work.batches
    used = {example.item_id for example in work.examples}
    chosen = sorted(dict.fromkeys(work.items), key=lambda item: item.id in used)[:allowed]
    return (tuple(chosen),)


async def roll_out_items(
    work: StepInput, scheduler: RolloutScheduler, timer: StageTimer, *, most: int
) -> tuple[Rollout, ...]:
    """Roll the current document out on at most ``most`` items of the step."""
    batches = limit_batches(work, most)
    async with timer.stage("rollout", step=work.step):
        runner = make_train_runner(scheduler, work, n=sum(map(len, batches)))
        (rollouts,) = await runner.roll_out_batches(batches, [work.skill])
    return rollouts


def apply_document(skill: Skill, document: str, cases: int = 1) -> Candidate:
    """Return the skill with a new text; protected regions that the text repeats are left out of it."""
    return apply_edits(skill, [Edit(op="rewrite", content=editable_text(document), support_count=cases)])


def make_train_runner(scheduler: RolloutScheduler, work: StepInput, n: int) -> RolloutRunner:
    """Return the runner of a step's items, which counts the progress of ``n`` rollouts."""
    return scheduler.make_runner(
        work.step,
        feedback=True,
        phase=f"step/{work.step}",
        on_rollout=scheduler.make_progress_counter("rollout", work.step, n),
    )
