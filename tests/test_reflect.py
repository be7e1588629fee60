"""Stage 2: what analysts are asked, what is sent back, and what the record keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import JsonValue

from doubles import open_context
from reflact import Trainer
from reflact.config.training import UpdateConfig
from reflact.errors import ContextOverflow, ReplyError
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.stages.prompt_sections import show_edits
from reflact.stages.reflect import Analyst, Minibatch, count_cases
from reflact.store.runs import open_store
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.types import AnalystReport, Item, Rollout, Score, Skill, Split, Turn, is_failure
from toy_runs import WORLD, run, settings, shown_to

QUERY = "SELECT COUNT(*) FROM airports WHERE state = 'OH'"
OHIO = Item(id="ohio", input="How many airports are in Ohio?", reference=QUERY)
IOWA = Item(id="iowa", input="How many airports are in Iowa?", reference=QUERY.replace("OH", "IA"))
RULE = "The column state holds two capital letters. Translate the name of a state before you compare."
EDIT = {"content": RULE, "evidence": "Cases 1 and 2 compare with the full name of a state."}
REPLY: dict[str, JsonValue] = {
    "reasoning": "Both queries compare the column with a name. " * 100,
    "patterns": [{"type": "state names", "description": "It compares with names.", "cases": [2, 1]}],
    "edits": [EDIT],
}


def rollout(item: Item, hard: float | None = 0, *, answer: str = "0", feedback: str | None = None) -> Rollout:
    """Return a rollout of an item in several turns; None leaves it unmeasured."""
    turns = (
        Turn(role="user", content="How many?"),
        Turn(role="assistant", content="describe(airports)"),
        Turn(role="tool", content="iata, name, city, state"),
        Turn(role="assistant", content=answer),
    )
    score = None if hard is None else Score.of(hard)
    return Rollout(key=item.id, item_id=item.id, skill_hash="s", turns=turns, score=score, feedback=feedback)


async def analyse(llm: ScriptedLLM, *items: Item, tokens: int = 1000, answer: str = "0") -> AnalystReport:
    analyst = Analyst(
        context=await open_context(llm),
        skill=Skill(text=""),
        config=UpdateConfig(),
        max_edits=2,
        tokens=tokens,
        notes=lambda batch: "",
    )
    rollouts = tuple(rollout(item, answer=answer, feedback="The query returned no rows.") for item in items)
    return await analyst.report(Minibatch(source="failure", index=0, items=items, rollouts=rollouts))


async def test_reasoning_is_kept_and_patterns_are_tied_to_items() -> None:
    report = await analyse(ScriptedLLM(lambda *_: REPLY), OHIO, IOWA)
    assert (report.no_reply_reason, report.patch.reasoning) == (None, REPLY["reasoning"])
    (pattern,) = report.patterns
    assert (pattern.item_ids, pattern.count) == (("ohio", "iowa"), 2)
    (edit,) = report.patch.edits
    assert (edit.content, edit.evidence) == (RULE, EDIT["evidence"])
    assert str(EDIT["evidence"]) in show_edits([edit])
    plain = edit.model_copy(update={"evidence": ""})
    assert "Cases behind them: proposal 1 from 2 failure cases." in show_edits([plain])


@pytest.mark.parametrize(
    ("evidence", "count"),
    [
        ("Cases 1, 3 and 5 name no year.", 3),
        ("In case #2 the sum is wrong, and in case 4 too.", 2),
        ("Cases 2-4 and 7 show it.", 4),
        ("cases 1 to 99", 8),
        ("All of them; no case says it.", 8),
    ],
)
def test_support_counts_the_cases_that_ask_for_an_edit(evidence: str, count: int) -> None:
    """They are those that its evidence names; all of the batch if it names none."""
    assert count_cases(evidence, 8) == count


@pytest.mark.parametrize("placeholder", ["<task>", "<Right_Answer>", "<case_1>", "</rejected>"])
async def test_an_edit_with_a_placeholder_of_the_prompt_is_sent_back(placeholder: str) -> None:
    """The name of a part of the prompt stands for nothing in the document, unless a case says it itself."""
    copied = {**EDIT, "content": f"For {placeholder}, translate the name of a state before you compare."}
    copies = ScriptedLLM(lambda *_: {**REPLY, "edits": [copied]})
    mute = await analyse(copies, IOWA, OHIO)
    assert f"edit 1 holds {placeholder}, which only marks the material" in str(mute.no_reply_reason)
    marked = Item(id="marked", input="i", reference=f"Fill {placeholder} in.")
    kept = await analyse(copies, IOWA, marked)
    assert [edit.content for edit in kept.patch.edits] == [copied["content"]]


async def test_an_overflow_leads_to_shorter_trajectories_once() -> None:
    """A minibatch too long for the model is shown at half the size, then recorded as refused."""
    llm = ScriptedLLM(lambda *_: ContextOverflow("too long"))
    only = await analyse(llm, OHIO, IOWA, tokens=1200, answer="x" * 9000)
    assert only.no_reply_reason == "too long"
    long, short = (call.prompt.messages[-1].content.count("x") for call in llm.calls)
    assert 1000 < long < 3600
    assert 500 < short < 0.6 * long


async def test_training_uses_feedback_and_hides_other_items(tmp_path: Path) -> None:
    """Only failed train items have feedback; no prompt shows a held-out item, no target sees a reference."""
    ends = {"slow_update": {"enabled": True}, "meta_skill": {"enabled": True}, "test": {"enabled": True}}
    done = await run(tmp_path, environment=WORLD, train={"num_epochs": 2}, **ends)
    async with open_store(tmp_path / "run.db") as store:
        rows = await store._database.fetch_rows("SELECT value FROM outcomes WHERE kind = 'rollout'", ())
    ids = {split: {item.id for item in WORLD.items(split)} for split in Split}
    lost = [r for (text,) in rows if is_failure(r := Rollout.model_validate_json(text), None)]
    for split in Split:
        feedback = [r.feedback for r in lost if r.item_id in ids[split]]
        assert feedback
        assert all((text or "").startswith("missing rule: ") == (split is Split.train) for text in feedback)
    shown = "\n".join(m.content for call in done.calls for m in call.prompt.messages)
    assert all(f"task: {item.input}" in shown for item in WORLD.items(Split.train))
    for hidden in kept_back(WORLD):
        assert hidden not in shown
    inputs = {str(item.input) for split in Split for item in WORLD.items(split)}
    assert {message for _, message in done.actor.asked} == inputs
    assert not any("missing rule" in text for text, _ in done.actor.asked)


def kept_back(world: ToyEnvironment) -> Iterator[str]:
    for split in (Split.val, Split.test):
        for item in world.items(split):
            yield f"{item.input}\n"
            yield item.id


async def test_failures_are_grouped_by_feedback_if_no_analyst_names_a_pattern(tmp_path: Path) -> None:
    """Later steps of the epoch are told the most frequent feedback, with the items it was given on."""

    def refuse(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return ReplyError("no valid reply")

    done = await run(tmp_path, script=refuse, train={"batch_size": 4, "num_epochs": 1})
    first = done.records[0]
    assert not any(report.patterns for report in first.reports)
    assert first.patterns == first.fail_reasons
    assert {pattern.type for pattern in first.patterns} == {"feedback"}
    assert sum(pattern.count for pattern in first.patterns) <= first.n_failures == 4
    later = [shown_to(call) for call in done.calls if call.call_id.step == 2]
    assert later
    for pattern in first.patterns:
        assert all(f"({pattern.count}): feedback: {pattern.description}" in text for text in later)
    named = await run(tmp_path / "named")
    assert all(record.fail_reasons == () for record in named.records if record.n_failures)


async def test_an_environment_brings_its_own_prompts(tmp_path: Path) -> None:
    """Its analysts' prompt is used and identifies the run; ``prompts.folder`` wins over it."""

    def write(place: str, words: str) -> Path:
        path = tmp_path / place / "analyst_failure" / "v1.md"
        path.parent.mkdir(parents=True)
        header = "name: analyst_failure\nversion: 1\nrole: optimizer\nreply: ReasonedAnalystReply\n"
        header += "variables: [cases, document, max_edits]\nchangelog: Own.\n"
        body = f"{words} {{{{max_edits}}}}\n<!-- user -->\n{{{{document}}}}\n{{{{cases}}}}\n"
        path.write_text(f"---\n{header}---\n{body}", encoding="utf-8")
        return tmp_path / place

    class Prompting(ToyEnvironment):
        prompt_folder = write("environment", "Study the numbers.")

    own = {"prompts": {"folder": write("own", "Study the words.")}}
    runs = [await run(tmp_path / str(n), environment=Prompting(), **each) for n, each in enumerate(({}, own))]
    first = [done.asked("analyst_failure")[0].prompt.messages[0].content for done in runs]
    assert first == ["Study the numbers. 1", "Study the words. 1"]
    assert len({done.summary.run_id for done in runs}) == 2


@pytest.mark.parametrize(("description", "n_shown"), [("Rules applied to numbers.", 3), ("", 2)])
async def test_environments_and_targets_describe_themselves(
    tmp_path: Path, description: str, n_shown: int
) -> None:
    class Described(ToyTarget):
        description = "The agent has no tools."

    class DescribedEnvironment(ToyEnvironment):
        description = "Even and odd are words."

    llm = ScriptedLLM(toy_optimizer())
    config = settings(tmp_path, environment={"description": description})
    await Trainer(config, environment=DescribedEnvironment(), target=Described(), optimizer=llm).train()
    prompts = [call.prompt.messages[-1].content for call in llm.calls if call.prompt.name != "merge"]
    backgrounds = [text for text in prompts if "<background>" in text]
    assert backgrounds
    descriptions = ("Rules applied to numbers.", "Even and odd are words.", "The agent has no tools.")
    assert {sum(words in text for words in descriptions) for text in backgrounds} == {n_shown}
