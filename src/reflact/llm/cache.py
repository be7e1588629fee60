"""Effects: every model request has a content key and is paid once.

This is the outermost transport of the stack below the client libraries, so each attempt of a call is an
effect of its own: the first reply that failed validation as well as the one that mended it. A process that
was killed and started again runs the same code over the stored answers and sends only what is missing.
What is sent is stored further inside (``reflact.llm.metering``), before anyone sees its answer.
"""

from __future__ import annotations

from typing import NamedTuple

import httpx

from reflact.concurrency import SingleFlight
from reflact.llm.cache_keys import build_cache_key, strip_to_endpoint
from reflact.llm.metering import RESERVATION
from reflact.llm.retry import BodyStream, select_headers
from reflact.llm.streaming import CONTEXT
from reflact.messages import CallReservation
from reflact.protocols import ResponseStore

CALL_ID_HEADER = "x-reflact-call-id"
REPLY_TYPE_HEADER = "x-reflact-reply-type"


class RawAnswer(NamedTuple):
    """What came of a request: its status, the headers that the client library needs to see, its body.

    ``stored`` says that it was not sent.
    """

    status: int
    headers: dict[str, str]
    pieces: list[bytes]
    stored: bool = False


class ResponseCacheTransport(httpx.AsyncBaseTransport):
    """Answers from the store where it can.

    Args:
        inner: Sends what is not stored, and stores what answers it.
        responses: The store.
        flights: Joins equal requests in flight.
        run_id: The run that pays.
        role: The role that asks.
        model: The model asked, for the ledger.
        forward: A header in which to send the sample's label on, if any.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        responses: ResponseStore,
        flights: SingleFlight[RawAnswer],
        run_id: str,
        role: str,
        model: str,
        forward: str | None = None,
    ) -> None:
        self._inner = inner
        self._responses = responses
        self._flights = flights
        self._run_id = run_id
        self._role = role
        self._model = model
        self._forward = forward

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the stored answer, or send the request and return what comes.

        What is no POST costs nothing and is passed on.
        """
        call_id = request.headers.get(CALL_ID_HEADER, "")
        reply = request.headers.get(REPLY_TYPE_HEADER, "")
        body = await request.aread()
        outgoing = self._strip_headers(request, call_id, body)
        if request.method != "POST":
            return await self._inner.handle_async_request(outgoing)
        endpoint, path = strip_to_endpoint(str(request.url)), request.url.path
        key = build_cache_key(
            endpoint=endpoint, path=path, body=body.decode("utf-8"), call_id=call_id, reply=reply
        )
        call = CallReservation(
            key=key,
            run_id=self._run_id,
            call_id=call_id,
            role=self._role,
            purpose=_read_purpose(call_id),
            endpoint=endpoint,
            model=self._model,
        )
        outgoing.extensions[RESERVATION] = call
        landed = await self._flights.join(key, lambda: self._find_or_send(outgoing, key))
        context = CONTEXT.get()
        if context is not None and not landed.stored:
            context.sent = True
        return httpx.Response(landed.status, headers=landed.headers, stream=BodyStream(landed.pieces))

    def _strip_headers(self, request: httpx.Request, call_id: str, body: bytes) -> httpx.Request:
        """Return the request without our headers; the given one keeps them, for redirects."""
        headers = httpx.Headers(request.headers)
        headers.pop(CALL_ID_HEADER, None)
        headers.pop(REPLY_TYPE_HEADER, None)
        if self._forward is not None:
            headers[self._forward] = call_id
        extensions = {**request.extensions, "reflact_call_id": call_id}
        return httpx.Request(
            request.method, request.url, headers=headers, content=body, extensions=extensions
        )

    async def _find_or_send(self, request: httpx.Request, key: str) -> RawAnswer:
        """Look up and send as one piece of work: nobody looks before an answer is stored and sends after."""
        stored = await self._responses.find_response(key)
        if stored is not None:
            pieces = [chunk.encode("utf-8") for chunk in stored.chunks]
            return RawAnswer(stored.status, {"content-type": stored.content_type}, pieces, stored=True)
        response = await self._inner.handle_async_request(request)
        pieces = [piece async for piece in response.aiter_bytes()]
        return RawAnswer(response.status_code, select_headers(response), pieces)


def _read_purpose(call_id: str) -> str:
    parts = call_id.split("/")
    return parts[1] if len(parts) > 1 else "other"
