"""The network: each call in flight has a pool, and pools come back whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler

import anyio
import httpx
import pytest

from reflact.concurrency import open_task_group
from reflact.errors import ConfigError
from reflact.llm.connection_pool import PooledTransport
from served import asked_of, send, serving


class Body(httpx.AsyncByteStream):
    """A body in two pieces."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"


class Pool(httpx.AsyncBaseTransport):
    """Answers once it is let, and counts what is sent and whether it was closed."""

    def __init__(self, let: anyio.Event) -> None:
        self._let = let
        self.sent = 0
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        await self._let.wait()
        if request.method == "PUT":
            raise httpx.ReadError("cut")
        return httpx.Response(200, stream=Body())

    async def aclose(self) -> None:
        self.closed = True


class Pools(list[Pool]):
    """Opens pools and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.let = anyio.Event()

    def open(self) -> Pool:
        self.append(Pool(self.let))
        return self[-1]


def request(method: str = "POST") -> httpx.Request:
    return httpx.Request(method, "http://endpoint.test/v1")


async def test_pools_are_opened_as_they_are_needed_and_closed_together() -> None:
    pools, read = Pools(), list[bytes]()
    async with PooledTransport(pools.open) as network:

        async def one() -> None:
            response = await network.handle_async_request(request())
            read.append(await response.aread())
            await response.aclose()

        async with open_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            assert [pool.sent for pool in pools] == [1, 1, 1]
            pools.let.set()
        for _ in range(4):
            await one()
        assert sum(pool.sent for pool in pools) == 7
        assert len(pools) == 3
    assert read == [b"ab"] * 7
    assert all(pool.closed for pool in pools)


@pytest.mark.parametrize("how", ["closed", "closed twice", "failed", "cancelled"])
async def test_a_pool_comes_back_once(how: str) -> None:
    pools = Pools()
    if how != "cancelled":
        pools.let.set()
    network = PooledTransport(pools.open)
    for _ in range(3):
        if how == "failed":
            with pytest.raises(httpx.ReadError):
                await network.handle_async_request(request("PUT"))
        elif how == "cancelled":
            with anyio.move_on_after(0):
                await network.handle_async_request(request())
        else:
            response = await network.handle_async_request(request())
            await response.aclose()
            if how == "closed twice":
                await response.aclose()
    assert len(pools) == 1
    pools.let.set()
    for _ in range(2):
        await network.handle_async_request(request())
    assert len(pools) == 2


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without variables of proxies and certificates."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


async def test_a_proxy_of_the_environment_is_used(environment: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        asked_of(handler)
        send(handler, {})

    with serving(answer) as url:
        port = url.removesuffix("/v1").rpartition(":")[2]
        environment.setenv("HTTP_PROXY", f"user:secret@127.0.0.1:{port}")
        environment.setenv("NO_PROXY", "direct.invalid")
        async with PooledTransport() as network:
            for host in ("api.invalid", f"127.0.0.1:{port}"):
                call = httpx.Request("POST", f"http://{host}/v1", json={})
                assert (await network.handle_async_request(call)).status_code == 200
            with pytest.raises(httpx.ConnectError):
                await network.handle_async_request(httpx.Request("POST", "http://direct.invalid/v1", json={}))
    assert asked == ["http://api.invalid/v1", "/v1"]


async def test_a_proxy_that_cannot_be_reached_is_named(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ALL_PROXY", "http://user:secret@127.0.0.1:9")
    async with PooledTransport() as network:
        with pytest.raises(httpx.ConnectError, match=r"through the proxy http://127\.0\.0\.1:9\b") as failure:
            await network.handle_async_request(httpx.Request("GET", "https://api.invalid/"))
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ALL_PROXY", "http://host:port", "ALL_PROXY is .* cannot be used as a proxy"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem", r"SSL_CERT_FILE names /nowhere/ca\.pem, .*No such file"),
    ],
)
async def test_a_wrong_variable_is_one_sentence(
    environment: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as refusal:
        PooledTransport()
    assert "\n" not in str(refusal.value)
