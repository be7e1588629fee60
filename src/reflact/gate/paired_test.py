"""The test of the paired gate, by betting: evidence from paired scores that stays valid under repeated looks.

Three bets start with shares of one unit of capital. A pair with the difference ``d = candidate - current``
multiplies each bet's capital by ``1 + stake * (d - margin)``. The sum of the capitals is the evidence.

Source: I. Waudby-Smith and A. Ramdas, Journal of the Royal Statistical Society B 86 (2024), 1-27.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from reflact.gate.intervals import POWER_QUANTILE

BET_WEIGHTS = (0.4, 0.4, 0.2)
"""The bets' shares of the capital."""

STAKE_FACTORS = (1, 2, 4)
"""The bets' stakes, relative to the smallest."""

MAX_STAKE = 0.9
"""Maximum loss of a bet in one pair, as a share of its capital."""


def choose_stakes(pairs: int, *, level: float, margin: float) -> tuple[float, ...]:
    """Return the three bets' stakes for a planned number of pairs, the smallest first."""
    least = math.sqrt(-4 * math.log(level) / pairs)
    return tuple(min(factor * least, MAX_STAKE / (1 + margin)) for factor in STAKE_FACTORS)


@dataclass(slots=True)
class PairStatistics:
    """Running sums over pairs; the same pairs in the same order give the same bits.

    A pair with an unmeasured side is counted, but left out of the sums. That is harmless if a failed
    measurement does not depend on the two skills' results. Otherwise it could hide a loss on the uncovered
    share of the items. So the gate requires coverage, and similar shares of unmeasured rollouts on both
    sides.

    Improvements must exceed ``margin``. ``n_unmeasured`` and ``totals`` are the unmeasured rollouts and the
    summed scores of the candidate and of the current skill, ``squares`` is the sum of squared differences,
    and ``log_capitals`` are the logarithms of the bets' capitals, relative to their start.
    """

    stakes: tuple[float, ...]
    margin: float
    n_pairs: int = 0
    n_measured: int = 0
    n_unmeasured: tuple[int, int] = (0, 0)
    totals: tuple[float, float] = (0.0, 0.0)
    squares: float = 0.0
    log_capitals: tuple[float, ...] = field(default=(0.0,) * len(BET_WEIGHTS))

    def add(self, candidate: float | None, current: float | None) -> None:
        """Count one pair of scores, each in 0..1 or None."""
        self.n_pairs += 1
        if candidate is None or current is None:
            self.n_unmeasured = (
                self.n_unmeasured[0] + (candidate is None),
                self.n_unmeasured[1] + (current is None),
            )
            return
        difference = candidate - current
        self.n_measured += 1
        self.totals = (self.totals[0] + candidate, self.totals[1] + current)
        self.squares += difference * difference
        self.log_capitals = self._log_capitals(1, difference)

    @property
    def total(self) -> float:
        """The sum of the differences."""
        return self.totals[0] - self.totals[1]

    @property
    def mean(self) -> float:
        """The mean difference; there must be a measured pair."""
        return self.total / self.n_measured

    @property
    def deviations(self) -> float:
        """The sum of squared deviations of the differences from their mean; there must be a measured pair."""
        return max(0.0, self.squares - self.total**2 / self.n_measured)

    @property
    def upper_bound(self) -> float:
        """The mean difference plus two standard errors; infinite for fewer than two pairs.

        Differences between items count as noise here, so a comparison is rather ended too late than too early.
        """
        if self.n_measured < 2:
            return math.inf
        return self.mean + 2 * math.sqrt(self.deviations / (self.n_measured * (self.n_measured - 1)))

    @property
    def lower_bound(self) -> float:
        """The mean difference minus two standard errors; minus infinity for fewer than two pairs."""
        return -math.inf if self.n_measured < 2 else 2 * self.mean - self.upper_bound

    def log_evidence(self, further: int = 0, difference: float = 0.0) -> float:
        """Return the logarithm of the evidence after ``further`` hypothetical pairs with this difference."""
        capitals = self._log_capitals(further, difference) if further else self.log_capitals
        terms = [math.log(weight) + capital for weight, capital in zip(BET_WEIGHTS, capitals, strict=True)]
        top = max(terms)
        return top + math.log(math.fsum(math.exp(term - top) for term in terms))

    def _log_capitals(self, pairs: int, difference: float) -> tuple[float, ...]:
        excess = difference - self.margin
        return tuple(
            capital + pairs * math.log1p(stake * excess)
            for capital, stake in zip(self.log_capitals, self.stakes, strict=True)
        )


MIN_TRIALS, MAX_TRIALS = 5, 20
"""Bounds of the automatic number of trials; the fewest let a gain on stable items count as reproduced."""

DISCORDANT_SHARE = 0.5
"""Expected share of pairs that differ, as for two fair coins."""

MIXTURE_COST = 0.4
"""Approximate loss in the logarithm of the evidence from betting on three sizes at once."""

LOOK_COST = 1.15
"""Factor of additional rollouts because the evidence is tested only after whole rounds."""


def choose_trials(n: int, *, decisions: int, alpha: float, effect: float) -> int:
    """Return the number of rounds that detects an improvement of ``effect`` with about 80% power, in 5..20.

    ``n`` is the number of items; ``decisions`` share the error probability ``alpha``.
    """
    needed = _count_pairs(effect, level=alpha / decisions) / n
    return min(max(math.ceil(needed), MIN_TRIALS), MAX_TRIALS)


def detectable_effect(n: int, trials: int, *, level: float, discordant: float = DISCORDANT_SHARE) -> float:
    """Return the smallest improvement of the mean that is detected with about 80% power, at most 1.

    ``n`` items have at most ``trials`` rounds. ``discordant`` is the share of the pairs that differ, or for
    fractional scores the mean squared difference.
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
        f"{plan} can detect only improvements of about {_format_points(least)} if the target is noisy. To detect "
        f"{_format_points(effect)}, use {more_trials} trials, or {more_items} items x {trials}. Otherwise most candidates "
        "end as `inconclusive`. `strict` always decides, but its acceptances are not verified."
    )


def _count_pairs(effect: float, *, level: float) -> float:
    return LOOK_COST * _quantile(level) ** 2 * DISCORDANT_SHARE / effect**2


def _quantile(level: float) -> float:
    return math.sqrt(2 * (MIXTURE_COST - math.log(level))) + POWER_QUANTILE


def _format_points(share: float) -> str:
    points = round(100 * share)
    return f"{points} point" if points == 1 else f"{points} points"
