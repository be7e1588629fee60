"""Statistical power of the gate: detectable improvements of a validation split, and the trials they need.

The estimates hold for a decision on many small differences. The real power is known only afterwards, from the
share of pairs that differed.
"""

from __future__ import annotations

import math

MIN_TRIALS, MAX_TRIALS = 2, 20
"""Bounds of the automatic number of trials."""

DISCORDANT_SHARE = 0.5
"""Expected share of pairs that differ, as for two fair coins."""

POWER_QUANTILE = 0.84
"""The 80% quantile of the standard normal distribution."""

MIXTURE_COST = 0.4
"""Approximate loss in the logarithm of the evidence from betting on three sizes at once."""

LOOK_COST = 1.15
"""Factor of additional rollouts because the evidence is tested only after whole rounds."""


def choose_trials(n: int, *, decisions: int, alpha: float, effect: float) -> int:
    """Return the number of rounds that detects an improvement with about 80% power, in 2..20.

    Args:
        n: Items in the validation split.
        decisions: Gated decisions that share ``alpha``.
        alpha: The error probability of the whole run.
        effect: The improvement of the mean score to detect, in 0..1.
    """
    needed = _count_pairs(effect, level=alpha / decisions) / n
    return min(max(math.ceil(needed), MIN_TRIALS), MAX_TRIALS)


def detectable_effect(n: int, trials: int, *, level: float, discordant: float = DISCORDANT_SHARE) -> float:
    """Return the smallest improvement of the mean that is detected with about 80% power, at most 1.

    Args:
        n: Items in the validation split.
        trials: Maximum of rounds.
        level: The decision's error probability.
        discordant: Share of the pairs that differ; for fractional scores the mean squared difference.
    """
    return min(1.0, _quantile(level) * math.sqrt(discordant / (n * trials)))


def describe_power(n: int, trials: int, *, decisions: int, alpha: float, effect: float) -> str:
    """Return a sentence on the improvements that these items and trials detect, and on the needs of ``effect``."""
    level = alpha / decisions
    least = detectable_effect(n, trials, level=level)
    plan = f"{n} items x {trials} trials"
    if least <= effect:
        return f"{plan} can detect improvements of about {_format_points(least)} if the target is noisy."
    pairs = _count_pairs(effect, level=level)
    more_trials, more_items = math.ceil(pairs / n), 5 * math.ceil(pairs / trials / 5)
    return (
        f"{plan} can detect only improvements of about {_format_points(least)} if the target is noisy; for "
        f"{_format_points(effect)} use {more_trials} trials or {more_items} items x {trials}; otherwise expect "
        "`inconclusive`, or choose `strict` and treat its acceptances as unverified."
    )


def _count_pairs(effect: float, *, level: float) -> float:
    return LOOK_COST * _quantile(level) ** 2 * DISCORDANT_SHARE / effect**2


def _quantile(level: float) -> float:
    return math.sqrt(2 * (MIXTURE_COST - math.log(level))) + POWER_QUANTILE


def _format_points(share: float) -> str:
    points = round(100 * share)
    return f"{points} point" if points == 1 else f"{points} points"
