"""A transport over pools of one connection."""

from __future__ import annotations

import os
import ssl
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from errno import ENOTDIR
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass

import httpx

from reflact.errors import ConfigError
from reflact.llm.cache_keys import strip_credentials

# How long a connection may be idle before it is closed, as in httpx; servers close theirs at some
# time too.
KEEP_ALIVE_SECONDS = 5.0

# The most idle pools that the end of one call closes, which takes one to two milliseconds.
MAX_CLOSED = 16


class PooledTransport(httpx.AsyncBaseTransport):
    """Sends each request in flight through a pool of its own, so that a pool has one connection.

    A pool of httpcore scans all its connections for each call. With 500 calls in flight, pools of
    16 connections take 1.7 times the processor time of pools of one. Pools that a burst of calls
    has left idle are closed by later calls.

    Network connections go through the proxies that ``HTTP_PROXY``, ``HTTPS_PROXY`` and
    ``ALL_PROXY`` name, but for the hosts of ``NO_PROXY`` and this machine.

    Args:
        pool: Opens a pool; None opens pools of network connections that share one store of
            certificates.
        keep_alive: Seconds after which an idle pool may be closed.

    Raises:
        ConfigError: Without ``pool``: ``SSL_CERT_FILE`` or a proxy's variable has a wrong value.
    """

    def __init__(
        self,
        pool: Callable[[], httpx.AsyncBaseTransport] | None = None,
        *,
        keep_alive: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        self._proxies = read_proxies() if pool is None else {}
        self._open = _make_opener() if pool is None else lambda _: pool()
        self._keep_alive = keep_alive
        self._pools: set[httpx.AsyncBaseTransport] = set()
        self._idle: defaultdict[str | None, deque[tuple[httpx.AsyncBaseTransport, float]]] = (
            defaultdict(deque)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; it occupies its pool until the answer is closed."""
        proxy = find_proxy(request.url, self._proxies)
        idle = self._idle[proxy]
        if idle:
            pool, _ = idle.pop()
        else:
            pool = self._open(proxy)
            self._pools.add(pool)
        try:
            response = await pool.handle_async_request(request)
        except BaseException as error:
            idle.append((pool, time.monotonic()))
            if proxy is not None and isinstance(error, httpx.ConnectError | httpx.ProxyError):
                named = (
                    f"{error or type(error).__name__} (through the proxy "
                    f"{strip_credentials(proxy)})"
                )
                raise type(error)(named) from error
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, partial(self._free, pool, idle))
        return response

    async def _free(
        self, pool: httpx.AsyncBaseTransport, idle: deque[tuple[httpx.AsyncBaseTransport, float]]
    ) -> None:
        """Make a pool idle, and close some that have been idle for the longest time."""
        now = time.monotonic()
        expired: list[httpx.AsyncBaseTransport] = []
        while idle and len(expired) < MAX_CLOSED and now - idle[0][1] >= self._keep_alive:
            expired.append(idle.popleft()[0])
        idle.append((pool, now))
        for each in expired:
            await each.aclose()
            self._pools.discard(each)

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in list(self._pools):
            await pool.aclose()


class _Stream(httpx.AsyncByteStream):
    """A body in transfer; closing it frees its pool once."""

    def __init__(self, inner: httpx.AsyncByteStream, free: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._free: Callable[[], Awaitable[None]] | None = free

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._inner.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            free = self._free
            self._free = None
            if free is not None:
                await free()


def _make_opener() -> Callable[[str | None], httpx.AsyncBaseTransport]:
    trusted = load_certificates()
    limits = httpx.Limits(max_connections=None)
    return lambda proxy: httpx.AsyncHTTPTransport(verify=trusted, limits=limits, proxy=proxy)


def load_certificates() -> ssl.SSLContext:
    """Return the certificates that ``SSL_CERT_FILE`` or ``SSL_CERT_DIR`` names, or certifi's.

    Raises:
        ConfigError: The variable names no certificates.
    """
    name = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), None)
    if name is None:
        return _load_usual_certificates()
    path = Path(os.environ[name])
    try:
        if name == "SSL_CERT_DIR" and not path.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        return httpx.create_ssl_context()
    except OSError as error:
        raise ConfigError(
            f"{name} names {path}, from which no certificates can be read "
            f"({error.strerror or error}); correct the variable, or remove it to trust the usual "
            "authorities"
        ) from None


@cache
def _load_usual_certificates() -> ssl.SSLContext:
    """Return certifi's certificates, which take 35 ms to read and do not change."""
    return httpx.create_ssl_context()


def read_proxies() -> dict[str, str]:
    """Return the proxies that the environment names, by scheme or ``all``.

    Raises:
        ConfigError: A value is no address of a proxy, or needs a package that is not installed.
    """
    proxies = {
        scheme: value if "://" in value else f"http://{value}"
        for scheme, value in getproxies_environment().items()
        if scheme in {"http", "https", "all"}
    }
    for scheme, value in proxies.items():
        try:
            httpx.AsyncHTTPTransport(proxy=value, verify=False)
        except (ValueError, ImportError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"{scheme.upper()}_PROXY is {value.rpartition('@')[2]!r}, which cannot be used as "
                f"a proxy: {str(error).splitlines()[0]}; correct it, or remove it"
            ) from None
    return proxies


def find_proxy(url: httpx.URL, proxies: Mapping[str, str]) -> str | None:
    """Return the proxy for an address; None for this machine, and for hosts that need none."""
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None or url.host == "localhost" or _is_loopback(url.host):
        return None
    place = url.host if url.port is None else f"{url.host}:{url.port}"
    return None if proxy_bypass(place) else proxy


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
