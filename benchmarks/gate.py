"""Whole simulated runs under each policy of the gate: what the final skill is really worth.

    python benchmarks/gate.py              everything, in about half an hour on two cores
    python benchmarks/gate.py --runs 20    a first look

A run has versions of a document, each made from the current one by an edit. The policies decide by the code of
``reflact.gate``; nothing of it is copied here. A skill solves an item with a probability of its own (``Version``), and
its true accuracy is that on all items, not on the validation items. Every rollout is counted: a training batch of 40
for each step, and what the gate asks for. A run ends when its budget is spent.

``docs/gate.md`` describes the policies.
The exit code is 1 where a stated bound is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from statistics import NormalDist, fmean, quantiles, stdev

from harness import at_most

from reflact.gate.intervals import CLAIM_LEVEL, compute_chance, improvement_interval
from reflact.gate.ranked_decision import (
    BEST_ABOVE,
    Posterior,
    build_pass,
    choose_pass,
    choose_version,
    start_ranking,
)
from reflact.types import PassResult, Ranking

SEED, BATCH, WORTH = 2026, 40, 0.00005
START, CEILING, FLOOR = 0.5, 0.865, 0.02
ITEM_SPREAD, ITEM_MEMORY = 1.3, 0.98
"""Items differ by this deviation (in probits); an edit leaves this correlation of the items' differences."""

BASELINE_PASSES = 2
"""The passes of a baseline whose target is noisy."""

REPLAYED = 500
"""Versions of a long run; their replay must take less than a second."""

TESTS = (100, 200)
"""Items of the sealed test."""


# ----------------------------------------------------------------------------------------------- landscapes


@dataclass(frozen=True)
class Landscape:
    """How good a proposer's edits are: shares that help and harm, and the mean size of both in accuracy.

    Sizes have a gamma distribution of shape 2. No edit lifts the accuracy above ``CEILING``. ``design`` is the gain in
    points that the design states at 40 items and 4,000 rollouts, by policy.
    """

    name: str
    helpful: float
    gain: float
    harmful: float
    loss: float = 0.07
    design: tuple[tuple[str, float], ...] = ()


LANDSCAPES = (
    Landscape(
        "realistic",
        0.25,
        0.052,
        0.25,
        design=(("ranked", 30.2), ("strict", 23.1), ("pool", 17.4)),
    ),
    Landscape(
        "optimistic",
        0.5,
        0.052,
        0.25,
        design=(("ranked", 36.0), ("strict", 29.7), ("pool", 23.3)),
    ),
    Landscape(
        "pessimistic",
        0.1,
        0.04,
        0.375,
        design=(("ranked", 8.6), ("strict", 3.6), ("pool", 2.8)),
    ),
    Landscape(
        "small gains",
        0.25,
        0.024,
        0.25,
        design=(("ranked", 11.5), ("strict", 5.0), ("pool", 4.1)),
    ),
    Landscape(
        "nothing helps",
        0.0,
        0.0,
        0.3,
        design=(("ranked", -0.7), ("strict", -1.3), ("pool", -0.6)),
    ),
    Landscape("rare large gains", 0.05, 0.2, 0.25),
    Landscape("hostile", 0.1, 0.052, 0.7),
)

OTHER_SIZES = (LANDSCAPES[0], LANDSCAPES[2], LANDSCAPES[4])
"""The landscapes that are also simulated with other sizes and budgets."""


@dataclass
class Version:
    """A version of the document: its true accuracy, how its items differ from that, and its scores so far.

    ``chances`` are the probabilities of solving the validation items: those of all items have the mean ``accuracy``.
    """

    name: str
    accuracy: float
    shifts: list[float]
    depth: int = 0
    passes: list[dict[str, float]] = field(default_factory=list)
    scores: dict[tuple[int, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chances = spread_chances(self.accuracy, self.shifts)


def spread_chances(accuracy: float, shifts: Sequence[float]) -> list[float]:
    """Return the chance of each item; normal shifts give chances with the mean ``accuracy``."""
    middle = math.sqrt(1 + ITEM_SPREAD**2) * NormalDist().inv_cdf(accuracy)
    return [0.5 * math.erfc(-(middle + shift) / math.sqrt(2)) for shift in shifts]


class World:
    """The versions and scores of one simulated run; ``spent`` counts its rollouts."""

    def __init__(
        self,
        landscape: Landscape,
        n: int,
        run: int,
        *,
        start: float | None = None,
        ceiling: float = CEILING,
        is_steady: bool = False,
    ) -> None:
        label = f"{SEED}/{landscape.name}/{n}/{run}"
        self.ceiling, self.is_steady = ceiling, is_steady
        self._ideas, self._draws = random.Random(f"{label}/ideas"), random.Random(f"{label}/scores")
        self.landscape, self.items, self.spent, self.steps = (
            landscape,
            tuple(f"{i}" for i in range(n)),
            0,
            0,
        )
        accuracy = START if start is None else start
        self.baseline = Version(
            "0", accuracy, [self._ideas.gauss(0, ITEM_SPREAD) for _ in range(n)]
        )
        self.trace: list[tuple[int, float]] = []

    def note_best(self, best: Version) -> None:
        """Note the rollouts so far, and what the run would gain if it ended now."""
        self.trace.append((self.spent, best.accuracy - START))

    def edit(self, parent: Version, jump: float = 0.0) -> Version:
        """Return the candidate of the next step, after the step's training batch; ``jump`` is a gain for certain."""
        self.spent += BATCH
        self.steps += 1
        landscape, kind, size = (
            self.landscape,
            self._ideas.random(),
            self._ideas.gammavariate(2, 0.5),
        )
        accuracy = parent.accuracy
        if jump:
            accuracy += jump
        elif kind < landscape.helpful:
            accuracy = max(accuracy, min(self.ceiling, accuracy + size * landscape.gain))
        elif kind < landscape.helpful + landscape.harmful:
            accuracy = max(FLOOR, accuracy - size * landscape.loss)
        if self.is_steady and accuracy == parent.accuracy:
            return Version(str(self.steps), accuracy, parent.shifts, parent.depth + 1)
        fresh = math.sqrt(1 - ITEM_MEMORY**2) * ITEM_SPREAD
        shifts = [ITEM_MEMORY * shift + self._ideas.gauss(0, fresh) for shift in parent.shifts]
        return Version(str(self.steps), accuracy, shifts, parent.depth + 1)

    def run_pass(self, version: Version) -> dict[str, float]:
        """Return the scores of a further pass over the validation items."""
        number = len(version.passes)
        version.passes.append({item: self.score(version, number, item) for item in self.items})
        return version.passes[-1]

    def score(self, version: Version, trial: int, item: str) -> float:
        """Return the score of one rollout; only the first time it costs one."""
        if (trial, item) not in version.scores:
            self.spent += 1
            version.scores[trial, item] = float(self._draws.random() < version.chances[int(item)])
        return version.scores[trial, item]

    def is_claimed(self, best: Version, n: int) -> bool:
        """Whether the final claim is confirmed on a sealed test of so many items, one trial each."""
        memory = ITEM_MEMORY**best.depth
        before = [self._draws.gauss(0, ITEM_SPREAD) for _ in range(n)]
        fresh = math.sqrt(1 - memory**2) * ITEM_SPREAD
        after = [memory * shift + self._draws.gauss(0, fresh) for shift in before]
        sides = (spread_chances(START, before), spread_chances(best.accuracy, after))
        scores = [[float(self._draws.random() < chance) for chance in side] for side in sides]
        return improvement_interval(*scores)[1] > 0 and compute_chance(*scores) <= CLAIM_LEVEL


# ------------------------------------------------------------------------------------------------- policies

Result = tuple[Version, float]
"""The best skill, and the validation score that a run reports for it."""


def run_ranked(world: World, has_rollouts: Callable[[], bool]) -> Result:
    """Build on the version that is believed best, and report its measured mean."""
    best = world.baseline
    for _, best in follow_ranked(world, has_rollouts):
        world.note_best(best)
    return best, fmean(score for scores in best.passes for score in scores.values())


def follow_ranked(
    world: World, has_rollouts: Callable[[], bool], first_gain: float = 0.0
) -> Iterator[tuple[Statement, Version]]:
    """Yield the statement of each decision of the ranked gate, and the best version after it."""
    current = baseline = world.baseline
    for _ in range(BASELINE_PASSES):
        world.run_pass(baseline)
    ranking = start_ranking(baseline.name, baseline.passes, is_hard=True)
    versions, kept = {baseline.name: baseline}, [baseline.name]
    while has_rollouts():
        candidate = world.edit(current, jump=0.0 if world.steps else first_gain)
        versions[candidate.name] = candidate
        ranking = measure_versions(
            world, ranking.add_version(candidate.name, current.name), candidate, current
        )
        posterior = Posterior(ranking)
        chosen = choose_version(posterior, (*kept, candidate.name))
        kept += [chosen] if chosen == candidate.name else []
        statement = Statement(
            posterior.find_probability(candidate.name, current.name),
            chosen == candidate.name,
            candidate.accuracy - current.accuracy,
        )
        current = versions[chosen]
        yield statement, choose_best(posterior, current, baseline)


def choose_best(posterior: Posterior, current: Version, baseline: Version) -> Version:
    """Return the current version if it is believed to be better than the baseline, else the baseline."""
    is_better = posterior.find_probability(current.name, baseline.name) >= BEST_ABOVE
    return current if is_better else baseline


def measure_versions(
    world: World, ranking: Ranking, candidate: Version, current: Version
) -> Ranking:
    """Return the ranking after the passes that are worth their rollouts."""
    sides = {version.name: version for version in (candidate, current)}
    n = len(world.items)
    while name := choose_pass(ranking, candidate.name, current.name, worth=WORTH, n=n):
        earlier = tuple(sides[name].passes)
        result = build_pass(ranking, name, world.run_pass(sides[name]), earlier=earlier, others=())
        ranking = ranking.add_pass(result)
    return ranking


def run_strict(world: World, has_rollouts: Callable[[], bool]) -> Result:
    """Build on candidates whose mean of one pass is greater, as ``strict`` decides.

    A pass ends as soon as the items that have not run cannot change the decision. The current version's score of
    an item is read again if it has one.
    """
    current = world.baseline
    world.run_pass(current)
    reported = fmean(current.passes[0].values())
    while has_rollouts():
        candidate = world.edit(current)
        lead, open_items = 0.0, len(world.items)
        for item in world.items:
            lead += world.score(candidate, 0, item) - world.score(current, 0, item)
            open_items -= 1
            if abs(lead) > open_items or lead == -open_items:
                break
        if lead > 0:
            current = candidate
            reported = fmean(current.scores.values())
        world.note_best(current)
    return current, reported


def run_pool(world: World, has_rollouts: Callable[[], bool]) -> Result:
    """Keep all versions; a parent is drawn by the number of items on which no version is better (a Pareto pool)."""
    chance, pool = random.Random(world.landscape.name), [world.baseline]
    world.run_pass(world.baseline)
    while has_rollouts():
        tops = [max(version.passes[0][item] for version in pool) for item in world.items]
        wins = [
            sum(v.passes[0][i] == top for i, top in zip(world.items, tops, strict=True))
            for v in pool
        ]
        pool.append(world.edit(chance.choices(pool, weights=[n + 1e-9 for n in wins])[0]))
        world.run_pass(pool[-1])
    means = [fmean(version.passes[0].values()) for version in pool]
    return pool[means.index(max(means))], max(means)


def run_open(world: World, has_rollouts: Callable[[], bool]) -> Result:
    """Accept every candidate; the one with the greatest mean of one pass is the best."""
    world.run_pass(world.baseline)
    versions = [world.baseline]
    while has_rollouts():
        versions.append(world.edit(versions[-1]))
        world.run_pass(versions[-1])
    means = [fmean(version.passes[0].values()) for version in versions]
    return versions[means.index(max(means))], max(means)


def run_oracle(world: World, has_rollouts: Callable[[], bool]) -> Result:
    """Know the true accuracy of each candidate, without a rollout."""
    current = world.baseline
    while has_rollouts():
        candidate = world.edit(current)
        current = candidate if candidate.accuracy > current.accuracy else current
    return current, current.accuracy


POLICIES: dict[str, Callable[[World, Callable[[], bool]], Result]] = {
    "ranked": run_ranked,
    "strict": run_strict,
    "pool": run_pool,
    "no gate": run_open,
    "oracle": run_oracle,
}


# ---------------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Statement:
    """What the gate stated on a candidate: the probability that it is better, and whether it was accepted.

    ``effect`` is the true difference to the version that was current. A statement "better" is true if and only if
    it is above 0: about an edit without effect it is false, also if that edit is accepted at no loss.
    """

    probability: float
    accepted: bool
    effect: float

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        return "gain" if self.effect > 0 else "harm" if self.effect < 0 else "no effect"


KINDS = ("gain", "no effect", "harm")


@dataclass(frozen=True)
class CalibrationCell:
    """Runs of ``CALIBRATION_STEPS`` steps after a first edit that gains ``first_gain``, or from ``START`` without one."""

    landscape: Landscape
    n: int
    first_gain: float

    def simulate(self, runs: range) -> list[Statement]:
        """Return the statements of some runs, without that on the first edit."""
        return [statement for run in runs for statement in self._simulate_run(run)]

    def _simulate_run(self, run: int) -> Iterator[Statement]:
        start = FIRST_GAINS[self.first_gain]
        world = World(
            self.landscape, self.n, run, start=start, ceiling=CALIBRATION_CEILING, is_steady=True
        )
        steps = CALIBRATION_STEPS + bool(self.first_gain)
        for step, (statement, _) in enumerate(
            follow_ranked(world, lambda: world.steps < steps, self.first_gain)
        ):
            if step or not self.first_gain:
                yield statement


FIRST_GAINS = {0.0: START, 0.4: 0.3, 0.85: 0.005}
"""Gains of a first edit, and the accuracy before it."""

CALIBRATION_CEILING, CALIBRATION_STEPS, CALIBRATION_SIZES = 0.98, 12, (20, 28, 40, 100)


@dataclass(frozen=True)
class Calibration:
    """The statements of one cell."""

    cell: CalibrationCell
    statements: Sequence[Statement]

    def select(self, low: float, high: float = 1.1) -> list[Statement]:
        """Return the statements with a probability of at least ``low`` and below ``high``."""
        return [s for s in self.statements if low <= s.probability < high]

    @property
    def sure(self) -> tuple[float, int]:
        """How often a stated probability of ``BEST_ABOVE`` or more is true, and the number of such statements."""
        sure = self.select(BEST_ABOVE)
        return (fmean(s.effect > 0 for s in sure) if sure else math.nan), len(sure)

    def accepted(self, kind: str) -> float:
        """Return the share of the edits of a kind that is accepted."""
        return fmean(s.accepted for s in self.statements if s.kind == kind)

    def show(self) -> Iterator[str]:
        """Yield the lines of its report."""
        share, count = self.sure
        title = f"{self.cell.landscape.name}, {self.cell.n} items, first gain {100 * self.cell.first_gain:.0f} points"
        accepted = ", ".join(f"{kind} {self.accepted(kind):.0%}" for kind in KINDS)
        yield f"{title}: stated {BEST_ABOVE:g} or more is true in {share:.3f} of {count}; accepted: {accepted}"
        for decile in range(10):
            group = self.select(decile / 10, (decile + 1) / 10 if decile < 9 else 1.1)
            if group:
                kinds = ", ".join(f"{kind} {sum(s.kind == kind for s in group)}" for kind in KINDS)
                stated, truth = (
                    fmean(s.probability for s in group),
                    fmean(s.effect > 0 for s in group),
                )
                yield f"  {decile / 10:.1f} to {(decile + 1) / 10:.1f}: stated {stated:.2f}, true {truth:.2f} ({kinds})"


# ---------------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cell:
    """One policy in one landscape; ``steps`` ends runs by their steps instead of their rollouts."""

    policy: str
    landscape: Landscape
    n: int = 40
    budget: int = 4000
    steps: int | None = None

    @property
    def weight(self) -> float:
        """The runs of the cell, relative to those of the design's table; claims take more, other sizes fewer."""
        if (self.n, self.budget, self.steps) != (40, 4000, None):
            return 0.5
        return 1.0 if self.policy != "ranked" else 2.0 if self.landscape.helpful else 10.0

    def simulate(self, run: int) -> Outcome:
        """Return what one run gave."""
        world = World(self.landscape, self.n, run)

        def has_rollouts() -> bool:
            return world.spent < self.budget if self.steps is None else world.steps < self.steps

        best, reported = POLICIES[self.policy](world, has_rollouts)
        spent = world.spent
        is_new = best.name != world.baseline.name
        claims = tuple(is_new and world.is_claimed(best, n) for n in TESTS)
        return Outcome(best.accuracy - START, world.steps, spent, reported - best.accuracy, claims)


@dataclass(frozen=True)
class Outcome:
    """What one run gave: gain in true accuracy, steps, rollouts, optimism of its report, and confirmed claims."""

    gain: float
    steps: int
    spent: int
    optimism: float
    claims: tuple[bool, ...]


@dataclass(frozen=True)
class Summary:
    """The runs of one cell."""

    cell: Cell
    outcomes: Sequence[Outcome]

    @property
    def gain(self) -> float:
        """The mean gain in points."""
        return 100 * fmean(outcome.gain for outcome in self.outcomes)

    @property
    def error(self) -> float:
        """The standard error of the mean gain in points."""
        return (
            100 * stdev(outcome.gain for outcome in self.outcomes) / math.sqrt(len(self.outcomes))
        )

    @property
    def design(self) -> float | None:
        """The gain that the design states."""
        is_stated = (self.cell.n, self.cell.budget, self.cell.steps) == (40, 4000, None)
        return dict(self.cell.landscape.design).get(self.cell.policy) if is_stated else None

    def count_false_claims(self, test: int) -> int:
        """Return the number of runs whose confirmed claim is false."""
        return sum(outcome.claims[test] and outcome.gain <= 0 for outcome in self.outcomes)

    def show(self) -> list[str]:
        """Return the cells of its line."""
        gains, stated = [100 * outcome.gain for outcome in self.outcomes], self.design
        return [
            self.cell.policy,
            self.cell.landscape.name,
            str(self.cell.n),
            f"{self.gain:+.1f}",
            f"{self.error:.1f}",
            "" if stated is None else f"{stated:+.1f}",
            f"{quantiles(gains, n=10)[0]:+.1f}",
            f"{fmean(gain < -1 for gain in gains):.0%}",
            f"{fmean(outcome.steps for outcome in self.outcomes):.0f}",
            f"{fmean(outcome.spent for outcome in self.outcomes):.0f}",
            f"{100 * fmean(outcome.optimism for outcome in self.outcomes):+.1f}",
        ]


HEAD = (
    ("policy", 7),
    ("landscape", 16),
    ("items", 5),
    ("gain", 5),
    ("se", 3),
    ("design", 6),
    ("10th percentile", 15),
    ("ends worse", 10),
    ("steps", 5),
    ("rollouts", 8),
    ("optimism", 8),
)


def format_line(cells: Sequence[str]) -> str:
    """Return cells as a line of the table."""
    words = (
        cell.ljust(w) if i < 2 else cell.rjust(w)
        for i, (cell, (_, w)) in enumerate(zip(cells, HEAD, strict=True))
    )
    return f"| {' | '.join(words)} |"


def list_cells() -> Iterator[Cell]:
    """Yield all cells: the design's table, then other sizes and budgets, and equal steps."""
    for landscape, policy in product(LANDSCAPES, POLICIES):
        yield Cell(policy, landscape)
    for n, budget in ((20, 4000), (100, 4000), (40, 2000), (40, 8000)):
        for landscape, policy in product(OTHER_SIZES, ("ranked", "strict")):
            yield Cell(policy, landscape, n, budget)
    for policy in ("ranked", "strict"):
        yield Cell(policy, LANDSCAPES[0], steps=40)


CALIBRATION_CELLS = tuple(
    CalibrationCell(LANDSCAPES[0], n, gain) for n, gain in product(CALIBRATION_SIZES, FIRST_GAINS)
)
"""Where the statements of the gate are compared with the truth."""

SURE_ENOUGH, ACCEPTED_AT_MOST = 0.85, 1 / 3
"""How often a stated probability of ``BEST_ABOVE`` is true; the edits without effect that are accepted after a jump."""


def simulate_runs(cell: Cell, runs: range) -> list[Outcome]:
    """Return the outcomes of some runs of a cell."""
    return [cell.simulate(run) for run in runs]


def describe_claims(summary: Summary) -> str:
    """Return a sentence on the final claims of a cell."""
    n, parts = len(summary.outcomes), []
    for test, size in enumerate(TESTS):
        false, confirmed = (
            summary.count_false_claims(test),
            sum(o.claims[test] for o in summary.outcomes),
        )
        parts.append(
            f"{size} items: confirmed in {confirmed / n:.1%}, falsely in {false / n:.1%} (at most {at_most(false, n):.1%})"
        )
    return f"{summary.cell.landscape.name}: {'; '.join(parts)}"


def time_replay(versions: int) -> float:
    """Return the processor seconds in which a run's versions are observed again, with the beliefs after each."""
    chance, started = random.Random(SEED), time.process_time()
    ranking = start_ranking("0", [{"item": 0.0}, {"item": 1.0}], is_hard=True)
    for number in range(1, versions):
        parent = str(chance.randrange(max(0, number - 5), number))
        ranking = ranking.add_version(str(number), parent)
        for trial in range(2):
            score = float(chance.random() < START)
            result = PassResult(
                skill_hash=str(number),
                trial=trial,
                mean=score,
                n=1,
                variance=0.14,
                change_variance=0.01,
            )
            ranking = ranking.add_pass(result)
        choose_version(Posterior(ranking), [node.skill_hash for node in ranking.nodes])
    return time.process_time() - started


def find_calibration_misses(calibrations: Sequence[Calibration]) -> Iterator[str]:
    """Yield where statements are not as sure as they say, beyond chance, or edits without effect are accepted."""
    for found in calibrations:
        cell = f"{found.cell.n} items, first gain {100 * found.cell.first_gain:.0f} points"
        share, count = found.sure
        if count and at_most(round(share * count), count) < SURE_ENOUGH:
            yield f"{cell}: stated {BEST_ABOVE:g} or more is true in {share:.2f} of {count} cases"
        accepted = found.accepted("no effect")
        if found.cell.first_gain == max(FIRST_GAINS) and accepted > ACCEPTED_AT_MOST:
            yield f"{cell}: {accepted:.0%} of the edits without effect are accepted"


def find_misses(summaries: Sequence[Summary]) -> Iterator[str]:
    """Yield what is not as stated."""
    found = {summary.cell: summary for summary in summaries}
    ranked, strict = (found[Cell(policy, LANDSCAPES[0])] for policy in ("ranked", "strict"))
    if ranked.gain - strict.gain < 5:
        yield f"ranked is only {ranked.gain - strict.gain:.1f} points above strict in the realistic landscape"
    for summary in summaries:
        stated = summary.design
        if (
            stated is not None
            and summary.cell.policy == "ranked"
            and abs(summary.gain - stated) > 1
        ):
            yield f"ranked, {summary.cell.landscape.name}: {summary.gain:+.1f} and not {stated:+.1f} as designed"
    claimed = [s for s in summaries if s.cell.policy == "ranked"]
    for test, size in enumerate(TESTS):
        false, n = (
            sum(s.count_false_claims(test) for s in claimed),
            sum(len(s.outcomes) for s in claimed),
        )
        if at_most(false, n) > 0.025:
            yield f"tests of {size} items: up to {at_most(false, n):.1%} of claims are false"


def main() -> int:
    """Run everything; return 1 where a stated bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--runs", type=int, default=200, help="runs of most cells; see ``Cell.weight``"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    started, summaries = time.perf_counter(), list[Summary]()
    print(f"seed {SEED}, {options.runs} runs of a cell; gains in points of true accuracy")
    print(format_line([name for name, _ in HEAD]))
    print(format_line(["-" * width for _, width in HEAD]))
    with ProcessPoolExecutor(options.workers) as pool:
        parts = []
        for cell in list_cells():
            runs, size = round(options.runs * cell.weight), 20
            chunks = [range(first, min(first + size, runs)) for first in range(0, runs, size)]
            parts.append((cell, [pool.submit(simulate_runs, cell, chunk) for chunk in chunks]))
        for cell, futures in parts:
            summaries.append(Summary(cell, [one for future in futures for one in future.result()]))
            print(format_line(summaries[-1].show()), flush=True)
        calibrated = []
        for each in CALIBRATION_CELLS:
            runs, size = options.runs, 20
            chunks = [range(first, min(first + size, runs)) for first in range(0, runs, size)]
            calibrated.append((each, [pool.submit(each.simulate, chunk) for chunk in chunks]))
        print(
            "Statements of ranked, by their tenths (a statement on an edit without effect is false):"
        )
        calibrations = []
        for each, statements in calibrated:
            stated = [one for future in statements for one in future.result()]
            calibrations.append(Calibration(each, stated))
            print("\n".join(calibrations[-1].show()), flush=True)
    print("Final claims of ranked, on a sealed test (bounds are one-sided, at 95%):")
    for summary in summaries:
        if summary.cell.policy == "ranked" and summary.cell.n == 40 and summary.cell.budget == 4000:
            print(describe_claims(summary))
    replay, misses = time_replay(REPLAYED), list(find_misses(summaries))
    print(
        f"replaying {REPLAYED} versions, with the beliefs after each: {replay:.2f} s of processor time"
    )
    misses += find_calibration_misses(calibrations)
    misses += [f"replaying {REPLAYED} versions takes {replay:.2f} s"] if replay >= 1 else []
    print(f"{time.perf_counter() - started:.0f} s with {options.workers} processes")
    for miss in misses:
        print(f"MISSED: {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
