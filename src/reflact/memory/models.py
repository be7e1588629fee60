"""The values of calibration: transitions and their evaluations, and contrast pairs."""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, JsonValue

from reflact.jsonutil import is_same_json, iter_json_chunks
from reflact.types import (
    FrozenModel,
    ShortReprModel,
    canonical_json,
    digest_text,
    join_canonical_json,
)

# The progress of a state towards a purpose, from 0 (none) to 10 (complete). NaN is rejected.
Progress = Annotated[float, Field(ge=0, le=10)]

Share = Annotated[float, Field(ge=0, le=1)]

# The origin of a wrong evaluation: the critic's own mistake (``observed``), a mistake that a model
# was asked to write (``asked``), one that the user wrote (``written``), or a perturbed input.
Construction = Literal[
    "observed",
    "no_effect",
    "claim_for_effect",
    "evidence_withdrawn",
    "progress_reversed",
    "asked",
    "written",
]

# Who says what is right.
LabelSource = Literal["program", "human"]


class Action(FrozenModel):
    """An action of an agent: the name of a tool and its arguments."""

    name: str
    arguments: JsonValue = None


class Transition(FrozenModel):
    """One step of an agent; states are text or JSON values and are never shortened."""

    before: JsonValue
    action: Action
    after: JsonValue

    @property
    def changes_state(self) -> bool:
        """Whether the states differ."""
        return not is_same_json(self.before, self.after)

    @property
    def json_object(self) -> dict[str, JsonValue]:
        """The fields as JSON values that are shared, not copied."""
        action: JsonValue = {"name": self.action.name, "arguments": self.action.arguments}
        return {"before": self.before, "action": action, "after": self.after}

    @property
    def canonical_json(self) -> str:
        """The canonical JSON of the transition."""
        return "".join(iter_json_chunks(self.json_object))


# Whether progress rises, stays or falls.
Direction = Literal["rises", "stays", "falls"]


class Evaluation(FrozenModel):
    """A judgement of a transition: the progress before and after it, from 0 to 10.

    ``evidence`` quotes the basis of the judgement. ``confidence`` is the judge's own probability
    that the judgement is right.
    """

    progress_before: Progress
    progress_after: Progress
    reasoning: str
    evidence: tuple[str, ...] = ()
    confidence: Share = 0.5

    @property
    def delta(self) -> float:
        """The change, in -10..10."""
        return self.progress_after - self.progress_before

    @property
    def direction(self) -> Direction:
        """Whether progress rises, stays or falls."""
        if self.delta == 0:
            return "stays"
        return "rises" if self.delta > 0 else "falls"

    @property
    def hashed_fields(self) -> dict[str, JsonValue]:
        """Its fields as hashes use them: ids of pairs and calls rest on these names."""
        fields = self.model_dump(mode="json")
        fields["phi_before"] = fields.pop("progress_before")
        fields["phi_after"] = fields.pop("progress_after")
        return fields


class Label(FrozenModel):
    """The right evaluation of a transition, and its source.

    A label without ``progress_before`` can still measure and test a critic. Pairs need both values;
    see ``Trace.record``.
    """

    progress_before: Progress | None = None
    progress_after: Progress
    source: LabelSource
    reasoning: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def delta(self) -> float | None:
        """The change, in -10..10; None without ``progress_before``."""
        return None if self.progress_before is None else self.progress_after - self.progress_before


class ScoreEvent(FrozenModel):
    """One step of a trace, with the critic's evaluation and the label if they are known."""

    step: int = Field(ge=0)
    transition: Transition
    evaluation: Evaluation | None = None
    label: Label | None = None


class StateScore(FrozenModel):
    """A critic's score of a transition: its evaluation after the guards; ``raw`` is the model's
    own.

    ``raw`` is the median if ``n_samples`` were requested, and ``spread`` the largest difference of
    their ``progress_after``. ``applied_guards`` changed the evaluation, in this order. ``pair_ids``
    were the prompt's worked examples.
    """

    evaluation: Evaluation
    raw: Evaluation
    applied_guards: tuple[str, ...] = ()
    n_samples: int = 1
    spread: float = Field(default=0.0, ge=0, le=10)
    pair_ids: tuple[str, ...] = ()


# The kinds of a pair's cards: of the right evaluation, and of the wrong one.
CardKind = Literal["critic_calibration", "failure_pattern"]

CardStatus = Literal["quarantined", "promoted", "rejected", "archived"]


class Scope(FrozenModel):
    """Who may see a pair; an empty field means everyone.

    A critic sees a pair only if it names a value of each field that is not empty.
    """

    roles: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    task_categories: tuple[str, ...] = ()
    user: str | None = None


class Origin(FrozenModel):
    """A step of a trace; without ``step`` it may be any step."""

    trace_id: str
    step: int | None = None


class Provenance(FrozenModel):
    """The source of a pair; ``prompt`` is a prompt's name and version, such as ``contrast@1``."""

    trace_id: str | None = None
    step: int | None = None
    prompt: str | None = None
    model: str | None = None

    @property
    def as_origins(self) -> tuple[Origin, ...]:
        """The step as an origin; empty without a trace."""
        return () if self.trace_id is None else (Origin(trace_id=self.trace_id, step=self.step),)


class PairHashes(NamedTuple):
    """The hash of a pair, and the hash of its subject: purpose and transition."""

    pair: str
    subject: str


_IDENTITY_FIELDS = ("purpose", "right", "wrong", "mistake", "scope")


class ContrastPair(FrozenModel):
    """A right and a wrong evaluation of one transition under a purpose, and why one is wrong.

    Args:
        right: A label, or without one the critic's own score.
        wrong: The wrong evaluation; see ``construction``.
        label_source: None: nobody knows whether the right side is right.
        mistake: One of ``KNOWN_MISTAKES`` of ``calibration.asked``, or a user's own.
        scope: Who may see the pair.
    """

    purpose: str
    transition: Transition
    right: Evaluation
    wrong: Evaluation
    reason: str
    mistake: str
    construction: Construction
    label_source: LabelSource | None
    scope: Scope = Scope(roles=("critic",))
    provenance: Provenance = Provenance()

    @property
    def id(self) -> str:
        """A content hash of 64 hexadecimal digits, without the provenance."""
        return self.hashes.pair

    @cached_property
    def hashes(self) -> PairHashes:
        """The hashes, computed once per object, in time proportional to the states."""
        fields = self.model_dump(mode="json", include=set(_IDENTITY_FIELDS))
        fields["right"] = self.right.hashed_fields
        fields["wrong"] = self.wrong.hashed_fields
        texts = {name: canonical_json(value) for name, value in fields.items()}
        texts["transition"] = self.transition.canonical_json
        subject = {name: texts[name] for name in ("purpose", "transition")}
        return PairHashes(
            digest_text(join_canonical_json(texts)), digest_text(join_canonical_json(subject))
        )


class MemoryCard(FrozenModel):
    """One evaluation of a contrast pair in words; the pair ``pair_id`` holds the transition.

    ``strategy`` says why: the right evaluation's reasoning,
    or the reason why the other one is wrong.
    """

    kind: CardKind
    pair_id: str
    mistake: str
    content: str
    strategy: str


class PromotionEvidence(ShortReprModel):
    """The result of a replay test of a batch.

    Args:
        passed_test: Whether the batch is promoted, or may stay promoted in a ``demote`` test.
        n_traces: The number of compared traces, which are the unit of the test.
        n_earlier_tests: Earlier tests on these traces, which share the error probability.
        effect: Mean absolute error without the batch minus with it; above 0 is better.
        low, high: The 95% interval of the effect, resampled by trace.
        critic, prompt: The critic's model and settings, and the name and version of its prompt.
        accuracy_change: Pairwise accuracy with the batch minus without it: the lower of the mean
            over traces and the difference over all comparisons. None if nothing can be ordered.
        outcome: ``better``, ``not_shown`` or ``accuracy_fell``; of a ``demote`` test ``worse`` or
            ``no_harm_shown``.
        n_unscored: Transitions without a valid score in one of the arms.
    """

    pair_ids: tuple[str, ...]
    passed_test: bool
    n_traces: int
    n_transitions: int
    n_earlier_tests: int
    effect: float
    low: float
    high: float
    p_value: float
    alpha: float
    critic: str
    prompt: str
    accuracy_change: float | None = None
    outcome: str = ""
    n_unscored: int = 0


class Submission(FrozenModel):
    """The result of a submission.

    ``reason`` is the rule that quarantined or rejected the pair, or None. ``anchor``: an anchor has
    the same transition. ``anchor_trace``: an anchor came from the same trace.
    """

    is_new: bool
    status: CardStatus
    reason: str | None = None


class StoredPair(FrozenModel):
    """A pair in the store, with its status; ``origins`` are all steps that gave it, sorted."""

    pair: ContrastPair
    status: CardStatus
    reason: str | None = None
    utility: Share = 0.5
    changed_at: datetime
    origins: tuple[Origin, ...] = ()

    @property
    def needs_review(self) -> bool:
        """Whether it is quarantined for a reason, so that it cannot be tested."""
        return self.status == "quarantined" and self.reason is not None


class BatchTest(FrozenModel):
    """A test of a batch.

    Args:
        number: Counts the tests of a store, from 1.
        n_earlier_tests: Tests that were opened before it on any of its traces.
        evidence: The result; None while the test runs.
        kind: Whether the test promotes the batch, or measures promoted pairs again.
        content_fingerprints, name_fingerprints: Of the traces, sorted; see ``compute_fingerprint``.
    """

    number: int
    n_earlier_tests: int
    pair_ids: tuple[str, ...]
    evidence: PromotionEvidence | None = None
    kind: Literal["promote", "demote"] = "promote"
    content_fingerprints: tuple[str, ...] = ()
    name_fingerprints: tuple[str, ...] = ()
    at: datetime

    @property
    def fingerprints(self) -> frozenset[str]:
        """All fingerprints of the traces."""
        return frozenset((*self.content_fingerprints, *self.name_fingerprints))


class ForgetResult(FrozenModel):
    """What ``forget`` removed.

    ``n_responses`` counts the removed responses to questions of calibrations. ``n_responses_left``
    counts those that stay in the file and may quote the trace. ``remains_in_wal`` says that another
    process was reading, so that the write-ahead log still contains the removed data.
    """

    trace_id: str
    trace_removed: bool
    n_events: int
    pair_ids: tuple[str, ...]
    n_anchors: int
    n_responses: int = 0
    n_responses_left: int = 0
    remains_in_wal: bool = False


class StoredTrace(FrozenModel):
    """A stored trace with its events."""

    id: str
    purpose: str
    events: tuple[ScoreEvent, ...]


class TestableTrace(NamedTuple):
    """A stored trace with labelled steps, without the steps themselves.

    It ``has_pairs`` if a stored pair came from it or from a trace with equal content.
    """

    id: str
    purpose: str
    content_hash: str
    has_pairs: bool


class TraceSummary(FrozenModel):
    """Counts of a stored trace: steps, scored ones, labelled ones, and pairs made of it.

    A trace with pairs tests no batch.
    """

    id: str
    purpose: str
    n_events: int
    n_scored: int
    n_labelled: int
    n_pairs: int


class StoredCalibration(NamedTuple):
    """A calibration: the memory's state at its start, and its result as JSON after its end."""

    baseline: str
    result: str | None
