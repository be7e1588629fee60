"""Skill-aware reflection: lapses become reminders in the appendix, whatever the gate decides."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from rich.console import Console

from doubles import open_context
from reflact.reporting.facts import list_step_details
from reflact.reporting.terminal import print_summary
from reflact.skills.document import find_regions, read_notes, replace_notes
from reflact.stages.execution_notes import (
    CompactReply,
    LapseReply,
    ReminderReply,
    carry_notes,
    update_appendix,
)
from reflact.stages.reply_models import AnalystReply
from reflact.stages.update import RewriteReply
from reflact.testing import ScriptedLLM, ToyEnvironment, append_reply
from reflact.testing.llm import ScriptedAnswer
from reflact.types import AnalystReport, Skill
from skill_documents import documents
from toy_runs import LINES, Actor, Part, document, playing, run

ON: dict[str, Any] = {"appendix": {"enabled": True}}
ALL = document("double", "square", "negate", "parity")
DEAF = "Mind the rule double."
"""The reminder of the toy optimizer for a rule that stands in the document and is not followed."""

MODES = pytest.mark.parametrize("mode", ["patch", "rewrite"])
IDLE: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense"))


def deaf(skill: Skill, message: str, times: int) -> str | None:
    """Never follow the rule ``double``, whatever the document says."""
    return "unknown" if message.startswith("double") else None


THREE = document("double", "square", "negate")
SMALL: dict[str, Any] = {"environment": ToyEnvironment(train=4, val=4, test=4), "actor": Actor(deaf)}


def body_of(text: str) -> str:
    """Return what stands before the appendix."""
    return text.partition("<!-- APPENDIX_START -->")[0].rstrip("\n")


@MODES
async def test_a_step_of_lapses_alone_keeps_its_reminders(tmp_path: Path, mode: str) -> None:
    done = await run(tmp_path, initial=ALL, actor=Actor(deaf), update={"mode": mode}, **ON)
    assert done.actions == ["no_patches", "no_patches"]
    first = done.records[0]
    assert [record.notes for record in done.records] == [(DEAF,), None]
    assert read_notes(done.current) == (DEAF,)
    (made,) = first.created_versions
    assert (made.origin, made.inherited, made.score) == ("step 1 notes", True, 0.75)
    (failures,) = [report for report in first.reports if report.source_type == "failure"]
    assert failures.lapses == failures.item_ids != ()
    assert body_of(done.current) == ALL.rstrip("\n")
    assert done.asked("analyst_failure") == []


@MODES
async def test_an_accepted_step_keeps_its_reminders(tmp_path: Path, mode: str) -> None:
    done = await run(tmp_path, initial=THREE, **SMALL, update={"mode": mode}, **ON)
    (record,) = done.records
    assert record.verdict.action == "accept_new_best"
    accepted, noted = record.created_versions
    assert (accepted.number, noted.number) == (1, 2)
    assert (noted.inherited, noted.score) == (True, accepted.score)
    assert (record.current, record.best) == (noted, accepted)
    assert read_notes(done.texts[accepted.skill_hash]) == ()
    assert read_notes(done.texts[noted.skill_hash]) == (DEAF,)
    assert body_of(done.texts[noted.skill_hash]) == done.texts[accepted.skill_hash].rstrip("\n")
    assert LINES["parity"] in done.texts[accepted.skill_hash]


@MODES
async def test_a_rejected_step_keeps_its_reminders(tmp_path: Path, mode: str) -> None:
    script = playing(IDLE, (RewriteReply, {"summary": "s", "document": f"{THREE}- nonsense"}))
    done = await run(tmp_path, initial=THREE, script=script, **SMALL, update={"mode": mode}, **ON)
    (record,) = done.records
    assert record.verdict.action == "reject"
    assert read_notes(done.current) == (DEAF,)
    assert body_of(done.current) == THREE.rstrip("\n")
    assert record.best.number == 0
    assert done.best == THREE


async def test_an_inherited_score_is_shown_as_inherited_and_decides_nothing(tmp_path: Path) -> None:
    def harmed(skill: Skill, message: str, times: int) -> str | None:
        return "unknown" if "Mind" in skill.text else deaf(skill, message, times)

    done = await run(tmp_path, initial=THREE, actor=Actor(harmed), script=playing(IDLE), **ON)
    first, second = done.records
    assert (first.current.inherited, first.current.score) == (True, 0.5)
    assert second.skill_before == first.current.skill_hash
    assert second.verdict.current_score == 0.0
    assert done.best == THREE
    (promotion,) = done.promotions
    assert (promotion.current.inherited, promotion.current.score) == (False, 0.0)
    assert promotion.best.number == 0
    console = Console(file=StringIO(), width=200)
    print_summary(console, done.summary.model_copy(update={"final": first.current, "scores": ()}), tmp_path)
    assert isinstance(console.file, StringIO)
    assert (
        "(validation 0.500) (inherited from an earlier version; this text was not measured)"
        in console.file.getvalue()
    )


async def test_reminders_may_come_from_successes_too(tmp_path: Path) -> None:
    script = playing((ReminderReply, {"reminders": ["Keep to the numbers."]}))
    both = await run(tmp_path / "a", initial=ALL, actor=Actor(deaf), script=script, **ON)
    assert set(read_notes(both.current)) == {DEAF, "Keep to the numbers."}
    one: dict[str, Any] = {"appendix": {"enabled": True, "source": "failure_only"}}
    failures = await run(tmp_path / "b", initial=ALL, actor=Actor(deaf), script=script, **one)
    assert read_notes(failures.current) == (DEAF,)
    assert failures.asked("lapse_success") == []


async def test_a_triage_that_cannot_be_had_leaves_all_cases_to_the_analyst(tmp_path: Path) -> None:
    wrong: JsonValue = {"lapses": [{"case": 1, "rule": "Be kind to strangers.", "reminder": "Be kind."}]}
    done = await run(tmp_path, initial=document("double"), script=playing((LapseReply, wrong)), **ON)
    for record in done.records:
        for report in record.reports:
            if report.source_type == "failure":
                assert "has no rule" in str(report.triage_no_reply_reason)
                assert report.patch.edits
    assert read_notes(done.current) == ()


def crowded(*texts: str) -> tuple[Part, dict[str, Any]]:
    """Play successes that give these reminders, under a threshold of two notes."""
    reply: Part = (ReminderReply, {"reminders": [*texts]})
    return reply, {"appendix": {"enabled": True, "consolidate_threshold": 2}}


async def test_too_many_notes_are_compacted(tmp_path: Path) -> None:
    reply, section = crowded("One.", "Two.")
    script = playing(reply, (CompactReply, {"notes": ["Mind all."]}))
    few = await run(tmp_path / "a", initial=ALL, script=script, **section)
    assert read_notes(few.current) == ("One.", "Two.")
    assert few.asked("consolidate") == []
    many = await run(tmp_path / "b", initial=ALL, actor=Actor(deaf), script=script, **section)
    assert read_notes(many.texts[many.records[0].current.skill_hash]) == ("Mind all.",)
    assert {call.call_id.step for call in many.asked("consolidate")} == {1, 2}


@pytest.mark.parametrize("reply", ["nothing", {"notes": []}, {"notes": ["a", "b", "c"]}])
async def test_a_failed_compaction_leaves_the_notes(tmp_path: Path, reply: ScriptedAnswer) -> None:
    given_notes, section = crowded("One.", "Two.", "Three.")
    script = playing(given_notes, (CompactReply, reply))
    done = await run(tmp_path, initial=ALL, script=script, **section)
    assert read_notes(done.current) == ("One.", "Two.", "Three.")
    (fallback,) = done.records[0].fallbacks
    assert fallback.label == "consolidate"
    assert [e.fallback for e in done.events if e.kind == "fallback_used"] == [fallback]
    assert any(fallback.reason in text for _, text in list_step_details(done.records[0]))


lines = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1, max_size=20), max_size=4
)


@given(documents(), lines)
async def test_reminding_changes_the_appendix_alone(text: str, reminders: list[str]) -> None:
    report = AnalystReport(source_type="failure", index=0, item_ids=("a",), reminders=tuple(reminders))
    context = await open_context(ScriptedLLM(lambda *_: "never asked"))
    noted = await update_appendix(Skill(text=text), [report], context=context, threshold=None)
    assert without_appendix(noted.skill.text).startswith(without_appendix(text).rstrip("\r\n"))
    assert without_appendix(noted.skill.text).split() == without_appendix(text).split()
    assert (noted.notes is None) == (noted.skill.text == text)


def without_appendix(text: str) -> str:
    """Return the document without its appendix."""
    for region in find_regions(text):
        if region.name == "appendix":
            return text[: region.start] + text[region.end :]
    return text


async def test_notes_are_carried_into_the_document_that_becomes_current_again() -> None:
    older = replace_notes(Skill(text="Old.\n"), ["One."])
    before = replace_notes(Skill(text="New.\n"), ["one.", "Two."])
    carried = carry_notes(older, before)
    assert read_notes(carried.text) == ("One.", "Two.")
    assert carried.text.startswith("Old.")
    context = await open_context(ScriptedLLM(lambda *_: "never asked"))
    noted = await update_appendix(older, [], context=context, threshold=None, earlier=read_notes(before.text))
    assert noted.skill == carried
    assert noted.notes == ("One.", "Two.")
