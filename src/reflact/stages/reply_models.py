"""Reply types of the optimizer's calls, and their checks.

Types whose names begin with ``Reasoned`` belong to the prompts of the default profile: they begin with
reasoning in free text and bound no length; the model's ``max_tokens`` does. The others belong to the profile
``small``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model

from reflact.messages import ReplyModel
from reflact.protocols import R
from reflact.skills.document import apply_edits, editable_text, is_same_body
from reflact.skills.rejected_edits import content_words
from reflact.stages.prompt_sections import show_json
from reflact.types import Edit, EditKind, Item, Operation, Skill

PLACEHOLDER = re.compile(
    r"</?(?:document|proposal_\d+|case_\d+|answers|attempts|rejected|advice|guidance|notes|background|figures|evidence"
    r"|task|remark|(?:right|wrong)[ _-]answer)_*>",
    re.IGNORECASE,
)
"""The tags that fence material in prompts, and the names of a case's parts as tags."""

UNSEEN_WORDS = re.compile(r"\b(?:background|wrong answers?)\b", re.IGNORECASE)
"""Words for what the optimizer is shown and the target is not."""

WRAPPED_DOCUMENT = re.compile(r"\s*<(document_*)>\n?(.*?)\n?</\1>\s*", re.DOTALL)
"""A whole text in the tags of a document."""

MIN_QUOTED_LENGTH = 24
"""The length from which a reference in a text counts as quoted, whatever stands beside it."""

MIN_RULE_WORDS = 4
"""Content words that a rule has at least, beside a quoted answer and its question."""

ANSWER_WORDS = content_words(
    "answer answers answered asked case cases correct example examples exactly follow following give gives "
    "given input like output question questions reply respond response result return returns right such task "
    "tasks this write asks ask kind type"
)
"""Words that speak of answering, not of a rule."""


class PatternReply(ReplyModel):
    """A kind of failure that several cases share."""

    type: str = Field(min_length=1, max_length=80, description="The kind of task that was answered wrongly.")
    description: str = Field(
        min_length=1, max_length=250, description="What the right answers have that the wrong ones lack."
    )
    count: int = Field(ge=1, description="How many of the cases show it.")


class ReasonedPattern(ReplyModel):
    """A cause of failure that some cases show."""

    type: str = Field(min_length=1, description="A short name of the cause.")
    description: str = Field(
        min_length=1, description="The cause: what the agent did not know or do, and what followed from it."
    )
    cases: list[int] = Field(description="Numbers of the cases that show it.")


class AppendReply(ReplyModel):
    """One addition to the document."""

    content: str = Field(
        min_length=1,
        description="The rule: the kind of task, then a right answer to imitate.",
    )


class SuggestionReply(ReplyModel):
    """One thing that a revision of the document should do."""

    content: str = Field(
        min_length=1,
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
        description="The rule: the kind of task, then a right answer to imitate. Empty for delete."
    )


Evidence = Annotated[
    str, Field(min_length=1, description="The cases that ask for it, and what in them does.")
]
INSTRUCTION = "The instruction, in words that hold for new tasks"


class ReasonedAppend(AppendReply):
    """One addition to the document, with its evidence."""

    content: str = Field(min_length=1, description=f"{INSTRUCTION}, as Markdown.")
    evidence: Evidence


class ReasonedSuggestion(SuggestionReply):
    """One thing that a revision of the document should do, with its evidence."""

    content: str = Field(
        min_length=1, description="What to add, change, move or remove, with the new instruction in full."
    )
    evidence: Evidence


class ReasonedEdit(EditReply):
    """One change to the document, with its evidence."""

    content: str = Field(description=f"{INSTRUCTION}, as Markdown. Empty for delete.")
    evidence: Evidence


class MergedAppend(ReplyModel):
    """An addition that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")
    content: str = Field(min_length=1, description="The text of the rule, and nothing else.")


class MergedSuggestion(ReplyModel):
    """A suggestion that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")
    content: str = Field(min_length=1, description="What the revision should do.")


class MergedEdit(EditReply):
    """A change that stands for one or more of the proposed ones."""

    sources: list[int] = Field(description="Numbers of the proposals that this one stands for.")


class ReasonedMergedEdit(MergedEdit):
    """A change that stands for one or more of the proposed ones."""

    content: str = Field(description=f"{INSTRUCTION}, as Markdown. Empty for delete.")


Proposal = AppendReply | EditReply | SuggestionReply
Merge = MergedAppend | MergedEdit | MergedSuggestion


def unwrap_document(text: str) -> str:
    """Return a text without the tags of a document if they enclose all of it."""
    wrapped = WRAPPED_DOCUMENT.fullmatch(text)
    return wrapped[2] if wrapped else text


def build_edit(reply: Proposal | Merge) -> Edit:
    """Return a proposed or merged change as an edit."""
    evidence = ""
    if isinstance(reply, ReasonedAppend | ReasonedEdit | ReasonedSuggestion):
        evidence = reply.evidence
    if isinstance(reply, EditReply):
        target = "" if reply.op == "append" else reply.target
        content = "" if reply.op == "delete" else unwrap_document(reply.content)
        return Edit(op=reply.op, target=target, content=content, evidence=evidence)
    op: EditKind = "append" if isinstance(reply, AppendReply | MergedAppend) else "suggest"
    return Edit(op=op, content=unwrap_document(reply.content), evidence=evidence)


Patterns = Annotated[
    Sequence[PatternReply | ReasonedPattern],
    Field(description="The kinds of mistake, most frequent first."),
]


NewDocument = Annotated[
    str,
    Field(min_length=1, description="The whole new document, as Markdown text."),
    AfterValidator(unwrap_document),
]


class Reasoned(ReplyModel):
    """A reply that begins with its reasoning."""

    reasoning: str = Field(
        min_length=1, description="The reasoning in free text, as long as it needs to be, before the rest."
    )


class AnalystReply(ReplyModel):
    """What an analyst makes of cases that went wrong."""

    version: ClassVar[int] = 1
    patterns: Patterns
    edits: Sequence[Proposal] = Field(description="Changes to the document that would have helped.")


class RuleReply(ReplyModel):
    """The one rule that cases which went wrong ask for; small models reply to this better than to lists."""

    version: ClassVar[int] = 1
    difference: str = Field(min_length=1, description="What all right answers have and the wrong ones lack.")
    rule: str = Field(
        min_length=1,
        description="What the instructions should say to the assistant about every task of this kind, such as: Answer "
        "with ...",
    )

    @property
    def edits(self) -> tuple[AppendReply, ...]:
        """The rule as an addition to the document."""
        return (AppendReply(content=self.rule),)


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


class ReasonedAnalystReply(AnalystReply, Reasoned):
    """What an analyst makes of cases that went wrong, reasoning first."""


class ReasonedSuccessReply(Reasoned):
    """What an analyst learns from cases that went well, reasoning first."""

    edits: Sequence[Proposal] = Field(
        description="Changes for what the document does not say yet; may be empty."
    )


class ReasonedMergeReply(MergeReply, Reasoned):
    """One list of changes made from several, with the reasons for what was kept."""


class ReasonedRankReply(RankReply):
    """Which proposals to apply, best first, with the reasons."""

    reasoning: str = Field(min_length=1, description="How the proposals compare, before the choice.")


class ReasonedDraftReply(DraftReply, Reasoned):
    """A whole new document, written from cases that went wrong, reasoning first."""


class ReasonedSuccessDraftReply(Reasoned):
    """A whole new document, written from cases that went well, reasoning first."""

    document: NewDocument


class ReasonedDraftMergeReply(DraftMergeReply, Reasoned):
    """One document made from several drafts, with the reasons for what was kept."""


Proposals = (
    AnalystReply
    | RuleReply
    | SuccessReply
    | DraftReply
    | SuccessDraftReply
    | ReasonedSuccessReply
    | ReasonedSuccessDraftReply
)
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
def draft_reply_type(*, cases: int, reasoned: bool = False) -> type[DraftReply]:
    """Return the reply type of a draft from ``cases`` failures."""
    base = ReasonedDraftReply if reasoned else DraftReply
    return narrow_reply_type(base, patterns=_pattern_field(cases, reasoned=reasoned))


@lru_cache(maxsize=64)
def failure_reply_type(
    operations: tuple[EditKind, ...], *, cases: int, most: int, reasoned: bool = False
) -> type[AnalystReply]:
    """Return the reply type for ``cases`` failures with at most ``most`` edits of the given kinds.

    There is at least one pattern and one edit. Several cases share a pattern, so small models name at most half
    as many patterns as cases, and at most three.
    """
    kind = _edit_type(operations, reasoned=reasoned)
    edits = (list[kind], {"min_length": min(1, most), "max_length": most})  # type: ignore[valid-type]
    base = ReasonedAnalystReply if reasoned else AnalystReply
    return narrow_reply_type(base, patterns=_pattern_field(cases, reasoned=reasoned), edits=edits)


@lru_cache(maxsize=64)
def success_reply_type(
    operations: tuple[EditKind, ...], *, most: int, reasoned: bool = False
) -> type[SuccessReply] | type[ReasonedSuccessReply]:
    """Return the reply type for successes with at most ``most`` edits of the given kinds."""
    edits = (list[_edit_type(operations, reasoned=reasoned)], {"min_length": 0, "max_length": most})  # type: ignore[misc]
    if reasoned:
        return narrow_reply_type(ReasonedSuccessReply, edits=edits)
    return narrow_reply_type(SuccessReply, edits=edits)


@lru_cache(maxsize=64)
def merge_reply_type(
    operations: tuple[EditKind, ...], *, proposals: int, reasoned: bool = False
) -> type[MergeReply]:
    """Return the reply type of a merge of ``proposals`` numbered edits."""
    merged = _edit_type(operations, sources=proposals, reasoned=reasoned)
    edits = (list[merged], {"min_length": 1, "max_length": proposals})  # type: ignore[valid-type]
    return narrow_reply_type(ReasonedMergeReply if reasoned else MergeReply, edits=edits)


@lru_cache(maxsize=64)
def rank_reply_type(*, proposals: int, budget: int, reasoned: bool = False) -> type[RankReply]:
    """Return the reply type of a ranking that selects ``budget`` of ``proposals`` numbered edits."""
    number = Annotated[int, Field(ge=1, le=proposals)]
    selected = (list[number], {"min_length": budget, "max_length": budget})
    return narrow_reply_type(ReasonedRankReply if reasoned else RankReply, selected=selected)


def list_allowed_operations(skill: Skill, allowed: tuple[EditKind, ...]) -> tuple[EditKind, ...]:
    """Return the kinds of edit that a document admits; an empty document has no text for an anchor."""
    return allowed if allowed == ("suggest",) or editable_text(skill.text).strip() else ("append",)


def _pattern_field(cases: int, *, reasoned: bool) -> tuple[Any, Mapping[str, Any]]:
    if not reasoned:
        return list[PatternReply], {"min_length": 1, "max_length": max(1, min(3, cases // 2))}
    number = Annotated[int, Field(ge=1, le=cases)]
    pattern = narrow_reply_type(ReasonedPattern, cases=(list[number], {"min_length": 1, "max_length": cases}))
    return list[pattern], {"min_length": 1, "max_length": cases}  # type: ignore[valid-type]


def _edit_type(
    operations: tuple[EditKind, ...], *, sources: int | None = None, reasoned: bool
) -> type[ReplyModel]:
    bases: tuple[type[ReplyModel], type[ReplyModel], type[ReplyModel]]
    fields: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    if operations == ("suggest",):
        bases = SuggestionReply, ReasonedSuggestion, MergedSuggestion
    elif operations == ("append",):
        bases = AppendReply, ReasonedAppend, MergedAppend
    else:
        bases = EditReply, ReasonedEdit, ReasonedMergedEdit if reasoned else MergedEdit
        fields["op"] = (Literal[operations], {})
    small, with_reason, merged = bases
    if sources is not None:
        number = Annotated[int, Field(ge=1, le=sources)]
        fields["sources"] = (list[number], {"min_length": 1, "max_length": sources})
        return narrow_reply_type(merged, **fields)
    return narrow_reply_type(with_reason if reasoned else small, **fields)


def check_reply(
    reply: Proposals | MergeReply | DraftMergeReply,
    *,
    skill: Skill,
    cases: int | None = None,
    items: Sequence[Item] = (),
    material: Iterable[str] = (),
) -> None:
    """Refuse a reply that does not fit its ``cases`` or the document.

    Args:
        reply: What the optimizer says.
        skill: The document.
        cases: How many failures were shown.
        items: The items whose answers an edit may not record.
        material: What the cases or the proposals say, without the tags around them.

    Raises:
        ValueError: A pattern claims more cases than there are, an edit or a draft cannot be applied, an edit only
            records the answer of one of ``items``, a rule is in the document already, or a text holds a placeholder of
            the prompt.
    """
    if cases is not None and isinstance(reply, AnalystReply | DraftReply):
        high = [p.type for p in reply.patterns if isinstance(p, PatternReply) and p.count > cases]
        if high:
            raise ValueError(f"there are {cases} cases; the count of {', '.join(high)} is larger")
    if isinstance(reply, AnalystReply | RuleReply | SuccessReply | ReasonedSuccessReply | MergeReply):
        if isinstance(reply, RuleReply):
            _check_rule(reply.rule, skill, material)
        _check_applicable(skill, reply.edits)
        check_rules(reply.edits, items)
        for number, edit in enumerate(reply.edits, 1):
            _check_placeholders(f"edit {number}", unwrap_document(edit.content), (skill.text, *material))
    else:
        check_whole_document(skill, reply.document, material)


def _check_rule(rule: str, skill: Skill, material: Iterable[str]) -> None:
    """Refuse a rule that the document has already, or that speaks of what the optimizer alone is shown."""
    if _flatten(rule) in _flatten(skill.text):
        raise ValueError("the instructions say this already; write what they lack")
    shown = "\n".join((skill.text, *material))
    foreign = [words for words in UNSEEN_WORDS.findall(rule) if words.casefold() not in shown.casefold()]
    if foreign:
        raise ValueError(
            f"the assistant does not see the {foreign[0].lower()}; tell it what to write, in words that it understands"
        )


def check_rules(edits: Sequence[Proposal | Merge], items: Sequence[Item]) -> None:
    """Refuse edits that only record the answer of an item.

    Raises:
        ValueError: An edit quotes an item's reference, and beside it and the item's input says hardly anything.
    """
    for number, edit in enumerate(edits, 1):
        recorded = next((n for n, item in enumerate(items, 1) if records_answer(edit.content, item)), None)
        if recorded is not None:
            raise ValueError(
                f"edit {number} records the answer of case {recorded}, which will not come again; state the "
                "rule that leads to such answers, in words that hold for other tasks too"
            )


def records_answer(content: str, item: Item) -> bool:
    """Whether a text quotes an item's reference and says hardly anything beside it and the item's input.

    A reference of few characters may be part of a rule, such as ``even``. So it counts as quoted only if the
    text holds the item's input as well.
    """
    if not _quotes_answer(_flatten(content), item):
        return False
    material = content_words(show_json(item.reference)) | content_words(show_json(item.input))
    return len(content_words(content) - material - ANSWER_WORDS) < MIN_RULE_WORDS


def _quotes_answer(shown: str, item: Item) -> bool:
    given, right = map(_flatten, (show_json(item.input), show_json(item.reference)))
    return bool(right) and right in shown and (len(right) >= MIN_QUOTED_LENGTH or given in shown)


def _flatten(text: str) -> str:
    return " ".join(text.casefold().split())


def _check_applicable(skill: Skill, edits: Sequence[Proposal | Merge]) -> None:
    proposed = [build_edit(e) for e in edits]
    results = apply_edits(skill, [edit for edit in proposed if edit.op != "suggest"]).results
    wrong = [
        f"edit {n} ({r.edit.op}): {r.reason}" for n, r in enumerate(results, 1) if r.status == "rejected"
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _check_placeholders(name: str, text: str, known: Iterable[str]) -> None:
    copied = sorted({tag for tag in PLACEHOLDER.findall(text) if not any(tag in other for other in known)})
    if copied:
        raise ValueError(
            f"{name} holds {', '.join(copied)}, which only marks the material; leave it out, or write in its place "
            "what holds for other tasks too"
        )


def check_ranking(reply: RankReply) -> None:
    """Refuse a ranking that selects a number twice."""
    if len(set(reply.selected)) != len(reply.selected):
        raise ValueError("a number is selected twice")


def check_whole_document(skill: Skill, document: str, material: Iterable[str] = ()) -> None:
    """Refuse a text that cannot replace the document's unprotected text; the same text is valid.

    Placeholders of prompts are refused unless the old document or the ``material`` holds them, because small models
    copy them along with the text.
    """
    if is_same_body(skill.text, document):
        return
    _check_placeholders("the document", document, (skill.text, *material))
    (result,) = apply_edits(skill, [Edit(op="rewrite", content=document)]).results
    if result.status == "rejected":
        raise ValueError(f"the new document cannot be used: {result.reason}")
