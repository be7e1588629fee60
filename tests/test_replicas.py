"""Several addresses of a role: the least busy one is asked, and replies have the same keys wherever they come from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import httpx
import pytest

from doubles import PROMPT, RUN, completion, config, opened
from reflact.concurrency import fan_out
from reflact.config.loading import config_identity, load_config
from reflact.errors import AccessDenied, ConfigError, ProviderDown
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.llm.rate_limit import LimitChange
from reflact.messages import CallId, Text
from reflact.testing import InMemoryRunStore

pytestmark = pytest.mark.virtual_time

ONE, TWO = "http://one.test:8001/v1", "http://two.test:8002/v1"


class Servers(httpx.AsyncBaseTransport):
    """Servers by host, each with seconds for an answer, or with another answer or failure.

    Args:
        together: No request is answered before so many have come.
        hosts: The seconds, answer or failure of each host.

    Attributes:
        asked: The number of requests of each host.
        highest: The most requests that each host had at a time.
        requests: All requests.
    """

    def __init__(self, *, together: int = 1, **hosts: float | httpx.Response | Exception) -> None:
        self.hosts = hosts
        self._together = together
        self._complete = anyio.Event()
        self.asked: Counter[str] = Counter()
        self.highest: Counter[str] = Counter()
        self.requests: list[httpx.Request] = []
        self._in_flight: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host.removesuffix(".test")
        self.asked[host] += 1
        self.requests.append(request)
        self._in_flight[host] += 1
        self.highest[host] = max(self.highest[host], self._in_flight[host])
        if len(self.requests) >= self._together:
            self._complete.set()
        try:
            await self._complete.wait()
            answer = self.hosts[host]
            await anyio.sleep(answer if isinstance(answer, float) else 0.1)
        finally:
            self._in_flight[host] -= 1
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)
        return completion(f"from {host}")


async def ask(
    servers: Servers,
    calls: int,
    *,
    store: InMemoryRunStore | None = None,
    limits: list[LimitChange] | None = None,
    **settings: Any,
) -> list[str]:
    """Ask some calls at once, and return their replies."""
    store = store or await opened()
    chosen = config(**{"base_url": [ONE, TWO], "concurrency": 4, **settings})
    account = Account(RUN, store, store.decision_log(RUN))
    note = (lambda change: None) if limits is None else limits.append
    async with Client(chosen, "target", account, transport=servers, on_limit=note) as client:
        client._openai._platform = "Linux"  # which it finds on a thread, while virtual time goes on

        async def one(number: int) -> str:
            call_id = CallId(role="target", purpose="rollout", rollout="r", number=number)
            return (await client.ask(PROMPT, Text, call_id=call_id)).value.text

        return list(await fan_out(one, range(calls)))


async def test_the_least_busy_server_is_asked() -> None:
    """Equal servers share the calls evenly, each with its own limit of requests in flight."""
    servers = Servers(one=1.0, two=1.0, together=8)
    begun = anyio.current_time()
    assert len(await ask(servers, 40)) == 40
    assert servers.asked == {"one": 20, "two": 20}
    assert servers.highest == {"one": 4, "two": 4}
    assert anyio.current_time() - begun == pytest.approx(5.0, abs=0.5)


async def test_a_fast_server_takes_more_calls() -> None:
    """No call waits at a slow server while a fast one is idle."""
    servers = Servers(one=9.0, two=1.0)
    begun = anyio.current_time()
    await ask(servers, 40)
    assert servers.asked == {"one": 4, "two": 36}
    assert anyio.current_time() - begun == pytest.approx(9.0, abs=0.5)


async def test_a_dead_server_costs_no_call() -> None:
    """A server that cannot be reached is passed over without a delay, and tried again from time to time."""
    servers = Servers(one=httpx.ConnectError("refused"), two=1.0)
    begun = anyio.current_time()
    assert set(await ask(servers, 80)) == {"from two"}
    assert servers.asked["one"] <= 4 + 3  # those that left at once, and a probe every ten seconds
    assert anyio.current_time() - begun < 25.0


async def test_a_server_that_pauses_leaves_its_calls_to_others() -> None:
    """After 429 from one server, the others are asked without a pause."""
    busy = httpx.Response(429, headers={"retry-after": "30"}, json={"error": {"message": "slow down"}})
    servers, limits = Servers(one=busy, two=1.0), list[LimitChange]()
    begun = anyio.current_time()
    assert set(await ask(servers, 40, limits=limits)) == {"from two"}
    assert anyio.current_time() - begun < 15.0
    assert {change.endpoint for change in limits} == {"http://one.test:8001/v1"}


@pytest.mark.parametrize("broken", [401, 503, None], ids=["key", "overloaded", "unreachable"])
async def test_a_role_fails_if_no_server_serves_it(broken: int | None) -> None:
    """If all servers refuse or cannot be reached, the call fails as it does with one."""
    answer = httpx.ConnectError("refused") if broken is None else httpx.Response(broken, text="no")
    with pytest.raises(AccessDenied if broken == 401 else ProviderDown):
        await ask(Servers(one=answer, two=answer), 1, max_retries=2)


async def test_a_reply_is_found_whichever_server_gave_it() -> None:
    """Keys have the first address, so replies of all servers are found, and replicas may come and go."""
    store = await opened()
    servers = Servers(one=1.0, two=1.0, together=8)
    replies = await ask(servers, 8, store=store)
    assert {*replies} == {"from one", "from two"}
    for addresses in (ONE, [ONE, "http://three.test/v1"]):
        silent = Servers()
        assert await ask(silent, 8, store=store, base_url=addresses) == replies
        assert not silent.asked


async def test_each_server_gets_the_key_and_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica gets the same request as the first server would, with its own host in the header."""
    monkeypatch.setenv("REFLACT_TEST_KEY", "sk-replica-0123456789")
    servers = Servers(one=1.0, two=1.0, together=2)
    await ask(servers, 2, api_key_env="REFLACT_TEST_KEY")
    assert [r.url.path for r in servers.requests] == ["/v1/chat/completions"] * 2
    assert {r.headers["host"] for r in servers.requests} == {"one.test:8001", "two.test:8002"}
    assert {r.headers["authorization"] for r in servers.requests} == {"Bearer sk-replica-0123456789"}


async def test_replicas_are_no_part_of_the_identity() -> None:
    """A list of addresses has the identity of its first one, and roles inherit it whole."""
    one, two = (
        load_config({"models": {"target": {"model": "m", "base_url": url}}}) for url in (ONE, [ONE, TWO])
    )
    assert config_identity(one) == config_identity(two)
    assert two.models.target.base_url == two.models.optimizer.base_url == ONE
    assert two.models.target.replicas == two.models.optimizer.replicas == (TWO,)
    other = {
        "target": {"model": "m", "base_url": [ONE, TWO]},
        "optimizer": {"base_url": "http://big.test/v1"},
    }
    assert load_config({"models": other}).models.optimizer.replicas == ()
    assert load_config(two.model_dump(mode="json")) == two


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"base_url": [ONE, "http://two.test/api"]}, "have the path of the first one"),
        ({"base_url": [ONE, ONE]}, "must differ"),
        ({"base_url": [ONE, "http://user:pass@two.test/v1"]}, "a host, a port"),
        ({"base_url": []}, "base_url"),
        ({"base_url": [ONE, TWO], "api": "pydantic_ai"}, "OpenAI-compatible"),
    ],
)
async def test_unfit_addresses_are_refused(settings: dict[str, Any], reason: str) -> None:
    """Addresses of a role differ in their host or port alone, and none has a password."""
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config({"models": {"target": {"model": "m", **settings}}})
    assert "user:pass" not in str(caught.value)
