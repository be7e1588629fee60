"""Repeats: what a later attempt may mend is repeated with jitter, what refuses a role is asked once."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime

import anyio
import anyio.lowlevel
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Endpoint as Script
from reflact.concurrency import open_task_group
from reflact.config.models import ModelConfig
from reflact.llm.rate_limit import CAP_SECONDS, PATIENCE_SECONDS, Endpoint, EndpointClient, LimitChange
from reflact.llm.retry import RetryTransport, is_unknown_model, parse_retry_after, retry_delay

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

OK = httpx.Response(200, text="fine")


class Clock:
    """Sleeps without waiting and remembers for how long."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await anyio.lowlevel.checkpoint()


class Single(httpx.AsyncBaseTransport):
    """Sends one attempt once it is admitted, and tells what came of it."""

    def __init__(self, inner: httpx.AsyncBaseTransport, client: EndpointClient) -> None:
        self._inner = inner
        self._client = client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async with self._client.admit(1) as slot:
            try:
                response = await self._inner.handle_async_request(request)
            except Exception:
                slot.observe(None, None, None)
                raise
            slot.observe(response.status_code, parse_retry_after(response.headers.get("retry-after")), None)
            return response


def leased(
    told: Callable[[LimitChange], None] | None = None, *, slots: int = 8, draw: float = 1.0
) -> EndpointClient:
    """Return an entered client on an endpoint of its own, whose draws are always the same."""
    config = ModelConfig(model="m", base_url="http://endpoint.test/v1", concurrency=slots)
    return Endpoint("e", draw=lambda: draw).connect(config, on_limit=told).__enter__()


def retrying(
    inner: httpx.AsyncBaseTransport,
    clock: Clock | None = None,
    *,
    retries: int = 5,
    draw: float = 1.0,
    client: EndpointClient | None = None,
) -> RetryTransport:
    """Return a transport that draws always the same number and does not wait itself."""
    client = client or leased(draw=draw)
    sleep = (clock or Clock()).sleep
    return RetryTransport(
        Single(inner, client), retries=retries, endpoint=client, sleep=sleep, draw=lambda: draw
    )


def request() -> httpx.Request:
    """Return a request."""
    return httpx.Request("POST", "http://endpoint.test/v1/chat/completions", json={"model": "m"})


@pytest.mark.parametrize("status", [408, 409, 500, 502, 504, 529])
async def test_passing_statuses_are_repeated(status: int) -> None:
    """The answer of the repeat is the answer; the same body is sent again, after a wait of the call's own."""
    script, clock = Script(httpx.Response(status), OK), Clock()
    response = await retrying(script, clock).handle_async_request(request())
    assert response.status_code == 200
    assert script.bodies == [{"model": "m"}] * 2
    assert clock.slept == [0.5]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_call_that_was_too_much_waits_with_its_endpoint(status: int) -> None:
    """It is sent again once the endpoint admits it, and waits no second time by itself."""
    told: list[LimitChange] = []
    script, clock = Script(httpx.Response(status), httpx.Response(status), OK), Clock()
    transport = retrying(script, clock, client=leased(told.append, draw=0.0))
    response = await transport.handle_async_request(request())
    assert (response.status_code, len(script.requests), clock.slept) == (200, 3, [])
    assert [change.status for change in told] == [status, status]


@pytest.mark.parametrize("status", [200, 307, 400, 401, 403, 404, 413, 422, 501, 505])
async def test_final_statuses_are_never_repeated(status: int) -> None:
    """A refusal costs one request."""
    endpoint = Script(httpx.Response(status), OK)
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
    endpoint = Script(failure, failure, OK)
    response = await retrying(endpoint).handle_async_request(request())
    assert response.status_code == 200
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("failure", [httpx.UnsupportedProtocol("x"), httpx.InvalidURL("x"), LookupError("x")])
async def test_mistakes_are_not_repeated(failure: Exception) -> None:
    """What no attempt can mend is raised at once."""
    endpoint = Script(failure, OK)
    with pytest.raises(type(failure)):
        await retrying(endpoint).handle_async_request(request())
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_repeats_are_bounded(retries: int) -> None:
    """After the last repeat the failure stands: a status is returned, an error raised."""
    refusing, dead = Script(httpx.Response(500)), Script(httpx.ConnectError("x"))
    response = await retrying(refusing, retries=retries).handle_async_request(request())
    assert response.status_code == 500
    with pytest.raises(httpx.ConnectError):
        await retrying(dead, retries=retries).handle_async_request(request())
    assert len(refusing.requests) == len(dead.requests) == retries + 1


async def test_waits_double_up_to_the_cap() -> None:
    """Without a word from the server, waits follow the drawn share of a doubling bound."""
    clock = Clock()
    await retrying(Script(httpx.Response(500)), clock, retries=8, draw=0.5).handle_async_request(request())
    assert clock.slept == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


async def test_the_server_is_not_asked_before_the_time_it_names() -> None:
    """``Retry-After`` is a lower bound on the wait of a call's own."""
    clock = Clock()
    busy = httpx.Response(500, headers={"retry-after": "60"})
    await retrying(Script(busy, OK), clock).handle_async_request(request())
    assert clock.slept == [60.0]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_that_asks_for_hours_is_not_waited_for(status: int) -> None:
    """Beyond the patience of a call, its failure is told at once."""
    clock = Clock()
    busy = httpx.Response(status, headers={"retry-after": str(PATIENCE_SECONDS + 1)})
    response = await retrying(Script(busy, OK), clock).handle_async_request(request())
    assert response.status_code == status
    assert clock.slept == []


async def test_a_call_that_waits_gives_its_slot_to_others() -> None:
    """With one slot, a second call is served while the first waits for its repeat."""
    waiting, done = anyio.Event(), anyio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await done.wait()

    client = leased(slots=1)
    single = Single(Script(httpx.Response(500), OK), client)
    transport = RetryTransport(single, retries=1, endpoint=client, sleep=sleep)
    async with open_task_group() as tasks:
        tasks.start_soon(transport.handle_async_request, request())
        await waiting.wait()
        with anyio.fail_after(5):
            response = await transport.handle_async_request(request())
        done.set()
    assert response.status_code == 200


# ------------------------------------------------------------------------------------ refusals of a role

NO_MODEL = httpx.Response(404, json={"error": {"message": "The model `m` does not exist."}})
NO_KEY = httpx.Response(401, json={"error": {"message": "Incorrect API key."}})
FORBIDDEN = httpx.Response(403, text="not yours")


@pytest.mark.parametrize("answer", [NO_KEY, FORBIDDEN, NO_MODEL])
async def test_what_refuses_a_role_is_asked_once(answer: httpx.Response) -> None:
    """Later calls get the same answer, body and all, without being sent."""
    script = Script(answer, OK)
    transport = retrying(script)
    for _ in range(3):
        response = await transport.handle_async_request(request())
        body = b"".join([piece async for piece in response.aiter_raw()])
        assert (response.status_code, body) == (answer.status_code, answer.content)
    assert len(script.requests) == 1


async def test_calls_that_wait_for_admission_get_the_answer_too() -> None:
    """A refused key costs one request for each slot, however many calls there are."""
    script, answers = Script(NO_KEY), list[int]()
    transport = retrying(script, client=leased(slots=2))

    async def one() -> None:
        answers.append((await transport.handle_async_request(request())).status_code)

    async with open_task_group() as tasks:
        for _ in range(64):
            tasks.start_soon(one)
    assert answers == [401] * 64
    assert len(script.requests) <= 2


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="no such page"),
        httpx.Response(400, json={"error": {"message": "This model does not support response_format."}}),
        httpx.Response(400, json={"error": {"message": "maximum context length"}}),
        httpx.Response(422, json={"error": {"message": "the model m does not exist"}}),
    ],
)
async def test_what_refuses_one_request_refuses_no_other(answer: httpx.Response) -> None:
    """Requests that cannot be served say nothing about the next one."""
    transport = retrying(Script(answer, OK))
    assert (await transport.handle_async_request(request())).status_code == answer.status_code
    assert (await transport.handle_async_request(request())).status_code == 200


def untrusted() -> httpx.ConnectError:
    """Return the failure that a certificate of nobody's gives."""
    failure = httpx.ConnectError("certificate verify failed")
    failure.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    return failure


async def test_a_certificate_that_is_not_trusted_is_looked_at_once() -> None:
    """No repeat mends it, for this call or another."""
    script, clock = Script(untrusted()), Clock()
    transport = retrying(script, clock)
    for _ in range(3):
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await transport.handle_async_request(request())
    assert (len(script.requests), clock.slept) == (1, [])


async def test_an_address_that_never_answered_is_given_up() -> None:
    """After one call's repeats a closed port is taken for what it is; the cause stays readable."""
    script = Script(httpx.ConnectError("connection refused"))
    transport = retrying(script, retries=2)
    for _ in range(3):
        with pytest.raises(httpx.ConnectError, match="connection refused"):
            await transport.handle_async_request(request())
    assert len(script.requests) == 3


async def test_repeats_of_what_was_not_reached_are_told() -> None:
    """Each with the seconds until it; the failure after the last is no repeat, nor is a time-out."""
    told: list[LimitChange] = []
    script, clock = Script(*[httpx.ConnectError("connection refused")] * 3), Clock()
    with pytest.raises(httpx.ConnectError):
        await retrying(script, clock, retries=2, client=leased(told.append)).handle_async_request(request())
    assert told == [LimitChange("e", None, seconds, None) for seconds in clock.slept]
    assert len(told) == 2
    told.clear()
    slow = Script(httpx.ReadTimeout("slow"), OK)
    await retrying(slow, clock, client=leased(told.append)).handle_async_request(request())
    assert told == []


@pytest.mark.parametrize("first", [OK, httpx.Response(500)])
async def test_an_address_that_answered_before_is_tried_again(first: httpx.Response) -> None:
    """An endpoint that goes away for a while costs the calls of that while alone."""
    down = [httpx.ConnectError("connection refused")] * 2
    script = Script(first, *down, OK)
    transport = retrying(script, retries=0 if first is OK else 1)
    failures = 0
    for _ in range(3):
        try:
            await transport.handle_async_request(request())
        except httpx.ConnectError:
            failures += 1
    assert failures == (2 if first is OK else 1)
    assert (await transport.handle_async_request(request())).status_code == 200


async def test_a_silent_endpoint_is_no_closed_port() -> None:
    """Time-outs of the first calls, of a server that loads its model, refuse no later call."""
    transport = retrying(Script(httpx.ReadTimeout("slow"), OK), retries=0)
    with pytest.raises(httpx.ReadTimeout):
        await transport.handle_async_request(request())
    assert (await transport.handle_async_request(request())).status_code == 200


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "The model `x` does not exist or you do not have access to it."),
        (404, '{"error": {"code": "DeploymentNotFound", "message": "..."}}'),
        (404, 'model "x" not found, try pulling it first'),
        (404, '{"type": "error", "error": {"type": "not_found_error", "message": "model: x"}}'),
        (404, "models/x is not found for API version v1beta, or is not supported for generateContent."),
        (400, "Invalid model: x"),
        (400, "x is not a valid model ID"),
        (400, "Model Not Exist"),
        (404, '{"error": {"code": "model_not_found"}}'),
    ],
)
def test_the_words_for_an_unknown_model_are_known(status: int, said: str) -> None:
    """Each provider says it in its own way, and no other status means it."""
    assert is_unknown_model(status, said)
    assert not is_unknown_model(500, said)


@given(st.integers(0, 60), st.none() | st.floats(0, PATIENCE_SECONDS), st.floats(0, 1))
def test_pauses_keep_their_bounds(attempt: int, asked: float | None, draw: float) -> None:
    """A wait is at least what was asked for and otherwise at most the cap."""
    seconds = retry_delay(attempt, asked, draw)
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
    assert parse_retry_after(header, now=NOW) == seconds
