"""Beliefs about the effect of an edit, whose scale is not known: an exact posterior of a mixture of normals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

EXPECTED_CHANGE = -0.01
"""The prior mean of an edit's effect, the difference between a version's true mean and its parent's."""

SCALES, WEIGHTS = (0.01, 0.06, 0.15, 0.45), (0.35, 0.35, 0.2, 0.1)
"""The prior of its deviation: most edits change nothing or little, and some change everything."""

PRIOR_VARIANCE = math.fsum(weight * scale**2 for scale, weight in zip(SCALES, WEIGHTS, strict=True))
"""The variance of the effect of an edit that nothing is known of."""

ITEM_VARIANCE, PSEUDO_ITEMS = 0.1, 4
"""The variance between items of a true difference that is expected, and the weight of that expectation in items."""

_STANDARD = NormalDist()


@dataclass(frozen=True)
class EffectBelief:
    """What is believed of an edit's effect: mean and deviation of the mixture, and the probability that it helps.

    ``variance`` is the prior variance with which a single normal prior would lead to the same mean.
    """

    mean: float
    deviation: float
    p_better: float
    variance: float


def update_effect(observed: float, variance: float) -> EffectBelief:
    """Return the posterior of an effect that was observed with normal noise of this variance."""
    surprise = observed - EXPECTED_CHANGE
    totals = [scale**2 + max(variance, 1e-12) for scale in SCALES]
    logs = [
        math.log(weight) - 0.5 * (math.log(total) + surprise**2 / total)
        for weight, total in zip(WEIGHTS, totals, strict=True)
    ]
    top = max(logs)
    weights = [math.exp(value - top) for value in logs]
    mass = math.fsum(weights)
    mean = square = better = slope_mean = 0.0
    for weight, scale, total in zip(weights, SCALES, totals, strict=True):
        share, slope = weight / mass, scale**2 / total
        center, spread = EXPECTED_CHANGE + slope * surprise, slope * (total - scale**2)
        mean += share * center
        square += share * (spread + center**2)
        better += share * _STANDARD.cdf(center / math.sqrt(spread))
        slope_mean += share * slope
    return EffectBelief(
        mean=mean,
        deviation=math.sqrt(max(0.0, square - mean**2)),
        p_better=better,
        variance=variance * slope_mean / (1 - slope_mean),
    )
