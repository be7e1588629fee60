"""Stored replies: labels and keys that never change, answers paid once, on disk before anyone sees them."""

from __future__ import annotations

import hashlib
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import PROMPT, RUN, Endpoint, ask, call_id, completion, config, connected, opened, watched
from reflact.concurrency import fan_out
from reflact.llm.cache_keys import build_cache_key
from reflact.messages import CallId, ReplyModel, Text
from reflact.types import Skill

pytestmark = pytest.mark.virtual_time

CASES: list[tuple[dict[str, Any], str]] = [
    (
        {
            "endpoint": "https://api.example.com",
            "path": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": "Grüße, 世界 🌍 \u2028 \x00"}]},
            "call_id": "target/rollout/rollout=abc/0/part=/trial=0/attempt=0",
            "reply": "Text@1",
        },
        "43a26bd0fcf02cab97b5b3b3508cd42ee0300fd6cbc1164a784a2766226075e9",
    ),
    (
        {
            "endpoint": "https://api.example.com",
            "path": "/v1/chat/completions",
            "body": {"model": "m", "temperature": 0.1, "top_p": 1e-07, "x": [1.0, 1e22, -0.0, 3]},
            "call_id": "optimizer/merge/step=3/part=0.1/trial=0/attempt=2",
            "reply": "MergeReply@1",
        },
        "d94d3b46c1a730fdb0b9eb3043cf0524a27592b7c1196032e4235c3ebbf16706",
    ),
]


class Word(ReplyModel):
    """One word."""

    word: str


GOOD = completion('{"word": "yes"}')


@pytest.mark.parametrize(("parts", "key"), CASES)
def test_keys_are_pinned(parts: dict[str, Any], key: str) -> None:
    """A key that changed would make every user pay again for what is stored."""
    assert build_cache_key(**parts) == key


async def test_the_intent_is_stored_before_sending_and_the_answer_before_anyone_sees_it() -> None:
    """Killed between any two of these, a run repeats nothing that had finished."""
    store = await watched()

    def answer(body: Any) -> httpx.Response:
        store.seen.append("sent")
        return GOOD

    def check(word: Word) -> None:
        store.seen.append("seen")

    await ask(Word, Endpoint(answer), store=store, check=check)
    assert store.seen == ["reserved", "sent", "stored", "seen"]


class Slow(Endpoint):
    """Answers after a second."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        await anyio.sleep(1)
        return response


@pytest.mark.parametrize(("patience", "requests"), [([9, 0.5, 9, 9], 1), ([0.5, 9, 9], 2), ([0.5, 0.7], 2)])
async def test_equal_calls_in_flight_are_one_request(patience: list[float], requests: int) -> None:
    """Callers of the same place get the same answer for one price; if the first leaves, the next one asks."""
    endpoint, store = Slow(GOOD), await opened()
    async with connected(endpoint, store=store) as client:
        await client.ask(PROMPT, Word, call_id=call_id("first"))  # openai looks up the platform in a thread

        async def one(seconds: float) -> str | None:
            with anyio.move_on_after(seconds):
                return (await client.ask(PROMPT, Word, call_id=call_id())).value.word
            return None

        assert await fan_out(one, patience) == tuple("yes" if each == 9 else None for each in patience)
    assert len(endpoint.requests) == 1 + requests
    (spent,) = await store.spend(RUN)
    assert spent.usage.calls == 1 + (9 in patience)


async def test_two_trials_of_one_text_are_two_effects() -> None:
    endpoint = Endpoint(completion("heads"), completion("tails"))
    store = await watched()
    places = [CallId(role="target", purpose="rollout", rollout=f"skill/item/trial={n}") for n in (0, 1)]
    for _ in range(2):
        async with connected(endpoint, config(temperature=1.0), store=store) as client:
            said = [(await client.ask(PROMPT, Text, call_id=place)).value.text for place in places]
        assert said == ["heads", "tails"]
    assert len(endpoint.requests) == 2
    assert len({reply.key for reply in store.replies}) == 2


samples = st.builds(
    CallId,
    role=st.text("az_", min_size=1, max_size=4),
    purpose=st.text("az_", min_size=1, max_size=4),
    step=st.none() | st.integers(0, 99),
    part=st.text(max_size=6) | st.sampled_from(("1/2", "trial=1", "a/part=b", "%2F")),
    trial=st.integers(0, 3),
    attempt=st.integers(0, 3),
)


def test_sample_labels_are_pinned() -> None:
    analyst = CallId(role="optimizer", purpose="analyse_failures", step=3, part="é/0", attempt=1)
    turn = CallId(role="target", purpose="rollout", rollout="r/1", number=2, step=3)
    assert analyst.label == "optimizer/analyse_failures/step=3/part=%C3%A9%2F0/trial=0/attempt=1"
    assert turn.label == "target/rollout/rollout=r%2F1/2/part=/trial=0/attempt=0"


@given(samples, samples)
def test_labels_tell_samples_apart(one: CallId, other: CallId) -> None:
    assert (one.label == other.label) == (one == other)
    assert one.label.isascii()
    assert "\n" not in one.label


def test_a_skills_hash_is_that_of_its_exact_bytes() -> None:
    assert Skill(text="é").hash == hashlib.sha256("é".encode()).hexdigest()
    assert len({Skill(text=text).hash for text in ("", "\n", "\r\n", "a", "a\n")}) == 5
