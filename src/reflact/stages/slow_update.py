"""The end of an epoch: guidance from how the skill has changed, written into a region of its own."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reflact.calls import CallId, ReplyModel
from reflact.ports import LLM, DecisionLog
from reflact.prompts import PromptBook, fence
from reflact.stages.material import show_skill
from reflact.stages.settled import NoReply, ask_or_fallback
from reflact.tail import check_region_text
from reflact.types import Skill


class GuidanceReply(ReplyModel):
    """What the comparison says about the earlier guidance, and the guidance from now on."""

    version: ClassVar[int] = 1
    reasoning: str = Field(
        max_length=600, description="What got better, what got worse and what keeps failing, and why."
    )
    helped: Literal["helped", "hurt", "unclear", "none"] = Field(
        description="Whether the earlier guidance helped; none if there was none."
    )
    guidance: str = Field(
        min_length=1,
        max_length=3000,
        description="The new guidance, as Markdown: what the assistant should heed on every task.",
    )


async def slow_update(
    earlier: Skill,
    current: Skill,
    *,
    comparison: str,
    guidance: str,
    llm: LLM,
    prompts: PromptBook,
    decision_log: DecisionLog,
    step: int,
    epoch: int,
) -> GuidanceReply | NoReply:
    """Return new guidance from the comparison of two epochs' skills, or why there is none.

    Args:
        earlier: The skill at the last step of the previous epoch.
        current: The skill at the last step of this epoch.
        comparison: What both did on the same tasks, as it is shown.
        guidance: The guidance in force; empty where there is none.
        llm: The optimizer.
        prompts: The prompts.
        decision_log: Where a refusal is noted.
        step: The epoch's last step.
        epoch: The epoch that ends.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
    """
    prompt = prompts.render(
        "slow_update",
        {
            "earlier": show_skill(earlier),
            "document": show_skill(current),
            "guidance": fence("guidance", guidance) if guidance else "There is no guidance yet.",
            "comparison": comparison,
        },
    )
    call_id = CallId(role="optimizer", purpose="slow_update", step=step, part=f"epoch-{epoch}")

    def check(reply: GuidanceReply) -> None:
        check_region_text(reply.guidance)

    reply = await ask_or_fallback(
        llm, prompt, GuidanceReply, call_id=call_id, check=check, decision_log=decision_log
    )
    return reply if isinstance(reply, NoReply) else reply.value
