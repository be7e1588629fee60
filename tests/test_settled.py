"""Decisions that may not be had: asked once, absent for good, the same after a restart."""

from __future__ import annotations

import pytest

from reflact.errors import ContextOverflow, ProviderDown
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel
from reflact.stages.reply_models import NoReply, ask_or_fallback
from reflact.testing import InMemoryRunStore, ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

pytestmark = pytest.mark.anyio

RUN = "r0"
SAMPLE = CallId(role="optimizer", purpose="merge", step=3, part="a")


class Word(ReplyModel):
    """One word."""

    word: str


def prompt(text: str) -> RenderedPrompt:
    """Return a prompt of one message."""
    return RenderedPrompt(name="p", version=1, messages=(Message(role="user", content=text),))


async def opened() -> InMemoryRunStore:
    """Return a store in which the run is open."""
    store = InMemoryRunStore()
    await store.open_run(RUN, {}, {})
    return store


async def asked(
    llm: ScriptedLLM, store: InMemoryRunStore, *, shorter: bool = False, call_id: CallId = SAMPLE
) -> Word | NoReply:
    """Ask for a word other than ``bad``, with a long prompt and maybe a short one in reserve."""

    def check(reply: Word) -> None:
        if reply.word == "bad":
            raise ValueError("not that word")

    return await ask_or_fallback(
        llm,
        prompt("long"),
        Word,
        call_id=call_id,
        check=check,
        decision_log=store.decision_log(RUN),
        shorten=(lambda: prompt("short")) if shorter else None,
    )


def saying(long: ScriptedAnswer, short: ScriptedAnswer = None) -> ScriptedLLM:
    """Return a model that gives one answer to the long prompt and one to the short."""

    def answer(shown: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return long if shown.messages[0].content == "long" else short

    return ScriptedLLM(answer)


def shown(llm: ScriptedLLM) -> list[str]:
    """Return the prompts that were sent, attempts of one call once."""
    return [call.prompt.messages[0].content for call in llm.calls if call.call_id.attempt == 0]


async def test_a_valid_reply_comes_back_and_leaves_no_note() -> None:
    """What was had is a stored reply's business, not the journal's."""
    store = await opened()
    assert await asked(saying({"word": "yes"}), store) == Word(word="yes")
    assert not store._runs[RUN].notes


async def test_a_refusal_is_final() -> None:
    """No valid reply is journalled with the reason; after a restart the model is not asked again."""
    store = await opened()
    refusal = await asked(saying({"word": "bad"}), store)
    assert isinstance(refusal, NoReply)
    assert "not that word" in refusal.reason
    better = saying({"word": "yes"})
    assert await asked(better, store) == refusal
    assert better.calls == []
    other = SAMPLE.model_copy(update={"part": "b"})
    assert await asked(better, store, call_id=other) == Word(word="yes")


async def test_a_prompt_that_is_too_long_is_refused() -> None:
    """Without a shorter one, an overflow is a reason like any other."""
    store = await opened()
    assert await asked(saying(ContextOverflow("too long")), store) == NoReply(reason="too long")
    assert await asked(saying({"word": "yes"}), store) == NoReply(reason="too long")


async def test_a_prompt_is_shortened_once() -> None:
    """An overflow leads to the shorter prompt; one that overflows too is refused."""
    store = await opened()
    llm = saying(ContextOverflow("too long"), ContextOverflow("still too long"))
    assert await asked(llm, store, shorter=True) == NoReply(reason="still too long")
    assert shown(llm) == ["long", "short"]


async def test_a_restart_asks_with_the_same_prompt() -> None:
    """Once it was shortened a prompt stays so, even for a model with more room."""
    store = await opened()
    first = saying(ContextOverflow("too long"), {"word": "short"})
    assert await asked(first, store, shorter=True) == Word(word="short")
    second = saying({"word": "long"}, {"word": "short"})
    assert await asked(second, store, shorter=True) == Word(word="short")
    assert (shown(first), shown(second)) == (["long", "short"], ["short"])


async def test_a_shorter_prompt_may_be_refused_for_another_reason() -> None:
    """Invalid replies to the shorter prompt are refused as those to a first one are."""
    store = await opened()
    refusal = await asked(saying(ContextOverflow("too long"), {"word": "bad"}), store, shorter=True)
    assert isinstance(refusal, NoReply)
    assert "not that word" in refusal.reason


@pytest.mark.parametrize("shorter", [False, True])
async def test_a_provider_that_fails_is_no_refusal(shorter: bool) -> None:
    """An endpoint that cannot be reached has decided nothing: the error is passed on, nothing is noted."""
    store = await opened()
    with pytest.raises(ProviderDown, match="gone"):
        await asked(saying(ProviderDown("gone")), store, shorter=shorter)
    assert not store._runs[RUN].notes
    assert await asked(saying({"word": "yes"}), store) == Word(word="yes")


async def test_a_sample_without_a_step_is_a_mistake() -> None:
    """Absences are journalled under a step, so there must be one."""
    outside = CallId(role="optimizer", purpose="merge", rollout="k")
    with pytest.raises(ValueError, match="has no step"):
        await asked(saying({"word": "yes"}), await opened(), call_id=outside)
