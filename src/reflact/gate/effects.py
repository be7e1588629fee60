"""What is believed of an edit's effect, whose scale is not known: the exact posterior of a mixture of normals.

Most edits change nothing or little, and some change everything. One normal prior cannot say both: a narrow one takes a
large gain for luck, and everything after it looks like a further gain; a wide one takes luck for a gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

EXPECTED_CHANGE = -0.01
"""The prior mean of an effect, the difference between a version's true mean and its parent's."""

SCALES = (0.01, 0.06, 0.15, 0.45)
WEIGHTS = (0.35, 0.35, 0.2, 0.1)
"""The deviations that an effect may have, and their prior probabilities."""

SCEPTICAL_WEIGHTS = (0.6, 0.33, 0.05, 0.02)
"""Other prior probabilities, for a statement that a candidate is better.

A choice is corrected later, so it may expect large effects; a statement must be true as often as it says also if most
edits change nothing.
"""

PRIOR_VARIANCE = math.fsum(weight * scale**2 for weight, scale in zip(WEIGHTS, SCALES, strict=True))
"""The mean variance of an effect of which nothing was observed."""

ITEM_VARIANCE, PSEUDO_ITEMS = 0.1, 4
"""The variance between items that a true difference is expected to have, and the weight of that guess in items."""

MIN_NOISE = 1e-12
"""The least variance of an observation; a difference that is known exactly has it."""

_STANDARD = NormalDist()


@dataclass(frozen=True)
class EffectBelief:
    """What is believed of an effect, a difference of two true means in -1..1.

    Attributes:
        mean: The mean of the mixture.
        deviation: Its standard deviation.
        p_better: The probability that the effect is above 0.
        slope: The share of the surprise, observed minus expected, that is taken for an effect.
    """

    mean: float
    deviation: float
    p_better: float
    slope: float


@dataclass(frozen=True)
class EffectObservation:
    """An effect as it was observed, with the variance of normal noise, and the log of the odds that this is the case."""

    observed: float
    variance: float
    log_weight: float = 0.0


def update_effect(*cases: EffectObservation, weights: Sequence[float] = WEIGHTS) -> EffectBelief:
    """Return the posterior of an effect that was observed with normal noise.

    With several cases one of them holds, for example with several possible means of the other side.
    """
    parts: list[tuple[float, float, float, float]] = []
    for case in cases:
        noise, surprise = max(case.variance, MIN_NOISE), case.observed - EXPECTED_CHANGE
        for weight, scale in zip(weights, SCALES, strict=True):
            total = scale**2 + noise
            slope = scale**2 / total
            log = case.log_weight + math.log(weight) - 0.5 * (math.log(total) + surprise**2 / total)
            parts.append((log, slope, EXPECTED_CHANGE + slope * surprise, slope * noise))
    top = max(log for log, *_ in parts)
    mass = math.fsum(math.exp(log - top) for log, *_ in parts)
    mean = square = p_better = mean_slope = 0.0
    for log, slope, center, spread in parts:
        weight = math.exp(log - top) / mass
        mean += weight * center
        square += weight * (spread + center**2)
        p_better += weight * _STANDARD.cdf(center / math.sqrt(spread))
        mean_slope += weight * slope
    return EffectBelief(
        mean=mean,
        deviation=math.sqrt(max(0.0, square - mean**2)),
        p_better=min(1.0, p_better),
        slope=mean_slope,
    )


def compare_paired(differences: Sequence[float], *, n_items: int, variance: float) -> EffectBelief:
    """Return what a slice of the validation items says about the mean difference over all of them.

    Args:
        differences: Candidate minus current, -1..1, one for each item of a random slice, each from one trial a side.
        n_items: The number of validation items.
        variance: The variance of one score within an item; 0 if the target is deterministic.

    Raises:
        ValueError: There is no difference, or there are more than items.
    """
    m = len(differences)
    if not 0 < m <= n_items:
        raise ValueError(f"{m} differences cannot be a slice of {n_items} items; give 1 to {n_items}")
    observed = fmean(differences)
    squares = math.fsum((difference - observed) ** 2 for difference in differences)
    explained = 2 * variance * (m - 1)
    between = (PSEUDO_ITEMS * ITEM_VARIANCE + max(0.0, squares - explained)) / (PSEUDO_ITEMS + m - 1)
    unseen = 1 - m / n_items
    return update_effect(EffectObservation(observed, (2 * variance + unseen * between) / m))
