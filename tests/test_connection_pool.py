"""The network: proxies and certificates of the environment."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler

import httpx
import pytest

from reflact.errors import ConfigError
from reflact.llm.connection_pool import PooledTransport
from served import asked_of, send, serving


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
