"""Skill-aware reflection: separates lapses from defects, and keeps reminders in the appendix.

A *defect* is a rule that the document lacks or states wrongly; edits correct it. A *lapse* is a
rule of the document that was not followed; it gets a short reminder in the appendix of execution
notes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field

from reflact.messages import NoReply, ReplyModel
from reflact.prompts import fence
from reflact.protocols import R
from reflact.skills.document import (
    check_region_text,
    editable_text,
    merge_notes,
    read_guidance,
    read_notes,
    replace_notes,
)
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_skill
from reflact.stages.reflect import Minibatch, ask_about_minibatch
from reflact.stages.reply_models import list_between, narrow_reply_type
from reflact.types import AnalystReport, AppendixResult, Fallback, Skill

MAX_REMINDERS = 3

Note = Annotated[str, Field(min_length=1, max_length=300)]


class Lapse(ReplyModel):
    """A case in which a rule of the document was not followed."""

    case: int = Field(ge=1, description="Number of the case.")
    rule: str = Field(
        min_length=1, max_length=400, description="The rule, copied exactly from the document."
    )
    reminder: str = Field(
        min_length=1,
        max_length=300,
        description="One short sentence that would make it hard to overlook.",
    )


class LapseReply(ReplyModel):
    """The cases that the document's rules would have got right."""

    version: ClassVar[int] = 1
    lapses: list[Lapse] = Field(description="One entry for each such case; empty if there is none.")


class ReminderReply(ReplyModel):
    """What to be reminded of, seen from cases that went well."""

    version: ClassVar[int] = 1
    reminders: list[Note] = Field(
        max_length=MAX_REMINDERS,
        description="Rules of the document that these answers kept and that are easy to overlook; "
        "may be empty.",
    )


class CompactReply(ReplyModel):
    """Fewer notes that say the same."""

    version: ClassVar[int] = 1
    notes: list[Note] = Field(min_length=1, description="The notes, each one short sentence.")


@dataclass(frozen=True, kw_only=True)
class LapseTriage:
    """Takes lapses out of a minibatch and leaves the other cases to ``analyse``.

    ``successes``: minibatches of successes may give reminders too. ``tokens`` is the maximum of
    estimated tokens of trajectories in one prompt.
    """

    context: StageContext
    skill: Skill
    analyse: Callable[[Minibatch], Awaitable[AnalystReport]]
    successes: bool
    tokens: int

    async def report(self, batch: Minibatch) -> AnalystReport:
        """Return the report on a minibatch, with reminders for its lapses.

        A document without rules has no lapses. If the optimizer gives no valid reply, the analyst
        gets all cases, and the report states the reason.
        """
        is_success = batch.source == "success"
        if not _read_rules(self.skill).strip() or (is_success and not self.successes):
            return await self.analyse(batch)
        n = len(batch.items)
        lapses: dict[int, Lapse] = {}
        reply: LapseReply | ReminderReply | NoReply
        if is_success:
            reply = await self._ask(batch, ReminderReply, lambda r: _check_notes(r.reminders))
        else:
            check = partial(_check_lapses, skill=self.skill, cases=n)
            reply_type = narrow_reply_type(LapseReply, lapses=(list[Lapse], {"max_length": n}))
            reply = await self._ask(batch, reply_type, check)
        if isinstance(reply, LapseReply):
            lapses = {lapse.case - 1: lapse for lapse in reply.lapses}

        others = [number for number in range(n) if number not in lapses]
        report = batch.empty_report
        if others:
            items = tuple(batch.items[number] for number in others)
            rollouts = tuple(batch.rollouts[number] for number in others)
            rest = batch.model_copy(update={"items": items, "rollouts": rollouts})
            report = await self.analyse(rest)
        if isinstance(reply, NoReply):
            return report.model_copy(update={"triage_no_reply_reason": reply.reason})
        reminders = [lapse.reminder for lapse in lapses.values()]
        if isinstance(reply, ReminderReply):
            reminders = reply.reminders
        return report.model_copy(
            update={
                "item_ids": batch.empty_report.item_ids,
                "reminders": tuple(reminders),
                "lapses": tuple(batch.items[number].id for number in sorted(lapses)),
            }
        )

    async def _ask(
        self, batch: Minibatch, reply_type: type[R], check: Callable[[R], None]
    ) -> R | NoReply:
        variables = {"document": fence("document", _read_rules(self.skill).strip())}
        name = f"lapse_{batch.source}"
        return await ask_about_minibatch(
            self.context, batch, name, variables, reply_type, tokens=self.tokens, check=check
        )


def _check_lapses(reply: LapseReply, *, skill: Skill, cases: int) -> None:
    numbers = [lapse.case for lapse in reply.lapses]
    wrong = [str(n) for n in numbers if n > cases]
    if wrong:
        raise ValueError(f"numbers go from 1 to {cases}; {', '.join(wrong)} is not among them")
    if len(set(numbers)) != len(numbers):
        raise ValueError("a case is named twice; name each one once")
    rules = " ".join(_read_rules(skill).split())
    for lapse in reply.lapses:
        if " ".join(lapse.rule.split()) not in rules:
            raise ValueError(f"the document has no rule {lapse.rule!r}; copy one exactly")
        check_region_text(lapse.reminder)


def _check_notes(notes: Sequence[str]) -> None:
    for note in notes:
        check_region_text(note)


def _read_rules(skill: Skill) -> str:
    return f"{editable_text(skill.text)}\n{read_guidance(skill.text)}"


async def update_appendix(
    skill: Skill,
    reports: Sequence[AnalystReport],
    *,
    context: StageContext,
    threshold: int | None,
    earlier: Sequence[str] = (),
) -> AppendixResult:
    """Return the document with the reports' reminders added to its appendix, without duplicates.

    ``earlier`` are the notes of the version that was current, if the run returns to an older one:
    that a document is given up is no reason to give up what was learnt beside it.

    If there are more than ``threshold`` notes, one call compacts them to at most that many. If it
    gives no valid reply, the notes stay as they are, and the result records the fallback. The text
    outside the appendix does not change.
    """
    reminders = [*earlier, *(reminder for report in reports for reminder in report.reminders)]
    before = read_notes(skill.text)
    after = merge_notes(before, reminders)
    if after == before:
        return AppendixResult(skill=skill)
    fallbacks: tuple[Fallback, ...] = ()
    if threshold is not None and len(after) > threshold:
        notes = fence("notes", "\n".join(f"- {note}" for note in after))
        reply = await context.ask_or_fallback(
            "consolidate",
            {"document": show_skill(skill), "notes": notes, "most": str(threshold)},
            narrow_reply_type(CompactReply, notes=list_between(Note, 1, threshold)),
            check=lambda reply: _check_notes(reply.notes),
        )
        if isinstance(reply, NoReply):
            kept = f"the {len(after)} notes stay as they are"
            fallbacks = (Fallback(label="consolidate", reason=reply.reason, replacement=kept),)
        else:
            after = merge_notes((), reply.notes)
    return AppendixResult(skill=replace_notes(skill, after), notes=after, fallbacks=fallbacks)


def carry_notes(skill: Skill, source: Skill) -> Skill:
    """Return a document with the notes of another one added to its own."""
    return replace_notes(skill, merge_notes(read_notes(skill.text), read_notes(source.text)))
