"""Stage 2: analysts read minibatches of trajectories and propose edits, suggestions or whole drafts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter

from reflact.concurrency import fan_out
from reflact.config.training import UpdateConfig
from reflact.data import shuffle
from reflact.protocols import Annotator, DecisionLog, R
from reflact.skills.document import is_same_body
from reflact.stages.context import NoReply, StageContext
from reflact.stages.prompt_sections import show_cases, show_skill
from reflact.stages.reply_models import (
    AnalystReply,
    DraftReply,
    PatternReply,
    Proposal,
    SuccessDraftReply,
    SuccessReply,
    check_whole_document,
    draft_reply_type,
    failure_reply_type,
    list_allowed_operations,
    make_analyst_check,
    make_draft_check,
    make_edits_check,
    success_reply_type,
)
from reflact.types import (
    AnalystReport,
    Edit,
    EditKind,
    FailurePattern,
    FrozenModel,
    Item,
    Patch,
    Rollout,
    RolloutSource,
    Skill,
    is_failure,
)

T = TypeVar("T")

SOURCES: tuple[RolloutSource, ...] = ("failure", "success")


class Minibatch(FrozenModel):
    """The trajectories of one analyst call, in the plan's order.

    ``index`` numbers the minibatches of the same source and batch; ``batch`` numbers the step's batches.
    """

    source: RolloutSource
    index: int
    items: tuple[Item, ...]
    rollouts: tuple[Rollout, ...]
    batch: int = 0

    @property
    def part(self) -> str:
        """The part of its call ids: its number among the step's minibatches of its source."""
        return str(self.index) if self.batch == 0 else f"{self.batch}/{self.index}"

    @property
    def empty_report(self) -> AnalystReport:
        """A report on it without findings."""
        ids = tuple(item.id for item in self.items)
        return AnalystReport(source_type=self.source, index=self.index, item_ids=ids, batch=self.batch)


def shuffle_batch(values: Sequence[T], *, seed: int, step: int, batch: int = 0) -> tuple[T, ...]:
    """Return a batch in the order in which it is dealt."""
    return shuffle(values, seed, f"reflect/{step}" if batch == 0 else f"reflect/{step}/{batch}")


def classify_rollout(rollout: Rollout, threshold: float | None) -> RolloutSource | None:
    """Return whether a rollout is a failure or a success; None if it is unmeasured (see ``is_failure``)."""
    if rollout.score is None:
        return None
    return "failure" if is_failure(rollout, threshold) else "success"


class Analysis(NamedTuple, Generic[R]):
    """The call about one minibatch, and how its reply becomes a report.

    Args:
        prompt: The prompt's name.
        variables: The prompt's variables except ``cases`` and ``attempts``.
        reply_type: The type of the reply.
        check: Raises ValueError if a reply does not fit the minibatch or the document.
        report: Adds a valid reply to the minibatch's empty report.
    """

    prompt: str
    variables: Mapping[str, str]
    reply_type: type[R]
    check: Callable[[R], None]
    report: Callable[[AnalystReport, R], AnalystReport]


def make_edit_analysis(
    skill: Skill, *, max_edits: int, operations: tuple[EditKind, ...]
) -> Callable[[Minibatch], Analysis[Any]]:
    """Return the analysis that asks for at most ``max_edits`` edits of the given kinds to a document."""
    kinds = list_allowed_operations(skill, operations)
    variables = {"max_edits": str(max_edits), "document": show_skill(skill)}

    def analysis(batch: Minibatch) -> Analysis[Any]:
        if batch.source == "success":
            return Analysis(
                prompt="analyst_success",
                variables=variables,
                reply_type=success_reply_type(kinds, most=max_edits),
                check=make_edits_check(skill),
                report=_build_success_report,
            )
        cases = len(batch.items)
        return Analysis(
            prompt="analyst_failure",
            variables=variables,
            reply_type=failure_reply_type(kinds, cases=cases, most=max_edits),
            check=make_analyst_check(skill, cases=cases),
            report=_build_failure_report,
        )

    return analysis


@dataclass(frozen=True, kw_only=True)
class Analyst:
    """Reads one minibatch at a time.

    Args:
        context: The collaborators of the calls.
        tokens: Maximum of estimated tokens of trajectories in one prompt.
        analysis: Returns the call about a minibatch.
        notes: Returns the notes on earlier attempts for a minibatch's prompt; empty for none.
    """

    context: StageContext
    tokens: int
    analysis: Callable[[Minibatch], Analysis[Any]]
    notes: Callable[[Minibatch], str]

    async def report(self, batch: Minibatch) -> AnalystReport:
        """Return the report on a minibatch; without a valid reply it holds the reason alone.

        If the trajectories do not fit the model's context, the call is repeated once with half as many tokens.

        Raises:
            ProviderError: The endpoint refused, failed or could not be reached.
        """
        analysis, attempts = self.analysis(batch), self.notes(batch)

        def variables(tokens: int) -> Mapping[str, str]:
            cases = show_cases(batch.rollouts, batch.items, failed=batch.source == "failure", tokens=tokens)
            return {**analysis.variables, "cases": cases, "attempts": attempts}

        reply = await self.context.ask_or_fallback(
            analysis.prompt,
            variables(self.tokens),
            analysis.reply_type,
            purpose=f"analyst_{batch.source}",
            part=batch.part,
            check=analysis.check,
            shorten=lambda: variables(self.tokens // 2),
        )
        if isinstance(reply, NoReply):
            return batch.empty_report.model_copy(update={"no_reply_reason": reply.reason})
        return analysis.report(batch.empty_report, reply)


def build_patterns(blank: AnalystReport, replies: Sequence[PatternReply]) -> tuple[FailurePattern, ...]:
    """Return an analyst's failure patterns with the items of its minibatch."""
    return tuple(
        FailurePattern(type=p.type, count=p.count, description=p.description, item_ids=blank.item_ids)
        for p in replies
    )


def _build_failure_report(blank: AnalystReport, reply: AnalystReply) -> AnalystReport:
    patterns = build_patterns(blank, reply.patterns)
    reasoning = "; ".join(p.description for p in patterns)
    return blank.model_copy(
        update={"patch": _build_patch(blank, reasoning, reply.edits), "patterns": patterns}
    )


def _build_success_report(blank: AnalystReport, reply: SuccessReply) -> AnalystReport:
    return blank.model_copy(update={"patch": _build_patch(blank, reply.strengths, reply.edits)})


def _build_patch(report: AnalystReport, reasoning: str, edits: Sequence[Proposal]) -> Patch:
    def supported(edit: Edit) -> Edit:
        return edit.model_copy(
            update={"source_type": report.source_type, "support_count": len(report.item_ids)}
        )

    return Patch(reasoning=reasoning, edits=tuple(supported(e.edit()) for e in edits))


NOTES_ADAPTER: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])


@dataclass(frozen=True)
class AnnotatingAnalyst:
    """Adds notes to the environment's feedback on failed cases, and passes the minibatch to an analyst.

    Notes are logged before they are used, so that a resumed run uses the same ones.

    Args:
        analyse: Reads the annotated minibatch.
        annotator: Writes the notes.
        decision_log: Where notes are logged.
        step: The step that uses the report.
    """

    analyse: Callable[[Minibatch], Awaitable[AnalystReport]]
    annotator: Annotator
    _: KW_ONLY
    decision_log: DecisionLog
    step: int

    async def report(self, batch: Minibatch) -> AnalystReport:
        """Return the report on a minibatch.

        Raises:
            ProviderError: An endpoint refused, failed or could not be reached.
        """
        if batch.source == "failure":
            cases = tuple(zip(batch.items, batch.rollouts, strict=True))
            batch = batch.model_copy(update={"rollouts": await fan_out(self._annotate, cases)})
        return await self.analyse(batch)

    async def _annotate(self, case: tuple[Item, Rollout]) -> Rollout:
        item, rollout = case
        notes = await self._get_notes(item, rollout)
        if not notes:
            return rollout
        feedback = () if rollout.feedback is None else (rollout.feedback,)
        return rollout.model_copy(update={"feedback": "\n".join((*feedback, *notes))})

    async def _get_notes(self, item: Item, rollout: Rollout) -> tuple[str, ...]:
        label = f"notes/{rollout.key}"
        logged = await self.decision_log.get(self.step, label)
        if logged is None:
            logged = list(await self.annotator.annotate(item, rollout))
            await self.decision_log.put(self.step, label, logged)
        return NOTES_ADAPTER.validate_python(logged)


def list_edit_kinds(config: UpdateConfig) -> tuple[EditKind, ...]:
    """Return the kinds of edit in a step's patches."""
    match config.mode:
        case "patch":
            return config.operations
        case "rewrite":
            return ("suggest",)
        case "full_rewrite":
            return ("rewrite",)


def choose_analysis(
    config: UpdateConfig, skill: Skill, *, max_edits: int
) -> Callable[[Minibatch], Analysis[Any]]:
    """Return the analysis that asks for edits, for suggestions, or for a whole new document."""
    if config.mode == "full_rewrite":
        return _make_draft_analysis(skill)
    edit_analysis = make_edit_analysis(skill, max_edits=max_edits, operations=list_edit_kinds(config))
    if config.mode == "patch":
        return edit_analysis

    def analysis(batch: Minibatch) -> Analysis[Any]:
        return edit_analysis(batch)._replace(prompt=f"suggest_{batch.source}")

    return analysis


def _make_draft_analysis(skill: Skill) -> Callable[[Minibatch], Analysis[Any]]:
    variables = {"document": show_skill(skill)}

    def analysis(batch: Minibatch) -> Analysis[Any]:
        if batch.source == "success":
            return Analysis(
                prompt="draft_success",
                variables=variables,
                reply_type=SuccessDraftReply,
                check=lambda reply: check_whole_document(skill, reply.document),
                report=lambda blank, reply: _build_draft_report(
                    blank, skill, reply.strengths, reply.document
                ),
            )
        cases = len(batch.items)
        return Analysis(
            prompt="draft_failure",
            variables=variables,
            reply_type=draft_reply_type(cases=cases),
            check=make_draft_check(skill, cases=cases),
            report=lambda blank, reply: _build_failure_draft(blank, skill, reply),
        )

    return analysis


def _build_failure_draft(blank: AnalystReport, skill: Skill, reply: DraftReply) -> AnalystReport:
    patterns = build_patterns(blank, reply.patterns)
    reasoning = "; ".join(p.description for p in patterns)
    return _build_draft_report(blank, skill, reasoning, reply.document).model_copy(
        update={"patterns": patterns}
    )


def _build_draft_report(blank: AnalystReport, skill: Skill, reasoning: str, document: str) -> AnalystReport:
    """Return a report with the draft as its only edit, or without edits if the draft changes nothing."""
    draft = Edit(
        op="rewrite", content=document, source_type=blank.source_type, support_count=len(blank.item_ids)
    )
    edits = () if is_same_body(skill.text, document) else (draft,)
    return blank.model_copy(update={"patch": Patch(reasoning=reasoning, edits=edits)})
