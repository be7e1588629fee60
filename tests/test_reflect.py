"""Stage 2: minibatches and analysts' reports; feedback is for training trajectories alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles import open_context
from reflact.config.training import ReflectConfig, UpdateConfig
from reflact.errors import ContextOverflow
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.stages.reflect import Analyst, Minibatch
from reflact.store.runs import open_store
from reflact.testing import ScriptedLLM, ToyEnvironment
from reflact.testing.llm import ScriptedAnswer
from reflact.types import AnalystReport, Item, Patch, Rollout, Score, Skill, Split, Turn, is_failure
from toy_runs import Ran, run

pytestmark = pytest.mark.anyio

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


async def trained(folder: Path) -> tuple[Ran, dict[Split, list[Rollout]]]:
    """Train with everything on, and return the stored rollouts by split."""
    world = ToyEnvironment(train=8, val=4, test=4)
    done = await run(
        folder,
        environment=world,
        train={"num_epochs": 2},
        slow_update={"enabled": True},
        meta_skill={"enabled": True},
        test={"enabled": True},
    )
    async with open_store(folder / "run.db") as store:
        rows = await store._database.fetch_rows("SELECT rollout FROM rollouts", ())
    rollouts = [Rollout.model_validate_json(text) for (text,) in rows]
    ids = {split: {item.id for item in world.items(split)} for split in Split}
    return done, {split: [r for r in rollouts if r.item_id in ids[split]] for split in Split}


async def test_feedback_is_kept_in_training_alone(tmp_path: Path) -> None:
    """Failed train items say what was missing; validation and test items never say anything."""
    _, rollouts = await trained(tmp_path)
    lost = [r for r in rollouts[Split.train] if is_failure(r, None)]
    assert lost
    assert all(r.feedback is not None and r.feedback.startswith("missing rule: ") for r in lost)
    for split in (Split.val, Split.test):
        assert any(is_failure(r, None) for r in rollouts[split])
        assert all(r.feedback is None for r in rollouts[split])


async def test_nobody_learns_from_validation_or_test_items(tmp_path: Path) -> None:
    """No prompt of a whole run shows an input, an answer or an id of an item that is kept from it."""
    done, _ = await trained(tmp_path)
    world = ToyEnvironment(train=8, val=4, test=4)
    shown = "\n".join(m.content for call in done.calls for m in call.prompt.messages)
    assert all(f"task: {item.input}" in shown for item in world.items(Split.train))
    for hidden in kept_back(world):
        assert hidden not in shown


async def test_the_target_never_sees_reference_or_feedback(tmp_path: Path) -> None:
    """What the target is told is the skill and the item's input."""
    done, _ = await trained(tmp_path)
    inputs = {
        str(item.input) for split in Split for item in ToyEnvironment(train=8, val=4, test=4).items(split)
    }
    assert {message for _, message in done.actor.asked} == inputs
    assert not any("missing rule" in text for text, _ in done.actor.asked)


def kept_back(world: ToyEnvironment) -> Iterator[str]:
    """Yield what would give validation or test items away."""
    for split in (Split.val, Split.test):
        for item in world.items(split):
            yield f"{item.input}\n"
            yield item.id
