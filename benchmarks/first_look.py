"""Whole simulated runs whose candidates are compared on a few items before they get a pass of all.

    python benchmarks/first_look.py              in some minutes
    python benchmarks/first_look.py --runs 100   a first look

The runs and landscapes are those of ``benchmarks/gate.py``; here the target repeats itself, and the rule is that for
deterministic targets: a greater mean on one pass, which ends early if the open items cannot change the decision. The
first items of the pass are the first look, drawn anew in each step. If the candidate is worse than the current version
there (or, with ``>``, not better), the step ends.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass
from statistics import fmean, stdev

import gate
from gate import LANDSCAPES, Landscape, Version, World

BOLD = Landscape("bold edits", 0.25, 0.2, 0.25)
LOOKS = ((0, ""), (3, ">="), (6, ">="), (8, ">="), (3, ">"), (8, ">"))
"""Items of the first look, and how the candidate must compare with the current version."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a run: validation items, rollouts, items of a batch, and the accuracy at the start."""

    n: int
    budget: int
    batch: int
    start: float


SETTINGS = (Setting(16, 130, 4, 0.1), Setting(40, 1000, 8, 0.3))
"""That of a small run, and a larger one."""


class RepeatableWorld(World):
    """A world in which an answer never changes: a version solves an item always or never."""

    def __init__(self, landscape: Landscape, n: int, run: int) -> None:
        super().__init__(landscape, n, run)
        self.looks = random.Random(f"{landscape.name}/{n}/{run}/looks")
        self._levels = {item: self.looks.random() for item in self.items}

    def score(self, version: Version, trial: int, item: str) -> float:
        """Return the score of an item; only the first time it costs a rollout."""
        if (0, item) not in version.scores:
            self.spent += 1
            version.scores[0, item] = float(self._levels[item] < version.chances[int(item)])
        return version.scores[0, item]


def train(world: RepeatableWorld, budget: int, look: int, rule: str) -> Version:
    """Return the last current version."""
    current = world.baseline
    world.run_pass(current)
    while world.spent < budget:
        candidate = world.edit(current)
        order = world.looks.sample(world.items, len(world.items))
        gain, open_gain = 0.0, sum(1 - score for score in current.passes[0].values())
        for number, item in enumerate(order, 1):
            before = current.passes[0][item]
            gain += world.score(candidate, 0, item) - before
            open_gain -= 1 - before
            if gain + open_gain <= 0:
                break  # the open items cannot make it better
            if number == look and (gain < 0 or (rule == ">" and gain == 0)):
                break
        else:
            world.run_pass(candidate)
            current = candidate
    return current


def simulate(landscape: Landscape, setting: Setting, look: int, rule: str, runs: int) -> str:
    """Return the mean gain in points with its standard error, and the mean number of steps."""
    gate.BATCH, gate.START = setting.batch, setting.start
    gains, steps = [], []
    for run in range(runs):
        world = RepeatableWorld(landscape, setting.n, run)
        gains.append(100 * (train(world, setting.budget, look, rule).accuracy - setting.start))
        steps.append(world.steps)
    return f"{fmean(gains):+.1f} (se {stdev(gains) / math.sqrt(runs):.1f}, {fmean(steps):.0f} steps)"


def main() -> None:
    """Print a line for each landscape and look."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    for setting in SETTINGS:
        print(setting)
        for landscape in (LANDSCAPES[0], LANDSCAPES[2], BOLD, LANDSCAPES[5]):
            for look, rule in LOOKS:
                shown = simulate(landscape, setting, look, rule, runs)
                print(f"{landscape.name}, first look at {look} items {rule}: {shown}", flush=True)


if __name__ == "__main__":
    main()
