"""Mistaken evaluations that a model is asked to write of a true step, and the judge that checks
them.

A pair is kept if one judge prefers the right side in both orders, so that a judge who always picks
the first, or the second, keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field, JsonValue, create_model

from reflact.calibration.pairs import (
    DISTANCE_TOLERANCE,
    MIN_DISTANCE,
    StepToContrast,
    has_same_words,
    keep_letters_and_digits,
)
from reflact.calibration.transition_view import TransitionView, show_state, show_transition
from reflact.errors import CallError, ContextOverflow, ReplyError, RequestRefused
from reflact.memory.models import ContrastPair, Evaluation, Provenance
from reflact.messages import CallId, ReplyModel
from reflact.prompts import PromptBook, fence
from reflact.protocols import LLM
from reflact.types import FrozenModel, digest_json


class Mistake(FrozenModel):
    """A kind of mistake that critics make, and the direction in which it errs.

    ``against_progress``: too low if there is progress, too high else.
    """

    name: str = Field(pattern=r"^[a-z_]+$")
    description: str = Field(min_length=1)
    direction: Literal["too_high", "too_low", "either", "against_progress"] = "either"


# The usual kinds; users may add their own.
KNOWN_MISTAKES: Final = (
    Mistake(
        name="credit_for_intention",
        description="Credits what the agent tried, planned or announced as if it had been "
        "achieved.",
        direction="too_high",
    ),
    Mistake(
        name="inflated_score",
        description="Sees what was achieved and makes far too much of it, out of kindness or "
        "enthusiasm.",
        direction="too_high",
    ),
    Mistake(
        name="ignored_evidence",
        description="Overlooks what the state after the action shows, and scores as if it were not "
        "there.",
        direction="against_progress",
    ),
    Mistake(
        name="scale_inconsistency",
        description="Describes what happened rightly, but gives a number that does not match it.",
    ),
)

# What the writer is told from the second round on.
HARDER_HINT = "It must be hard to notice: the judge sounds careful and names real details."


class DroppedCandidate(NamedTuple):
    """Why a mistake that was asked for became no pair."""

    reason: Literal["bad_reply", "too_long", "judged_wrong", "known"]
    explanation: str


class ProgressRange(NamedTuple):
    """The numbers that a mistaken progress after may take, both ends included."""

    low: float
    high: float


class MistakenReply(ReplyModel):
    """An evaluation that makes a mistake."""

    version: ClassVar[int] = 1
    mistake: str = Field(description="The kind of mistake that the evaluation makes.")
    reasoning: str = Field(
        min_length=1,
        max_length=600,
        description="How the mistaken judge argues, in two or three sentences.",
    )
    phi_after: float = Field(
        ge=0, le=10, description="The mistaken score of the state after the action."
    )
    why: str = Field(
        min_length=1, max_length=300, description="What is wrong about it, in one sentence."
    )


class JudgeReply(ReplyModel):
    """Which of two evaluations is right."""

    version: ClassVar[int] = 1
    reasoning: str = Field(
        min_length=1,
        max_length=600,
        description="What the states show, and what that means for each.",
    )
    better: Literal["first", "second"] = Field(description="Which of the two evaluations is right.")


def compute_reach(mistake: Mistake, step: StepToContrast) -> ProgressRange | None:
    """Return the range that a mistake of a kind may reach beside the right score; None if the scale
    ends before it.

    A kind that may lead both ways goes to the side on which the scale has more room.
    """
    right = step.right
    progress = right.progress_after
    is_too_high = mistake.direction == "too_high"
    if mistake.direction == "against_progress":
        is_too_high = right.delta <= 0
    elif mistake.direction == "either":
        is_too_high = progress <= 5
    if is_too_high and progress + MIN_DISTANCE <= 10 + DISTANCE_TOLERANCE:
        farthest = min(10.0, progress + step.max_distance)
        return ProgressRange(min(10.0, progress + MIN_DISTANCE), farthest)
    if not is_too_high and progress - MIN_DISTANCE >= -DISTANCE_TOLERANCE:
        farthest = max(0.0, progress - step.max_distance)
        return ProgressRange(farthest, max(0.0, progress - MIN_DISTANCE))
    return None


class AskedMistake(NamedTuple):
    """A mistake that a model is to write of a step, and the range of its progress after.

    From round 2 on, the mistake must be hard to notice.
    """

    step: StepToContrast
    mistake: Mistake
    reach: ProgressRange
    round_number: int = 1


async def ask_for_pair(
    asked: AskedMistake, *, llm: LLM, prompts: PromptBook, state_tokens: int = 2000
) -> ContrastPair | DroppedCandidate:
    """Let a model write a mistaken evaluation of a step, and judge it in both orders.

    Each part of the step takes at most ``state_tokens``.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
        BudgetSpent: The budget has no room for a call.
    """
    view = TransitionView(asked.step.event.transition)
    shown = show_transition(asked.step.purpose, view, max_tokens=state_tokens)
    try:
        pair = await _write_pair(asked, shown, llm, prompts)
        for trial, is_right_first in enumerate((True, False)):
            if not await prefers_right(
                pair, shown, llm, prompts, is_right_first=is_right_first, trial=trial
            ):
                order = "first" if is_right_first else "second"
                return DroppedCandidate(
                    "judged_wrong", f"the judge did not prefer the right side, which stood {order}"
                )
    except ContextOverflow as error:
        return DroppedCandidate("too_long", str(error))
    except CallError as error:
        return DroppedCandidate("bad_reply", str(error))
    return pair


async def _write_pair(
    asked: AskedMistake, shown: str, llm: LLM, prompts: PromptBook
) -> ContrastPair:
    step, mistake, reach, round_number = asked
    right = step.right
    variables = {
        "step": shown,
        "before": f"{right.progress_before:g}",
        "right": fence("right", show_state(f"{right.progress_after:g}: {right.reasoning}")),
        "mistake": mistake.name,
        "description": mistake.description,
        "low": f"{reach.low:g}",
        "high": f"{reach.high:g}",
        "hints": HARDER_HINT if round_number > 1 else "",
    }
    about: JsonValue = {
        "purpose": step.purpose,
        "transition": step.event.transition.json_object,
        "right": right.hashed_fields,
        "mistake": mistake.model_dump(mode="json"),
        "reach": {"low": reach.low, "high": reach.high},
        "round": round_number,
    }
    reply = await llm.ask(
        prompts.render("contrast", variables),
        mistake_reply_type(mistake.name),
        call_id=CallId(role="contrast", purpose="mistake", part=digest_json(about)[:32]),
        check=_make_mistake_check(right, reach),
    )
    said = reply.value
    version = prompts.prompts["contrast"].header.version
    return step.build_pair(
        right.model_copy(
            update={"progress_after": said.phi_after, "reasoning": said.reasoning, "evidence": ()}
        ),
        construction="asked",
        mistake=mistake.name,
        reason=said.why,
        provenance=Provenance(
            trace_id=step.trace_id,
            step=step.event.step,
            prompt=f"contrast@{version}",
            model=llm.identity,
        ),
    )


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


def _make_mistake_check(right: Evaluation, reach: ProgressRange) -> Callable[[MistakenReply], None]:
    """Return a check that a mistaken number lies within reach and that the words are its own."""

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


async def prefers_right(
    pair: ContrastPair,
    shown: str,
    llm: LLM,
    prompts: PromptBook,
    *,
    is_right_first: bool,
    trial: int,
) -> bool:
    """Whether a judge prefers the right side of a pair; one that gives no valid reply does not."""
    sides = (pair.right, pair.wrong) if is_right_first else (pair.wrong, pair.right)
    first, second = map(_format_evaluation, sides)
    variables = {"step": shown, "first": fence("first", first), "second": fence("second", second)}
    call_id = CallId(role="judge", purpose="compare", part=pair.id[:32], trial=trial)
    try:
        reply = await llm.ask(prompts.render("judge", variables), JudgeReply, call_id=call_id)
    except (ReplyError, RequestRefused):
        return False
    return (reply.value.better == "first") is is_right_first


def _format_evaluation(evaluation: Evaluation) -> str:
    numbers = f"Before: {evaluation.progress_before:g}\nAfter: {evaluation.progress_after:g}"
    return show_state(f"{numbers}\nReasoning: {evaluation.reasoning}")
