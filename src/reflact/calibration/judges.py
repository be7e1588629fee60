"""Blind comparisons of the two sides of a pair.

Half of the comparisons show the right side first. A pair is kept if enough of them find it, and in neither order fewer
than half do, so that a judge who always picks the first, or the second, keeps nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from reflact.calibration.perturbations import DISTANCE_TOLERANCE
from reflact.calibration.transition_view import show_state
from reflact.data import make_rng
from reflact.errors import ReplyError, RequestRefused
from reflact.memory.models import ContrastPair, Evaluation
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import PromptBook, fence
from reflact.protocols import LLM

JudgingOutcome = Literal["kept", "judged_wrong", "decided_by_position"]


class JudgeReply(ReplyModel):
    """Which of two evaluations is right."""

    version: ClassVar[int] = 1
    reasoning: str = Field(
        min_length=1, max_length=600, description="What the states show, and what that means for each."
    )
    better: Literal["first", "second"] = Field(description="Which of the two evaluations is right.")


def plan_sides(candidate_index: int, n_judges: int, *, seed: int) -> tuple[bool, ...]:
    """Return for each comparison of a candidate whether the right side is shown first.

    The sides alternate. Over any even number of candidates, counted from 0, both orders are equally many.
    """
    begins = (make_rng(seed, f"contrast/sides/{candidate_index // 2}").random() < 0.5) != (
        candidate_index % 2 == 1
    )
    return tuple(begins == (n % 2 == 0) for n in range(n_judges))


def decide_outcome(
    right_first: Sequence[bool], found_right: Sequence[bool], *, min_agreement: float
) -> JudgingOutcome | None:
    """Return what comparisons decide, or None while it is open.

    A pair is out as soon as the comparisons that are left cannot save it. It is kept once all are made, since the share
    that found the right side is its difficulty. ``found_right`` has a value for each comparison that was made.
    """
    for n_done in range(1, len(found_right) + 1):
        n_left = len(right_first) - n_done
        if sum(found_right[:n_done]) + n_left < count_needed(len(right_first), min_agreement):
            return "judged_wrong"
        for order in (True, False):
            total = right_first.count(order)
            missed = sum(
                1
                for first, hit in zip(right_first, found_right[:n_done], strict=False)
                if first is order and not hit
            )
            if 2 * missed > total or total == 0:
                return "decided_by_position"
    return "kept" if len(found_right) == len(right_first) else None


def count_needed(n_judges: int, min_agreement: float) -> int:
    """Return how many of the comparisons have to find the right side."""
    return math.ceil(n_judges * min_agreement - DISTANCE_TOLERANCE)


def build_judge_prompt(
    prompts: PromptBook, *, step: str, right: Evaluation, wrong: Evaluation, right_first: bool
) -> RenderedPrompt:
    """Return the prompt of one comparison; ``step`` is the step as it is shown."""
    order = (right, wrong) if right_first else (wrong, right)
    first, second = (
        fence(tag, _format_evaluation(one)) for tag, one in zip(("first", "second"), order, strict=True)
    )
    return prompts.render("judge", {"step": step, "first": first, "second": second})


async def compare_sides(
    pair: ContrastPair,
    right_first: Sequence[bool],
    *,
    step: str,
    judge: LLM,
    prompts: PromptBook,
    min_agreement: float,
) -> tuple[JudgingOutcome, tuple[bool, ...]]:
    """Let a judge compare a pair's sides until the outcome is certain; return it, and what was found.

    A comparison without a valid reply has not found the right side.

    Raises:
        ContextOverflow, ProviderError, BudgetSpent: The judge cannot be asked.
    """

    async def one(number: int) -> bool:
        prompt = build_judge_prompt(
            prompts, step=step, right=pair.right, wrong=pair.wrong, right_first=right_first[number]
        )
        call_id = CallId(role="judge", purpose="compare", part=pair.id[:32], trial=number)
        try:
            reply = await judge.ask(prompt, JudgeReply, call_id=call_id)
        except (ReplyError, RequestRefused):
            return False
        return (reply.value.better == "first") is right_first[number]

    found: list[bool] = []
    while (decided := decide_outcome(right_first, found, min_agreement=min_agreement)) is None:
        found.append(await one(len(found)))
    return decided, tuple(found)


def _format_evaluation(evaluation: Evaluation) -> str:
    numbers = f"Before: {evaluation.progress_before:g}\nAfter: {evaluation.progress_after:g}"
    return show_state(f"{numbers}\nReasoning: {evaluation.reasoning}")
