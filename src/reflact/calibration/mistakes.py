"""Mistaken evaluations of true inputs: which kinds there are, how far they may go, how a model is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, create_model, model_validator

from reflact.calibration.perturbations import (
    DISTANCE_TOLERANCE,
    OTHER_PURPOSE_MISTAKE,
    DistanceBand,
    StepToContrast,
    has_same_words,
    keep_letters_and_digits,
)
from reflact.config.models import ConfigSection, option
from reflact.memory.models import Construction, ContrastPair, Evaluation
from reflact.messages import ReplyModel
from reflact.types import FrozenModel

MistakeDirection = Literal["too_high", "too_low", "either", "against_progress"]
"""The direction of a kind of mistake; ``against_progress``: too low if there is progress, too high else."""


class Mistake(FrozenModel):
    """A kind of mistake that critics make: its name, what such a critic does, and in which direction it errs."""

    name: str = Field(pattern=r"^[a-z_]+$")
    description: str = Field(min_length=1)
    direction: MistakeDirection = "either"


KNOWN_MISTAKES: Final = (
    Mistake(
        name="credit_for_intention",
        description="Credits what the agent tried, planned or announced as if it had been achieved.",
        direction="too_high",
    ),
    Mistake(
        name="inflated_score",
        description="Sees what was achieved and makes far too much of it, out of kindness or enthusiasm.",
        direction="too_high",
    ),
    Mistake(
        name="ignored_evidence",
        description="Overlooks what the state after the action shows, and scores as if it were not there.",
        direction="against_progress",
    ),
    Mistake(
        name="scale_inconsistency",
        description="Describes what happened rightly, but gives a number that does not match it.",
    ),
)
"""The kinds in ``memory.models.MISTAKE_KINDS``, as models are told of them."""


class ProgressRange(FrozenModel):
    """The numbers that a mistaken progress after may take, both ends included."""

    low: float
    high: float


class MistakenReply(ReplyModel):
    """An evaluation that makes a mistake."""

    version: ClassVar[int] = 1
    mistake: str = Field(description="The kind of mistake that the evaluation makes.")
    reasoning: str = Field(
        min_length=1, max_length=600, description="How the mistaken judge argues, in two or three sentences."
    )
    phi_after: float = Field(ge=0, le=10, description="The mistaken score of the state after the action.")
    why: str = Field(min_length=1, max_length=300, description="What is wrong about it, in one sentence.")


class PurposeReply(ReplyModel):
    """Another purpose, close to the given one."""

    version: ClassVar[int] = 1
    purpose: str = Field(min_length=1, max_length=2000, description="The other purpose, in full.")


@lru_cache(maxsize=64)
def mistake_reply_type(mistake: str) -> type[MistakenReply]:
    """Return the reply type of a mistake of one kind; the kind stands in the schema."""
    about = MistakenReply.model_fields["mistake"].description
    only: Any = Literal[mistake]
    return create_model(
        "MistakenReply",
        __base__=MistakenReply,
        __doc__=MistakenReply.__doc__,
        mistake=(only, Field(description=about)),
    )


def compute_reach(
    mistake: Mistake, right: Evaluation, *, band: DistanceBand, variant: int = 0
) -> ProgressRange | None:
    """Return the range that a mistake of a kind may reach beside the right score; None if the scale ends before it.

    A kind that may lead both ways goes to the side on which the scale has more room, and every second variant goes
    the other way, if there is room.
    """
    progress = right.progress_after
    for direction in _list_directions(mistake, right, variant):
        if direction == "too_high" and progress + band.nearest <= 10 + DISTANCE_TOLERANCE:
            return ProgressRange(
                low=min(10.0, progress + band.nearest), high=min(10.0, progress + band.farthest)
            )
        if direction == "too_low" and progress - band.nearest >= -DISTANCE_TOLERANCE:
            return ProgressRange(
                low=max(0.0, progress - band.farthest), high=max(0.0, progress - band.nearest)
            )
    return None


def _list_directions(mistake: Mistake, right: Evaluation, variant: int) -> tuple[str, ...]:
    if mistake.direction == "against_progress":
        return ("too_low",) if right.delta > 0 else ("too_high",)
    if mistake.direction == "either":
        roomy = ("too_high", "too_low") if right.progress_after <= 5 else ("too_low", "too_high")
        return roomy if variant % 2 == 0 else roomy[::-1]
    return (mistake.direction,)


def make_mistake_check(right: Evaluation, reach: ProgressRange) -> Callable[[MistakenReply], None]:
    """Return the check of a mistaken evaluation: its number lies within reach, its words are its own."""

    def check(reply: MistakenReply) -> None:
        if not reach.low - DISTANCE_TOLERANCE <= reply.phi_after <= reach.high + DISTANCE_TOLERANCE:
            raise ValueError(
                f"phi_after must be from {reach.low:g} to {reach.high:g}, not {reply.phi_after:g}"
            )
        if not keep_letters_and_digits(reply.reasoning) or not keep_letters_and_digits(reply.why):
            raise ValueError("reasoning and why must hold words")
        if has_same_words(reply.reasoning, right.reasoning):
            raise ValueError(
                "the reasoning is that of the right evaluation; argue as the mistaken judge does"
            )

    return check


def make_purpose_check(purpose: str) -> Callable[[PurposeReply], None]:
    """Return the check of another purpose: it is not the given one in other signs."""

    def check(reply: PurposeReply) -> None:
        if not keep_letters_and_digits(reply.purpose) or has_same_words(reply.purpose, purpose):
            raise ValueError("that is the same purpose; write one that other work is needed for")

    return check


DropReason = Literal[
    "no_room",
    "unverified",
    "disagreement",
    "not_applicable",
    "not_confirmed",
    "bad_reply",
    "too_long",
    "known",
    "duplicate",
    "judged_wrong",
    "decided_by_position",
]
"""Why a candidate became no pair; ``docs/contrast.md`` explains each."""


class DroppedCandidate(FrozenModel):
    """Why a candidate became no pair: the kind of reason, and the reason in words.

    ``mistake`` is the kind that was wanted, ``construction`` how the wrong side was to be made, if that was known.
    """

    reason: DropReason
    explanation: str
    step: int
    mistake: str
    construction: Construction | None = None


class GenerationResult(FrozenModel):
    """What became of a round's candidates over one trace, in the order of events; no two pairs have one id.

    ``n_skipped`` counts the events that were not selected: they moved, but by less than ``min_delta``.
    """

    pairs: tuple[ContrastPair, ...] = ()
    dropped: tuple[DroppedCandidate, ...] = ()
    n_skipped: int = Field(default=0, ge=0)

    @property
    def n_candidates(self) -> int:
        """The number of candidates: pairs and drops."""
        return len(self.pairs) + len(self.dropped)


JudgedPairs = Literal["all", "unproven"]

JUDGED_PAIRS_HELP = (
    "Which pairs judges compare: `all`, or only `unproven` pairs. A pair is unproven if a model wrote the mistake or the "
    "other purpose, or if its label is an agreement of samples. Pairs that are not compared have no difficulty."
)


class ContrastSettings(ConfigSection):
    """How contrast pairs are made."""

    min_delta: float = option(
        0.5, ge=0, le=10, description="Least change of progress of the steps to learn from."
    )
    include_no_change: bool = option(True, description="Also learn from steps that change nothing.")
    candidates_per_event: int = option(4, ge=1, description="Candidates for each step.")
    n_samples: int = option(
        3, ge=2, description="Number of critic samples that must agree if there is no label."
    )
    max_spread: float = option(1.0, ge=0, le=10, description="Largest distance between agreeing samples.")
    n_judges: int = option(0, ge=0, description="Blind comparisons of each pair; 0: none, else at least 2.")
    judged_pairs: JudgedPairs = option("all", description=JUDGED_PAIRS_HELP)
    min_agreement: float = option(
        0.6, gt=0.5, le=1, description="Least share of comparisons that must find the right side."
    )
    concurrency: int = option(
        8,
        ge=1,
        description="For one trace, the maximum of steps at a time, and of questions in flight.",
    )
    state_tokens: int = option(
        2000,
        ge=32,
        description="Maximum of tokens of each of purpose, state before, action, state after and change.",
    )
    write_other_purposes: bool = option(
        True, description="Let a model write another purpose if no other trace has one."
    )
    mistakes: tuple[Mistake, ...] = option(
        (), description="Your own kinds of mistakes, with a name and a description."
    )
    seed: int = option(
        0, description="Seed of the order of sides, and of the kinds of mistakes of each step."
    )

    @model_validator(mode="after")
    def _check_judges(self) -> Self:
        if self.n_judges == 1:
            raise ValueError("one comparison shows one order only; n_judges is 0 or at least 2")
        return self


DEFAULT_CONTRAST_SETTINGS = ContrastSettings()

CandidateCallback: TypeAlias = Callable[[ContrastPair | DroppedCandidate], Awaitable[None]]
"""Gets each pair and each dropped candidate when it is ready."""


class OtherPurposePlan(NamedTuple):
    """Look at the step under another purpose; None: one that a model writes."""

    step: StepToContrast
    purpose: str | None
    construction: Construction = "other_purpose"


class AskedMistakePlan(NamedTuple):
    """Ask a model for a mistake of the true step; equal ones differ by their variant."""

    step: StepToContrast
    mistake: Mistake
    reach: ProgressRange
    variant: int
    construction: Construction = "asked"


class ImpossiblePlan(NamedTuple):
    """Nothing makes such a mistake of this step, and why."""

    reason: DropReason
    explanation: str
    construction: Construction | None = None


CandidatePlan: TypeAlias = ContrastPair | OtherPurposePlan | AskedMistakePlan | ImpossiblePlan
"""How a candidate is made; pairs that need no model are there already."""


def plan_candidates(
    mistakes: Sequence[Mistake],
    step: StepToContrast,
    *,
    ready_pairs: Sequence[ContrastPair],
    other_purpose: OtherPurposePlan | None,
) -> tuple[CandidatePlan, ...]:
    """Return for each mistake that a step was dealt how to make it: each way at most once, the best first.

    ``ready_pairs`` need no model and are not known yet, the best first.
    """
    ways = {mistake.name: _list_ways(mistake, step, ready_pairs, other_purpose) for mistake in mistakes}
    return tuple(next(ways[mistake.name]) for mistake in mistakes)


def find_other_purpose(purpose: str, others: Sequence[str], *, index: int) -> str | None:
    """Return the purpose at an index among those that differ from a given one; None if there is none."""
    different = {
        keep_letters_and_digits(other): other
        for other in sorted(others)
        if keep_letters_and_digits(other) not in {keep_letters_and_digits(purpose), ""}
    }
    return dict(enumerate(different.values())).get(index)


def _list_ways(
    mistake: Mistake,
    step: StepToContrast,
    ready_pairs: Sequence[ContrastPair],
    other_purpose: OtherPurposePlan | None,
) -> Iterator[CandidatePlan]:
    yield from (pair for pair in ready_pairs if pair.mistake == mistake.name)
    if other_purpose is not None and mistake.name == OTHER_PURPOSE_MISTAKE:
        yield other_purpose
    variant = 0
    while (reach := compute_reach(mistake, step.right, band=step.band, variant=variant)) is not None:
        yield AskedMistakePlan(step, mistake, reach, variant)
        variant += 1
    progress = f"{step.right.progress_after:g}"
    explanation = f"no construction makes it, and beside {progress} the scale has no room for it"
    yield from repeat(ImpossiblePlan("not_applicable", explanation))
