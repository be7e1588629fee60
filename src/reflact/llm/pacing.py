"""How fast an endpoint may be asked: a rate that is found by trying, and what a minute may take. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

DECREASE = 0.95
"""What is kept of a rate that was refused."""

LEAST = 0.5
"""What is kept at least, however much of it was refused."""

RECOVERY, SHORTEST, LONGEST = 25.0, 5.0, 60.0
"""Seconds that the rate takes to what was refused: for each second of the pause that it cost; the bounds."""

PROBE = 4.0
"""How fast the rate grows above what was refused: e-fold in this part of the recovery."""

SLACK_SECONDS = 0.05
"""How late a call may go and still be followed at the time that it should have gone at."""

MINUTE_SECONDS, MARGIN = 60.0, 1.01
"""A minute of ours is longer than the server's by the margin, since calls take ways of different length."""


class Pace:
    """Calls evenly spaced, at a rate that additive increase and multiplicative decrease find.

    There is no rate before something is refused. The first refusal sets it to half the calls in flight, for
    each second; from there it searches, one call a second faster for each answer. The second refusal ends
    the search. From then on a refusal leaves the share of the rate that was served, between ``LEAST`` and
    ``DECREASE``, and while calls wait for their turn the rate grows by ``CLIMB`` of what was last refused in
    each second, faster above it, since the endpoint then allows more than it did. A rate at which nothing
    was served is no measurement and stays. Additive increase with multiplicative decrease is what brings
    parties that share an endpoint to equal shares of all it allows (Chiu and Jain, "Analysis of the Increase
    and Decrease Algorithms for Congestion Avoidance in Computer Networks", 1989).
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._ceiling = 0.0
        self._searching = False
        self._recovery = SHORTEST
        self._served = 0
        self._refused = 0
        self._last = -math.inf
        self._answers: deque[float] = deque()

    def wait(self, now: float, most: float | None) -> float:
        """Return the seconds until a call may go, at no more than ``most`` calls a second."""
        return max(0.0, self._due(most) - now)

    def take(self, now: float, most: float | None) -> bool:
        """Let a call go; True where the rate that was found, and no other limit, holds calls back."""
        due = self._due(most)
        self._last = max(due, now - SLACK_SECONDS)
        return self.rate is not None and (most is None or self.rate < most) and due > now - SLACK_SECONDS

    def served(self, now: float, held: bool) -> None:
        """Take in that a call was answered; ``held`` is what ``take`` said of it."""
        self._served += 1
        self._answers.append(now)
        self._lately(now)
        if self.rate is None or not held:
            return
        if self._searching:
            self.rate += 1.0
        else:
            climb = (1 - DECREASE) * self._ceiling
            slope = (climb + PROBE * max(0.0, self.rate - self._ceiling)) / self._recovery
            self.rate += slope / self.rate

    def refused_again(self) -> None:
        """Take in that a call was refused that went before the last decrease."""
        self._refused += 1

    def decrease(self, now: float, in_flight: int, pause: float) -> None:
        """Take in that a call was refused that went since the last decrease."""
        lately = self._lately(now)
        if self.rate is None:
            self.rate = max(in_flight / 2, lately, 0.5)
            self._searching = True
        elif self._served:
            share = self._served / (self._served + self._refused)
            kept = DECREASE if self._searching else min(DECREASE, max(LEAST, share))
            self.rate = max(self.rate * kept, DECREASE * min(self.rate, lately))
            self._searching = False
        self._ceiling = self.rate / DECREASE
        self._recovery = min(LONGEST, max(SHORTEST, RECOVERY * pause))
        self._served = self._refused = 0

    def _lately(self, now: float) -> int:
        while self._answers and self._answers[0] <= now - 1.0:
            self._answers.popleft()
        return len(self._answers)

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
