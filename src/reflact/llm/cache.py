"""The response cache: every model request has a content key and is paid once.

The cache stands above retries and metering, so each attempt of a call has its own stored response, including
replies that failed validation. A process that is killed and restarted finds all stored responses and sends
only the missing requests. ``reflact.llm.metering`` stores a response before anyone sees it.
"""

from __future__ import annotations

from typing import NamedTuple

import httpx

from reflact.concurrency import SingleFlight
from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.cache_keys import build_cache_key, strip_to_endpoint
from reflact.llm.metering import RESERVATION
from reflact.llm.retry import BodyStream, select_headers
from reflact.llm.streaming import CONTEXT
from reflact.messages import CallReservation

CALL_ID_HEADER = "x-reflact-call-id"
REPLY_TYPE_HEADER = "x-reflact-reply-type"


class RawAnswer(NamedTuple):
    """Status, selected headers and body of an answer; ``stored`` is True if it came from the store."""

    status: int
    headers: dict[str, str]
    pieces: list[bytes]
    stored: bool = False


class ResponseCacheTransport(httpx.AsyncBaseTransport):
    """Answers a request from the store, or sends it.

    Args:
        inner: Sends requests and stores their answers.
        config: The role's model.
        role: The role of the calls.
        account: Where the calls are stored and charged.
        flights: Joins equal requests in flight.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        config: ModelConfig,
        role: str,
        account: Account,
        flights: SingleFlight[RawAnswer],
    ) -> None:
        self._inner = inner
        self._config = config
        self._role = role
        self._account = account
        self._flights = flights

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the stored answer, or send the request and return its answer.

        Requests other than POST are free and are sent without looking in the store.
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
        answer = await self._flights.join(key, lambda: self._find_or_send(outgoing, key))
        context = CONTEXT.get()
        if context is not None and not answer.stored:
            context.sent = True
        return httpx.Response(answer.status, headers=answer.headers, stream=BodyStream(answer.pieces))

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

    async def _find_or_send(self, request: httpx.Request, key: str) -> RawAnswer:
        """Look up and send in one flight, so that no request is sent between a look-up and a store."""
        stored = await self._account.responses.find_response(key)
        if stored is not None:
            pieces = [chunk.encode("utf-8") for chunk in stored.chunks]
            return RawAnswer(stored.status, {"content-type": stored.content_type}, pieces, stored=True)
        response = await self._inner.handle_async_request(request)
        pieces = [piece async for piece in response.aiter_bytes()]
        return RawAnswer(response.status_code, select_headers(response), pieces)
