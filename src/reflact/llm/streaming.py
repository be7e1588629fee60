"""Streamed requests for calls with draft subscribers."""

from __future__ import annotations

import json
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import httpx

from reflact.llm.drafts import DraftStream
from reflact.llm.pricing import read_usage
from reflact.llm.sse import EVENT_STREAM, JSON
from reflact.llm.structured import FORMAT_REFUSALS
from reflact.records import Usage

UNSTREAMABLE_STATUSES = FORMAT_REFUSALS | {500}
"""Statuses with which endpoints refuse to stream, or refuse the options of the stream."""

STREAM_WORDS = re.compile(r"\bstream", re.IGNORECASE)


@dataclass
class RequestContext:
    """State of a call that the transports share with the client.

    ``drafts`` takes the answers while they arrive; None if no stream is wanted. ``sent`` is True if any answer
    came from the endpoint rather than the store.
    """

    drafts: DraftStream[Any] | None = None
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    sent: bool = False


CONTEXT: ContextVar[RequestContext | None] = ContextVar("reflact_request", default=None)
"""The call of the current task."""


class StreamingTransport(httpx.AsyncBaseTransport):
    """Asks for a stream if the call's drafts have subscribers.

    This transport stops streaming if the endpoint refuses to stream or its streams break in all retries. It
    then repeats the request without a stream. It also stops if the endpoint reports no usage for streams,
    because such answers are charged at their worst case.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._streams = True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the whole answer to a request."""
        context = CONTEXT.get()
        if context is None or context.drafts is None or not self._streams:
            return await self._inner.handle_async_request(request)
        response = await self._inner.handle_async_request(await _ask_for_stream(request))
        await response.aread()
        refused = response.status_code in UNSTREAMABLE_STATUSES and STREAM_WORDS.search(response.text)
        if refused or response.headers["content-type"].startswith(EVENT_STREAM):
            self._streams = False
            return await self._inner.handle_async_request(request)
        if response.is_success and read_usage(JSON, [response.text]).uncounted:
            self._streams = False
        return response


async def _ask_for_stream(request: httpx.Request) -> httpx.Request:
    body = json.loads(await request.aread()) | {"stream": True, "stream_options": {"include_usage": True}}
    headers = httpx.Headers(request.headers)
    headers.pop("content-length", None)
    return httpx.Request(
        request.method, request.url, headers=headers, json=body, extensions=request.extensions
    )
