"""Rate control of endpoints, shared by all roles of all trainers in an event loop."""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import anyio
import httpx
from anyio.lowlevel import RunVar

from reflact.config.models import ModelConfig

# Calls a second that each second of answers adds to the rate.
INCREASE = 1.0
# Once the rate fell, an answer adds at most this share of it, so that a slow server refuses few
# calls.
INCREASE_SHARE = 0.02
# The factor of the rate at each back-off; found by simulation. With half, as in TCP, a quarter of a
# limit is unused.
DECREASE = 0.87
# A call that is late by less than this does not delay the next call.
SLACK_SECONDS = 0.02
# Seconds of a server's minute, and the safety factor for different transfer times of calls.
MINUTE_SECONDS = 60.0
MARGIN = 1.01
# Statuses with which an endpoint refuses a call because of its rate.
LIMIT_STATUSES = frozenset({429, 503})
# The base and the cap of the pauses after failures.
BASE_SECONDS = 0.5
CAP_SECONDS = 30.0
# The longest ``Retry-After`` in seconds that is respected.
PATIENCE_SECONDS = 300.0
# A run ends as failed if all requests to an endpoint fail for so long; restarts of servers are
# shorter.
OUTAGE_SECONDS = 600.0
# Delays shorter than this many seconds count as none.
SOON = 1e-6
# Refused requests in a row that end a role: the first ones, of which three may try formats, and
# after an answer.
FIRST_REFUSALS = 4
LATER_REFUSALS = 10

# An answer that was read whole, or a failed attempt.
Outcome = httpx.Response | Exception


class AdaptiveRate:
    """Spaces calls evenly, at a rate found by additive increase and multiplicative decrease.

    There is no rate before the first refusal. It sets the rate to the answers of the last second
    and half the calls in flight, which are served too. Answers to calls that had waited for their
    turn raise it, and each back-off after an answer lowers it.

    Source: Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion
    Avoidance in Computer Networks", 1989.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._has_fallen = False
        self._last = -math.inf
        self._answers: deque[float] = deque()

    def find_turn(self, most: float) -> float:
        """Return the time of the next call, at no more than ``most`` calls a second."""
        return self._last + 1 / min(most, self.rate or math.inf)

    def take(self, now: float, most: float) -> None:
        """Start a call."""
        self._last = max(self.find_turn(most), now - SLACK_SECONDS)

    def increase(self, now: float, *, rate_limited: bool) -> None:
        """Count an answer; it raises the rate if its call had waited for it."""
        if self.rate is None:
            self._answers.append(now)
            while self._answers[0] <= now - 1:
                self._answers.popleft()
        elif rate_limited:
            most = INCREASE_SHARE * self.rate if self._has_fallen else math.inf
            self.rate += min(INCREASE / self.rate, most)

    def decrease(self, now: float, in_flight: int) -> None:
        """Lower the rate at a back-off; the first one sets it."""
        if self.rate is None:
            self.rate = sum(at > now - 1 for at in self._answers) + in_flight / 2
        else:
            self.rate *= DECREASE
            self._has_fallen = True


@dataclass
class MinuteEntry:
    """The tokens of one call: estimated before it, corrected after it."""

    at: float
    amount: int


class LimitChange(NamedTuple):
    """A back-off of an endpoint, or a retry after a failed connection.

    ``status`` is None if the endpoint could not be reached. ``seconds`` is the pause, and ``rate``
    the rate after it in calls a second; None if no rate is known.
    """

    endpoint: str
    status: int | None
    seconds: float
    rate: float | None


class RoleRefused(Exception):
    """The endpoint refuses a role; ``outcome`` is its first refusal."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the endpoint refused this role before")
        self.outcome = outcome


class Slot(NamedTuple):
    """An admitted call; ``back_offs`` are those of the endpoint before it."""

    tokens: MinuteEntry
    rate_limited: bool
    back_offs: int


class Endpoint:
    """One address and key in one event loop, with the queue of its calls.

    Of the settings of all open clients the smallest value of each limit counts. After 429 or 503 no
    call is sent for ``Retry-After`` seconds, or else for 0..min(cap, base * 2**n) seconds, drawn
    uniformly, after n fruitless back-offs. Refusals of calls that were sent before a back-off
    belong to that back-off. A fruitless one lengthens the next pause and leaves the rate: no rate
    would have helped.

    Attributes:
        draw: Returns a number in 0..1.
        answered: Whether any call was answered.
        accesses: The models and keys of which any call was answered, in an earlier start too.
        in_flight: Number of admitted calls that have not ended.
        rate: The rate in calls a second that the endpoint sustains.
        clients: The open clients.
    """

    def __init__(self, address: str, *, draw: Callable[[], float] = random.random) -> None:
        self.address = address
        self.draw = draw
        self.answered = False
        self.accesses: set[tuple[str, str | None]] = set()
        self.in_flight = 0
        self.rate = AdaptiveRate()
        self.clients: tuple[EndpointClient, ...] = ()
        self._concurrency = 0
        self._max_rate = math.inf
        self._max_tokens: int | None = None
        # Calls are admitted in the order in which they asked; the first one watches changes.
        self._turn = anyio.Lock(fast_acquire=True)
        self._changed = anyio.Event()
        self._minute: deque[MinuteEntry] = deque()
        self._until = -math.inf
        self._rated = False
        self._back_offs = 0
        self._fruitless = 0
        self._failing_since: float | None = None
        self._failed_at = -math.inf

    def set_clients(self, clients: Sequence[EndpointClient]) -> None:
        """Let the limits of some clients count.

        The first one begins anew, since failures and answers of earlier runs say little of it.
        """
        if not self.clients:
            self._failing_since = None
            self.accesses.clear()
        self.clients = tuple(clients)
        configs = [client.config for client in clients]
        requests = [c.requests_per_minute for c in configs if c.requests_per_minute is not None]
        tokens = [c.tokens_per_minute for c in configs if c.tokens_per_minute is not None]
        self._concurrency = min((config.concurrency for config in configs), default=0)
        self._max_rate = min(requests, default=math.inf) / (MINUTE_SECONDS * MARGIN)
        self._max_tokens = min(tokens, default=None)
        self.wake()

    def wake(self) -> None:
        """Let the first waiting call check again."""
        self._changed.set()

    async def wait_for_slot(self, client: EndpointClient, tokens: int) -> Slot:
        """Wait behind all calls that asked before until a call may start, and count it."""
        async with self._turn:
            try:
                while client.refusal is None:
                    seconds = self._delay(tokens)
                    if seconds < SOON:
                        return self._take(tokens)
                    self._changed = anyio.Event()
                    with anyio.move_on_after(seconds):
                        await self._changed.wait()
                raise RoleRefused(client.refusal)
            finally:
                self._rated = self._rated and self._turn.statistics().tasks_waiting > 0

    def _delay(self, tokens: int) -> float:
        """Return the seconds that the first call has to wait; infinite without a free slot."""
        if self.in_flight >= self._concurrency:
            self._rated = False
            return math.inf
        now = anyio.current_time()
        turn = self.rate.find_turn(self._max_rate)
        if turn - now >= SOON:
            self._rated = True
        return max(self._until, turn, self._find_room(now, tokens)) - now

    def _find_room(self, now: float, tokens: int) -> float:
        """Return when tokens fit into the minute; more than its limit fit into an empty one."""
        while self._minute and self._minute[0].at + MINUTE_SECONDS * MARGIN <= now:
            self._minute.popleft()
        if self._max_tokens is None:
            return now
        used = sum(entry.amount for entry in self._minute)
        excess = used + min(tokens, self._max_tokens) - self._max_tokens
        until = now
        for entry in self._minute:
            if excess <= 0:
                break
            excess -= entry.amount
            until = entry.at + MINUTE_SECONDS * MARGIN
        return until

    def _take(self, tokens: int) -> Slot:
        now = anyio.current_time()
        self.in_flight += 1
        self.rate.take(now, self._max_rate)
        entry = MinuteEntry(now, tokens)
        if self._max_tokens is not None:
            entry.amount = min(tokens, self._max_tokens)
            self._minute.append(entry)
        rate = self.rate.rate
        is_below = self._max_rate == math.inf or (rate is not None and rate < self._max_rate)
        return Slot(entry, self._rated and is_below, self._back_offs)

    def observe(
        self, slot: Slot, status: int | None, retry_after: float | None, tokens: int | None
    ) -> None:
        """Apply the result of a call once, before its slot ends.

        ``status`` is None after a failed transfer, and ``retry_after`` is in seconds. ``tokens``
        are those of input and output; None keeps the estimate.
        """
        if tokens is not None:
            slot.tokens.amount = tokens
        if status is None:
            return
        self.answered = True
        if status in LIMIT_STATUSES:
            self._back_off(slot, status, retry_after)
        elif status < 500:
            self._fruitless = 0
            self.rate.increase(anyio.current_time(), rate_limited=slot.rate_limited)
        self.wake()

    def _back_off(self, slot: Slot, status: int, asked: float | None) -> None:
        now = anyio.current_time()
        named = asked if asked is not None and asked <= PATIENCE_SECONDS else 0.0
        if slot.back_offs < self._back_offs:
            self._until = max(self._until, now + named)
            return
        self._until = max(self._until, now + (named or jitter(self._fruitless, self.draw())))
        if not self._fruitless:
            self.rate.decrease(now, self.in_flight)
        self._back_offs += 1
        self._fruitless += 1
        change = LimitChange(self.address, status, self._until - now, self.rate.rate)
        for on_limit in dict.fromkeys(client.on_limit for client in self.clients):
            if on_limit is not None:
                on_limit(change)

    def is_out(self, *, served: bool) -> bool:
        """Count an attempt; return whether all attempts of ``OUTAGE_SECONDS`` have failed.

        An outage begins anew if no attempt failed for so long, since nothing was tried then.
        """
        now = anyio.current_time()
        if served:
            self._failing_since = None
        elif self._failing_since is None or now - self._failed_at >= OUTAGE_SECONDS:
            self._failing_since = now
        self._failed_at = now
        return self._failing_since is not None and now - self._failing_since >= OUTAGE_SECONDS


@dataclass(eq=False)
class EndpointClient:
    """One role's client of an endpoint; its settings count while it is entered.

    ``on_limit`` is called at each back-off of the endpoint, once if several clients share it, and
    at each retry of the role after a failed connection; it must neither block nor raise.
    """

    endpoint: Endpoint
    config: ModelConfig
    on_limit: Callable[[LimitChange], None] | None = field(default=None, kw_only=True)
    refusal: Outcome | None = field(default=None, init=False)
    _refusals: int = field(default=0, init=False)

    @property
    def _access(self) -> tuple[str, str | None]:
        return self.config.model, self.config.api_key_env

    @property
    def is_answered(self) -> bool:
        """Whether a call of this model and key was answered, in an earlier start too."""
        return self._access in self.endpoint.accesses

    def __enter__(self) -> Self:
        self.endpoint.set_clients([*self.endpoint.clients, self])
        return self

    def __exit__(self, *exception: object) -> None:
        self.endpoint.set_clients([one for one in self.endpoint.clients if one is not self])

    @asynccontextmanager
    async def admit(self, tokens: int) -> AsyncIterator[Slot]:
        """Wait for a slot and occupy it while the block runs.

        ``tokens`` is the most of the call, input and output; at most the limit of a minute counts.

        Raises:
            RoleRefused: The endpoint refuses this role.
        """
        slot = await self.endpoint.wait_for_slot(self, tokens)
        try:
            yield slot
        finally:
            self.endpoint.in_flight -= 1
            self.endpoint.wake()

    def report_unreached(self, seconds: float) -> None:
        """Report that the endpoint was not reached; a retry follows after ``seconds``."""
        if self.on_limit is not None:
            self.on_limit(LimitChange(self.endpoint.address, None, seconds, None))

    def observe_answer(self) -> None:
        """Note that a call was answered, so that earlier refusals concern their requests alone."""
        self.endpoint.is_out(served=True)
        self.note_access()
        self._refusals = 0

    def note_access(self) -> None:
        """Note that the endpoint answers this model and key."""
        self.endpoint.accesses.add(self._access)

    def observe_refusal(self) -> bool:
        """Return whether a refusal that may be of one request concerns the whole role.

        It does if the first ``FIRST_REFUSALS`` calls of the role are refused in a row, or
        ``LATER_REFUSALS`` after an answer. Until then it concerns one request, as any refusal does
        once a call was answered. A wrong key (401) and a spent quota always concern the role.
        """
        self._refusals += 1
        return self._refusals >= (LATER_REFUSALS if self.is_answered else FIRST_REFUSALS)

    def refuse(self, outcome: Outcome) -> None:
        """Admit no further calls of this role, including waiting ones; all get this outcome."""
        if self.refusal is None:
            self.refusal = outcome
            self.endpoint.wake()


def jitter(failures: int, draw: float) -> float:
    """Return the seconds to wait after ``failures`` earlier failures; ``draw`` is in 0..1."""
    return draw * min(CAP_SECONDS, BASE_SECONDS * 2.0 ** min(failures, 10))


_ENDPOINTS: RunVar[WeakValueDictionary[tuple[str, object], Endpoint]] = RunVar("reflact_endpoints")


def endpoint_for(
    config: ModelConfig,
    secret: str | None = None,
    *,
    on_limit: Callable[[LimitChange], None] | None = None,
) -> EndpointClient:
    """Return a client of the endpoint at a role's address; call and enter it in the event loop.

    An event loop has one endpoint for each address, and each ``limits_group`` or else each key, of
    which a digest is kept, or function of tokens. It lasts as long as its clients.
    """
    parts = urlsplit(config.base_url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    address = f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"
    owner: object = config.limits_group
    if owner is None and config.auth == "token" and config.key is not None:
        owner = id(config.key)
        if isinstance(config.key, Hashable):
            owner = config.key
    elif owner is None and secret is not None:
        owner = hashlib.sha256(secret.encode()).digest()
    endpoints = _ENDPOINTS.get(WeakValueDictionary())
    _ENDPOINTS.set(endpoints)
    endpoint = endpoints.setdefault((address, owner), Endpoint(address))
    return EndpointClient(endpoint, config, on_limit=on_limit)
