"""Hard limits of a run on calls, tokens, money and time.

Before each call, reflact reserves its worst-case cost; after the call, it settles the real cost. A
call that does not fit waits for calls in flight, which may cost less. If no call is in flight, its
answer is limited to what the role's answers so far need; if that does not fit either, the budget is
spent. So the last calls cost little more than they reserve, and no limit is exceeded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal

import anyio

from reflact.config.models import ModelConfig
from reflact.config.training import BudgetConfig, TrainerConfig
from reflact.errors import BudgetSpent, ConfigError
from reflact.llm.pricing import read_cap, usd_of
from reflact.messages import CallReservation
from reflact.protocols import DecisionLog, ResponseStore
from reflact.records import BILLION, FaultKind, Spend, Usage

RAISE_HINT = "set a larger one to go on"

# A shortened answer may have so many times the mean tokens of its role's answers, and so many at
# least.
SPARE_FACTOR = 4
FEWEST_TOKENS = 64

COUNTED_LIMITS = ("max_calls", "max_tokens", "max_usd")

# What to do if a budget counts calls that reflact does not see.
UNSEEN_ADVICE = {
    "optimizer": "configure models.optimizer instead, or set this limit to null",
    "target": "use a target that sends its requests through the run, or limit train.max_rollouts "
    "or budget.max_seconds",
}


@dataclass(frozen=True, slots=True)
class Amount:
    """Calls, tokens (input and output) and billionths of a dollar."""

    calls: int = 0
    tokens: int = 0
    billionths: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.calls + other.calls, self.tokens + other.tokens, self.billionths + other.billionths
        )

    def __sub__(self, other: Amount) -> Amount:
        return self + Amount(-other.calls, -other.tokens, -other.billionths)


def amount_of(usage: Usage) -> Amount:
    """Return the amount of a usage; a usage without a price costs no money."""
    tokens = usage.input_tokens + usage.output_tokens
    return Amount(usage.calls, tokens, usage.billionths or 0)


def _sum_charges(spent: Iterable[Spend]) -> Amount:
    """Return what a budget counts of a spend: unsettled calls at their worst case."""
    amounts = (amount_of(entry.usage) + amount_of(entry.worst_case) for entry in spent)
    return sum(amounts, Amount())


def find_exceeded_limit(limits: BudgetConfig, spent: Amount, next_call: Amount) -> str | None:
    """Return a sentence about the limit that a further call would exceed; None if the call fits."""
    money = None if limits.max_usd is None else math.floor(Decimal(str(limits.max_usd)) * BILLION)
    for key, limit, used, needed in (
        ("max_calls", limits.max_calls, spent.calls, next_call.calls),
        ("max_tokens", limits.max_tokens, spent.tokens, next_call.tokens),
        ("max_usd", money, spent.billionths, next_call.billionths),
    ):
        if limit is not None and used + needed > limit:
            shown = [f"{number:,}" for number in (limit, used, needed)]
            if key == "max_usd":
                shown = [f"{number / BILLION:.6f}" for number in (limit, used, needed)]
            return (
                f"budget.{key} is {shown[0]}: {shown[1]} are used, and the next call may use "
                f"{shown[2]}; {RAISE_HINT}"
            )
    return None


def describe_overrun(usage: Usage, worst: Usage) -> str | None:
    """Return a sentence about an answer that used more than was reserved; None if it used less."""
    for verb, used, most in (
        ("read", usage.input_tokens, worst.input_tokens),
        ("wrote", usage.output_tokens, worst.output_tokens),
    ):
        if used > most:
            return (
                f"the provider ignores caps: it {verb} {used:,} tokens, and the request allowed "
                f"{most:,}; so a budget of tokens or money is not possible; use another model, or "
                "set budget.max_tokens and budget.max_usd to null"
            )
    return None


@dataclass(eq=False)
class Reservation:
    """The reserved worst case of one call, until its cost is known.

    ``uncertain`` is the most that the call may have used beyond ``usage``. ``shorter`` is the worst
    case with a shorter answer, which the call gets if it would not fit otherwise.
    """

    worst: Usage
    shorter: Usage | None = None
    role: str = ""
    is_shortened: bool = False
    usage: Usage = field(default_factory=Usage)
    uncertain: Usage = field(default_factory=Usage)
    decided: anyio.Event = field(default_factory=anyio.Event)

    @property
    def cost(self) -> Usage:
        """What the call counts against the limits."""
        return self.usage + self.uncertain

    def shorten(self) -> bool:
        """Reserve the worst case of a shorter answer; False if there is none."""
        if self.is_shortened or self.shorter is None:
            return False
        self.is_shortened = True
        self.worst = self.shorter
        return True

    def mark_sent(self) -> None:
        """Count the worst case, since the provider may charge for the call from now on."""
        self.uncertain = self.worst

    def release(self) -> None:
        """Count nothing, since the call was free."""
        self.uncertain = Usage()

    def settle(self, usage: Usage) -> None:
        """Count the usage; without counts, the tokens and the money of the worst case too."""
        self.usage = usage
        self.uncertain = self.worst.model_copy(update={"calls": 0}) if usage.uncounted else Usage()


@dataclass
class CurrentStage:
    """The step and the stage that a run works on, under which calls are booked."""

    step: int = 0
    stage: str = ""


class Budget:
    """The budget of a run, for one event loop.

    Calls are admitted in the order of their requests. After one refusal, all further calls are
    refused until the run is started again.

    ``on_usage`` is called by ``report_usage`` and after each charged call, with the run's total
    usage, the worst case of its interrupted and uncounted calls, and its active seconds; it must
    neither wait nor raise.

    Attributes:
        answered_roles: The roles that an earlier start of the run got an answer from.
        current_stage: What the run works on; whoever measures the time of stages keeps it.
        deadline: When calls in flight must end, on the event loop's clock. It is infinite if the
            time was over at the start, so that stored results can still be read.
    """

    def __init__(
        self, limits: BudgetConfig, *, on_usage: Callable[[Usage, Usage, float], None] | None = None
    ) -> None:
        self.deadline = math.inf
        self.current_stage = CurrentStage()
        self.answered_roles: frozenset[str] = frozenset()
        self._limits = limits
        self._on_usage = on_usage
        self._used = Usage()
        self._uncertain = Usage()
        self._charged = Amount()
        self._answered: dict[str, Usage] = {}
        self._since = 0.0
        self._admitted: set[Reservation] = set()
        self._waiting: deque[Reservation] = deque()
        self._overrun: str | None = None
        self._reason: str | None = None
        self._late = False

    def begin(self, spent: Iterable[Spend], seconds: float) -> None:
        """Subtract the spending of earlier starts, unsettled calls at their worst case, and start
        the clock.
        """
        spent = tuple(spent)
        self.answered_roles = frozenset(entry.role for entry in spent if entry.usage.calls)
        self._used = sum((entry.usage for entry in spent), Usage())
        self._uncertain = sum((entry.worst_case for entry in spent), Usage())
        self._charged = _sum_charges(spent)
        for entry in spent:
            self._note_answer(entry.role, entry.usage)
        self._since = anyio.current_time() - seconds
        if self._limits.max_seconds is not None:
            self._late = seconds >= self._limits.max_seconds
            self.deadline = math.inf if self._late else self._since + self._limits.max_seconds

    def report_usage(self) -> None:
        """Call ``on_usage`` with what is used so far."""
        if self._on_usage is not None:
            self._on_usage(self._used, self._uncertain, anyio.current_time() - self._since)

    @asynccontextmanager
    async def reserve(
        self, worst: Usage, shorter: Usage | None = None, *, role: str = ""
    ) -> AsyncIterator[Reservation]:
        """Wait until the worst case of a call fits, and reserve it until the block ends.

        ``shorter`` is reserved instead if only that fits; see ``Reservation.is_shortened``.

        Raises:
            BudgetSpent: The call does not fit, and no call in flight can leave room for it.
        """
        self.check()
        if self._late or anyio.current_time() >= self.deadline:
            raise self.out_of_time()
        reservation = Reservation(worst, shorter, role)
        self._waiting.append(reservation)
        self._admit()
        try:
            await reservation.decided.wait()
            self.check()
            yield reservation
        finally:
            self._leave(reservation)

    def find_shorter_cap(self, role: str) -> int | None:
        """Return the tokens that an answer of a role needs, by its answers so far, if any."""
        used = self._answered.get(role)
        if used is None or (self._limits.max_tokens is None and self._limits.max_usd is None):
            return None
        return max(FEWEST_TOKENS, math.ceil(SPARE_FACTOR * used.output_tokens / used.calls))

    def end_at_cut_answer(self, tokens: int) -> BudgetSpent:
        """Refuse all further calls because a shortened answer was cut, and return the error."""
        return self._refuse(
            f"what is left of the budget allowed an answer of {tokens:,} tokens, which was cut "
            f"there; {RAISE_HINT}"
        )

    def _note_answer(self, role: str, usage: Usage) -> None:
        if usage.calls > usage.uncounted:
            self._answered[role] = self._answered.get(role, Usage()) + usage

    def check_ledger(self, spent: Iterable[Spend], call: Usage) -> None:
        """Raise BudgetSpent if a call does not fit beside what all that share the limits have spent
        and reserved.
        """
        reason = find_exceeded_limit(self._limits, _sum_charges(spent), amount_of(call))
        if reason is not None:
            raise BudgetSpent(reason)

    def check(self) -> None:
        """Raise BudgetSpent if any call was refused."""
        if self._reason is not None:
            raise BudgetSpent(self._reason)

    def out_of_time(self) -> BudgetSpent:
        """Refuse all further calls because the time is over, and return the error."""
        return self._refuse(
            f"budget.max_seconds is {self._limits.max_seconds:g}, and the time is over; "
            f"{RAISE_HINT}"
        )

    def _admit(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            reason = self._find_reason(first)
            if reason is not None and not self._admitted and first.shorten():
                reason = self._find_reason(first)
            if reason is None:
                self._charged += amount_of(first.worst)
                self._admitted.add(self._waiting.popleft())
                first.decided.set()
            elif self._admitted:
                return
            else:
                self._refuse(reason)

    def _find_reason(self, call: Reservation) -> str | None:
        """Return why a call does not fit; None if it fits."""
        return self._overrun or find_exceeded_limit(
            self._limits, self._charged, amount_of(call.worst)
        )

    def _refuse(self, reason: str) -> BudgetSpent:
        self._reason = self._reason or reason
        for reservation in self._waiting:
            reservation.decided.set()
        self._waiting.clear()
        return BudgetSpent(self._reason)

    def _leave(self, reservation: Reservation) -> None:
        if reservation in self._admitted:
            self._admitted.remove(reservation)
            cost = reservation.cost
            if self._limits.max_tokens is not None or self._limits.max_usd is not None:
                self._overrun = self._overrun or describe_overrun(cost, reservation.worst)
            self._note_answer(reservation.role, reservation.usage)
            self._used += reservation.usage
            self._uncertain += reservation.uncertain
            self._charged += amount_of(cost) - amount_of(reservation.worst)
            if cost.calls:
                self.report_usage()
        elif reservation in self._waiting:
            self._waiting.remove(reservation)
        self._admit()


# Takes an attempt of a call with what it used and how it failed; must neither wait nor raise.
AttemptCallback = Callable[[CallReservation, Usage, FaultKind | None], None]


def ignore_attempt(call: CallReservation, usage: Usage, fault: FaultKind | None) -> None:
    """Do nothing with an attempt."""


@dataclass(frozen=True)
class Account:
    """Where the model calls of a run are stored and charged.

    ``rejected`` are the keys of a critic's replies that were all invalid. They leave an item
    unmeasured, and no decision is logged. If the run fails, they are forgotten, so that its next
    start asks the critic again. ``on_attempt`` is called after each attempt of a call.
    """

    run_id: str
    responses: ResponseStore
    decision_log: DecisionLog
    budget: Budget = field(default_factory=lambda: Budget(BudgetConfig()))
    rejected: list[str] = field(default_factory=list)
    on_attempt: AttemptCallback = ignore_attempt


def require_caps(config: TrainerConfig, *, passed: Collection[str], trains: bool = True) -> None:
    """Raise ConfigError, naming the setting, if a budget could not know the worst case of every
    call.

    reflact does not see the calls of the ``passed`` roles, which are Python objects. A measurement
    does not ask the optimizer; only a run that ``trains`` does.
    """
    counted = [key for key in COUNTED_LIMITS if getattr(config.budget, key) is not None]
    roles = ["target"]
    if trains:
        roles.append("optimizer")
    if config.uses_critic:
        roles.append("critic")
    for role, advice in UNSEEN_ADVICE.items():
        if counted and role in roles and role in passed:
            raise ConfigError(
                f"budget.{counted[0]} is not possible with the {role} passed in Python, because "
                f"its calls are not seen: {advice}"
            )
    for role in roles:
        model = getattr(config.models, role)
        require_cap(config.budget, model, role=role, seen=role not in passed)


def require_cap(limits: BudgetConfig, model: ModelConfig, *, role: str, seen: bool = True) -> None:
    """Raise ConfigError, naming the setting, if a budget could not know the worst case of a role's
    calls.

    ``seen`` is False if the calls do not go through reflact's client.
    """
    limited = [key for key in COUNTED_LIMITS[1:] if getattr(limits, key) is not None]
    cap = read_cap({"max_tokens": model.max_tokens, **model.extra_body})
    if limited and seen and cap is None:
        raise ConfigError(
            f"budget.{limited[0]} needs models.{role}.max_tokens, the maximum length of a reply: "
            "set it"
        )
    if limits.max_usd is not None and usd_of(Usage(calls=1), model) is None:
        raise ConfigError(
            f"budget.max_usd needs models.{role}.price: no list price is known of {model.title}; "
            "give one, in which 0 is the price of calls that cost nothing"
        )


@asynccontextmanager
async def cover_rollout(account: Account) -> AsyncIterator[None]:
    """Surround a rollout, which has no result after the budget is spent, even if its environment
    caught the error.
    """
    yield
    account.budget.check()
