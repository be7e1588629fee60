"""The sources of candidates: what each makes of a step, and what it may spend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reflact.messages import NoReply, RenderedPrompt
from reflact.protocols import R, StepEvidence
from reflact.records import RunState, StepBufferEntry
from reflact.search.examples import ExampleDraws, apply_examples, group_examples
from reflact.search.rewrite import DOCUMENTS, RewriteInput, write_documents
from reflact.skills.document import (
    UNCHANGED_REASON,
    apply_edits,
    check_region_text,
    editable_text,
)
from reflact.skills.rejected_edits import RejectedEdit, select_relevant_edits
from reflact.stages.aggregate import aggregate
from reflact.stages.context import StageContext
from reflact.stages.execution_notes import LapseTriage
from reflact.stages.prompt_sections import (
    BYTES_PER_TOKEN,
    fit_conversation,
    join_sections,
    show_figures,
    show_json,
    show_memory,
    show_step_cases,
)
from reflact.stages.reflect import (
    Analyst,
    Minibatch,
    annotate_failures,
    list_edit_kinds,
    roll_out_and_reflect,
)
from reflact.stages.select import choose_step_size, select
from reflact.stages.update import update
from reflact.training.rollouts import make_runner
from reflact.training.run import Run
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
)

# Sets of examples that a step compares.
CANDIDATES = 6

# Items of a batch that are rolled out for a source other than the stages, if nothing else bounds
# them.
CASES = 16

# The most bytes of an agent's transcript as an example.
TRANSCRIPT_BYTES = 1_500


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """What a step begins with.

    ``items`` are those of all ``batches``. ``attempts`` are the earlier steps of the epoch, and
    ``notes`` is the optimizer's memory, as a section of a prompt. ``rejected_edits`` are those of
    other runs and earlier epochs. ``max_edits`` is the edit budget. ``max_items`` is how many items
    the budget lets the step roll out; None: all of its batches. ``passes`` is how many passes over
    the validation items the rest of the budget pays for.
    """

    step: int
    epoch: int
    source: str
    is_stalled: bool
    context: StageContext
    state: RunState
    skill: Skill
    batches: tuple[tuple[Item, ...], ...]
    items: tuple[Item, ...]
    attempts: tuple[StepBufferEntry, ...]
    shown_attempts: str
    notes: str
    rejected_edits: tuple[RejectedEdit, ...]
    max_edits: int | None
    max_items: int | None
    passes: float


class StepProposal(FrozenModel):
    """A step's candidates, and what led to them; a ``verdict`` says why there is none to judge.

    ``merged`` and ``chosen`` are those of the stages; other sources have None.
    """

    rollouts: tuple[Rollout, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    reports: tuple[AnalystReport, ...] = ()
    merged: AggregateResult | None = None
    chosen: SelectResult | None = None
    rewrites: tuple[Rewrite, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    verdict: Verdict | None = None


def list_sources(run: Run) -> tuple[str, ...]:
    """Return the sources of a run, in the order in which they are tried.

    A proposer that is passed in Python takes the place of the default ones, and joins those that
    are named. A document of several files is not rewritten.
    """
    search = run.config.search
    named: tuple[str, ...] = ()
    if "sources" in search.model_fields_set or run.plan.proposer is None:
        named = search.sources
    if run.plan.proposer is not None:
        own = search.own or "proposer"
        named = named if own in named else (*named, own)
    if run.config.skill_files:
        named = tuple(name for name in named if name != "rewrite")
    return named


async def propose(run: Run, work: StepInput) -> StepProposal:
    """Return the candidates of a step's source."""
    sources = {"examples": propose_examples, "rewrite": propose_rewrites, "edits": propose_edits}
    return await sources.get(work.source, propose_own)(run, work)


# ------------------------------------------------------------------------------------------ edits


async def propose_edits(run: Run, work: StepInput) -> StepProposal:
    """Return the candidate of the published algorithm: reflect, aggregate, select, update.

    With ``full_rewrite``, one document from all cases of the step takes the place of the stages.
    """
    if run.config.update.mode == "full_rewrite":
        return await propose_rewrites(run, work, documents=1, most=len(work.items))
    timer = run.timer
    skill = work.skill
    context = work.context
    async with timer.stage("rollout", "reflect", step=work.step):
        rollouts, reports = await _roll_out_and_reflect(run, work)
    async with timer.stage("aggregate", step=work.step):
        merged = await aggregate(
            reports,
            skill,
            context=context,
            config=run.config.aggregate,
            operations=list_edit_kinds(run.config.update),
            notes=work.notes,
        )
    async with timer.stage("select", step=work.step):
        chosen = await _select(run, work, merged, rollouts)
    async with timer.stage("update", step=work.step):
        candidate = await update(skill, chosen, context=context, attempts=work.shown_attempts)
    return StepProposal(
        rollouts=rollouts, candidates=(candidate,), reports=reports, merged=merged, chosen=chosen
    )


async def _roll_out_and_reflect(
    run: Run, work: StepInput
) -> tuple[tuple[Rollout, ...], tuple[AnalystReport, ...]]:
    config = run.config
    tokens = config.reflect.trajectory_tokens

    def make_notes(batch: Minibatch) -> str:
        memory = ""
        if work.rejected_edits:
            relevant = select_relevant_edits(work.rejected_edits, batch.show_cases(tokens))
            memory = show_memory(relevant)
        return join_sections(work.shown_attempts, memory, work.notes)

    analyse = Analyst(
        context=work.context,
        skill=work.skill,
        config=config.update,
        max_edits=config.select.max_edits if work.max_edits is None else work.max_edits,
        tokens=tokens,
        notes=make_notes,
    ).report
    if config.appendix.enabled:
        analyse = LapseTriage(
            context=work.context,
            skill=work.skill,
            analyse=analyse,
            successes=config.appendix.source == "both",
            tokens=tokens,
        ).report

    async def annotate_and_analyse(batch: Minibatch) -> AnalystReport:
        return await analyse(await _annotate(run, work, batch))

    batches = _limit_batches(work, len(work.items))
    return await roll_out_and_reflect(
        batches,
        work.skill,
        runner=make_runner(run, work.step, "rollout", sum(map(len, batches))),
        analyse=annotate_and_analyse,
        config=config.reflect,
        seed=config.seed,
        threshold=config.train.success_threshold,
    )


async def _annotate(run: Run, work: StepInput, batch: Minibatch) -> Minibatch:
    """Return a minibatch with the notes of the run's annotator, if there is one."""
    annotator = run.plan.annotator
    if annotator is None:
        return batch
    async with run.failures.explain(f"the annotator failed in step {work.step}", step=work.step):
        return await annotate_failures(batch, annotator, work.context)


async def _select(
    run: Run, work: StepInput, merged: AggregateResult, rollouts: Sequence[Rollout]
) -> SelectResult:
    """Return the edits to apply, after the optimizer chose the step size if it is asked for one."""
    attempts = work.shown_attempts
    budget = work.max_edits
    decision = None
    fallbacks: tuple[Fallback, ...] = ()
    if run.config.select.lr_control == "autonomous" and merged.patch.edits:
        assert budget is not None
        failed = [rollout.item_id for rollout in rollouts if run.is_failure(rollout)]
        ids = {rollout.item_id for rollout in rollouts}
        items = [item for item in work.items if item.id in ids]
        size = await choose_step_size(
            merged,
            work.skill,
            context=work.context,
            notes=join_sections(attempts, work.notes),
            figures=show_figures(rollouts, items, failed),
            default=budget,
        )
        if isinstance(size, Fallback):
            fallbacks = (size,)
        else:
            budget = size.count
            decision = size
    chosen = await select(
        merged, work.skill, context=work.context, budget=budget, attempts=attempts, notes=work.notes
    )
    fallbacks += chosen.fallbacks
    return chosen.model_copy(update={"decision": decision, "fallbacks": fallbacks})


# --------------------------------------------------------------------------------------- examples


async def propose_examples(run: Run, work: StepInput) -> StepProposal:
    """Return documents with several sets of worked examples from train items; no model is asked.

    If the environment gives no right answers, or the target works in several turns, the examples
    are rollouts of the step that were graded right.
    """
    answers = _find_right_answers(run)
    rollouts: tuple[Rollout, ...] = ()
    if work.state.current.examples or not answers:
        rollouts = await _roll_out(run, work, CASES if answers else len(work.items))
    await run.log_unmeasured(rollouts, work.step)
    pool = _collect_examples(run, work, answers, rollouts)
    sets = _draw_sets(run, work, pool, rollouts) if pool else ()
    if sets:
        candidates = tuple(apply_examples(work.skill, examples) for examples in sets)
        return StepProposal(rollouts=rollouts, candidates=candidates)
    reason = (
        "No train item has a right answer that can be written down, and no rollout was graded "
        "right."
    )
    if pool:
        reason = (
            "The document has no room for another set of worked examples; "
            f"search.max_document_tokens is {run.config.search.max_document_tokens}."
        )
    return StepProposal(rollouts=rollouts, verdict=Verdict(action="no_patches", reason=reason))


def _find_right_answers(run: Run) -> tuple[WorkedExample, ...]:
    """Return the train items whose right answer the environment can write down, with it."""
    examples = []
    for item in run.plan.data.train:
        answers = run.plan.environment.list_right_answers(item)
        if answers:
            # A grader may list answers in the form in which it compares them; the reference is as
            # somebody wrote it.
            own = item.reference if isinstance(item.reference, str | int | float) else answers[0]
            task = _render_message(run, item)
            examples.append(WorkedExample(item_id=item.id, task=task, answer=str(own)))
    return tuple(examples)


def _render_message(run: Run, item: Item) -> str:
    """Return an item's task as the target sees it."""
    message = run.plan.environment.render_message(item)
    return show_json(item.input) if message is None else message


def _collect_examples(
    run: Run, work: StepInput, answers: Sequence[WorkedExample], rollouts: Sequence[Rollout]
) -> list[WorkedExample]:
    """Return the known right answers, the document's examples, and right rollouts.

    The text of an example holds no marker of a protected region.
    """
    train = {item.id: item for item in run.plan.data.train}
    pool = {example.item_id: example for example in answers}
    pool |= {
        example.item_id: example
        for example in work.state.current.examples
        if example.item_id in train
    }
    if not answers or any(len(rollout.turns) > 2 for rollout in rollouts):
        for rollout in rollouts:
            if rollout.score is None or run.is_failure(rollout):
                continue
            item_id = rollout.item_id
            task = _render_message(run, train[item_id])
            answer = rollout.answer
            if len(rollout.turns) > 2:
                task = rollout.turns[0].content
                answer = fit_conversation(rollout.turns[1:], TRANSCRIPT_BYTES)
            pool[item_id] = WorkedExample(item_id=item_id, task=task, answer=answer)

    safe = []
    for example in pool.values():
        try:
            check_region_text(f"{example.task}\n{example.answer}")
        except ValueError:
            continue
        if example.answer.strip():
            safe.append(example)
    return safe


def _draw_sets(
    run: Run, work: StepInput, pool: Sequence[WorkedExample], rollouts: Sequence[Rollout]
) -> tuple[tuple[WorkedExample, ...], ...]:
    """Return the sets that a step compares: first ones, or variants of the document's own."""
    kinds = {item.id: item.task_type for item in run.plan.data.train}
    groups = group_examples(pool, [kinds.get(example.item_id) for example in pool])
    # Other regions count, and the markers around the examples.
    marked = apply_edits(work.skill, [Edit(op="examples", content="x")]).skill.text
    room = run.config.search.max_document_tokens * BYTES_PER_TOKEN - len(marked.encode()) + 1
    draws = ExampleDraws(
        pool=pool,
        groups=groups,
        seed=run.config.seed,
        label=f"examples/{work.step}",
        most=CANDIDATES * (1 + work.is_stalled),
        max_bytes=room,
    )
    if not work.state.current.examples:
        return draws.draw_first_sets()
    failed = {rollout.item_id for rollout in rollouts if run.is_failure(rollout)}
    return draws.draw_variants(work.state.current.examples, failed)


# ---------------------------------------------------------------------------------- whole documents


async def propose_rewrites(
    run: Run, work: StepInput, *, documents: int = DOCUMENTS, most: int = CASES
) -> StepProposal:
    """Return whole documents that the optimizer writes from at most ``most`` items."""
    rollouts = await _roll_out(run, work, most)
    cases = _build_cases(run, work, rollouts)
    shown = {case.item.id for case in cases} | {
        example.item_id for example in work.state.current.examples
    }
    material = RewriteInput(
        cases=cases,
        answers=tuple(answer for answer in _find_right_answers(run) if answer.item_id not in shown),
        notes=join_sections(work.shown_attempts, work.notes),
    )
    async with run.timer.stage("update", step=work.step):
        n = documents * (1 + work.is_stalled)
        rewrites = await write_documents(
            work.skill, material, context=work.context, n=n, seed=run.config.seed
        )
    await run.log_unmeasured(rollouts, work.step)
    return _build_proposal(work.skill, rollouts, rewrites, len(cases))


async def propose_own(run: Run, work: StepInput) -> StepProposal:
    """Return the documents of the caller's proposer, which sees the step's finished rollouts."""
    proposer = run.plan.proposer
    assert proposer is not None
    step = work.step
    rollouts = await _roll_out(run, work, len(work.items))
    async with run.timer.stage("update", step=step):
        evidence = await _collect_evidence(run, work, rollouts)
        budget = StepAllowance(run, work)
        async with run.failures.explain(f"the proposer failed in step {step}", step=step):
            rewrites = tuple(await proposer.propose(work.skill, evidence, budget))
        await run.log_unmeasured(rollouts, step)
    return _build_proposal(work.skill, rollouts, rewrites, len(evidence.cases))


async def _collect_evidence(run: Run, work: StepInput, rollouts: Sequence[Rollout]) -> StepEvidence:
    """Return the cases of the rollouts, with the annotator's notes, and what the run knows."""
    reflect = run.config.reflect
    cases = _build_cases(run, work, rollouts)
    failed = [case for case in cases if case.failed]
    batch = Minibatch(
        source="failure",
        index=0,
        items=tuple(case.item for case in failed),
        rollouts=tuple(case.rollout for case in failed),
    )
    noted = {rollout.key: rollout for rollout in (await _annotate(run, work, batch)).rollouts}
    shown = []
    for case in cases:
        if case.failed or not reflect.failure_only:
            rollout = noted.get(case.rollout.key, case.rollout)
            shown.append(case.model_copy(update={"rollout": rollout}))
    ordered = sorted(shown, key=lambda case: not case.failed)
    text = show_step_cases(ordered, (), tokens=reflect.trajectory_tokens * len(shown))
    return StepEvidence(
        step=work.step,
        cases=tuple(shown),
        attempts=work.attempts,
        rejected_edits=select_relevant_edits(work.rejected_edits, text),
        meta_skill=work.state.meta_skill,
        task=work.context.task,
    )


@dataclass(frozen=True)
class StepAllowance:
    """Implements ``protocols.StepBudget`` for one step of a run."""

    run: Run
    work: StepInput

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
        """Roll documents out on the step's items, with the current protected regions."""
        work = self.work
        skills = [_apply_document(work.skill, document).skill for document in documents]
        runner = make_runner(self.run, work.step, "rollout", len(documents) * len(work.items))
        rolled = await runner.roll_out_batches(work.batches, skills)
        for rollouts in rolled:
            await self.run.log_unmeasured(rollouts, work.step)
        return rolled


def _build_proposal(
    skill: Skill, rollouts: tuple[Rollout, ...], rewrites: tuple[Rewrite, ...], n_cases: int
) -> StepProposal:
    """Return written documents as candidates; so many cases are behind each of them."""
    candidates: list[Candidate] = []
    fallbacks: list[Fallback] = []
    for rewrite in rewrites:
        reason = rewrite.reason
        if rewrite.document is not None:
            candidate = _apply_document(skill, rewrite.document, max(1, n_cases))
            reason = candidate.results[0].reason
            if reason in {None, UNCHANGED_REASON}:
                label = f"rewrite {rewrite.number + 1}"
                candidates.append(candidate.model_copy(update={"label": label}))
                continue
        if reason is not None:
            label = f"document/{rewrite.number}"
            replacement = "one document less"
            fallbacks.append(Fallback(label=label, reason=reason, replacement=replacement))
    verdict = None
    if not candidates:
        reason = fallbacks[0].reason if fallbacks else "no reason was given"
        verdict = Verdict(action="no_rewrite", reason=f"No document was written: {reason}")
    return StepProposal(
        rollouts=rollouts,
        candidates=tuple(candidates),
        rewrites=rewrites,
        fallbacks=tuple(fallbacks),
        verdict=verdict,
    )


def _apply_document(skill: Skill, document: str, n_cases: int = 1) -> Candidate:
    """Return the skill with a new text; protected regions that the text repeats are left out."""
    edit = Edit(op="rewrite", content=editable_text(document), support_count=n_cases)
    return apply_edits(skill, [edit])


def _build_cases(run: Run, work: StepInput, rollouts: Sequence[Rollout]) -> tuple[Case, ...]:
    """Return the measured rollouts with their items, in their order."""
    items = {item.id: item for item in work.items}
    return tuple(
        Case(item=items[rollout.item_id], rollout=rollout, failed=run.is_failure(rollout))
        for rollout in rollouts
        if rollout.score is not None
    )


# ---------------------------------------------------------------------------------------- rollouts


def _limit_batches(work: StepInput, most: int) -> tuple[tuple[Item, ...], ...]:
    """Return the batches with at most ``most`` items; the document's own examples come last."""
    allowed = most if work.max_items is None else min(most, work.max_items)
    if len(work.items) <= allowed:
        return work.batches
    used = {example.item_id for example in work.state.current.examples}
    chosen = sorted(dict.fromkeys(work.items), key=lambda item: item.id in used)[:allowed]
    return (tuple(chosen),)


async def _roll_out(run: Run, work: StepInput, most: int) -> tuple[Rollout, ...]:
    """Roll the current document out on at most ``most`` items of the step."""
    batches = _limit_batches(work, most)
    async with run.timer.stage("rollout", step=work.step):
        runner = make_runner(run, work.step, "rollout", sum(map(len, batches)))
        (rollouts,) = await runner.roll_out_batches(batches, [work.skill])
    return rollouts
