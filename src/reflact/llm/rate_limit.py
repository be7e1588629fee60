"""Limits of an endpoint, shared by all roles of all trainers in an event loop that ask it."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import anyio
import httpx
from anyio.lowlevel import RunVar

from reflact.config.models import ModelConfig

DECREASE = 0.95
"""What is kept at most of a rate that was refused."""

RECOVERY, SHORTEST, LONGEST = 25.0, 5.0, 60.0
"""Seconds in which the rate comes back to what was refused, for each second of a pause; their bounds."""

PROBE = 4.0
"""How many times, in such a recovery, the rate's excess over what was refused grows by e."""

SPAN_SECONDS, SPAN_CALLS = 2.0, 8
"""The rate served is measured over so many seconds, or over as long as so many calls take."""

FAR_BELOW = 0.6
"""Refusals at less than this part of the best rate served within ``LONGEST`` say little about the rate."""

SELDOM, ENOUGH, LATEST_CALLS = 0.15, 5, 1000
"""They say nothing about it where they are rarer than that, and so many, among so many calls at most."""

TOLERANCE = 0.03
"""By how much the share of refusals may lie above that share which had nothing to do with the rate."""

SLACK_SECONDS = 0.02
"""How late a call may go and still be followed at the time that it should have gone at."""

MINUTE_SECONDS, MARGIN = 60.0, 1.01
"""A minute of ours is longer than the server's by the margin, since calls take ways of different length."""


class AdaptiveRate:
    """Calls evenly spaced, at a rate that additive increase and multiplicative decrease find.

    There is no rate before something is refused. The first refusal sets it to the rate served lately, or to
    half the calls in flight for each second if that is more; from there it searches, one call a second faster
    for each answer, until something is refused ``SPAN_SECONDS`` later. From then on a refusal takes the rate
    half of the way down to the rate served lately, and by a twentieth at least. While calls wait for their
    turn it grows, evenly up to what was refused, in a time that makes the pause of a back-off a small part of
    it, and beyond that faster and faster, since the endpoint then allows more than it did. A rate at which
    nothing was served is no measurement and stays.

    Endpoints also refuse calls now and then for reasons of their own, at any rate. Where that goes on at
    rates far below the best that was served within the last minute, the rate returns to that best one, and
    for a minute as large a share of refusals is taken as it comes.

    Additive increase with multiplicative decrease brings parties that share an endpoint to equal shares of
    all that it allows (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion
    Avoidance in Computer Networks", 1989).
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._refused = 0.0
        self._slope = 0.0
        self._recovery = SHORTEST
        self._search_since: float | None = None
        self._best, self._best_at = 0.0, -math.inf
        self._below: deque[bool] = deque(maxlen=LATEST_CALLS)
        self._by_chance = 0.0
        self._tolerant_until = -math.inf
        self._last = -math.inf
        self._heard: deque[tuple[float, bool]] = deque()
        self._answers = 0

    def delay(self, now: float, most: float | None) -> float:
        """Return the seconds until a call may go, at no more than ``most`` calls a second."""
        return max(0.0, self._due(most) - now)

    def take(self, now: float, most: float | None) -> None:
        """Let a call go."""
        self._last = max(self._due(most), now - SLACK_SECONDS)

    def served(self, now: float, held: bool) -> None:
        """Take in that a call was answered, and whether this rate was what had held it back."""
        self._hear(now, True)
        if self.rate is None or not held:
            return
        if self._search_since is not None:
            self.rate += 1.0
        else:
            excess = max(0.0, self.rate - self._refused)
            self.rate += (self._slope + PROBE / self._recovery * excess) / self.rate

    def refused(self, now: float) -> None:
        """Take in that a call was refused."""
        self._hear(now, False)

    def decrease(self, now: float, in_flight: int, pause: float) -> None:
        """Take in that a call was refused that went since the last decrease, which costs a pause."""
        lately = self._lately(now)
        if self.rate is None:
            self.rate = max(in_flight / 2, lately)
            self._search_since = now
            return
        searching = self._search_since is not None and now - self._search_since < SPAN_SECONDS
        if searching or not lately or self._tolerated(now):
            return
        if self._tolerant_until > now or lately >= self._best or now - self._best_at > LONGEST:
            self._best, self._best_at, self._tolerant_until = lately, now, -math.inf
        self._search_since = None
        if self._by_the_way():
            self._by_chance = 1 - sum(self._below) / len(self._below)
            self._tolerant_until = now + LONGEST
            self._refused, self.rate = self._best, DECREASE * self._best
        else:
            self._recovery = min(LONGEST, max(SHORTEST, RECOVERY * pause))
            self._refused, self.rate = self.rate, min(DECREASE * self.rate, (self.rate + lately) / 2)
        self._slope = (self._refused - self.rate) / self._recovery

    def _by_the_way(self) -> bool:
        """Whether calls are refused for other reasons: seldom, at rates far below what was served."""
        refused = len(self._below) - sum(self._below)
        return refused >= ENOUGH and refused < SELDOM * len(self._below)

    def _tolerated(self, now: float) -> bool:
        """Whether no more calls were refused lately than are for other reasons, as far as so few tell."""
        if now >= self._tolerant_until:
            return False
        error = math.sqrt(self._by_chance / len(self._heard))
        share = 1 - self._answers / len(self._heard)
        return share <= self._by_chance + TOLERANCE + 2 * error

    def _hear(self, now: float, served: bool) -> None:
        self._heard.append((now, served))
        self._answers += served
        self._lately(now)
        if self.rate is None or self.rate >= FAR_BELOW * self._best:
            self._below.clear()
        else:
            self._below.append(served)

    def _lately(self, now: float) -> float:
        """Return the rate at which calls were answered until now; forget what is older than its span."""
        span = SPAN_SECONDS if self.rate is None else max(SPAN_SECONDS, SPAN_CALLS / self.rate)
        while self._heard and self._heard[0][0] <= now - span:
            self._answers -= self._heard.popleft()[1]
        return self._answers / span

    def _due(self, most: float | None) -> float:
        slowest = min((rate for rate in (self.rate, most) if rate is not None), default=math.inf)
        return self._last + 1 / slowest


@dataclass
class MinuteEntry:
    """What a call took of its minute: estimated before it goes, corrected after."""

    at: float
    amount: int


class MinuteWindow:
    """What calls took within the last minute."""

    def __init__(self) -> None:
        self._taken: deque[MinuteEntry] = deque()
        self._sum = 0

    def delay(self, now: float, amount: int, most: int | None) -> float:
        """Return the seconds until an amount fits beside what the last minute took.

        An amount above ``most`` counts as ``most``: it fits once the minute is empty.
        """
        self._forget(now)
        if most is None:
            return 0.0
        excess = self._sum + min(amount, most) - most
        until = now
        for taken in self._taken:
            if excess <= 0:
                break
            excess -= taken.amount
            until = taken.at + MINUTE_SECONDS * MARGIN
        return until - now

    def take(self, now: float, amount: int) -> MinuteEntry:
        """Book an amount."""
        taken = MinuteEntry(now, amount)
        self._taken.append(taken)
        self._sum += amount
        return taken

    def correct(self, taken: MinuteEntry, amount: int) -> None:
        """Book another amount instead."""
        if self._taken and taken.at >= self._taken[0].at:
            self._sum += amount - taken.amount
        taken.amount = amount

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0].at + MINUTE_SECONDS * MARGIN <= now:
            self._sum -= self._taken.popleft().amount


LIMIT_STATUSES = frozenset({429, 503})
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


Outcome = httpx.Response | httpx.TransportError
"""An answer that was read whole, or a failure on the way."""


class RoleRefused(Exception):
    """The endpoint will not serve a role: what it said first, as an answer or as a failure on the way."""

    def __init__(self, said: Outcome) -> None:
        super().__init__("the endpoint refused this role before")
        self.outcome = said


class Endpoint:
    """One address in one event loop, and everything that wants to be sent there.

    Calls are admitted in the order in which they asked, each as soon as a slot is free, the back-off is
    over, and requests and tokens of the minute allow it. Of the settings of all open clients the strictest
    counts: the smallest of each limit, and an adaptive rate where any role wants one.

    After 429 or 503 nothing is sent for as long as ``Retry-After`` says, or for a time drawn evenly from
    0..min(cap, base * 2**n) seconds after n fruitless back-offs. Answers to calls that went before it mean
    the same back-off and not another one. The rate after it follows ``reflact.llm.rate_limit.Pace``.

    Args:
        address: For messages.
        draw: Gives a number in 0..1.
    """

    def __init__(self, address: str, *, draw: Callable[[], float] = random.random) -> None:
        self.address = address
        self.answered = False
        self._draw = draw
        self._clients: list[EndpointClient] = []
        self._queue: OrderedDict[_Waiter, None] = OrderedDict()
        self._in_flight = 0
        self._pace = AdaptiveRate()
        self._minute = MinuteWindow()
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
        self._wake_first()

    async def enter(self, client: EndpointClient, tokens: int) -> Slot:
        """Wait until a call may go, and count it as in flight.

        Raises:
            Refused: The endpoint will not serve the client's role.
        """
        waiting = _Waiter(client)
        self._queue[waiting] = None
        try:
            while True:
                if client.refusal is not None:
                    raise RoleRefused(client.refusal)
                seconds = self._delay(tokens) if next(iter(self._queue)) is waiting else math.inf
                if seconds < SOON:
                    return self._admit(tokens)
                waiting.wake = anyio.Event()
                with anyio.move_on_after(seconds):
                    await waiting.wake.wait()
        finally:
            del self._queue[waiting]
            self._paced = self._paced and bool(self._queue)
            self._wake_first()

    def leave(self) -> None:
        """Give a slot back."""
        self._in_flight -= 1
        self._wake_first()

    def observe(self, slot: Slot, status: int | None, retry_after: float | None, tokens: int | None) -> None:
        """Take in what came of a call; see ``Slot.observe``."""
        if tokens is not None:
            self._minute.correct(slot.entry, tokens)
        if status is None:
            return
        self.answered = True
        if status in LIMIT_STATUSES:
            self._back_off(slot, status, retry_after)
        elif status < 500:
            self._fruitless = 0
            self._pace.served(anyio.current_time(), slot.rate_limited)
        self._wake_first()

    def wake(self, client: EndpointClient) -> None:
        """Let the waiting calls of a client look again."""
        for waiting in self._queue:
            if waiting.client is client:
                waiting.wake.set()

    # -------------------------------------------------------------------------------------- decisions

    def _delay(self, tokens: int) -> float:
        """Return how long the first in the queue has to wait; infinite where only an event can tell."""
        if self._in_flight >= min((client.config.concurrency for client in self._clients), default=0):
            self._paced = False
            return math.inf
        now = anyio.current_time()
        turn = self._pace.delay(now, self._max_rate)
        if turn >= SOON:
            self._paced = True
        return max(self._until - now, turn, self._minute.delay(now, tokens, self._tokens_per_minute))

    def _admit(self, tokens: int) -> Slot:
        now, most, tokens_most = anyio.current_time(), self._max_rate, self._tokens_per_minute
        self._in_flight += 1
        self._pace.take(now, most)
        return Slot(
            self,
            entry=self._minute.take(now, tokens if tokens_most is None else min(tokens, tokens_most)),
            rate_limited=self._paced and (most is None or (self.rate is not None and self.rate < most)),
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
    def _max_rate(self) -> float | None:
        """Calls a second that the user allows."""
        allowed = [client.config.requests_per_minute for client in self._clients]
        least = min((each for each in allowed if each is not None), default=None)
        return None if least is None else least / (MINUTE_SECONDS * MARGIN)

    @property
    def _tokens_per_minute(self) -> int | None:
        allowed = [client.config.tokens_per_minute for client in self._clients]
        return min((each for each in allowed if each is not None), default=None)

    def _wake_first(self) -> None:
        first = next(iter(self._queue), None)
        if first is not None:
            first.wake.set()


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
        self.refusal: Outcome | None = None

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

    def report_unreached(self, seconds: float) -> None:
        """Tell that the endpoint could not be reached, and is tried again after so many seconds."""
        if self.on_limit is not None:
            self.on_limit(LimitChange(self.endpoint.address, None, seconds, None))

    def refuse(self, said: Outcome) -> None:
        """Admit nothing more for this role, waiting calls included: all are on_limit what was said here."""
        if self.refusal is None:
            self.refusal = said
            self.endpoint.wake(self)


class Slot:
    """A call that may go."""

    def __init__(self, endpoint: Endpoint, *, entry: MinuteEntry, rate_limited: bool, back_offs: int) -> None:
        self._endpoint = endpoint
        self.entry = entry
        self.rate_limited = rate_limited
        self.back_offs = back_offs

    def observe(self, status: int | None, retry_after: float | None, tokens: int | None) -> None:
        """Tell what came of the call, once, before the slot ends.

        Args:
            status: The answer's status; None after a connection error or a time-out.
            retry_after: Seconds that the answer asks to wait.
            tokens: What it took, input and output; None where nobody knows, which leaves the estimate.
        """
        self._endpoint.observe(self, status, retry_after, tokens)


class _Waiter:
    def __init__(self, client: EndpointClient) -> None:
        self.client = client
        self.wake = anyio.Event()


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
