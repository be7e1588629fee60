"""The response cache: every model request has a content key and is paid once.

Each attempt of a call has its own stored response, including replies that failed validation. A process that
is killed and restarted sends only the missing requests, since ``reflact.llm.metering`` stores a response before
anyone sees it.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import anyio
import httpx

from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.cache_keys import build_cache_key, strip_to_endpoint
from reflact.llm.drafts import CONTEXT
from reflact.llm.metering import RESERVATION
from reflact.llm.retry import BodyStream
from reflact.messages import CallReservation

CALL_ID_HEADER = "x-reflact-call-id"
REPLY_TYPE_HEADER = "x-reflact-reply-type"


class ResponseCacheTransport(httpx.AsyncBaseTransport):
    """Answers a request from the store, or sends it."""

    def __init__(
        self, inner: httpx.AsyncBaseTransport, config: ModelConfig, role: str, account: Account
    ) -> None:
        self._inner = inner
        self._config = config
        self._role = role
        self._account = account
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the stored answer, or send the request and return its answer.

        Equal requests wait for each other. Requests other than POST are free and are always sent.
        """
        call_id = request.headers.get(CALL_ID_HEADER, "")
        body = await request.aread()
        outgoing = self._strip_headers(request, call_id, body)
        if request.method != "POST":
            return await self._inner.handle_async_request(outgoing)
        endpoint, parts = strip_to_endpoint(str(request.url)), call_id.split("/")
        key = build_cache_key(
            endpoint=endpoint,
            path=request.url.path,
            body=body.decode("utf-8"),
            call_id=call_id,
            reply=request.headers.get(REPLY_TYPE_HEADER, ""),
        )
        outgoing.extensions[RESERVATION] = CallReservation(
            key=key,
            run_id=self._account.run_id,
            call_id=call_id,
            role=self._role,
            purpose=parts[1] if len(parts) > 1 else "other",
            endpoint=endpoint,
            model=self._config.model,
        )
        async with self._locks.setdefault(key, anyio.Lock()):
            stored = await self._account.responses.find_response(key)
            if stored is None:
                response = await self._inner.handle_async_request(outgoing)
                if (context := CONTEXT.get()) is not None:
                    context.sent = True
                return response
        pieces = [chunk.encode("utf-8") for chunk in stored.chunks]
        headers = {"content-type": stored.content_type}
        return httpx.Response(stored.status, headers=headers, stream=BodyStream(pieces))

    def _strip_headers(self, request: httpx.Request, call_id: str, body: bytes) -> httpx.Request:
        """Return a copy without reflact's headers; the original keeps them for redirects."""
        headers = httpx.Headers(request.headers)
        headers.pop(CALL_ID_HEADER, None)
        headers.pop(REPLY_TYPE_HEADER, None)
        if self._config.call_id_header is not None:
            headers[self._config.call_id_header] = call_id
        extensions = {**request.extensions, "reflact_call_id": call_id}
        return httpx.Request(
            request.method, request.url, headers=headers, content=body, extensions=extensions
        )
