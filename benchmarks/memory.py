"""What a memory of many pairs costs: submitting, finding, opening; and how late an event loop gets meanwhile.

Pairs are generated (vocabulary, numbers, states of a few hundred characters), loaded, and half of them promoted. Then,
with all of them stored: single pairs are submitted, one after the other, each on disk when it is counted; pairs are found
by common and rare words; the promoted pairs are read as a critic reads them; the file is closed and opened. Bounds are
printed beside the figures; exit 1 beyond one.

    python benchmarks/memory.py [--pairs 10000]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import anyio

from reflact.concurrency import fan_out
from reflact.memory.cards import TraceIdentity, compute_alpha
from reflact.memory.models import (
    Action,
    ContrastPair,
    Evaluation,
    PromotionEvidence,
    Provenance,
    Scope,
    Transition,
)
from reflact.memory.store import MemoryStore

SEED = 8
WORDS = 20_000
TRIALS = 200
BATCH = 500
TICK = 0.005
T = TypeVar("T")
CRITIC = Scope(roles=("critic",))

BOUNDS = {
    "submit p95": 0.010,
    "find p95": 0.050,
    "promoted p95": 0.050,
    "open": 1.0,
    "loop lag p95": 0.020,
}
"""Seconds, at 10,000 pairs."""


class Texts:
    """Makes pairs from a vocabulary whose words are as unevenly common as those of a language."""

    def __init__(self) -> None:
        self._chance = random.Random(SEED)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self._chance.choices(letters, k=4 + n % 7)) for n in range(WORDS)]
        self._weights = list(accumulate(1 / (rank + 2) for rank in range(WORDS)))

    def phrase(self, words: int) -> str:
        """Return words, the common ones more often."""
        return " ".join(self._chance.choices(self._words, cum_weights=self._weights, k=words))

    def rare(self) -> str:
        """Return a phrase of words that few pairs have."""
        return " ".join(self._chance.choices(self._words[WORDS // 2 :], k=3))

    def pair(self, number: int) -> ContrastPair:
        """Return a pair like no other."""
        state = {"files": self._chance.randint(0, 99), "note": self.phrase(20)}
        after = {**state, "log": self.phrase(12), "step": number}
        return ContrastPair(
            purpose=self.phrase(8),
            transition=Transition(before=state, action=Action(name=self.phrase(1)), after=after),
            right=Evaluation(
                progress_before=2,
                progress_after=3,
                reasoning=self.phrase(15),
                evidence=(self.phrase(3),),
            ),
            wrong=Evaluation(progress_before=2, progress_after=9, reasoning=self.phrase(15)),
            reason=self.phrase(8),
            mistake="inflated_score",
            construction="asked",
            label_source="program",
            provenance=Provenance(trace_id=f"trace-{number // 40}"),
        )


def p95(seconds: Sequence[float]) -> float:
    """Return the value that 95% stay below."""
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


async def timed(call: Callable[[T], Awaitable[object]], arguments: Sequence[T]) -> list[float]:
    """Seconds of each call, one after the other."""
    seconds = []
    for argument in arguments:
        started = time.perf_counter()
        await call(argument)
        seconds.append(time.perf_counter() - started)
    return seconds


async def load(path: Path, texts: Texts, pairs: int) -> None:
    """Store pairs in batches and promote every other batch on evidence."""
    held_out = [TraceIdentity(f"held out {n}", (f"held out {n}",)) for n in range(60)]
    async with MemoryStore(path, max_active_pairs=10**9) as memory:
        for start in range(0, pairs, BATCH):
            batch = [texts.pair(number) for number in range(start, min(start + BATCH, pairs))]
            await fan_out(memory.submit, batch)
            if start // BATCH % 2:
                continue
            test = await memory.open_test([pair.id for pair in batch], traces=held_out)
            await memory.close_test(
                test.number,
                PromotionEvidence(
                    pair_ids=test.pair_ids,
                    passed_test=True,
                    n_traces=60,
                    n_transitions=120,
                    n_earlier_tests=test.n_earlier_tests,
                    effect=1.0,
                    low=0.5,
                    high=1.5,
                    p_value=0.5**60,
                    alpha=compute_alpha(test.n_earlier_tests),
                    critic="critic",
                    prompt="critic@1",
                ),
            )


async def lag(late: list[float], done: anyio.Event) -> None:
    """Note how late the loop comes back from short sleeps."""
    while not done.is_set():
        started = time.perf_counter()
        await anyio.sleep(TICK)
        late.append(max(0.0, time.perf_counter() - started - TICK))


async def measure(path: Path, texts: Texts, stored: int) -> dict[str, float]:
    """Seconds of handing in, finding and opening, with everything stored."""
    started = time.perf_counter()
    async with MemoryStore(path, max_active_pairs=10**9) as memory:
        opened = time.perf_counter() - started
        fresh = [texts.pair(stored + number) for number in range(TRIALS)]
        done, late = anyio.Event(), list[float]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lag, late, done)
            submitted = await timed(memory.submit, fresh)
            found = await timed(partial(memory.find, limit=10), questions(texts))
            first, *later = await timed(memory.promoted_pairs, [CRITIC] * TRIALS)
            done.set()
    return {
        "submit p95": p95(submitted),
        "find p95": p95(found),
        "promoted p95": p95(later),
        "promoted, first": first,
        "open": opened,
        "loop lag p95": p95(late),
    }


def disk(folder: Path) -> list[float]:
    """Seconds that the disk alone takes for a small write that is on it, which no submission can go below."""
    seconds = []
    with (folder / "disk").open("wb") as file:
        for _ in range(TRIALS):
            started = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - started)
    return seconds


def questions(texts: Texts) -> list[str]:
    """Return what is looked for: a common word, or rare ones."""
    return [texts.phrase(1) if n % 3 else texts.rare() for n in range(TRIALS)]


def table(title: str, seconds: dict[str, float], bounds: dict[str, float]) -> bool:
    """Print figures beside their bounds; returns whether they keep them."""
    print(f"\n{title}")
    for name, value in seconds.items():
        bound = f"   bound {bounds[name] * 1000:6.0f} ms" if name in bounds else ""
        print(f"  {name:15} {value * 1000:10.2f} ms{bound}")
    return all(value <= bounds.get(name, value) for name, value in seconds.items())


def main() -> int:
    """Measure, print, compare with the bounds."""
    parser = argparse.ArgumentParser(description="What a memory of many pairs costs.")
    parser.add_argument("--pairs", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, texts = Path(name), Texts()
        started = time.perf_counter()
        anyio.run(load, folder / "memory.db", texts, options.pairs)
        size = (folder / "memory.db").stat().st_size / 1e6
        print(
            f"{options.pairs} pairs loaded in {time.perf_counter() - started:.0f} s, {size:.0f} MB"
        )
        figures = anyio.run(measure, folder / "memory.db", texts, options.pairs)
        figures["disk alone p95"] = p95(disk(folder))
        kept = table(f"{options.pairs} pairs", figures, BOUNDS)
    print("\nwithin the bounds" if kept else "\nbeyond a bound")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
