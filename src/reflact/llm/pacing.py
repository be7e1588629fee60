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
        self._last = -math.inf
        self._answers: deque[float] = deque()

    def wait(self, now: float, most: float | None) -> float:
        """Return the seconds until a call may go, at no more than ``most`` calls a second."""
        return max(0.0, self._due(most) - now)

    def take(self, now: float, most: float | None) -> None:
        """Let a call go."""
        self._last = max(self._due(most), now - SLACK_SECONDS)

    def served(self, now: float, held: bool) -> None:
        """Take in that a call was answered, and whether this rate was what had held it back."""
        self._answers.append(now)
        self._lately(now)
        if self.rate is None or not held:
            return
        if self._search_since is not None:
            self.rate += 1.0
        else:
            excess = max(0.0, self.rate - self._refused)
            self.rate += (self._slope + PROBE / self._recovery * excess) / self.rate

    def decrease(self, now: float, in_flight: int, pause: float) -> None:
        """Take in that a call was refused that went since the last decrease, which costs a pause."""
        lately = self._lately(now)
        if self.rate is None:
            self.rate = max(in_flight / 2, lately)
            self._search_since = now
        elif lately and (self._search_since is None or now - self._search_since >= SPAN_SECONDS):
            self._search_since = None
            self._refused = self.rate
            self._recovery = min(LONGEST, max(SHORTEST, RECOVERY * pause))
            self.rate = min(DECREASE * self.rate, (self.rate + lately) / 2)
            self._slope = (self._refused - self.rate) / self._recovery

    def _lately(self, now: float) -> float:
        """Return the rate at which calls were answered until now."""
        span = SPAN_SECONDS if self.rate is None else max(SPAN_SECONDS, SPAN_CALLS / self.rate)
        while self._answers and self._answers[0] <= now - span:
            self._answers.popleft()
        return len(self._answers) / span

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
