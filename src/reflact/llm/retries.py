"""Repeats of requests that failed on the way, and the bound on requests in flight."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import anyio
import httpx

RETRIED = frozenset({408, 409, 429, *range(500, 600)})
"""Statuses that a later attempt may mend; 501 and 505 among them cost a few attempts, no more."""

BASE_SECONDS, CAP_SECONDS = 0.5, 30.0


class RetryTransport(httpx.AsyncBaseTransport):
    """Repeats requests after connection errors, time-outs and passing statuses.

    The wait before repeat n is drawn evenly from 0..min(cap, base * 2**n) seconds (full jitter: Brooker,
    "Exponential Backoff And Jitter", 2015), or is what the server asks for in ``Retry-After``, up to
    the cap. The slot for a request in flight is not held meanwhile.

    Args:
        inner: Sends a request.
        retries: Repeats at most.
        slots: Requests in flight at most.
        sleep: Waits a number of seconds.
        draw: Gives a number in 0..1.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        retries: int,
        slots: anyio.CapacityLimiter,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._retries = retries
        self._slots = slots
        self._sleep = sleep
        self._draw = draw

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it succeeds, fails for good, or the repeats are used up."""
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                response = await self._send(request)
            except httpx.TransportError:
                if last:
                    raise
                asked = None
            else:
                if last or response.status_code not in RETRIED:
                    return response
                asked = retry_after(response.headers.get("retry-after"))
            await self._sleep(pause(attempt, asked, self._draw()))
        raise AssertionError("the last attempt returns or raises")

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()

    async def _send(self, request: httpx.Request) -> httpx.Response:
        async with self._slots:
            response = await self._inner.handle_async_request(request)
            try:
                chunks = [chunk async for chunk in response.aiter_bytes()]
            finally:
                await response.aclose()
        headers = {"content-type": response.headers.get("content-type", "application/json")}
        if "retry-after" in response.headers:
            headers["retry-after"] = response.headers["retry-after"]
        return httpx.Response(response.status_code, headers=headers, stream=Pieces(chunks), request=request)


class Pieces(httpx.AsyncByteStream):
    """A body that was read whole and keeps the pieces it came in."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def pause(attempt: int, asked: float | None, draw: float) -> float:
    """Return the seconds to wait after failed attempt ``attempt`` (from 0)."""
    if asked is not None:
        return min(asked, CAP_SECONDS)
    return draw * min(CAP_SECONDS, BASE_SECONDS * 2.0**attempt)


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
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
