"""The frozen values that stages exchange, canonical JSON, and short representations of values.

The typed outputs of the stages are public; a contrast pair of the critic is in ``reflact.memory``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from reflact.text import name_count

__all__ = [
    "AggregateResult",
    "AnalystReport",
    "AppendixResult",
    "Candidate",
    "Case",
    "Edit",
    "EditResult",
    "FailurePattern",
    "Fallback",
    "Grade",
    "Item",
    "Measurement",
    "Patch",
    "RaceEntry",
    "Rewrite",
    "Rollout",
    "Score",
    "SelectResult",
    "Skill",
    "Split",
    "StepSize",
    "Turn",
    "Verdict",
    "WorkedExample",
]

CANONICAL_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


class FrozenModel(BaseModel):
    """Base of all values: immutable, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced; a name that is no field is a TypeError."""
        fields = type(self).model_fields.keys()
        if unknown := (update or {}).keys() - fields:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        copied = super().model_copy(update=update, deep=deep)
        # A cached property may depend on a replaced field.
        for name in copied.__dict__.keys() - fields:
            del copied.__dict__[name]
        return copied


def canonical_json(value: JsonValue) -> str:
    """Return the canonical JSON of a value: sorted keys, no spaces, ASCII only, no NaN."""
    return CANONICAL_ENCODER.encode(value)


def join_canonical_json(fields: Mapping[str, str]) -> str:
    """Return the canonical JSON of an object from the canonical JSON of its fields."""
    return "{" + ",".join(f"{canonical_json(name)}:{fields[name]}" for name in sorted(fields)) + "}"


def digest_json(value: JsonValue) -> str:
    """Return the SHA-256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return digest_text(canonical_json(value))


def digest_text(text: str) -> str:
    """Return the SHA-256 of a text of canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class Split(StrEnum):
    """The three parts of a data set."""

    train = "train"
    val = "val"
    test = "test"


class Item(FrozenModel):
    """One task, with an id that is unique within its data set.

    ``input`` is the task for the agent, ``reference`` is for the grader alone. ``task_type`` groups
    items. ``metadata`` are other columns; the agent sees those that ``environment.template`` names.
    """

    id: str = Field(min_length=1)
    input: JsonValue
    task_type: str | None = None
    reference: JsonValue = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict, exclude_if=lambda value: not value)

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the whole content, the id included."""
        return digest_json(self.model_dump(mode="json"))


class Score(FrozenModel):
    """The score of an answer: ``hard`` and ``soft``, both in 0..1 (hard is usually 0 or 1).

    ``metrics`` are further numbers by name, in any unit, such as seconds or calls of tools. They
    are stored and shown beside the score; no decision uses them.
    """

    hard: float = Field(ge=0, le=1)
    soft: float = Field(ge=0, le=1)
    metrics: dict[str, float] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.hard, self.soft))

    @classmethod
    def of(cls, success: float, metrics: Mapping[str, float] | None = None) -> Score:
        """Return a score whose hard and soft parts are equal, with further numbers by name."""
        return cls(hard=float(success), soft=float(success), metrics=dict(metrics or {}))


class Turn(FrozenModel):
    """One message of a trajectory."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Grade(FrozenModel):
    """An environment's grade of an answer; the failure analyst reads ``feedback``, no target."""

    score: Score
    answer: str
    feedback: str | None = None


class Rollout(FrozenModel):
    """One run of the target on one item under one skill.

    If an infrastructure failure left it unmeasured, ``score`` is None and ``error`` states the
    failure. ``refused``: no later try can measure it, because the endpoint refuses its request or
    because a decision was made without it. ``key`` is a digest of the skill text, item, target,
    environment, feedback flag and trial.
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
    refused: bool = False


def is_failure(rollout: Rollout, threshold: float | None) -> bool:
    """Whether a rollout's hard score is below a threshold, or 0 if the threshold is None.

    An unmeasured rollout is not a failure.
    """
    if rollout.score is None:
        return False
    return rollout.score.hard == 0 if threshold is None else rollout.score.hard < threshold


class Case(FrozenModel):
    """A measured rollout of a step; ``failed`` is what ``train.success_threshold`` says."""

    item: Item
    rollout: Rollout
    failed: bool


class Skill(FrozenModel):
    """A skill document: its exact text and the hash of its exact bytes."""

    text: str

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the UTF-8 bytes, 64 hexadecimal digits."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


class WorkedExample(FrozenModel):
    """A train item in the document: the task as the target sees it, and a right answer.

    ``answer`` is the item's right answer, or the target's in a rollout that was graded right; of an
    agent it is the transcript, cut to its decisive turns.
    """

    item_id: str
    task: str
    answer: str


# An empty document, a text about something else, or constant answers.
Control = Literal["none", "placebo", "null"]

RolloutSource = Literal["failure", "success"]
Operation = Literal["append", "insert_after", "replace", "delete"]
EditKind = Literal["append", "insert_after", "replace", "delete", "suggest", "rewrite", "examples"]


class Edit(FrozenModel):
    """One proposed change to a skill document, which ``support_count`` rollouts support.

    ``append`` takes only content, ``delete`` only a target, ``insert_after`` and ``replace`` both.
    ``suggest`` describes a revision in words, ``rewrite`` is a whole new document, ``examples`` the
    new section of worked examples. ``target`` is text that occurs exactly once in the unprotected
    document. ``merge_level`` counts the merges that produced it. ``evidence`` says which cases ask
    for it, in the analyst's words.
    """

    op: EditKind
    target: str = ""
    content: str = ""
    source_type: RolloutSource | None = None
    support_count: int = Field(default=1, ge=1)
    merge_level: int = Field(default=0, ge=0)
    evidence: str = Field(default="", exclude_if=lambda value: not value)


class EditResult(FrozenModel):
    """The outcome of one edit; ``reason`` is the reason of a rejection."""

    edit: Edit
    status: Literal["applied", "rejected"]
    reason: str | None = None


class FailurePattern(FrozenModel):
    """A kind of failure that several items share; ``item_ids`` are the items of its minibatch."""

    type: str
    count: int = Field(ge=1)
    description: str
    item_ids: tuple[str, ...] = ()


class Patch(FrozenModel):
    """A list of edits with the reasoning behind them."""

    reasoning: str = ""
    edits: tuple[Edit, ...] = ()


class AnalystReport(FrozenModel):
    """An analyst's report on the minibatch ``index`` of a batch and source.

    Its patch is empty if the analyst gave no valid reply. ``reminders`` are notes for the appendix,
    from rules of the document that were not followed; the failures of ``lapses`` lead to no edits.
    ``triage_no_reply_reason``: lapses could not be separated from defects.
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
    """A missing decision of a model, its reason, and its replacement."""

    label: str
    reason: str
    replacement: str


class AggregateResult(FrozenModel):
    """The result of aggregation: the pool of edits, in order, and the fallbacks used."""

    patch: Patch = Patch()
    fallbacks: tuple[Fallback, ...] = ()


class StepSize(FrozenModel):
    """The optimizer's decision on the number of edits to apply."""

    count: int = Field(ge=0)
    reasoning: str = ""
    confidence: float = Field(ge=0, le=1)
    risks: str = ""


class SelectResult(FrozenModel):
    """At most ``budget`` edits out of ``pool_size``; ``decision`` if the optimizer chose it."""

    patch: Patch = Patch()
    pool_size: int = 0
    budget: int | None = None
    ranked: bool = False
    decision: StepSize | None = None
    fallbacks: tuple[Fallback, ...] = ()


class Candidate(FrozenModel):
    """The document after the step's edits, under a ``label`` such as ``8 examples``.

    ``summary`` is what a rewrite call says it changed. ``examples`` are the worked examples of the
    document; None: those of the document before.
    """

    skill: Skill
    results: tuple[EditResult, ...] = ()
    summary: str = ""
    fallbacks: tuple[Fallback, ...] = ()
    examples: tuple[WorkedExample, ...] | None = None
    label: str = "edits"


class AppendixResult(FrozenModel):
    """The document after a step's reminders were added; ``notes`` is None if there were none."""

    skill: Skill
    notes: tuple[str, ...] | None = None
    fallbacks: tuple[Fallback, ...] = ()


class Measurement(FrozenModel):
    """The mean scores of a skill over its ``n`` measured rollouts (items times trials)."""

    skill_hash: str
    split: Split
    n: int = Field(ge=0)
    unmeasured: tuple[str, ...] = ()
    hard: float | None = None
    soft: float | None = None


class Rewrite(FrozenModel):
    """A whole document that a proposer wrote in a step, or the ``reason`` why there is none.

    ``document`` has no protected regions. ``number`` is its place in the order in which the
    proposer asked for its documents, from 0.
    """

    document: str | None = None
    reasoning: str = ""
    patterns: tuple[FailurePattern, ...] = ()
    reason: str | None = None
    number: int = 0


class RaceEntry(FrozenModel):
    """What a race measured of one candidate, such as ``8 examples`` or ``rewrite 2``.

    ``form`` is the digest of its text after white space and list marks are normalised. ``score``
    and ``current_score`` are means on the same ``n`` validation items, in the gate's metric.
    ``p_better`` is the probability that it is better than the current document on all of them.
    ``judged``: it went on to the gate.
    """

    label: str
    skill_hash: str
    form: str
    n: int = 0
    score: float | None = None
    current_score: float | None = None
    p_better: float | None = None
    judged: bool = False

    @property
    def words(self) -> str:
        """What was measured, in words."""
        if self.score is None or self.current_score is None or self.p_better is None:
            return f"nothing could be measured of {self.label}"
        end = "; it went to the gate" if self.judged else ""
        return (
            f"{self.label}: {self.score:.3f} on {name_count(self.n, 'validation item')}, and the "
            f"current document {self.current_score:.3f} on the same; better with probability "
            f"{self.p_better:.2f}{end}"
        )


GateAction = Literal[
    "accept_new_best",
    "accept",
    "reject",
    "force_accept",
    "no_change",
    "no_patches",
    "no_rewrite",
    "set_aside",
    "return",
    "unmeasured",
]

GatePolicy = Literal["ranked", "strict"]


class Belief(FrozenModel):
    """What is believed of a version's true mean on the validation items: a normal distribution."""

    skill_hash: str
    mean: float
    deviation: float


class PassResult(FrozenModel):
    """One pass of a version over ``n`` validation items, as an observation of its true mean.

    ``mean`` is in the gate's metric, adjusted for unmeasured items; ``measured`` is not adjusted.
    ``variance`` is that of a score within an item, as estimated at the time; the pass added
    ``squares`` to the estimate, the squared deviations of ``repeats`` scores from the items'
    earlier ones. ``room``: see ``find_room``. ``change_variance`` is the prior variance of the
    version's difference to its parent, from the passes so far; that of its latest pass counts.
    """

    skill_hash: str
    trial: int
    mean: float
    n: int
    variance: float
    squares: float = 0.0
    repeats: int = 0
    room: float | None = None
    measured: float | None = None
    change_variance: float | None = None


class MeasuredScore(FrozenModel):
    """The mean score of a document in the gate's metric, over ``n`` items, each with trials."""

    score: float
    n: int
    trials: int


class RankedDecision(FrozenModel):
    """The beliefs behind a decision of the ranked gate, after the ``passes`` that it took.

    ``p_better`` is the probability that the candidate is better than the current version was.
    ``chosen`` is the hash of the version that is current afterwards.
    """

    candidate: Belief
    current: Belief
    p_better: float
    chosen: str
    passes: tuple[PassResult, ...] = ()


# The variance of hard scores within an item that is expected before any repeat.
HARD_VARIANCE = 0.14

# The weight of that expectation in repeats, and the least variance that is used.
PSEUDO_REPEATS = 20
MIN_VARIANCE = 1e-4

# The least room of scores, so that a version that fails or solves everything is no certainty.
MIN_ROOM = 0.05


def find_room(mean: float) -> float:
    """Return the greatest variance of scores in 0..1 with this mean, at least ``MIN_ROOM``."""
    return max(MIN_ROOM, mean * (1 - mean))


class VersionNode(FrozenModel):
    """A document in the tree of a run's versions; it was made from ``parent``, by hash."""

    skill_hash: str
    parent: str | None = None


class Ranking(FrozenModel):
    """All that the ranked gate has observed, in the order of the commits: the input of all beliefs.

    The first node is the baseline; a parent comes before its children. ``squares`` are the summed
    squared deviations of repeated scores from their item's mean, ``repeats`` their degrees of
    freedom. ``prior_variance`` is expected within an item before any repeat. ``room`` and
    ``prior_room`` are the same for the greatest variance that the means allow.
    """

    nodes: tuple[VersionNode, ...]
    passes: tuple[PassResult, ...] = ()
    squares: float = 0.0
    repeats: int = 0
    prior_variance: float = HARD_VARIANCE
    room: float = 0.0
    prior_room: float = 0.25

    @property
    def variance(self) -> float:
        """The variance of a score within an item: of the repeats, shrunk towards the prior."""
        pooled = PSEUDO_REPEATS * self.prior_variance + self.squares
        return max(MIN_VARIANCE, pooled / (PSEUDO_REPEATS + self.repeats))

    def find_variance(self, mean: float) -> float:
        """Return the variance of a score within an item for a version with this mean.

        Scores near 0 and 1 vary less: the variance is in proportion to ``find_room``.
        """
        usual = (PSEUDO_REPEATS * self.prior_room + self.room) / (PSEUDO_REPEATS + self.repeats)
        return max(MIN_VARIANCE, self.variance * find_room(mean) / usual)

    def add_version(self, skill_hash: str, parent: str) -> Ranking:
        """Return the ranking with one more version; a known one keeps its place."""
        if any(node.skill_hash == skill_hash for node in self.nodes):
            return self
        return self.extend([VersionNode(skill_hash=skill_hash, parent=parent)], [])

    def add_pass(self, result: PassResult) -> Ranking:
        """Return the ranking with one more pass, unless the same trial of the version is known."""
        if any(
            known.trial == result.trial and known.skill_hash == result.skill_hash
            for known in self.passes
        ):
            return self
        return self.extend([], [result])

    def extend(self, nodes: Sequence[VersionNode], passes: Sequence[PassResult]) -> Ranking:
        """Return the ranking with more versions and passes, none of which it knows."""
        squares = self.squares
        repeats = self.repeats
        room = self.room
        for result in passes:
            squares += result.squares
            repeats += result.repeats
            room += result.repeats * (0.25 if result.room is None else result.room)
        return self.model_copy(
            update={
                "nodes": (*self.nodes, *nodes),
                "passes": (*self.passes, *passes),
                "squares": squares,
                "repeats": repeats,
                "room": room,
            }
        )

    def count_passes(self, skill_hash: str) -> int:
        """Return the number of passes of a version."""
        return sum(known.skill_hash == skill_hash for known in self.passes)

    def find_score(self, skill_hash: str) -> MeasuredScore | None:
        """Return the mean over all items and trials of a version; None without a pass."""
        passes = [known for known in self.passes if known.skill_hash == skill_hash]
        if not passes:
            return None
        means = [known.mean if known.measured is None else known.measured for known in passes]
        total = math.fsum(mean * known.n for mean, known in zip(means, passes, strict=True))
        count = sum(known.n for known in passes)
        return MeasuredScore(
            score=total / count, n=max(known.n for known in passes), trials=len(passes)
        )

    def list_lineage(self, skill_hash: str) -> tuple[str, ...]:
        """Return a version, and while it has no pass the one it was made from, and so on."""
        parents = {node.skill_hash: node.parent for node in self.nodes}
        measured = {result.skill_hash for result in self.passes}
        lineage = [skill_hash]
        while lineage[-1] not in measured and (parent := parents.get(lineage[-1])) is not None:
            lineage.append(parent)
        return tuple(lineage)

    def list_contenders(self, kept: Sequence[str]) -> tuple[str, ...]:
        """Return the kept versions that can become the current one.

        A version without a pass stands for its parent, which it would otherwise never beat.
        """
        replaced = {parent for skill_hash in kept for parent in self.list_lineage(skill_hash)[1:]}
        return tuple(skill_hash for skill_hash in kept if skill_hash not in replaced)


class Verdict(FrozenModel):
    """The gate's decision; scores are in the gate's metric, in 0..1.

    ``veto`` is the approver's reason. ``repeats`` names an equal earlier document, such as ``v2``.
    """

    action: GateAction
    reason: str
    candidate: Measurement | None = None
    current: Measurement | None = None
    candidate_score: float | None = None
    current_score: float | None = None
    ranked: RankedDecision | None = None
    deterministic: bool = True
    veto: str | None = None
    repeats: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether the candidate becomes the current skill."""
        return self.action in {"accept_new_best", "accept", "force_accept"}

    @property
    def refuted(self) -> bool:
        """Whether the candidate is shown not to help; one that was set aside is not."""
        return self.action == "reject"


# A text in a short representation, in characters; a reason often ends with the remedy.
SHORT_TEXT = 60
LONG_TEXT = 240

# A list that is longer shows its length alone, and a nested value is cut here.
SHORT_LIST = 3
SHORT_FIELD = 150


class ShortReprModel(FrozenModel):
    """A value whose ``repr`` is one short line, without the fields that have their default."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the fields that a reader needs, each shortened."""
        for name, value in super().__repr_args__():
            field = type(self).model_fields.get(str(name))
            if field is None or value != field.default:
                yield name, _Short(_shorten_value(value, is_long=name in {"reason", "message"}))

    def __str__(self) -> str:
        return repr(self)


class _Short(str):
    """A text that is its own ``repr``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shorten_value(value: object, *, is_long: bool) -> str:
    longest = LONG_TEXT if is_long else SHORT_TEXT
    match value:
        case float():
            return f"{value:.3g}"
        case str() if len(value) > longest:
            return repr(f"{value[: longest - 3]}...")
        case str():
            return repr(value)
        case tuple() if len(value) > SHORT_LIST:
            return f"<{len(value):,}>"
    text = repr(value)
    return text if len(text) <= SHORT_FIELD else f"{text[:SHORT_FIELD]}..."
