"""How rollouts that compute scale over worker processes, and how long the event loop is kept from other work.

Each rollout takes 100 ms of processor time and asks its target once. The same rollouts run in the event loop, in one
worker process and in two (and on two workers of Ray, if it is installed), in turns. Beside them a task sleeps for five
milliseconds at a time, and how much later it wakes is the lag.

The window of a measurement begins when the first eighth of the rollouts has finished, and ends when the last eighth
begins to: workers have started, and all of them have work. A scale is the ratio of two measurements of one round; the
median of the rounds is printed. Other work on the machine falsifies it, because it takes more from two workers than from
one: beside one other process that always computes, two workers get 4/3 processors and one gets a whole one. So printed
is also how long the workers waited for a processor. A round counts if that is at most a tenth of the processor time that
they took.

    python benchmarks/executors.py [--quick]
    sudo nice -n -15 python benchmarks/executors.py    # if the machine has other work
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import anyio

from reflact.concurrency import open_task_group
from reflact.config.loading import load_config
from reflact.executors.environment import place_environment
from reflact.llm.middleware import EnvironmentMiddleware
from reflact.protocols import Session
from reflact.stages.rollout import RolloutRunner
from reflact.testing import InMemoryRunStore, ToyEnvironment, ToyTarget
from reflact.types import Grade, Item, Rollout, Skill

BUSY_SECONDS, ITEMS, ROUNDS = 0.1, 48, 3
SCALE, LAG_SECONDS, WAITING = 1.8, 0.02, 0.1
SIDES = ("local", "processes 1", "processes 2")
TICK = os.sysconf("SC_CLK_TCK")


class Busy(EnvironmentMiddleware):
    """A world whose rollouts compute."""

    def __init__(self) -> None:
        super().__init__(ToyEnvironment(train=ITEMS))

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        grade = await super().run(item, session, seed=seed)
        begun = time.thread_time()
        while time.thread_time() - begun < BUSY_SECONDS:
            sum(range(1000))
        return grade


class Clock(NamedTuple):
    """A moment in seconds, and until then the processor time of this process and of its children.

    ``waited`` is how long the children could have run and had no processor.
    """

    now: float
    own: float
    children: float
    waited: float

    @classmethod
    def read(cls) -> Clock:
        """Return the present moment."""
        ids = [i for path in Path("/proc/self/task").glob("*/children") for i in path.read_text().split()]
        fields = [Path(f"/proc/{i}/stat").read_text().rpartition(")")[2].split() for i in ids]
        children = sum(int(each[11]) + int(each[12]) for each in fields) / TICK
        threads = [path for i in ids for path in Path(f"/proc/{i}/task").glob("*/schedstat")]
        waited = sum(int(path.read_text().split()[1]) for path in threads) / 1e9
        return cls(time.monotonic(), time.process_time(), children, waited)


class Measured(NamedTuple):
    """For each rollout in the window: seconds, processor time of the trainer and of the workers, and their waiting.

    The lags of the window are the 95th percentile and the longest, in seconds.
    """

    seconds: float
    own: float
    workers: float
    waited: float
    lag: float
    longest: float

    @property
    def is_undisturbed(self) -> bool:
        """Whether the workers had a processor nearly whenever they wanted one."""
        return self.waited <= WAITING * self.workers


async def measure(side: str, items: int) -> Measured:
    """Roll the items out once."""
    name, _, size = side.partition(" ")
    config = load_config({"executor": {"name": name, "workers": int(size or 1)}})
    config = config.model_copy(
        update={"environment": config.environment.model_copy(update={"name": "executors:Busy"})}
    )
    lags: list[float] = []
    edges: list[Clock] = []
    store, finished, edge = InMemoryRunStore(), 0, items // 8

    async def count(_: Rollout) -> None:
        nonlocal finished
        finished += 1
        if finished in (edge, items - edge):
            edges.append(Clock.read())

    async def watch() -> None:
        while len(edges) < 2:
            before = time.monotonic()
            await anyio.sleep(0.005)
            if edges:
                lags.append(time.monotonic() - before - 0.005)

    is_local = config.executor.name == "local"
    placed = nullcontext(Busy()) if is_local else place_environment(Busy(), config, ToyTarget(), named=True)
    async with placed as environment, open_task_group() as group:
        runner = RolloutRunner(
            target=ToyTarget(),
            environment=environment,
            store=store,
            decision_log=store.decision_log("r"),
            step=1,
            feedback=False,
            limit=16,
            on_rollout=count,
        )
        group.start_soon(watch)
        everything = ToyEnvironment(train=items).items("train")  # type: ignore[arg-type]
        await runner.roll_out(everything, Skill(text="measured"), coverage=1.0)
    first, last = edges
    lags.sort()
    seconds, own, workers, waited = (
        (end - begin) / (items - 2 * edge) for begin, end in zip(first, last, strict=True)
    )
    return Measured(seconds, own, workers, waited, lags[int(0.95 * (len(lags) - 1))], lags[-1])


def describe_rounds(measured: dict[str, list[Measured]]) -> None:
    """Print the medians of all rounds, in milliseconds for each rollout."""
    print("| executor | time | scale | processor time: trainer + workers | waited | lag, 95% | longest lag |")
    print("|---|---|---|---|---|---|---|")
    for side, values in measured.items():
        middle = [1000 * statistics.median(column) for column in zip(*values, strict=True)]
        pairs = zip(measured["processes 1"], values, strict=True)
        scale = statistics.median(one.seconds / value.seconds for one, value in pairs)
        seconds, own, workers, waited, lag, _ = (f"{value:.1f}" for value in middle)
        longest = f"{1000 * max(value.longest for value in values):.1f}"
        print(f"| {side} | {seconds} | {scale:.2f} | {own} + {workers} | {waited} | {lag} | {longest} |")


def main() -> int:
    """Measure all sides in turns, print them, and judge the rounds that other work did not disturb."""
    quick = "--quick" in sys.argv
    items, rounds = (16, 1) if quick else (ITEMS, ROUNDS)
    sides = [*SIDES, *(["ray 2"] if find_spec("ray") else [])]
    measured: dict[str, list[Measured]] = {side: [] for side in sides}
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, niceness {priority}")
    for _ in range(rounds):
        for side in sides:
            measured[side].append(anyio.run(measure, side, items))
    describe_rounds(measured)
    pairs = [*zip(measured["processes 1"], measured["processes 2"], strict=True)]
    print(f"scales of two workers: {', '.join(f'{one.seconds / two.seconds:.2f}' for one, two in pairs)}")
    counted = [(one, two) for one, two in pairs if one.is_undisturbed and two.is_undisturbed]
    print(
        f"{len(counted)} of {rounds} rounds count, in which workers waited for at most {WAITING:.0%} of their work"
    )
    if not counted:
        return 2
    scale = statistics.median(one.seconds / two.seconds for one, two in counted)
    lag = statistics.median(two.lag for _, two in counted)
    print(f"scale of two workers: {scale:.2f} (at least {SCALE})")
    print(f"lag with two workers: {1000 * lag:.1f} ms (at most {1000 * LAG_SECONDS:g} ms)")
    return 0 if scale >= SCALE and lag <= LAG_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
