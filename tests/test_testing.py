"""The stand-ins for tests: a scripted model, a toy world, a store in memory and a failing network."""

from __future__ import annotations

from typing import ClassVar

import pytest
from pydantic import Field, JsonValue

from reflact.errors import ReplyError
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel, Text
from reflact.protocols import Environment, Target
from reflact.testing import (
    TOY_RULES,
    ScriptedLLM,
    ToyEnvironment,
    ToyTarget,
)
from reflact.types import Item, Skill, Split

PROMPT = RenderedPrompt(name="p", version=1, messages=(Message(role="user", content="?"),))
SAMPLE = CallId(role="optimizer", purpose="test", step=1)


class Number(ReplyModel):
    """A reply with a rule of its own."""

    version: ClassVar[int] = 1
    value: int = Field(ge=0)


async def test_an_invalid_answer_is_asked_for_again() -> None:
    """Each attempt has its number, all are recorded and counted, and the first valid one stands."""

    def odd(reply: Number) -> None:
        if reply.value % 2 == 0:
            raise ValueError(f"{reply.value} is even")

    llm = ScriptedLLM(lambda prompt, reply_type, call_id: {"value": call_id.attempt - 1}, reasks=3)
    reply = await llm.ask(PROMPT, Number, call_id=SAMPLE, check=odd)
    assert (reply.value.value, reply.attempts, reply.usage.calls) == (1, 3, 3)
    assert [call.call_id for call in llm.calls] == [
        SAMPLE.model_copy(update={"attempt": attempt}) for attempt in range(3)
    ]


async def test_a_model_that_never_gets_it_right() -> None:
    """When no attempt is valid the error holds the reason of each; nothing is guessed from another type."""
    answers: list[JsonValue | ReplyModel] = [
        {"value": -1}, '{"value": ', {"value": 1, "more": 2}, Text(text="3"), [3], None, '{"value": NaN}', "3"
    ]  # fmt: skip
    llm = ScriptedLLM(lambda prompt, reply_type, call_id: answers[call_id.attempt], reasks=7)
    with pytest.raises(ReplyError, match="gave no valid reply in 8 attempts") as caught:
        await llm.ask(PROMPT, Number, call_id=SAMPLE)
    reasons = [reason.split(":")[0] for reason in caught.value.reasons]
    assert reasons[:3] == ["value", "Invalid JSON", "more"]


async def _solved(environment: Environment, target: Target, skill: Skill) -> set[str]:
    solved = set()
    for item in environment.items(Split.val):
        graded = await environment.run(item, target.session(skill, rollout=item.id), seed=0)
        if graded.score.hard == 1:
            solved.add(item.id)
        assert (graded.feedback is None) == (graded.score.hard == 1)
    return solved


@pytest.mark.parametrize("known", [(), ("square",), ("double", "length"), tuple(TOY_RULES)], ids=str)
async def test_a_skill_is_worth_the_rules_in_it(known: tuple[str, ...]) -> None:
    environment = ToyEnvironment(val=12, rules=6)
    skill = Skill(text="\n".join(["# Rules", *(TOY_RULES[name].line for name in known)]))
    needed = {item.id for item in environment.items(Split.val) if item.task_type in known}
    assert await _solved(environment, ToyTarget(), skill) == needed
    garbled = Skill(text=skill.text.replace("answer", "reply"))
    assert await _solved(environment, ToyTarget(), garbled) == set()


async def test_noise_is_drawn_from_seed_and_rollout() -> None:
    """Equal seeds give equal answers, others other ones; the share is about the one asked for, and in the identity."""
    environment = ToyEnvironment(val=400, rules=1)
    full = Skill(text=TOY_RULES["double"].line)
    first = await _solved(environment, ToyTarget(noise=0.25, seed=1), full)
    assert first == await _solved(environment, ToyTarget(noise=0.25, seed=1), full)
    assert first != await _solved(environment, ToyTarget(noise=0.25, seed=2), full)
    assert 260 < len(first) < 340
    assert len(await _solved(environment, ToyTarget(noise=0.25), Skill(text=""))) > 60
    assert len(await _solved(environment, ToyTarget(noise=1), full)) == 0
    item = Item(id="q", input="double 4", reference="8", task_type="double")
    target = ToyTarget(noise=0.5)
    answers = {await target.session(full, rollout=str(trial)).reply(str(item.input)) for trial in range(20)}
    assert answers == {"8", "unknown"}
    assert len({other.identity for other in (ToyTarget(), ToyTarget(seed=1), ToyTarget(noise=0.1))}) == 3
