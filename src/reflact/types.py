"""The frozen values that cross doors. They validate themselves, never change, and hold no behaviour
beyond what follows from their own fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class FrozenModel(BaseModel):
    """Base of all values: immutable, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced; a name that is no field is an error, not a new attribute."""
        unknown = set(update or ()) - type(self).model_fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)


def canonical_json(value: JsonValue) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII only, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def join_canonical_json(fields: Mapping[str, str]) -> str:
    """Return the canonical JSON of an object, from that of each of its fields."""
    return "{" + ",".join(f"{canonical_json(name)}:{fields[name]}" for name in sorted(fields)) + "}"


def digest_json(value: JsonValue) -> str:
    """Return the SHA-256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return digest_text(canonical_json(value))


def digest_text(text: str) -> str:
    """Return the SHA-256 of a text of canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# ---------------------------------------------------------------------------------------------- tasks


class Split(StrEnum):
    """The three parts of a data set."""

    train = "train"
    val = "val"
    test = "test"


class Item(FrozenModel):
    """One task.

    Args:
        id: Unique within its data set.
        input: What the agent is given; text for most environments.
        task_type: Groups items for stratified splits and for reporting.
        reference: What a grader knows and the agent does not see.
    """

    id: str = Field(min_length=1)
    input: JsonValue
    task_type: str | None = None
    reference: JsonValue = None

    @property
    def fingerprint(self) -> str:
        """Hash of the whole content, the id included."""
        return digest_json(self.model_dump(mode="json"))


class Score(FrozenModel):
    """How well an item was done: ``hard`` and ``soft``, both in 0..1 (hard is 0 or 1, or a fraction)."""

    hard: float = Field(ge=0, le=1)
    soft: float = Field(ge=0, le=1)

    @classmethod
    def of(cls, success: float) -> Score:
        """Return a score whose hard and soft parts are equal."""
        return cls(hard=float(success), soft=float(success))


class Turn(FrozenModel):
    """One message of a trajectory."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Grade(FrozenModel):
    """What an environment says of one run of an item.

    Args:
        score: How well it was done.
        answer: What was graded.
        feedback: Why, in words for the failure analyst; never shown to the target.
    """

    score: Score
    answer: str
    feedback: str | None = None


class Rollout(FrozenModel):
    """One run of the target on one item under one skill.

    ``score`` is None exactly where ``error`` says which infrastructure failure left it unmeasured.
    ``key`` identifies the skill text, item, target, environment, feedback flag and trial together.
    """

    key: str
    item_id: str
    skill_hash: str
    trial: int = 0
    turns: tuple[Turn, ...] = ()
    answer: str = ""
    score: Score | None = None
    feedback: str | None = None
    error: str | None = None


def is_failure(rollout: Rollout, threshold: float | None) -> bool:
    """Whether a scored rollout's hard score is below a threshold, or 0 where there is none.

    An unmeasured rollout has not failed.
    """
    if rollout.score is None:
        return False
    return rollout.score.hard == 0 if threshold is None else rollout.score.hard < threshold


# ---------------------------------------------------------------------------------------------- skills


class Skill(FrozenModel):
    """A skill document: its exact text and the hash of its exact bytes."""

    text: str

    @property
    def hash(self) -> str:
        """SHA-256 of the UTF-8 bytes, 64 hexadecimal digits."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


RolloutSource = Literal["failure", "success"]
Operation = Literal["append", "insert_after", "replace", "delete"]
EditKind = Literal["append", "insert_after", "replace", "delete", "suggest", "rewrite"]


class Edit(FrozenModel):
    """One proposed change to a skill document.

    Args:
        op: ``append`` takes only content, ``delete`` only a target, ``insert_after`` and ``replace`` both.
            ``suggest`` says in words what a revision should do; ``rewrite`` is a whole new document text.
        target: The anchor: text that occurs exactly once in the unprotected document.
        content: The text to put in.
        source_type: Whether failures or successes gave rise to it; None where both did.
        support_count: How many rollouts support it, at least 1.
        merge_level: How many merges it went through.
    """

    op: EditKind
    target: str = ""
    content: str = ""
    source_type: RolloutSource | None = None
    support_count: int = Field(default=1, ge=1)
    merge_level: int = Field(default=0, ge=0)


class EditResult(FrozenModel):
    """What became of one edit; ``reason`` says why it was rejected."""

    edit: Edit
    status: Literal["applied", "rejected"]
    reason: str | None = None


class FailurePattern(FrozenModel):
    """A kind of failure that several items share; ``item_ids`` are those of the minibatch it was seen in."""

    type: str
    count: int = Field(ge=1)
    description: str
    item_ids: tuple[str, ...] = ()


class Patch(FrozenModel):
    """A list of edits with the reasoning that led to them."""

    reasoning: str = ""
    edits: tuple[Edit, ...] = ()


class AnalystReport(FrozenModel):
    """What one analyst made of one minibatch.

    Args:
        source_type: Whether the minibatch holds failures or successes.
        index: Its number among those of its batch and source.
        item_ids: Its items, in order.
        patch: The proposals.
        patterns: The kinds of failure that were named.
        refusal: The reason where no valid reply could be had; the patch is empty then.
        batch: Which of the step's accumulated batches the minibatch belongs to.
        reminders: Notes for the appendix, from rules that stand in the document and were not followed.
        lapses: Items whose failure the reminders explain; they gave rise to no edits.
        triage_refusal: The reason where lapses could not be told from defects.
    """

    source_type: RolloutSource
    index: int
    item_ids: tuple[str, ...]
    patch: Patch = Patch()
    patterns: tuple[FailurePattern, ...] = ()
    no_reply_reason: str | None = None
    batch: int = 0
    reminders: tuple[str, ...] = ()
    lapses: tuple[str, ...] = ()
    triage_no_reply_reason: str | None = None


class Fallback(FrozenModel):
    """A model's decision that could not be had, and what was done instead."""

    label: str
    reason: str
    replacement: str


class AggregateResult(FrozenModel):
    """The outcome of aggregation: the pool of edits, in order, and the fallbacks taken on the way."""

    patch: Patch = Patch()
    fallbacks: tuple[Fallback, ...] = ()


class StepSize(FrozenModel):
    """The optimizer's own decision on how many of the offered edits to apply."""

    count: int = Field(ge=0)
    reasoning: str = ""
    confidence: float = Field(ge=0, le=1)
    risks: str = ""


class SelectResult(FrozenModel):
    """The outcome of selection: at most ``budget`` edits (None: unbounded) out of ``pool_size``.

    ``decision`` is there where the optimizer set the budget.
    """

    patch: Patch = Patch()
    pool_size: int = 0
    budget: int | None = None
    ranked: bool = False
    decision: StepSize | None = None
    fallbacks: tuple[Fallback, ...] = ()


class Candidate(FrozenModel):
    """The document after the step's edits, and what became of each of them.

    ``fallbacks`` says why a rewrite that was asked for could not be had.
    """

    skill: Skill
    results: tuple[EditResult, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()


class AppendixResult(FrozenModel):
    """The document after a step's reminders went to its appendix; ``notes`` is None where none did."""

    skill: Skill
    notes: tuple[str, ...] | None = None
    fallbacks: tuple[Fallback, ...] = ()


# ------------------------------------------------------------------------------------------- decisions


class Measurement(FrozenModel):
    """What an evaluation of one skill on one split gave.

    ``hard`` and ``soft`` are means over the ``n`` measured rollouts (items times trials); None where
    nothing was measured.
    """

    skill_hash: str
    split: Split
    n: int = Field(ge=0)
    unmeasured: tuple[str, ...] = ()
    hard: float | None = None
    soft: float | None = None


GateAction = Literal[
    "accept_new_best",
    "accept",
    "reject",
    "force_accept",
    "no_change",
    "no_patches",
    "no_rewrite",
    "inconclusive",
    "unmeasured",
]


class Evidence(FrozenModel):
    """What a comparison of two skills rested on.

    Args:
        policy: The rule that decided.
        deterministic: Whether no repeat had ever disagreed when it was decided.
        rounds: Trials of all items that were begun, on both sides.
        pairs: Pairs of rollouts that were used.
        value: The betting process's value, None where it was not asked (strict, or deterministic).
        level: The error probability that the decision was given; acceptance needs ``1 / level``.
        resolvable: The smallest improvement that this split and number of trials detects with 80% power.
        bound: The decision was clear before all pairs were known; the scores cover the known ones only.
        futile: It was given up because an improvement of the planned size had become unlikely.
    """

    policy: Literal["strict", "paired"]
    deterministic: bool
    rounds: int
    pairs: int
    value: float | None = None
    level: float | None = None
    detectable_effect: float | None = None
    bound: bool = False
    futile: bool = False


class Verdict(FrozenModel):
    """The gate's decision with the evidence for it; scores are in the gate's metric, in 0..1.

    ``against_best`` is the evidence of a second comparison, made where the best skill is not the current.
    ``veto`` is the reason that the approver gave.
    """

    action: GateAction
    reason: str
    candidate: Measurement | None = None
    current: Measurement | None = None
    candidate_score: float | None = None
    current_score: float | None = None
    evidence: Evidence | None = None
    against_best: Evidence | None = None
    deterministic: bool = True
    veto: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether the candidate becomes the current skill."""
        return self.action in {"accept_new_best", "accept", "force_accept"}


MAX_TEXT_LENGTH = 60
"""Characters of a text that are shown at most."""

MAX_LIST_ITEMS = 3
"""Things of a list that are shown; of a longer one their number is."""

FIELD_TEXT_LENGTHS = {"reason": 240, "message": 240}
"""Characters of fields that say what went wrong: what to do about it often stands at their end."""


class ShortReprModel(FrozenModel):
    """A value that shows itself in one short line, without the fields that are as they are by default."""

    def __repr__(self) -> str:
        return short_repr(self)

    def __str__(self) -> str:
        return repr(self)


def short_repr(value: BaseModel) -> str:
    """Return a value in one short line."""
    fields = type(value).model_fields
    said = ((name, getattr(value, name)) for name in fields)
    shown = [
        f"{name}={_format_value(one, FIELD_TEXT_LENGTHS.get(name, MAX_TEXT_LENGTH))}"
        for name, one in said
        if one != fields[name].default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _format_value(value: object, longest: int = MAX_TEXT_LENGTH) -> str:
    match value:
        case float():
            return f"{value:.3g}"
        case str():
            return repr(value if len(value) <= longest else f"{value[: longest - 3]}...")
        case tuple():
            return _format_sequence(value)
        case BaseModel() if not isinstance(value, ShortReprModel):
            return short_repr(value)
    return repr(value)


def _format_sequence(values: tuple[object, ...]) -> str:
    if len(values) > MAX_LIST_ITEMS:
        return f"<{len(values):,}>"
    return f"({', '.join(map(_format_value, values))}{',' if len(values) == 1 else ''})"
