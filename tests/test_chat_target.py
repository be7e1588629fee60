"""The chat target: what the model is sent, under which identity, and what is kept of it."""

from __future__ import annotations

import pytest

from reflact.errors import ProviderDown
from reflact.messages import CallId, Message
from reflact.targets.chat import ChatTarget
from reflact.testing import ScriptedLLM
from reflact.types import Skill


async def test_a_conversation_is_sent_in_full_each_time() -> None:
    """The skill comes first, then all turns, which are kept without it; each call has its number."""
    llm = ScriptedLLM(lambda prompt, *_: f"{prompt.messages[-1].content}!")
    target = ChatTarget(llm, preamble="Be {x}\n", postamble=" \n")
    session = target.session(Skill(text="Shout."), rollout="key")
    assert not session.turns
    assert [await session.reply("hi"), await session.reply("there")] == ["hi!", "there!"]
    assert [turn.content for turn in session.turns] == ["hi", "hi!", "there", "there!"]
    assert llm.calls[1].prompt.messages == (
        Message(role="system", content="Be {x}\n\nShout."),
        Message(role="user", content="hi"),
        Message(role="assistant", content="hi!"),
        Message(role="user", content="there"),
    )
    assert [call.call_id for call in llm.calls] == [
        CallId(role="target", purpose="rollout", rollout="key", number=number) for number in (0, 1)
    ]


async def test_a_message_without_an_answer_leaves_no_trace() -> None:
    """After an error the conversation is as before; without a skill there is no system message."""
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


def test_identity_holds_all_that_answers_depend_on() -> None:
    """Model, preamble and postamble each make a difference; the text is pinned."""

    def identify(model: str, **texts: str) -> str:
        return ChatTarget(ScriptedLLM(lambda *_: "", identity=model), **texts).identity

    first = identify("m", preamble="a")
    assert first == '{"llm":"m","postamble":"","preamble":"a","target":"chat","version":1}'
    others = {identify("n", preamble="a"), identify("m", preamble="b"), identify("m", postamble="a")}
    assert len({first, *others}) == 4
