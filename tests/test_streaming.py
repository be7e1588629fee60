"""Streams of events: how they are read and joined, who asks for them, and the drafts that they show."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict

from doubles import (
    PROMPT,
    RUN,
    Body,
    Endpoint,
    ask,
    call_id,
    completion,
    config,
    connected,
    opened,
    stream,
    streamed,
    watched,
)
from draft_example import CASSETTE, MODEL, SAMPLE, Handbook
from draft_example import PROMPT as LONG_PROMPT
from reflact.errors import ProviderDown, ReplyError
from reflact.events import DraftDiscarded, DraftUpdated, Event, ModelCallFinished
from reflact.llm.cassettes import ReplayTransport, open_cassette, read_cassette
from reflact.llm.client import HELD_OPEN_SECONDS
from reflact.llm.completions import EventReader, read_events
from reflact.llm.drafts import extends, read_partial
from reflact.messages import Reply, ReplyModel, Text
from reflact.records import FaultCount, Usage

pytestmark = pytest.mark.virtual_time


class Told(list[Event]):
    """Keeps what it is told of drafts and calls."""

    async def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def attempts(self) -> list[list[Any]]:
        """What was drafted between resets."""
        attempts: list[list[Any]] = [[]]
        for event in self:
            if isinstance(event, DraftDiscarded):
                attempts.append([])
            elif isinstance(event, DraftUpdated):
                attempts[-1].append(event.draft)
        return attempts

    @property
    def drafts(self) -> list[Any]:
        """What was drafted, with None in the place of each reset."""
        told = [event for event in self if isinstance(event, DraftUpdated | DraftDiscarded)]
        return [event.draft if isinstance(event, DraftUpdated) else None for event in told]


class Pick(ReplyModel):
    """A reply."""

    why: str
    parts: list[int]


VALUE = Pick(why="Because of this, and because of that, and for no other reason. " * 3, parts=[1, 2, 3])
TEXT = VALUE.model_dump_json()
STREAM = stream(TEXT)
PLAIN = completion(TEXT, arguments=TEXT)
ONE = Usage(calls=1, input_tokens=10, cached_tokens=4, output_tokens=3)
ASKED = {"stream": True, "stream_options": {"include_usage": True}}


def framing(body: Any) -> Any:
    return {name: body[name] for name in ("stream", "stream_options") if name in body}


async def test_only_typed_replies_that_somebody_watches_are_streamed() -> None:
    provider = Endpoint(PLAIN)
    await ask(Pick, provider)
    await ask(Text, provider, emit=Told())
    assert [framing(body) for body in provider.bodies] == [{}, {}]
    await ask(Pick, provider, emit=Told())
    assert framing(provider.bodies[-1]) == ASKED
    assert {**provider.bodies[0], **ASKED} == provider.bodies[-1]


@pytest.mark.parametrize("mode", ["json_schema", "tools", "json_object_with_schema", "json"])
@pytest.mark.parametrize("size", [1, 9, 10_000])
async def test_a_streamed_reply_is_the_plain_one(mode: str, size: int) -> None:
    pieces = stream(TEXT, tools=mode == "tools", size=size)
    store = await opened()
    streamed = await ask(Pick, Endpoint(pieces), config(mode=mode), store=store, emit=Told())
    async with connected(Endpoint(PLAIN), config(mode=mode)) as client:
        assert streamed == await client.ask(PROMPT, Pick, call_id=call_id())
    assert (streamed.value, streamed.usage) == (VALUE, ONE)
    (spent,) = await store.spend(RUN)
    assert (spent.usage, spent.unsettled) == (ONE, 0)


@pytest.mark.parametrize("first", [True, False])
async def test_watching_or_not_repeats_no_call(first: bool) -> None:
    store, provider = await opened(), Endpoint(STREAM if first else PLAIN)
    before = await ask(Pick, provider, store=store, emit=Told() if first else None)
    nobody = Endpoint(httpx.Response(500))
    async with connected(nobody, store=store, emit=None if first else Told()) as client:
        assert await client.ask(PROMPT, Pick, call_id=call_id()) == before
    assert nobody.bodies == []


@pytest.mark.parametrize("streamed", [True, False])
async def test_recordings_of_either_framing_replay_for_both(tmp_path: Path, streamed: bool) -> None:
    async with (
        open_cassette(
            tmp_path / "c.jsonl", mode="record", inner=Endpoint(STREAM if streamed else PLAIN)
        ) as tape,
        connected(tape, emit=Told() if streamed else None) as client,
    ):
        live = await client.ask(PROMPT, Pick, call_id=call_id())
    (line,) = read_cassette(tmp_path / "c.jsonl")
    assert isinstance(line.body, dict)
    assert framing(line.body) == (ASKED if streamed else {})
    for watcher in (Told(), None):
        async with (
            open_cassette(tmp_path / "c.jsonl", mode="replay") as tape,
            connected(tape, emit=watcher) as client,
        ):
            assert await client.ask(PROMPT, Pick, call_id=call_id()) == live
        assert watcher is None or bool(watcher.drafts) is streamed


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "property 'stream_options' is unsupported, did you mean 'stream'?"),
        (422, "body.stream_options.include_usage: Extra inputs are not permitted"),
        (500, "Cannot use tools with stream"),
        (400, "The model: m is not available for streaming"),
    ],
)
async def test_an_endpoint_that_refuses_streams_is_asked_plainly(status: int, message: str) -> None:
    """The refusal costs nothing, the reply is that of a plain request, and no stream is asked for again."""

    def strict(body: Any) -> httpx.Response:
        if framing(body):
            return httpx.Response(status, json={"error": {"message": message}})
        return httpx.Response(200, headers=PLAIN.headers, content=PLAIN.content)

    store, provider = await opened(), Endpoint(strict)
    async with connected(provider, config(max_retries=0), store=store, emit=Told()) as client:
        for part in ("a", "b"):
            assert (await client.ask(PROMPT, Pick, call_id=call_id(part))).value == VALUE
    assert [bool(framing(body)) for body in provider.bodies] == [True, False, False]
    (spent,) = await store.spend(RUN)
    assert (spent.usage.calls, spent.unsettled) == (2, 0)


async def test_an_endpoint_that_counts_no_streams_is_asked_for_one_alone() -> None:
    """Its reply counts, at its worst case, and the next one is asked for plainly, which is counted."""

    def silent(body: Any) -> httpx.Response:
        if framing(body):
            pieces = stream(TEXT, usage=None)
            return streamed(pieces)
        return httpx.Response(200, headers=PLAIN.headers, content=PLAIN.content)

    provider = Endpoint(silent)
    async with connected(provider, emit=Told()) as client:
        replies = [await client.ask(PROMPT, Pick, call_id=call_id(part)) for part in "abc"]
    assert [reply.usage.uncounted for reply in replies] == [1, 0, 0]
    assert [bool(framing(body)) for body in provider.bodies] == [True, False, False]


CUT_SHORT = stream(TEXT, finish=None, done=False)


@pytest.mark.parametrize(
    ("broken", "asked", "retries"),
    [
        (CUT_SHORT, [True, False, True, False, False], 0),
        ([*STREAM[:30], httpx.ReadError("gone")], [True, True, False, False], 1),
    ],
)
async def test_the_second_broken_stream_is_the_last(
    broken: list[bytes | Exception], asked: list[bool], retries: int
) -> None:
    """A stream that nobody ended is asked for plainly at once; a broken connection may be mended by a retry."""

    def answer(body: Any) -> httpx.Response:
        if framing(body):
            return streamed(broken)
        return httpx.Response(200, headers=PLAIN.headers, content=PLAIN.content)

    provider, store = Endpoint(answer), await opened()
    async with connected(provider, config(max_retries=retries), store=store, emit=Told()) as client:
        for part in "abc" if retries == 0 else "ab":
            assert (await client.ask(PROMPT, Pick, call_id=call_id(part))).value == VALUE
    assert [bool(framing(body)) for body in provider.bodies] == asked
    assert await store.faults(RUN) == (FaultCount(kind="broken stream", count=2),)


ENDED = stream(TEXT, done=False)
"""A stream whose reason and usage came, without an end mark."""


@pytest.mark.parametrize(
    ("end", "usage"),
    [
        (ENDED, ONE),
        ([*ENDED, httpx.RemoteProtocolError("gone")], ONE),
        (ENDED[:-1], Usage(calls=1, uncounted=1)),
    ],
)
async def test_a_stream_ends_with_the_reason_why_its_answer_ended(
    end: list[bytes | Exception], usage: Usage
) -> None:
    provider, store = Endpoint(end), await opened()
    reply = await ask(Pick, provider, config(max_retries=0), store=store, emit=Told())
    assert (reply.value, reply.usage) == (VALUE, usage)
    assert await store.faults(RUN) == ()


async def test_a_stream_that_is_held_open_after_its_reason_ends_soon() -> None:
    store, provider = await opened(), Endpoint(lambda _: endless(ENDED))
    started = anyio.current_time()
    async with connected(provider, config(timeout=600), store=store, emit=Told()) as client:
        reply = await client.ask(PROMPT, Pick, call_id=call_id())
    assert (reply.value, reply.usage, len(provider.bodies)) == (VALUE, ONE, 1)
    assert anyio.current_time() - started == pytest.approx(HELD_OPEN_SECONDS)
    assert await store.faults(RUN) == ()


@pytest.mark.parametrize("finish", [None, "length"])
async def test_a_stream_that_was_cut_off_is_asked_for_again(finish: str | None) -> None:
    watcher = Told()
    provider = Endpoint(stream(TEXT, finish=finish), STREAM)
    reply = await ask(Pick, provider, emit=watcher)
    assert (reply.value, reply.attempts, reply.usage) == (VALUE, 2, ONE + ONE)
    assert "cut off" in provider.bodies[1]["messages"][-1]["content"]
    (reset,) = [event for event in watcher if isinstance(event, DraftDiscarded)]
    assert (reset.attempt, "cut off" in reset.reason) == (1, True)


BREAKS = [
    [*STREAM[:30], httpx.ReadError("gone")],
    [*STREAM[:30], httpx.RemoteProtocolError("incomplete")],
    STREAM[:30],
    [*STREAM[:30], b'data: {"error": {"message": "overloaded"}}\n\n', STREAM[-1]],
    [*STREAM[:30], b"data: {oops\n\n", STREAM[-1]],
    [],
]


@pytest.mark.parametrize("broken", BREAKS)
async def test_a_stream_that_breaks_is_repeated_and_stays_booked(broken: list[bytes | Exception]) -> None:
    store, watcher = await opened(), Told()
    provider = Endpoint(broken, STREAM)
    async with connected(provider, config(max_tokens=50), store=store, emit=watcher) as client:
        reply = await client.ask(PROMPT, Pick, call_id=call_id())
        (spent,) = await store.spend(RUN)
    assert (reply.value, reply.attempts, reply.usage) == (VALUE, 1, ONE)
    assert (spent.usage, spent.unsettled, spent.worst_case.output_tokens) == (ONE, 1, 50)
    assert await store.faults(RUN) == (FaultCount(kind="broken stream", count=1),)
    assert [draft for draft in watcher.drafts if draft is None] == ([None] if broken else [])
    assert watcher.drafts[-1] == VALUE.model_dump()


def endless(pieces: list[bytes]) -> httpx.Response:
    """Return an answer that begins and never goes on."""

    class Endless(Body):
        async def __aiter__(self) -> Any:
            async for piece in super().__aiter__():
                yield piece
            await anyio.sleep_forever()

    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Endless(pieces))


async def test_a_stream_that_stalls_is_late_as_a_whole() -> None:
    """The time for one request holds for its stream too; what never came stays booked."""
    store, settings = await opened(), config(max_retries=0, timeout=0.05)
    async with connected(
        Endpoint(lambda _: endless(STREAM[:9])), settings, store=store, emit=Told()
    ) as client:
        with pytest.raises(ProviderDown, match="did not answer within"):
            await client.ask(PROMPT, Pick, call_id=call_id())
        (spent,) = await store.spend(RUN)
    assert (spent.usage.calls, spent.unsettled) == (0, 1)


def only_grow(drafts: list[Any]) -> bool:
    """Whether each draft is a beginning of the next one."""
    return all(extends(after, before) for before, after in pairwise(drafts))


async def test_a_recorded_reply_grows_to_what_was_validated() -> None:
    """Ten kilobytes of a real model: texts grow, rules appear one by one, the last draft is the reply."""
    told = Told()
    transport = ReplayTransport(CASSETTE, read_cassette(CASSETTE))
    async with connected(transport, MODEL, emit=told) as client:
        reply = await client.ask(LONG_PROMPT, Handbook, call_id=SAMPLE)
    assert len(reply.value.model_dump_json()) >= 10_000
    (drafts,) = told.attempts
    assert only_grow(drafts)
    assert drafts[-1] == reply.value.model_dump(mode="json")
    rules = [len(draft["rules"]) for draft in drafts if "rules" in draft]
    assert list(dict.fromkeys(rules)) == list(range(1, len(reply.value.rules) + 1))
    texts = {len(draft["introduction"]) for draft in drafts if "introduction" in draft}
    assert len(texts) > 3
    assert (reply.usage.calls, reply.usage.uncounted) == (1, 0)
    assert reply.usage.output_tokens > 1000


async def test_drafts_are_told_before_the_answer_is_whole() -> None:
    told, seen = Told(), anyio.Event()

    class Patient(Body):
        async def __aiter__(self) -> Any:
            async for piece in Body(STREAM[:30]):
                yield piece
            await seen.wait()
            async for piece in Body(STREAM[30:]):
                yield piece

    async def emit(event: Event) -> None:
        await told(event)
        seen.set()

    def answer(_: Any) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Patient([]))

    async with connected(Endpoint(answer), emit=emit) as client:
        assert (await client.ask(PROMPT, Pick, call_id=call_id())).value == VALUE
    assert len(told.attempts[0]) > 1


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3))
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)


class Anything(ReplyModel):
    """A reply that may hold anything."""

    model_config = ConfigDict(extra="ignore")


@given(OBJECTS, st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}]), st.booleans())
def test_a_text_is_seen_as_it_grows(value: Any, spacing: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, **spacing)
    whole = json.loads(text)
    seen = [read_partial(text[:end], Anything) for end in range(len(text) + 1)]
    assert all(extends(whole, draft) for draft in seen)
    assert seen[-1] == whole


@pytest.mark.parametrize(
    "failure",
    [[*STREAM[:40], httpx.ReadError("gone")], stream(TEXT.replace("[1,2,3]", '["one"]'))],
)
async def test_a_call_that_fails_takes_its_drafts_back(failure: list[bytes | Exception]) -> None:
    told = Told()
    with pytest.raises(ProviderDown if len(failure) == 41 else ReplyError):
        await ask(Pick, Endpoint(failure), config(max_retries=0, reasks=0), emit=told)
    assert isinstance(told[-2], DraftDiscarded)
    assert isinstance(told[-1], ModelCallFinished)
    assert told.attempts[0] != []
    assert told.attempts[1:] == [[]]


async def test_a_call_that_is_left_stays_booked() -> None:
    """Whoever leaves in the middle of a stream pays its worst case, and the next one asks again."""
    store = await opened()
    scope = anyio.CancelScope()

    async def emit(event: Event) -> None:
        scope.cancel()

    settings = config(max_tokens=50)
    endpoint = Endpoint(lambda _: endless(STREAM[:40]))
    async with connected(endpoint, settings, store=store, emit=emit) as client:
        with scope:
            await client.ask(PROMPT, Pick, call_id=call_id())
    (spent,) = await store.spend(RUN)
    assert (spent.usage.calls, spent.unsettled, spent.worst_case.output_tokens) == (0, 1, 50)
    async with connected(Endpoint(STREAM), store=store) as client:
        reply: Reply[Pick] = await client.ask(PROMPT, Pick, call_id=call_id())
    assert reply.value == VALUE


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("secret", ["sk-very-secret-key-4711", 'sk-very"secret\\key/4711'])
async def test_a_key_that_a_stream_takes_apart_is_never_seen(secret: str, size: int) -> None:
    told = Told()

    async def key() -> str:
        return secret

    said = VALUE.model_copy(update={"why": f"You sent {secret}, did you? " * 12})
    provider = Endpoint(stream(said.model_dump_json(), size=size))
    store = await watched()
    reply = await ask(Pick, provider, config(key=key), store=store, emit=told)
    assert reply.value.why == "You sent [key], did you? " * 12
    assert only_grow(told.attempts[0])
    assert len(told.attempts[0]) > 3
    for text in (*(event.model_dump_json() for event in told), *(kept.text for kept in store.replies)):
        assert secret[:8] not in text


@pytest.mark.parametrize("end", ["", "!", '", "parts"' + " " * 1_000_000 + "x"])
def test_a_draft_of_a_long_word_takes_linear_time(end: str) -> None:
    """A million letters without a gap, as in base64, are read at once; they once took hours."""
    why = "a" * 1_000_000
    value = read_partial(f'{{"why": "{why}{end}', Pick)
    assert isinstance(value, dict)
    assert str(value["why"]).rstrip("!") in {"", why}


@given(st.lists(st.text(max_size=8), max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_are_the_same_however_they_are_cut(texts: list[str], end: str, data: Any) -> None:
    said = [json.dumps(text) for text in texts]
    text = "".join(f": ping{end}event: x{end}data: {line}{end}id: 1{end}{end}" for line in said)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = EventReader()
    found: list[str] = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.feed(text[start:stop])
    assert found == said == list(read_events(text))
