"""Skill-aware reflection, first half: lapses are told from defects before edits are proposed.

A *defect* is a rule that the document lacks or has wrong; edits mend it. A *lapse* is a rule that stands
in the document and was not followed; a short reminder is all that helps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import Field, create_model

from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import PromptBook, fence
from reflact.protocols import LLM, DecisionLog, R
from reflact.skills.document import editable_text
from reflact.skills.regions import check_region_text, merge_notes, read_guidance, read_notes, replace_notes
from reflact.stages.prompt_sections import show_cases, show_skill
from reflact.stages.reflect import Minibatch
from reflact.stages.reply_models import NoReply, ask_or_fallback, check_numbers
from reflact.types import AnalystReport, AppendixResult, Fallback, Skill

MOST_REMINDERS = 3


class Lapse(ReplyModel):
    """A case in which a rule of the document was not followed."""

    case: int = Field(ge=1, description="Number of the case.")
    rule: str = Field(min_length=1, max_length=400, description="The rule, copied exactly from the document.")
    reminder: str = Field(
        min_length=1, max_length=300, description="One short sentence that would make it hard to overlook."
    )


class LapseReply(ReplyModel):
    """The cases that the document's rules would have got right."""

    version: ClassVar[int] = 1
    lapses: list[Lapse] = Field(description="One entry for each such case; empty if there is none.")


class ReminderReply(ReplyModel):
    """What to be reminded of, seen from cases that went well."""

    version: ClassVar[int] = 1
    reminders: list[Annotated[str, Field(min_length=1, max_length=300)]] = Field(
        max_length=MOST_REMINDERS,
        description="Rules of the document that these answers kept and that are easy to overlook; may be "
        "empty.",
    )


@lru_cache(maxsize=64)
def lapse_reply_type(*, cases: int) -> type[LapseReply]:
    """Return the reply type for ``cases`` failures; the bound stands in the schema."""
    about = LapseReply.model_fields["lapses"].description
    return create_model(
        "LapseReply",
        __base__=LapseReply,
        __doc__=LapseReply.__doc__,
        lapses=(list[Lapse], Field(max_length=cases, description=about)),
    )


class LapseTriage:
    """Takes lapses out of a minibatch and leaves the rest to an analyst.

    Args:
        skill: The document whose rules may not have been followed.
        analyse: Proposes edits for what is left.
        successes: Whether minibatches of successes may give reminders too.
        llm: The optimizer.
        prompts: The run's prompts.
        journal: Where refusals are noted.
        step: The step.
        tokens: Estimated tokens of trajectories in one prompt at most.
    """

    def __init__(
        self,
        skill: Skill,
        analyse: Callable[[Minibatch], Awaitable[AnalystReport]],
        *,
        successes: bool,
        llm: LLM,
        prompts: PromptBook,
        decision_log: DecisionLog,
        step: int,
        tokens: int,
    ) -> None:
        self._skill = skill
        self._analyse = analyse
        self._successes = successes
        self._llm = llm
        self._prompts = prompts
        self._decision_log = decision_log
        self._step = step
        self._tokens = tokens

    async def report(self, batch: Minibatch) -> AnalystReport:
        """Return the report on a minibatch, with reminders for its lapses.

        A document without rules knows no lapse. Where no valid answer can be had, all cases are left to
        the analyst, and the report says why.

        Raises:
            ProviderError: The endpoint refused, failed or could not be reached.
        """
        if not _rules_text(self._skill).strip() or (batch.source == "success" and not self._successes):
            return await self._analyse(batch)
        if batch.source == "success":
            return await self._remind(batch)
        reply = await self._ask_or_fallback(
            batch, "lapse_failure", lapse_reply_type(cases=len(batch.items)), self._lapse_check(batch)
        )
        if isinstance(reply, NoReply):
            report = await self._analyse(batch)
            return report.model_copy(update={"triage_no_reply_reason": reply.reason})
        lapsed = {lapse.case - 1 for lapse in reply.lapses}
        rest = [n for n in range(len(batch.items)) if n not in lapsed]
        left = batch.model_copy(
            update={
                "items": tuple(batch.items[n] for n in rest),
                "rollouts": tuple(batch.rollouts[n] for n in rest),
            }
        )
        report = await self._analyse(left) if rest else left.empty_report
        return report.model_copy(
            update={
                "item_ids": batch.empty_report.item_ids,
                "reminders": tuple(lapse.reminder for lapse in reply.lapses),
                "lapses": tuple(batch.items[n].id for n in sorted(lapsed)),
            }
        )

    async def _remind(self, batch: Minibatch) -> AnalystReport:
        reply = await self._ask_or_fallback(batch, "lapse_success", ReminderReply, _check_writable_reminders)
        report = await self._analyse(batch)
        if isinstance(reply, NoReply):
            return report.model_copy(update={"triage_no_reply_reason": reply.reason})
        return report.model_copy(update={"reminders": tuple(reply.reminders)})

    async def _ask_or_fallback(
        self, batch: Minibatch, name: str, wanted: type[R], check: Callable[[R], None]
    ) -> R | NoReply:
        def prompt(tokens: int) -> RenderedPrompt:
            cases = show_cases(batch.rollouts, batch.items, failed=batch.source == "failure", tokens=tokens)
            return self._prompts.render(name, {"document": show_rules(self._skill), "cases": cases})

        reply = await ask_or_fallback(
            self._llm,
            prompt(self._tokens),
            wanted,
            call_id=CallId(role="optimizer", purpose=name, step=self._step, part=batch.part),
            check=check,
            decision_log=self._decision_log,
            shorten=lambda: prompt(self._tokens // 2),
        )
        return reply if isinstance(reply, NoReply) else reply.value

    def _lapse_check(self, batch: Minibatch) -> Callable[[LapseReply], None]:
        rules = _flatten(_rules_text(self._skill))

        def check(reply: LapseReply) -> None:
            numbers = [lapse.case for lapse in reply.lapses]
            check_numbers(numbers, len(batch.items))
            if len(set(numbers)) != len(numbers):
                raise ValueError("a case is named twice; name each one once")
            for lapse in reply.lapses:
                if _flatten(lapse.rule) not in rules:
                    raise ValueError(f"the document has no rule {lapse.rule!r}; copy one exactly")
                check_region_text(lapse.reminder)

        return check


def show_rules(skill: Skill) -> str:
    """Return what the assistant was told: the document's text and its guidance, fenced."""
    return fence("document", _rules_text(skill).strip())


def _rules_text(skill: Skill) -> str:
    return f"{editable_text(skill.text)}\n{read_guidance(skill.text)}"


def _flatten(text: str) -> str:
    return " ".join(text.split())


def _check_writable_reminders(reply: ReminderReply) -> None:
    for reminder in reply.reminders:
        check_region_text(reminder)


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
