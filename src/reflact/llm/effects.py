"""Effects: every model request has a content key, is paid once, and is on disk before anyone sees its answer.

This is the outermost transport of the stack below the client libraries, so each attempt of a call is an
effect of its own: the first reply that failed validation as well as the one that mended it. A process that
was killed and started again runs the same code over the stored answers and sends only what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx

from reflact.calls import Intent, StoredReply
from reflact.llm.retries import Pieces
from reflact.llm.usage import usage_of
from reflact.ports import EffectStore
from reflact.tasks import SingleFlight

SAMPLE_HEADER = "x-reflact-sample"
REPLY_HEADER = "x-reflact-reply"


def effect_key(*, endpoint: str, path: str, body: str, sample: str, reply: str) -> str:
    """Return the identity of a request, 64 hexadecimal digits: the SHA-256 of its canonical JSON.

    Args:
        endpoint: Scheme, host and port, without credentials.
        path: Path of the request.
        body: The JSON body as text; spacing and the order of fields do not matter.
        sample: Label of the logical sample.
        reply: Name and version of the reply type.
    """
    parts = {"endpoint": endpoint, "path": path, "body": json.loads(body), "sample": sample, "reply": reply}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def endpoint_of(url: str) -> str:
    """Return scheme, host and port of an address: no credentials, no path, no query."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


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
        flights: SingleFlight[StoredReply | httpx.Response],
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
        """Return the stored answer, or send the request, store what comes, and return it."""
        sample = request.headers.pop(SAMPLE_HEADER, "")
        reply = request.headers.pop(REPLY_HEADER, "")
        body = (await request.aread()).decode("utf-8")
        endpoint = endpoint_of(str(request.url))
        key = effect_key(endpoint=endpoint, path=request.url.path, body=body, sample=sample, reply=reply)
        request.extensions["reflact_sample"] = sample
        if self._forward is not None:
            request.headers[self._forward] = sample
        stored = await self._effects.find_reply(key)
        if stored is not None:
            return _response(stored, request)
        intent = Intent(
            key=key,
            run_id=self._run_id,
            sample=sample,
            role=self._role,
            purpose=_purpose(sample),
            endpoint=endpoint,
            model=self._model,
        )
        outcome = await self._flights.join(key, lambda: self._send(request, intent))
        return _response(outcome, request) if isinstance(outcome, StoredReply) else outcome

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()

    async def _send(self, request: httpx.Request, intent: Intent) -> StoredReply | httpx.Response:
        await self._effects.intend(intent)
        try:
            response = await self._inner.handle_async_request(request)
            chunks = [chunk async for chunk in _texts(response)]
        except Exception:
            await self._effects.drop_intent(intent)
            raise
        content_type = response.headers.get("content-type", "application/json")
        if not response.is_success:
            await self._effects.drop_intent(intent)
            return httpx.Response(
                response.status_code,
                headers={"content-type": content_type},
                text="".join(chunks),
                request=request,
            )
        reply = StoredReply(
            key=intent.key,
            status=response.status_code,
            content_type=content_type,
            chunks=tuple(chunks),
            usage=usage_of(content_type, chunks),
        )
        await self._effects.keep_reply(reply, intent)
        return reply


async def _texts(response: httpx.Response) -> AsyncIterator[str]:
    try:
        async for text in response.aiter_text():
            yield text
    finally:
        await response.aclose()


def _response(stored: StoredReply, request: httpx.Request) -> httpx.Response:
    stream = Pieces([chunk.encode("utf-8") for chunk in stored.chunks])
    headers = {"content-type": stored.content_type}
    return httpx.Response(stored.status, headers=headers, stream=stream, request=request)


def _purpose(sample: str) -> str:
    parts = sample.split("/")
    return parts[1] if len(parts) > 1 else "other"
