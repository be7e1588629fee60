"""A transport that injects faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Literal, TypeAlias

import httpx
from anyio.lowlevel import checkpoint
from pydantic import Field

from reflact.types import FrozenModel


class StatusFault(FrozenModel):
    """The server answers with an error status and does no work.

    Args:
        status: The HTTP status.
        headers: Response headers, such as ``retry-after``.
        body: The response's text.
    """

    kind: Literal["status"] = "status"
    status: int = Field(ge=100, le=599)
    headers: tuple[tuple[str, str], ...] = ()
    body: str = '{"error": {"message": "injected"}}'


class ConnectFault(FrozenModel):
    """No connection can be made; the server never sees the request."""

    kind: Literal["connect"] = "connect"


class TimeoutFault(FrozenModel):
    """The server does the work, but its answer does not arrive in time."""

    kind: Literal["timeout"] = "timeout"


class TruncationFault(FrozenModel):
    """The answer begins and breaks off.

    Args:
        after: Bytes of the body that arrive.
        silent: Whether the body then ends like a complete one, without a connection error.
    """

    kind: Literal["truncation"] = "truncation"
    after: int = Field(0, ge=0)
    silent: bool = False


Fault: TypeAlias = StatusFault | ConnectFault | TimeoutFault | TruncationFault
"""A fault of a request."""


class FaultyTransport(httpx.AsyncBaseTransport):
    """Passes requests on to another transport and injects faults into some.

    Args:
        inner: Serves the requests.
        faults: Called with each request and its number (0 for the first that arrives); returns the fault
            to inject, or None.
    """

    def __init__(
        self, inner: httpx.AsyncBaseTransport, faults: Callable[[httpx.Request, int], Fault | None]
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._arrived = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Serve or break one request.

        Raises:
            httpx.ConnectError: The fault is a ``ConnectFault``.
            httpx.ReadTimeout: The fault is a ``TimeoutFault``.
        """
        await checkpoint()
        number = self._arrived
        self._arrived += 1
        fault = self._faults(request, number)
        if isinstance(fault, ConnectFault):
            raise httpx.ConnectError("injected: no connection", request=request)
        if isinstance(fault, StatusFault):
            return httpx.Response(fault.status, headers=list(fault.headers), text=fault.body, request=request)
        response = await self._inner.handle_async_request(request)
        if isinstance(fault, TimeoutFault):
            await response.aclose()
            raise httpx.ReadTimeout("injected: no answer in time", request=request)
        if isinstance(fault, TruncationFault):
            return _truncate_response(response, fault, request)
        return response

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()


def _truncate_response(
    response: httpx.Response, fault: TruncationFault, request: httpx.Request
) -> httpx.Response:
    headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"content-length"]
    assert isinstance(response.stream, httpx.AsyncByteStream)
    stream = _TruncatedStream(response.stream, fault, request)
    return httpx.Response(response.status_code, headers=headers, stream=stream)


class _TruncatedStream(httpx.AsyncByteStream):
    def __init__(self, whole: httpx.AsyncByteStream, fault: TruncationFault, request: httpx.Request) -> None:
        self._whole = whole
        self._fault = fault
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._fault.after
        async for chunk in self._whole:
            if left > 0:
                yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                break
        if not self._fault.silent:
            raise httpx.RemoteProtocolError("injected: the connection broke", request=self._request)

    async def aclose(self) -> None:
        await self._whole.aclose()
