"""Asks for answers in pieces if somebody subscribed to drafts, and returns all answers in one piece."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import httpx

from reflact.llm.drafts import DraftStream
from reflact.llm.errors import classify_body
from reflact.llm.redaction import find_keys, remove_keys
from reflact.llm.retry import BodyStream, select_headers
from reflact.llm.sse import is_event_stream, join_stream, read_usage
from reflact.llm.structured import FORMAT_REFUSALS
from reflact.records import Usage

JSON = "application/json"
DRAFTS = "reflact_drafts"
"""The extension of a request that holds the drafts to which its answer is fed while it comes."""

UNSTREAMABLE_STATUSES = FORMAT_REFUSALS | {500}
"""Statuses with which an endpoint says that it does not stream, or not with these options."""

STREAM_WORDS = re.compile(r"\bstream", re.IGNORECASE)


class StreamingTransport(httpx.AsyncBaseTransport):
    """Asks for a stream if somebody subscribed to the drafts of the call, and returns all answers whole.

    An endpoint that refuses to stream, or whose streams break until the repeats are used up, is asked for
    the whole answer at once, and for no stream from then on; nor is one that does not count what it streams,
    since such answers would be booked at their worst case.

    Args:
        inner: Sends requests, or knows their answers.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._streams = True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return what answers a request, in one piece."""
        context = CONTEXT.get()
        if context is None or context.drafts is None or not self._streams:
            return await self._send(request)
        response = await self._send(await _ask_for_stream(request, context.drafts))
        text = response.text
        if _refuses_stream(response.status_code, text) or is_event_stream(response.headers["content-type"]):
            self._streams = False
            return await self._send(request)
        if response.is_success and read_usage(JSON, [text]).uncounted:
            self._streams = False
        return response

    async def _send(self, request: httpx.Request) -> httpx.Response:
        return await join_answer(await self._inner.handle_async_request(request), request)


def find_drafts(request: httpx.Request, response: httpx.Response) -> Callable[[bytes], None] | None:
    """Return what takes in the pieces of an answer, if it is a stream to whose drafts somebody subscribed."""
    drafts: DraftStream[Any] | None = request.extensions.get(DRAFTS)
    if drafts is None or not response.is_success or not is_event_stream(_read_content_type(response)):
        return None
    drafts.begin(find_keys(request))
    return drafts.feed


async def join_answer(response: httpx.Response, request: httpx.Request) -> httpx.Response:
    """Return an answer read whole; a stream that is whole as the chat completion that it makes up.

    A key that was taken apart by the stream is taken out of the completion.
    """
    body, headers, kind = await response.aread(), select_headers(response), _read_content_type(response)
    if response.is_success and is_event_stream(kind):
        text = body.decode("utf-8", "replace")
        if classify_body(kind, text) is None:
            headers["content-type"] = JSON
            body = remove_keys(find_keys(request), join_stream(text)).encode("utf-8")
    whole = httpx.Response(response.status_code, headers=headers, stream=BodyStream([body]))
    await whole.aread()
    return whole


def _read_content_type(response: httpx.Response) -> str:
    return select_headers(response)["content-type"]


def _refuses_stream(status: int, text: str) -> bool:
    return status in UNSTREAMABLE_STATUSES and STREAM_WORDS.search(text) is not None


async def _ask_for_stream(request: httpx.Request, drafts: DraftStream[Any]) -> httpx.Request:
    body = json.loads(await request.aread())
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = httpx.Headers(request.headers)
    headers.pop("content-length", None)
    return httpx.Request(
        request.method,
        request.url,
        headers=headers,
        content=json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode("utf-8"),
        extensions={**request.extensions, DRAFTS: drafts},
    )


class RequestContext:
    """What the transports below the client library know of the call whose request they carry.

    Attributes:
        attempts: The call's attempts so far.
        usage: What those that were answered consumed.
        sent: Whether an answer came from elsewhere than the store.

    Args:
        drafts: Takes in the answers while they come; None: nobody subscribed.
    """

    def __init__(self, drafts: DraftStream[Any] | None = None) -> None:
        self.drafts = drafts
        self.attempts = 0
        self.usage = Usage()
        self.sent = False


CONTEXT: ContextVar[RequestContext | None] = ContextVar("reflact_request", default=None)
"""The call that a task is making."""
