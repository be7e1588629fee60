"""Hard limits of a run: the worst case of each call is reserved before it is sent, and settled after.

What a call may cost at most is taken from what is left before it goes out, so that no limit is exceeded
however many calls are in flight. A call that does not fit waits while others are, since they may settle
below what is reserved; when none are, the budget is spent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

import anyio

from reflact.config.models import ModelConfig
from reflact.config.training import BudgetConfig, TrainerConfig
from reflact.errors import BudgetSpent, ConfigError
from reflact.events import BudgetUpdated, Event, RateLimited
from reflact.llm.cache_keys import strip_credentials
from reflact.llm.pricing import BILLION, read_cap, usd_of
from reflact.messages import CallReservation
from reflact.protocols import Environment, ResponseStore, Session
from reflact.records import Spend, Usage
from reflact.types import Grade, Item, Split

if TYPE_CHECKING:
    from reflact.llm.rate_limit import LimitChange


RAISE_HINT = "set a larger one to go on"


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


def find_exceeded_limit(limits: BudgetConfig, taken: Amount, most: Amount) -> str | None:
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
            return _describe_limit(key, *numbers)
    return None


def _describe_limit(key: str, limit: str, so_far: str, wanted: str) -> str:
    return f"budget.{key} is {limit}: {so_far} are taken, and the next call may take {wanted}; {RAISE_HINT}"


def describe_overrun(usage: Usage, worst: Usage) -> str | None:
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
        self.amount = amount_of(worst)
        self.cost = Usage()
        self.overrun: str | None = None
        self.decided = anyio.Event()
        self.admitted = False

    def mark_sent(self) -> None:
        """From now on the call may be charged."""
        self.cost = self._worst

    def release(self) -> None:
        """Note that the call cost nothing."""
        self.cost = Usage()

    def settle(self, usage: Usage) -> None:
        """Note what the call cost: its worst case if that was not counted."""
        if not usage.uncounted:
            self.cost = usage
            self.overrun = describe_overrun(usage, self._worst) if self._strict else None


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
            f"budget.max_seconds is {self._limits.max_seconds:g}, and the time is over; {RAISE_HINT}"
        )

    def _admit(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            reason = self._broken or find_exceeded_limit(
                self._limits, self._taken + self._reserved, first.amount
            )
            if reason is None:
                self._reserved += first.amount
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
            self._reserved -= reservation.amount
            self._broken = self._broken or reservation.overrun
            self._take(reservation.cost)
        elif reservation in self._waiting:
            self._waiting.remove(reservation)
        self._admit()

    def _take(self, usage: Usage) -> None:
        self._used += usage
        self._taken += amount_of(usage)
        if self._on_usage is not None and usage.calls:
            self._on_usage(self._used, anyio.current_time() - self._since)


def require_caps(config: TrainerConfig, *, passed: Collection[str]) -> None:
    """Make sure that the worst case of every call is known where a budget has to reservation.

    Args:
        config: The configuration of a run.
        passed: The roles that are passed in Python, so that their calls are not seen.

    Raises:
        ConfigError: Names the key that is missing.
    """
    limits, target = config.budget, config.target
    by_tokens, by_calls = _list_set(limits, "max_tokens", "max_usd"), _list_set(limits, "max_calls")
    if "optimizer" in passed and (by_tokens or by_calls):
        raise ConfigError(
            f"budget.{(by_tokens + by_calls)[0]} cannot hold for an optimizer passed in Python, whose calls "
            "are not seen: configure models.optimizer instead, or set it to null"
        )
    if "target" in passed:
        for keys, name, cap in (
            (by_tokens, "max_tokens_per_rollout", target.max_tokens_per_rollout),
            (by_calls, "max_calls_per_rollout", target.max_calls_per_rollout),
        ):
            if keys and cap is None:
                raise ConfigError(
                    f"budget.{keys[0]} needs target.{name}: the calls of a target passed in Python are not "
                    "seen, so say the most that one rollout takes"
                )
    if config.environment.grader == "critic" and "target" in passed and (by_tokens or by_calls):
        raise ConfigError(
            f"budget.{(by_tokens + by_calls)[0]} cannot hold where a critic grades a target passed in "
            "Python: the critic's calls are seen within rollouts whose others are not; configure "
            "models.target instead, or set it to null"
        )
    for role in ("target", "optimizer", *(["critic"] if config.uses_critic else [])):
        require_cap(limits, getattr(config.models, role), role=role, seen=role not in passed)


def require_cap(limits: BudgetConfig, model: ModelConfig, *, role: str, seen: bool = True) -> None:
    """Make sure that the worst case of a role's calls is known where a budget has to reservation.

    Args:
        limits: The budget.
        model: The role's model.
        role: Its name under ``models``.
        seen: Whether its calls go through the own client.

    Raises:
        ConfigError: Names the key that is missing.
    """
    by_tokens = _list_set(limits, "max_tokens", "max_usd")
    if by_tokens and seen and read_cap(_settings(model)) is None:
        raise ConfigError(f"budget.{by_tokens[0]} needs models.{role}.max_tokens: a cap on each reply")
    if limits.max_usd is not None and not model.unpriced and usd_of(Usage(calls=1), model) is None:
        raise ConfigError(
            f"budget.max_usd needs models.{role}.price: no list price is known of {model.model!r} at "
            f"{strip_credentials(model.base_url)}; give one, or set models.{role}.unpriced to true, so that its "
            "calls cost nothing"
        )


def _list_set(limits: BudgetConfig, *keys: str) -> list[str]:
    return [key for key in keys if getattr(limits, key) is not None]


def _settings(model: ModelConfig) -> dict[str, object]:
    return {model.max_tokens_key: model.max_tokens, **model.extra_body}


class BudgetedEnvironment:
    """An environment that gives no result once the budget is spent, whatever it made of the error.

    Args:
        inner: The environment.
        budget: What the run may still take.
    """

    def __init__(self, inner: Environment, *, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    @property
    def identity(self) -> str:
        """That of the environment."""
        return self._inner.identity

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items, in a fixed order."""
        return self._inner.items(split)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Run and judge an item.

        Raises:
            BudgetSpent: A call was refused meanwhile, of this rollout or of another one.
        """
        graded = await self._inner.run(item, session, seed=seed)
        self._budget.check()
        return graded


class DeclaredCostEnvironment(BudgetedEnvironment):
    """An environment whose target makes calls that are not seen: each rollout counts as what was declared.

    Args:
        inner: The environment.
        budget: What the run may still take.
        effects: The ledger.
        run_id: The run that pays.
        worst: The most that a rollout takes.
    """

    def __init__(
        self, inner: Environment, *, budget: Budget, responses: ResponseStore, run_id: str, worst: Usage
    ) -> None:
        super().__init__(inner, budget=budget)
        self._responses = responses
        self._run_id = run_id
        self._worst = worst

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Run and judge an item once its rollout fits the budget.

        Raises:
            BudgetSpent: It does not fit.
        """
        place = f"target/rollout/unseen/{item.fingerprint}/{seed}"
        call = CallReservation(
            key=place,
            run_id=self._run_id,
            call_id=place,
            role="target",
            purpose="rollout",
            endpoint="unseen",
            model="unseen",
            worst_case=self._worst,
        )
        async with self._budget.reserve(self._worst) as reservation:
            reservation.mark_sent()
            await self._responses.reserve(call)
            graded = await self._inner.run(item, session, seed=seed)
            calls = self._worst.calls
            await self._responses.settle(call, Usage(calls=calls, uncounted=calls))
            return graded


def declared_rollout_cost(config: TrainerConfig) -> Usage | None:
    """Return the most that a rollout takes whose calls are not seen, None where nothing is declared.

    Its tokens are taken as the dearest kind.
    """
    target, model = config.target, config.models.target
    if target.max_calls_per_rollout is None and target.max_tokens_per_rollout is None:
        return None
    tokens = target.max_tokens_per_rollout or 0
    kinds = (
        Usage(input_tokens=tokens),
        Usage(input_tokens=tokens, cached_tokens=tokens),
        Usage(output_tokens=tokens),
    )
    prices = [price for price in (usd_of(kind, model) for kind in kinds) if price is not None]
    return Usage(calls=target.max_calls_per_rollout or 1, input_tokens=tokens, usd=max(prices, default=None))


class LimitEvents:
    """Posts events of one run.

    Args:
        run_id: The run.
        limits: Its budget.
        post: Takes an event without waiting.
    """

    def __init__(self, run_id: str, limits: BudgetConfig, post: Callable[[Event], None]) -> None:
        self._run_id = run_id
        self._limits = limits.model_dump()
        self._post = post

    def post_budget(self, usage: Usage, seconds: float) -> None:
        """Tell what the run has taken, in so many active seconds."""
        self._post(BudgetUpdated(run_id=self._run_id, usage=usage, seconds=seconds, **self._limits))

    def post_limit_change(self, change: LimitChange) -> None:
        """Tell that an endpoint was asked too much."""
        self._post(RateLimited(run_id=self._run_id, **change._asdict()))
