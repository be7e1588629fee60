"""A transport over pools of one connection."""

from __future__ import annotations

import os
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from ipaddress import ip_address
from urllib.request import getproxies_environment, proxy_bypass

import httpx

from reflact.errors import ConfigError
from reflact.llm.cache_keys import strip_credentials


class PooledTransport(httpx.AsyncBaseTransport):
    """Sends each request in flight through a pool of its own, so that a pool has one connection.

    A pool of httpcore scans all its connections for each call. With 500 calls in flight, pools of
    16 connections take 1.7 times the processor time of pools of one. Calls go through the proxies
    that the environment names, but for the hosts of ``NO_PROXY`` and this machine. ``pool`` opens a
    pool in place of one of network connections.

    Raises:
        ConfigError: Without ``pool``: ``SSL_CERT_FILE`` or a proxy's variable has a wrong value.
    """

    def __init__(self, pool: Callable[[], httpx.AsyncBaseTransport] | None = None) -> None:
        self._open_pool = pool
        if pool is None:
            self._proxies = read_proxies()
            self._trusted = load_certificates()
        self._pools: list[httpx.AsyncBaseTransport] = []
        self._idle: defaultdict[str | None, list[httpx.AsyncBaseTransport]] = defaultdict(list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; it occupies its pool until the answer is closed."""
        proxy = None if self._open_pool else find_proxy(request.url, self._proxies)
        idle = self._idle[proxy]
        pool = idle.pop() if idle else self._open(proxy)
        try:
            response = await pool.handle_async_request(request)
        except BaseException as error:
            idle.append(pool)
            if proxy is not None and isinstance(error, httpx.ConnectError | httpx.ProxyError):
                reason = str(error) or type(error).__name__
                through = f"{reason} (through the proxy {strip_credentials(proxy)})"
                raise type(error)(through) from error
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, lambda: idle.append(pool))
        return response

    def _open(self, proxy: str | None) -> httpx.AsyncBaseTransport:
        if self._open_pool is not None:
            pool = self._open_pool()
        else:
            limits = httpx.Limits(max_connections=None)
            pool = httpx.AsyncHTTPTransport(verify=self._trusted, limits=limits, proxy=proxy)
        self._pools.append(pool)
        return pool

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.aclose()


class _Stream(httpx.AsyncByteStream):
    """A body in transfer; closing it frees its pool once."""

    def __init__(self, inner: httpx.AsyncByteStream, free: Callable[[], None]) -> None:
        self._inner = inner
        self._free: Callable[[], None] | None = free

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._inner.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            free = self._free
            self._free = None
            if free is not None:
                free()


def load_certificates() -> ssl.SSLContext:
    """Return the certificates that ``SSL_CERT_FILE`` or ``SSL_CERT_DIR`` names, or certifi's.

    Raises:
        ConfigError: The variable names no certificates.
    """
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        path = os.environ.get(name)
        if path:
            try:
                return httpx.create_ssl_context()
            except OSError as error:
                raise ConfigError(
                    f"{name} names {path}, from which no certificates can be read "
                    f"({error.strerror or error}); correct the variable, or remove it"
                ) from None
    return _load_usual_certificates()


@cache
def _load_usual_certificates() -> ssl.SSLContext:
    """Return certifi's certificates, which take 35 ms to read and do not change."""
    return httpx.create_ssl_context()


def read_proxies() -> dict[str, str]:
    """Return the proxies that the environment names, by scheme or ``all``.

    Raises:
        ConfigError: A value is no address of a proxy, or needs a package that is not installed.
    """
    proxies = {}
    for scheme, value in getproxies_environment().items():
        if scheme in {"http", "https", "all"}:
            proxies[scheme] = value if "://" in value else f"http://{value}"
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
