"""Skill-aware reflection, second half: the step's reminders go to the document's appendix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import Field, create_model

from reflact.calls import CallId, ReplyModel
from reflact.ports import LLM, DecisionLog
from reflact.prompts import PromptBook, fence
from reflact.stages.material import show_skill
from reflact.stages.settled import NoReply, ask_or_fallback
from reflact.tail import check_region_text, merge_notes, read_notes, replace_notes
from reflact.types import AnalystReport, AppendixResult, Fallback, Skill

NOTE_LENGTH = 300

Note = Annotated[str, Field(min_length=1, max_length=NOTE_LENGTH)]


class CompactReply(ReplyModel):
    """Fewer notes that say the same."""

    version: ClassVar[int] = 1
    notes: list[Note] = Field(min_length=1, description="The notes, each one short sentence.")


@lru_cache(maxsize=16)
def compact_reply_type(*, most: int) -> type[CompactReply]:
    """Return the reply type for at most so many notes; the bound stands in the schema."""
    about = CompactReply.model_fields["notes"].description
    return create_model(
        "CompactReply",
        __base__=CompactReply,
        __doc__=CompactReply.__doc__,
        notes=(list[Note], Field(min_length=1, max_length=most, description=about)),
    )


async def update_appendix(
    skill: Skill,
    reports: Sequence[AnalystReport],
    *,
    threshold: int | None,
    llm: LLM,
    prompts: PromptBook,
    decision_log: DecisionLog,
    step: int,
) -> AppendixResult:
    """Return the document with the reports' reminders added to its appendix, each said once.

    Above ``threshold`` notes one call compacts them to at most that many; where it gives nothing valid
    they stay as they are, and the outcome says so. Nothing outside the appendix changes.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
    """
    reminders = [reminder for report in reports for reminder in report.reminders]
    before = read_notes(skill.text)
    after = merge_notes(before, reminders)
    if after == before:
        return AppendixResult(skill=skill)
    fallbacks: tuple[Fallback, ...] = ()
    if threshold is not None and len(after) > threshold:
        shown = fence("notes", "\n".join(f"- {note}" for note in after))
        prompt = prompts.render(
            "consolidate", {"document": show_skill(skill), "notes": shown, "most": str(threshold)}
        )
        call_id = CallId(role="optimizer", purpose="consolidate", step=step)
        reply = await ask_or_fallback(
            llm,
            prompt,
            compact_reply_type(most=threshold),
            call_id=call_id,
            check=_check_writable,
            decision_log=decision_log,
        )
        if isinstance(reply, NoReply):
            instead = f"the {len(after)} notes stay as they are"
            fallbacks = (Fallback(label="consolidate", reason=reply.reason, replacement=instead),)
        else:
            after = merge_notes((), reply.value.notes)
    return AppendixResult(skill=replace_notes(skill, after), notes=after, fallbacks=fallbacks)


def _check_writable(reply: CompactReply) -> None:
    for note in reply.notes:
        check_region_text(note)
