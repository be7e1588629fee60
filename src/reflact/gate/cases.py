"""What repeats on the same few cases can prove, where only the answers vary.

A claim on new cases needs many cases (``gate.intervals``). A claim on these cases needs repeats: it
says that the document is better on them, and nothing about others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import model_validator

from reflact.gate.intervals import CLAIM_LEVEL
from reflact.records import CaseComparison
from reflact.types import FrozenModel

# Scores are counted in steps of this size, so that sums of them are whole numbers.
SCORE_STEP = 0.001

# Gains are rounded so that the largest possible sum of them has about so many steps.
MAX_STEPS = 2_000

# Sums of a smaller probability are left out; their probability counts against every claim.
NEGLIGIBLE = 1e-12


class CaseScores(FrozenModel):
    """The scores of one case in repeats, 0..1, under a document before and one after."""

    case_id: str
    before: tuple[float, ...]
    after: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> CaseScores:
        if not self.before or not self.after:
            raise ValueError(f"case {self.case_id} has no score on one side")
        if not all(0 <= score <= 1 for score in (*self.before, *self.after)):
            raise ValueError(f"a score of case {self.case_id} is not within 0..1")
        return self


def compare_cases(cases: Sequence[CaseScores], *, name: str) -> CaseComparison:
    """Compare a document with the one of a ``name`` on cases that were repeated under both.

    The test is exact: if the document changes nothing, each way to divide a case's scores between
    the two sides is equally likely (a permutation test stratified by case; for scores of 0 and 1
    the exact test of Mantel and Haenszel). Its statistic is the sum of the gains, rounded if there
    are many cases, which leaves the test exact. If some cases gain what others lose, it errs on the
    side of no claim, since pooled scores vary more than those of one side.

    Source: N. Mantel and W. Haenszel, Journal of the National Cancer Institute 22 (1959), 719-748.
    """
    if not cases:
        raise ValueError("there are no cases to compare")
    if len({case.case_id for case in cases}) < len(cases):
        raise ValueError("two cases have the same id")
    divisions = [_list_divisions(case) for case in cases]
    reach = math.fsum(max(map(abs, gains)) for gains in divisions)
    unit = max(SCORE_STEP, reach / MAX_STEPS)
    sums = {0: 1.0}
    for gains in divisions:
        sums = _add(sums, gains, unit)
    measured = sum(round(_compute_gain(case) / unit) for case in cases)
    left_out = max(0.0, 1.0 - math.fsum(sums.values()))
    better = math.fsum(p for total, p in sums.items() if total >= measured)
    worse = math.fsum(p for total, p in sums.items() if total <= measured)
    chance_better = min(1.0, better + left_out)
    chance_worse = min(1.0, worse + left_out)
    proven: Literal["better", "worse"] | None = None
    if chance_better <= CLAIM_LEVEL:
        proven = "better"
    elif chance_worse <= CLAIM_LEVEL:
        proven = "worse"
    return CaseComparison(
        name=name,
        n_cases=len(cases),
        repeats=min(min(len(case.before), len(case.after)) for case in cases),
        gain=math.fsum(fmean(case.after) - fmean(case.before) for case in cases) / len(cases),
        chance_better=chance_better,
        chance_worse=chance_worse,
        proven=proven,
        better=tuple(case.case_id for case in cases if _flips(case.before, case.after)),
        worse=tuple(case.case_id for case in cases if _flips(case.after, case.before)),
        flips_by_chance=_count_flips_by_chance(cases),
    )


def find_repeats(n_cases: int, *, most: int = 20) -> int | None:
    """Return the fewest repeats with which so many cases can prove a gain of them all."""
    for repeats in range(1, most + 1):
        if math.comb(2 * repeats, repeats) ** -n_cases <= CLAIM_LEVEL:
            return repeats
    return None


def _list_divisions(case: CaseScores) -> dict[float, float]:
    """Return the gains of a case for all divisions of its scores, with their probabilities."""
    scores = _count_steps((*case.before, *case.after))
    n_after = len(case.after)
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(n_after))]
    for score in scores:
        for taken in range(n_after, 0, -1):
            for below, count in ways[taken - 1].items():
                ways[taken][below + score] = ways[taken].get(below + score, 0) + count
    n_ways = math.comb(len(scores), n_after)
    gains: dict[float, float] = {}
    for after, count in ways[n_after].items():
        gain = (after / n_after - (sum(scores) - after) / len(case.before)) * SCORE_STEP
        gains[gain] = gains.get(gain, 0.0) + count / n_ways
    return gains


def _compute_gain(case: CaseScores) -> float:
    """Return the gain of the division that was measured, as ``_list_divisions`` computes it."""
    after = sum(_count_steps(case.after))
    before = sum(_count_steps(case.before))
    return (after / len(case.after) - before / len(case.before)) * SCORE_STEP


def _count_steps(scores: Sequence[float]) -> list[int]:
    return [round(score / SCORE_STEP) for score in scores]


def _add(sums: dict[int, float], gains: dict[float, float], unit: float) -> dict[int, float]:
    """Return the sums after one more case, in units, without negligible ones."""
    found: dict[int, float] = {}
    for gain, q in gains.items():
        steps = round(gain / unit)
        for total, p in sums.items():
            found[total + steps] = found.get(total + steps, 0.0) + p * q
    return {total: p for total, p in found.items() if p >= NEGLIGIBLE}


def _flips(before: Sequence[float], after: Sequence[float]) -> bool:
    return fmean(before) < 0.5 <= fmean(after)


def _count_flips_by_chance(cases: Sequence[CaseScores]) -> float | None:
    """Return the expected number of cases of which two runs of one document differ."""
    sides = [side for case in cases for side in (case.before, case.after) if len(side) > 1]
    if not sides:
        return None
    differ = 0.0
    for side in sides:
        solved = sum(score >= 0.5 for score in side)
        differ += 2 * solved * (len(side) - solved) / (len(side) * (len(side) - 1))
    return len(cases) * differ / len(sides)
