"""How often the replay test promotes batches that harm, that do nothing, and that help.

A scripted critic scores traces of four steps. It is flattered: where a step claims success it says three
points too much; what it says differs a little from trace to trace and from step to step. A *helpful* batch
takes the flattery from some of these steps. A *placebo* changes words and no quality: the same kind of
critic draws anew. A *harmful* batch flatters steps that claim nothing. A *silencing* one takes half of the
flattery, and of three in ten claims the critic then gives no valid score. With the kinds called *unread*
it gives none of 3% of the steps, on each side. Held-out traces are as many as the planning function asks
for at the stated effect, and a quarter more, so that the bound of 1,000 seeds can reach 95%.

Printed for each kind: promoted batches of 1,000 seeds with the one-sided 95% bound, and beside it what a test
over steps instead of traces would have done. The last row tests five placebos, one after the other, on one
held-out set: how often any of them was promoted. The exit code is 1 where a bound is missed: harmful,
silencing and placebo batches at most 5%, helpful ones at least 95%.

    python benchmarks/promotion.py [--quick] [--workers N]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from harness import at_least, at_most

from reflact.calibration.metrics import ScoredStep
from reflact.calibration.significance import (
    ReplayTestResult,
    StepScores,
    compute_trace_effects,
    count_needed_traces,
    decide_replay_test,
)
from reflact.memory.cards import compute_alpha
from reflact.memory.models import Evaluation, Label

SEED, SEEDS, QUICK, STEPS, FAMILY = 11, 1000, 4, 4, 5
SHARE_OF_CLAIMS, FLATTERY, TRACE_NOISE, STEP_NOISE = 0.4, 3.0, 0.7, 0.6
FALSE, POWER = 0.05, 0.95
PLANNED, QUICK_PLANNED = 10_000, 500
"""Traces from which a kind's effect over its deviation is taken."""


class Kind(NamedTuple):
    """What a batch does to a critic: how much flattery it leaves, and how many other steps it flatters.

    ``silent`` is the share of claims of which the critic says nothing valid with it, ``unread`` the share of
    all steps of which it does not, on each side.
    """

    name: str
    left: float
    flattered: float
    silent: float = 0.0
    unread: float = 0.0


HARMFUL = Kind("harmful", 1.0, 0.2)
PLACEBO = Kind("placebo", 1.0, 0.0)
SILENCING = Kind("silencing", 0.5, 0.0, silent=0.3)
UNREAD = Kind("placebo, unread", 1.0, 0.0, unread=0.03)
HELPFUL = (
    Kind("helpful, a third", 2 / 3, 0.0),
    Kind("helpful, half", 0.5, 0.0),
    Kind("helpful, all", 0.0, 0.0),
)
HELPFUL_UNREAD = Kind("helpful, unread", 0.5, 0.0, unread=0.03)


class Outcome(NamedTuple):
    """What the test said, and whether a test over steps would have promoted."""

    promoted: bool
    by_steps: bool
    accuracy_blocked: bool


def clipped(phi: float) -> float:
    """Return the nearest score of the scale."""
    return min(10.0, max(0.0, phi))


def sides(kind: Kind, traces: int, chance: random.Random) -> list[StepScores]:
    """Return the steps of a held-out set, scored without a batch of a kind and with it."""
    found: list[StepScores] = []
    for trace in range(traces):
        old_shift, new_shift = (chance.gauss(0, TRACE_NOISE) for _ in range(2))
        phi = 1.0
        for step in range(STEPS):
            before, claims = phi, chance.random() < SHARE_OF_CLAIMS
            phi = before if claims else clipped(before + chance.choice((0.0, 1.0, 2.0)))
            old_extra = FLATTERY * claims
            kept = claims and chance.random() < kind.left
            new_extra = FLATTERY * (kept or (not claims and chance.random() < kind.flattered))
            place, gold = (
                f"t{trace:04}",
                Label(progress_before=before, progress_after=phi, source="program"),
            )
            scores: list[ScoredStep | None] = []
            for shift, extra in ((old_shift, old_extra), (new_shift, new_extra)):
                said = [
                    clipped(true + shift + chance.gauss(0, STEP_NOISE)) for true in (before, phi)
                ]
                evaluation = Evaluation(
                    progress_before=said[0],
                    progress_after=clipped(said[1] + extra),
                    reasoning="scripted",
                )
                unread = kind.unread > 0 and chance.random() < kind.unread
                score = ScoredStep(trace_id=place, step=step, label=gold, evaluation=evaluation)
                scores.append(None if unread else score)
            old, new = scores
            if claims and kind.silent > 0 and chance.random() < kind.silent:
                new = None
            found.append(StepScores(place, gold, old, new))
    return found


def planned(kind: Kind, traces: int) -> tuple[float, float]:
    """Return a kind's mean effect and its ratio to the deviation between traces."""
    effects = compute_trace_effects(
        sides(kind, traces, random.Random(f"{SEED}/{kind.name}/planned"))
    )
    return fmean(effects), fmean(effects) / stdev(effects)


def outcome(kind: Kind, traces: int, seed: str, *, before: int = 0) -> Outcome:
    """Test one batch."""
    scores = sides(kind, traces, random.Random(f"{SEED}/{kind.name}/{seed}"))
    found = decide_replay_test(scores, n_earlier_tests=before)
    if not isinstance(found, ReplayTestResult):
        raise SystemExit(found.explanation)
    gains = [step.effect for step in scores]
    by_steps = fmean(gains) * math.sqrt(len(gains)) > NormalDist().inv_cdf(
        1 - compute_alpha(before)
    ) * stdev(gains)
    return Outcome(found.has_passed, by_steps, found.outcome == "accuracy_fell")


def outcomes(kind: Kind, traces: int, seeds: range) -> list[Outcome]:
    """Test one batch for each seed."""
    return [outcome(kind, traces, str(seed)) for seed in seeds]


def families(traces: int, seeds: range) -> list[Outcome]:
    """Test five placebos on one held-out set for each seed; what any of them reached counts."""
    found = []
    for seed in seeds:
        batches = [outcome(PLACEBO, traces, f"family {seed}/{n}", before=n) for n in range(FAMILY)]
        found.append(Outcome(*(any(values) for values in zip(*batches, strict=True))))
    return found


def shown(name: str, traces: int, effect: float, ratio: float, found: Sequence[Outcome]) -> str:
    """Return a row of the table."""
    n, promoted = len(found), sum(each.promoted for each in found)
    bound = at_least(promoted, n) if name.startswith("helpful") else at_most(promoted, n)
    cells = (
        name.ljust(16),
        f"{traces:6}",
        f"{effect:+6.2f}",
        f"{ratio:+6.2f}",
        f"{promoted / n:8.1%}",
        f"{bound:6.1%}",
        f"{sum(each.by_steps for each in found) / n:8.1%}",
        f"{sum(each.accuracy_blocked for each in found) / n:7.1%}",
    )
    return f"| {' | '.join(cells)} |"


def missed(name: str, found: Sequence[Outcome]) -> str | None:
    """Return which bound a row misses, or None."""
    n, promoted = len(found), sum(each.promoted for each in found)
    if name.startswith("helpful"):
        bound = at_least(promoted, n)
        return None if bound >= POWER else f"{name}: promoted in as few as {bound:.1%}"
    bound = at_most(promoted, n)
    return None if bound <= FALSE else f"{name}: promoted in up to {bound:.1%}"


def main() -> int:
    """Run everything; return 1 where a stated bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few seeds of each kind, too few for the bounds"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    started, seeds = time.perf_counter(), QUICK if options.quick else SEEDS
    parts = [range(start, min(start + 50, seeds)) for start in range(0, seeds, 50)]
    print(
        f"{seeds} seeds; the first batch on a held-out set has level {compute_alpha(0):.4f}; bounds are at 95%"
    )
    print(
        "| batch            | traces | effect |      d | promoted |  bound | by steps | blocked |"
    )
    print(
        "| ---------------- | ------ | ------ | ------ | -------- | ------ | -------- | ------- |"
    )
    misses: list[str] = []
    with ProcessPoolExecutor(options.workers) as pool:
        kinds, looked_at = (
            (*HELPFUL, HELPFUL_UNREAD, HARMFUL, PLACEBO, SILENCING, UNREAD),
            QUICK_PLANNED if options.quick else PLANNED,
        )
        plans = dict(zip(kinds, pool.map(planned, kinds, [looked_at] * len(kinds)), strict=True))
        sizes = {
            kind: math.ceil(1.25 * count_needed_traces(plans[kind][1]))
            for kind in (*HELPFUL, HELPFUL_UNREAD)
        }
        most = max(sizes[kind] for kind in HELPFUL)
        rows = [(kind, traces) for traces in (25, most) for kind in (HARMFUL, PLACEBO)]
        rows += [(SILENCING, most), (UNREAD, 25), *sizes.items()]
        waiting = [
            (
                kind.name,
                traces,
                plans[kind],
                [pool.submit(outcomes, kind, traces, part) for part in parts],
            )
            for kind, traces in rows
        ]
        waiting.append(
            ("five placebos", 25, plans[PLACEBO], [pool.submit(families, 25, p) for p in parts])
        )
        for name, traces, (effect, ratio), futures in waiting:
            found = [each for future in futures for each in future.result()]
            print(shown(name, traces, effect, ratio, found), flush=True)
            miss = None if options.quick else missed(name, found)
            misses += [] if miss is None else [miss]
    print(
        "by steps: what a test over steps would have promoted; blocked: refused as pairwise accuracy fell"
    )
    print(f"{time.perf_counter() - started:.0f} s with {options.workers} processes")
    for miss in misses:
        print(f"MISSED: {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
