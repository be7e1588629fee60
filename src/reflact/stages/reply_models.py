"""Reply types of the optimizer's calls, and their checks.

Analysts and merges reply with changes of one kind. The type that a model sees has only the fields,
the operations and the bounds of its call. Prompts whose header names a ``Reasoned`` type ask for
reasoning in free text first, and bound no length; the model's ``max_tokens`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

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
    r"|background|figures|evidence|task|remark|(?:right|wrong)[ _-]answer)_*>",
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


# -------------------------------------------------------------------------------- one change


class EditReply(ReplyModel):
    """One change as a call asks for it; ``edit_reply_type`` adds the fields."""

    kind: ClassVar[EditKind] = "append"

    def list_sources(self) -> list[int]:
        """Return the numbers of the proposals that a merged change stands for."""
        return sorted(set(self.model_dump()["sources"]))

    def build_edit(self) -> Edit:
        """Return the change as an edit, without what its operation does not use."""
        values = self.model_dump()
        op = values.get("op", self.kind)
        target = "" if op == "append" else values.get("target", "")
        content = "" if op == "delete" else unwrap_document(values["content"])
        return Edit(op=op, target=target, content=content, evidence=values.get("evidence", ""))


class SuggestionReply(EditReply):
    """One suggestion as a call asks for it."""

    kind: ClassVar[EditKind] = "suggest"


_INSTRUCTION = "The instruction, in words that hold for new tasks, as Markdown."
_OPERATION = (
    "append: add content at the end. insert_after: add content after target's line. "
    "replace: put content in place of target. delete: remove target."
)
_TARGET = "Text copied exactly from the document, where it occurs once. Empty for append."
_EVIDENCE = "The cases that ask for it, and what in them does."
_SOURCES = "Numbers of the proposals that this one stands for."

# The name and the description of a proposed change, and the description of its content, by the
# kinds of edit that are allowed. They are part of what a model is asked.
_PROPOSED = {
    "append": ("ReasonedAppend", "One addition to the document, with its evidence.", _INSTRUCTION),
    "suggest": (
        "ReasonedSuggestion",
        "One thing that a revision of the document should do, with its evidence.",
        "What to add, change, move or remove, with the new instruction in full.",
    ),
    "edit": (
        "ReasonedEdit",
        "One change to the document, with its evidence.",
        f"{_INSTRUCTION} Empty for delete.",
    ),
}

# The same of a change that stands for several proposed ones.
_MERGED = {
    "append": (
        "MergedAppend",
        "An addition that stands for one or more of the proposed ones.",
        "The text of the rule, and nothing else.",
    ),
    "suggest": (
        "MergedSuggestion",
        "A suggestion that stands for one or more of the proposed ones.",
        "What the revision should do.",
    ),
    "edit": (
        "ReasonedMergedEdit",
        "A change that stands for one or more of the proposed ones.",
        f"{_INSTRUCTION} Empty for delete.",
    ),
}

# The same of an addition in the first version of the analyst's prompt, which asks for no evidence.
_FIRST_APPEND = (
    "AppendReply",
    "One addition to the document.",
    "The rule: the kind of task, then a right answer to imitate.",
)


def edit_reply_type(
    operations: tuple[EditKind, ...], *, reasoned: bool = True, proposals: int | None = None
) -> type[EditReply]:
    """Return the type of one change of the given kinds.

    If additions or suggestions alone are allowed, neither an operation nor a target is asked for.
    ``proposals``: the change stands for some of so many numbered ones; None: it is a proposal.
    """
    kind = operations[0] if operations in {("append",), ("suggest",)} else "edit"
    is_first = kind == "append" and not reasoned and proposals is None
    name, doc, description = (_PROPOSED if proposals is None else _MERGED)[kind]
    if is_first:
        name, doc, description = _FIRST_APPEND
    fields: dict[str, Any] = {"content": (str, Field(min_length=1, description=description))}
    if kind == "edit":
        fields = {
            "op": (Literal[operations], Field(description=_OPERATION)),
            "target": (str, Field(description=_TARGET)),
            "content": (str, Field(description=description)),
        }
    if proposals is not None:
        number = Annotated[int, Field(ge=1, le=proposals)]
        bounds = Field(min_length=1, max_length=proposals, description=_SOURCES)
        sources = {"sources": (list[number], bounds)}
        # The order in which the fields are asked for belongs to the recorded prompts.
        fields = fields | sources if kind == "edit" else sources | fields
    elif not is_first:
        fields["evidence"] = (str, Field(min_length=1, description=_EVIDENCE))
    base = SuggestionReply if kind == "suggest" else EditReply
    return create_model(name, __base__=base, __doc__=doc, **fields)


# -------------------------------------------------------------------------------- whole replies


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
    edits: Sequence[EditReply] = Field(
        description="Changes to the document that would have helped."
    )


class ReasonedAnalystReply(AnalystReply, Reasoned):
    """What an analyst makes of cases that went wrong, reasoning first."""


class ReasonedSuccessReply(Reasoned):
    """What an analyst learns from cases that went well, reasoning first."""

    edits: Sequence[EditReply] = Field(
        description="Changes for what the document does not say yet; may be empty."
    )


class MergeReply(ReplyModel):
    """One list of changes made from several."""

    version: ClassVar[int] = 1
    edits: Sequence[EditReply] = Field(description="The changes after merging.")


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


def narrow_reply_type(base: type[R], **fields: tuple[Any, Mapping[str, Any]]) -> type[R]:
    """Return a reply type with narrower fields, each given as its type and ``Field`` arguments.

    The bounds become part of the schema, so that samplers that follow the schema cannot leave them.
    """
    narrowed: dict[str, Any] = {
        name: (kind, Field(description=base.model_fields[name].description, **bounds))
        for name, (kind, bounds) in fields.items()
    }
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **narrowed)


def list_between(kind: Any, fewest: int, most: int) -> tuple[Any, Mapping[str, Any]]:
    """Return the field of a list of ``fewest`` to ``most`` values, for ``narrow_reply_type``."""
    return list[kind], {"min_length": fewest, "max_length": most}


@lru_cache(maxsize=64)
def failure_reply_type(
    operations: tuple[EditKind, ...], *, cases: int, most: int, reasoned: bool = False
) -> type[AnalystReply]:
    """Return the reply type for ``cases`` failures with at most ``most`` edits of the given kinds.

    There is at least one pattern and one edit. Several cases share a pattern, so small models name
    at most half as many patterns as cases, and at most three.
    """
    edit = edit_reply_type(operations, reasoned=reasoned)
    edits = list_between(edit, min(1, most), most)
    if not reasoned:
        patterns = list_between(PatternReply, 1, max(1, min(3, cases // 2)))
        return narrow_reply_type(AnalystReply, patterns=patterns, edits=edits)
    number = Annotated[int, Field(ge=1, le=cases)]
    pattern = narrow_reply_type(ReasonedPattern, cases=list_between(number, 1, cases))
    patterns = list_between(pattern, 1, cases)
    return narrow_reply_type(ReasonedAnalystReply, patterns=patterns, edits=edits)


@lru_cache(maxsize=64)
def success_reply_type(
    operations: tuple[EditKind, ...], *, most: int
) -> type[ReasonedSuccessReply]:
    """Return the reply type for successes with at most ``most`` edits of the given kinds."""
    edits = list_between(edit_reply_type(operations), 0, most)
    return narrow_reply_type(ReasonedSuccessReply, edits=edits)


@lru_cache(maxsize=64)
def merge_reply_type(
    operations: tuple[EditKind, ...], *, proposals: int, reasoned: bool = False
) -> type[MergeReply]:
    """Return the reply type of a merge of ``proposals`` numbered edits."""
    edits = list_between(edit_reply_type(operations, proposals=proposals), 1, proposals)
    base = ReasonedMergeReply if reasoned else MergeReply
    return narrow_reply_type(base, edits=edits)


def list_allowed_operations(skill: Skill, allowed: tuple[EditKind, ...]) -> tuple[EditKind, ...]:
    """Return the kinds of edit that a document admits; an empty one has no text for an anchor."""
    if allowed == ("suggest",) or editable_text(skill.text).strip():
        return allowed
    return ("append",)


# -------------------------------------------------------------------------------- checks


def check_reply(
    reply: AnalysisReply | MergeReply,
    *,
    skill: Skill,
    cases: int | None = None,
    items: Sequence[Item] = (),
    material: Iterable[str] = (),
) -> None:
    """Refuse a reply that does not fit its ``cases`` or the document.

    No edit may only record the answer of one of ``items``. ``material`` is what the cases or the
    proposals say, without the tags around them.
    """
    if cases is not None and isinstance(reply, AnalystReply):
        high = [p.type for p in reply.patterns if isinstance(p, PatternReply) and p.count > cases]
        if high:
            raise ValueError(f"there are {cases} cases; the count of {', '.join(high)} is larger")
    edits = [change.build_edit() for change in reply.edits]
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
    for number, edit in enumerate(edits, 1):
        for case, item in enumerate(items, 1):
            if _records_answer(edit.content, item):
                raise ValueError(
                    f"edit {number} records the answer of case {case}, which will not come again; "
                    "state the rule that leads to such answers, in words that hold for other tasks "
                    "too"
                )
        _check_placeholders(f"edit {number}", edit.content, (skill.text, *material))


def _check_placeholders(name: str, text: str, known: Iterable[str]) -> None:
    """Refuse tags of prompts that are in no ``known`` text; small models copy them along."""
    tags = {tag for tag in PLACEHOLDER.findall(text) if not any(tag in other for other in known)}
    if tags:
        raise ValueError(
            f"{name} holds {', '.join(sorted(tags))}, which only marks the material; leave it out, "
            "or write in its place what holds for other tasks too"
        )


def _records_answer(content: str, item: Item) -> bool:
    """Whether a text quotes an item's reference and says hardly anything beside it and the input.

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


def check_ranking(reply: ReasonedRankReply) -> None:
    """Refuse a ranking that selects a number twice."""
    if len(set(reply.selected)) != len(reply.selected):
        raise ValueError("a number is selected twice")


def check_whole_document(skill: Skill, document: str, material: Iterable[str] = ()) -> None:
    """Refuse a text that cannot replace the document's unprotected text; the same text is valid."""
    if is_same_body(skill.text, document):
        return
    _check_placeholders("the document", document, (skill.text, *material))
    (result,) = apply_edits(skill, [Edit(op="rewrite", content=document)]).results
    if result.status == "rejected":
        raise ValueError(f"the new document cannot be used: {result.reason}")
