"""Mistaken evaluations that a model is asked to write of a true step, and the judge that checks
them.

A pair is kept if one judge prefers the right side in both orders, so that a judge who always picks
the first, or the second, keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal

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
from reflact.memory.models import ContrastPair, Evaluation
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


# The kinds in ``memory.models.MISTAKE_KINDS``, as models are told of them.
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


class DroppedCandidate(FrozenModel):
    """Why a mistake that was asked for became no pair."""

    reason: Literal["bad_reply", "too_long", "judged_wrong", "known"]
    explanation: str
    step: int
    mistake: str


class ProgressRange(FrozenModel):
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


def compute_reach(mistake: Mistake, right: Evaluation) -> ProgressRange | None:
    """Return the range that a mistake of a kind may reach beside the right score; None if the scale
    ends before it.

    A kind that may lead both ways goes to the side on which the scale has more room.
    """
    progress = right.progress_after
    is_too_high = mistake.direction == "too_high"
    if mistake.direction == "against_progress":
        is_too_high = right.delta <= 0
    elif mistake.direction == "either":
        is_too_high = progress <= 5
    if is_too_high and progress + MIN_DISTANCE <= 10 + DISTANCE_TOLERANCE:
        return ProgressRange(low=min(10.0, progress + MIN_DISTANCE), high=10.0)
    if not is_too_high and progress - MIN_DISTANCE >= -DISTANCE_TOLERANCE:
        return ProgressRange(low=0.0, high=max(0.0, progress - MIN_DISTANCE))
    return None


async def ask_for_pair(
    step: StepToContrast,
    mistake: Mistake,
    reach: ProgressRange,
    *,
    llm: LLM,
    prompts: PromptBook,
    round_number: int = 1,
    state_tokens: int = 2000,
) -> ContrastPair | DroppedCandidate:
    """Let a model write a mistaken evaluation of a step, and judge it in both orders.

    Args:
        step: The step with its right evaluation.
        mistake: The kind of mistake.
        reach: The range of the mistaken progress after; see ``compute_reach``.
        llm: The model that writes and judges.
        prompts: The prompts ``contrast`` and ``judge``.
        round_number: From 2 on, the mistake must be hard to notice.
        state_tokens: The most tokens of each part of the step.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
        BudgetSpent: The budget has no room for a call.
    """

    def drop(
        reason: Literal["bad_reply", "too_long", "judged_wrong"], explanation: str
    ) -> DroppedCandidate:
        return DroppedCandidate(
            reason=reason, explanation=explanation, step=step.event.step, mistake=mistake.name
        )

    view = TransitionView(step.event.transition)
    shown = show_transition(step.purpose, view, max_tokens=state_tokens)
    try:
        pair = await _write_pair(
            step, mistake, reach, shown, llm=llm, prompts=prompts, round_number=round_number
        )
        for trial, order in enumerate(("first", "second")):
            if not await prefers_right(
                pair, shown, is_right_first=trial == 0, trial=trial, llm=llm, prompts=prompts
            ):
                return drop(
                    "judged_wrong", f"the judge did not prefer the right side, which stood {order}"
                )
    except ContextOverflow as error:
        return drop("too_long", str(error))
    except CallError as error:
        return drop("bad_reply", str(error))
    return pair.model_copy(update={"n_judgements": 2, "agreement": 1.0})


async def _write_pair(
    step: StepToContrast,
    mistake: Mistake,
    reach: ProgressRange,
    shown: str,
    *,
    llm: LLM,
    prompts: PromptBook,
    round_number: int,
) -> ContrastPair:
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
        "reach": reach.model_dump(mode="json"),
        "round": round_number,
    }
    reply = await llm.ask(
        prompts.render("contrast", variables),
        mistake_reply_type(mistake.name),
        call_id=CallId(role="contrast", purpose="mistake", part=digest_json(about)[:32]),
        check=_make_mistake_check(right, reach),
    )
    wrong = right.model_copy(
        update={
            "progress_after": reply.value.phi_after,
            "reasoning": reply.value.reasoning,
            "evidence": (),
        }
    )
    pair = step.build_pair(
        wrong, construction="asked", mistake=mistake.name, reason=reply.value.why
    )
    version = prompts.prompts["contrast"].header.version
    source = {"prompt": f"contrast@{version}", "model": llm.identity}
    return pair.model_copy(update={"provenance": pair.provenance.model_copy(update=source)})


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
    *,
    is_right_first: bool,
    trial: int,
    llm: LLM,
    prompts: PromptBook,
) -> bool:
    """Whether a judge prefers the right side of a pair; one that gives no valid reply does not."""
    sides = [_format_evaluation(pair.right), _format_evaluation(pair.wrong)]
    if not is_right_first:
        sides.reverse()
    variables = {
        "step": shown,
        "first": fence("first", sides[0]),
        "second": fence("second", sides[1]),
    }
    call_id = CallId(role="judge", purpose="compare", part=pair.id[:32], trial=trial)
    try:
        reply = await llm.ask(prompts.render("judge", variables), JudgeReply, call_id=call_id)
    except (ReplyError, RequestRefused):
        return False
    return (reply.value.better == "first") is is_right_first


def _format_evaluation(evaluation: Evaluation) -> str:
    numbers = f"Before: {evaluation.progress_before:g}\nAfter: {evaluation.progress_after:g}"
    return show_state(f"{numbers}\nReasoning: {evaluation.reasoning}")
