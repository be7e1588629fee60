"""Repeats: what a later attempt may mend is repeated with jitter, everything else never."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import anyio
import anyio.lowlevel
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Endpoint
from reflact.llm.retries import CAP_SECONDS, PATIENCE_SECONDS, RetryTransport, pause, retry_after

pytestmark = pytest.mark.anyio

OK = httpx.Response(200, text="fine")


class Clock:
    """Sleeps without waiting and remembers for how long."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await anyio.lowlevel.checkpoint()


def retrying(
    inner: httpx.AsyncBaseTransport,
    clock: Clock | None = None,
    *,
    retries: int = 5,
    slots: int = 8,
    seconds: float = 60,
    draw: float = 1.0,
) -> RetryTransport:
    """Return a transport that draws always the same number and does not wait."""
    return RetryTransport(
        inner,
        retries=retries,
        slots=anyio.CapacityLimiter(slots),
        seconds=seconds,
        sleep=(clock or Clock()).sleep,
        draw=lambda: draw,
    )


def request() -> httpx.Request:
    """Return a request."""
    return httpx.Request("POST", "http://endpoint.test/v1/chat/completions", json={"model": "m"})


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
async def test_passing_statuses_are_repeated(status: int) -> None:
    """The answer of the repeat is the answer; the same body is sent again."""
    endpoint, clock = Endpoint(httpx.Response(status), OK), Clock()
    response = await retrying(endpoint, clock).handle_async_request(request())
    assert response.status_code == 200
    assert endpoint.bodies == [{"model": "m"}] * 2
    assert clock.slept == [0.5]


@pytest.mark.parametrize("status", [200, 307, 400, 401, 403, 404, 413, 422, 501])
async def test_final_statuses_are_never_repeated(status: int) -> None:
    """A refusal costs one request."""
    endpoint = Endpoint(httpx.Response(status), OK)
    response = await retrying(endpoint).handle_async_request(request())
    assert response.status_code == status
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("x"),
        httpx.ConnectTimeout("x"),
        httpx.ReadTimeout("x"),
        httpx.ReadError("x"),
        httpx.RemoteProtocolError("x"),
    ],
)
async def test_failures_on_the_way_are_repeated(failure: Exception) -> None:
    """Connection errors and time-outs may be mended by another attempt."""
    endpoint = Endpoint(failure, failure, OK)
    response = await retrying(endpoint).handle_async_request(request())
    assert response.status_code == 200
    assert len(endpoint.requests) == 3


async def test_a_body_that_breaks_off_is_repeated() -> None:
    """An answer is whole or it is a failure on the way."""

    class Breaking(Endpoint):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            return response if len(self.requests) > 1 else httpx.Response(200, content=broken())

    async def broken() -> AsyncIterator[bytes]:
        yield b"fi"
        raise httpx.ReadError("cut")

    response = await retrying(Breaking(OK)).handle_async_request(request())
    assert await response.aread() == b"fine"


@pytest.mark.parametrize("failure", [httpx.UnsupportedProtocol("x"), httpx.InvalidURL("x"), LookupError("x")])
async def test_mistakes_are_not_repeated(failure: Exception) -> None:
    """What no attempt can mend is raised at once."""
    endpoint = Endpoint(failure, OK)
    with pytest.raises(type(failure)):
        await retrying(endpoint).handle_async_request(request())
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_repeats_are_bounded(retries: int) -> None:
    """After the last repeat the failure stands: a status is returned, an error raised."""
    refusing, dead = Endpoint(httpx.Response(503)), Endpoint(httpx.ConnectError("x"))
    response = await retrying(refusing, retries=retries).handle_async_request(request())
    assert response.status_code == 503
    with pytest.raises(httpx.ConnectError):
        await retrying(dead, retries=retries).handle_async_request(request())
    assert len(refusing.requests) == len(dead.requests) == retries + 1


async def test_waits_double_up_to_the_cap() -> None:
    """Without a word from the server, waits follow the drawn share of a doubling bound."""
    clock = Clock()
    await retrying(Endpoint(httpx.Response(500)), clock, retries=8, draw=0.5).handle_async_request(request())
    assert clock.slept == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


async def test_the_server_is_not_asked_before_the_time_it_names() -> None:
    """``Retry-After`` is a lower bound on the wait."""
    clock = Clock()
    busy = httpx.Response(429, headers={"retry-after": "60"})
    await retrying(Endpoint(busy, OK), clock).handle_async_request(request())
    assert clock.slept == [60.0]


async def test_a_server_that_asks_for_hours_is_not_waited_for() -> None:
    """Beyond the patience of a call, its failure is told at once."""
    clock = Clock()
    busy = httpx.Response(429, headers={"retry-after": str(PATIENCE_SECONDS + 1)})
    response = await retrying(Endpoint(busy, OK), clock).handle_async_request(request())
    assert response.status_code == 429
    assert clock.slept == []


async def test_a_slow_answer_is_a_time_out() -> None:
    """The time for one request bounds all of it, not each of its parts."""

    class Endless(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await anyio.sleep_forever()
            raise AssertionError

    with pytest.raises(httpx.ReadTimeout, match="0 seconds"):
        await retrying(Endless(), retries=1, seconds=0).handle_async_request(request())


async def test_no_more_requests_are_in_flight_than_there_are_slots() -> None:
    """The bound is reached and never passed."""
    running = highest = 0

    class Counting(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal running, highest
            running += 1
            highest = max(highest, running)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            running -= 1
            return httpx.Response(200)

    transport = retrying(Counting(), slots=3)
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(transport.handle_async_request, request())
    assert highest == 3


async def test_a_call_that_waits_gives_its_slot_to_others() -> None:
    """With one slot, a second call is served while the first waits for its repeat."""
    waiting, done = anyio.Event(), anyio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await done.wait()

    endpoint = Endpoint(httpx.Response(503), OK)
    slots = anyio.CapacityLimiter(1)
    transport = RetryTransport(endpoint, retries=1, slots=slots, seconds=60, sleep=sleep, draw=lambda: 1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(transport.handle_async_request, request())
        await waiting.wait()
        with anyio.fail_after(5):
            response = await transport.handle_async_request(request())
        done.set()
    assert response.status_code == 200


@given(st.integers(0, 60), st.none() | st.floats(0, PATIENCE_SECONDS), st.floats(0, 1))
def test_pauses_keep_their_bounds(attempt: int, asked: float | None, draw: float) -> None:
    """A wait is at least what was asked for and otherwise at most the cap."""
    seconds = pause(attempt, asked, draw)
    assert (asked or 0.0) <= seconds <= max(asked or 0.0, CAP_SECONDS)


NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 12:00:30 -0000", 30.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_is_read_as_number_or_date(header: str | None, seconds: float | None) -> None:
    """Both forms of the header count; anything else is as good as none."""
    assert retry_after(header, now=NOW) == seconds
