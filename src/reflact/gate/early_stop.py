"""Early stop: whether the finished part of a round already determines the gate's decision.

By bounds only, so the decision is the one that the whole round would give, whatever its open pairs gave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reflact.gate.decision import (
    MAX_UNMEASURED_GAP,
    SCORE_TOLERANCE,
    GateSettings,
    Ruling,
    ScorePair,
    TrialRequest,
    Trials,
    build_ruling,
    conclude_rounds,
    explain_veto,
    find_missing_items,
    is_noisy,
)

SAFETY_MARGIN = 1e-9
"""By how much a bound must clear a threshold, so that rounding cannot make it and the whole round differ."""


def decide_early(
    settings: GateSettings, trials: Trials, ask: TrialRequest, prefix: Sequence[ScorePair]
) -> Ruling | None:
    """Return the decision if the finished prefix of an ask determines it, else None.

    The decision is taken at the shortest prefix that determines it, however long the given one is, so the
    order of completion has no part in it. An open pair may give any score; one that is never run needs no
    measurement, and the pairs that are left open count as measured for coverage. An unmeasured pair of the
    prefix counts as open too, so that measuring it after all changes nothing.

    - One pass: the mean can no longer rise above, or no longer fall to, what is needed; or too many items are
      lost already.
    - Noisy: the evidence reaches what is needed with every open pair lost; or it cannot reach it with every
      open pair won, and the round will end as futile whatever they give, or, being the last, as inconclusive
      whatever they give. Where it might be either the round goes on.

    A round that is to show whether items repeat, or whether they are really lost, has no early stop. The
    decision on a complete ask is ``reflact.gate.decision.look``'s.

    Args:
        settings: What the decision depends on beside the scores.
        trials: The pairs that the ask was made on.
        ask: What is being run.
        prefix: The pairs of the ask's first items, in its order.
    """
    watch = EarlyStopMonitor(settings, trials, ask)
    for pair in prefix:
        ruling = watch.add(pair)
        if ruling is not None:
            return ruling
    return None


class EarlyStopMonitor:
    """``settled`` for one pair after another, at a cost that does not grow with their number."""

    def __init__(self, settings: GateSettings, trials: Trials, ask: TrialRequest) -> None:
        self._setting = settings
        self._noisy = is_noisy(settings, trials)
        self._tested = self._noisy and settings.policy == "paired"
        self._sums = settings.new_statistics()
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
        """Return the decision if the pairs added so far determine it; the next one is the ask's next item."""
        self._left -= 1
        if not self._active or not self._left:
            return None
        self._sums.add(pair.candidate, pair.current)
        self._retried += pair.difference is None
        self._count_pair(pair)
        if not self._will_be_covered():
            return None
        return self._decide_by_evidence() if self._tested else self._decide_by_mean()

    def _is_pass(self, trials: Trials, ask: TrialRequest) -> bool:
        """Whether this is the one pass that decides; a repeat at hand might still show noise."""
        if ask.trial != 0:
            return False
        repeated = {item_id for trial, pairs in trials.items() if trial != 0 for item_id in pairs}
        return self._setting.policy == "strict" or repeated.isdisjoint(ask.item_ids)

    def _is_round(self, trials: Trials, ask: TrialRequest) -> bool:
        """Whether the rounds before have left the decision open; else suspects of a veto are run again."""
        before = self._setting.new_statistics()
        for trial in range(ask.trial):
            if find_missing_items(self._setting, trials, trial):
                return False
            for item_id in self._setting.item_ids:
                before.add(trials[trial][item_id].candidate, trials[trial][item_id].current)
            if conclude_rounds(self._setting, before) is not None:
                return False
        return True

    def _add_known_pairs(self, trials: Trials, ask: TrialRequest) -> None:
        for trial in range(ask.trial + 1):
            pairs = trials.get(trial, {})
            for item_id in self._setting.item_ids:
                if item_id in pairs:
                    self._sums.add(pairs[item_id].candidate, pairs[item_id].current)
        self._closed_missed = self._sums.n_unmeasured
        for trial, pairs in trials.items():
            if self._setting.policy == "paired" or trial == 0:
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
        apart = abs(closed[0] - closed[1])
        apart += max(missed - before for missed, before in zip(sums.n_unmeasured, closed, strict=True))
        enough = self._setting.coverage * total - SCORE_TOLERANCE
        return sums.n_measured + self._left >= enough and 100 * apart <= MAX_UNMEASURED_GAP * total

    def _never_vetoed(self) -> bool:
        allowed = self._setting.no_regression
        return allowed is None or len(self._setting.item_ids) - len(self._kept) <= allowed

    def _decide_by_mean(self) -> Ruling | None:
        setting, sums, margin = self._setting, self._sums, self._setting.min_improvement
        excess = sums.total - margin * sums.n_measured
        if sums.n_measured and excess + self._open * (1 - margin) <= 0:
            return build_ruling(setting, sums, "reject", noisy=self._noisy, open_pairs=self._open)
        if setting.policy == "paired" and not setting.declared_deterministic:
            return None
        losses = len(self._lost - self._kept)
        if setting.no_regression is not None and losses > setting.no_regression:
            reason = explain_veto(setting, losses)
            return build_ruling(
                setting, sums, "reject", noisy=self._noisy, reason=reason, open_pairs=self._open
            )
        rounding = 2 * SCORE_TOLERANCE * len(setting.item_ids)
        if excess - self._open * (1 + margin) > rounding and self._never_vetoed():
            return build_ruling(setting, sums, "accept", noisy=self._noisy, open_pairs=self._open)
        return None

    def _decide_by_evidence(self) -> Ruling | None:
        setting, sums = self._setting, self._sums
        rounds = math.ceil(sums.n_pairs / len(setting.item_ids))
        if self._never_vetoed() and self._is_proven():
            return build_ruling(setting, sums, "accept", noisy=True, open_pairs=self._open)
        will_be_futile = rounds > 1 and all(
            self._bound_above(n) < setting.target_improvement - SAFETY_MARGIN
            for n in self._possible_measured_counts()
        )
        if will_be_futile and self._is_out_of_reach():
            return build_ruling(setting, sums, "reject", noisy=True, open_pairs=self._open)
        if rounds < setting.trials or not self._is_out_of_reach():
            return None
        if rounds == 1 or all(
            self._bound_below(n) > setting.target_improvement + SAFETY_MARGIN
            for n in self._possible_measured_counts()
        ):
            return build_ruling(setting, sums, "inconclusive", noisy=True, open_pairs=self._open)
        return None

    def _is_proven(self) -> bool:
        """Whether the evidence is enough with every open pair lost."""
        sums, margin = self._sums, self._setting.min_improvement
        excess = sums.total - margin * sums.n_measured - self._open * (1 + margin)
        if max(sums.stakes) * excess < self._setting.threshold:
            return False  # log(1 + x) <= x, and most prefixes end here
        return sums.log_evidence(self._open, -1.0) >= self._setting.threshold + SAFETY_MARGIN

    def _is_out_of_reach(self) -> bool:
        """Whether the evidence is not enough with every open pair of the round won."""
        return self._sums.log_evidence(self._open, 1.0) < self._setting.threshold - SAFETY_MARGIN

    def _possible_measured_counts(self) -> range:
        """How many of the open pairs may turn out measured, all of them first."""
        return range(self._open, -1, -1)

    def _bound_above(self, pairs: int) -> float:
        """Return an upper bound of ``Tally.upper`` after this many more pairs.

        ``u / n + 2 * sqrt((squares + pairs - u**2 / n) / (n * (n - 1)))`` is concave in the sum ``u`` of all
        differences; its maximum is where the derivative is zero, cut to what the pairs can reach.
        """
        sums, n = self._sums, self._sums.n_measured + pairs
        if n < 2:
            return math.inf
        squares, scale = sums.squares + pairs, 4 / (n * (n - 1))
        peak = math.sqrt(squares / (1 / n + scale))
        total = min(max(peak, sums.total - pairs), sums.total + pairs)
        return total / n + math.sqrt(scale * max(0.0, squares - total**2 / n))

    def _bound_below(self, pairs: int) -> float:
        """Return a lower bound of ``Tally.upper`` after this many more pairs, all lost at most.

        More pairs never lessen the sum of squared deviations.
        """
        sums, n = self._sums, self._sums.n_measured + pairs
        if n < 2:
            return math.inf
        deviations = sums.deviations if sums.n_measured else 0.0
        return (sums.total - pairs) / n + 2 * math.sqrt(deviations / (n * (n - 1)))
