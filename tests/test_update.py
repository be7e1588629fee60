"""Stage 5 in its modes: edits, suggestions and whole documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import open_context
from reflact.messages import ReplyModel
from reflact.stages.update import RewriteReply, update
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Edit, Patch, SelectResult, Skill, Split
from skill_documents import documents, plain, protected, wild
from toy_runs import LINES, WORLD, Ran, playing, run

MODES = pytest.mark.parametrize("mode", ["patch", "rewrite", "full_rewrite"])
GUARDED = (
    "---\nname: toy\ndescription: Answers --- questions.\n---\n# Toy\n\nHeed the rules.\n\n"
    "<!-- SLOW_UPDATE_START -->\nTake  your time. \n<!-- SLOW_UPDATE_END -->\n\n"
    "<!-- APPENDIX_START -->\n## Execution Notes Appendix\n\n-   Mind it.\n<!-- APPENDIX_END -->\n"
)


def asked_for(done: Ran) -> set[str]:
    """Return the purposes of all calls to the optimizer."""
    return {call.call_id.purpose for call in done.calls}


@given(documents(), wild | plain, st.sampled_from(["suggest", "rewrite", "append"]))
async def test_no_reply_touches_a_protected_region(text: str, reply: str, op: Any) -> None:
    llm = ScriptedLLM(lambda *_: {"summary": "s", "document": reply})
    chosen = SelectResult(patch=Patch(edits=(Edit(op=op, content=reply),)), pool_size=1)
    candidate = await update(Skill(text=text), chosen, context=await open_context(llm))
    assert protected(candidate.skill.text) == protected(text)
    if candidate.fallbacks:
        assert candidate.skill.text == text


@MODES
@pytest.mark.parametrize("text", [GUARDED, GUARDED.replace("\n", "\r\n")], ids=["LF", "CRLF"])
async def test_a_run_leaves_protected_regions_as_they_were(tmp_path: Path, mode: str, text: str) -> None:
    done = await run(tmp_path, initial=text, update={"mode": mode}, train={"num_epochs": 2})
    assert len(done.texts) > 1
    assert all(protected(each) == protected(text) for each in done.texts.values())
    assert done.summary.accepts > 0
    assert done.summary.best.score == 1.0


async def test_suggestions_are_merged_ranked_and_written_in_by_one_call(tmp_path: Path) -> None:
    done = await run(
        tmp_path,
        script=playing(edits=2),
        update={"mode": "rewrite"},
        reflect={"minibatch_size": 2},
        select={"max_edits": 2, "min_edits": 1, "scheduler": "linear"},
    )
    assert asked_for(done) == {"analyst_failure", "analyst_success", "merge", "ranking", "rewrite"}
    assert len(done.asked("rewrite")) == sum(a not in {"no_patches"} for a in done.actions)
    for record in done.records:
        assert {e.op for r in record.reports for e in r.patch.edits} <= {"suggest"}
        suggested = [r for r in record.edits if r.edit.op == "suggest"]
        assert len(suggested) == len(record.chosen.patch.edits) <= (record.chosen.budget or 0)
    prompt = done.shown("rewrite")[0]
    assert all(f"<proposal_{n}>" in prompt for n in (1, 2))


async def test_without_a_rewrite_there_is_no_candidate(tmp_path: Path) -> None:
    left: list[ScriptedAnswer] = ["no", "no", "no"]

    def write(wanted: type[ReplyModel], shown: str) -> ScriptedAnswer:
        return left.pop(0) if left else {"summary": "s", "document": LINES["double"]}

    done = await run(tmp_path, script=playing((RewriteReply, write)), update={"mode": "rewrite"})
    assert done.actions == ["no_rewrite", "accept_new_best"]
    first = done.records[0]
    assert [f.label for f in first.fallbacks] == ["rewrite"]
    assert first.fallbacks[0].reason in first.verdict.reason
    assert (first.verdict.candidate, first.candidate_hash) == (None, first.skill_before)
    assert any(e.kind == "fallback_used" and e.fallback == first.fallbacks[0] for e in done.events)
    val = {str(i.input) for i in WORLD.items(Split.val)}
    assert done.actor.asked[8][1] not in val
    assert done.summary.skips == 1


@pytest.mark.parametrize(
    ("initial", "reply"),
    [("Answer.\n", "  Answer.\n\n"), ("One.\r\nTwo.\r\n", "One.\nTwo.\n")],
)
async def test_a_rewrite_that_changes_nothing_is_no_candidate(
    tmp_path: Path, initial: str, reply: str
) -> None:
    script = playing((RewriteReply, {"summary": "s", "document": reply}))
    done = await run(tmp_path, initial=initial, script=script, update={"mode": "rewrite"})
    assert done.actions == ["no_change", "no_change"]
    assert len(done.asked("rewrite")) == 2
    assert set(done.texts.values()) == {initial}


@pytest.mark.parametrize("control", ["fixed", "autonomous", "none"])
async def test_a_whole_document_is_written_by_one_call_and_never_ranked(tmp_path: Path, control: str) -> None:
    done = await run(
        tmp_path, update={"mode": "full_rewrite"}, select={"max_edits": 1, "lr_control": control}
    )
    assert asked_for(done) == {"write_document"}
    assert len(done.asked("write_document")) == len(done.records)
    first = done.records[0]
    types = {item.id: str(item.task_type) for item in WORLD.items(Split.train)}
    missed = {types[item_id] for item_id in first.item_ids}
    assert all(LINES[name] in done.texts[first.candidate_hash] for name in missed)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("<document>\n- Rule.\n</document>", "- Rule."),
        ("<document_>\n- Rule.\n</document_>\n", "- Rule."),
        ("- Rule.", "- Rule."),
        ("<document>\n- Rule.", None),
        ("- Rule.\n<background>", None),
    ],
)
async def test_tags_around_a_whole_document_are_taken_off(written: str, kept: str | None) -> None:
    llm = ScriptedLLM(lambda *_: {"summary": "s", "document": written}, reasks=0)
    chosen = SelectResult(patch=Patch(edits=(Edit(op="suggest", content="Add a rule."),)), pool_size=1)
    candidate = await update(Skill(text="Old.\n"), chosen, context=await open_context(llm))
    assert candidate.skill.text.strip() == (kept or "Old.")
    assert bool(candidate.fallbacks) == (kept is None)
