"""The toy world with a provider that is paid for every answer, through everything that pays."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx

from doubles import completion, config
from reflact.adapters import adapt_target
from reflact.config.models import Price
from reflact.config.training import BudgetConfig, TrainerConfig
from reflact.errors import BudgetSpent
from reflact.integrations.opentelemetry import Tracing
from reflact.llm.budget import Account, Amount, Budget, amount_of, cover_rollout, find_exceeded_limit
from reflact.llm.client import Client
from reflact.llm.pricing import read_cap, usd_of
from reflact.messages import CallId, RenderedPrompt, Reply
from reflact.protocols import R, Session
from reflact.records import BILLION, RunSummary, Usage
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.training.loop import store_summary, train_to_end
from reflact.training.open_run import start
from reflact.training.plan import Overrides, RunPlan, prepare_run
from reflact.training.run import Run
from reflact.types import Skill, Turn

WIDE = 64
MODEL = config(
    max_tokens=40,
    concurrency=WIDE,
    max_retries=40,
    timeout=20,
    price=Price(input=3, cached_input=0.3, output=15),
)
PLAIN: dict[str, Any] = {
    "search": {"sources": ["edits"]},
    "train": {"num_epochs": 1, "batch_size": 64, "rollout_concurrency": WIDE},
    "reflect": {"minibatch_size": 4, "concurrency": WIDE},
    "aggregate": {"merge_batch_size": 4},
    "select": {"max_edits": 3, "min_edits": 3},
    "target": {"deterministic": True},
    "slow_update": {"enabled": False},
    "meta_skill": {"enabled": False},
    "test": {"enabled": False},
}


class Provider(httpx.AsyncBaseTransport):
    """Answers late, breaks off, counts or does not, and bills what it did; keeps to caps, if it is told to.

    Args:
        chance: Of latencies, usages and faults.
        faults: Share of requests that fail in one way or another.
        honest: Whether it keeps to caps.

    Attributes:
        bill: What was charged so far.
        limits: What must not be exceeded, checked with each charge.
        most: The most requests that were in flight at once.
        kill: Called with the number of each request before it is answered.
    """

    def __init__(self, chance: random.Random, *, faults: float = 0.0, honest: bool = True) -> None:
        self._chance = chance
        self._faults = faults
        self._honest = honest
        self.bill = Amount()
        self.limits = BudgetConfig()
        self.requests = self.in_flight = self.most = 0
        self.kill: Callable[[int], None] = lambda _: None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        self.requests += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            self.kill(self.requests)
            if self._chance.random() < self._faults:
                return await self._fail(body)
            usage = self._charge(body)
            await anyio.sleep(self._chance.expovariate(1.0))
            return self._answer(usage)
        finally:
            self.in_flight -= 1

    async def _fail(self, body: bytes) -> httpx.Response:
        await anyio.sleep(self._chance.random())
        match self._chance.randrange(6):
            case 0:
                return httpx.Response(502)  # a 429 would lower the rate, and all calls shall be in flight
            case 1:
                return httpx.Response(500)
            case 2:
                raise httpx.ConnectError("no connection")
            case 3:
                self._charge(body)
                raise httpx.RemoteProtocolError("cut")
            case 4:
                self._charge(body)
                await anyio.sleep(MODEL.timeout)
            case _:
                self._charge(body)
        silent = json.loads(completion("fine").content)
        del silent["usage"]
        return httpx.Response(200, json=silent)

    def _charge(self, body: bytes) -> Usage:
        cap = read_cap(json.loads(body))
        given = self._chance.randint(1, len(body))
        usage = Usage(
            calls=1,
            input_tokens=given,
            cached_tokens=self._chance.randint(0, given),
            output_tokens=self._chance.randint(0, cap) if self._honest else cap + 1,
        )
        self.bill += amount_of(usage.model_copy(update={"usd": usd_of(usage, MODEL)}))
        self._check()
        return usage

    def _check(self) -> None:
        limits, bill = self.limits, self.bill
        assert not self._honest or limits.max_calls is None or bill.calls <= limits.max_calls
        assert not self._honest or limits.max_tokens is None or bill.tokens <= limits.max_tokens
        assert not self._honest or limits.max_usd is None or bill.billionths <= limits.max_usd * BILLION

    def _answer(self, usage: Usage) -> httpx.Response:
        return completion("fine", tokens=(usage.input_tokens, usage.cached_tokens, usage.output_tokens))


class PaidLLM:
    """The scripted optimizer, each of whose answers is paid for first."""

    def __init__(self, till: Client | None = None) -> None:
        self._till = till
        self._script = ScriptedLLM(toy_optimizer())

    @property
    def identity(self) -> str:
        return self._script.identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        await self._till.forward({"messages": "".join(m.content for m in prompt.messages)}, call_id=call_id)
        return await self._script.ask(prompt, reply_type, call_id=call_id, check=check)


class PaidTarget:
    """The toy target, each of whose answers is paid for first."""

    def __init__(self, till: Client | None = None) -> None:
        self._till = till
        self._toy = ToyTarget()

    @property
    def identity(self) -> str:
        return self._toy.identity

    def session(self, skill: Skill, *, rollout: str) -> Session:
        call_id = CallId(role="target", purpose="rollout", rollout=rollout)
        return _PaidSession(self._toy.session(skill, rollout=rollout), skill, self._till, call_id)


class _PaidSession:
    def __init__(self, toy: Session, skill: Skill, till: Client, call_id: CallId) -> None:
        self._toy = toy
        self._skill = skill
        self._till = till
        self._sample = call_id

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._toy.turns

    async def reply(self, message: str) -> str:
        await self._till.forward({"messages": self._skill.text + message}, call_id=self._sample)
        return await self._toy.reply(message)


def planned(folder: Path) -> RunPlan:
    environment = ToyEnvironment(train=64, val=6, test=4, rules=3)
    passed = Overrides(environment=environment, target=PaidTarget(), optimizer=PaidLLM())
    return prepare_run(TrainerConfig.model_validate({"out_dir": folder / "run", **PLAIN}), passed)


@asynccontextmanager
async def furnished(
    plan: RunPlan, store: InMemoryRunStore, network: Provider, limits: BudgetConfig
) -> AsyncIterator[Run]:
    budget = Budget(limits)
    account = Account(plan.run_id, store, store.decision_log(plan.run_id), budget)
    async with AsyncExitStack() as stack:
        tills = [
            await stack.enter_async_context(Client(MODEL, role, account, transport=network))
            for role in ("target", "optimizer")
        ]
        target, optimizer = PaidTarget(tills[0]), PaidLLM(tills[1])
        environment = plan.environment.surround(lambda item, seed: cover_rollout(account))
        plan = replace(plan, environment=environment)
        yield Run(plan, store, adapt_target(target), optimizer, budget, Tracing(plan.run_id))


async def started(
    plan: RunPlan, store: InMemoryRunStore, network: Provider, limits: BudgetConfig
) -> RunSummary:
    network.limits = limits
    async with furnished(plan, store, network, limits) as run:
        await start(run)
        try:
            await train_to_end(run)
        except BudgetSpent as error:
            return await store_summary(run, "budget", str(error))
        return await store_summary(run, "completed", None)


NEED = {"max_calls": 150.0, "max_tokens": 60_000.0, "max_usd": 0.25, "max_seconds": 60.0}
"""About what a run takes, with what it reserves."""


class Killed(GeneratorExit):
    """The process is gone; the exception passes through all that catches exits of the caller's code."""


class Left(NamedTuple):
    records: tuple[str, ...]
    events: tuple[str, ...]

    def begins(self, whole: Left) -> bool:
        records, events = len(self.records), len(self.events)
        return whole.records[:records] == self.records and whole.events[:events] == self.events


async def left_in(store: InMemoryRunStore, run_id: str) -> Left:
    return Left(
        records=tuple(record.model_dump_json() for record in await store.records(run_id)),
        events=tuple(event.model_dump_json(exclude={"at"}) for event in await store.events(run_id)),
    )


def copy_store(store: InMemoryRunStore) -> InMemoryRunStore:
    copied = InMemoryRunStore()
    store._database._tables.conn.backup(copied._database._tables.conn)
    return copied


class Story:
    """A run under random limits that is started again until it completes, each time with more.

    Args:
        plan: The run.
        seed: Of everything random: limits, kills, latencies, usages and faults.

    Attributes:
        ends: How each start ended.
        most: The most requests in flight at once.
    """

    def __init__(self, plan: RunPlan, seed: int) -> None:
        self._plan = plan
        self._chance = random.Random(seed)
        self._network = Provider(random.Random(seed + 1), faults=0.1)
        self._store = InMemoryRunStore()
        self._seconds = 0.0
        chosen = self._chance.sample(sorted(NEED), self._chance.randint(1, 2))
        self._limits = {key: NEED[key] * self._chance.uniform(0.05, 1) for key in chosen}
        self.ends: list[str] = []

    @property
    def most(self) -> int:
        return self._network.most

    async def tell(self, whole: Left) -> None:
        while "completed" not in self.ends:
            before = anyio.current_time()
            end = await self._start()
            self._seconds += anyio.current_time() - before
            self.ends.append(end)
            left = await left_in(self._store, self._plan.run_id)
            assert left == whole if end == "completed" else left.begins(whole)
            await self._audit()
            if end == "budget":
                self._limits = {key: 1.5 * limit for key, limit in self._limits.items()}

    async def _start(self) -> str:
        last = self._network.requests + self._chance.randint(1, 100)
        kept: list[InMemoryRunStore] = []

        def kill(number: int) -> None:
            if number == last and self.ends.count("killed") < 2:
                kept.append(copy_store(self._store))
            if kept:
                raise Killed

        self._network.kill = kill
        try:
            summary = await started(self._plan, self._store, self._network, self._budget)
        except (BaseExceptionGroup, Killed):
            (self._store,) = kept
            return "killed"
        if summary.status == "budget":
            assert summary.reason.startswith(tuple(f"budget.{key} is" for key in self._limits))
        return summary.status

    @property
    def _budget(self) -> BudgetConfig:
        counts = {"max_calls", "max_tokens"}
        return BudgetConfig.model_validate(
            {key: int(n) if key in counts else n for key, n in self._limits.items()}
        )

    async def _audit(self) -> None:
        spend = await self._store.spend(self._plan.run_id)
        booked = sum((amount_of(s.usage) + amount_of(s.worst_case) for s in spend), Amount())
        bill = self._network.bill
        assert find_exceeded_limit(self._budget, booked, Amount()) is None
        assert booked.calls >= bill.calls
        assert booked.tokens >= bill.tokens
        assert booked.billionths >= bill.billionths
        assert self._seconds <= self._limits.get("max_seconds", self._seconds) + 1e-6


async def unbroken(plan: RunPlan) -> Left:
    store, network = InMemoryRunStore(), Provider(random.Random(0))
    summary = await started(plan, store, network, BudgetConfig())
    assert summary.status == "completed"
    assert network.most == WIDE
    return await left_in(store, plan.run_id)
