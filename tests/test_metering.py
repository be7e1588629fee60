"""Single attempts: sent once they fit, booked for what they cost, at their worst case where nobody knows."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import anyio
import httpx
import pytest

from doubles import PROMPT, RUN, Endpoint, ask, call_id, completion, config, connected, opened, watched
from reflact.config.models import Price
from reflact.config.training import BudgetConfig
from reflact.errors import BudgetSpent, CassetteMiss, ModelError, ProviderDown
from reflact.llm.budget import Account, Budget
from reflact.llm.client import LARGE_BYTES, Client
from reflact.llm.completions import read_completion
from reflact.llm.pricing import OVERHEAD_TOKENS, usd_of
from reflact.messages import CallReservation, Message, RenderedPrompt, StoredResponse, Text
from reflact.records import Usage
from reflact.testing import InMemoryRunStore

pytestmark = pytest.mark.virtual_time

PRICE = Price(input=1000, cached_input=100, output=10_000)
PRICED = config(max_tokens=50, price=PRICE, max_retries=0)
GOOD = completion("fine", tokens=(100, 40, 7))


def budget(**limits: Any) -> Budget:
    return Budget(BudgetConfig(**limits))


async def taken(store: InMemoryRunStore) -> tuple[Usage, int, Usage]:
    (spent,) = await store.spend(RUN)
    return spent.usage, spent.unsettled, spent.worst_case


async def test_an_intent_holds_the_worst_case_of_its_call() -> None:
    """A token for each byte of the body, the cap, and the price of both."""
    store, endpoint = await watched(), Endpoint(GOOD)
    await ask(Text, endpoint, PRICED, store=store)
    read = len(endpoint.requests[0].content) + OVERHEAD_TOKENS
    worst = Usage(calls=1, input_tokens=read, output_tokens=50)
    assert store.reservations[0].worst_case == worst.model_copy(update={"usd": usd_of(worst, PRICED)})


async def test_an_answer_without_counts_costs_its_worst_case() -> None:
    """It is a call whose tokens nobody told; its bounds count instead, beside the usage."""
    silent = json.loads(GOOD.content)
    del silent["usage"]
    store, held = await opened(), budget(max_tokens=2000)
    async with connected(
        Endpoint(httpx.Response(200, json=silent)), PRICED, store=store, budget=held
    ) as client:
        await client.ask(PROMPT, Text, call_id=call_id())
    usage, unsettled, worst = await taken(store)
    assert usage == Usage(calls=1, uncounted=1)
    assert (unsettled, worst.calls, worst.output_tokens) == (0, 0, 50)
    assert worst.input_tokens > OVERHEAD_TOKENS
    assert (worst.usd or 0) > 0
    with pytest.raises(BudgetSpent, match=f"{worst.input_tokens + 50} are used"):
        async with held.reserve(Usage(calls=1, output_tokens=2000)):
            pass


FREE = [
    *(httpx.Response(status) for status in (400, 401, 429, 503)),
    httpx.Response(500, content=GOOD.content, headers=GOOD.headers),
    httpx.ConnectError("refused"),
    httpx.ConnectTimeout("no route"),
    httpx.PoolTimeout("full"),
    CassetteMiss("not recorded"),
]
CHARGED = [
    httpx.ReadTimeout("slow"),
    httpx.ReadError("reset"),
    httpx.RemoteProtocolError("cut"),
    httpx.WriteError("reset"),
    httpx.Response(200, text="<html>log in</html>", headers={"content-type": "text/html"}),
    httpx.Response(200, text='{"choi', headers={"content-type": "application/json"}),
    httpx.Response(200, json={"error": {"message": "upstream"}}),
    httpx.Response(200, json=[1]),
    httpx.Response(200, text="[" * 100_000, headers={"content-type": "application/json"}),
]


@pytest.mark.parametrize("failure", FREE)
async def test_what_is_refused_or_never_left_is_free(failure: httpx.Response | Exception) -> None:
    store, held = await opened(), budget(max_calls=1)
    with pytest.raises((ModelError, CassetteMiss)):
        await ask(Text, Endpoint(failure), PRICED, store=store, budget=held)
    assert await store.spend(RUN) == ()
    await ask(Text, Endpoint(GOOD), PRICED, store=store, budget=held)
    assert (await taken(store))[0].calls == 1


@pytest.mark.parametrize("failure", CHARGED)
async def test_what_may_be_charged_is_booked_although_a_repeat_succeeds(
    failure: httpx.Response | Exception,
) -> None:
    store, held = await opened(), budget(max_calls=2)
    async with connected(Endpoint(failure, GOOD), PRICED, store=store, budget=held) as client:
        with pytest.raises(ProviderDown):
            await client.ask(PROMPT, Text, call_id=call_id())
        await client.ask(PROMPT, Text, call_id=call_id())
        usage, unsettled, worst = await taken(store)
        assert (usage.calls, unsettled, worst.calls, worst.output_tokens) == (1, 1, 1, 50)
        with pytest.raises(BudgetSpent, match="2 are used"):
            await client.ask(PROMPT, Text, call_id=call_id("next"))


Send = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def paying(
    network: httpx.AsyncBaseTransport, store: InMemoryRunStore, held: Budget, **settings: Any
) -> AsyncIterator[Send]:
    """Connect a client of its own, and yield a function that makes one call."""
    account = Account(RUN, store, store.decision_log(RUN), held)
    async with Client(config(**settings), "target", account, transport=network) as client:

        async def send(key: str) -> str:
            return await client.forward({"messages": [], "max_tokens": 50}, call_id=call_id(key))

        yield send


class Slow(httpx.AsyncBaseTransport):
    """Answers after some seconds, the body in as many pieces, and counts what is open.

    Args:
        head: Seconds until the status.
        pieces: Seconds until each piece of the body.
    """

    def __init__(self, head: float = 0, *pieces: float) -> None:
        self._head = head
        self._pieces = pieces
        self.closed = self.sent = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        await anyio.sleep(self._head)
        return httpx.Response(200, headers=GOOD.headers, stream=_Body(self, self._pieces))


class _Body(httpx.AsyncByteStream):
    def __init__(self, of: Slow, seconds: tuple[float, ...]) -> None:
        self._of = of
        self._seconds = seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds in self._seconds:
            await anyio.sleep(seconds)
            yield b""
        yield GOOD.content

    async def aclose(self) -> None:
        self._of.closed += 1


async def test_the_time_for_one_attempt_counts_to_the_last_byte() -> None:
    store = await opened()
    for network in (Slow(11), Slow(1, 5, 5)):
        async with paying(network, store, budget(), timeout=10, max_retries=0) as send:
            with pytest.raises(ProviderDown, match="within 10 seconds"):
                await send(str(network))
    assert network.closed == 1
    assert (await taken(store))[1] == 2


@pytest.mark.parametrize(("size", "in_loop"), [(1, 1), (LARGE_BYTES, 0)])
async def test_a_long_answer_is_read_beside_the_event_loop(size: int, in_loop: int) -> None:
    calls: list[str] = []

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is read_completion.__code__:
            calls.append("read")

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        reply = await ask(Text, Endpoint(completion("x" * size)))
    finally:
        sys.setprofile(before)
    assert len(reply.value.text) == size
    assert len(calls) == in_loop


async def test_an_answer_that_came_is_kept_and_settled_whoever_leaves() -> None:
    store = await watched()
    scope, held = anyio.CancelScope(), budget(max_calls=2, max_tokens=500)

    class Cancelling(InMemoryRunStore):
        async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
            scope.cancel()
            await anyio.sleep(0.1)
            await store.store_response(response, reservation)

    slow = Cancelling()
    await slow.open_run(RUN, {}, {})
    async with paying(Slow(1), slow, held) as send:
        with scope:
            await send("k")
    assert len(store.replies) == 1
    async with held.reserve(Usage(calls=1, output_tokens=500 - 107)):
        pass


async def test_a_call_whose_caller_leaves_before_it_is_sent_costs_nothing() -> None:
    """Cancelled while its intent is written, it is neither reserved nor booked as cut off in flight."""
    scope, held = anyio.CancelScope(), budget(max_calls=1)

    class Leaving(InMemoryRunStore):
        async def reserve(self, reservation: CallReservation) -> None:
            await super().reserve(reservation)
            scope.cancel()
            await anyio.sleep(0.1)

    left = Leaving()
    await left.open_run(RUN, {}, {})
    async with paying(Slow(1), left, held) as send:
        with scope:
            await send("k")
    assert scope.cancelled_caught
    assert await left.spend(RUN) == ()
    async with held.reserve(Usage(calls=1)):
        pass


def counted(content: str | None, tokens: int = 10, finish: str = "stop", **message: Any) -> httpx.Response:
    return completion(content, finish=finish, tokens=(tokens, 0, 3), **message)


LONG = RenderedPrompt(
    name="p",
    version=1,
    messages=(
        Message(role="system", content="Do this. " * 1500),
        Message(role="user", content="Now. " * 1500),
    ),
)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (counted("fine"), None),
        (counted("fi", finish="length"), "cut answer"),
        (counted(""), "empty answer"),
        (counted("<think>so</think>"), "empty answer"),
        (counted("<think>so</think>fine"), None),
        (counted(None, refusal="I would rather not."), None),
        (counted(None, arguments="{}"), "empty answer"),
    ],
)
async def test_an_answer_that_is_cut_or_empty_is_counted(answer: httpx.Response, fault: str | None) -> None:
    """The answer is used, and costs what it says; other roles have reasons of invalid replies for it."""
    for role, counts in (("target", [] if fault is None else [(fault, 1)]), ("optimizer", [])):
        store = await opened()
        reply = await ask(Text, Endpoint(answer), store=store, role=role)
        assert reply.attempts == 1
        assert [(each.kind, each.count) for each in await store.faults(RUN)] == counts
        assert (await taken(store))[0].calls == 1


@pytest.mark.parametrize(
    ("prompt", "tokens", "is_cut"),
    [(LONG, 2050, True), (LONG, 2700, False), (LONG, 0, False), (PROMPT, 1, False)],
)
async def test_a_prompt_that_its_server_cut_is_counted(
    prompt: RenderedPrompt, tokens: int, is_cut: bool
) -> None:
    """Fewer tokens than an eighth of the characters are those of a part; none are no count, a short text has few."""
    store = await opened()
    async with connected(Endpoint(counted("fine", tokens)), store=store) as client:
        await client.ask(prompt, Text, call_id=call_id())
    assert [each.kind for each in await store.faults(RUN)] == (["cut prompt"] if is_cut else [])


async def test_a_reply_of_another_model_is_counted() -> None:
    """A gateway that falls back says so by the name of the model alone; the first name is that of the endpoint."""
    names = ("", "a", "\ud800", "a", "")
    answers = [
        httpx.Response(200, content=json.dumps({**counted("fine").json(), "model": name})) for name in names
    ]
    store = await opened()
    async with connected(Endpoint(*answers), store=store) as client:
        for number in range(5):
            await client.ask(PROMPT, Text, call_id=call_id(f"c{number}"))
    assert [(each.kind, each.count) for each in await store.faults(RUN)] == [("other model", 1)]


@pytest.mark.parametrize("limit", ["max_usd", "max_tokens"])
async def test_nine_tenths_of_a_budget_are_spent(limit: str) -> None:
    """The last calls get shorter caps than the configured one, by the answers so far; no limit is exceeded."""
    settings = config(max_tokens=16_384, price=Price(input=0.1, output=10.0), max_retries=0)
    reply = completion("fine", tokens=(60, 0, 200))
    usage = Usage(calls=1, input_tokens=60, output_tokens=200)
    most = {"max_usd": 200 * (usd_of(usage, settings) or 0), "max_tokens": 200 * 260}[limit]
    store, held, endpoint = await opened(), budget(**{limit: most}), Endpoint(reply)
    async with connected(endpoint, settings, store=store, budget=held) as client:

        async def ask_all() -> None:
            for number in range(1000):
                await client.ask(PROMPT, Text, call_id=call_id(str(number)))

        with pytest.raises(BudgetSpent):
            await ask_all()
    used, unsettled, _ = await taken(store)
    spent = used.usd or 0 if limit == "max_usd" else used.input_tokens + used.output_tokens
    assert unsettled == 0
    assert 0.9 * most <= spent <= most
    caps = [json.loads(request.content)["max_tokens"] for request in endpoint.requests]
    assert caps[0] == 16_384
    assert caps[-1] == 800


async def test_an_answer_cut_at_a_shorter_cap_ends_the_budget_and_is_asked_again_with_more() -> None:
    """It counts at its worst case and is not stored, so a larger budget asks for it at the whole cap."""
    settings = config(max_tokens=1000, max_retries=0)
    short, cut = completion("fine", tokens=(10, 0, 10)), completion("fi", tokens=(10, 0, 64), finish="length")
    trial = Endpoint(short)
    await ask(Text, trial, settings)
    whole = len(trial.requests[0].content) + OVERHEAD_TOKENS + 1000
    store, held = await opened(), budget(max_tokens=whole)
    async with connected(Endpoint(short, cut), settings, store=store, budget=held) as client:
        await client.ask(PROMPT, Text, call_id=call_id("0"))
        with pytest.raises(BudgetSpent, match="an answer of 64 tokens, which was cut there"):
            await client.ask(PROMPT, Text, call_id=call_id("1"))
    assert (await taken(store))[1] == 1
    endpoint = Endpoint(short)
    await ask(Text, endpoint, settings, store=store, part="1")
    assert json.loads(endpoint.requests[0].content)["max_tokens"] == 1000
