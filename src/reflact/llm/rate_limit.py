"""Limits of an endpoint, shared by all roles of all trainers in an event loop that ask it."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import anyio
import httpx
from anyio.lowlevel import RunVar

from reflact.llm.pacing import MARGIN, MINUTE_SECONDS, Minute, Pace, Taken
from reflact.roles import ModelConfig

LIMITED = frozenset({429, 503})
"""Statuses with which an endpoint says that it is asked too much."""

BASE_SECONDS, CAP_SECONDS = 0.5, 30.0

PATIENCE_SECONDS = 300.0
"""The longest wait that a server may ask for."""

SOON = 1e-6
"""Seconds that are no time: waits shorter than this are over."""


class LimitChange(NamedTuple):
    """An endpoint backed off: where, after which status, for how many seconds, and at which rate it goes on.

    Without a status it could not be reached, and the call that found that tries again after these seconds.
    The rate is in calls a second, None where none was found.
    """

    endpoint: str
    status: int | None
    seconds: float
    rate: float | None


Said = httpx.Response | httpx.TransportError
"""An answer that was read whole, or a failure on the way."""


class Refused(Exception):
    """The endpoint will not serve a role: what it said first, as an answer or as a failure on the way."""

    def __init__(self, said: Said) -> None:
        super().__init__("the endpoint refused this role before")
        self.said = said


class Endpoint:
    """One address in one event loop, and everything that wants to be sent there.

    Calls are admitted in the order in which they asked, each as soon as a slot is free, the back-off is
    over, and requests and tokens of the minute allow it. Of the settings of all open clients the strictest
    counts: the smallest of each limit, and an adaptive rate where any role wants one.

    After 429 or 503 nothing is sent for as long as ``Retry-After`` says, or for a time drawn evenly from
    0..min(cap, base * 2**n) seconds after n fruitless back-offs. Answers to calls that went before it mean
    the same back-off and not another one. The rate after it follows ``reflact.llm.pacing.Pace``.

    Args:
        address: For messages.
        draw: Gives a number in 0..1.
    """

    def __init__(self, address: str, *, draw: Callable[[], float] = random.random) -> None:
        self.address = address
        self.answered = False
        self._draw = draw
        self._clients: list[EndpointClient] = []
        self._queue: OrderedDict[_Waiting, None] = OrderedDict()
        self._in_flight = 0
        self._pace = Pace()
        self._minute = Minute()
        self._until = -math.inf
        self._paced = False
        self._back_offs = 0
        self._fruitless = 0

    @property
    def rate(self) -> float | None:
        """Calls a second that the endpoint was found to sustain; None where nothing was refused yet."""
        return self._pace.rate

    @property
    def in_flight(self) -> int:
        """Calls that were admitted and have not ended."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Calls that wait to be admitted."""
        return len(self._queue)

    def connect(
        self, config: ModelConfig, *, on_limit: Callable[[LimitChange], None] | None = None
    ) -> EndpointClient:
        """Return a role's way in; enter it for as long as the role's settings are to count."""
        return EndpointClient(self, config, on_limit)

    def open(self, client: EndpointClient) -> None:
        """Let the settings of a client count."""
        self._clients.append(client)

    def close(self, client: EndpointClient) -> None:
        """Let them count no longer."""
        self._clients.remove(client)
        self._stir()

    async def enter(self, client: EndpointClient, tokens: int) -> Slot:
        """Wait until a call may go, and count it as in flight.

        Raises:
            Refused: The endpoint will not serve the client's role.
        """
        waiting = _Waiting(client)
        self._queue[waiting] = None
        try:
            while True:
                if client.refusal is not None:
                    raise Refused(client.refusal)
                seconds = self._seconds(tokens) if next(iter(self._queue)) is waiting else math.inf
                if seconds < SOON:
                    return self._admit(tokens)
                waiting.stirred = anyio.Event()
                with anyio.move_on_after(seconds):
                    await waiting.stirred.wait()
        finally:
            del self._queue[waiting]
            self._paced = self._paced and bool(self._queue)
            self._stir()

    def leave(self) -> None:
        """Give a slot back."""
        self._in_flight -= 1
        self._stir()

    def observe(self, slot: Slot, status: int | None, retry_after: float | None, tokens: int | None) -> None:
        """Take in what came of a call; see ``Slot.observe``."""
        if tokens is not None:
            self._minute.correct(slot.taken, tokens)
        if status is None:
            return
        self.answered = True
        if status in LIMITED:
            self._back_off(slot, status, retry_after)
        elif status < 500:
            self._fruitless = 0
            self._pace.served(anyio.current_time(), slot.held)
        self._stir()

    def stir(self, client: EndpointClient) -> None:
        """Let the waiting calls of a client look again."""
        for waiting in self._queue:
            if waiting.client is client:
                waiting.stirred.set()

    # -------------------------------------------------------------------------------------- decisions

    def _seconds(self, tokens: int) -> float:
        """Return how long the first in the queue has to wait; infinite where only an event can tell."""
        if self._in_flight >= min((client.config.concurrency for client in self._clients), default=0):
            self._paced = False
            return math.inf
        now = anyio.current_time()
        turn = self._pace.wait(now, self._most)
        if turn >= SOON:
            self._paced = True
        return max(self._until - now, turn, self._minute.wait(now, tokens, self._tokens_per_minute))

    def _admit(self, tokens: int) -> Slot:
        now, most, tokens_most = anyio.current_time(), self._most, self._tokens_per_minute
        self._in_flight += 1
        self._pace.take(now, most)
        return Slot(
            self,
            taken=self._minute.take(now, tokens if tokens_most is None else min(tokens, tokens_most)),
            held=self._paced and (most is None or (self.rate is not None and self.rate < most)),
            back_offs=self._back_offs,
        )

    def _back_off(self, slot: Slot, status: int, asked: float | None) -> None:
        now = anyio.current_time()
        named = asked if asked is not None and asked <= PATIENCE_SECONDS else 0.0
        self._pace.refused(now)
        if slot.back_offs < self._back_offs:
            self._until = max(self._until, now + named)
            return
        self._until = max(self._until, now + (named or jitter(self._fruitless, self._draw())))
        self._back_offs += 1
        self._fruitless += 1
        if any(client.config.adaptive for client in self._clients):
            self._pace.decrease(now, self._in_flight, self._until - now)
        change = LimitChange(self.address, status, self._until - now, self.rate)
        for on_limit in dict.fromkeys(client.on_limit for client in self._clients):
            if on_limit is not None:
                on_limit(change)

    @property
    def _most(self) -> float | None:
        """Calls a second that the user allows."""
        allowed = [client.config.requests_per_minute for client in self._clients]
        least = min((each for each in allowed if each is not None), default=None)
        return None if least is None else least / (MINUTE_SECONDS * MARGIN)

    @property
    def _tokens_per_minute(self) -> int | None:
        allowed = [client.config.tokens_per_minute for client in self._clients]
        return min((each for each in allowed if each is not None), default=None)

    def _stir(self) -> None:
        first = next(iter(self._queue), None)
        if first is not None:
            first.stirred.set()


class EndpointClient:
    """One role's way into an endpoint. Enter it as a context manager; its settings count until it is left.

    Args:
        endpoint: What it leads to.
        config: The role's settings.
        on_limit: Called at each back-off of the endpoint, once if several clients have it, and at each repeat
            of a call of the role that did not reach it; must neither block nor raise.
    """

    def __init__(
        self, endpoint: Endpoint, config: ModelConfig, on_limit: Callable[[LimitChange], None] | None
    ) -> None:
        self.endpoint = endpoint
        self.config = config
        self.on_limit = on_limit
        self.refusal: Said | None = None

    def __enter__(self) -> Self:
        self.endpoint.open(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.endpoint.close(self)

    @asynccontextmanager
    async def admit(self, tokens: int) -> AsyncIterator[Slot]:
        """Wait for slot and hold a slot for the block.

        Args:
            tokens: What the call may take, input and output; above the limit of a minute it counts as that.

        Raises:
            Refused: The endpoint will not serve this role.
        """
        slot = await self.endpoint.enter(self, tokens)
        try:
            yield slot
        finally:
            self.endpoint.leave()

    def unreached(self, seconds: float) -> None:
        """Tell that the endpoint could not be reached, and is tried again after so many seconds."""
        if self.on_limit is not None:
            self.on_limit(LimitChange(self.endpoint.address, None, seconds, None))

    def refuse(self, said: Said) -> None:
        """Admit nothing more for this role, waiting calls included: all are on_limit what was said here."""
        if self.refusal is None:
            self.refusal = said
            self.endpoint.stir(self)


class Slot:
    """A call that may go."""

    def __init__(self, endpoint: Endpoint, *, taken: Taken, held: bool, back_offs: int) -> None:
        self._endpoint = endpoint
        self.taken = taken
        self.held = held
        self.back_offs = back_offs

    def observe(self, status: int | None, retry_after: float | None, tokens: int | None) -> None:
        """Tell what came of the call, once, before the slot ends.

        Args:
            status: The answer's status; None after a connection error or a time-out.
            retry_after: Seconds that the answer asks to wait.
            tokens: What it took, input and output; None where nobody knows, which leaves the estimate.
        """
        self._endpoint.observe(self, status, retry_after, tokens)


class _Waiting:
    def __init__(self, client: EndpointClient) -> None:
        self.client = client
        self.stirred = anyio.Event()


def jitter(failures: int, draw: float) -> float:
    """Return the seconds to wait after a failure that followed ``failures`` others; ``draw`` is in 0..1."""
    return draw * min(CAP_SECONDS, BASE_SECONDS * 2.0 ** min(failures, 10))


_ENDPOINTS: RunVar[dict[tuple[str, str, int | None, str], Endpoint]] = RunVar("reflact_endpoints")


def endpoint_for(
    config: ModelConfig, *, on_limit: Callable[[LimitChange], None] | None = None
) -> EndpointClient:
    """Return a client on the endpoint of a role's address; to be called, and entered, in the event loop.

    There is one endpoint for each scheme, host, port and path in an event loop, and it lives as long as the
    loop: a trainer that starts after another one goes on at the rate that was found.
    """
    parts = urlsplit(config.base_url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    place = (parts.scheme, parts.hostname or "", port, parts.path.rstrip("/"))
    endpoints = _ENDPOINTS.get(None)
    if endpoints is None:
        endpoints = {}
        _ENDPOINTS.set(endpoints)
    if place not in endpoints:
        endpoints[place] = Endpoint(f"{place[0]}://{place[1]}:{port}{place[3]}")
    return endpoints[place].connect(config, on_limit=on_limit)
