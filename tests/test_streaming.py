"""Streaming is framing: who streams and who does not shares keys, stores, recordings and replies."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from doubles import (
    COUNTS,
    PROMPT,
    RUN,
    Body,
    Endpoint,
    Kept,
    call_id,
    chunk,
    completion,
    config,
    connected,
    opened,
    stream,
)
from reflact.concurrency import fan_out
from reflact.config.models import ModelConfig
from reflact.errors import BadRequest, ProviderDown, ReplyError
from reflact.events import DraftDiscarded, DraftUpdated, Event
from reflact.llm.budget import Budget
from reflact.llm.cache_keys import build_cache_key
from reflact.llm.cassettes import open_cassette, read_cassette
from reflact.llm.client import Client, identify_model
from reflact.messages import ReplyModel, Text
from reflact.records import FaultCount, Usage
from reflact.testing import InMemoryRunStore

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


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


class Watcher(list[Event]):
    """Keeps what it is told."""

    async def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def drafts(self) -> list[Any]:
        """What was drafted, with None in the place of each reset."""
        told = [event for event in self if isinstance(event, DraftUpdated | DraftDiscarded)]
        return [event.draft if isinstance(event, DraftUpdated) else None for event in told]


def watched(
    transport: httpx.AsyncBaseTransport,
    settings: ModelConfig | None = None,
    *,
    store: InMemoryRunStore | None = None,
    budget: Budget | None = None,
    watcher: Watcher | None = None,
) -> AbstractAsyncContextManager[Client]:
    """Return a client whose events somebody hears."""
    emit = Watcher() if watcher is None else watcher
    return connected(transport, settings, store=store, budget=budget, emit=emit)


def framing(body: Any) -> Any:
    """Return what a request says of streaming."""
    return {name: body[name] for name in ("stream", "stream_options") if name in body}


# ------------------------------------------------------------------------------------- what is asked for


async def test_only_typed_replies_that_somebody_watches_are_streamed() -> None:
    """Without listeners, for plain text, or where it is switched off, requests say nothing of streams."""
    provider = Endpoint(PLAIN)
    async with connected(provider) as client:
        await client.ask(PROMPT, Pick, call_id=call_id())
    async with watched(provider) as client:
        await client.ask(PROMPT, Text, call_id=call_id())
    async with watched(provider, config(stream=False)) as client:
        await client.ask(PROMPT, Pick, call_id=call_id())
    assert [framing(body) for body in provider.bodies] == [{}, {}, {}]
    async with watched(provider) as client:
        await client.ask(PROMPT, Pick, call_id=call_id())
    assert framing(provider.bodies[-1]) == ASKED
    assert {**provider.bodies[0], **ASKED} == provider.bodies[-1]


@pytest.mark.parametrize("mode", ["json_schema", "tools", "json_object_with_schema", "json"])
@pytest.mark.parametrize("size", [1, 9, 10_000])
async def test_a_streamed_reply_is_the_plain_one(mode: str, size: int) -> None:
    """Value, attempts and usage are those of the same reply in one piece, in every mode."""
    pieces = stream(TEXT, tools=mode == "tools", size=size)
    store = await opened()
    async with watched(Endpoint(pieces), config(mode=mode), store=store) as client:
        streamed = await client.ask(PROMPT, Pick, call_id=call_id())
    async with connected(Endpoint(PLAIN), config(mode=mode)) as client:
        assert streamed == await client.ask(PROMPT, Pick, call_id=call_id())
    assert (streamed.value, streamed.usage) == (VALUE, ONE)
    (spent,) = await store.spend(RUN)
    assert (spent.usage, spent.unsettled) == (ONE, 0)


async def test_a_plain_answer_to_a_streamed_request_is_an_answer() -> None:
    """A server that does not know streams is asked once, and nothing is drafted."""
    provider, watcher = Endpoint(PLAIN), Watcher()
    async with watched(provider, watcher=watcher) as client:
        reply = await client.ask(PROMPT, Pick, call_id=call_id())
    assert (reply.value, reply.usage, len(provider.bodies), watcher.drafts) == (VALUE, ONE, 1, [])


async def test_the_first_call_settles_its_mode_with_a_stream() -> None:
    """The mode is found as without streams, and its first reply is drafted and paid for once."""

    def picky(body: Any) -> httpx.Response:
        if "tools" not in body:
            return httpx.Response(400, json={"error": {"message": "unknown field response_format"}})
        pieces = stream(TEXT, tools=True)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(pieces))

    provider, watcher = Endpoint(picky), Watcher()
    async with watched(provider, config(mode="auto"), watcher=watcher) as client:
        assert (await client.ask(PROMPT, Pick, call_id=call_id())).value == VALUE
    assert len(provider.bodies) == 2
    assert watcher.drafts[-1] == VALUE.model_dump()


# ------------------------------------------------------------------------------- identity, store, cassette


def test_streaming_is_no_part_of_a_key() -> None:
    """Requests that differ in their framing alone are one request."""
    body = {"model": "m", "messages": [{"role": "user", "content": "stream"}]}
    about = {"endpoint": "http://e", "path": "/v1", "call_id": "s", "reply": "r"}
    keys = {
        build_cache_key(body=json.dumps(b), **about)
        for b in (body, {**body, **ASKED}, {**body, "stream": False}, {**ASKED, **body})
    }
    assert keys == {build_cache_key(body=json.dumps(body), **about)}


def test_streaming_is_no_part_of_an_identity() -> None:
    """It may be switched between two starts of a run."""
    assert identify_model(config(stream=True)) == identify_model(config(stream=False))
    assert ModelConfig.model_fields["stream"].json_schema_extra == {"changeable": True}


@pytest.mark.parametrize("first", [True, False])
async def test_switching_streams_on_or_off_repeats_no_call(first: bool) -> None:
    """A stored answer of either framing serves both."""
    store, provider = await opened(), Endpoint(STREAM if first else PLAIN)
    async with watched(provider, config(stream=first), store=store) as client:
        before = await client.ask(PROMPT, Pick, call_id=call_id())
    nobody = Endpoint(httpx.Response(500))
    async with watched(nobody, config(stream=not first), store=store) as client:
        assert await client.ask(PROMPT, Pick, call_id=call_id()) == before
    assert nobody.bodies == []


async def test_a_stored_stream_serves_who_does_not_stream() -> None:
    """A stream that was asked for by the settings is stored as the completion that it makes up."""
    store, provider = Kept(), Endpoint(STREAM)
    await store.open_run(RUN, {}, {})
    async with connected(provider, config(extra_body={"stream": True}), store=store) as client:
        before = await client.ask(PROMPT, Pick, call_id=call_id())
    (stored,) = store.replies
    assert stored.content_type == "application/json"
    async with connected(Endpoint(httpx.Response(500)), store=store) as client:
        assert await client.ask(PROMPT, Pick, call_id=call_id()) == before
    async with watched(Endpoint(httpx.Response(500)), store=store) as client:
        assert await client.ask(PROMPT, Pick, call_id=call_id()) == before


async def test_what_is_stored_is_whole() -> None:
    """A reply that was streamed takes no more room in the store than one that was not."""
    store = Kept()
    await store.open_run(RUN, {}, {})
    async with watched(Endpoint(stream(TEXT, size=1)), store=store) as client:
        await client.ask(PROMPT, Pick, call_id=call_id())
    (stored,) = store.replies
    assert (stored.content_type, len(stored.chunks)) == ("application/json", 1)
    assert len(stored.chunks[0]) < 2 * len(PLAIN.text)


@pytest.mark.parametrize("streamed", [True, False])
async def test_recordings_of_either_framing_replay_for_both(tmp_path: Path, streamed: bool) -> None:
    """What was recorded plain is replayed to who streams, and the other way round; drafts included."""
    async with (
        open_cassette(
            tmp_path / "c.jsonl", mode="record", inner=Endpoint(STREAM if streamed else PLAIN)
        ) as tape,
        watched(tape, config(stream=streamed)) as client,
    ):
        live = await client.ask(PROMPT, Pick, call_id=call_id())
    (line,) = read_cassette(tmp_path / "c.jsonl")
    assert isinstance(line.body, dict)
    assert framing(line.body) == (ASKED if streamed else {})
    for setting in (True, False):
        watcher = Watcher()
        async with (
            open_cassette(tmp_path / "c.jsonl", mode="replay") as tape,
            watched(tape, config(stream=setting), watcher=watcher) as client,
        ):
            assert await client.ask(PROMPT, Pick, call_id=call_id()) == live
        assert bool(watcher.drafts) is (streamed and setting)


async def test_equal_calls_in_flight_are_one_whoever_watches() -> None:
    """A call that streams and one that does not share one request and one answer."""
    store, provider = await opened(), Endpoint(STREAM)
    async with watched(provider, store=store) as client:
        drafts = [draft async for draft in client.draft(PROMPT, Pick, call_id=call_id("alone"))]
        replies = await fan_out(lambda _: client.ask(PROMPT, Pick, call_id=call_id()), range(3))
    assert len(drafts) > 1
    assert (len(provider.bodies), len({reply.model_dump_json() for reply in replies})) == (2, 1)


# ------------------------------------------------------------------------------- endpoints that do not stream


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
    async with watched(provider, config(max_retries=0), store=store) as client:
        for part in ("a", "b"):
            assert (await client.ask(PROMPT, Pick, call_id=call_id(part))).value == VALUE
    assert [bool(framing(body)) for body in provider.bodies] == [True, False, False]
    (spent,) = await store.spend(RUN)
    assert (spent.usage.calls, spent.unsettled) == (2, 0)


async def test_other_refusals_are_passed_on() -> None:
    """What has nothing to do with streams is asked once."""
    for status, message, error in ((400, "too high", BadRequest), (500, "upstream: too high", ProviderDown)):
        provider = Endpoint(httpx.Response(status, json={"error": {"message": message}}))
        async with watched(provider, config(max_retries=0)) as client:
            with pytest.raises(error, match="too high"):
                await client.ask(PROMPT, Pick, call_id=call_id())
        assert len(provider.bodies) == 1


async def test_an_endpoint_that_counts_no_streams_is_asked_for_one_alone() -> None:
    """Its reply counts, at its worst case, and the next one is asked for plainly, which is counted."""

    def silent(body: Any) -> httpx.Response:
        if framing(body):
            pieces = stream(TEXT, usage=None)
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(pieces))
        return httpx.Response(200, headers=PLAIN.headers, content=PLAIN.content)

    provider = Endpoint(silent)
    async with watched(provider) as client:
        replies = [await client.ask(PROMPT, Pick, call_id=call_id(part)) for part in "abc"]
    assert [reply.usage.uncounted for reply in replies] == [1, 0, 0]
    assert [bool(framing(body)) for body in provider.bodies] == [True, False, False]


async def test_an_endpoint_whose_streams_never_end_is_asked_plainly() -> None:
    """Where no repeat brings a whole stream, the whole answer is asked for."""
    broken = stream(TEXT, done=False)
    provider, store = Endpoint(broken, broken, PLAIN), await opened()
    async with watched(provider, config(max_retries=1), store=store) as client:
        assert (await client.ask(PROMPT, Pick, call_id=call_id())).value == VALUE
    assert [bool(framing(body)) for body in provider.bodies] == [True, True, False]
    assert await store.faults(RUN) == (FaultCount(kind="broken stream", count=2),)


# ------------------------------------------------------------------------------------- ends that are none


@pytest.mark.parametrize("finish", [None, "length"])
async def test_a_stream_that_was_cut_off_is_asked_for_again(finish: str | None) -> None:
    """A reply that ended at a limit, or that nobody ended, is sent back, also where it can be read."""
    watcher = Watcher()
    provider = Endpoint(stream(TEXT, finish=finish), STREAM)
    async with watched(provider, watcher=watcher) as client:
        reply = await client.ask(PROMPT, Pick, call_id=call_id())
    assert (reply.value, reply.attempts, reply.usage) == (VALUE, 2, ONE + ONE)
    assert "cut off" in provider.bodies[1]["messages"][-1]["content"]
    (reset,) = [event for event in watcher if isinstance(event, DraftDiscarded)]
    assert (reset.attempt, "cut off" in reset.reason) == (1, True)


async def test_a_stream_that_is_always_cut_off_is_an_error() -> None:
    """It ends as a plain reply does that never fits: with its reasons."""
    async with watched(Endpoint(stream(TEXT[:20], finish="length")), config(reasks=1)) as client:
        with pytest.raises(ReplyError, match=r"2 attempts.*cut off"):
            await client.ask(PROMPT, Pick, call_id=call_id())


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
    """The repeat brings the reply; what was drafted counts for nothing; the attempt keeps its worst case."""
    store, watcher = await opened(), Watcher()
    provider = Endpoint(broken, STREAM)
    async with watched(provider, config(max_tokens=50), store=store, watcher=watcher) as client:
        reply = await client.ask(PROMPT, Pick, call_id=call_id())
        (spent,) = await store.spend(RUN)
    assert (reply.value, reply.attempts, reply.usage) == (VALUE, 1, ONE)
    assert (spent.usage, spent.unsettled, spent.worst_case.output_tokens) == (ONE, 1, 50)
    assert await store.faults(RUN) == (FaultCount(kind="broken stream", count=1),)
    assert [draft for draft in watcher.drafts if draft is None] == ([None] if broken else [])
    assert watcher.drafts[-1] == VALUE.model_dump()


async def test_a_stream_that_stalls_is_late_as_a_whole() -> None:
    """The time for one request holds for its stream too; what never came stays booked."""

    class Stalling(Body):
        async def __aiter__(self) -> Any:
            async for piece in super().__aiter__():
                yield piece
            await anyio.sleep_forever()

    def answer(_: Any) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Stalling(STREAM[:9]))

    store = await opened()
    async with watched(Endpoint(answer), config(max_retries=0, timeout=0.05), store=store) as client:
        with pytest.raises(ProviderDown, match="did not answer within"):
            await client.ask(PROMPT, Pick, call_id=call_id())
        (spent,) = await store.spend(RUN)
    assert (spent.usage.calls, spent.unsettled) == (0, 1)


async def test_an_end_without_an_answer_is_no_reply() -> None:
    """A stream that ends well and says nothing is neither stored nor taken for a reply."""
    store = await opened()
    async with watched(Endpoint([chunk(usage=COUNTS), STREAM[-1]]), store=store) as client:
        with pytest.raises(ProviderDown, match="no chat completion"):
            await client.ask(PROMPT, Pick, call_id=call_id())
    assert await store.faults(RUN) == (FaultCount(kind="unusable", count=1),)
