"""What the rule of the greater mean decides on targets whose noise is known.

    python benchmarks/decisions.py            everything, in some minutes
    python benchmarks/decisions.py --quick    a few runs of each row

A run is eight candidates, each as good as the skill that it would replace, so each acceptance is a false one. A
comparison is one candidate that is better by 15 points. Decisions are made by ``reflact.gate.greater_mean`` alone; scores
are drawn from a seed, the skill, the trial and the item. The exit code is 1 if a stated bound is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from reflact.gate.greater_mean import GateSettings, ScorePair, choose_repeats, decide, has_disagreement

SEED, STEPS, GAIN = 2026, 8, 0.15
RUNS, SEQUENCES = 2000, 1000
SIZES = (20, 50, 100)


# ------------------------------------------------------------------------------------------ noise models


def everywhere(n: int, chance: random.Random, first: bool) -> list[float]:
    """Every item is solved with probability 0.6."""
    return [0.6] * n


def effects(n: int, chance: random.Random, first: bool) -> list[float]:
    """Each skill solves half of the items with 0.85 and the others with 0.35, which ones is its own."""
    return chance.sample([0.85, 0.35] * (n // 2), n)


def coins(n: int, chance: random.Random, first: bool) -> list[float]:
    """A fifth of the items are coin flips; of the others half are always solved and half never."""
    return [0.5] * (n // 5) + [1.0, 0.0] * ((n - n // 5) // 2)


def one_coin(n: int, chance: random.Random, first: bool) -> list[float]:
    """One item is a coin flip, the others are stable."""
    return [0.5] + [1.0, 0.0] * (n // 2 - 1) + [1.0]


def one_side(n: int, chance: random.Random, first: bool) -> list[float]:
    """The first skill is stable; each candidate makes a fifth of the items coins, half of them solved."""
    stable = [1.0, 0.0] * (n // 2)
    if first:
        return stable
    flips = {*chance.sample(range(0, n, 2), n // 10), *chance.sample(range(1, n, 2), n // 10)}
    return [0.5 if item in flips else value for item, value in enumerate(stable)]


def one_side_pair(n: int, chance: random.Random, first: bool) -> list[float]:
    """The same with one solved and one failed item: the hardest case for a gate that trusts repeats."""
    stable = [1.0, 0.0] * (n // 2)
    flips = set() if first else {chance.randrange(0, n, 2), chance.randrange(1, n, 2)}
    return [0.5 if item in flips else value for item, value in enumerate(stable)]


def middling(n: int, chance: random.Random, first: bool) -> list[float]:
    """Every item scores 0.5 on the average."""
    return [0.5] * n


def raised(chances: Sequence[float], gain: float = GAIN) -> list[float]:
    """Every item is better by the gain."""
    return [chance + gain for chance in chances]


def repaired(chances: Sequence[float], gain: float = GAIN) -> list[float]:
    """Items that always failed are solved, the gain's share of all items."""
    failing = [item for item, chance in enumerate(chances) if chance == 0.0]
    mended = set(failing[: round(gain * len(chances))])
    return [1.0 if item in mended else chance for item, chance in enumerate(chances)]


@dataclass(frozen=True)
class Model:
    """How skills score; ``width``: scores are uniform within this distance of the item's chance, instead of 0 or 1."""

    name: str
    chances: Callable[[int, random.Random, bool], list[float]]
    better: Callable[[Sequence[float]], list[float]]
    width: float = 0.0


MODELS = (
    Model("p = 0.6 everywhere", everywhere, raised),
    Model("zero-mean item effects", effects, raised),
    Model("a fifth of the items coin flips", coins, repaired),
    Model("one coin-flip item", one_coin, repaired),
    Model("soft scores", middling, raised, width=0.3),
    Model("noise on the candidate's side only", one_side, repaired),
    Model("candidate noisy on two items", one_side_pair, repaired),
)


class Skill:
    """Scores of one skill, drawn once for each trial."""

    def __init__(self, model: Model, chances: Sequence[float], label: str) -> None:
        self.model, self.chances, self.label = model, chances, label
        self.rows: dict[int, list[float]] = {}

    def row(self, trial: int) -> list[float]:
        """Return a trial's scores."""
        if trial not in self.rows:
            chance, width = random.Random(f"{SEED}/{self.label}/{trial}"), self.model.width
            self.rows[trial] = [
                chance.uniform(mean - width, mean + width) if width else float(chance.random() < mean)
                for mean in self.chances
            ]
        return self.rows[trial]


def pair_scores(candidate: Skill, current: Skill, trial: int, items: Sequence[str]) -> list[ScorePair]:
    """Return the scores of both skills in a trial of these items."""
    new, old = candidate.row(trial), current.row(trial)
    return [ScorePair(item_id=i, candidate=new[int(i)], current=old[int(i)]) for i in items]


# -------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True)
class Plan:
    """One row of the table: a model and a split."""

    model: Model
    n: int

    @property
    def setting(self) -> GateSettings:
        """The setting of each decision."""
        return GateSettings(item_ids=tuple(str(item) for item in range(self.n)))

    def skill(self, *label: object, better: bool = False) -> Skill:
        """Return a skill; the same label gives the same."""
        name = "/".join(str(part) for part in (self.model.name, self.n, *label))
        chances = self.model.chances(self.n, random.Random(f"{SEED}/{name}"), label[-1] == 0)
        return Skill(self.model, self.model.better(chances) if better else chances, name)


@dataclass(frozen=True)
class Outcome:
    """What one run gave: false acceptances under both rules, whether noise was seen, and the error of the best score."""

    strict: int
    repeated: int
    seen: bool
    bias: float


def judge(plan: Plan, candidate: Skill, current: Skill, *, confirms: bool) -> str:
    """Return the decision; ``noisy`` if a repeat disagrees."""
    pairs = pair_scores(candidate, current, 0, plan.setting.item_ids)
    ruling = decide(plan.setting, pairs)
    if ruling.action != "accept" or not confirms:
        return ruling.action
    repeats = pair_scores(candidate, current, 1, choose_repeats(pairs))
    return "noisy" if has_disagreement(pairs, repeats) else "accept"


def neutral_run(plan: Plan, run: int) -> Outcome:
    """Eight candidates without merit, one after the other; an accepted one is the next one's opponent.

    The rule with repeats stops where it sees noise: beliefs decide from there on.
    """
    strict = repeated = 0
    seen = False
    current = plan.skill(run, 0)
    presumed = current
    for step in range(1, STEPS + 1):
        candidate = plan.skill(run, step)
        if judge(plan, candidate, current, confirms=False) == "accept":
            strict, current = strict + 1, candidate
        action = "noisy" if seen else judge(plan, candidate, presumed, confirms=True)
        seen = action == "noisy"
        if action == "accept":
            repeated, presumed = repeated + 1, candidate
    return Outcome(strict, repeated, seen, fmean(current.row(0)) - fmean(current.chances))


def finds_gain(plan: Plan, run: int) -> bool:
    """Return whether the strict rule accepts a candidate that is better by the gain."""
    current, candidate = plan.skill("gain", run, 0), plan.skill("gain", run, 0, better=True)
    candidate.label += "/better"
    return judge(plan, candidate, current, confirms=False) == "accept"


def stable_sequence(n: int, run: int, *, confirms: bool) -> tuple[str, ...]:
    """Eight decisions on deterministic skills of any quality; the actions."""
    chance = random.Random(f"{SEED}/stable/{run}")
    tables = [[float(chance.random() < 0.5) for _ in range(n)] for _ in range(STEPS + 1)]
    plan, actions = Plan(Model("stable", everywhere, raised), n), list[str]()
    current, *candidates = (Skill(plan.model, table, str(k)) for k, table in enumerate(tables))
    for candidate in candidates:
        actions.append(judge(plan, candidate, current, confirms=confirms))
        current = candidate if actions[-1] == "accept" else current
    return tuple(actions)


# --------------------------------------------------------------------------------------------- summaries


def at_most(count: int, n: int) -> float:
    """Return the one-sided 95% upper bound of a share, by Clopper and Pearson's method."""
    low, high = count / n, 1.0
    if count == n:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        terms = (
            math.lgamma(n + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * math.log(middle)
            + (n - k) * math.log1p(-middle)
            for k in range(count + 1)
        )
        low, high = (middle, high) if math.fsum(map(math.exp, terms)) > 0.05 else (low, middle)
    return high


def at_least(count: int, n: int) -> float:
    """Return the one-sided 95% lower bound of a share."""
    return 1 - at_most(n - count, n)


# ------------------------------------------------------------------------------------------------ tables


HEAD = (
    ("noise", 35),
    ("n", 3),
    ("strict: false", 13),
    ("best off by", 11),
    ("+15", 6),
    ("repeats: false", 14),
    ("at most", 7),
    ("noise seen", 10),
)


def simulate(plan: Plan, runs: int) -> list[str]:
    """Return the cells of a row of the table."""
    found = [neutral_run(plan, run) for run in range(runs)]
    false = sum(outcome.repeated > 0 for outcome in found)
    return [
        plan.model.name,
        str(plan.n),
        f"{fmean(outcome.strict > 0 for outcome in found):.1%}",
        f"{100 * fmean(outcome.bias for outcome in found):+.1f}",
        f"{fmean(finds_gain(plan, run) for run in range(runs)):.1%}",
        f"{false / runs:.1%}",
        f"{at_most(false, runs):.1%}",
        f"{fmean(outcome.seen for outcome in found):.1%}",
    ]


def line(cells: Sequence[str]) -> str:
    """Return cells as a line of the table."""
    first, *rest = (cell.rjust(width) for cell, (_, width) in zip(cells, HEAD, strict=True))
    return f"| {first.strip().ljust(HEAD[0][1])} | {' | '.join(rest)} |"


def compare_stable(n: int, runs: int) -> tuple[str, str | None]:
    """Return how deterministic targets were decided, and what is not as stated."""
    equal = sum(
        stable_sequence(n, run, confirms=True) == stable_sequence(n, run, confirms=False)
        for run in range(runs)
    )
    name = f"deterministic, n = {n}"
    miss = None if equal == runs else f"{name}: {runs - equal} sequences differ from strict's"
    return f"{name}: {equal} of {runs} sequences of {STEPS} decisions with repeats are strict's", miss


def main() -> int:
    """Run everything; return 1 if a stated bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few runs of each row")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    started = time.perf_counter()
    runs, sequences = (5, 20) if options.quick else (RUNS, SEQUENCES)
    misses: list[str] = []
    print(f"seed {SEED}; {runs} runs and comparisons a row; bounds are one-sided, at 95%")
    with ProcessPoolExecutor(options.workers) as pool:
        stable = [pool.submit(compare_stable, n, sequences) for n in SIZES]
        rows = [pool.submit(simulate, Plan(model, n), runs) for model in MODELS for n in SIZES]
        for future in stable:
            sentence, miss = future.result()
            print(sentence, flush=True)
            misses += [] if miss is None else [miss]
        print(line([name for name, _ in HEAD]))
        print(line(["-" * width for _, width in HEAD]))
        for row in rows:
            print(line(row.result()), flush=True)
    print(f"{time.perf_counter() - started:.0f} s with {options.workers} processes")
    for miss in misses:
        print(f"MISSED: {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
