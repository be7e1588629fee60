"""Stage 2: minibatches and analysts' reports; feedback is for training trajectories alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from doubles import open_context
from reflact.config.training import ReflectConfig, UpdateConfig
from reflact.errors import ContextOverflow, ReplyError
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.stages.reflect import Analyst, Minibatch, group_failures
from reflact.store.runs import open_store
from reflact.testing import ScriptedLLM, ToyEnvironment
from reflact.testing.llm import ScriptedAnswer
from reflact.types import AnalystReport, Item, Patch, Rollout, Score, Skill, Split, Turn, is_failure
from toy_runs import WORLD, run, shown_to

SKILL = Skill(text="Answer briefly.\n")


def useless(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Give no valid reply."""
    return "I would rather not."


def rollout(item: Item, hard: float | None, answer: str = "no") -> Rollout:
    """Return a rollout of an item; None leaves it unmeasured."""
    turns = (Turn(role="user", content=str(item.input)), Turn(role="assistant", content=answer))
    score = None if hard is None else Score.of(hard)
    error = "down" if hard is None else None
    return Rollout(key=item.id, item_id=item.id, skill_hash="s", turns=turns, score=score, error=error)


def items(size: int) -> list[Item]:
    """Return items that differ."""
    return [Item(id=f"i{n}", input=f"q{n}") for n in range(size)]


async def reported(llm: ScriptedLLM, config: ReflectConfig, answer: str = "no") -> AnalystReport:
    """Reflect on two failures with the packaged prompts."""
    batch = items(2)
    rollouts = tuple(rollout(i, 0, answer) for i in batch)
    analyst = Analyst(
        context=await open_context(llm),
        tokens=config.trajectory_tokens,
        skill=SKILL,
        config=UpdateConfig(operations=("append",)),
        max_edits=1,
        notes=lambda batch: "",
    )
    return await analyst.report(Minibatch(source="failure", index=0, items=tuple(batch), rollouts=rollouts))


async def test_an_analyst_without_a_valid_reply_is_recorded() -> None:
    """A minibatch whose analyst gave nothing valid has a report that says why."""
    only = await reported(ScriptedLLM(useless), ReflectConfig())
    assert only.patch == Patch()
    assert only.no_reply_reason is not None
    assert "3 attempts" in only.no_reply_reason


async def test_an_overflow_leads_to_shorter_trajectories_once() -> None:
    """A minibatch too long for the model is shown at half the size, then recorded as refused."""

    def overflow(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return ContextOverflow("too long")

    llm = ScriptedLLM(overflow)
    only = await reported(llm, ReflectConfig(trajectory_tokens=500), answer="x" * 9000)
    assert only.no_reply_reason == "too long"
    marks = [
        re.findall(r"\[\.\.\. ([0-9,]+) characters cut \.\.\.\]", call.prompt.messages[-1].content)
        for call in llm.calls
    ]
    shown = [[9000 - int(cut.replace(",", "")) for cut in cuts] for cuts in marks]
    assert [len(cases) for cases in shown] == [2, 2]
    assert all(600 < case < 750 for case in shown[0])
    assert all(250 < case < 375 for case in shown[1])


async def test_training_uses_feedback_and_hides_other_items(tmp_path: Path) -> None:
    """Only failed train items have feedback; no prompt shows a held-out item, no target sees a reference."""
    world = WORLD
    done = await run(
        tmp_path,
        environment=world,
        train={"num_epochs": 2},
        slow_update={"enabled": True},
        meta_skill={"enabled": True},
        test={"enabled": True},
    )
    async with open_store(tmp_path / "run.db") as store:
        rows = await store._database.fetch_rows("SELECT rollout FROM rollouts", ())
    ids = {split: {item.id for item in world.items(split)} for split in Split}
    lost = [r for (text,) in rows if is_failure(r := Rollout.model_validate_json(text), None)]
    for split in Split:
        feedback = [r.feedback for r in lost if r.item_id in ids[split]]
        assert feedback
        assert all((text or "").startswith("missing rule: ") == (split is Split.train) for text in feedback)
    shown = "\n".join(m.content for call in done.calls for m in call.prompt.messages)
    assert all(f"task: {item.input}" in shown for item in world.items(Split.train))
    for hidden in kept_back(world):
        assert hidden not in shown
    assert {message for _, message in done.actor.asked} == {
        str(i.input) for s in Split for i in world.items(s)
    }
    assert not any("missing rule" in text for text, _ in done.actor.asked)


def kept_back(world: ToyEnvironment) -> Iterator[str]:
    """Yield what would give validation or test items away."""
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
    assert all(pattern.description.startswith("missing rule: ") for pattern in first.patterns)
    assert sum(pattern.count for pattern in first.patterns) <= first.n_failures == 4
    told = [
        text
        for call, text in zip(done.calls, map(shown_to, done.calls), strict=True)
        if call.call_id.step == 2
    ]
    assert all(
        f"pattern ({p.count}): feedback: {p.description}" in text for p in first.patterns for text in told
    )
    assert told

    named = await run(tmp_path / "named")
    assert all(record.fail_reasons == () for record in named.records if record.n_failures)


def test_the_most_frequent_feedback_comes_first() -> None:
    """Rollouts that succeeded, or were graded without a word, give no reason; three reasons are enough."""
    item = Item(id="a", input="x")
    words = ["slow", "wrong  unit", "wrong unit", None, "late", "odd", "late", "late"]
    rollouts = [rollout(item, 0.0).model_copy(update={"feedback": each}) for each in words]
    rollouts.append(rollout(item, 1.0).model_copy(update={"feedback": "slow"}))
    found = [(pattern.description, pattern.count) for pattern in group_failures(rollouts, None)]
    assert found == [("late", 3), ("wrong unit", 2), ("odd", 1)]
