"""Hard limits of a run: the worst case of each call is reserved before it is sent, and settled after.

What a call may cost at most is taken from what is left before it goes out, so that no limit is exceeded
however many calls are in flight. A call that does not fit waits while others are, since they may settle
below what is reserved; when none are, the budget is spent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal

import anyio

from reflact.config import BudgetConfig
from reflact.errors import BudgetSpent
from reflact.llm.pricing import BILLION
from reflact.results import Spend, Usage

MORE = "set a larger one to go on"


@dataclass(frozen=True, slots=True)
class Amount:
    """What budgets count: calls, tokens in and out together, and billionths of a dollar."""

    calls: int = 0
    tokens: int = 0
    billionths: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.calls + other.calls, self.tokens + other.tokens, self.billionths + other.billionths
        )

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            self.calls - other.calls, self.tokens - other.tokens, self.billionths - other.billionths
        )


def amount_of(usage: Usage) -> Amount:
    """Return what a usage takes from a budget; no price takes no money."""
    billionths = 0 if usage.usd is None else round(usage.usd * BILLION)
    return Amount(usage.calls, usage.input_tokens + usage.output_tokens, billionths)


def lacking(limits: BudgetConfig, taken: Amount, most: Amount) -> str | None:
    """Return which limit has no room for a call beside what is taken, as a sentence; None where it fits."""
    money = None if limits.max_usd is None else math.floor(Decimal(str(limits.max_usd)) * BILLION)
    for key, limit, so_far, wanted in (
        ("max_calls", limits.max_calls, taken.calls, most.calls),
        ("max_tokens", limits.max_tokens, taken.tokens, most.tokens),
        ("max_usd", money, taken.billionths, most.billionths),
    ):
        if limit is not None and so_far + wanted > limit:
            numbers = (
                f"{n / BILLION:.6f}" if key == "max_usd" else f"{n:,}" for n in (limit, so_far, wanted)
            )
            return _sentence(key, *numbers)
    return None


def _sentence(key: str, limit: str, so_far: str, wanted: str) -> str:
    return f"budget.{key} is {limit}: {so_far} are taken, and the next call may take {wanted}; {MORE}"


def overrun(usage: Usage, worst: Usage) -> str | None:
    """Return how an answer went beyond what was reserved for its call, as a sentence; None if it did not."""
    for what, used, most in (
        ("read", usage.input_tokens, worst.input_tokens),
        ("wrote", usage.output_tokens, worst.output_tokens),
    ):
        if used > most:
            return (
                f"the provider does not keep to caps: it {what} {used:,} tokens where {most:,} were the most "
                "that the request allowed, so no budget of tokens or money can hold; ask a model that does, "
                "or set budget.max_tokens and budget.max_usd to null"
            )
    return None


class Reservation:
    """What is reserved of a budget for one call, from before it is sent until it is known what it cost.

    It counts as nothing before ``mark_sent``, then as its worst case, and after ``settle`` as what it cost.
    """

    def __init__(self, worst: Usage, *, strict: bool) -> None:
        self._worst = worst
        self._strict = strict
        self.most = amount_of(worst)
        self.took = Usage()
        self.broken: str | None = None
        self.decided = anyio.Event()
        self.admitted = False

    def mark_sent(self) -> None:
        """From now on the call may be charged."""
        self.took = self._worst

    def release(self) -> None:
        """Note that the call cost nothing."""
        self.took = Usage()

    def settle(self, usage: Usage) -> None:
        """Note what the call cost: its worst case if that was not counted."""
        if not usage.uncounted:
            self.took = usage
            self.broken = overrun(usage, self._worst) if self._strict else None


class Budget:
    """What a run may still take; for one event loop.

    Calls are admitted in the order in which they ask; none overtakes. Once one is refused all are, until
    the run is started again.

    Args:
        limits: The limits.
        on_usage: Called when a call took something, with all that the run has taken and its active seconds;
            must neither wait nor raise.
    """

    def __init__(
        self, limits: BudgetConfig, *, on_usage: Callable[[Usage, float], None] | None = None
    ) -> None:
        self._limits = limits
        self._on_usage = on_usage
        self._strict = limits.max_tokens is not None or limits.max_usd is not None
        self._used = Usage()
        self._taken = Amount()
        self._since = 0.0
        self._reserved = Amount()
        self._in_flight = 0
        self._waiting: deque[Reservation] = deque()
        self._broken: str | None = None
        self._reason: str | None = None
        self._late = False
        self._deadline = math.inf

    def begin(self, spent: Iterable[Spend], seconds: float) -> None:
        """Take off what earlier starts took, unsettled calls at their worst case, and start the time.

        Args:
            spent: What the run has paid for and may have paid for.
            seconds: The run's active time so far.
        """
        parts = [part for entry in spent for part in (entry.usage, entry.worst_case)]
        self._used = sum(parts, Usage())
        self._taken = sum((amount_of(part) for part in parts), Amount())
        self._since = anyio.current_time() - seconds
        if self._limits.max_seconds is not None:
            left = self._limits.max_seconds - seconds
            self._late = left <= 0
            self._deadline = math.inf if self._late else anyio.current_time() + left

    @property
    def deadline(self) -> float:
        """When what is in flight has to end, on the event loop's clock.

        Infinite where the time was over at the beginning: then no call is admitted, and what is stored can
        still be looked at.
        """
        return self._deadline

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Reservation]:
        """Wait until a call fits at its worst case, and reserve that until the block ends.

        Raises:
            BudgetSpent: It does not fit, and nothing is in flight that might leave room for it.
        """
        self.check()
        if self._late or anyio.current_time() >= self._deadline:
            raise self.out_of_time()
        reservation = Reservation(worst, strict=self._strict)
        self._waiting.append(reservation)
        self._admit()
        try:
            await reservation.decided.wait()
            self.check()
            yield reservation
        finally:
            self._leave(reservation)

    def check(self) -> None:
        """Raise BudgetSpent where a call was refused since the beginning."""
        if self._reason is not None:
            raise BudgetSpent(self._reason)

    def out_of_time(self) -> BudgetSpent:
        """Refuse all further calls, since the time is over, and return the error that says so."""
        return self._refuse(
            f"budget.max_seconds is {self._limits.max_seconds:g}, and the time is over; {MORE}"
        )

    def _admit(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            reason = self._broken or lacking(self._limits, self._taken + self._reserved, first.most)
            if reason is None:
                self._reserved += first.most
                self._in_flight += 1
                first.admitted = True
                self._waiting.popleft().decided.set()
            elif self._in_flight:
                return
            else:
                self._refuse(reason)

    def _refuse(self, reason: str) -> BudgetSpent:
        self._reason = self._reason or reason
        while self._waiting:
            self._waiting.popleft().decided.set()
        return BudgetSpent(self._reason)

    def _leave(self, reservation: Reservation) -> None:
        if reservation.admitted:
            self._in_flight -= 1
            self._reserved -= reservation.most
            self._broken = self._broken or reservation.broken
            self._take(reservation.took)
        elif reservation in self._waiting:
            self._waiting.remove(reservation)
        self._admit()

    def _take(self, usage: Usage) -> None:
        self._used += usage
        self._taken += amount_of(usage)
        if self._on_usage is not None and usage.calls:
            self._on_usage(self._used, anyio.current_time() - self._since)
