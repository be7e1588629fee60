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
from reflact.llm.bodies import MAX_BYTES, AnswerFault, BodyStream, find_max_bytes
from reflact.llm.budget import Account
from reflact.llm.cache_keys import build_cache_key, strip_to_endpoint
from reflact.llm.completions import read_completion
from reflact.llm.drafts import CONTEXT
from reflact.llm.metering import RESERVATION
from reflact.llm.sse import JSON
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

        Equal requests wait for each other.

        Raises:
            AnswerFault: A redirect turned the request into another one, whose answer would be no completion.
        """
        if request.method != "POST":
            raise AnswerFault(f"a redirect to {request.url} that loses the body of the request")
        call_id = request.headers.get(CALL_ID_HEADER, "")
        body = await request.aread()
        outgoing = self._strip_headers(request, call_id, body)
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
        context = CONTEXT.get()
        if context is not None:
            context.keys.append(key)
        async with self._locks.setdefault(key, anyio.Lock()):
            text = await self._find_stored(key)
            if text is None:
                response = await self._inner.handle_async_request(outgoing)
                if context is not None:
                    context.sent = True
                return response
        return httpx.Response(200, headers={"content-type": JSON}, stream=BodyStream([text.encode("utf-8")]))

    async def _find_stored(self, key: str) -> str | None:
        """Return the stored answer; None if there is none, or one that cannot be read."""
        stored = await self._account.responses.find_response(key)
        if stored is None:
            return None
        try:
            return read_completion(stored.content_type, "".join(stored.chunks))
        except AnswerFault:
            return None

    def _strip_headers(self, request: httpx.Request, call_id: str, body: bytes) -> httpx.Request:
        """Return a copy without reflact's headers; the original keeps them for redirects."""
        headers = httpx.Headers(request.headers)
        headers.pop(CALL_ID_HEADER, None)
        headers.pop(REPLY_TYPE_HEADER, None)
        if self._config.call_id_header is not None:
            headers[self._config.call_id_header] = call_id
        extensions = {
            **request.extensions,
            "reflact_call_id": call_id,
            MAX_BYTES: find_max_bytes(self._config),
        }
        return httpx.Request(
            request.method, request.url, headers=headers, content=body, extensions=extensions
        )
