"""How long a run takes for the latencies of its calls alone, and how busy its slots are.

The reference workload: 80 train and 40 validation items, batches of 20, minibatches of 4, two epochs, slow update and
meta skill. Each rollout and each call of the optimizer takes 200 ms, in a limited number of slots. Time is virtual, so
that the figures are exact: they leave out processor time, and do not depend on the machine.

    python benchmarks/schedule.py
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import virtual_time
from reflact.config.loading import load_keys
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.protocols import Session
from reflact.records import StageCost
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.training.loop import store_summary, train_to_end
from reflact.training.open_run import connect_run, start
from reflact.training.plan import Overrides, prepare_run
from reflact.types import Skill, Turn, digest_json

LATENCY = 0.2
SLOTS = ((16, 6), (64, 32))
"""Rollouts and calls of the optimizer at once."""

WORKLOADS = (
    ("strict", 0, 0.2),
    ("ranked", 0, 0.0),
    ("ranked", 0, 0.2),
    ("ranked", 40, 0.2),
)
"""The policy of the gate, the number of test items, and the target's noise."""


class Slots:
    """Slots of one kind, and how often each kind of work took one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: Counter[str] = Counter()
        self._free = anyio.Semaphore(size)

    async def use(self, kind: str) -> None:
        """Take a slot for the latency of a call."""
        async with self._free:
            self.used[kind] += 1
            await anyio.sleep(LATENCY)

    @property
    def seconds(self) -> float:
        """The sum of latencies."""
        return self.used.total() * LATENCY


class SlowTarget:
    """The toy target, each of whose answers takes a slot."""

    def __init__(self, slots: Slots, noise: float) -> None:
        self._toy, self._slots = ToyTarget(noise=noise), slots

    @property
    def identity(self) -> str:
        return self._toy.identity

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return _SlowSession(self._toy.session(skill, rollout=rollout), self._slots)


class _SlowSession:
    def __init__(self, inner: Session, slots: Slots) -> None:
        self._inner, self._slots = inner, slots

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._inner.turns

    async def reply(self, message: str) -> str:
        await self._slots.use("rollout")
        return await self._inner.reply(message)


class Outcome(NamedTuple):
    """A run's wall time, what it did, and a digest of all its records."""

    wall: float
    costs: Sequence[StageCost]
    rollouts: Slots
    calls: Slots
    digest: str


async def train(policy: str, test: int, noise: float, slots: tuple[int, int]) -> Outcome:
    """Run the workload on virtual time."""
    rollouts, calls, toy = Slots(slots[0]), Slots(slots[1]), toy_optimizer(edits=2)

    async def answer(
        prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId
    ) -> ScriptedAnswer:
        await calls.use(call_id.purpose)
        return toy(prompt, reply_type, call_id)  # type: ignore[return-value]

    with tempfile.TemporaryDirectory() as folder:
        config = load_keys(
            {
                "out_dir": folder,
                "report": False,
                "seed": 1,
                "train.batch_size": 20,
                "train.num_epochs": 2,
                "train.rollout_concurrency": slots[0],
                "reflect.minibatch_size": 4,
                "reflect.concurrency": slots[1],
                "gate.policy": policy,
                "test.enabled": test > 0,
            }
        )
        overrides = Overrides(
            environment=ToyEnvironment(train=80, val=40, test=test or 8, rules=6),
            target=SlowTarget(rollouts, noise),
            optimizer=ScriptedLLM(answer),
        )
        plan, store, began = (
            prepare_run(config, overrides),
            InMemoryRunStore(),
            anyio.current_time(),
        )
        async with connect_run(plan, store) as run:
            await start(run)
            await train_to_end(run)
            await store_summary(run, "completed", None)
        costs = await store.stage_costs(run.id)
        records = [r.model_dump_json() for r in await store.records(run.id)]
        return Outcome(
            anyio.current_time() - began, costs, rollouts, calls, digest_json([*records])
        )


def describe(name: str, outcome: Outcome) -> Sequence[str]:
    """Return the lines of one run: wall time, share of busy slots, and where the time goes."""
    wall, rollouts, calls = outcome.wall, outcome.rollouts, outcome.calls
    least = rollouts.seconds / rollouts.size + calls.seconds / calls.size
    stages: Counter[str] = Counter()
    for cost in outcome.costs:
        stages[cost.stage] += round(cost.seconds / LATENCY)
    parts = ", ".join(f"{stage} {n}" for stage, n in stages.most_common())
    return (
        f"| {name} | {rollouts.size}/{calls.size} | {wall:.1f} s | {least:.1f} s | {wall / least:.2f} | "
        f"{rollouts.seconds / rollouts.size / wall:.0%} | {calls.seconds / calls.size / wall:.0%} | "
        f"{rollouts.used.total()} | {calls.used.total()} | {outcome.digest[:6]} |",
        f"    latencies on the path: {parts}",
    )


def main() -> None:
    """Print a row for each workload, and how many latencies its path has in each stage."""
    print(
        "| workload | slots | wall | latencies over slots | ratio | rollout slots | call slots | rollouts | calls | records |"
    )
    for policy, test, noise in WORKLOADS:
        for slots in SLOTS:
            name = f"{policy}, noise {noise}" + (f", {test} test items" if test else "")
            print(
                *describe(name, virtual_time.run(train, policy, test, noise, slots)),
                sep="\n",
                flush=True,
            )


if __name__ == "__main__":
    main()
