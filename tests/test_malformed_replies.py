"""Replies that are no good: each kind is sent back with its reason, and none vanishes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import Field

from doubles import PROMPT, Endpoint, completion, config, connected, sample
from reflact.calls import ReplyModel
from reflact.errors import ReplyError
from reflact.results import Usage

pytestmark = pytest.mark.anyio

DOCUMENT = "Answer in one word.\nNever guess.\nAnswer in English."


class Pick(ReplyModel):
    """A reply with an anchor in a document, numbers of proposals and a weight."""

    anchor: str = Field(description="Text that occurs once in the document.")
    numbers: list[int] = Field(description="Numbers of the chosen proposals.")
    weight: float = Field(ge=0, le=1, description="How sure you are.")


GOOD = Pick(anchor="Never guess.", numbers=[2, 1], weight=0.5)


def fits(pick: Pick) -> None:
    """Refuse what contradicts the document or the three proposals."""
    if DOCUMENT.count(pick.anchor) != 1:
        raise ValueError(f"the anchor {pick.anchor!r} occurs {DOCUMENT.count(pick.anchor)} times")
    if len(set(pick.numbers)) != len(pick.numbers):
        raise ValueError("a number occurs twice")
    if not set(pick.numbers) <= {1, 2, 3}:
        raise ValueError("there are proposals 1 to 3")


def text(**changed: Any) -> str:
    """Return a good reply's JSON with some fields changed."""
    return json.dumps(GOOD.model_dump() | changed)


KINDS: dict[str, tuple[str, str]] = {
    "code fence": (f"```json\n{text()}\n```", "Invalid JSON"),
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
    """Return the malformed answer of one kind, where this mode looks for it."""
    if kind == "refusal":
        return completion(None, refusal="I would rather not.")
    finish = "length" if kind == "truncated" else "stop"
    return answer(KINDS[kind][0], mode, finish)


def answer(content: str, mode: str, finish: str = "stop") -> httpx.Response:
    """Return an answer in the shape of a mode."""
    if mode == "tools":
        return completion(None, arguments=content, finish=finish)
    return completion(content, finish=finish)


MODES = ("json_schema", "tools")
each = pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind in KINDS for mode in MODES])


@each
async def test_a_malformed_reply_is_mended_by_asking_again(kind: str, mode: str) -> None:
    """A good second reply is the value; both attempts are counted and paid for."""
    endpoint = Endpoint(bad(kind, mode), answer(text(), mode))
    async with connected(endpoint, config(mode=mode)) as client:
        reply = await client.ask(PROMPT, Pick, sample=sample(), check=fits)
    assert reply.value == GOOD
    assert type(reply.value) is Pick
    assert reply.attempts == 2
    assert reply.usage == Usage(calls=2, input_tokens=20, cached_tokens=8, output_tokens=6)


@each
async def test_a_reply_that_stays_malformed_is_an_error_with_every_reason(kind: str, mode: str) -> None:
    """Three bad replies end in ReplyError, which says for each what was wrong."""
    endpoint = Endpoint(bad(kind, mode))
    async with connected(endpoint, config(mode=mode)) as client:
        with pytest.raises(ReplyError) as refused:
            await client.ask(PROMPT, Pick, sample=sample(), check=fits)
    assert len(refused.value.reasons) == len(endpoint.requests) == 3
    expected = KINDS[kind][1]
    if mode == "tools" and kind == "empty":
        expected = ""
    assert all(reason and expected in reason for reason in refused.value.reasons)
    assert "optimizer/merge/step=1" in str(refused.value)


@pytest.mark.parametrize("mode", MODES)
async def test_the_model_is_told_what_was_wrong(mode: str) -> None:
    """The second request repeats the first one's messages, the bad reply, and the reason."""
    endpoint = Endpoint(bad("wrong anchor", mode), answer(text(), mode))
    async with connected(endpoint, config(mode=mode)) as client:
        await client.ask(PROMPT, Pick, sample=sample(), check=fits)
    first, second = (body["messages"] for body in endpoint.bodies)
    assert second[: len(first)] == first
    said, told = second[len(first) :]
    assert said == {"role": "assistant", "content": KINDS["wrong anchor"][0]}
    assert told["role"] == "user"
    assert KINDS["wrong anchor"][1] in told["content"]


@pytest.mark.parametrize("reasks", [0, 1, 4])
async def test_replies_are_sent_back_as_often_as_configured(reasks: int) -> None:
    """``reasks`` counts what follows the first attempt."""
    endpoint = Endpoint(completion("no"))
    async with connected(endpoint, config(reasks=reasks)) as client:
        with pytest.raises(ReplyError):
            await client.ask(PROMPT, Pick, sample=sample())
    assert len(endpoint.requests) == reasks + 1


async def test_a_check_that_breaks_is_not_a_bad_reply() -> None:
    """Only ValueError sends a reply back; a mistake in a check comes out as it is."""

    def broken(pick: Pick) -> None:
        raise KeyError("a mistake")

    async with connected(Endpoint(completion(text()))) as client:
        with pytest.raises(KeyError, match="a mistake"):
            await client.ask(PROMPT, Pick, sample=sample(), check=broken)


async def test_a_plain_answer_where_a_tool_was_to_be_called_is_sent_back() -> None:
    """In tools mode a reply in prose is a bad reply, not a crash."""
    endpoint = Endpoint(completion("I pick the second."), answer(text(), "tools"))
    async with connected(endpoint, config(mode="tools")) as client:
        reply = await client.ask(PROMPT, Pick, sample=sample(), check=fits)
    assert reply.attempts == 2


def test_fifteen_kinds_are_covered() -> None:
    """The kinds are those that the documents promise."""
    assert len(KINDS) == 15
