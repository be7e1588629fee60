"""The sources of candidates in a run: what each makes of a step, and what it may spend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reflact.errors import QuotaSpent
from reflact.llm.middleware import LLMMiddleware
from reflact.messages import CallId, NoReply, RenderedPrompt, Reply
from reflact.protocols import Proposer, R, StepEvidence
from reflact.search.examples import (
    apply_examples,
    draw_first_sets,
    draw_variants,
    group_examples,
)
from reflact.search.race import Contender
from reflact.search.rewrite import DOCUMENTS, RewriteInput, write_documents
from reflact.skills.document import apply_edits, check_region_text
from reflact.skills.rejected_edits import select_relevant_edits
from reflact.stages.aggregate import aggregate
from reflact.stages.execution_notes import LapseTriage
from reflact.stages.prompt_sections import (
    BYTES_PER_TOKEN,
    fit_conversation,
    join_sections,
    show_buffer,
    show_figures,
    show_json,
    show_memory,
    show_meta,
    show_step_cases,
)
from reflact.stages.reflect import (
    Analyst,
    Minibatch,
    annotate_failures,
    list_edit_kinds,
    roll_out_and_reflect,
)
from reflact.stages.rollout import log_unmeasured
from reflact.stages.select import choose_step_size, select
from reflact.stages.update import update
from reflact.training.proposals import (
    StepInput,
    StepProposal,
    apply_document,
    build_cases,
    build_proposal,
    limit_batches,
    make_contender,
    make_train_runner,
    roll_out_items,
)
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.timing import StageTimer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Case,
    Edit,
    Fallback,
    Item,
    Rollout,
    SelectResult,
    Skill,
    Verdict,
    WorkedExample,
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


CANDIDATES = 6
"""Sets of examples that a step compares."""

CASES = 16
"""Items of a batch that are rolled out for a source other than the stages, if nothing else bounds them."""

TRANSCRIPT_BYTES = 1_500
"""The most bytes of an agent's transcript as an example."""


@dataclass(frozen=True)
class ExamplesSource:
    """Puts worked examples from train items into the document; no model is asked.

    If the environment gives no right answers, or the target works in several turns, the examples are rollouts of the step
    that were graded right.
    """

    runtime: Runtime
    scheduler: RolloutScheduler
    timer: StageTimer

    async def propose(self, work: StepInput) -> StepProposal:
        """Return documents with several sets of examples."""
        train = self.runtime.plan.data.train
        known = find_right_answers(self.runtime, train)
        rollouts: tuple[Rollout, ...] = ()
        if work.examples or not known:
            rollouts = await roll_out_items(
                work, self.scheduler, self.timer, most=CASES if known else len(work.items)
            )
        await log_unmeasured(rollouts, decision_log=work.context.decision_log, step=work.step)
        threshold = self.runtime.config.train.success_threshold
        right = [r for r in rollouts if r.score is not None and not is_failure(r, threshold)]
        messages = {item.id: render_message(self.runtime, item) for item in train}
        pool = {example.item_id: example for example in work.examples if example.item_id in messages}
        for rollout in right if not known or any(len(r.turns) > 2 for r in rollouts) else ():
            pool[rollout.item_id] = _read_example(rollout, messages[rollout.item_id])
        pool = {example.item_id: example for example in known} | pool
        safe = [example for example in pool.values() if _is_safe(example)]
        if not safe:
            reason = (
                "No train item has a right answer that can be written down, and no rollout was graded right."
            )
            return StepProposal(rollouts=rollouts, verdict=Verdict(action="no_patches", reason=reason))
        sets = self._draw(work, safe, {r.item_id for r in rollouts if is_failure(r, threshold)})
        if not sets:
            most = self.runtime.config.search.max_document_tokens
            reason = f"The document has no room for another set of worked examples; search.max_document_tokens is {most}."
            return StepProposal(rollouts=rollouts, verdict=Verdict(action="no_patches", reason=reason))
        return StepProposal(rollouts=rollouts, contenders=tuple(_name_set(work.skill, each) for each in sets))

    def _draw(
        self, work: StepInput, pool: Sequence[WorkedExample], failed: set[str]
    ) -> tuple[tuple[WorkedExample, ...], ...]:
        kinds = {item.id: item.task_type for item in self.runtime.plan.data.train}
        groups = group_examples(pool, [kinds.get(example.item_id) for example in pool])
        config = self.runtime.config
        room = config.search.max_document_tokens * BYTES_PER_TOKEN - count_other_bytes(work.skill)
        seed, label = config.seed, f"examples/{work.step}"
        most = CANDIDATES * (1 + work.is_stalled)
        if not work.examples:
            return draw_first_sets(pool, groups, seed=seed, label=label, most=most, max_bytes=room)
        return draw_variants(
            work.examples, pool, groups, failed, seed=seed, label=label, most=most, max_bytes=room
        )


def count_other_bytes(skill: Skill) -> int:
    """Return the bytes of a document beside its worked examples: other regions count, and the markers around them."""
    placeholder = "x"
    marked = apply_edits(skill, [Edit(op="examples", content=placeholder)]).skill.text
    return len(marked.encode()) - len(placeholder)


def _name_set(skill: Skill, examples: tuple[WorkedExample, ...]) -> Contender:
    count = len(examples)
    label = "1 example" if count == 1 else f"{count} examples"
    return make_contender(label, apply_examples(skill, examples))


def _is_safe(example: WorkedExample) -> bool:
    """Whether the text of an example holds no marker of a protected region."""
    try:
        check_region_text(f"{example.task}\n{example.answer}")
    except ValueError:
        return False
    return bool(example.answer.strip())


def _read_example(rollout: Rollout, message: str) -> WorkedExample:
    """Return a rollout that was graded right as an example; of several turns, the transcript."""
    if len(rollout.turns) <= 2:
        return WorkedExample(item_id=rollout.item_id, task=message, answer=rollout.answer)
    first, *rest = rollout.turns
    return WorkedExample(
        item_id=rollout.item_id, task=first.content, answer=fit_conversation(rest, TRANSCRIPT_BYTES)
    )


def find_right_answers(runtime: Runtime, items: Sequence[Item]) -> tuple[WorkedExample, ...]:
    """Return the items whose right answer the environment can write down, with it."""
    examples = []
    for item in items:
        answers = runtime.plan.environment.list_right_answers(item)
        if answers:
            # A grader may list answers in the form in which it compares them; the reference is as somebody wrote it.
            own = item.reference if isinstance(item.reference, str | int | float) else answers[0]
            task = render_message(runtime, item)
            examples.append(WorkedExample(item_id=item.id, task=task, answer=str(own)))
    return tuple(examples)


def render_message(runtime: Runtime, item: Item) -> str:
    """Return an item's task as the target sees it."""
    message = runtime.plan.environment.render_message(item)
    return show_json(item.input) if message is None else message


@dataclass(frozen=True)
class RewriteSource:
    """Asks the optimizer for whole documents, several at a time."""

    runtime: Runtime
    scheduler: RolloutScheduler
    timer: StageTimer

    async def propose(self, work: StepInput) -> StepProposal:
        """Return the documents that were written."""
        rollouts = await roll_out_items(work, self.scheduler, self.timer, most=CASES)
        cases = build_cases(work.items, rollouts, self.runtime.config.train.success_threshold)
        shown = {case.item.id for case in cases} | {example.item_id for example in work.examples}
        answers = find_right_answers(self.runtime, self.runtime.plan.data.train)
        notes = join_sections(show_buffer(work.attempts), show_meta(work.meta_skill))
        material = RewriteInput(
            cases=cases, answers=tuple(e for e in answers if e.item_id not in shown), notes=notes
        )
        async with self.timer.stage("update", step=work.step):
            rewrites = await write_documents(
                work.skill,
                material,
                context=work.context,
                n=DOCUMENTS * (1 + work.is_stalled),
                seed=self.runtime.config.seed,
            )
        await log_unmeasured(rollouts, decision_log=work.context.decision_log, step=work.step)
        return build_proposal(work.skill, rollouts, rewrites, cases=max(1, len(cases)))


@dataclass(frozen=True)
class ProposerSource:
    """Asks a proposer of the caller, which sees the finished rollouts of the step."""

    runtime: Runtime
    scheduler: RolloutScheduler
    timer: StageTimer
    proposer: Proposer

    async def propose(self, work: StepInput) -> StepProposal:
        """Return the documents of the proposer."""
        step = work.step
        rollouts = await roll_out_items(work, self.scheduler, self.timer, most=len(work.items))
        async with self.timer.stage("update", step=step):
            evidence = await self._collect_evidence(work, rollouts)
            budget = StepAllowance(work, self.scheduler)
            async with self.scheduler.failures.explain(f"the proposer failed in step {step}", step=step):
                rewrites = tuple(await self.proposer.propose(work.skill, evidence, budget))
            await log_unmeasured(rollouts, decision_log=work.context.decision_log, step=step)
        return build_proposal(work.skill, rollouts, rewrites, cases=max(1, len(evidence.cases)))

    async def _collect_evidence(self, work: StepInput, rollouts: Sequence[Rollout]) -> StepEvidence:
        config = self.runtime.config
        cases = build_cases(work.items, rollouts, config.train.success_threshold)
        failed = await self._annotate(work, [case for case in cases if case.failed])
        solved = [case for case in cases if not case.failed and not config.reflect.failure_only]
        order = {case.rollout.key: n for n, case in enumerate(cases)}
        text = show_step_cases(
            [*failed, *solved], (), tokens=config.reflect.trajectory_tokens * len([*failed, *solved])
        )
        return StepEvidence(
            step=work.step,
            cases=tuple(sorted((*failed, *solved), key=lambda case: order[case.rollout.key])),
            attempts=work.attempts,
            rejected_edits=select_relevant_edits(work.rejected_edits, text),
            meta_skill=work.meta_skill,
            task=work.context.task,
        )

    async def _annotate(self, work: StepInput, failed: Sequence[Case]) -> tuple[Case, ...]:
        annotator = self.runtime.plan.annotator
        if annotator is None:
            return tuple(failed)
        batch = Minibatch(
            source="failure",
            index=0,
            items=tuple(case.item for case in failed),
            rollouts=tuple(case.rollout for case in failed),
        )
        async with self.scheduler.failures.explain(
            f"the annotator failed in step {work.step}", step=work.step
        ):
            batch = await annotate_failures(batch, annotator, work.context)
        pairs = zip(batch.items, batch.rollouts, strict=True)
        return tuple(Case(item=item, rollout=rollout, failed=True) for item, rollout in pairs)


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
        skills = [apply_document(self.work.skill, document).skill for document in documents]
        runner = make_train_runner(self.scheduler, self.work, n=len(documents) * len(self.work.items))
        rolled = await runner.roll_out_batches(self.work.batches, skills)
        for rollouts in rolled:
            await log_unmeasured(rollouts, decision_log=self.work.context.decision_log, step=self.work.step)
        return rolled


def name_own_proposer(runtime: Runtime) -> str | None:
    """Return the source name of the caller's proposer; None without one."""
    proposer = runtime.plan.proposer
    return None if proposer is None else runtime.config.search.own or "proposer"


def list_sources(runtime: Runtime) -> tuple[str, ...]:
    """Return the sources of a run, in the order in which they are tried.

    A proposer that is passed in Python takes the place of the default ones, and joins those that are named. A document of
    several files is not rewritten.
    """
    search = runtime.config.search
    named = search.sources if "sources" in search.model_fields_set or runtime.plan.proposer is None else ()
    own = name_own_proposer(runtime)
    if own is not None and own not in named:
        named = (*named, own)
    if runtime.config.skill_files:
        named = tuple(name for name in named if name != "rewrite")
    return named


def open_source(
    name: str, runtime: Runtime, scheduler: RolloutScheduler, timer: StageTimer
) -> ExamplesSource | RewriteSource | EditsSource | ProposerSource:
    """Return the source with a name."""
    if name == "examples":
        return ExamplesSource(runtime, scheduler, timer)
    if name == "rewrite":
        return RewriteSource(runtime, scheduler, timer)
    if name == "edits":
        return EditsSource(runtime, scheduler, timer)
    assert runtime.plan.proposer is not None
    return ProposerSource(runtime, scheduler, timer, runtime.plan.proposer)


class CreditWatch(LLMMiddleware):
    """Passes calls on, and notes if the account has no credit left.

    A step's rollouts raise the same error if the target's account has none, and then no source can go on.
    """

    is_spent = False

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Return the model's reply."""
        try:
            return await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
        except QuotaSpent:
            self.is_spent = True
            raise


async def propose(
    name: str, work: StepInput, runtime: Runtime, scheduler: RolloutScheduler, timer: StageTimer
) -> StepProposal:
    """Return the candidates of a source.

    If the optimizer's account has no credit left, the step has no candidate and the source is barred, so that the run goes
    on with the sources that need no optimizer. That is logged before it is used.

    Raises:
        QuotaSpent: The account has no credit left, and no other source can go on; or the target's account has none.
    """
    log, label = runtime.decision_log, f"no_credit/{name}"
    watch = CreditWatch(work.context.llm)
    work = replace(work, context=replace(work.context, llm=watch))
    reason = await log.get(work.step, label)
    if reason is None:
        try:
            return await open_source(name, runtime, scheduler, timer).propose(work)
        except QuotaSpent as error:
            if not watch.is_spent or "examples" not in list_sources(runtime):
                raise
            reason = str(error)
            await log.put(work.step, label, reason)
    verdict = Verdict(action="no_patches", reason=f"The optimizer's account has no credit left: {reason}")
    barred = tuple(source for source in list_sources(runtime) if source != "examples")
    return StepProposal(verdict=verdict, barred=barred)
