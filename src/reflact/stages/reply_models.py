"""Reply types of the optimizer's calls, and their checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from reflact.messages import ReplyModel
from reflact.protocols import R
from reflact.skills.document import apply_edits, editable_text, is_same_body
from reflact.types import Edit, EditKind, Operation, Skill

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


class SuggestionReply(ReplyModel):
    """One thing that a revision of the document should do."""

    content: str = Field(
        min_length=1,
        max_length=2000,
        description="What to add, change or remove in the document, and the rule it should state then.",
    )


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


class MergedAppend(ReplyModel):
    """An addition that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")
    content: str = Field(min_length=1, max_length=4000, description="The text of the rule, and nothing else.")


class MergedSuggestion(ReplyModel):
    """A suggestion that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")
    content: str = Field(min_length=1, max_length=2000, description="What the revision should do.")


class MergedEdit(EditReply):
    """A change that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")


Proposal = AppendReply | EditReply | SuggestionReply
Merge = MergedAppend | MergedEdit | MergedSuggestion


def build_edit(reply: Proposal | Merge) -> Edit:
    """Return a proposed or merged change as an edit."""
    if isinstance(reply, EditReply):
        target = "" if reply.op == "append" else reply.target
        return Edit(op=reply.op, target=target, content="" if reply.op == "delete" else reply.content)
    op: EditKind = "append" if isinstance(reply, AppendReply | MergedAppend) else "suggest"
    return Edit(op=op, content=reply.content)


Patterns = Annotated[
    list[PatternReply],
    Field(min_length=1, max_length=3, description="The kinds of mistake, most frequent first."),
]
NewDocument = Annotated[
    str, Field(min_length=1, max_length=20000, description="The whole new document, as Markdown text.")
]


class AnalystReply(ReplyModel):
    """What an analyst makes of cases that went wrong."""

    version: ClassVar[int] = 1
    patterns: Patterns
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
    patterns: Patterns
    document: NewDocument


class SuccessDraftReply(ReplyModel):
    """A whole new document, written from cases that went well."""

    version: ClassVar[int] = 1
    strengths: str = Field(max_length=250, description="What the right answers have in common.")
    document: NewDocument


class DraftMergeReply(ReplyModel):
    """One document made from several drafts."""

    version: ClassVar[int] = 1
    document: NewDocument


Proposals = AnalystReply | SuccessReply | DraftReply | SuccessDraftReply
"""The replies of analysts."""


def narrow_reply_type(base: type[R], **fields: tuple[Any, Mapping[str, Any]]) -> type[R]:
    """Return a reply type with narrower fields, each given as its type and the arguments of ``Field``.

    The bounds become part of the schema, so that samplers that follow the schema cannot leave them.
    """
    narrowed: dict[str, Any] = {
        name: (kind, Field(description=base.model_fields[name].description, **bounds))
        for name, (kind, bounds) in fields.items()
    }
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **narrowed)


@lru_cache(maxsize=64)
def draft_reply_type(*, cases: int) -> type[DraftReply]:
    """Return the reply type of a draft from ``cases`` failures."""
    return narrow_reply_type(DraftReply, patterns=_pattern_field(cases))


@lru_cache(maxsize=64)
def failure_reply_type(operations: tuple[EditKind, ...], *, cases: int, most: int) -> type[AnalystReply]:
    """Return the reply type for ``cases`` failures with at most ``most`` edits of the given kinds.

    Several cases share a pattern. So there are at most half as many patterns as cases, and at most three.
    """
    edits = (list[_edit_type(operations)], {"min_length": min(1, most), "max_length": most})  # type: ignore[misc]
    return narrow_reply_type(AnalystReply, patterns=_pattern_field(cases), edits=edits)


@lru_cache(maxsize=64)
def success_reply_type(operations: tuple[EditKind, ...], *, most: int) -> type[SuccessReply]:
    """Return the reply type for successes with at most ``most`` edits of the given kinds."""
    edits = (list[_edit_type(operations)], {"min_length": 0, "max_length": most})  # type: ignore[misc]
    return narrow_reply_type(SuccessReply, edits=edits)


@lru_cache(maxsize=64)
def merge_reply_type(operations: tuple[EditKind, ...], *, proposals: int) -> type[MergeReply]:
    """Return the reply type of a merge of ``proposals`` numbered edits."""
    merged = _edit_type(operations, sources=proposals)
    return narrow_reply_type(MergeReply, edits=(list[merged], {"min_length": 1, "max_length": proposals}))  # type: ignore[valid-type]


@lru_cache(maxsize=64)
def rank_reply_type(*, proposals: int, budget: int) -> type[RankReply]:
    """Return the reply type of a ranking that selects ``budget`` of ``proposals`` numbered edits."""
    number = Annotated[int, Field(ge=1, le=proposals)]
    return narrow_reply_type(RankReply, selected=(list[number], {"min_length": budget, "max_length": budget}))


def list_allowed_operations(skill: Skill, allowed: tuple[EditKind, ...]) -> tuple[EditKind, ...]:
    """Return the kinds of edit that a document admits; an empty document has no text for an anchor."""
    return allowed if allowed == ("suggest",) or editable_text(skill.text).strip() else ("append",)


def _pattern_field(cases: int) -> tuple[Any, Mapping[str, Any]]:
    return list[PatternReply], {"min_length": 1, "max_length": max(1, min(3, cases // 2))}


def _edit_type(operations: tuple[EditKind, ...], sources: int | None = None) -> type[ReplyModel]:
    base: type[ReplyModel]
    fields: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    if operations == ("suggest",):
        base = SuggestionReply if sources is None else MergedSuggestion
    elif operations == ("append",):
        base = AppendReply if sources is None else MergedAppend
    else:
        base = EditReply if sources is None else MergedEdit
        fields["op"] = (Literal[operations], {})
    if sources is not None:
        number = Annotated[int, Field(ge=1, le=sources)]
        fields["sources"] = (list[number], {"min_length": 1, "max_length": sources})
    return narrow_reply_type(base, **fields)


def check_reply(
    reply: Proposals | MergeReply | DraftMergeReply, *, skill: Skill, cases: int | None = None
) -> None:
    """Refuse a reply that does not fit its ``cases`` or the document.

    Raises:
        ValueError: A pattern claims more cases than there are, or an edit or a draft cannot be applied.
    """
    if cases is not None and isinstance(reply, AnalystReply | DraftReply):
        high = [p.type for p in reply.patterns if p.count > cases]
        if high:
            raise ValueError(f"there are {cases} cases; the count of {', '.join(high)} is larger")
    if isinstance(reply, AnalystReply | SuccessReply | MergeReply):
        _check_applicable(skill, reply.edits)
    else:
        check_whole_document(skill, reply.document)


def _check_applicable(skill: Skill, edits: Sequence[Proposal | Merge]) -> None:
    proposed = [build_edit(e) for e in edits]
    results = apply_edits(skill, [edit for edit in proposed if edit.op != "suggest"]).results
    wrong = [
        f"edit {n} ({r.edit.op}): {r.reason}" for n, r in enumerate(results, 1) if r.status == "rejected"
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_ranking(reply: RankReply) -> None:
    """Refuse a ranking that selects a number twice."""
    if len(set(reply.selected)) != len(reply.selected):
        raise ValueError("a number is selected twice")


def check_whole_document(skill: Skill, document: str) -> None:
    """Refuse a text that cannot replace the document's unprotected text; the same text is valid.

    Tags that fence material in prompts are refused, because small models copy them along with the text.
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
