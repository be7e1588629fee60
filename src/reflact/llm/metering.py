"""Single attempts: each goes out once it fits the budget and the endpoint's limits, and is booked.

The budget is asked first and the endpoint after it, so that a call which the endpoint admitted goes at
once: what waits for a budget neither holds a place that others could use nor gathers into a burst.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import anyio
import httpx

from reflact.concurrency import finish_if_cancelled
from reflact.config.models import ModelConfig
from reflact.errors import ReflactError
from reflact.llm.budget import Budget, Reservation
from reflact.llm.errors import GARBLING, body_fault, cut_off, failure_fault, status_fault
from reflact.llm.pricing import cap_of, usd_of, worst_case
from reflact.llm.rate_limit import EndpointClient, Slot
from reflact.llm.retry import GARBLED, Pieces, kept_headers, retry_after
from reflact.llm.sse import usage_of
from reflact.llm.streaming import DRAFTS, find_drafts, in_one_piece
from reflact.messages import CallReservation, StoredResponse
from reflact.protocols import ResponseStore
from reflact.records import FaultKind, Usage

LEAVING_SECONDS = 0.2
"""How long a caller that leaves is kept until its intent is gone."""

INTENT = "reflact_intent"
"""The extension of a request that holds its intent; what has none costs nothing."""

UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
    ReflactError,
)
"""Failures before a request could leave."""


class MeteredTransport(httpx.AsyncBaseTransport):
    """Sends one attempt of a call, stores what answers it, and books what it cost.

    An error status is free. An attempt that was cut off, by a time-out, a broken connection, a broken answer
    or a cancellation, counts at its worst case for good, since a provider may charge for it; so does an
    answer that does not say what it consumed. Each attempt that failed is counted by kind.

    Args:
        inner: Sends a request.
        config: The role's model.
        budget: What the run may still take.
        endpoint: The role's way into the endpoint.
        effects: The store.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        config: ModelConfig,
        budget: Budget,
        endpoint: EndpointClient,
        effects: ResponseStore,
    ) -> None:
        self._inner = inner
        self._config = config
        self._budget = budget
        self._endpoint = endpoint
        self._effects = effects

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request once and return its answer, read whole.

        Raises:
            BudgetSpent: The budget has no room for it.
            httpx.TransportError: It failed on the way.
        """
        intent: CallReservation | None = request.extensions.get(INTENT)
        if intent is None:
            return await whole(request, self._inner, self._config.timeout)
        body = await request.aread()
        at = datetime.now(UTC)
        worst = worst_case(len(body), cap_of(json.loads(body)), self._config, at=at)
        intent = intent.model_copy(update={"worst_case": worst})
        async with self._budget.reserve(worst) as reservation, self._endpoint.admit(_tokens(worst)) as slot:
            await self._intend(intent)
            reservation.mark_sent()
            response = await self._send(request, intent, reservation, slot)
            return await self._book(response, intent, reservation, slot, at)

    async def _intend(self, intent: CallReservation) -> None:
        """Book the intent; where its caller leaves meanwhile nothing was sent, and nothing stays booked."""
        try:
            await self._effects.reserve(intent)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(LEAVING_SECONDS, shield=True):
                await self._effects.release(intent)
            raise

    async def _send(
        self, request: httpx.Request, intent: CallReservation, reservation: Reservation, slot: Slot
    ) -> httpx.Response:
        try:
            return await whole(request, self._inner, self._config.timeout)
        except Exception as error:
            slot.observe(None, None, None)
            if isinstance(error, UNSENT):
                await self._effects.release(intent)
                reservation.release()
            await self._count(intent, failure_fault(error))
            raise

    async def _book(
        self,
        response: httpx.Response,
        intent: CallReservation,
        reservation: Reservation,
        slot: Slot,
        at: datetime,
    ) -> httpx.Response:
        chunks = tuple([text async for text in response.aiter_text()])
        headers = kept_headers(response)
        content_type = headers["content-type"]
        usage = usage_of(content_type, chunks)
        asked = retry_after(response.headers.get("retry-after"))
        slot.observe(response.status_code, asked, None if usage.uncounted else _tokens(usage))
        fault = status_fault(response.status_code)
        if not response.is_success:
            await self._effects.release(intent)
            reservation.release()
        elif (fault := body_fault(content_type, "".join(chunks))) is None:
            if not usage.uncounted:
                usage = usage.model_copy(update={"usd": usd_of(usage, self._config, at=at)})
            reply = StoredResponse(
                key=intent.key,
                status=response.status_code,
                content_type=content_type,
                chunks=chunks,
                usage=usage,
            )
            await finish_if_cancelled(lambda: self._keep(reply, intent, reservation))
        await self._count(intent, fault)
        stream = Pieces([chunk.encode("utf-8") for chunk in chunks])
        marks = {GARBLED: True} if fault in GARBLING else {}
        return httpx.Response(response.status_code, headers=headers, stream=stream, extensions=marks)

    async def _keep(self, reply: StoredResponse, intent: CallReservation, reservation: Reservation) -> None:
        await self._effects.store_response(reply, intent)
        reservation.settle(reply.usage)

    async def _count(self, intent: CallReservation, fault: FaultKind | None) -> None:
        if fault is not None:
            await self._effects.count_fault(intent.run_id, fault)


def _tokens(usage: Usage) -> int:
    return usage.input_tokens + usage.output_tokens


async def whole(request: httpx.Request, inner: httpx.AsyncBaseTransport, seconds: float) -> httpx.Response:
    """Send a request once and read its answer to the end; one that somebody listens to comes in one piece.

    Raises:
        CutOff: The answer began and broke off.
        httpx.TransportError: It failed on the way, or took longer than ``seconds`` in all.
    """
    try:
        with anyio.fail_after(seconds):
            response = await inner.handle_async_request(request)
            try:
                with cut_off(response):
                    pieces = await _pieces(response, find_drafts(request, response))
            finally:
                await response.aclose()
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer in {seconds:g} seconds") from None
    answer = httpx.Response(response.status_code, headers=kept_headers(response), stream=Pieces(pieces))
    return await in_one_piece(answer, request) if DRAFTS in request.extensions else answer


async def _pieces(response: httpx.Response, hear: Callable[[bytes], None] | None) -> list[bytes]:
    pieces = []
    async for piece in response.aiter_bytes():
        pieces.append(piece)
        if hear is not None:
            hear(piece)
    return pieces
