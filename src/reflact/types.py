"""The frozen values that cross doors. They validate themselves, never change, and hold no behaviour
beyond what follows from their own fields.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Frozen(BaseModel):
    """Base of all values: immutable, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def canonical(value: JsonValue) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII only, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: JsonValue) -> str:
    """Return the SHA-256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()


# ---------------------------------------------------------------------------------------------- tasks


class Split(StrEnum):
    """The three parts of a data set."""

    train = "train"
    val = "val"
    test = "test"


class Item(Frozen):
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
        return digest(self.model_dump(mode="json"))


class Score(Frozen):
    """How well an item was done: ``hard`` and ``soft``, both in 0..1 (hard is 0 or 1, or a fraction)."""

    hard: float = Field(ge=0, le=1)
    soft: float = Field(ge=0, le=1)

    @classmethod
    def of(cls, success: float) -> Score:
        """Return a score whose hard and soft parts are equal."""
        return cls(hard=float(success), soft=float(success))


class Turn(Frozen):
    """One message of a trajectory."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Graded(Frozen):
    """What an environment says of one run of an item.

    Args:
        score: How well it was done.
        answer: What was graded.
        feedback: Why, in words for the failure analyst; never shown to the target.
    """

    score: Score
    answer: str
    feedback: str | None = None


class Rollout(Frozen):
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

    @property
    def failed(self) -> bool:
        """True for a scored rollout without any success; an unmeasured one has not failed."""
        return self.score is not None and self.score.hard == 0


# ---------------------------------------------------------------------------------------------- skills


class Skill(Frozen):
    """A skill document: its exact text and the hash of its exact bytes."""

    text: str

    @property
    def hash(self) -> str:
        """SHA-256 of the UTF-8 bytes, 64 hexadecimal digits."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


Source = Literal["failure", "success"]
Operation = Literal["append", "insert_after", "replace", "delete"]


class Edit(Frozen):
    """One proposed change to a skill document.

    Args:
        op: ``append`` takes only content, ``delete`` only a target, the other two take both.
        target: The anchor: text that occurs exactly once in the unprotected document.
        content: The text to put in.
        source_type: Whether failures or successes gave rise to it; None where both did.
        support_count: How many rollouts support it, at least 1.
        merge_level: How many merges it went through.
    """

    op: Operation
    target: str = ""
    content: str = ""
    source_type: Source | None = None
    support_count: int = Field(default=1, ge=1)
    merge_level: int = Field(default=0, ge=0)


class EditResult(Frozen):
    """What became of one edit; ``reason`` says why it was rejected."""

    edit: Edit
    status: Literal["applied", "rejected"]
    reason: str | None = None


class FailurePattern(Frozen):
    """A kind of failure that several items share; ``item_ids`` are those of the minibatch it was seen in."""

    type: str
    count: int = Field(ge=1)
    description: str
    item_ids: tuple[str, ...] = ()


class Patch(Frozen):
    """A list of edits with the reasoning that led to them."""

    reasoning: str = ""
    edits: tuple[Edit, ...] = ()


class Report(Frozen):
    """What one analyst made of one minibatch.

    ``refusal`` holds the reason where no valid reply could be had; the patch is empty then.
    """

    source_type: Source
    index: int
    item_ids: tuple[str, ...]
    patch: Patch = Patch()
    patterns: tuple[FailurePattern, ...] = ()
    refusal: str | None = None


class Fallback(Frozen):
    """A model's decision that could not be had, and what was done instead."""

    label: str
    reason: str
    instead: str


class Merged(Frozen):
    """The outcome of aggregation: the pool of edits, in order, and the fallbacks taken on the way."""

    patch: Patch = Patch()
    fallbacks: tuple[Fallback, ...] = ()


class Chosen(Frozen):
    """The outcome of selection: at most ``budget`` edits (None: unbounded) out of ``pool_size``."""

    patch: Patch = Patch()
    pool_size: int = 0
    budget: int | None = None
    ranked: bool = False
    fallbacks: tuple[Fallback, ...] = ()


class Candidate(Frozen):
    """The document after the step's edits, and what became of each of them."""

    skill: Skill
    results: tuple[EditResult, ...] = ()


# ------------------------------------------------------------------------------------------- decisions


class Measurement(Frozen):
    """What an evaluation of one skill on one split gave.

    ``hard`` and ``soft`` are means over the ``n`` measured items; None where nothing was measured.
    """

    skill_hash: str
    split: Split
    n: int = Field(ge=0)
    unmeasured: tuple[str, ...] = ()
    hard: float | None = None
    soft: float | None = None


Action = Literal[
    "accept_new_best", "accept", "reject", "force_accept", "no_change", "no_patches", "unmeasured"
]


class Verdict(Frozen):
    """The gate's decision with the evidence for it; scores are in the gate's metric, in 0..1."""

    action: Action
    reason: str
    candidate: Measurement | None = None
    current: Measurement | None = None
    candidate_score: float | None = None
    current_score: float | None = None

    @property
    def accepted(self) -> bool:
        """Whether the candidate becomes the current skill."""
        return self.action in {"accept_new_best", "accept", "force_accept"}


class BufferEntry(Frozen):
    """What later steps of the same epoch are told of an earlier one."""

    step: int
    action: Action
    n_failures: int
    n_total: int
    patterns: tuple[FailurePattern, ...] = ()
    rejected_edits: tuple[Edit, ...] = ()
    score_before: float | None = None
    score_after: float | None = None


class StepRecord(Frozen):
    """All that a committed step did. The same inputs give the same bytes; times and spend live elsewhere."""

    step: int
    epoch: int
    step_in_epoch: int
    skill_before: str
    item_ids: tuple[str, ...]
    rollout: Measurement
    n_failures: int
    reports: tuple[Report, ...]
    merged: Merged
    chosen: Chosen
    edits: tuple[EditResult, ...]
    candidate_hash: str
    verdict: Verdict
    skill_after: str
    version_after: int
    score_after: float | None
    best_hash: str
    best_score: float | None


class Version(Frozen):
    """A skill version: number 0 is the initial document; ``origin`` says which step made it."""

    number: int
    skill_hash: str
    origin: str
    score: float | None = None


class RunState(Frozen):
    """Where a run stands after its last committed step; all that the next step needs."""

    step: int = 0
    epoch: int = 0
    current: Version
    best: Version
    latest_version: int = 0
    step_buffer: tuple[BufferEntry, ...] = ()
    seen_hashes: tuple[str, ...] = ()
