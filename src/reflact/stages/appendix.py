"""Skill-aware reflection, second half: the step's reminders go to the document's appendix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import Field, create_model

from reflact.calls import ReplyModel, Sample
from reflact.ports import LLM, Journal
from reflact.prompts import PromptBook, fence
from reflact.stages.material import show_skill
from reflact.stages.settled import Refusal, ask_or_refusal
from reflact.tail import added, check_tail_text, notes, with_notes
from reflact.types import Fallback, Noted, Report, Skill

NOTE_LENGTH = 300

Note = Annotated[str, Field(min_length=1, max_length=NOTE_LENGTH)]


class CompactReply(ReplyModel):
    """Fewer notes that say the same."""

    version: ClassVar[int] = 1
    notes: list[Note] = Field(min_length=1, description="The notes, each one short sentence.")


@lru_cache(maxsize=16)
def compacting(*, most: int) -> type[CompactReply]:
    """Return the reply type for at most so many notes; the bound stands in the schema."""
    about = CompactReply.model_fields["notes"].description
    return create_model(
        "CompactReply",
        __base__=CompactReply,
        __doc__=CompactReply.__doc__,
        notes=(list[Note], Field(min_length=1, max_length=most, description=about)),
    )


async def remind(
    skill: Skill,
    reports: Sequence[Report],
    *,
    threshold: int | None,
    llm: LLM,
    prompts: PromptBook,
    journal: Journal,
    step: int,
) -> Noted:
    """Return the document with the reports' reminders added to its appendix, each said once.

    Above ``threshold`` notes one call compacts them to at most that many; where it gives nothing valid
    they stay as they are, and the outcome says so. Nothing outside the appendix changes.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
    """
    reminders = [reminder for report in reports for reminder in report.reminders]
    before = notes(skill.text)
    after = added(before, reminders)
    if after == before:
        return Noted(skill=skill)
    fallbacks: tuple[Fallback, ...] = ()
    if threshold is not None and len(after) > threshold:
        shown = fence("notes", "\n".join(f"- {note}" for note in after))
        prompt = prompts.render(
            "consolidate", {"document": show_skill(skill), "notes": shown, "most": str(threshold)}
        )
        sample = Sample(role="optimizer", purpose="consolidate", step=step)
        reply = await ask_or_refusal(
            llm, prompt, compacting(most=threshold), sample=sample, check=_writable, journal=journal
        )
        if isinstance(reply, Refusal):
            instead = f"the {len(after)} notes stay as they are"
            fallbacks = (Fallback(label="consolidate", reason=reply.reason, instead=instead),)
        else:
            after = added((), reply.value.notes)
    return Noted(skill=with_notes(skill, after), notes=after, fallbacks=fallbacks)


def _writable(reply: CompactReply) -> None:
    for note in reply.notes:
        check_tail_text(note)
