"""What it saves that analysts start while rollouts still run.

The same step, gathered twice in turns in one process: with the overlap and with a barrier between rollouts
and reflection. Target and optimizer are scripts that take scripted times with long tails, as models do: an
answer 30 ms at the median, an analysis 120 ms. Printed are wall times and their ratio. What can be saved is
the analysts' work beyond the last one's, so most where few of them may work at once, and nothing where all
work at once and take equally long: the last rollout is waited for either way. Both ways must give the same
reports, byte for byte, or the benchmark fails.

    python benchmarks/overlap.py
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence

import anyio

from reflact.config.training import ReflectConfig, UpdateConfig
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import load_prompts
from reflact.protocols import Session
from reflact.stages.context import StageContext
from reflact.stages.reflect import Analyst, roll_out_and_reflect
from reflact.stages.rollout import RolloutRunner
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from reflact.types import AnalystReport, Item, Skill, Split, Turn, digest_json

BATCH, ROUNDS, SEED = 80, 3, 1
ANSWER, ANALYSIS, SPREAD = 0.03, 0.12, 0.6
"""Median seconds of an answer and of an analysis, and the spread of their logarithms."""

PLACES = ((8, 1), (8, 4), (8, 16), (32, 1), (32, 4), (32, 16))
"""Rollouts and analysts at once."""

SKILL = Skill(text="")


class SlowTarget:
    """The toy target, whose answers take a time that follows from the rollout's key and the round."""

    def __init__(self, round_: int) -> None:
        self._toy = ToyTarget(noise=0.3)
        self._round = round_

    @property
    def identity(self) -> str:
        return self._toy.identity

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return _SlowSession(self._toy.session(skill, rollout=rollout), ANSWER * factor(rollout, self._round))


class _SlowSession:
    def __init__(self, inner: Session, pause: float) -> None:
        self._inner = inner
        self._pause = pause

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._inner.turns

    async def reply(self, message: str) -> str:
        await anyio.sleep(self._pause)
        return await self._inner.reply(message)


def factor(place: str, round_: int) -> float:
    """How much longer than the median something takes: log-normal, the same in both ways."""
    return random.Random(digest_json([SEED, place, round_])).lognormvariate(0, SPREAD)


def slow_optimizer(round_: int) -> Script:
    """The toy optimizer, each of whose answers takes a while."""
    toy = toy_optimizer()

    async def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await anyio.sleep(ANALYSIS * factor(call_id.label, round_))
        return toy(prompt, reply_type, call_id)  # type: ignore[return-value]

    return answer


async def timed(
    items: Sequence[Item], *, round_: int, rollouts: int, analysts: int, overlap: bool
) -> tuple[float, tuple[AnalystReport, ...]]:
    """Wall seconds of one step, and its reports."""
    store = InMemoryRunStore()
    await store.open_run("r", {}, {})
    analyst = Analyst(
        context=StageContext(
            llm=ScriptedLLM(slow_optimizer(round_)),
            prompts=load_prompts(),
            decision_log=store.decision_log("r"),
            step=1,
        ),
        tokens=12000,
        skill=SKILL,
        config=UpdateConfig(operations=("append",)),
        max_edits=4,
        notes=lambda batch: "",
    )
    started = time.perf_counter()
    _, reports = await roll_out_and_reflect(
        [items[: BATCH // 2], items[BATCH // 2 :]],
        SKILL,
        runner=RolloutRunner(
            target=SlowTarget(round_),
            environment=ToyEnvironment(train=BATCH),
            store=store,
            decision_log=store.decision_log("r"),
            step=1,
            feedback=True,
            limit=rollouts,
        ),
        analyse=analyst.report,
        config=ReflectConfig(overlap=overlap, minibatch_size=8, concurrency=analysts),
        seed=SEED,
        threshold=None,
    )
    return time.perf_counter() - started, reports


async def main() -> int:
    """Measure in turns and print medians; 1 where the two ways differ in what they find."""
    items = ToyEnvironment(train=BATCH).items(Split.train)
    print(f"{BATCH} items in 2 batches, median of {ROUNDS} rounds, seed {SEED}")
    print("at once: rollouts  analysts   overlapped    barrier    ratio")
    same = True
    for rollouts, analysts in PLACES:
        walls: dict[bool, list[float]] = {True: [], False: []}
        for round_ in range(ROUNDS):
            found = {}
            for overlap in (True, False):
                wall, found[overlap] = await timed(
                    items, round_=round_, rollouts=rollouts, analysts=analysts, overlap=overlap
                )
                walls[overlap].append(wall)
            same = same and found[True] == found[False]
        ours, theirs = statistics.median(walls[True]), statistics.median(walls[False])
        print(f"{rollouts:17}  {analysts:8}   {ours:8.3f} s {theirs:8.3f} s   {ours / theirs:6.2f}")
    print("reports identical" if same else "REPORTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(anyio.run(main))
