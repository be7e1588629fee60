"""The optimizer's memory of which kinds of edits help, updated at the end of an epoch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reflact.messages import ReplyModel
from reflact.stages.context import NoReply, StageContext
from reflact.stages.prompt_sections import show_meta, show_skill
from reflact.types import Skill


class MemoryReply(ReplyModel):
    """What to remember about editing this document."""

    version: ClassVar[int] = 1
    reasoning: str = Field(max_length=600, description="Which changes helped, which hurt, and why.")
    memory: str = Field(
        min_length=1,
        max_length=2000,
        description="Advice for future edits: which kinds help here, which do not, what to try next.",
    )


async def update_meta_skill(
    earlier: Skill,
    current: Skill,
    *,
    context: StageContext,
    epoch: int,
    comparison: str,
    attempts: str,
    memory: str,
) -> MemoryReply | NoReply:
    """Return the optimizer's memory after the comparison of two epochs' skills.

    The arguments are those of ``slow_update``, and ``attempts`` (the outcomes of the epoch's steps, as text)
    and ``memory`` (the memory so far).
    """
    variables = {
        "earlier": show_skill(earlier),
        "document": show_skill(current),
        "attempts": attempts,
        "memory": show_meta(memory),
        "comparison": comparison,
    }
    return await context.ask_or_fallback("meta_skill", variables, MemoryReply, part=f"epoch-{epoch}")
