"""Failed attempts: their kinds, which of them are retried after which wait, and what refuses a whole role."""

from __future__ import annotations

import ssl
from contextlib import AsyncExitStack
from itertools import count, pairwise

import anyio
import httpx
import pytest
import respx

from doubles import PROMPT, RUN, Endpoint, ask, call_id, completion, config, connected, opened
from reflact.errors import (
    ModelError,
    ProviderDown,
)
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.llm.rate_limit import OUTAGE_SECONDS, PATIENCE_SECONDS, LimitChange, endpoint_for
from reflact.messages import Text
from reflact.records import FaultCount, FaultKind

pytestmark = pytest.mark.virtual_time

GOOD = completion("fine")
DOWN = httpx.ConnectError("connection refused")


class Calls(httpx.AsyncBaseTransport):
    """Calls of one role to an endpoint that plays a script; its last answer stays.

    Args:
        answers: What the endpoint answers or how it fails.
        draw: What its jitter draws.
    """

    def __init__(
        self, *answers: httpx.Response | Exception, retries: int = 5, slots: int = 8, draw: float = 1.0
    ) -> None:
        self._script = iter(answers)
        self._last: httpx.Response | Exception = answers[-1]
        self._draw = draw
        self._numbers = count()
        self._stack = AsyncExitStack()
        self.settings = config(concurrency=slots, max_retries=retries)
        self.times: list[float] = []
        self.changes: list[LimitChange] = []
        self._router = respx.MockRouter(assert_all_called=False)
        self.route = self._router.post("http://endpoint.test/v1/chat/completions")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.times.append(anyio.current_time())
        answer = next(self._script, self._last)
        if isinstance(answer, Exception):
            raise answer
        self.route.respond(answer.status_code, headers=answer.headers, content=answer.content)
        return await self._router.async_handler(request)

    async def __aenter__(self) -> Calls:
        self.store = await opened()
        account = Account(RUN, self.store, self.store.decision_log(RUN))
        client = Client(self.settings, "optimizer", account, transport=self, on_limit=self.changes.append)
        self._client = await self._stack.enter_async_context(client)
        endpoint_for(self.settings).endpoint.draw = lambda: self._draw
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def make(self) -> int | str:
        """Make another call; return its status, or the message of an error without one."""
        try:
            await self._client.ask(PROMPT, Text, call_id=call_id(str(next(self._numbers))))
        except ModelError as error:
            return getattr(error, "status", None) or str(error)
        return 200

    @property
    def sent(self) -> int:
        return len(self.times)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


async def test_a_repeat_sends_the_same_body_after_a_wait_of_its_own() -> None:
    async with Calls(httpx.Response(500), GOOD) as calls:
        assert await calls.make() == 200
    assert calls.gaps == [0.5]
    first, second = (call.request.content for call in calls.route.calls)
    assert first == second


PASSING = {"408": [408], "409": [409], "429": [429], "5xx": [424, 500, 502, 503, 504, 529]}
FINAL = [307, 400, 401, 403, 404, 413, 422, 501, 505]


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [
        (httpx.ConnectTimeout("x"), "timeout"),
        (httpx.ReadTimeout("x"), "timeout"),
        (DOWN, "unreachable"),
        (httpx.RemoteProtocolError("x"), "reset"),
        (httpx.UnsupportedProtocol("x"), None),
        (httpx.InvalidURL("x"), None),
        (LookupError("x"), None),
        *((httpx.Response(status), kind) for kind, group in PASSING.items() for status in group),
        *((httpx.Response(status), None) for status in FINAL),
    ],
)
async def test_what_may_pass_is_repeated_and_counted(
    attempt: httpx.Response | Exception, kind: FaultKind | None
) -> None:
    """A mistake of the caller, or a status about the request, costs one request and is no fault."""
    async with Calls(attempt, GOOD) as calls:
        assert (await calls.make() == 200) is (kind is not None)
        assert await calls.store.faults(RUN) == (() if kind is None else (FaultCount(kind=kind, count=1),))
    assert calls.sent == (1 if kind is None else 2)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_call_that_was_too_much_waits_with_its_endpoint(status: int) -> None:
    """It is sent again once the endpoint admits it, and waits no second time by itself."""
    async with Calls(httpx.Response(status), httpx.Response(status), GOOD) as calls:
        assert await calls.make() == 200
    assert [(change.status, change.seconds) for change in calls.changes] == [(status, 0.5), (status, 1.0)]
    rates = [change.rate for change in calls.changes]
    assert calls.gaps == pytest.approx([1 / rate for rate in rates if rate], abs=0.1)


async def test_waits_double_up_to_the_cap() -> None:
    async with Calls(httpx.Response(500), retries=8, draw=0.5) as calls:
        await calls.make()
    assert calls.gaps == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize(("asked", "gaps"), [(60.0, [60.0]), (PATIENCE_SECONDS + 1, [])])
async def test_the_server_is_not_asked_before_the_time_it_names(
    status: int, asked: float, gaps: list[float]
) -> None:
    """``Retry-After`` is a lower bound on the wait; beyond the patience of a call, its failure is told at once."""
    async with Calls(httpx.Response(status, headers={"retry-after": str(asked)}), GOOD) as calls:
        assert await calls.make() == (200 if gaps else status)
    assert calls.gaps == gaps


UNKNOWN = "The model `m` does not exist."
NO_MODEL = httpx.Response(404, json={"error": {"message": UNKNOWN}})
NO_KEY = httpx.Response(401, json={"error": {"message": "Incorrect API key."}})
FORBIDDEN = httpx.Response(403, text="not yours")


@pytest.mark.parametrize(("answer", "requests"), [(NO_KEY, 1), (FORBIDDEN, 4), (NO_MODEL, 4)])
async def test_what_refuses_a_role_is_asked_seldom(answer: httpx.Response, requests: int) -> None:
    """Later calls get the same answer without being sent; what one prompt may cause needs four."""
    async with Calls(*[answer] * requests, GOOD) as calls:
        assert [await calls.make() for _ in range(5)] == [answer.status_code] * 5
    assert calls.sent == requests


def untrusted() -> httpx.ConnectError:
    failure = httpx.ConnectError("certificate verify failed")
    failure.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    return failure


@pytest.mark.parametrize(("failure", "requests"), [(untrusted(), 1), (DOWN, 3)])
async def test_an_address_that_cannot_work_is_given_up(failure: httpx.ConnectError, requests: int) -> None:
    """An untrusted certificate at once, a port that never answered after one call's repeats; the cause stays."""
    async with Calls(failure, retries=2) as calls:
        for _ in range(3):
            assert str(failure.__cause__ or failure) in str(await calls.make())
    assert calls.sent == requests


async def test_a_wrong_clock_of_this_machine_shortens_no_pause() -> None:
    ahead = {"date": "Thu, 01 Jan 2099 12:00:00 GMT", "retry-after": "Thu, 01 Jan 2099 12:01:00 GMT"}
    endpoint, begin = Endpoint(httpx.Response(429, headers=ahead), completion("fine")), anyio.current_time()
    assert (await ask(Text, endpoint)).value.text == "fine"
    assert anyio.current_time() - begin == pytest.approx(60, abs=5)


@pytest.mark.parametrize(
    ("error", "requests"),
    [
        ({"code": "insufficient_quota"}, 3),
        ({"message": "You exceeded your current quota. Please retry in 37.1s."}, 9),
    ],
)
async def test_a_spent_quota_refuses_the_role_after_one_call(error: dict[str, str], requests: int) -> None:
    """All attempts of one call are made, since quotas come back; a rate limit that is named a quota is none."""
    async with Calls(httpx.Response(429, json={"error": error}), retries=2) as calls:
        assert [await calls.make() for _ in range(3)] == [429] * 3
    assert calls.sent == requests


BUSY = httpx.Response(429, headers={"retry-after": "60"}, text="too many")
GARBLED = httpx.Response(200, text="<html>")


@pytest.mark.parametrize(
    "answer", [BUSY, httpx.Response(500), httpx.ReadTimeout("slow"), httpx.ReadError("gone"), GARBLED]
)
async def test_an_endpoint_that_never_serves_refuses_the_role(answer: httpx.Response | Exception) -> None:
    script, store = Endpoint(answer), await opened()
    started = anyio.current_time()
    async with connected(script, config(max_retries=99), store=store) as client:
        for part in "abc":
            with pytest.raises(ProviderDown):
                await client.ask(PROMPT, Text, call_id=call_id(part))
            sent = len(script.requests)
            assert OUTAGE_SECONDS <= anyio.current_time() - started <= OUTAGE_SECONDS + 60
        assert len(script.requests) == sent


@pytest.mark.parametrize(("reopened", "failed", "pause"), [(True, "ab", 1), (False, "a", 1000)])
async def test_failures_of_another_time_are_no_outage(reopened: bool, failed: str, pause: float) -> None:
    """A failure is retried although an earlier run, or a call long ago, ended with failures alone."""
    late = httpx.Response(429, headers={"retry-after": "290"})
    script = Endpoint(*[late] * 2 * len(failed), httpx.Response(500), GOOD)
    settings = config(max_retries=1)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(script, settings))
        for part in failed:
            with pytest.raises(ProviderDown):
                await client.ask(PROMPT, Text, call_id=call_id(part))
        await anyio.sleep(pause)
        if reopened:
            await stack.aclose()
            client = await stack.enter_async_context(connected(script, settings))
        assert (await client.ask(PROMPT, Text, call_id=call_id("c"))).value.text == "fine"
