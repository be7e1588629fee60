"""The values of calibration: transitions, evaluations of them, contrast pairs, memory cards.

They are pure and stand to the left of the ports, since the store keeps them and the calibration corridor
works with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field, JsonValue

from reflact.jsonutil import is_same_json, iter_json_chunks
from reflact.types import FrozenModel, ShortReprModel, canonical_json, digest_text, join_canonical_json

Progress = Annotated[float, Field(ge=0, le=10)]
"""How far a state has come towards a purpose: 0 is nothing of it, 10 all of it. NaN is refused."""

Share = Annotated[float, Field(ge=0, le=1)]

MISTAKE_KINDS: Final = ("credit_for_intention", "inflated_score", "ignored_evidence", "scale_inconsistency")
"""The kinds of mistakes that critics are known to make; users may add their own."""

Construction = Literal[
    "observed",
    "other_purpose",
    "no_effect",
    "claim_for_effect",
    "evidence_withdrawn",
    "progress_reversed",
    "asked",
    "written",
]
"""How the wrong side came about: the critic's own mistake, a perturbed input, a mistake that a model
was asked for, or one that a person or a program of the user's wrote."""

LabelSource = Literal["program", "human", "agreement"]

# ----------------------------------------------------------------------------------------- transitions


class Action(FrozenModel):
    """What an agent did: a tool's name, or what stands for one, and its arguments."""

    name: str
    arguments: JsonValue = None


class Transition(FrozenModel):
    """One step of an agent; states are text or JSON values and are kept whole."""

    before: JsonValue
    action: Action
    after: JsonValue

    @property
    def changes_state(self) -> bool:
        """Whether the states differ, in any way."""
        return not is_same_json(self.before, self.after)

    @property
    def payloads(self) -> tuple[JsonValue, JsonValue, JsonValue]:
        """What may be long about it: the states before and after, and the action's arguments."""
        return self.before, self.after, self.action.arguments

    @property
    def json_object(self) -> dict[str, JsonValue]:
        """Its fields as the JSON values that they are, which takes no time however large states are."""
        action: JsonValue = {"name": self.action.name, "arguments": self.action.arguments}
        return {"before": self.before, "action": action, "after": self.after}

    @property
    def canonical_json(self) -> str:
        """Its canonical JSON."""
        return join_canonical_json(
            {name: "".join(iter_json_chunks(value)) for name, value in self.json_object.items()}
        )


class Evaluation(FrozenModel):
    """How far a transition brought an agent, as somebody judged it.

    ``evidence`` quotes what the judgement rests on; ``confidence`` is the probability, by its own account,
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
    def hashed_fields(self) -> dict[str, JsonValue]:
        """Its fields as hashes use them: ids of pairs and calls rest on these names, so they never change."""
        fields = self.model_dump(mode="json")
        numbers = {"phi_before": fields.pop("progress_before"), "phi_after": fields.pop("progress_after")}
        return {**fields, **numbers}


class Label(FrozenModel):
    """What is right for a transition, who says so, and how far those who say so are apart (0 for one).

    Without ``progress_before``, as where only the state after was looked at, a step measures and tests a critic by
    its phi after like any other; pairs are made of it once that is known, see ``Trace.record``.
    """

    progress_before: Progress | None = None
    progress_after: Progress
    source: LabelSource
    spread: float = Field(default=0.0, ge=0, le=10)
    reasoning: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def delta(self) -> float | None:
        """The change, in -10..10; None where nothing is known of the state before."""
        return None if self.progress_before is None else self.progress_after - self.progress_before


class ScoreEvent(FrozenModel):
    """One step of a trace: how a critic judged it and what is right, each where it is known.

    Where neither is, what a critic's samples agree on may say what is right.
    """

    step: int = Field(ge=0)
    transition: Transition
    evaluation: Evaluation | None = None
    label: Label | None = None


class StateScore(FrozenModel):
    """What a critic says of a transition.

    Args:
        evaluation: What counts, after the guards.
        raw: What the model said; the median sample where there were several.
        guarded: The names of the guards that changed something, in the order in which they stand.
        samples: Evaluations that were asked for.
        spread: The largest difference between their phi after; 0 for one.
        pair_ids: The pairs that the prompt showed as worked examples.
    """

    evaluation: Evaluation
    raw: Evaluation
    applied_guards: tuple[str, ...] = ()
    n_samples: int = 1
    spread: float = Field(default=0.0, ge=0, le=10)
    pair_ids: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------- cards

CardKind = Literal[
    "purpose_contract",
    "user_preference",
    "skill_card",
    "episodic_case",
    "failure_pattern",
    "critic_calibration",
    "tool_policy",
]

CardStatus = Literal["candidate", "quarantined", "promoted", "rejected", "archived"]


class Scope(FrozenModel):
    """For whom a card is meant; an empty field means everyone.

    A card with a field that is not empty is found only by those who name one of its values.
    """

    roles: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    task_categories: tuple[str, ...] = ()
    user: str | None = None


class Origin(FrozenModel):
    """A step of a trace; without a number it may be any of them."""

    trace_id: str
    step: int | None = None


class Provenance(FrozenModel):
    """Where a card comes from; ``prompt`` is a prompt's name and version, such as ``contrast@1``."""

    trace_id: str | None = None
    step: int | None = None
    prompt: str | None = None
    model: str | None = None

    @property
    def as_origins(self) -> tuple[Origin, ...]:
        """The step that it names, or nothing."""
        return () if self.trace_id is None else (Origin(trace_id=self.trace_id, step=self.step),)


class PairHashes(NamedTuple):
    """Of all that makes a pair, and of its subject: purpose and transition."""

    pair: str
    subject: str


_IDENTITY_FIELDS = ("purpose", "right", "wrong", "mistake", "scope")


class ContrastPair(FrozenModel):
    """A right and a wrong evaluation of one transition, and why the wrong one is wrong.

    Args:
        purpose: What the agent was to achieve.
        transition: What both evaluations speak of.
        right: The correct one: gold, or what independent samples agree on.
        wrong: One that is wrong by construction, a mistake the critic made, or one that was asked for.
        why: What makes it wrong, in words.
        mistake: One of ``MISTAKES``, or a user's own.
        construction: How the wrong one came about.
        label: Where the right one comes from.
        judges: How many blind comparisons were made; 0: none.
        agreement: The share of them that found the right one; None without judges.
        scope: For whom the pair's cards are meant.
        provenance: Where it comes from.
    """

    purpose: str
    transition: Transition
    right: Evaluation
    wrong: Evaluation
    reason: str
    mistake: str
    construction: Construction
    label_source: LabelSource
    n_judgements: int = 0
    agreement: Share | None = None
    scope: Scope = Scope(roles=("critic",))
    provenance: Provenance = Provenance()

    @property
    def id(self) -> str:
        """Content hash, 64 hexadecimal digits: equal pairs are one, whoever made them and when."""
        return self.hashes.pair

    @cached_property
    def hashes(self) -> PairHashes:
        """Its hashes; they take time in proportion to the states, once for each object and its copies."""
        said = self.model_dump(mode="json", include=set(_IDENTITY_FIELDS))
        said |= {"right": self.right.hashed_fields, "wrong": self.wrong.hashed_fields}
        texts = {name: canonical_json(value) for name, value in said.items()}
        texts["transition"] = self.transition.canonical_json
        subject = {name: texts[name] for name in ("purpose", "transition")}
        return PairHashes(digest_text(join_canonical_json(texts)), digest_text(join_canonical_json(subject)))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; its hashes are its own where what they follow from is another."""
        copied = super().model_copy(update=update, deep=deep)
        if not {"transition", *_IDENTITY_FIELDS}.isdisjoint(update or ()):
            copied.__dict__.pop("hashes", None)
        return copied

    @property
    def difficulty(self) -> float | None:
        """1 - agreement: 0 where every judge tells right from wrong."""
        return None if self.agreement is None else 1 - self.agreement


class MemoryCard(FrozenModel):
    """One thing that was learned.

    The two cards of a contrast pair carry its id as ``pair_id`` and are stored, scanned, promoted and
    retired together. ``utility`` is measured; 0.5 until something measured it.
    """

    id: str
    kind: CardKind
    status: CardStatus = "candidate"
    content: str
    pattern: str = ""
    strategy: str = ""
    scope: Scope = Scope()
    trust: Share = 0.5
    utility: Share = 0.5
    version: int = 1
    pair_id: str | None = None
    provenance: Provenance = Provenance()
    created_by: str = ""
    reason: str | None = None
    created_at: datetime | None = None
    changed_at: datetime | None = None


class PromotionEvidence(ShortReprModel):
    """The evidence on which a batch of pairs was promoted, or was not.

    Args:
        pair_ids: The batch.
        promoted: Whether it passed.
        traces: Traces that the replay test compared, the unit of the test.
        transitions: Transitions in them.
        unscored: Those of them that had no valid score without the batch or with it.
        batches_before: Batches tested before it, which share the error probability with it.
        effect: Mean absolute error without the batch minus with it, so that above 0 is better.
        low, high: The effect's interval, resampled by trace.
        p_value: Of the test that decided.
        alpha: What it was compared with.
        critic: The critic's identity: model and settings.
        prompt: Its prompt's name and version.
        accuracy_change: Pairwise accuracy with the batch minus without: the lower of the mean over traces and
            the difference over all comparisons. None where nothing can be ordered.
        outcome: What decided, in a word: ``better``, ``not_shown``, ``accuracy_fell``, or of a later
            measurement ``worse`` or ``no_harm_shown``.
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
