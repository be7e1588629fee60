"""Limits of an endpoint: who waits for what, how fast it is asked, and when a role is asked no more."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.concurrency import fan_out, open_task_group
from reflact.config.models import ModelConfig
from reflact.llm import rate_limit
from reflact.llm.rate_limit import (
    MINUTE_SECONDS,
    PATIENCE_SECONDS,
    Endpoint,
    EndpointClient,
    LimitChange,
    endpoint_for,
)
from virtual_time import run

pytestmark = pytest.mark.virtual_time

WIDE = {"concurrency": 1000}


def limits(**keys: Any) -> ModelConfig:
    """Return settings of a role."""
    return ModelConfig(model="m", base_url="http://endpoint.test/v1", api_key_env=None, **keys)


async def call(
    client: EndpointClient,
    done: list[float],
    *,
    tokens: int = 1,
    seconds: float = 0.0,
    status: int | None = 200,
    retry_after: float | None = None,
    took: int | None = None,
) -> None:
    """Make a call and note when it was admitted."""
    async with client.admit(tokens) as slot:
        done.append(anyio.current_time())
        await anyio.sleep(seconds)
        client.endpoint.observe(slot, status, retry_after, took)


async def test_no_more_calls_are_in_flight_than_the_strictest_role_allows() -> None:
    """Two roles of one endpoint share its slots, and the bound is reached."""
    endpoint, highest = Endpoint("e"), list[int]()

    async def one(client: EndpointClient) -> None:
        async with client.admit(1):
            highest.append(endpoint.in_flight)
            await anyio.sleep(1)

    strict, wide = EndpointClient(endpoint, limits(concurrency=3)), EndpointClient(endpoint, limits(**WIDE))
    with strict, wide:
        await fan_out(one, (strict, wide) * 10)
    assert (max(highest), len(highest)) == (3, 20)


async def test_calls_are_admitted_in_the_order_in_which_they_asked() -> None:
    """A large call is not overtaken by small ones that would fit."""
    endpoint, order = Endpoint("e"), list[int]()

    async def one(client: EndpointClient, tokens: int) -> None:
        async with client.admit(tokens) as slot:
            order.append(tokens)
            client.endpoint.observe(slot, 200, None, tokens)

    with EndpointClient(endpoint, limits(tokens_per_minute=100, **WIDE)) as client:
        async with open_task_group() as tasks:
            for tokens in (60, 90, 10, 20, 30):
                tasks.start_soon(one, client, tokens)
    assert order == [60, 90, 10, 20, 30]


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_cancelled_calls_leave_no_slot_behind(seed: int, slots: int) -> None:
    """Wherever calls are cancelled, waiting or in flight, all slots are free in the end."""

    async def main() -> tuple[int, int]:
        draw = random.Random(seed)
        endpoint = Endpoint("e", draw=draw.random)

        async def one(client: EndpointClient) -> None:
            with anyio.move_on_after(draw.choice([0.0, 1.0, 2.0, 2.5, math.inf])):
                await anyio.sleep(draw.choice([0.0, 1.0, 2.0]))
                async with client.admit(1) as slot:
                    await anyio.sleep(draw.choice([0.0, 1.0, 2.0]))
                    client.endpoint.observe(slot, draw.choice([200, 429, None]), None, 1)

        with EndpointClient(endpoint, limits(concurrency=slots, requests_per_minute=600)) as client:
            await fan_out(one, [client] * 30)
            last: list[float] = []
            for _ in range(slots + 1):
                await call(client, last)
        return endpoint.in_flight, len(last) - slots

    assert run(main) == (0, 1)


@pytest.mark.parametrize("most", [1, 2, 7, 59, 61, 700])
async def test_no_minute_holds_more_requests_than_allowed(most: int) -> None:
    """Counted over any sixty seconds, with calls always waiting."""
    done: list[float] = []
    with EndpointClient(Endpoint("e"), limits(requests_per_minute=most, **WIDE)) as client:
        for _ in range(3 * most + 3):
            await call(client, done)
    assert all(later - sooner > MINUTE_SECONDS for sooner, later in zip(done, done[most:], strict=False))
    assert done[-1] <= 1.02 * MINUTE_SECONDS * (3 + 3 / most)


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 120)), min_size=1, max_size=60))
def test_no_minute_holds_more_tokens_than_allowed(calls: list[tuple[int, int]]) -> None:
    """No call goes while its estimate does not fit beside what the last sixty seconds took."""

    async def main() -> list[tuple[float, int, int]]:
        endpoint, seen = Endpoint("e"), list[tuple[float, int, int]]()
        with EndpointClient(endpoint, limits(tokens_per_minute=100, **WIDE)) as client:
            for estimate, took in calls:
                async with client.admit(estimate) as slot:
                    seen.append((anyio.current_time(), estimate, took))
                    await anyio.sleep(1)
                    client.endpoint.observe(slot, 200, None, took)
        return seen

    seen = run(main)
    for at, estimate, _ in seen:
        before = sum(took for then, _, took in seen if at - MINUTE_SECONDS <= then < at)
        assert before == 0 or before + estimate <= 100


async def test_estimates_are_corrected_by_what_calls_took() -> None:
    """A cautious estimate holds others back only until the answer says what was taken."""
    endpoint, done = Endpoint("e"), list[float]()
    with EndpointClient(endpoint, limits(tokens_per_minute=100, **WIDE)) as client:
        async with open_task_group() as tasks:
            tasks.start_soon(lambda: call(client, done, tokens=90, seconds=2, took=5))
            tasks.start_soon(lambda: call(client, done, tokens=90, seconds=2, took=5))
    assert done == [0.0, 2.0]


@pytest.mark.parametrize("status", [429, 503])
async def test_an_endpoint_backs_off_as_one(status: int) -> None:
    """Ten refusals of calls that were in flight together are one back-off, which every role waits for."""
    told = list[LimitChange]()
    endpoint, done = Endpoint("e", draw=lambda: 1.0), list[float]()
    with (
        EndpointClient(endpoint, limits(**WIDE), on_limit=told.append) as one,
        EndpointClient(endpoint, limits(**WIDE)) as other,
    ):
        await fan_out(lambda _: call(one, [], seconds=1, status=status), range(10))
        await call(other, done)
    assert done == [1.5]
    assert told == [LimitChange("e", status, 0.5, 5.0)]


async def test_the_endpoint_is_not_asked_before_the_time_it_names() -> None:
    """The latest time that any answer names counts."""
    endpoint, done = Endpoint("e", draw=lambda: 0.0), list[float]()
    with EndpointClient(endpoint, limits(**WIDE)) as client:
        await fan_out(lambda asked: call(client, [], status=429, retry_after=asked), (20.0, 60.0, 40.0))
        await call(client, done)
    assert done == [60.0]


@pytest.mark.parametrize("asked", [None, 0.0, PATIENCE_SECONDS + 1])
async def test_without_a_sensible_time_fruitless_back_offs_double(asked: float | None) -> None:
    """Each back-off after which nothing was served is twice as long, up to a cap; an answer ends that."""
    told = list[LimitChange]()
    endpoint = Endpoint("e", draw=lambda: 1.0)
    with EndpointClient(endpoint, limits(**WIDE), on_limit=told.append) as client:
        for _ in range(8):
            await call(client, [], status=503, retry_after=asked)
        await call(client, [])
        await call(client, [], status=503, retry_after=asked)
    assert [change.seconds for change in told] == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 0.5])


async def test_a_caller_that_was_only_refused_goes_on_when_it_is_answered() -> None:
    """Refusals without an answer between them lengthen the pauses, and do not lower the rate without an end."""
    endpoint, done = Endpoint("e", draw=lambda: 1.0), list[float]()
    with EndpointClient(endpoint, limits(**WIDE)) as client:
        for _ in range(100):
            await call(client, [], status=429)
        for _ in range(10):
            await call(client, done)
    assert done[-1] - done[0] <= 20


class Server:
    """Allows so many requests in each window of so many seconds, counted as they arrive."""

    def __init__(self, most: float, seconds: float, *, sliding: bool) -> None:
        self._most, self._seconds, self._sliding = most, seconds, sliding
        self._served: deque[float] = deque()

    def refuses_for(self, now: float) -> float | None:
        """Serve a request, or return for how many seconds none will be."""
        start = now - self._seconds if self._sliding else now // self._seconds * self._seconds
        while self._served and (self._served[0] <= start if self._sliding else self._served[0] < start):
            self._served.popleft()
        if len(self._served) < self._most:
            self._served.append(now)
            return None
        return (self._served[0] if self._sliding else start) + self._seconds - now


def load(
    server: Server,
    *,
    seconds: float,
    warm: float,
    says: Callable[[float], float | None],
    slots: int = 64,
) -> tuple[float, float]:
    """Keep an endpoint busy; return calls served a second and the share refused, both after the warm-up."""
    heard: list[tuple[float, bool]] = []

    async def worker(client: EndpointClient, draw: random.Random) -> None:
        while anyio.current_time() < seconds:
            async with client.admit(1) as slot:
                await anyio.sleep(draw.uniform(0.005, 0.015))
                wait = server.refuses_for(anyio.current_time())
                await anyio.sleep(draw.uniform(0.02, 0.2) if wait is None else 0.005)
                heard.append((anyio.current_time(), wait is None))
                client.endpoint.observe(
                    slot, 200 if wait is None else 429, None if wait is None else says(wait), None
                )

    async def main() -> None:
        draw = random.Random(7)
        with EndpointClient(Endpoint("e", draw=draw.random), limits(concurrency=slots)) as client:
            async with open_task_group() as tasks:
                for _ in range(2 * slots):
                    tasks.start_soon(worker, client, draw)

    run(main)
    late = [served for at, served in heard if warm <= at < seconds]
    return sum(late) / (seconds - warm), 1 - sum(late) / len(late)


SERVERS: dict[str, Callable[[float], Server]] = {
    "sliding": lambda rate: Server(rate, 1.0, sliding=True),
    "fixed": lambda rate: Server(rate, 1.0, sliding=False),
}
SAYS: dict[str, Callable[[float], float | None]] = {
    "nothing": lambda wait: None,
    "seconds": lambda wait: float(math.ceil(wait)),
    "exactly": lambda wait: wait,
}


CASES = [(50, server, says) for server in SERVERS for says in SAYS]
CASES += [(200, "sliding", "nothing"), (200, "fixed", "seconds")]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "server", "says"), CASES)
def test_the_sustainable_rate_is_found(rate: int, server: str, says: str) -> None:
    """From second 30 on, most of what a server allows; less if it names whole seconds, which are waited for."""
    served, refused = load(SERVERS[server](rate), seconds=75, warm=30, says=SAYS[says])
    assert served >= (0.75 if says == "seconds" else 0.85) * rate
    assert refused <= 0.05


@pytest.mark.parametrize("rate", [1, 5])
def test_a_slow_server_refuses_few_calls(rate: int) -> None:
    """A retry is sent five times, so most calls of a queue are answered."""
    served, refused = load(SERVERS["sliding"](rate), seconds=300, warm=60, says=SAYS["nothing"], slots=16)
    assert served >= 0.8 * rate
    assert refused <= 0.25


@pytest.mark.parametrize(
    ("workers", "keys"), [(9, {"concurrency": 1}), (9, {"requests_per_minute": 60}), (1, {})]
)
async def test_a_rate_that_holds_nothing_back_does_not_grow(workers: int, keys: dict[str, int]) -> None:
    """Where slots, the user's ceiling or a lack of calls keep it from being reached, nothing is learned."""
    endpoint = Endpoint("e", draw=lambda: 1.0)
    with EndpointClient(endpoint, limits(**WIDE)) as client:
        await fan_out(lambda _: call(client, [], seconds=1, status=429), range(20))
    await anyio.sleep(5)
    found = endpoint.rate.rate

    async def worker(client: EndpointClient) -> None:
        for _ in range(10):
            await call(client, [], seconds=1)

    with EndpointClient(endpoint, limits(**WIDE | keys)) as client:
        await fan_out(worker, [client] * workers)
    assert (found, endpoint.rate.rate) == (10.0, 10.0)


def test_one_address_and_key_are_one_endpoint_in_a_loop() -> None:
    """Spelling does not matter, paths, ports and keys do; another loop has endpoints of its own."""

    def at(address: str, secret: str | None = None) -> Endpoint:
        return endpoint_for(ModelConfig(model="m", base_url=address), secret).endpoint

    async def main() -> tuple[int, int, Endpoint]:
        same = {at(a) for a in ("https://E.test/v1", "https://e.test:443/v1/")}
        others = {at(a) for a in ("http://e.test/v1", "https://e.test:8443/v1", "https://e.test/v2")}
        keys = {at("https://e.test/v1", key) for key in ("key-1", "key-2", "key-1")}
        return len(same), len(same | others | keys), at("https://e.test/v1")

    first, second = run(main), run(main)
    assert first[:2] == second[:2] == (1, 6)
    assert first[2] is not second[2]


def test_a_named_group_shares_limits_whatever_the_keys() -> None:
    """Without a name, a function of tokens stands for all its tokens, and no key itself is remembered."""

    async def token() -> str:
        raise AssertionError

    async def main() -> tuple[int, int, str]:
        named = ModelConfig(model="m", limits_group="team")
        tokens = ModelConfig(model="m", key=token, auth="token")
        group = {endpoint_for(named, key).endpoint for key in ("key-1", "key-2", None)}
        owner = {endpoint_for(tokens, key).endpoint for key in ("key-3", "key-4")}
        endpoint_for(limits(), "secret-key-5")
        return len(group), len(owner), repr(rate_limit._ENDPOINTS.get())

    shared, owned, remembered = run(main)
    assert (shared, owned) == (1, 1)
    assert "key-" not in remembered


def tenant(key: str, refused: Callable[[int], bool], calls: int, **keys: Any) -> Callable[[], Any]:
    """Return what makes a tenant's calls, of a second each, and returns how long they took."""

    async def work() -> float:
        with endpoint_for(limits(**keys), key) as client:

            async def one(number: int) -> None:
                attempt = 0
                while refused(number + attempt) and attempt < 5:
                    await call(client, [], seconds=0.1, status=429)
                    attempt += 1
                await call(client, [], seconds=1.0)

            await fan_out(one, range(calls))
        return anyio.current_time()

    return work


@pytest.mark.parametrize(
    ("refused", "keys"),
    [(lambda number: number % 10 == 0, {"concurrency": 8}), (lambda number: False, {"concurrency": 1})],
)
async def test_a_tenant_is_not_slowed_by_one_with_another_key(
    refused: Callable[[int], bool], keys: dict[str, int]
) -> None:
    """Neither by refusals of the other's calls, nor by the other's own limits."""
    took: dict[str, float] = {}

    async def note(name: str, work: Callable[[], Any]) -> None:
        took[name] = await work()

    async with open_task_group() as tasks:
        tasks.start_soon(note, "alone", tenant("key-1", lambda number: False, 80, concurrency=8))
        tasks.start_soon(note, "troubled", tenant("key-2", refused, 80, **keys))
    assert took["alone"] == pytest.approx(10.0, abs=0.1)
    assert took["troubled"] > 11
