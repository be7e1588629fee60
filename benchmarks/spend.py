"""Rollouts and calls until the ranked rule is as good as the strict one: equal true accuracy, simulated.

    python benchmarks/spend.py             seven landscapes, 400 runs each under both rules
    python benchmarks/spend.py --runs 40   a first look

The runs are those of ``gate.py``, up to 8,000 rollouts. After each step the program notes the true accuracy of the
document that a run would return if it ended there. A rule's curve is the mean of that over all runs. A row has the
accuracy that the strict rule (the older trainer's) reaches with some rollouts, and the rollouts and the optimizer's
calls after which the ranked rule reaches the same. Intervals are bootstrapped over runs, 95%.
"""

from __future__ import annotations

import argparse
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from gate import LANDSCAPES, POLICIES, SEED, World

BUDGETS = (1000, 2000, 4000, 8000)
"""Rollouts after which the strict rule sets the quality to reach."""

GRID, ITEMS, BOOTSTRAPS = 50, 40, 400

CALLS = 10
"""Calls of the optimizer in a step: six analysts of 40 trajectories in eights, three merges and a ranking."""


@dataclass(frozen=True)
class Curves:
    """The gain and the steps of one run, at each multiple of ``GRID`` rollouts."""

    gains: Sequence[float]
    steps: Sequence[float]


def simulate(policy: str, number: int, run: int) -> Curves:
    """Return the curves of one run."""
    world = World(LANDSCAPES[number], ITEMS, run)
    POLICIES[policy](world, lambda: world.spent < BUDGETS[-1])
    spent = [rollouts for rollouts, _ in world.trace]
    counts = [bisect_right(spent, at) for at in range(0, BUDGETS[-1] + 1, GRID)]
    return Curves([world.trace[n - 1][1] if n else 0.0 for n in counts], counts)


def average(runs: Sequence[Curves], pick: Callable[[Curves], Sequence[float]]) -> list[float]:
    """Return the mean of a curve over runs."""
    return [fmean(column) for column in zip(*map(pick, runs), strict=True)]


def find_rollouts(gains: Sequence[float], goal: float) -> float | None:
    """Return the rollouts at which a curve reaches a gain, or none."""
    for index, gain in enumerate(gains):
        if gain >= goal:
            before = gains[index - 1] if index else 0.0
            share = (goal - before) / (gain - before) if gain > before else 0.0
            return GRID * (index - 1 + share) if index else 0.0
    return None


@dataclass(frozen=True)
class Row:
    """What equal quality costs: the strict rule's gain with its rollouts and calls, and those of the ranked rule."""

    gain: float
    strict: tuple[float, float]
    ranked: tuple[float, float] | None


def build_row(budget: int, strict: Sequence[Curves], ranked: Sequence[Curves]) -> Row:
    """Return the row of one budget."""
    index = budget // GRID
    goal = fmean(run.gains[index] for run in strict)
    calls = CALLS * fmean(run.steps[index] for run in strict)
    at = find_rollouts(average(ranked, lambda run: run.gains), goal)
    if at is None:
        return Row(goal, (budget, calls), None)
    steps = average(ranked, lambda run: run.steps)
    low = int(at // GRID)
    high = min(low + 1, len(steps) - 1)
    return Row(
        goal, (budget, calls), (at, CALLS * (steps[low] + (steps[high] - steps[low]) * (at / GRID - low)))
    )


def find_interval(budget: int, strict: Sequence[Curves], ranked: Sequence[Curves]) -> tuple[float, float]:
    """Return the interval of the rollouts saved, as a share; a run that never gets there saves nothing."""
    chance, shares = random.Random(SEED), list[float]()
    for _ in range(BOOTSTRAPS):
        rows = chance.choices(range(len(strict)), k=len(strict))
        goal = fmean(strict[i].gains[budget // GRID] for i in rows)
        low, high = 0, len(ranked[0].gains)
        while low < high:
            middle = (low + high) // 2
            is_there = fmean(ranked[i].gains[middle] for i in rows) >= goal
            low, high = (low, middle) if is_there else (middle + 1, high)
        shares.append(1 - low * GRID / budget)
    shares.sort()
    return shares[int(0.025 * BOOTSTRAPS)], shares[int(0.975 * BOOTSTRAPS)]


def describe(landscape: str, budget: int, strict: Sequence[Curves], ranked: Sequence[Curves]) -> str:
    """Return a line of the table."""
    row = build_row(budget, strict, ranked)
    cells = [landscape, f"{100 * row.gain:+.1f}", f"{row.strict[0]:,.0f}", f"{row.strict[1]:,.0f}"]
    if row.gain <= 0:
        cells += ["0", "0", "", ""]
    elif row.ranked is None:
        cells += [f"more than {BUDGETS[-1]:,}", "", "", ""]
    else:
        low, high = find_interval(budget, strict, ranked)
        rollouts, calls = (1 - ours / theirs for ours, theirs in zip(row.ranked, row.strict, strict=True))
        cells += [f"{row.ranked[0]:,.0f}", f"{row.ranked[1]:,.0f}"]
        cells += [f"{rollouts:.0%} ({low:.0%} to {high:.0%})", f"{calls:.0%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=400, help="runs of each rule in each landscape")
    parser.add_argument("--landscapes", type=int, default=len(LANDSCAPES), help="how many, from the first on")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    print(
        "| landscape | gain | strict: rollouts | calls | ranked: rollouts | calls | rollouts saved | calls saved |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(options.workers) as pool:
        for number, landscape in enumerate(LANDSCAPES[: options.landscapes]):
            strict, ranked = (
                list(pool.map(partial(simulate, policy, number), range(options.runs), chunksize=10))
                for policy in ("strict", "ranked")
            )
            for budget in BUDGETS:
                print(describe(landscape.name, budget, strict, ranked), flush=True)


if __name__ == "__main__":
    main()
