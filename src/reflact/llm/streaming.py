"""Streamed requests for calls with draft subscribers, and their answers joined to one chat completion."""

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
"""The extension of a request that holds its ``DraftStream``."""

UNSTREAMABLE_STATUSES = FORMAT_REFUSALS | {500}
"""Statuses with which endpoints refuse to stream, or refuse the options of the stream."""

STREAM_WORDS = re.compile(r"\bstream", re.IGNORECASE)


class StreamingTransport(httpx.AsyncBaseTransport):
    """Asks for a stream if the call's drafts have subscribers, and returns every answer whole.

    This transport stops streaming if the endpoint refuses to stream or its streams break in all retries. It
    then repeats the request without a stream. It also stops if the endpoint reports no usage for streams,
    because such answers are charged at their worst case.

    Args:
        inner: Sends requests.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._streams = True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the whole answer to a request."""
        context = CONTEXT.get()
        if context is None or context.drafts is None or not self._streams:
            return await self._send(request)
        response = await self._send(await _ask_for_stream(request, context.drafts))
        text = response.text
        refused = response.status_code in UNSTREAMABLE_STATUSES and STREAM_WORDS.search(text) is not None
        if refused or is_event_stream(response.headers["content-type"]):
            self._streams = False
            return await self._send(request)
        if response.is_success and read_usage(JSON, [text]).uncounted:
            self._streams = False
        return response

    async def _send(self, request: httpx.Request) -> httpx.Response:
        return await join_answer(await self._inner.handle_async_request(request), request)


def find_drafts(request: httpx.Request, response: httpx.Response) -> Callable[[bytes], None] | None:
    """Return a function that takes the pieces of an answer; None if it has no subscriber or is no stream."""
    drafts: DraftStream[Any] | None = request.extensions.get(DRAFTS)
    if (
        drafts is None
        or not response.is_success
        or not is_event_stream(select_headers(response)["content-type"])
    ):
        return None
    drafts.begin(find_keys(request))
    return drafts.feed


async def join_answer(response: httpx.Response, request: httpx.Request) -> httpx.Response:
    """Return an answer read whole; a complete stream becomes a chat completion.

    The completion contains no API key, even if the stream split one over several chunks.
    """
    body, headers = await response.aread(), select_headers(response)
    if response.is_success and is_event_stream(headers["content-type"]):
        text = body.decode("utf-8", "replace")
        if classify_body(headers["content-type"], text) is None:
            headers["content-type"] = JSON
            body = remove_keys(find_keys(request), join_stream(text)).encode("utf-8")
    whole = httpx.Response(response.status_code, headers=headers, stream=BodyStream([body]))
    await whole.aread()
    return whole


async def _ask_for_stream(request: httpx.Request, drafts: DraftStream[Any]) -> httpx.Request:
    body = json.loads(await request.aread())
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = httpx.Headers(request.headers)
    headers.pop("content-length", None)
    return httpx.Request(
        request.method,
        request.url,
        headers=headers,
        content=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8"),
        extensions={**request.extensions, DRAFTS: drafts},
    )


class RequestContext:
    """State of a call that the transports share with the client.

    Attributes:
        attempts: Attempts of the call so far.
        usage: Tokens and money of the answered attempts.
        sent: Whether any answer came from the endpoint rather than the store.

    Args:
        drafts: Takes the answers while they arrive; None if the drafts have no subscriber.
    """

    def __init__(self, drafts: DraftStream[Any] | None = None) -> None:
        self.drafts = drafts
        self.attempts = 0
        self.usage = Usage()
        self.sent = False


CONTEXT: ContextVar[RequestContext | None] = ContextVar("reflact_request", default=None)
"""The call of the current task."""
