"""How fast pairs are made, and how long a calibrator keeps the event loop from other work.

Four measurements, each with a real store and a scripted model that takes 50 ms for a call:

- one trace of 40 transitions, 39 calls, 8 of them in flight: seconds from submission until all pairs are in
  the store (the older tool makes 40 calls one after the other and takes 2.03 s);
- the lag of the event loop beside this: how much later than asked a task wakes that sleeps for 2 ms;
- the lag beside a whole round: pairs, blind comparisons, scoring, the replay test, measuring;
- the lag beside traces that are submitted, by the size of their states, and that of the loop alone for as
  long in turn: the difference is what a calibrator costs an agent whose states are so large.

The exit code is 1 where a bound is missed.

    python benchmarks/calibrator.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import anyio
from pydantic import JsonValue

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from flattered_world import PURPOSE, answer, flattered, steps
from reflact import MemoryStore
from reflact.calibration.asked import Mistake
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.splits import assign_fold
from reflact.calibration.trace import Trace
from reflact.concurrency import run_beside
from reflact.memory.models import Action, Evaluation, Label, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

CALL_SECONDS, TRANSITIONS, ASKED, REPEATS = 0.05, 40, 13, 9
MOST_SECONDS, MOST_LAG = 0.35, 0.020
MOST_WORST = {2_000: 0.020, 10_000: 0.020, 50_000: 0.020}
"""How late the loop may be at worst beside states of so many characters."""

SIZES = ((2_000, 25, 7), (10_000, 25, 7), (50_000, 25, 5))
"""Characters of a state, steps that are submitted, how often."""


HURRY = Mistake(name="hurry", description="Looks at the first word of the state and no further.")
"""A kind of mistake that no perturbation makes, so that each one takes three calls: it is written and judged twice."""


class Measured(NamedTuple):
    """How long a piece of work took, and the 95th percentile and the maximum of the loop's lag beside it."""

    seconds: float
    lag: float
    worst: float


def slow() -> ScriptedLLM:
    """Return the flattered model, 50 ms for each call."""

    async def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await anyio.sleep(CALL_SECONDS)
        return answer(prompt, reply_type)

    return ScriptedLLM(script)


def recorded(name: str, number: int, count: int, *, claims: bool) -> Trace:
    """Return a trace that a flattered critic scored."""
    trace = Trace(PURPOSE, id=name)
    for step, gold in steps(name, number, count=count, claims=[claims] * count):
        trace.record(step, said(gold.progress_before, gold.progress_after + 3 * claims), label=gold)
    return trace


def said(before: float, after: float) -> Evaluation:
    """Return an evaluation."""
    return Evaluation(
        progress_before=before, progress_after=after, reasoning="As it says.", evidence=("filed",)
    )


def flat(name: str) -> Trace:
    """Return a trace of 40 small transitions, none of which comes near the end of the scale."""
    trace = Trace(PURPOSE, id=name)
    for number in range(TRANSITIONS):
        (step, gold), *_ = steps(f"{name}/{number}", number, count=1, claims=[False])
        trace.record(step, said(gold.progress_before, gold.progress_after), label=gold)
    return trace


def fields(size: int, number: int) -> JsonValue:
    """Return a state of many small fields, of about so many characters; the first says its number."""
    state: dict[str, JsonValue] = {"filed": number}
    for n in range(size // 70):
        state[f"row {n}"] = {"share": n / 7, "text": "word " * 8}
    return state


def lines(size: int, number: int) -> JsonValue:
    """Return a text of about so many characters; the last line says its number."""
    rows = (f"line {n}, {n * 7919 % 1_000_003} of many words" for n in range(size // 33))
    return "\n".join([*rows, f"filed {number}"])


def large(name: str, size: int, number: int, state: Callable[[int, int], JsonValue]) -> Trace:
    """Return a finished trace with states of such a size."""
    trace = Trace(PURPOSE, id=name)
    for n in range(number):
        step = Transition(before=state(size, n), action=Action(name="file"), after=state(size, n + 1))
        trace.record(step, said(0, 9), label=Label(progress_before=n, progress_after=n + 1, source="program"))
    trace.finish()
    return trace


def learned_from(turn: int, slices: int) -> Iterator[str]:
    """Yield names of traces that an empty memory does not hold out."""
    names = (f"trace {turn}/{n}" for n in count())
    return (name for name in names if assign_fold(name, n_folds=slices) == slices - 1)


async def measured(work: Callable[[], Awaitable[object]]) -> Measured:
    """Do a piece of work with a task beside it that looks how late it wakes."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await anyio.sleep(0.002)
            lags.append(time.perf_counter() - before - 0.002)

    begun = time.perf_counter()
    await run_beside(work, watch)
    return Measured(time.perf_counter() - begun, statistics.quantiles(lags, n=20)[-1], max(lags))


async def pairs_of_a_trace(folder: Path) -> Measured:
    """Measure one trace of 40 transitions, with 13 mistakes that take three calls each.

    The fastest of several counts, since other work on the machine only adds; of the lags the median.
    """
    settings = CalibratorSettings(pairs_per_step=5, max_asked=ASKED, mistakes=(HURRY,))
    found: list[Measured] = []
    async with MemoryStore(folder / "pairs.db") as store:
        for number in range(REPEATS):
            llm, trace = slow(), flat(f"trace {number}")
            async with Calibrator(llm, store, settings=settings) as calibrator:

                async def work(calibrator: Calibrator = calibrator, trace: Trace = trace) -> None:
                    count = len([pair async for pair in calibrator.stream_pairs(trace)])
                    if count < TRANSITIONS:
                        raise SystemExit(f"{count} pairs of {TRANSITIONS} transitions")

                found.append(await measured(work))
            if len(llm.calls) != 3 * ASKED:
                raise SystemExit(f"{len(llm.calls)} calls for {ASKED} mistakes")
    seconds, lags, worst = zip(*found, strict=True)
    return Measured(min(seconds), statistics.median(lags), statistics.median(worst))


async def whole_round(folder: Path) -> Measured:
    """Measure a round over 20 traces with 40 held out."""
    async with MemoryStore(folder / "round.db") as store:
        learn = [recorded(f"learn {n}", n, 3, claims=n % 2 == 0) for n in range(20)]
        heldout = [recorded(f"held out {n}", n, 3, claims=n % 2 == 0) for n in range(40)]
        settings = CalibratorSettings(pairs_per_step=2, max_rounds=1)
        calibrator = Calibrator(slow(), store, settings=settings)

        async def work() -> None:
            report = await calibrator.calibrate(learn, heldout=heldout)
            if report.n_promoted == 0:
                raise SystemExit("the round promoted nothing")

        return await measured(work)


async def beside_states(
    folder: Path, size: int, steps: int, times: int, state: Callable[[int, int], JsonValue]
) -> tuple[Measured, Measured]:
    """Measure the loop beside a calibrator that is given traces with states of a size, and alone as long.

    Of the times that it is measured the median counts.
    """
    busy: list[Measured] = []
    alone: list[Measured] = []
    settings = CalibratorSettings(max_asked=0)
    for turn in range(times):
        each = min(5, steps)
        names = islice(learned_from(turn, settings.holdout_folds), steps // each)
        traces = [large(name, size, each, state) for name in names]
        async with (
            MemoryStore(folder / f"{state.__name__} {size} {turn}.db") as store,
            Calibrator(flattered(), store, settings=settings) as calibrator,
        ):

            async def work(calibrator: Calibrator = calibrator, traces: Sequence[Trace] = traces) -> None:
                for trace in traces:
                    calibrator.submit(trace)
                await calibrator.wait_until_idle()

            busy.append(await measured(work))
            if not await store.pairs():
                raise SystemExit("nothing was learned")
        alone.append(await measured(lambda: anyio.sleep(busy[-1].seconds)))
    return middle(busy), middle(alone)


def middle(found: Sequence[Measured]) -> Measured:
    """Return the median of each number."""
    return Measured(*map(statistics.median, zip(*found, strict=True)))


def by_size(folder: Path) -> bool:
    """Measure and print a line for each size and kind of state; say whether a bound was missed."""
    missed = False
    for name, state in (("fields", fields), ("text", lines)):
        for size, number, times in SIZES:
            busy, alone = anyio.run(beside_states, folder, size, number, times, state)
            most = MOST_WORST.get(size)
            missed = missed or (most is not None and busy.worst >= most)
            wanted = "" if most is None else f"   (below {most * 1e3:g} ms is wanted)"
            beside = f"lag {busy.lag * 1e3:5.1f} ms, {busy.worst * 1e3:5.1f} ms at most"
            idle = f"alone {alone.lag * 1e3:4.1f} and {alone.worst * 1e3:4.1f} ms"
            print(
                f"states of {size // 1000:>4} KB, {name:<6} {busy.seconds:5.2f} s, {beside}; {idle}{wanted}"
            )
    return missed


def main() -> int:
    """Measure and print; return 1 where a bound is missed."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = anyio.run(pairs_of_a_trace, Path(folder))
        a_round = anyio.run(whole_round, Path(folder))
        missed = by_size(Path(folder))
    speed = f"{TRANSITIONS} transitions of 50 ms, 8 at a time  {pairs.seconds:5.2f} s"
    print(f"{speed}   (at most {MOST_SECONDS} s is wanted)")
    for name, found in (("pairs of a trace", pairs), ("a whole round", a_round)):
        lag = f"{found.lag * 1e3:5.1f} ms lag (95th percentile), {found.worst * 1e3:5.1f} ms at most"
        print(f"beside {name:<17} {lag}   (below {MOST_LAG * 1e3:g} ms is wanted)")
    missed = missed or pairs.seconds > MOST_SECONDS or max(pairs.lag, a_round.lag) >= MOST_LAG
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
