"""Stage 4: selects the edits that a step applies, at most as many as its edit budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reflact.messages import NoReply, ReplyModel
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_edits, show_skill
from reflact.stages.reply_models import (
    ReasonedRankReply,
    check_ranking,
    list_between,
    narrow_reply_type,
)
from reflact.types import AggregateResult, Edit, Fallback, Patch, SelectResult, Skill, StepSize


class ReasonedStepSizeReply(ReplyModel):
    """How many of the proposals to apply in this step, reasoning first."""

    version: ClassVar[int] = 1
    reasoning: str = Field(
        min_length=1, description="What speaks for few and what for many, before the number."
    )
    count: int = Field(ge=0, description="How many of the proposals to apply.")
    confidence: float = Field(ge=0, le=1, description="How sure this is, from 0 to 1.")
    risks: str = Field(description="What could go wrong; empty if nothing.")


async def choose_step_size(
    merged: AggregateResult,
    skill: Skill,
    *,
    context: StageContext,
    notes: str,
    figures: str,
    default: int,
) -> StepSize | Fallback:
    """Let the optimizer decide how many pooled edits a step applies; a fallback names ``default``.

    The pool must not be empty. ``notes`` are the epoch's earlier steps and the optimizer's memory,
    ``figures`` those of the step's rollouts (``show_figures``).
    """
    pool = merged.patch.edits
    reply = await context.ask_or_fallback(
        "step_size",
        {**_describe_pool(pool, skill, notes), "figures": figures},
        narrow_reply_type(ReasonedStepSizeReply, count=(int, {"ge": 0, "le": len(pool)})),
    )
    if isinstance(reply, NoReply):
        replacement = f"at most {default} edits"
        return Fallback(label="step_size", reason=reply.reason, replacement=replacement)
    return StepSize(**reply.model_dump())


async def select(
    merged: AggregateResult,
    skill: Skill,
    *,
    context: StageContext,
    budget: int | None,
    attempts: str = "",
    notes: str = "",
) -> SelectResult:
    """Select at most ``budget`` edits; None takes all.

    ``attempts`` are the epoch's earlier steps with their verdicts, ``notes`` the optimizer's
    memory. The optimizer ranks a pool that is larger than the budget. If it gives no valid ranking,
    the edits with the highest support are taken, earlier ones first among equals, and the result
    records the fallback.
    """
    pool = merged.patch.edits
    outcome = SelectResult(patch=merged.patch, pool_size=len(pool), budget=budget)
    if budget is None or len(pool) <= budget:
        return outcome
    if budget == 0:
        return outcome.model_copy(update={"patch": Patch(reasoning=merged.patch.reasoning)})
    number = Annotated[int, Field(ge=1, le=len(pool))]
    selected = list_between(number, budget, budget)
    reply = await context.ask_or_fallback(
        "ranking",
        {**_describe_pool(pool, skill, notes), "attempts": attempts, "budget": str(budget)},
        narrow_reply_type(ReasonedRankReply, selected=selected),
        check=check_ranking,
    )
    if isinstance(reply, NoReply):
        fallback = Fallback(
            label="ranking", reason=reply.reason, replacement="the edits with the highest support"
        )
        best = sorted(pool, key=lambda edit: -edit.support_count)[:budget]
        patch = Patch(reasoning=merged.patch.reasoning, edits=tuple(best))
        return outcome.model_copy(update={"patch": patch, "fallbacks": (fallback,)})
    patch = Patch(reasoning=reply.reasoning, edits=tuple(pool[n - 1] for n in reply.selected))
    return outcome.model_copy(update={"patch": patch, "ranked": True})


def _describe_pool(pool: Sequence[Edit], skill: Skill, notes: str) -> dict[str, str]:
    return {
        "document": show_skill(skill),
        "notes": notes,
        "proposals": show_edits(pool),
        "count": str(len(pool)),
    }


SchedulerName = Literal["constant", "linear", "cosine"]


def edit_budget(
    step: int, total_steps: int, *, scheduler: SchedulerName, max_edits: int, floor: int
) -> int:
    """Return how many edits a step may apply.

    The first step gets ``max_edits``. The last one gets ``floor``, unless the schedule is
    ``constant`` or the run has one step. Between them the budget falls linearly, or along half a
    cosine wave (Loshchilov and Hutter, SGDR, 2017, without restarts). It is rounded to the nearest
    integer, halves upward.
    """
    if scheduler == "constant" or total_steps == 1:
        return max_edits
    done = (step - 1) / (total_steps - 1)
    share = 1 - done if scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2
    # Nine decimals are finer than any half that can occur, and coarser than the cosine's rounding
    # error.
    return floor + math.floor(round((max_edits - floor) * share, 9) + 0.5)
