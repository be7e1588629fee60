"""The chat target: what the model is sent, under which identity, and what is kept of it."""

from __future__ import annotations

import pytest

from reflact.errors import ProviderDown
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel, Text
from reflact.protocols import Target
from reflact.targets.chat import CHAT_TARGET_VERSION, ChatTarget, join_system_message
from reflact.testing import ScriptedLLM
from reflact.types import Skill, Turn


def _echo(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> str:
    return f"{prompt.messages[-1].content}!"


async def test_a_conversation_is_sent_in_full_each_time() -> None:
    """The skill comes first, then all turns, which are kept without it; each call is numbered in its rollout."""
    llm = ScriptedLLM(_echo)
    session = ChatTarget(llm).session(Skill(text="Shout."), rollout="key")
    assert not session.turns
    assert [await session.reply("hi"), await session.reply("there")] == ["hi!", "there!"]
    assert session.turns[:2] == (Turn(role="user", content="hi"), Turn(role="assistant", content="hi!"))
    first, second = llm.calls
    assert first.reply_type is Text
    system = Message(role="system", content="Shout.")
    assert first.prompt == RenderedPrompt(
        name="target", version=CHAT_TARGET_VERSION, messages=(system, Message(role="user", content="hi"))
    )
    assert second.prompt.messages == (
        system,
        Message(role="user", content="hi"),
        Message(role="assistant", content="hi!"),
        Message(role="user", content="there"),
    )
    assert [call.call_id for call in llm.calls] == [
        CallId(role="target", purpose="rollout", rollout="key", number=number) for number in (0, 1)
    ]


async def test_a_message_without_an_answer_leaves_no_trace() -> None:
    """After an error the conversation is as before; without a skill the model gets the question alone."""
    answers: list[str | Exception] = ["one", ProviderDown("gone"), "two"]
    llm = ScriptedLLM(lambda *_: answers.pop(0))
    session = ChatTarget(llm, postamble="\n").session(Skill(text=" \n"), rollout="key")
    await session.reply("a")
    assert llm.calls[0].prompt.messages == (Message(role="user", content="a"),)
    before = session.turns
    with pytest.raises(ProviderDown):
        await session.reply("b")
    assert session.turns == before
    assert await session.reply("b") == "two"
    assert llm.calls[1] == llm.calls[2]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("a", "b", "c"), "a\n\nb\n\nc"),
        (("a\n", "\n  b\n\n", "c\n"), "a\n\n  b\n\nc"),
        (("", "b", " \n"), "b"),
        (("", "", ""), ""),
        (("a", "{b} %s", ""), "a\n\n{b} %s"),
    ],
)
def test_the_system_message_joins_its_parts(parts: tuple[str, ...], expected: str) -> None:
    """One blank line stands between parts; empty ones are left out; nothing is read as a template."""
    assert join_system_message(*parts) == expected


def test_identity_holds_all_that_answers_depend_on() -> None:
    """Model, preamble and postamble each make a difference; the text is pinned."""
    target: Target = ChatTarget(ScriptedLLM(_echo, identity="m"), preamble="a")
    others = [
        ChatTarget(ScriptedLLM(_echo, identity="n"), preamble="a"),
        ChatTarget(ScriptedLLM(_echo, identity="m"), preamble="b"),
        ChatTarget(ScriptedLLM(_echo, identity="m"), postamble="a"),
    ]
    assert len({target.identity, *(other.identity for other in others)}) == 4
    assert target.identity == '{"llm":"m","postamble":"","preamble":"a","target":"chat","version":1}'
