"""What optimizers are asked to fill in, and the rules that a well-formed reply must still keep."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, create_model

from reflact.errors import ContextOverflow, ReplyError
from reflact.messages import CallId, RenderedPrompt, Reply, ReplyModel
from reflact.protocols import LLM, DecisionLog
from reflact.skills.document import apply_edits, editable_text, is_same_body
from reflact.types import Edit, EditKind, FrozenModel, Operation, Skill

R = TypeVar("R", bound=ReplyModel)


TAG = re.compile(r"</?(?:document|proposal_\d+|case_\d+|attempts|rejected|advice|guidance|notes)_*>")


"""The tags that fence material in prompts."""


class PatternReply(ReplyModel):
    """A kind of failure that several cases share."""

    type: str = Field(min_length=1, max_length=80, description="The kind of task that was answered wrongly.")
    description: str = Field(
        min_length=1, max_length=250, description="What the right answers have that the wrong ones lack."
    )
    count: int = Field(ge=1, description="How many of the cases show it.")


class AppendReply(ReplyModel):
    """One addition to the document."""

    content: str = Field(
        min_length=1,
        max_length=4000,
        description="The rule: the kind of task, then a right answer to imitate.",
    )

    def edit(self) -> Edit:
        """Return the addition as a value of its own."""
        return Edit(op="append", content=self.content)


class SuggestionReply(ReplyModel):
    """One thing that a revision of the document should do."""

    content: str = Field(
        min_length=1,
        max_length=2000,
        description="What to add, change or remove in the document, and the rule it should state then.",
    )

    def edit(self) -> Edit:
        """Return the suggestion as a value of its own."""
        return Edit(op="suggest", content=self.content)


class EditReply(ReplyModel):
    """One change to the document."""

    op: Operation = Field(
        description="append: add content at the end. insert_after: add content after target's line. "
        "replace: put content in place of target. delete: remove target."
    )
    target: str = Field(
        description="Text copied exactly from the document, where it occurs once. Empty for append."
    )
    content: str = Field(
        max_length=4000,
        description="The rule: the kind of task, then a right answer to imitate. Empty for delete.",
    )

    def edit(self) -> Edit:
        """Return the edit as a value of its own."""
        target = "" if self.op == "append" else self.target
        return Edit(op=self.op, target=target, content="" if self.op == "delete" else self.content)


class MergedAppend(ReplyModel):
    """An addition that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")
    content: str = Field(min_length=1, max_length=4000, description="The text of the rule, and nothing else.")

    def edit(self) -> Edit:
        """Return the addition as a value of its own."""
        return Edit(op="append", content=self.content)


class MergedSuggestion(ReplyModel):
    """A suggestion that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")
    content: str = Field(min_length=1, max_length=2000, description="What the revision should do.")

    def edit(self) -> Edit:
        """Return the suggestion as a value of its own."""
        return Edit(op="suggest", content=self.content)


class MergedEdit(EditReply):
    """A change that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")


Proposal = AppendReply | EditReply | SuggestionReply


Merge = MergedAppend | MergedEdit | MergedSuggestion


class AnalystReply(ReplyModel):
    """What an analyst makes of cases that went wrong."""

    version: ClassVar[int] = 1
    patterns: list[PatternReply] = Field(
        min_length=1, max_length=3, description="The kinds of mistake, most frequent first."
    )
    edits: Sequence[Proposal] = Field(description="Changes to the document that would have helped.")


class SuccessReply(ReplyModel):
    """What an analyst learns from cases that went well."""

    version: ClassVar[int] = 1
    strengths: str = Field(max_length=250, description="What the right answers have in common.")
    edits: Sequence[Proposal] = Field(
        description="Changes for what the document does not say yet; may be empty."
    )


class MergeReply(ReplyModel):
    """One list of changes made from several."""

    version: ClassVar[int] = 1
    edits: Sequence[Merge] = Field(description="The changes after merging.")


class RankReply(ReplyModel):
    """Which proposals to apply, best first."""

    version: ClassVar[int] = 1
    reasoning: str = Field(max_length=250, description="Why these matter most, in one sentence.")
    selected: list[int] = Field(description="Numbers of the chosen proposals, most useful first.")


class DraftReply(ReplyModel):
    """A whole new document, written from cases that went wrong."""

    version: ClassVar[int] = 1
    patterns: list[PatternReply] = Field(
        min_length=1, max_length=3, description="The kinds of mistake, most frequent first."
    )
    document: str = Field(
        min_length=1, max_length=20000, description="The whole new document, as Markdown text."
    )


class SuccessDraftReply(ReplyModel):
    """A whole new document, written from cases that went well."""

    version: ClassVar[int] = 1
    strengths: str = Field(max_length=250, description="What the right answers have in common.")
    document: str = Field(
        min_length=1, max_length=20000, description="The whole new document, as Markdown text."
    )


class DraftMergeReply(ReplyModel):
    """One document made from several drafts."""

    version: ClassVar[int] = 1
    document: str = Field(
        min_length=1, max_length=20000, description="The whole new document, as Markdown text."
    )


@lru_cache(maxsize=64)
def draft_reply_type(*, cases: int) -> type[DraftReply]:
    """Return the reply type for a draft from ``cases`` failures; see ``analysing``."""
    return create_model(
        "DraftReply", __base__=DraftReply, __doc__=DraftReply.__doc__, patterns=_patterns(DraftReply, cases)
    )


@lru_cache(maxsize=64)
def failure_reply_type(operations: tuple[EditKind, ...], *, cases: int, most: int) -> type[AnalystReply]:
    """Return the reply type for ``cases`` failures with at most ``most`` edits of the given kinds.

    A pattern is what several cases share, so there are half as many at most, and never more than three.
    The bounds stand in the schema: samplers that follow one cannot leave them.
    """
    wanted = create_model(
        "AnalystReply",
        __base__=AnalystReply,
        __doc__=AnalystReply.__doc__,
        patterns=_patterns(AnalystReply, cases),
    )
    return _with_edits(wanted, _edit_type(operations, sources=None), min(1, most), most)


@lru_cache(maxsize=64)
def success_reply_type(operations: tuple[EditKind, ...], *, most: int) -> type[SuccessReply]:
    """Return the reply type for successes with at most ``most`` edits; see ``analysing``."""
    return _with_edits(SuccessReply, _edit_type(operations, sources=None), 0, most)


@lru_cache(maxsize=64)
def merge_reply_type(operations: tuple[EditKind, ...], *, proposals: int) -> type[MergeReply]:
    """Return the reply type of a merge of numbered proposals; see ``analysing``."""
    return _with_edits(MergeReply, _edit_type(operations, sources=proposals), 1, proposals)


@lru_cache(maxsize=64)
def rank_reply_type(*, proposals: int, budget: int) -> type[RankReply]:
    """Return the reply type of a ranking of numbered proposals; see ``analysing``."""
    number = Annotated[int, Field(ge=1, le=proposals)]
    selected = Field(
        min_length=budget, max_length=budget, description=RankReply.model_fields["selected"].description
    )
    return create_model(
        "RankReply", __base__=RankReply, __doc__=RankReply.__doc__, selected=(list[number], selected)
    )


def list_allowed_operations(skill: Skill, allowed: tuple[EditKind, ...]) -> tuple[EditKind, ...]:
    """Return the kinds of edit that a document admits: without text there is nothing to anchor to."""
    return allowed if allowed == ("suggest",) or editable_text(skill.text).strip() else ("append",)


def _patterns(reply_type: type[ReplyModel], cases: int) -> tuple[Any, Any]:
    about = reply_type.model_fields["patterns"].description
    most = max(1, min(3, cases // 2))
    return list[PatternReply], Field(min_length=1, max_length=most, description=about)


def _edit_type(operations: tuple[EditKind, ...], sources: int | None) -> type[ReplyModel]:
    base: type[ReplyModel]
    fields: dict[str, Any] = {}
    if operations == ("suggest",):
        base = SuggestionReply if sources is None else MergedSuggestion
    elif operations == ("append",):
        base = AppendReply if sources is None else MergedAppend
    else:
        base = EditReply if sources is None else MergedEdit
        fields["op"] = (Literal[operations], Field(description=base.model_fields["op"].description))
    if sources is not None:
        number = Annotated[int, Field(ge=1, le=sources)]
        about = base.model_fields["sources"].description
        fields["sources"] = (list[number], Field(min_length=1, max_length=sources, description=about))
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)


def _with_edits(reply_type: type[R], edit_type: type[ReplyModel], least: int, most: int) -> type[R]:
    about = reply_type.model_fields["edits"].description
    edits = Field(min_length=least, max_length=most, description=about)
    return create_model(
        reply_type.__name__,
        __base__=reply_type,
        __doc__=reply_type.__doc__,
        edits=(list[edit_type], edits),  # type: ignore[valid-type]
    )


def check_applicable(skill: Skill, edits: Sequence[Proposal | Merge]) -> None:
    """Refuse edits that the document would reject.

    Raises:
        ValueError: Names each rejected edit and the reason.
    """
    proposed = [e.edit() for e in edits]
    results = apply_edits(skill, [edit for edit in proposed if edit.op != "suggest"]).results
    wrong = [
        f"edit {n} ({r.edit.op}): {r.reason}" for n, r in enumerate(results, 1) if r.status == "rejected"
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def make_analyst_check(skill: Skill, *, cases: int, max_edits: int) -> Callable[[AnalystReply], None]:
    """Return the check of a failure analyst's reply on ``cases`` trajectories."""

    def check(reply: AnalystReply) -> None:
        check_pattern_counts(reply.patterns, cases)
        check_edit_count(reply.edits, max_edits)
        check_applicable(skill, reply.edits)

    return check


def make_success_check(skill: Skill, *, max_edits: int) -> Callable[[SuccessReply], None]:
    """Return the check of a success analyst's reply."""

    def check(reply: SuccessReply) -> None:
        check_edit_count(reply.edits, max_edits)
        check_applicable(skill, reply.edits)

    return check


def make_merge_check(skill: Skill, *, proposals: int) -> Callable[[MergeReply], None]:
    """Return the check of a merge of ``proposals`` numbered edits."""

    def check(reply: MergeReply) -> None:
        check_edit_count(reply.edits, proposals)
        check_numbers([n for edit in reply.edits for n in edit.sources], proposals)
        check_applicable(skill, reply.edits)

    return check


def make_rank_check(*, proposals: int, budget: int) -> Callable[[RankReply], None]:
    """Return the check of a ranking: exactly ``budget`` distinct numbers between 1 and ``proposals``."""

    def check(reply: RankReply) -> None:
        check_numbers(reply.selected, proposals)
        if len(set(reply.selected)) != len(reply.selected):
            raise ValueError("a number is selected twice")
        if len(reply.selected) != budget:
            raise ValueError(f"select exactly {budget} numbers, not {len(reply.selected)}")

    return check


def make_draft_check(skill: Skill, *, cases: int) -> Callable[[DraftReply], None]:
    """Return the check of a whole draft from ``cases`` failures."""

    def check(reply: DraftReply) -> None:
        check_pattern_counts(reply.patterns, cases)
        check_whole_document(skill, reply.document)

    return check


def check_pattern_counts(patterns: Sequence[PatternReply], cases: int) -> None:
    """Refuse patterns that claim more cases than there are.

    Raises:
        ValueError: Names them.
    """
    high = [p.type for p in patterns if p.count > cases]
    if high:
        raise ValueError(f"there are {cases} cases; the count of {', '.join(high)} is larger")


def check_whole_document(skill: Skill, document: str) -> None:
    """Refuse a text that cannot take the place of the document's unprotected text.

    The same text is no mistake: it changes nothing, and the step says so. Tags that fence material in prompts
    are one: small models copy them along with the text.

    Raises:
        ValueError: Says what stands in the way.
    """
    if is_same_body(skill.text, document):
        return
    copied = sorted({tag for tag in TAG.findall(document) if tag not in skill.text})
    if copied:
        tags = ", ".join(copied)
        raise ValueError(f"the document holds {tags}, which only marks the material; leave it out")
    (result,) = apply_edits(skill, [Edit(op="rewrite", content=document)]).results
    if result.status == "rejected":
        raise ValueError(f"the new document cannot be used: {result.reason}")


def check_edit_count(edits: Sequence[Proposal | Merge], limit: int) -> None:
    """Refuse more edits than are allowed.

    Raises:
        ValueError: There are more than ``limit``.
    """
    if len(edits) > limit:
        raise ValueError(f"at most {limit} edits are allowed, not {len(edits)}")


def check_numbers(numbers: Sequence[int], last: int) -> None:
    """Refuse numbers outside 1..last.

    Raises:
        ValueError: Names the numbers.
    """
    wrong = [str(n) for n in numbers if not 1 <= n <= last]
    if wrong:
        raise ValueError(f"numbers go from 1 to {last}; {', '.join(wrong)} is not among them")


class NoReply(FrozenModel):
    """A decision that could not be had, and why."""

    reason: str


async def ask_or_fallback(
    llm: LLM,
    prompt: RenderedPrompt,
    reply_type: type[R],
    *,
    call_id: CallId,
    check: Callable[[R], None] | None = None,
    decision_log: DecisionLog,
    shorten: Callable[[], RenderedPrompt] | None = None,
) -> Reply[R] | NoReply:
    """Return a model's reply, or why there is none: no attempt was valid, or the prompt was too long.

    The absence is journalled before it is returned; a restart meets it again without asking. Where the
    prompt is too long, ``shorter`` is asked for another one, once; that is journalled as well, so that a
    restart asks with the same prompt.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached; nothing is journalled.
        ValueError: The sample belongs to no step.
    """
    if call_id.step is None:
        raise ValueError(f"{call_id.label} belongs to no step, so its absence cannot be journalled")
    step, refused, shrunk = call_id.step, f"no_reply/{call_id.label}", f"shortened_prompt/{call_id.label}"
    noted = await decision_log.get(step, refused)
    if noted is not None:
        return NoReply(reason=str(noted))
    if shorten is not None and await decision_log.get(step, shrunk) is not None:
        prompt, shorten = shorten(), None
    try:
        try:
            return await llm.ask(prompt, reply_type, call_id=call_id, check=check)
        except ContextOverflow as error:
            if shorten is None:
                raise
            await decision_log.put(step, shrunk, str(error))
        return await llm.ask(shorten(), reply_type, call_id=call_id, check=check)
    except (ReplyError, ContextOverflow) as error:
        await decision_log.put(step, refused, str(error))
        return NoReply(reason=str(error))
