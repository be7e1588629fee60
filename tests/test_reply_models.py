"""Replies of the optimizer: each kind of malformed reply is sent back, and a missing reply is logged."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import Field

from doubles import PROMPT, Endpoint, call_id, completion, config, connected, open_context, opened
from reflact.errors import ContextOverflow, ProviderDown, ReplyError
from reflact.messages import CallId, NoReply, RenderedPrompt, ReplyModel
from reflact.records import Usage
from reflact.stages.reply_models import check_reply, failure_reply_type
from reflact.testing import InMemoryRunStore, ScriptedLLM
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Item, Skill

DOCUMENT = "Answer in one word.\nNever guess.\nAnswer in English."


class Pick(ReplyModel):
    """A reply with an anchor in a document, numbers of proposals and a weight."""

    anchor: str = Field(description="Text that occurs once in the document.")
    numbers: list[int] = Field(description="Numbers of the chosen proposals.")
    weight: float = Field(ge=0, le=1, description="How sure you are.")


GOOD = Pick(anchor="Never guess.", numbers=[2, 1], weight=0.5)


def fits(pick: Pick) -> None:
    if DOCUMENT.count(pick.anchor) != 1:
        raise ValueError(f"the anchor {pick.anchor!r} occurs {DOCUMENT.count(pick.anchor)} times")
    if len(set(pick.numbers)) != len(pick.numbers):
        raise ValueError("a number occurs twice")
    if not set(pick.numbers) <= {1, 2, 3}:
        raise ValueError("there are proposals 1 to 3")


def text(**changed: Any) -> str:
    return json.dumps(GOOD.model_dump() | changed)


KINDS: dict[str, tuple[str, str]] = {
    "open fence": (f"```json\n{text()}", "Invalid JSON"),
    "prose around": (f"Here it is: {text()} I hope that helps.", "Invalid JSON"),
    "trailing comma": (text()[:-1] + ",}", "Invalid JSON"),
    "wrong type": (text(weight="high"), "weight: Input should be a valid number"),
    "missing field": (json.dumps({"anchor": "Never guess.", "numbers": [1]}), "weight: Field required"),
    "extra object": (text() + text(), "Invalid JSON"),
    "truncated": (text()[:30], "cut off"),
    "refusal": ("", "it was a refusal: I would rather not."),
    "empty": ("", "Invalid JSON"),
    "not a number": (text(weight=float("nan")), "weight: Input should be a finite number"),
    "huge integer": (text(numbers=[1]).replace("[1]", f"[{'9' * 5000}]"), ""),
    "deep nesting": (text(numbers=[1]).replace("[1]", "[" * 3000 + "]" * 3000), ""),
    "wrong anchor": (text(anchor="Answer in"), "the anchor 'Answer in' occurs 2 times"),
    "duplicate index": (text(numbers=[1, 1]), "a number occurs twice"),
    "index out of range": (text(numbers=[1, 4]), "there are proposals 1 to 3"),
}


def bad(kind: str, mode: str) -> httpx.Response:
    if kind == "refusal":
        return completion(None, refusal="I would rather not.")
    finish = "length" if kind == "truncated" else "stop"
    return answer(KINDS[kind][0], mode, finish)


def answer(content: str, mode: str, finish: str = "stop") -> httpx.Response:
    if mode == "tools":
        return completion(None, arguments=content, finish=finish)
    return completion(content, finish=finish)


MODES = ("json_schema", "tools")
EACH = [(kind, mode) for kind in KINDS for mode in MODES]


async def test_a_malformed_reply_is_mended_by_asking_again() -> None:
    usage = Usage(calls=2, input_tokens=20, cached_tokens=8, output_tokens=6)
    replies = {}
    for kind, mode in EACH:
        async with connected(Endpoint(bad(kind, mode), answer(text(), mode)), config(mode=mode)) as client:
            reply = await client.ask(PROMPT, Pick, call_id=call_id(), check=fits)
        replies[kind, mode] = (type(reply.value), reply.value, reply.attempts, reply.usage)
    assert {case: found for case, found in replies.items() if found != (Pick, GOOD, 2, usage)} == {}


async def test_a_reply_that_stays_malformed_is_an_error_with_every_reason() -> None:
    for kind, mode in EACH:
        endpoint = Endpoint(bad(kind, mode))
        async with connected(endpoint, config(mode=mode)) as client:
            with pytest.raises(ReplyError) as refused:
                await client.ask(PROMPT, Pick, call_id=call_id(), check=fits)
        assert len(refused.value.reasons) == len(endpoint.requests) == 3, (kind, mode)
        expected = "" if (mode, kind) == ("tools", "empty") else KINDS[kind][1]
        assert all(reason and expected in reason for reason in refused.value.reasons), (kind, mode)
        assert "in 3 attempts (merge in step 1); the last reason: " in str(refused.value)


@pytest.mark.parametrize("mode", MODES)
async def test_the_model_is_told_what_was_wrong(mode: str) -> None:
    endpoint = Endpoint(bad("wrong anchor", mode), answer(text(), mode))
    async with connected(endpoint, config(mode=mode)) as client:
        await client.ask(PROMPT, Pick, call_id=call_id(), check=fits)
    first, second = (body["messages"] for body in endpoint.bodies)
    assert second[: len(first)] == first
    said, told = second[len(first) :]
    written = said["tool_calls"][0]["function"]["arguments"] if mode == "tools" else said["content"]
    assert (said["role"], written) == ("assistant", KINDS["wrong anchor"][0])
    assert told["role"] == ("tool" if mode == "tools" else "user")
    assert KINDS["wrong anchor"][1] in told["content"]
    assert told.get("tool_call_id") == ("c1" if mode == "tools" else None)


class Word(ReplyModel):
    """One word."""

    word: str


async def ask_word(
    llm: ScriptedLLM, store: InMemoryRunStore, *, shorter: bool = False, part: str = ""
) -> Word | NoReply:
    """Ask for a word other than ``bad``, with a long prompt and maybe a short one in reserve."""

    def check(reply: Word) -> None:
        if reply.word == "bad":
            raise ValueError("not that word")

    return await (await open_context(llm, store)).ask_or_fallback(
        "rewrite",
        {"document": "LONG", "attempts": "", "proposals": ""},
        Word,
        part=part,
        check=check,
        shorten=(lambda: {"document": "SHORT"}) if shorter else None,
    )


def scripted(long: ScriptedAnswer, short: ScriptedAnswer = None) -> ScriptedLLM:

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return long if "LONG" in prompt.messages[-1].content else short

    return ScriptedLLM(answer)


def shown_prompts(llm: ScriptedLLM) -> list[str]:
    texts = [call.prompt.messages[-1].content for call in llm.calls if call.call_id.attempt == 0]
    return ["long" if "LONG" in text else "short" for text in texts]


async def test_a_valid_reply_leaves_no_note_and_a_missing_one_is_final() -> None:
    store = await opened()
    assert await ask_word(scripted({"word": "yes"}), store) == Word(word="yes")
    assert not await store._database.fetch_rows("SELECT * FROM outcomes WHERE kind = 'decision'")
    missing = await ask_word(scripted({"word": "bad"}), store)
    assert isinstance(missing, NoReply)
    assert "not that word" in missing.reason
    better = scripted({"word": "yes"})
    assert await ask_word(better, store) == missing
    assert better.calls == []
    assert await ask_word(better, store, part="b") == Word(word="yes")


async def test_a_restart_asks_with_the_same_prompt() -> None:
    store = await opened()
    first = scripted(ContextOverflow("too long"), {"word": "short"})
    assert await ask_word(first, store, shorter=True) == Word(word="short")
    second = scripted({"word": "long"}, {"word": "short"})
    assert await ask_word(second, store, shorter=True) == Word(word="short")
    assert (shown_prompts(first), shown_prompts(second)) == (["long", "short"], ["short"])


async def test_a_provider_that_fails_is_no_missing_reply() -> None:
    store = await opened()
    with pytest.raises(ProviderDown, match="gone"):
        await ask_word(scripted(ProviderDown("gone")), store, shorter=True)
    assert not await store._database.fetch_rows("SELECT * FROM outcomes WHERE kind = 'decision'")
    assert await ask_word(scripted({"word": "yes"}), store) == Word(word="yes")


def test_an_edit_that_only_records_an_answer_is_sent_back_and_a_rule_is_not() -> None:
    reply_type = failure_reply_type(("append",), cases=2, most=2, reasoned=True)
    pattern = {"type": "t", "description": "d", "cases": [1]}
    item = Item(id="i", input="What is the capital of France?", reference="Paris")
    for content, is_refused in (
        ("What is the capital of France? Answer: Paris.", True),
        ("Name the capital alone, in one word and without its country, as in Paris.", False),
    ):
        edit = {"content": content, "evidence": "case 1"}
        reply = reply_type.model_validate({"reasoning": "r", "patterns": [pattern], "edits": [edit]})
        check = partial(check_reply, reply, skill=Skill(text=""), cases=2, items=(item,))
        if is_refused:
            with pytest.raises(ValueError, match="edit 1 records the answer of case 1"):
                check()
        else:
            check()
