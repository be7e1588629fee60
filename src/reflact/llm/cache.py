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
from reflact.llm.cache_keys import effect_key, endpoint_of
from reflact.llm.metering import INTENT
from reflact.llm.retry import Pieces, kept_headers
from reflact.llm.streaming import CONTEXT
from reflact.messages import CallReservation
from reflact.protocols import ResponseStore

SAMPLE_HEADER = "x-reflact-sample"
REPLY_HEADER = "x-reflact-reply"


class Landed(NamedTuple):
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
        effects: The store.
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
        effects: ResponseStore,
        flights: SingleFlight[Landed],
        run_id: str,
        role: str,
        model: str,
        forward: str | None = None,
    ) -> None:
        self._inner = inner
        self._effects = effects
        self._flights = flights
        self._run_id = run_id
        self._role = role
        self._model = model
        self._forward = forward

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the stored answer, or send the request and return what comes.

        What is no POST costs nothing and is passed on.
        """
        call_id = request.headers.get(SAMPLE_HEADER, "")
        reply = request.headers.get(REPLY_HEADER, "")
        body = await request.aread()
        outgoing = self._outgoing(request, call_id, body)
        if request.method != "POST":
            return await self._inner.handle_async_request(outgoing)
        endpoint, path = endpoint_of(str(request.url)), request.url.path
        key = effect_key(
            endpoint=endpoint, path=path, body=body.decode("utf-8"), call_id=call_id, reply=reply
        )
        intent = CallReservation(
            key=key,
            run_id=self._run_id,
            call_id=call_id,
            role=self._role,
            purpose=_purpose(call_id),
            endpoint=endpoint,
            model=self._model,
        )
        outgoing.extensions[INTENT] = intent
        landed = await self._flights.join(key, lambda: self._land(outgoing, key))
        context = CONTEXT.get()
        if context is not None and not landed.stored:
            context.sent = True
        return httpx.Response(landed.status, headers=landed.headers, stream=Pieces(landed.pieces))

    def _outgoing(self, request: httpx.Request, call_id: str, body: bytes) -> httpx.Request:
        """Return the request without our headers; the given one keeps them, for redirects."""
        headers = httpx.Headers(request.headers)
        headers.pop(SAMPLE_HEADER, None)
        headers.pop(REPLY_HEADER, None)
        if self._forward is not None:
            headers[self._forward] = call_id
        extensions = {**request.extensions, "reflact_sample": call_id}
        return httpx.Request(
            request.method, request.url, headers=headers, content=body, extensions=extensions
        )

    async def _land(self, request: httpx.Request, key: str) -> Landed:
        """Look up and send as one piece of work: nobody looks before an answer is stored and sends after."""
        stored = await self._effects.find_response(key)
        if stored is not None:
            pieces = [chunk.encode("utf-8") for chunk in stored.chunks]
            return Landed(stored.status, {"content-type": stored.content_type}, pieces, stored=True)
        response = await self._inner.handle_async_request(request)
        pieces = [piece async for piece in response.aiter_bytes()]
        return Landed(response.status_code, kept_headers(response), pieces)


def _purpose(call_id: str) -> str:
    parts = call_id.split("/")
    return parts[1] if len(parts) > 1 else "other"
