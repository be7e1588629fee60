"""Early stop: finds when the finished part of a round already determines the gate's decision.

It uses bounds only. So the decision equals that of the whole round for all outcomes of its open pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reflact.gate.paired_decision import (
    MAX_UNMEASURED_GAP,
    REPRODUCED_AFTER,
    SCORE_TOLERANCE,
    GateSettings,
    RepeatTracker,
    Ruling,
    ScorePair,
    TrialRequest,
    Trials,
    build_ruling,
    conclude_rounds,
    count_required,
    explain_veto,
    find_missing_items,
    is_noisy,
)

SAFETY_MARGIN = 1e-9
"""Distance between a bound and a threshold that rules out rounding errors."""


def decide_early(
    settings: GateSettings, trials: Trials, ask: TrialRequest, prefix: Sequence[ScorePair]
) -> Ruling | None:
    """Return the decision if the shortest possible prefix of a request determines it, else None.

    An open pair may have any score, and counts as measured for coverage. An unmeasured pair of the prefix
    counts as open too, so measuring it later changes nothing.

    - One pass: the mean can no longer exceed, or no longer fall to, the required value; or too many items are
      lost already.
    - Noisy: the evidence is sufficient even if every open pair is lost. Or it is insufficient even if every
      open pair is won, and the round certainly ends as futile, or, if it is the last, as inconclusive.

    A round that tests whether results repeat, or whether items are really lost, has no early stop.
    """
    watch = EarlyStopMonitor(settings, trials, ask)
    for pair in prefix:
        ruling = watch.add(pair)
        if ruling is not None:
            return ruling
    return None


class EarlyStopMonitor:
    """``decide_early`` for one pair after another, at a constant cost for each."""

    def __init__(self, settings: GateSettings, trials: Trials, ask: TrialRequest) -> None:
        self._settings = settings
        self._noisy = is_noisy(settings, trials)
        self._tested = self._noisy and settings.policy == "paired"
        self._sums = settings.new_statistics()
        self._repeats = RepeatTracker(settings)
        self._closed_missed = (0, 0)
        self._left = len(ask.item_ids)
        self._retried = 0
        self._kept: set[str] = set()
        self._lost: set[str] = set()
        applies = self._is_round(trials, ask) if self._tested else self._is_pass(trials, ask)
        self._active = settings.early_stop and applies
        if self._active:
            self._add_known_pairs(trials, ask)

    def add(self, pair: ScorePair) -> Ruling | None:
        """Add the request's next pair, and return the decision if the pairs so far determine it."""
        self._left -= 1
        if not self._active or not self._left:
            return None
        self._sums.add(pair.candidate, pair.current)
        if pair.difference is None:
            self._retried += 1
        else:
            self._repeats.add(pair)
        self._count_pair(pair)
        if not self._will_be_covered():
            return None
        return self._decide_by_evidence() if self._tested else self._decide_by_mean()

    def _is_pass(self, trials: Trials, ask: TrialRequest) -> bool:
        """Whether this pass alone decides; a stored repeat of its items might still show noise."""
        if ask.trial != 0:
            return False
        repeated = {item_id for trial, pairs in trials.items() if trial != 0 for item_id in pairs}
        return self._settings.policy == "strict" or repeated.isdisjoint(ask.item_ids)

    def _is_round(self, trials: Trials, ask: TrialRequest) -> bool:
        """Whether the earlier rounds left the decision open; otherwise the request repeats lost items."""
        before, repeats = self._settings.new_statistics(), RepeatTracker(self._settings)
        for trial in range(ask.trial):
            if find_missing_items(self._settings, trials, trial):
                return False
            for item_id in self._settings.item_ids:
                before.add(trials[trial][item_id].candidate, trials[trial][item_id].current)
                repeats.add(trials[trial][item_id])
            if conclude_rounds(self._settings, before, repeats) is not None:
                return False
        return True

    def _add_known_pairs(self, trials: Trials, ask: TrialRequest) -> None:
        for trial in range(ask.trial + 1):
            pairs = trials.get(trial, {})
            for item_id in self._settings.item_ids:
                if item_id in pairs:
                    self._sums.add(pairs[item_id].candidate, pairs[item_id].current)
                    self._repeats.add(pairs[item_id])
        self._closed_missed = self._sums.n_unmeasured
        for trial, pairs in trials.items():
            if self._settings.policy != "strict" or trial == 0:
                for pair in pairs.values():
                    self._count_pair(pair)

    def _count_pair(self, pair: ScorePair) -> None:
        if pair.candidate_solved is None or pair.current_solved is None:
            return
        is_lost = pair.current_solved and not pair.candidate_solved
        (self._lost if is_lost else self._kept).add(pair.item_id)

    @property
    def _open(self) -> int:
        return self._left + self._retried

    def _will_be_covered(self) -> bool:
        sums, total = self._sums, self._sums.n_pairs + self._left
        closed = self._closed_missed
        gap = abs(closed[0] - closed[1])
        gap += max(missed - before for missed, before in zip(sums.n_unmeasured, closed, strict=True))
        enough = count_required(self._settings.coverage, total)
        return sums.n_measured + self._left >= enough and 100 * gap <= MAX_UNMEASURED_GAP * total

    def _never_vetoed(self) -> bool:
        allowed = self._settings.no_regression
        return allowed is None or len(self._settings.item_ids) - len(self._kept) <= allowed

    def _decide_by_mean(self) -> Ruling | None:
        settings, sums, margin = self._settings, self._sums, self._settings.min_improvement
        excess = sums.total - margin * sums.n_measured
        if sums.n_measured and excess + self._open * (1 - margin) <= 0:
            return build_ruling(settings, sums, "reject", noisy=self._noisy, open_pairs=self._open)
        if settings.policy != "strict" and not settings.declared_deterministic:
            return None
        losses = len(self._lost - self._kept)
        if settings.no_regression is not None and losses > settings.no_regression:
            reason = explain_veto(losses, settings.no_regression)
            return build_ruling(
                settings, sums, "reject", noisy=self._noisy, reason=reason, open_pairs=self._open
            )
        rounding = 2 * SCORE_TOLERANCE * len(settings.item_ids)
        if excess - self._open * (1 + margin) > rounding and self._never_vetoed():
            return build_ruling(settings, sums, "accept", noisy=self._noisy, open_pairs=self._open)
        return None

    def _decide_by_evidence(self) -> Ruling | None:
        settings, sums = self._settings, self._sums
        rounds = math.ceil(sums.n_pairs / len(settings.item_ids))
        if self._never_vetoed() and self._is_proven():
            return build_ruling(settings, sums, "accept", noisy=True, open_pairs=self._open)
        will_be_futile = rounds > 1 and all(
            self._bound_above(n) < settings.target_improvement - SAFETY_MARGIN
            and self._bound_lower(n) <= settings.min_improvement - SAFETY_MARGIN
            for n in range(self._open + 1)
        )
        if will_be_futile and not self._repeats.is_reproduced and self._is_out_of_reach():
            return build_ruling(settings, sums, "reject", noisy=True, open_pairs=self._open)
        may_reproduce = rounds >= REPRODUCED_AFTER and self._repeats.is_reproduced
        if rounds < settings.trials or may_reproduce or not self._is_out_of_reach():
            return None
        if rounds == 1 or all(
            self._bound_below(n) > settings.target_improvement + SAFETY_MARGIN for n in range(self._open + 1)
        ):
            return build_ruling(settings, sums, "inconclusive", noisy=True, open_pairs=self._open)
        return None

    def _is_proven(self) -> bool:
        """Whether the evidence is sufficient if every open pair is lost."""
        sums, margin = self._sums, self._settings.min_improvement
        excess = sums.total - margin * sums.n_measured - self._open * (1 + margin)
        if max(sums.stakes) * excess < self._settings.threshold:
            return False  # log(1 + x) <= x, and most prefixes end here
        return sums.log_evidence(self._open, -1.0) >= self._settings.threshold + SAFETY_MARGIN

    def _is_out_of_reach(self) -> bool:
        """Whether the evidence is insufficient if every open pair is won."""
        return self._sums.log_evidence(self._open, 1.0) < self._settings.threshold - SAFETY_MARGIN

    def _bound_above(self, pairs: int) -> float:
        """Return an upper bound of ``PairStatistics.upper_bound`` after this many more pairs.

        ``u / n + 2 * sqrt((squares + pairs - u**2 / n) / (n * (n - 1)))`` is concave in the sum ``u`` of all
        differences. Its maximum is at the zero of the derivative, clipped to the reachable sums.
        """
        sums, n = self._sums, self._sums.n_measured + pairs
        if n < 2:
            return math.inf
        squares, scale = sums.squares + pairs, 4 / (n * (n - 1))
        peak = math.sqrt(squares / (1 / n + scale))
        total = min(max(peak, sums.total - pairs), sums.total + pairs)
        return total / n + math.sqrt(scale * max(0.0, squares - total**2 / n))

    def _bound_below(self, pairs: int) -> float:
        """Return a lower bound of ``PairStatistics.upper_bound`` after this many more pairs."""
        n = self._sums.n_measured + pairs
        return math.inf if n < 2 else (self._sums.total - pairs) / n + self._find_least_spread(n)

    def _bound_lower(self, pairs: int) -> float:
        """Return an upper bound of ``PairStatistics.lower_bound`` after this many more pairs."""
        n = self._sums.n_measured + pairs
        return -math.inf if n < 2 else (self._sums.total + pairs) / n - self._find_least_spread(n)

    def _find_least_spread(self, n: int) -> float:
        """Return the least of two standard errors over ``n`` pairs; further ones never reduce the squared deviations."""
        deviations = self._sums.deviations if self._sums.n_measured else 0.0
        return 2 * math.sqrt(deviations / (n * (n - 1)))
