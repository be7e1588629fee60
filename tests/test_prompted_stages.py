"""The prompts of the stages: what is asked for, what is sent back, what the record keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import JsonValue

from doubles import open_context
from reflact import Trainer, read_run
from reflact.config.training import EnvironmentConfig, PromptsConfig, UpdateConfig
from reflact.environments.dataset import GRADERS
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import load_prompts
from reflact.records import StepRecord
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_edits, show_figures, show_task
from reflact.stages.reflect import Analyst, Minibatch
from reflact.stages.reply_models import build_edit, failure_reply_type, list_changes, records_answer
from reflact.stages.update import update
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.types import (
    AnalystReport,
    Edit,
    Item,
    Patch,
    Rollout,
    Score,
    SelectResult,
    Skill,
    Turn,
)

QUERY = "SELECT COUNT(*) FROM airports WHERE state = 'OH'"
ITEM = Item(id="ohio", input="How many airports are in Ohio?", reference=QUERY)
OTHER = Item(id="iowa", input="How many airports are in Iowa?", reference=QUERY.replace("OH", "IA"))
RULE = "The column state holds two capital letters. Translate the name of a state before you compare."
EDIT = {"content": RULE, "evidence": "Cases 1 and 2 compare with the full name of a state."}
REPLY: dict[str, JsonValue] = {
    "reasoning": "Both queries compare the column with a name. " * 100,
    "patterns": [{"type": "state names", "description": "It compares with names.", "cases": [2, 1]}],
    "edits": [EDIT],
}


def failed(*items: Item) -> Minibatch:
    """Return a minibatch of failed rollouts, whose tools were called in turns."""
    turns = (
        Turn(role="user", content="How many?"),
        Turn(role="assistant", content="describe(airports)"),
        Turn(role="tool", content="iata, name, city, state"),
        Turn(role="assistant", content="0"),
    )
    rollouts = tuple(
        Rollout(
            key=item.id,
            item_id=item.id,
            skill_hash="s",
            turns=turns,
            answer="0",
            score=Score.of(0),
            feedback="The query returned no rows.",
        )
        for item in items
    )
    return Minibatch(source="failure", index=0, items=items, rollouts=rollouts)


async def analyse(
    llm: ScriptedLLM,
    batch: Minibatch,
    *,
    task: str = "",
    prompts: PromptsConfig | None = None,
    skill: str = "",
) -> AnalystReport:
    """Return an analyst's report, under the default prompts unless others are configured."""
    opened = await open_context(llm)
    context = StageContext(
        llm=llm, prompts=load_prompts(prompts), decision_log=opened.decision_log, step=1, task=task
    )
    analyst = Analyst(
        context=context,
        skill=Skill(text=skill),
        config=UpdateConfig(),
        max_edits=2,
        tokens=1000,
        notes=lambda batch: "",
    )
    return await analyst.report(batch)


def shown(llm: ScriptedLLM, call: int = 0) -> str:
    """Return the user part of a prompt that was sent."""
    return llm.calls[call].prompt.messages[-1].content


# -------------------------------------------------------------------------------------- what is asked for


async def test_an_environment_brings_its_own_prompts(tmp_path: Path) -> None:
    """Its analysts' prompt is used and identifies the run; ``prompts.folder`` wins over it."""
    header = "role: optimizer\nreply: ReasonedAnalystReply\nvariables: [cases, document, max_edits]\nchangelog: Own.\n---\n"

    def write(place: str, words: str) -> Path:
        path = tmp_path / place / "analyst_failure" / "v1.md"
        path.parent.mkdir(parents=True)
        text = f"---\nname: analyst_failure\nversion: 1\n{header}{words} {{{{max_edits}}}}\n<!-- user -->\n{{{{document}}}}\n{{{{cases}}}}\n"
        path.write_text(text, encoding="utf-8")
        return tmp_path / place

    class Prompting(ToyEnvironment):
        prompt_folder = write("environment", "Study the numbers.")

    seen = set()
    for name, config in (("a", {}), ("b", {"prompts": {"folder": write("own", "Study the words.")}})):
        llm = ScriptedLLM(toy_optimizer())
        settings = {
            "out_dir": tmp_path / name,
            "report": False,
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1, "batch_size": 8},
            **config,
        }
        trainer = Trainer(settings, environment=Prompting(), target=ToyTarget(), optimizer=llm)
        await trainer.train()
        analyses = [c.prompt.messages[0].content for c in llm.calls if c.prompt.name == "analyst_failure"]
        seen.add((trainer.run_id, *set(analyses)))
    assert {words for _, words in seen} == {
        f"Study the {what}. {most}" for what, most in (("numbers", 4), ("words", 4))
    }
    assert len({run_id for run_id, _ in seen}) == 2


async def test_analysts_see_the_task_the_tools_and_the_whole_trajectory() -> None:
    """The prompt holds descriptions, tool calls with observations, the grader's remark and the reference."""
    llm = ScriptedLLM(lambda *_: REPLY)
    await analyse(
        llm, failed(ITEM, OTHER), task=show_task("Questions about airports.", "Tool: describe(table)")
    )
    for words in (
        "Questions about airports.",
        "Tool: describe(table)",
        "assistant: describe(airports)",
        "tool: iata, name, city, state",
        "The query returned no rows.",
        QUERY,
    ):
        assert words in shown(llm)


def test_every_grader_is_described_to_the_optimizer() -> None:
    """A grader that a configuration can name has words for what it measures; a critic has its purpose instead."""
    named = get_args(EnvironmentConfig.model_fields["grader"].annotation)
    assert all(GRADERS[name].meaning for name in {*named} - {"critic"})


@pytest.mark.parametrize(
    ("description", "n_shown"),
    [
        ("Rules applied to numbers.", 3),
        ("", 2),
    ],
)
async def test_environments_and_targets_describe_themselves(
    tmp_path: Path, description: str, n_shown: int
) -> None:
    """``environment.description`` and the descriptions of environment and target reach the optimizer in a run."""

    class Described(ToyTarget):
        description = "The agent has no tools."

    class DescribedEnvironment(ToyEnvironment):
        description = "Even and odd are words."

    llm = ScriptedLLM(toy_optimizer())
    config = {
        "out_dir": tmp_path,
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1, "batch_size": 8},
        "environment": {"description": description},
    }
    await Trainer(config, environment=DescribedEnvironment(), target=Described(), optimizer=llm).train()
    prompts = [call.prompt.messages[-1].content for call in llm.calls if call.prompt.name != "merge"]
    backgrounds = [text for text in prompts if "<background>" in text]
    assert backgrounds
    said = ("Rules applied to numbers.", "Even and odd are words.", "The agent has no tools.")
    assert {sum(words in text for words in said) for text in backgrounds} == {n_shown}


# ------------------------------------------------------------------------------------------ what comes back


async def test_reasoning_is_kept_and_patterns_are_tied_to_items() -> None:
    """Thousands of characters of reasoning are in the record; a pattern counts the items of its cases."""
    report = await analyse(ScriptedLLM(lambda *_: REPLY), failed(ITEM, OTHER))
    assert report.no_reply_reason is None
    assert report.patch.reasoning == REPLY["reasoning"]
    (pattern,) = report.patterns
    assert (pattern.item_ids, pattern.count) == (("ohio", "iowa"), 2)
    (edit,) = report.patch.edits
    assert (edit.content, edit.evidence) == (RULE, EDIT["evidence"])


ANSWERS = (
    f"For the question 'How many airports are in Ohio?' answer: {QUERY}",
    f"Answer like this: {QUERY}",
    f"{QUERY.lower()}",
)
RULES = (
    RULE,
    f"{RULE} Example: {QUERY}",
    "Count rows with COUNT(*) and compare the column state with two capital letters.",
)


@pytest.mark.parametrize("content", ANSWERS)
async def test_an_edit_that_only_records_an_answer_is_sent_back(content: str) -> None:
    """A literal optimizer that writes down an answer is told to state the rule, and the rule is taken."""

    def literal(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return {**REPLY, "edits": [{**EDIT, "content": content}] if call_id.attempt == 0 else [EDIT]}

    llm = ScriptedLLM(literal)
    report = await analyse(llm, failed(OTHER, ITEM))
    assert [edit.content for edit in report.patch.edits] == [RULE]
    assert len(llm.calls) == 2
    mute = await analyse(
        ScriptedLLM(lambda *_: {**REPLY, "edits": [{**EDIT, "content": content}]}), failed(OTHER, ITEM)
    )
    assert mute.no_reply_reason is not None
    assert "edit 1 records the answer of case 2" in mute.no_reply_reason


@pytest.mark.parametrize("placeholder", ["<task>", "<Right_Answer>", "<case_1>", "</rejected>"])
async def test_an_edit_with_a_placeholder_of_the_prompt_is_sent_back(placeholder: str) -> None:
    """The name of a part of the prompt stands for nothing in the document, unless a case says it itself."""
    copied = {**EDIT, "content": f"For {placeholder}, translate the name of a state before you compare."}

    def copies(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return {**REPLY, "edits": [copied] if call_id.attempt == 0 else [EDIT]}

    llm = ScriptedLLM(copies)
    report = await analyse(llm, failed(OTHER, ITEM))
    assert [edit.content for edit in report.patch.edits] == [RULE]
    assert len(llm.calls) == 2
    mute = await analyse(ScriptedLLM(lambda *_: {**REPLY, "edits": [copied]}), failed(OTHER, ITEM))
    assert f"edit 1 holds {placeholder}, which only marks the material" in str(mute.no_reply_reason)
    marked = Item(id="marked", input=f"Fill {placeholder} in.", reference=QUERY)
    kept = await analyse(ScriptedLLM(lambda *_: {**REPLY, "edits": [copied]}), failed(OTHER, marked))
    assert [edit.content for edit in kept.patch.edits] == [copied["content"]]


async def test_an_edit_in_the_tags_of_a_document_is_taken_without_them() -> None:
    """A model that wraps its rule as the prompt wraps the document has still written the rule."""
    wrapped = {**EDIT, "content": f"<document>\n{RULE}\n</document>"}
    llm = ScriptedLLM(lambda *_: {**REPLY, "edits": [wrapped]})
    report = await analyse(llm, failed(OTHER, ITEM))
    assert [edit.content for edit in report.patch.edits] == [RULE]
    assert len(llm.calls) == 1


@pytest.mark.parametrize("content", RULES)
def test_a_rule_may_quote_an_answer_as_its_example(content: str) -> None:
    """What states a rule is no answer, even if it holds one."""
    assert not records_answer(content, ITEM)


@pytest.mark.parametrize(
    ("content", "reference", "expected"),
    [
        ("parity: answer with even or odd.", "odd", False),
        ("For the task 'parity 7' give odd.", "odd", True),
        ("Answer every task.", None, False),
    ],
)
def test_a_short_reference_may_be_part_of_a_rule(content: str, reference: str | None, expected: bool) -> None:
    """A word such as ``odd`` counts as quoted only beside its question."""
    assert records_answer(content, Item(id="p", input="parity 7", reference=reference)) is expected


def test_the_reasoned_replies_bound_no_length() -> None:
    """No text of a default reply has a maximum, on the wire or in validation; reasoning comes first."""
    kind = failure_reply_type(("append", "replace"), cases=3, most=2, reasoned=True)
    assert "maxLength" not in str(kind.model_json_schema())
    assert list(kind.model_fields) == ["reasoning", "patterns", "edits"]


def test_evidence_travels_with_a_proposal() -> None:
    """Merges and rankings see what asks for a proposal; proposals without evidence are shown as before."""
    kind = failure_reply_type(("append",), cases=2, most=1, reasoned=True)
    (edit,) = map(build_edit, list_changes(kind.model_validate(REPLY)))
    assert str(EDIT["evidence"]) in show_edits([edit])
    assert "Cases behind them: proposal 1 from 1 case." in show_edits(
        [edit.model_copy(update={"evidence": ""})]
    )


async def test_a_document_of_100_kb_is_rewritten_once() -> None:
    """No limit of length refuses it, and the summary is kept."""
    skill = Skill(text="\n".join(f"- Rule {n}: {'x' * 80}" for n in range(1200)) + "\n")
    assert len(skill.text) > 100_000
    document = f"{skill.text}- New."
    llm = ScriptedLLM(lambda *_: {"summary": "A rule was added. " * 100, "document": document})
    chosen = SelectResult(patch=Patch(edits=(Edit(op="suggest", content="Add a rule."),)), pool_size=1)
    candidate = await update(
        skill, chosen, context=await open_context(llm), attempts="Earlier attempts: none."
    )
    assert len(llm.calls) == 1
    assert candidate.skill.text.strip() == document
    assert candidate.summary.startswith("A rule was added.")
    assert "Earlier attempts: none." in shown(llm)


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
    """Models copy the tags in which prompts show a document; tags elsewhere are refused."""
    llm = ScriptedLLM(lambda *_: {"summary": "s", "document": written}, reasks=0)
    chosen = SelectResult(patch=Patch(edits=(Edit(op="suggest", content="Add a rule."),)), pool_size=1)
    candidate = await update(Skill(text="Old.\n"), chosen, context=await open_context(llm))
    assert candidate.skill.text.strip() == (kept or "Old.")
    assert bool(candidate.fallbacks) == (kept is None)


# ----------------------------------------------------------------------------------- what stages are shown


def test_figures_of_a_step_name_failures_by_kind() -> None:
    """The autonomous step size sees how many failed, the mean score and the kinds of task that fail."""
    items = [Item(id=str(n), input="i", task_type=kind) for n, kind in enumerate(("join", "join", "count"))]
    rollouts = [
        Rollout(
            key=i.id, item_id=i.id, skill_hash="s", score=None if i.id == "2" else Score(hard=0, soft=0.5)
        )
        for i in items
    ]
    text = show_figures(rollouts, items, ["0", "1"])
    for words in ("3 tasks", "2 failed", "0.000, with partial credit 0.500", "1 could not be measured"):
        assert words in text
    assert "count: 0 of 1 failed\njoin: 2 of 2 failed" in text


async def train(folder: Path, script: Any, **config: Any) -> Sequence[StepRecord]:
    """Train in the toy world and return the steps' records."""
    settings = {
        "out_dir": folder,
        "report": False,
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 2, "batch_size": 4},
        **config,
    }
    environment = ToyEnvironment(train=8)
    await Trainer(settings, environment=environment, target=ToyTarget(), optimizer=script).train()
    return (await read_run(folder)).steps


async def test_rewrites_rankings_and_step_sizes_see_what_earlier_steps_showed(tmp_path: Path) -> None:
    """The step buffer reaches the rewrite, the ranking and the step size, and the last sees its figures."""
    llm = ScriptedLLM(toy_optimizer(edits=2))
    select = {"lr_control": "autonomous", "max_edits": 1, "min_edits": 1}
    await train(tmp_path, llm, update={"mode": "rewrite"}, select=select)
    asked = {(call.prompt.name, call.call_id.step): call.prompt.messages[-1].content for call in llm.calls}
    for name in ("rewrite", "step_size"):
        assert "step 1: 4 of 4 cases failed" in asked[name, 2], name
    assert "4 tasks under the document as it is: 4 failed" in asked["step_size", 1]


async def test_records_keep_rewrite_summaries_and_memory_reasoning(tmp_path: Path) -> None:
    """What was paid for is kept: the summary of a rewrite, and the reasoning behind the memory."""
    steps = await train(tmp_path, ScriptedLLM(toy_optimizer()), update={"mode": "rewrite"})
    assert {step.rewrite_summary for step in steps if step.edits} == {"Rules added."}
    epochs = (await read_run(tmp_path)).epochs
    assert epochs[-1].meta_skill_reasoning == "Lines helped."


async def test_records_keep_the_measurements_of_each_batch(tmp_path: Path) -> None:
    """A step with several batches records each one's scores, in order; together they are the step's."""
    train_config = {"num_epochs": 1, "batch_size": 2, "accumulation": 2}
    steps = await train(tmp_path, ScriptedLLM(toy_optimizer()), train=train_config)
    for step in steps:
        assert [batch.n for batch in step.batches] == [2, 2]
        assert (
            sum((batch.hard or 0) * batch.n for batch in step.batches)
            == (step.rollout.hard or 0) * step.rollout.n
        )
