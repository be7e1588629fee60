"""How fast an endpoint may be asked: a rate that is found by trying, and what a minute may take. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

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


class Pace:
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

    def wait(self, now: float, most: float | None) -> float:
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
class Taken:
    """What a call took of its minute: estimated before it goes, corrected after."""

    at: float
    amount: int


class Minute:
    """What calls took within the last minute."""

    def __init__(self) -> None:
        self._taken: deque[Taken] = deque()
        self._sum = 0

    def wait(self, now: float, amount: int, most: int | None) -> float:
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

    def take(self, now: float, amount: int) -> Taken:
        """Book an amount."""
        taken = Taken(now, amount)
        self._taken.append(taken)
        self._sum += amount
        return taken

    def correct(self, taken: Taken, amount: int) -> None:
        """Book another amount instead."""
        if self._taken and taken.at >= self._taken[0].at:
            self._sum += amount - taken.amount
        taken.amount = amount

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0].at + MINUTE_SECONDS * MARGIN <= now:
            self._sum -= self._taken.popleft().amount
