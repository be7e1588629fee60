"""Mistaken evaluations of true inputs: which kinds there are, how far they may go, how a model is asked.

They are the weaker construction, for what no perturbation gives. Only the mistake is asked for, never what
is right: that is known before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, create_model

from reflact.calibration.changes import show_state
from reflact.calibration.constructions import ROUNDING, Band, plain, same_words
from reflact.calls import Rendered, ReplyModel
from reflact.memory import Evaluation
from reflact.prompts import PromptBook, fence
from reflact.types import Frozen

Direction = Literal["too_high", "too_low", "either", "against_progress"]
"""Where a kind of mistake leads; ``against_progress``: too low where there is progress, too high else."""


class Mistake(Frozen):
    """A kind of mistake that critics make.

    Args:
        name: Small letters and underscores.
        description: What such a critic does, in one or two sentences that a model can act on.
        direction: Where it leads.
    """

    name: str = Field(pattern=r"^[a-z_]+$")
    description: str = Field(min_length=1)
    direction: Direction = "either"


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
"""The kinds in ``memory.MISTAKES``, as models are told of them."""


class Reach(Frozen):
    """The numbers that a mistaken phi after may take, both ends included."""

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
def mistaken(kind: str) -> type[MistakenReply]:
    """Return the reply type of a mistake of one kind; the kind stands in the schema."""
    about = MistakenReply.model_fields["mistake"].description
    only: Any = Literal[kind]
    return create_model(
        "MistakenReply",
        __base__=MistakenReply,
        __doc__=MistakenReply.__doc__,
        mistake=(only, Field(description=about)),
    )


def reach(mistake: Mistake, right: Evaluation, *, band: Band, variation: int = 0) -> Reach | None:
    """Return where a mistake of a kind may lead, beside what is right; None where the scale ends before.

    A kind that may lead both ways goes where the scale has more room, and every second variation the other
    way, if there is any.
    """
    high = Reach(
        low=min(10.0, right.phi_after + band.nearest), high=min(10.0, right.phi_after + band.farthest)
    )
    low = Reach(low=max(0.0, right.phi_after - band.farthest), high=max(0.0, right.phi_after - band.nearest))
    fits = {
        "too_high": right.phi_after + band.nearest <= 10 + ROUNDING,
        "too_low": right.phi_after - band.nearest >= -ROUNDING,
    }
    ways = {"too_high": high, "too_low": low}
    names = [name for name in _ways(mistake, right, variation) if fits[name]]
    return ways[names[0]] if names else None


def _ways(mistake: Mistake, right: Evaluation, variation: int) -> tuple[str, ...]:
    if mistake.direction == "against_progress":
        return ("too_low",) if right.delta > 0 else ("too_high",)
    if mistake.direction == "either":
        roomy = ("too_high", "too_low") if right.phi_after <= 5 else ("too_low", "too_high")
        return roomy if variation % 2 == 0 else roomy[::-1]
    return (mistake.direction,)


def mistaken_check(right: Evaluation, reach: Reach) -> Callable[[MistakenReply], None]:
    """Return the check of a mistaken evaluation: its number lies within reach, its words are its own."""

    def check(reply: MistakenReply) -> None:
        if not reach.low - ROUNDING <= reply.phi_after <= reach.high + ROUNDING:
            raise ValueError(
                f"phi_after must be from {reach.low:g} to {reach.high:g}, not {reply.phi_after:g}"
            )
        if not plain(reply.reasoning) or not plain(reply.why):
            raise ValueError("reasoning and why must hold words")
        if same_words(reply.reasoning, right.reasoning):
            raise ValueError(
                "the reasoning is that of the right evaluation; argue as the mistaken judge does"
            )

    return check


def purpose_check(purpose: str) -> Callable[[PurposeReply], None]:
    """Return the check of another purpose: it is not the given one in other signs."""

    def check(reply: PurposeReply) -> None:
        if not plain(reply.purpose) or same_words(reply.purpose, purpose):
            raise ValueError("that is the same purpose; write one that other work is needed for")

    return check


def ask_mistake(
    prompts: PromptBook, *, step: str, right: Evaluation, mistake: Mistake, reach: Reach, subtle: bool
) -> Rendered:
    """Return the prompt for a mistaken evaluation; ``step`` is the step as it is shown."""
    hints = "It must be hard to notice: the judge sounds careful and names real details." if subtle else ""
    return prompts.render(
        "contrast",
        {
            "step": step,
            "right": fence("right", show_state(f"{right.phi_after:g}: {right.reasoning}")),
            "mistake": mistake.name,
            "description": mistake.description,
            "low": f"{reach.low:g}",
            "high": f"{reach.high:g}",
            "hints": hints,
        },
    )


def ask_purpose(prompts: PromptBook, *, purpose: str) -> Rendered:
    """Return the prompt for another purpose, close to the given one."""
    return prompts.render("other_purpose", {"purpose": fence("purpose", show_state(purpose))})
