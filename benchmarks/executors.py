"""How rollouts that compute scale over worker processes, and how long the event loop is kept from other work.

Each rollout takes 100 ms of processor time and asks its target once. The same rollouts run in the event loop, in one
worker process and in two (and on two workers of Ray, if it is installed), in turns. Beside them a task sleeps for five
milliseconds at a time, and how much later it wakes is the lag. Printed are the values of the round with the least time.
Other work on the machine lowers the scale, so its load is printed too, and the scale that follows from processor time.

    python benchmarks/executors.py [--quick]
"""

from __future__ import annotations

import os
import sys
import time
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
from reflact.types import Grade, Item, Skill

BUSY_SECONDS, ITEMS, ROUNDS = 0.1, 40, 3
SCALE, LAG_SECONDS = 1.8, 0.02
SIDES = ("local", "processes 1", "processes 2")


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


class Measured(NamedTuple):
    """Seconds of all rollouts, their processor time, and the lag of the event loop: the 95th percentile and the longest.

    ``own`` is the processor time of the trainer's process and ``workers`` that of its workers, in seconds.
    """

    seconds: float
    own: float
    workers: float
    lag: float
    longest: float


def read_time_of_children() -> float:
    """Return the processor time of the child processes of this one, in seconds, to a hundredth."""
    ids = [i for path in Path("/proc/self/task").glob("*/children") for i in path.read_text().split()]
    fields = [Path(f"/proc/{i}/stat").read_text().rpartition(")")[2].split() for i in ids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


async def measure(side: str, items: int) -> Measured:
    """Roll the items out once."""
    name, _, workers = side.partition(" ")
    config = load_config({"executor": {"name": name, "workers": int(workers or 1)}})
    config = config.model_copy(
        update={"environment": config.environment.model_copy(update={"name": "executors:Busy"})}
    )
    lags: list[float] = []
    store = InMemoryRunStore()
    async with (
        place_environment(Busy(), config, ToyTarget(), named=True) as environment,
        open_task_group() as group,
    ):
        runner = RolloutRunner(
            target=ToyTarget(),
            environment=environment,
            store=store,
            decision_log=store.decision_log("r"),
            step=1,
            feedback=False,
            limit=16,
        )
        everything = ToyEnvironment(train=items).items("train")  # type: ignore[arg-type]
        await runner.roll_out(everything[:4], Skill(text="warm"), coverage=None)

        async def watch() -> None:
            while not seconds:
                before = time.monotonic()
                await anyio.sleep(0.005)
                lags.append(time.monotonic() - before - 0.005)

        seconds = 0.0
        group.start_soon(watch)
        begun, own, children = time.monotonic(), time.process_time(), read_time_of_children()
        await runner.roll_out(everything, Skill(text="measured"), coverage=1.0)
        seconds, own = time.monotonic() - begun, time.process_time() - own
        children = read_time_of_children() - children
    lags.sort()
    return Measured(seconds, own, children, lags[int(0.95 * (len(lags) - 1))], lags[-1])


def main() -> None:
    """Measure all sides in turns and print them."""
    quick = "--quick" in sys.argv
    items, rounds = (8, 1) if quick else (ITEMS, ROUNDS)
    sides = [*SIDES, *(["ray 2"] if find_spec("ray") else [])]
    measured: dict[str, list[Measured]] = {side: [] for side in sides}
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    for _ in range(rounds):
        for side in sides:
            measured[side].append(anyio.run(measure, side, items))
    best = {side: min(values) for side, values in measured.items()}
    print(f"load after: {os.getloadavg()[0]:.1f}")
    print("| executor | seconds | scale | trainer's and workers' processor time | lag, 95% | longest lag |")
    print("|---|---|---|---|---|---|")
    for side, value in best.items():
        scale = best["processes 1"].seconds / value.seconds
        print(
            f"| {side} | {value.seconds:.2f} | {scale:.2f} | {value.own:.2f} + {value.workers:.2f} "
            f"| {1000 * value.lag:.1f} ms | {1000 * value.longest:.1f} ms |"
        )
    two = best["processes 2"]
    scale, share = best["processes 1"].seconds / two.seconds, two.own / two.workers
    print(f"scale of two workers: {scale:.2f} (at least {SCALE})")
    print(f"by processor time alone, two processors that share all of it: {2 / (1 + share):.2f}")
    print(
        f"lag with two workers: {1000 * best['processes 2'].lag:.1f} ms (at most {1000 * LAG_SECONDS:g} ms)"
    )


if __name__ == "__main__":
    main()
