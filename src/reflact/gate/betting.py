"""Testing by betting: evidence from paired scores that stays valid under repeated looks.

Three bets start with shares of one unit of capital. A pair with the difference ``d = candidate - current``
multiplies each bet's capital by ``1 + stake * (d - margin)``. The sum of the capitals is the evidence.

Source: I. Waudby-Smith and A. Ramdas, Journal of the Royal Statistical Society B 86 (2024), 1-27.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BET_WEIGHTS = (0.4, 0.4, 0.2)
"""The bets' shares of the capital."""

STAKE_FACTORS = (1, 2, 4)
"""The bets' stakes, relative to the smallest."""

MAX_STAKE = 0.9
"""Maximum loss of a bet in one pair, as a share of its capital."""


def choose_stakes(pairs: int, *, level: float, margin: float) -> tuple[float, ...]:
    """Return the three bets' stakes for a plan, the smallest first.

    Args:
        pairs: Planned maximum of pairs.
        level: Planned error probability.
        margin: The improvement that must be exceeded.
    """
    least = math.sqrt(-4 * math.log(level) / pairs)
    return tuple(min(factor * least, MAX_STAKE / (1 + margin)) for factor in STAKE_FACTORS)


@dataclass(slots=True)
class PairStatistics:
    """Running sums over pairs; the same pairs in the same order give the same bits.

    A pair with an unmeasured side is counted, but left out of the sums. That is harmless if a failed
    measurement does not depend on the two skills' results. Otherwise it could hide a loss on the uncovered
    share of the items. So the gate requires coverage, and similar shares of unmeasured rollouts on both sides.

    Args:
        stakes: The bets' stakes.
        margin: The improvement that must be exceeded.
        n_pairs: Number of pairs added.
        n_measured: Number of pairs measured on both sides; all sums are over these.
        n_unmeasured: Numbers of unmeasured rollouts of the candidate and of the current skill.
        totals: The candidate's and the current skill's summed scores.
        squares: The sum of squared differences.
        log_capitals: The logarithm of each bet's capital, relative to its start.
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
