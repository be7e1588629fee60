"""Stage 5: applies the selected edits and returns a candidate document."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reflact.messages import CallId, ReplyModel
from reflact.prompts import PromptBook
from reflact.protocols import LLM, DecisionLog
from reflact.skills.document import apply_edits
from reflact.stages.prompt_sections import show_edits, show_skill
from reflact.stages.reply_models import NoReply, ask_or_fallback, check_whole_document
from reflact.types import Candidate, Edit, EditResult, Fallback, SelectResult, Skill


class RewriteReply(ReplyModel):
    """The document after a revision."""

    version: ClassVar[int] = 1
    summary: str = Field(max_length=400, description="What was changed, in a sentence or two.")
    document: str = Field(
        min_length=1, max_length=20000, description="The whole revised document, as Markdown text."
    )


async def update(
    skill: Skill, chosen: SelectResult, *, llm: LLM, prompts: PromptBook, decision_log: DecisionLog, step: int
) -> Candidate:
    """Return the candidate: edits and whole drafts are applied; one call rewrites the text by suggestions.

    Protected regions stay byte-identical. If the rewrite call gives no valid reply, the document stays as it
    is, and the candidate records the fallback.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
    """
    edits = chosen.patch.edits
    if not edits or edits[0].op != "suggest":
        return apply_edits(skill, edits)
    prompt = prompts.render("rewrite", {"document": show_skill(skill), "proposals": show_edits(edits)})
    call_id = CallId(role="optimizer", purpose="rewrite", step=step)

    def check(reply: RewriteReply) -> None:
        check_whole_document(skill, reply.document)

    reply = await ask_or_fallback(
        llm, prompt, RewriteReply, call_id=call_id, check=check, decision_log=decision_log
    )
    if isinstance(reply, NoReply):
        fallback = Fallback(label="rewrite", reason=reply.reason, replacement="the document stays as it is")
        return Candidate(skill=skill, fallbacks=(fallback,))
    written = apply_edits(skill, [Edit(op="rewrite", content=reply.document)])
    applied = tuple(EditResult(edit=edit, status="applied") for edit in edits)
    return written.model_copy(update={"results": applied + written.results})
