"""A transport over small pools of connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx

CALLS_PER_POOL = 16
"""Calls in flight in one pool; more would slow each call."""


class PooledTransport(httpx.AsyncBaseTransport):
    """Sends requests through as many pools of connections as the calls in flight need.

    A pool of httpcore scans all its connections for each call, so small pools take far less processor time.

    Args:
        pool: Opens a pool; None opens pools of network connections that share one store of certificates.
    """

    def __init__(self, pool: Callable[[], httpx.AsyncBaseTransport] | None = None) -> None:
        self._open = pool or _make_opener()
        self._pools: list[_Pool] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; it occupies its pool until the answer is closed."""
        pool = next((each for each in self._pools if each.in_flight < CALLS_PER_POOL), None)
        if pool is None:
            pool = _Pool(self._open())
            self._pools.append(pool)
        pool.in_flight += 1
        try:
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            pool.in_flight -= 1
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, pool)
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.transport.aclose()


@dataclass
class _Pool:
    transport: httpx.AsyncBaseTransport
    in_flight: int = 0


class _Stream(httpx.AsyncByteStream):
    """A body in transfer; closing it frees its pool once."""

    def __init__(self, inner: httpx.AsyncByteStream, pool: _Pool) -> None:
        self._inner = inner
        self._pool: _Pool | None = pool

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            yield piece

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            if self._pool is not None:
                self._pool.in_flight -= 1
                self._pool = None


def _make_opener() -> Callable[[], httpx.AsyncBaseTransport]:
    trusted = httpx.create_ssl_context()
    limits = httpx.Limits(max_connections=None)
    return lambda: httpx.AsyncHTTPTransport(verify=trusted, limits=limits)
