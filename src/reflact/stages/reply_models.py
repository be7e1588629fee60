"""Reply types of the optimizer's calls, and their checks.

Analysts and merges reply with changes of one kind. ``EditReply`` is what all of them say; the type
that a model sees is narrowed to the fields, the operations and the bounds of its call. Prompts
whose header names a ``Reasoned`` type ask for reasoning in free text first, and bound no length;
the model's ``max_tokens`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, create_model

from reflact.messages import ReplyModel
from reflact.protocols import R
from reflact.skills.document import KNOWN_REASON, apply_edits, editable_text, is_same_body
from reflact.skills.rejected_edits import content_words
from reflact.stages.prompt_sections import show_json
from reflact.types import Edit, EditKind, Item, Skill

# The tags that fence material in prompts, and the names of a case's parts as tags.
PLACEHOLDER = re.compile(
    r"</?(?:document|proposal_\d+|case_\d+|answers|attempts|rejected|advice|guidance|notes"
    r"|background"
    r"|figures|evidence|task|remark|(?:right|wrong)[ _-]answer)_*>",
    re.IGNORECASE,
)

# A whole text in the tags of a document.
WRAPPED_DOCUMENT = re.compile(r"\s*<(document_*)>\n?(.*?)\n?</\1>\s*", re.DOTALL)

# The length from which a reference in a text counts as quoted, whatever stands beside it.
MIN_QUOTED_LENGTH = 24

# Content words that a rule has at least, beside a quoted answer and its question.
MIN_RULE_WORDS = 4

# Words that speak of answering, not of a rule.
ANSWER_WORDS = content_words(
    "answer answers answered asked case cases correct example examples exactly follow following "
    "give gives given input like output question questions reply respond response result return "
    "returns right such task tasks this write asks ask kind type"
)


def unwrap_document(text: str) -> str:
    """Return a text without the tags of a document if they enclose all of it."""
    wrapped = WRAPPED_DOCUMENT.fullmatch(text)
    return wrapped[2] if wrapped else text


# ---------------------------------------------------------------------------------------- one
# change


class EditReply(ReplyModel):
    """One change to the document, as an analyst proposes it or a merge writes it."""

    op: EditKind
    target: str = ""
    content: str = ""
    evidence: str = ""
    sources: tuple[int, ...] = ()


class NarrowedEdit(ReplyModel):
    """A change as a call asks for it: only with its fields, and within its bounds."""

    kind: ClassVar[EditKind] = "append"

    def read(self) -> EditReply:
        """Return the change; one without an operation has the kind of its type."""
        return EditReply(**{"op": self.kind, **self.model_dump()})


class NarrowedSuggestion(NarrowedEdit):
    """A suggestion as a call asks for it."""

    kind: ClassVar[EditKind] = "suggest"


class _Wording(NamedTuple):
    """The name and the texts of a narrowed type, which are part of what the model is asked."""

    name: str
    doc: str
    content: str


_INSTRUCTION = "The instruction, in words that hold for new tasks, as Markdown."
_PROPOSED = {
    "append": _Wording(
        "ReasonedAppend", "One addition to the document, with its evidence.", _INSTRUCTION
    ),
    "suggest": _Wording(
        "ReasonedSuggestion",
        "One thing that a revision of the document should do, with its evidence.",
        "What to add, change, move or remove, with the new instruction in full.",
    ),
    "edit": _Wording(
        "ReasonedEdit",
        "One change to the document, with its evidence.",
        f"{_INSTRUCTION} Empty for delete.",
    ),
}
_MERGED = {
    "append": _Wording(
        "MergedAppend",
        "An addition that stands for one or more of the proposed ones.",
        "The text of the rule, and nothing else.",
    ),
    "suggest": _Wording(
        "MergedSuggestion",
        "A suggestion that stands for one or more of the proposed ones.",
        "What the revision should do.",
    ),
    "edit": _Wording(
        "ReasonedMergedEdit",
        "A change that stands for one or more of the proposed ones.",
        f"{_INSTRUCTION} Empty for delete.",
    ),
}

# The wording for the first analyst's prompt, which asks for no evidence.
_FIRST_APPEND = _Wording(
    "AppendReply",
    "One addition to the document.",
    "The rule: the kind of task, then a right answer to imitate.",
)

_OPERATION = (
    "append: add content at the end. insert_after: add content after target's line. "
    "replace: put content in place of target. delete: remove target."
)
_TARGET = "Text copied exactly from the document, where it occurs once. Empty for append."
_EVIDENCE = "The cases that ask for it, and what in them does."
_SOURCES = "Numbers of the proposals that this one stands for."


def proposal_reply_type(operations: tuple[EditKind, ...], *, reasoned: bool) -> type[NarrowedEdit]:
    """Return the narrowed type of one proposed change of the given kinds.

    If additions or suggestions alone are allowed, neither an operation nor a target is asked for.
    The first analyst's prompt asks for no evidence of an addition (``reasoned`` is false).
    """
    kind = _find_kind(operations)
    if kind == "append" and not reasoned:
        content = Field(min_length=1, description=_FIRST_APPEND.content)
        return _create_edit_type(kind, _FIRST_APPEND, {"content": (str, content)})
    wording = _PROPOSED[kind]
    evidence = Field(min_length=1, description=_EVIDENCE)
    fields = {**_content_fields(operations, wording), "evidence": (str, evidence)}
    return _create_edit_type(kind, wording, fields)


def merged_reply_type(operations: tuple[EditKind, ...], *, proposals: int) -> type[NarrowedEdit]:
    """Return the narrowed type of one change that stands for some of ``proposals``
    numbered ones.
    """
    kind = _find_kind(operations)
    wording = _MERGED[kind]
    content = _content_fields(operations, wording)
    number = Annotated[int, Field(ge=1, le=proposals)]
    sources = {
        "sources": (list[number], Field(min_length=1, max_length=proposals, description=_SOURCES))
    }
    # The order in which the fields are asked for belongs to the recorded prompts.
    fields = content | sources if kind == "edit" else sources | content
    return _create_edit_type(kind, wording, fields)


def _find_kind(operations: tuple[EditKind, ...]) -> str:
    return operations[0] if operations in {("append",), ("suggest",)} else "edit"


def _content_fields(operations: tuple[EditKind, ...], wording: _Wording) -> dict[str, Any]:
    if _find_kind(operations) != "edit":
        return {"content": (str, Field(min_length=1, description=wording.content))}
    return {
        "op": (Literal[operations], Field(description=_OPERATION)),
        "target": (str, Field(description=_TARGET)),
        "content": (str, Field(description=wording.content)),
    }


def _create_edit_type(kind: str, wording: _Wording, fields: dict[str, Any]) -> type[NarrowedEdit]:
    base = NarrowedSuggestion if kind == "suggest" else NarrowedEdit
    return create_model(wording.name, __base__=base, __doc__=wording.doc, **fields)


def build_edit(reply: EditReply) -> Edit:
    """Return a proposed or merged change as an edit, without what its operation does not use."""
    target = "" if reply.op == "append" else reply.target
    content = "" if reply.op == "delete" else unwrap_document(reply.content)
    return Edit(op=reply.op, target=target, content=content, evidence=reply.evidence)


# -------------------------------------------------------------------------------------- whole
# replies


class PatternReply(ReplyModel):
    """A kind of failure that several cases share."""

    type: str = Field(
        min_length=1, max_length=80, description="The kind of task that was answered wrongly."
    )
    description: str = Field(
        min_length=1,
        max_length=250,
        description="What the right answers have that the wrong ones lack.",
    )
    count: int = Field(ge=1, description="How many of the cases show it.")


class ReasonedPattern(ReplyModel):
    """A cause of failure that some cases show."""

    type: str = Field(min_length=1, description="A short name of the cause.")
    description: str = Field(
        min_length=1,
        description="The cause: what the agent did not know or do, and what followed from it.",
    )
    cases: list[int] = Field(description="Numbers of the cases that show it.")


class Reasoned(ReplyModel):
    """A reply that begins with its reasoning."""

    reasoning: str = Field(
        min_length=1,
        description="The reasoning in free text, as long as it needs to be, before the rest.",
    )


class AnalystReply(ReplyModel):
    """What an analyst makes of cases that went wrong."""

    version: ClassVar[int] = 1
    patterns: Sequence[PatternReply | ReasonedPattern] = Field(
        description="The kinds of mistake, most frequent first."
    )
    edits: Sequence[NarrowedEdit] = Field(
        description="Changes to the document that would have helped."
    )


class ReasonedAnalystReply(AnalystReply, Reasoned):
    """What an analyst makes of cases that went wrong, reasoning first."""


class ReasonedSuccessReply(Reasoned):
    """What an analyst learns from cases that went well, reasoning first."""

    edits: Sequence[NarrowedEdit] = Field(
        description="Changes for what the document does not say yet; may be empty."
    )


class MergeReply(ReplyModel):
    """One list of changes made from several."""

    version: ClassVar[int] = 1
    edits: Sequence[NarrowedEdit] = Field(description="The changes after merging.")


class ReasonedMergeReply(MergeReply, Reasoned):
    """One list of changes made from several, with the reasons for what was kept."""


class ReasonedRankReply(ReplyModel):
    """Which proposals to apply, best first, with the reasons."""

    version: ClassVar[int] = 1
    reasoning: str = Field(
        min_length=1, description="How the proposals compare, before the choice."
    )
    selected: list[int] = Field(description="Numbers of the chosen proposals, most useful first.")


# The replies of analysts.
AnalysisReply = AnalystReply | ReasonedSuccessReply


def list_changes(reply: AnalysisReply | MergeReply) -> tuple[EditReply, ...]:
    """Return the changes of a reply, in order."""
    return tuple(edit.read() for edit in reply.edits)


def narrow_reply_type(base: type[R], **fields: tuple[Any, Mapping[str, Any]]) -> type[R]:
    """Return a reply type with narrower fields, each given as its type and the arguments of
    ``Field``.

    The bounds become part of the schema, so that samplers that follow the schema cannot leave them.
    """
    narrowed: dict[str, Any] = {
        name: (kind, Field(description=base.model_fields[name].description, **bounds))
        for name, (kind, bounds) in fields.items()
    }
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **narrowed)


@lru_cache(maxsize=64)
def failure_reply_type(
    operations: tuple[EditKind, ...], *, cases: int, most: int, reasoned: bool = False
) -> type[AnalystReply]:
    """Return the reply type for ``cases`` failures with at most ``most`` edits of the given kinds.

    There is at least one pattern and one edit. Several cases share a pattern, so small models name
    at most half as many patterns as cases, and at most three.
    """
    pattern: type[ReplyModel] = PatternReply
    most_patterns = max(1, min(3, cases // 2))
    if reasoned:
        number = Annotated[int, Field(ge=1, le=cases)]
        numbers = (list[number], {"min_length": 1, "max_length": cases})
        pattern = narrow_reply_type(ReasonedPattern, cases=numbers)
        most_patterns = cases
    return narrow_reply_type(
        ReasonedAnalystReply if reasoned else AnalystReply,
        patterns=(list[pattern], {"min_length": 1, "max_length": most_patterns}),  # type: ignore[valid-type]
        edits=_list_field(proposal_reply_type(operations, reasoned=reasoned), min(1, most), most),
    )


@lru_cache(maxsize=64)
def success_reply_type(
    operations: tuple[EditKind, ...], *, most: int
) -> type[ReasonedSuccessReply]:
    """Return the reply type for successes with at most ``most`` edits of the given kinds."""
    edits = _list_field(proposal_reply_type(operations, reasoned=True), 0, most)
    return narrow_reply_type(ReasonedSuccessReply, edits=edits)


@lru_cache(maxsize=64)
def merge_reply_type(
    operations: tuple[EditKind, ...], *, proposals: int, reasoned: bool = False
) -> type[MergeReply]:
    """Return the reply type of a merge of ``proposals`` numbered edits."""
    merged = merged_reply_type(operations, proposals=proposals)
    base = ReasonedMergeReply if reasoned else MergeReply
    return narrow_reply_type(base, edits=_list_field(merged, 1, proposals))


@lru_cache(maxsize=64)
def rank_reply_type(*, proposals: int, budget: int) -> type[ReasonedRankReply]:
    """Return the reply type of a ranking that selects ``budget`` of ``proposals``
    numbered edits.
    """
    number = Annotated[int, Field(ge=1, le=proposals)]
    selected = (list[number], {"min_length": budget, "max_length": budget})
    return narrow_reply_type(ReasonedRankReply, selected=selected)


def _list_field(kind: type[ReplyModel], fewest: int, most: int) -> tuple[Any, Mapping[str, Any]]:
    return list[kind], {"min_length": fewest, "max_length": most}  # type: ignore[valid-type]


def list_allowed_operations(skill: Skill, allowed: tuple[EditKind, ...]) -> tuple[EditKind, ...]:
    """Return the kinds of edit that a document admits; an empty document has no text for
    an anchor.
    """
    if allowed == ("suggest",) or editable_text(skill.text).strip():
        return allowed
    return ("append",)


# ---------------------------------------------------------------------------------------------
# checks


def check_reply(
    reply: AnalysisReply | MergeReply,
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
        ValueError: A pattern claims more cases than there are, an edit cannot be applied or only
        records the
            answer of one of ``items``, a rule is in the document already, or a text holds a
            placeholder of the prompt.
    """
    if cases is not None and isinstance(reply, AnalystReply):
        high = [p.type for p in reply.patterns if isinstance(p, PatternReply) and p.count > cases]
        if high:
            raise ValueError(f"there are {cases} cases; the count of {', '.join(high)} is larger")
    edits = [build_edit(change) for change in list_changes(reply)]
    _check_applicable(skill, edits)
    _check_rules(edits, items)
    for number, edit in enumerate(edits, 1):
        _check_placeholders(f"edit {number}", edit.content, (skill.text, *material))


def _check_rules(edits: Sequence[Edit], items: Sequence[Item]) -> None:
    """Refuse edits that only record the answer of an item."""
    for number, edit in enumerate(edits, 1):
        recorded = next(
            (n for n, item in enumerate(items, 1) if records_answer(edit.content, item)), None
        )
        if recorded is not None:
            raise ValueError(
                f"edit {number} records the answer of case {recorded}, which will not come again; "
                "state the rule that leads to such answers, in words that hold for other tasks too"
            )


def records_answer(content: str, item: Item) -> bool:
    """Whether a text quotes an item's reference and says hardly anything beside it and the item's
    input.

    A reference of few characters may be part of a rule, such as ``even``. So it counts as quoted
    only if the text holds the item's input as well.
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


def _check_applicable(skill: Skill, edits: Sequence[Edit]) -> None:
    results = apply_edits(skill, [edit for edit in edits if edit.op != "suggest"]).results
    # An edit that the document says already costs no further call: it is left out when the edits
    # are applied.
    wrong = [
        f"edit {n} ({r.edit.op}): {r.reason}"
        for n, r in enumerate(results, 1)
        if r.status == "rejected" and r.reason != KNOWN_REASON
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _check_placeholders(name: str, text: str, known: Iterable[str]) -> None:
    copied = sorted(
        {tag for tag in PLACEHOLDER.findall(text) if not any(tag in other for other in known)}
    )
    if copied:
        raise ValueError(
            f"{name} holds {', '.join(copied)}, which only marks the material; leave it out, or "
            "write in its place what holds for other tasks too"
        )


def check_ranking(reply: ReasonedRankReply) -> None:
    """Refuse a ranking that selects a number twice."""
    if len(set(reply.selected)) != len(reply.selected):
        raise ValueError("a number is selected twice")


def check_whole_document(skill: Skill, document: str, material: Iterable[str] = ()) -> None:
    """Refuse a text that cannot replace the document's unprotected text; the same text is valid.

    Placeholders of prompts are refused unless the old document or the ``material`` holds them,
    because small models copy them along with the text.
    """
    if is_same_body(skill.text, document):
        return
    _check_placeholders("the document", document, (skill.text, *material))
    (result,) = apply_edits(skill, [Edit(op="rewrite", content=document)]).results
    if result.status == "rejected":
        raise ValueError(f"the new document cannot be used: {result.reason}")
