"""What optimizers are asked to fill in, and the rules that a well-formed reply must still keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from pydantic import Field, create_model

from reflact.calls import ReplyModel
from reflact.skill import apply
from reflact.types import Edit, Operation, Skill

R = TypeVar("R", bound=ReplyModel)


class PatternReply(ReplyModel):
    """A kind of failure that several cases share."""

    type: str = Field(min_length=1, max_length=80, description="Short name of the kind of mistake.")
    count: int = Field(ge=1, description="How many of the cases show it.")
    description: str = Field(
        min_length=1,
        max_length=600,
        description="What wrong answers do and right ones do instead.",
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
    content: str = Field(max_length=4000, description="The new text: a general rule. Empty for delete.")

    def edit(self) -> Edit:
        """Return the edit as a value of its own."""
        target = "" if self.op == "append" else self.target
        return Edit(op=self.op, target=target, content="" if self.op == "delete" else self.content)


class AnalystReply(ReplyModel):
    """What an analyst makes of a minibatch."""

    version: ClassVar[int] = 1
    patterns: list[PatternReply] = Field(
        max_length=4, description="The kinds of mistake, most frequent first."
    )
    edits: list[EditReply] = Field(description="Changes to the document that would have helped.")


class SuccessReply(ReplyModel):
    """What an analyst learns from cases that went well."""

    version: ClassVar[int] = 1
    strengths: str = Field(max_length=600, description="What the right answers have in common.")
    edits: list[EditReply] = Field(
        description="Changes for what the document does not say yet; may be empty."
    )


class MergedEdit(EditReply):
    """A change that stands for one or more of the proposed ones."""

    sources: list[int] = Field(min_length=1, description="Numbers of the proposals that this one stands for.")


class MergeReply(ReplyModel):
    """One list of changes made from several."""

    version: ClassVar[int] = 1
    edits: list[MergedEdit] = Field(min_length=1, description="The changes after merging.")


class RankReply(ReplyModel):
    """Which proposals to apply, best first."""

    version: ClassVar[int] = 1
    reasoning: str = Field(max_length=600, description="Why these matter most, in one sentence.")
    selected: list[int] = Field(description="Numbers of the chosen proposals, most useful first.")


@lru_cache(maxsize=64)
def bounded(reply_type: type[R], least: int, most: int) -> type[R]:
    """Return a reply type whose ``edits`` are ``least`` to ``most``, so that samplers keep to it too."""
    field = reply_type.model_fields["edits"]
    edits = Field(min_length=least, max_length=most, description=field.description)
    return create_model(
        reply_type.__name__,
        __base__=reply_type,
        __doc__=reply_type.__doc__,
        edits=(field.annotation or Any, edits),
    )


def applicable(skill: Skill, edits: Sequence[EditReply]) -> None:
    """Refuse edits that the document would reject.

    Raises:
        ValueError: Names each rejected edit and the reason.
    """
    results = apply(skill, [e.edit() for e in edits]).results
    wrong = [
        f"edit {n} ({r.edit.op}): {r.reason}" for n, r in enumerate(results, 1) if r.status == "rejected"
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def analyst_check(skill: Skill, *, cases: int, max_edits: int) -> Callable[[AnalystReply], None]:
    """Return the check of a failure analyst's reply on ``cases`` trajectories."""

    def check(reply: AnalystReply) -> None:
        high = [p.type for p in reply.patterns if p.count > cases]
        if high:
            raise ValueError(f"there are {cases} cases; the count of {', '.join(high)} is larger")
        at_most(reply.edits, max_edits)
        applicable(skill, reply.edits)

    return check


def success_check(skill: Skill, *, max_edits: int) -> Callable[[SuccessReply], None]:
    """Return the check of a success analyst's reply."""

    def check(reply: SuccessReply) -> None:
        at_most(reply.edits, max_edits)
        applicable(skill, reply.edits)

    return check


def merge_check(skill: Skill, *, proposals: int) -> Callable[[MergeReply], None]:
    """Return the check of a merge of ``proposals`` numbered edits."""

    def check(reply: MergeReply) -> None:
        at_most(reply.edits, proposals)
        named = [n for edit in reply.edits for n in edit.sources]
        in_range(named, proposals)
        if len(set(named)) != len(named):
            raise ValueError("a proposal is named in more than one place")
        applicable(skill, reply.edits)

    return check


def rank_check(*, proposals: int, budget: int) -> Callable[[RankReply], None]:
    """Return the check of a ranking: exactly ``budget`` distinct numbers between 1 and ``proposals``."""

    def check(reply: RankReply) -> None:
        in_range(reply.selected, proposals)
        if len(set(reply.selected)) != len(reply.selected):
            raise ValueError("a number is selected twice")
        if len(reply.selected) != budget:
            raise ValueError(f"select exactly {budget} numbers, not {len(reply.selected)}")

    return check


def at_most(edits: Sequence[EditReply], limit: int) -> None:
    """Refuse more edits than are allowed.

    Raises:
        ValueError: There are more than ``limit``.
    """
    if len(edits) > limit:
        raise ValueError(f"at most {limit} edits are allowed, not {len(edits)}")


def in_range(numbers: Sequence[int], last: int) -> None:
    """Refuse numbers outside 1..last.

    Raises:
        ValueError: Names the numbers.
    """
    wrong = [str(n) for n in numbers if not 1 <= n <= last]
    if wrong:
        raise ValueError(f"numbers go from 1 to {last}; {', '.join(wrong)} is not among them")
