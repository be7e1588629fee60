"""Stage 5: applies the selected edits and returns a candidate document."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from reflact.messages import NoReply, ReplyModel
from reflact.skills.document import apply_edits
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_edits, show_skill
from reflact.stages.reply_models import check_whole_document, unwrap_document
from reflact.types import Candidate, Edit, EditResult, Fallback, SelectResult, Skill


class RewriteReply(ReplyModel):
    """The document after a revision."""

    version: ClassVar[int] = 1
    summary: str = Field(description="What was changed, in a sentence or two.")
    document: Annotated[str, AfterValidator(unwrap_document)] = Field(
        min_length=1, description="The whole revised document, as Markdown text."
    )


async def update(
    skill: Skill, chosen: SelectResult, *, context: StageContext, attempts: str = ""
) -> Candidate:
    """Return the candidate with the edits applied; one call rewrites the text by suggestions.

    That call sees ``attempts``, the epoch's earlier steps with their verdicts. If it gives no valid
    reply, the document stays as it is, and the candidate records the fallback. Protected regions
    stay byte-identical.
    """
    edits = chosen.patch.edits
    if not edits or edits[0].op != "suggest":
        return apply_edits(skill, edits)
    reply = await context.ask_or_fallback(
        "rewrite",
        {"document": show_skill(skill), "attempts": attempts, "proposals": show_edits(edits)},
        RewriteReply,
        check=lambda reply: check_whole_document(
            skill, reply.document, [edit.content for edit in edits]
        ),
    )
    if isinstance(reply, NoReply):
        fallback = Fallback(
            label="rewrite", reason=reply.reason, replacement="the document stays as it is"
        )
        return Candidate(skill=skill, fallbacks=(fallback,))
    written = apply_edits(skill, [Edit(op="rewrite", content=reply.document)])
    applied = tuple(EditResult(edit=edit, status="applied") for edit in edits)
    return written.model_copy(
        update={"results": applied + written.results, "summary": reply.summary}
    )
