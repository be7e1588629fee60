"""Failed attempts by kind: what they are called, that each is counted, and what is tried again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from doubles import PROMPT, RUN, Endpoint, call_id, completion, config, connected, opened
from reflact.errors import ProviderDown
from reflact.llm.errors import CutOff, StreamCutOff, classify_body, classify_failure, classify_status
from reflact.llm.metering import send_whole
from reflact.messages import Text
from reflact.records import FaultCount, FaultKind

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

JSON, STREAM, PAGE = "application/json", "text/event-stream; charset=utf-8", "text/html"
GOOD = completion("fine")
CUT = httpx.Response(200, headers={"content-type": JSON}, text=GOOD.text[:40])


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (httpx.ReadTimeout("x"), "timeout"),
        (httpx.ConnectTimeout("x"), "timeout"),
        (httpx.ConnectError("x"), "unreachable"),
        (httpx.ReadError("x"), "reset"),
        (httpx.RemoteProtocolError("x"), "reset"),
        (CutOff("x"), "truncated"),
        (StreamCutOff("x"), "broken stream"),
        (httpx.UnsupportedProtocol("x"), None),
        (LookupError("x"), None),
    ],
)
def test_failures_have_kinds(failure: Exception, kind: FaultKind | None) -> None:
    """What happens on the way has a kind; a mistake of the caller's has none."""
    assert classify_failure(failure) == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [(408, "408"), (409, "409"), (429, "429"), (500, "5xx"), (503, "5xx"), (529, "5xx")]
    + [(status, None) for status in (200, 400, 401, 404, 422, 501)],
)
def test_statuses_have_kinds(status: int, kind: FaultKind | None) -> None:
    """Passing statuses are faults; what says something about the request is an answer."""
    assert classify_status(status) == kind


@pytest.mark.parametrize(
    ("content_type", "text", "kind"),
    [
        (JSON, GOOD.text, None),
        (JSON, GOOD.text[:-1], "malformed"),
        (JSON, "", "malformed"),
        (JSON, '{"error": "overloaded"}', "unusable"),
        (JSON, '{"choices": []}', "unusable"),
        (PAGE, "<html>", "unusable"),
        (STREAM, 'data: {"a": 1}\n\ndata: [DONE]\n\n', None),
        (STREAM, ': ping\r\n\r\ndata:{"a": "\u2028"}\r\n\r\nevent: end\r\ndata: [DONE]', None),
        (STREAM, 'data: {"a":\ndata: 1}\n\ndata: [DONE]\n\n', None),
        (STREAM, 'data: {"a": 1}\n\n', "broken stream"),
        (STREAM, 'data: {"a\n\ndata: [DONE]\n\n', "broken stream"),
        (STREAM, 'data: {"say": "data: [DONE]"}\n\n', "broken stream"),
        (STREAM, "", "broken stream"),
    ],
)
def test_bodies_have_kinds(content_type: str, text: str, kind: FaultKind | None) -> None:
    """A success is kept where its body is a chat completion or a stream that is whole to its end mark."""
    assert classify_body(content_type, text) == kind


class Breaking(httpx.AsyncByteStream):
    """Begins and breaks off."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"data: {"
        raise httpx.ReadError("gone")


@pytest.mark.parametrize(("content_type", "kind"), [(JSON, "truncated"), (STREAM, "broken stream")])
async def test_an_answer_that_breaks_off_is_no_reset(content_type: str, kind: FaultKind) -> None:
    """Once an answer has begun, a failing connection truncates it."""
    network = httpx.MockTransport(
        lambda _: httpx.Response(200, headers={"content-type": content_type}, stream=Breaking())
    )
    with pytest.raises(CutOff, match="gone") as caught:
        await send_whole(httpx.Request("POST", "http://x"), network, 1.0)
    assert classify_failure(caught.value) == kind


async def test_each_failed_attempt_is_counted() -> None:
    """A call that succeeds at last leaves one reply, and the run's faults by kind."""
    store = await opened()
    late, reset, busy = httpx.ReadTimeout("x"), httpx.ReadError("x"), httpx.Response(500)
    attempts = [busy, late, CUT, reset, busy, GOOD]
    provider = Endpoint(*attempts)
    async with connected(provider, config(max_retries=5), store=store) as client:
        reply = await client.ask(PROMPT, Text, call_id=call_id())
    assert reply.value.text == "fine"
    assert len(provider.requests) == len(attempts)
    counts: list[tuple[FaultKind, int]] = [("5xx", 2), ("malformed", 1), ("reset", 1), ("timeout", 1)]
    assert await store.faults(RUN) == tuple(FaultCount(kind=kind, count=n) for kind, n in counts)
    assert await store.faults("another") == ()


async def test_what_is_garbled_to_the_end_is_told() -> None:
    """An answer that is malformed in all attempts is an error that shows it, and nothing is stored."""
    store, provider = await opened(), Endpoint(CUT, CUT, GOOD)
    async with connected(provider, config(max_retries=1), store=store) as client:
        with pytest.raises(ProviderDown, match="no chat completion"):
            await client.ask(PROMPT, Text, call_id=call_id())
        assert len(provider.requests) == 2
        reply = await client.ask(PROMPT, Text, call_id=call_id())
    assert (reply.value.text, len(provider.requests)) == ("fine", 3)
    assert await store.faults(RUN) == (FaultCount(kind="malformed", count=2),)


async def test_what_was_never_a_completion_is_asked_once() -> None:
    """A whole answer of another kind is no accident on the way: it is counted, and not asked for again."""
    store, page = await opened(), httpx.Response(200, headers={"content-type": PAGE}, text="<html>")
    provider = Endpoint(page, GOOD)
    async with connected(provider, config(max_retries=3), store=store) as client:
        with pytest.raises(ProviderDown, match="no chat completion"):
            await client.ask(PROMPT, Text, call_id=call_id())
    assert len(provider.requests) == 1
    assert await store.faults(RUN) == (FaultCount(kind="unusable", count=1),)
