"""Means, intervals and costs of the cells that ran."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean

from run import CellResult

DRAWS = 2000
Seeds = Sequence[Sequence[float]]
"""For each seed, the score of each item."""

Scores = Mapping[str, Seeds]
"""The seeds of each task."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval, from 0 to 1; a difference from -1 to 1."""

    mean: float
    low: float
    high: float


def find_cells(results: Sequence[CellResult], method: str, budget: str) -> list[CellResult]:
    """Return the cells of a method; one without a script has the same in each budget."""
    return [r for r in results if r.cell.method == method and r.cell.budget == budget]


def collect_scores(cells: Sequence[CellResult], tasks: Sequence[str]) -> dict[str, Seeds]:
    """Return the scores on the test items of those tasks whose test is open."""
    scores = {
        task: [r.test.each for r in cells if r.cell.task == task and r.test is not None]
        for task in tasks
    }
    return {task: seeds for task, seeds in scores.items() if seeds}


def estimate_mean(scores: Scores) -> Estimate:
    """Estimate the mean over tasks; items and seeds are drawn with replacement (percentile bootstrap)."""
    return _estimate((scores,))


def estimate_difference(scores: Scores, others: Scores) -> Estimate | None:
    """Estimate the difference of two means over the tasks that both have; None if there is none.

    Both share the drawn items, so the difference is paired by item.
    """
    tasks = [task for task in scores if task in others]
    if not tasks:
        return None
    return _estimate(
        ({task: scores[task] for task in tasks}, {task: others[task] for task in tasks})
    )


def _estimate(sides: Sequence[Scores]) -> Estimate:
    rng = random.Random(0)
    draws = sorted(_draw(sides, rng) for _ in range(DRAWS))
    means = [fmean(fmean(map(fmean, seeds)) for seeds in side.values()) for side in sides]
    low, high = draws[round(DRAWS * 0.025)], draws[round(DRAWS * 0.975) - 1]
    return Estimate(means[0] - sum(means[1:]), low, high)


def _draw(sides: Sequence[Scores], rng: random.Random) -> float:
    """Return the mean over tasks of drawn items and seeds, less that of the other side."""
    totals = [0.0] * len(sides)
    for task, seeds in sides[0].items():
        size = len(seeds[0])
        pick = itemgetter(*rng.choices(range(size), k=size))
        for number, side in enumerate(sides):
            drawn = rng.choices(side[task], k=len(side[task]))
            totals[number] += sum(sum(pick(seed)) for seed in drawn) / (size * len(drawn))
    return (totals[0] - sum(totals[1:])) / len(sides[0])


@dataclass(frozen=True)
class Costs:
    """What the cells of a method have cost, as means over cells."""

    rollouts: float
    optimizer_calls: float
    optimizer_tokens: float
    document_tokens: float
    seconds: float


def average_costs(cells: Sequence[CellResult]) -> Costs:
    """Return the costs of cells."""
    return Costs(
        rollouts=fmean(r.spend["target"].rollouts for r in cells),
        optimizer_calls=fmean(r.spend["optimizer"].calls for r in cells),
        optimizer_tokens=fmean(r.spend["optimizer"].tokens for r in cells),
        document_tokens=fmean(r.document_tokens for r in cells),
        seconds=fmean(sum(spend.seconds for spend in r.spend.values()) for r in cells),
    )
