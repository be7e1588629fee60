"""Repeats of requests that failed on the way, and the bound on requests in flight."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import anyio
import httpx

RETRIED = frozenset({408, 409, 429, *range(500, 600)} - {501, 505})
"""Statuses that a later attempt may mend."""

PASSING = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)
"""Failures on the way that a later attempt may mend."""

BASE_SECONDS, CAP_SECONDS = 0.5, 30.0

PATIENCE_SECONDS = 300.0
"""The longest wait that a server may ask for; it gets no repeat before the time it names."""


class RetryTransport(httpx.AsyncBaseTransport):
    """Repeats requests after connection errors, time-outs and passing statuses.

    The wait before repeat n is drawn evenly from 0..min(cap, base * 2**n) seconds (full jitter: Brooker,
    "Exponential Backoff And Jitter", 2015), and no shorter than the server asks for in ``Retry-After``. A
    server that asks for more than ``PATIENCE_SECONDS`` is not asked again. The slot for a request in flight
    is not held meanwhile.

    Args:
        inner: Sends a request.
        retries: Repeats at most.
        slots: Requests in flight at most.
        seconds: How long one request may take, from its slot to the last byte of its answer.
        sleep: Waits a number of seconds.
        draw: Gives a number in 0..1.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        retries: int,
        slots: anyio.CapacityLimiter,
        seconds: float,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._retries = retries
        self._slots = slots
        self._seconds = seconds
        self._sleep = sleep
        self._draw = draw

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it succeeds, fails for good, or the repeats are used up."""
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                response = await self._send(request)
            except PASSING:
                if last:
                    raise
                asked = None
            else:
                if last or response.status_code not in RETRIED:
                    return response
                asked = retry_after(response.headers.get("retry-after"))
                if asked is not None and asked > PATIENCE_SECONDS:
                    return response
            await self._sleep(pause(attempt, asked, self._draw()))
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, request: httpx.Request) -> httpx.Response:
        async with self._slots:
            try:
                with anyio.fail_after(self._seconds):
                    return await self._whole(request)
            except TimeoutError:
                raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} seconds") from None

    async def _whole(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        try:
            chunks = [chunk async for chunk in response.aiter_bytes()]
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, headers=kept_headers(response), stream=Pieces(chunks))


class Pieces(httpx.AsyncByteStream):
    """A body that was read whole and keeps the pieces it came in."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def kept_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers of a response that anything above the network needs; the others end here."""
    names = ("retry-after", "location")
    kept = {name: response.headers[name] for name in names if name in response.headers}
    return {"content-type": response.headers.get("content-type", "application/json"), **kept}


def pause(attempt: int, asked: float | None, draw: float) -> float:
    """Return the seconds to wait after failed attempt ``attempt`` (from 0)."""
    return max(asked or 0.0, draw * min(CAP_SECONDS, BASE_SECONDS * 2.0**attempt))


def retry_after(value: str | None, *, now: datetime | None = None) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for: a number or an HTTP date; else None."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
