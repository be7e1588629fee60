"""Effects: every model request has a content key, is paid once, and is on disk before anyone sees its answer.

This is the outermost transport of the stack below the client libraries, so each attempt of a call is an
effect of its own: the first reply that failed validation as well as the one that mended it. A process that
was killed and started again runs the same code over the stored answers and sends only what is missing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import anyio
import httpx

from reflact.calls import Intent, StoredReply
from reflact.llm.keys import effect_key, endpoint_of
from reflact.llm.retries import Pieces, kept_headers
from reflact.llm.usage import usage_of
from reflact.ports import EffectStore
from reflact.tasks import SingleFlight

SAMPLE_HEADER = "x-reflact-sample"
REPLY_HEADER = "x-reflact-reply"


class Landed(NamedTuple):
    """What came of a request: as it is stored, and the headers that the client library needs to see."""

    reply: StoredReply
    headers: dict[str, str]


class EffectTransport(httpx.AsyncBaseTransport):
    """Answers from the store where it can, and stores every answer before passing it on.

    Args:
        inner: Sends what is not stored.
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
        effects: EffectStore,
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
        """Return the stored answer, or send the request, store what comes, and return it.

        What is no POST costs nothing and is passed on.
        """
        sample = request.headers.get(SAMPLE_HEADER, "")
        reply = request.headers.get(REPLY_HEADER, "")
        body = await request.aread()
        outgoing = self._outgoing(request, sample, body)
        if request.method != "POST":
            return await self._inner.handle_async_request(outgoing)
        endpoint, path = endpoint_of(str(request.url)), request.url.path
        key = effect_key(endpoint=endpoint, path=path, body=body.decode("utf-8"), sample=sample, reply=reply)
        intent = Intent(
            key=key,
            run_id=self._run_id,
            sample=sample,
            role=self._role,
            purpose=_purpose(sample),
            endpoint=endpoint,
            model=self._model,
        )
        landed = await self._flights.join(key, lambda: self._land(outgoing, intent))
        return _response(landed.reply, landed.headers)

    def _outgoing(self, request: httpx.Request, sample: str, body: bytes) -> httpx.Request:
        """Return the request without our headers; the given one keeps them, for redirects."""
        headers = httpx.Headers(request.headers)
        headers.pop(SAMPLE_HEADER, None)
        headers.pop(REPLY_HEADER, None)
        if self._forward is not None:
            headers[self._forward] = sample
        extensions = {**request.extensions, "reflact_sample": sample}
        return httpx.Request(
            request.method, request.url, headers=headers, content=body, extensions=extensions
        )

    async def _land(self, request: httpx.Request, intent: Intent) -> Landed:
        """Look up and send as one piece of work: nobody looks before an answer is stored and sends after."""
        stored = await self._effects.find_reply(intent.key)
        if stored is not None:
            return Landed(stored, {"content-type": stored.content_type})
        return await self._send(request, intent)

    async def _send(self, request: httpx.Request, intent: Intent) -> Landed:
        await self._effects.intend(intent)
        try:
            response = await self._inner.handle_async_request(request)
            chunks = [chunk async for chunk in _texts(response)]
        except Exception:
            await self._effects.drop_intent(intent)
            raise
        headers = kept_headers(response)
        content_type = headers["content-type"]
        reply = StoredReply(
            key=intent.key,
            status=response.status_code,
            content_type=content_type,
            chunks=tuple(chunks),
            usage=usage_of(content_type, chunks),
        )
        if response.is_success and _complete(content_type, chunks):
            with anyio.CancelScope(shield=True):
                await self._effects.keep_reply(reply, intent)
        else:
            await self._effects.drop_intent(intent)
        return Landed(reply, headers)


async def _texts(response: httpx.Response) -> AsyncIterator[str]:
    try:
        async for text in response.aiter_text():
            yield text
    finally:
        await response.aclose()


def _complete(content_type: str, chunks: Sequence[str]) -> bool:
    """Whether a body is an answer to keep: a chat completion, or a stream that reached its end."""
    text = "".join(chunks)
    if content_type.startswith("text/event-stream"):
        return "data: [DONE]" in text
    try:
        document = json.loads(text)
        return isinstance(document["choices"][0]["message"], dict)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _response(stored: StoredReply, headers: dict[str, str]) -> httpx.Response:
    stream = Pieces([chunk.encode("utf-8") for chunk in stored.chunks])
    return httpx.Response(stored.status, headers=headers, stream=stream)


def _purpose(sample: str) -> str:
    parts = sample.split("/")
    return parts[1] if len(parts) > 1 else "other"
