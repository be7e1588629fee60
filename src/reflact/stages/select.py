"""Stage 4: the step's edit budget decides how many of the pooled edits are applied."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.calls import Sample
from reflact.errors import ContextOverflow, ReplyError
from reflact.ports import LLM
from reflact.prompts import PromptBook
from reflact.stages.material import show_edits, show_skill
from reflact.stages.replies import rank_check, ranking
from reflact.types import Chosen, Edit, Fallback, Merged, Patch, Skill


async def select(
    merged: Merged, skill: Skill, *, budget: int | None, llm: LLM, prompts: PromptBook, step: int
) -> Chosen:
    """Choose at most ``budget`` edits; None takes all, and a pool within the budget passes unchanged.

    A larger pool is ranked by the optimizer. Where no valid ranking can be had, the edits with the
    highest support are taken, earlier ones first among equals, and the outcome says so.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
    """
    pool = merged.patch.edits
    outcome = Chosen(patch=merged.patch, pool_size=len(pool), budget=budget)
    if budget is None or len(pool) <= budget:
        return outcome
    if budget == 0:
        return outcome.model_copy(update={"patch": Patch(reasoning=merged.patch.reasoning)})
    prompt = prompts.render(
        "ranking",
        {
            "document": show_skill(skill),
            "proposals": show_edits(pool),
            "count": str(len(pool)),
            "budget": str(budget),
        },
    )
    sample = Sample(role="optimizer", purpose="ranking", step=step)
    check = rank_check(proposals=len(pool), budget=budget)
    try:
        reply = (
            await llm.ask(prompt, ranking(proposals=len(pool), budget=budget), sample=sample, check=check)
        ).value
    except (ReplyError, ContextOverflow) as error:
        fallback = Fallback(label="ranking", reason=str(error), instead="the edits with the highest support")
        patch = Patch(reasoning=merged.patch.reasoning, edits=by_support(pool)[:budget])
        return outcome.model_copy(update={"patch": patch, "fallbacks": (fallback,)})
    patch = Patch(reasoning=reply.reasoning, edits=tuple(pool[n - 1] for n in reply.selected))
    return outcome.model_copy(update={"patch": patch, "ranked": True})


def by_support(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Return the edits by falling support; equal ones keep their order."""
    return tuple(sorted(edits, key=lambda e: -e.support_count))
