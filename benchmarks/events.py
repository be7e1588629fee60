"""What events cost a run that nobody watches.

The recorded demo is replayed with no consumer but the log, and the processor time of the whole process is
taken. Then 100,000 events are made and told: those that the demo told, over and over, in its mix of durable
and live ones, through the same functions into a store of the same kind, the durable ones written to disk one
by one. Printed is what these take of the processor time of as many demos as tell 100,000 events.

    python benchmarks/events.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import anyio

from reflact import Trainer, TrainerConfig
from reflact.concurrency import open_outbox
from reflact.config.loading import load_config
from reflact.events import BudgetUpdated, Event, RateLimited
from reflact.trainer import EventStepAssigner
from reflact.training import setup as wiring
from reflact.training.run import Run

EVENTS, REPLAYS, ROUNDS = 100_000, 3, 3
SHARE = 0.05
POSTED = (BudgetUpdated, RateLimited)
DEMO = Path(__file__).resolve().parent.parent / "fixtures" / "demo" / "demo.yaml"


def config(folder: Path) -> TrainerConfig:
    """Return the demo's configuration, into a folder."""
    return load_config(DEMO, overrides=[f"out_dir={folder}"])


async def told(folder: Path) -> list[Event]:
    """Return all that the demo tells."""
    return [event async for event in Trainer(config(folder)).stream()]


async def replay(folder: Path) -> float:
    """Return the processor seconds of the demo without a consumer."""
    start = time.process_time()
    summary = await Trainer(config(folder)).train()
    used = time.process_time() - start
    assert summary.status == "completed", summary.reason
    return used


def again(events: Sequence[Event], total: int) -> Iterator[Event]:
    """Make so many events anew; each time round of other steps, so that none is in the log already."""
    made = 0
    for number in count():
        for event in events:
            if made == total:
                return
            fields = {name: getattr(event, name) for name in type(event).model_fields if name != "at"}
            made += 1
            yield type(event)(**fields | {"step": event.step + 1000 * number})


async def telling(events: Sequence[Event], folder: Path) -> float:
    """Return the processor seconds that the telling of 100,000 events takes."""
    plan, emit = (
        wiring.prepare_run(config(folder), wiring.Overrides()),
        EventStepAssigner(wiring.ignore_event),
    )
    async with wiring.open_runtime(plan, wiring.Overrides()) as house, open_outbox(emit) as post:
        run = Run(house, emit)
        await run.start_or_resume()
        start = time.process_time()
        for event in again(events, EVENTS):
            if isinstance(event, POSTED):
                post(event)
            elif event.durable:
                await run._emit(event)
            else:
                await emit(event)
        return time.process_time() - start


def main() -> None:
    """Measure in turns and print the medians."""
    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name) / str(number) for number in count())
        events = anyio.run(told, next(folders))
        runs = [anyio.run(replay, next(folders)) for _ in range(REPLAYS)]
        costs = [anyio.run(telling, events, next(folders)) for _ in range(ROUNDS)]
    run, cost = statistics.median(runs) * EVENTS / len(events), statistics.median(costs)
    durable = sum(event.durable for event in events)
    print(
        f"a demo                {run * len(events) / EVENTS:8.2f} s, {len(events)} events, {durable} durable"
    )
    print(f"demos with 100,000    {run:8.2f} s")
    print(f"100,000 events        {cost:8.2f} s")
    print(f"share                 {cost / run:8.2%}  (at most {SHARE:.0%} is wanted)")
    if cost > SHARE * run:
        raise SystemExit("events cost more than they may")


if __name__ == "__main__":
    main()
