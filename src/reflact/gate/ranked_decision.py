"""Beliefs about the versions of a run: Bayesian ranking and selection by value of information.

The true validation mean of the baseline has a broad prior. That of a child is its parent's, plus a
small loss and an effect whose scale is not known: a mixture of normals. A pass over all items is
one observation. All functions are pure, and take time in proportion to the number of versions.

Source: P. Frazier, W. Powell and S. Dayanik, SIAM Journal on Control and Optimization 47 (2008),
2410-2439.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import NormalDist, fmean

from reflact.types import HARD_VARIANCE, Belief, PassResult, Ranking, VersionNode, find_room

# The prior mean of an effect, the difference between a version's true mean and its parent's.
EXPECTED_CHANGE = -0.01

SCALES = (0.01, 0.06, 0.15, 0.45)

# The deviations that an effect may have, and their prior probabilities.
WEIGHTS = (0.35, 0.35, 0.2, 0.1)

# Other prior probabilities, for a statement that a candidate is better.
#
# A choice is corrected later, so it may expect large effects; a statement must be true as often as
# it says also if most edits change nothing.
SCEPTICAL_WEIGHTS = (0.6, 0.33, 0.05, 0.02)

# The mean variance of an effect of which nothing was observed.
PRIOR_VARIANCE = math.fsum(weight * scale**2 for weight, scale in zip(WEIGHTS, SCALES, strict=True))

# The variance between items that a true difference is expected to have, and the weight of that
# guess in items.
ITEM_VARIANCE = 0.1
PSEUDO_ITEMS = 4

# The least variance of an observation; a difference that is known exactly has it.
MIN_NOISE = 1e-12

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
    """An effect as it was observed with normal noise, and the log of the odds of this case."""

    observed: float
    variance: float
    log_weight: float = 0.0


def update_effect(*cases: EffectObservation, weights: Sequence[float] = WEIGHTS) -> EffectBelief:
    """Return the posterior of an effect that was observed with normal noise.

    With several cases one of them holds, for example with several possible means of the other side.
    """
    parts: list[tuple[float, float, float, float]] = []
    for case in cases:
        noise = max(case.variance, MIN_NOISE)
        surprise = case.observed - EXPECTED_CHANGE
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
        differences: Candidate minus current, -1..1, one for each item of a random slice, each from
            one trial a side.
        n_items: The number of validation items.
        variance: The variance of one score within an item; 0 if the target is deterministic.
    """
    m = len(differences)
    observed = fmean(differences)
    squares = math.fsum((difference - observed) ** 2 for difference in differences)
    explained = 2 * variance * (m - 1)
    between = PSEUDO_ITEMS * ITEM_VARIANCE + max(0.0, squares - explained)
    between /= PSEUDO_ITEMS + m - 1
    unseen = 1 - m / n_items
    return update_effect(EffectObservation(observed, (2 * variance + unseen * between) / m))


# The prior of the baseline's true mean.
BASELINE_MEAN = 0.5
BASELINE_VARIANCE = 0.25

# The most passes of a version.
MAX_PASSES = 4

# A candidate is rejected if it is better than the current version with a smaller probability.
REJECT_BELOW = 0.1

# A version replaces the baseline as the best one if it is better with at least this probability.
BEST_ABOVE = 0.9

# The scores of one pass by item; None is unmeasured.
ItemScores = Mapping[str, float | None]


class Posterior:
    """The joint normal distribution of all versions' true means, given the passes."""

    def __init__(self, ranking: Ranking) -> None:
        self._indices = {node.skill_hash: i for i, node in enumerate(ranking.nodes)}
        size = len(ranking.nodes)
        self._changes = [PRIOR_VARIANCE] * size
        self._precisions = [0.0] * size
        self._weighted = [0.0] * size
        for result in ranking.passes:
            i = self._indices[result.skill_hash]
            precision = result.n / result.variance
            self._precisions[i] += precision
            self._weighted[i] += precision * result.mean
            if result.change_variance is not None:
                self._changes[i] = result.change_variance
        self._parents = [-1] + [self._indices[node.parent or ""] for node in ranking.nodes[1:]]
        for i in range(size - 1, 0, -1):
            precision, weight = self._find_message(i)
            self._precisions[self._parents[i]] += precision
            self._weighted[self._parents[i]] += weight
        root = 1 / BASELINE_VARIANCE + self._precisions[0]
        self._means = [(BASELINE_MEAN / BASELINE_VARIANCE + self._weighted[0]) / root]
        self._variances = [1 / root]
        self._slopes = [1.0]
        for i in range(1, size):
            parent = self._parents[i]
            change = self._changes[i]
            slope = 1 / (1 + change * self._precisions[i])
            mean = self._means[parent] + EXPECTED_CHANGE + change * self._weighted[i]
            self._slopes.append(slope)
            self._means.append(slope * mean)
            self._variances.append(slope**2 * self._variances[parent] + slope * change)

    def find_effect(
        self, skill_hash: str, weights: Sequence[float] = WEIGHTS
    ) -> EffectBelief | None:
        """Return what is believed of a version's difference to its parent; None if unobserved.

        It follows from all passes of the version and its descendants, against what is known of its
        parent without them. The scale of the parent's own effect is not known either: a parent that
        was measured low by chance must not make its child look better.
        """
        i = self._indices[skill_hash]
        if not i or not self._precisions[i]:
            return None
        observed = self._weighted[i] / self._precisions[i]
        noise = 1 / self._precisions[i]
        cases = [
            EffectObservation(observed - mean, noise + variance, log_weight)
            for mean, variance, log_weight in self._list_parent_cases(i)
        ]
        return update_effect(*cases, weights=weights)

    def find_change_variance(self, skill_hash: str) -> float | None:
        """Return the variance with which one normal prior of the effect shrinks as the mixture."""
        effect = self.find_effect(skill_hash)
        if effect is None:
            return None
        i = self._indices[skill_hash]
        _, variance = self._find_cavity(i)
        noise = variance + 1 / self._precisions[i]
        return noise * effect.slope / max(1 - effect.slope, 1e-9)

    def _list_parent_cases(self, i: int) -> Iterator[tuple[float, float, float]]:
        """Yield the means and variances a parent may have without a version, and log odds."""
        parent = self._parents[i]
        sent, weight = self._find_message(i)
        precision = self._precisions[parent] - sent
        if not parent or precision <= 1e-9:
            yield (*self._find_cavity(i), 0.0)
            return
        observed = (self._weighted[parent] - weight) / precision
        mean, variance = self._find_cavity(parent)
        surprise = observed - mean - EXPECTED_CHANGE
        for share, scale in zip(WEIGHTS, SCALES, strict=True):
            total = variance + scale**2 + 1 / precision
            slope = (variance + scale**2) / total
            log_weight = math.log(share) - 0.5 * (math.log(total) + surprise**2 / total)
            yield mean + EXPECTED_CHANGE + slope * surprise, slope / precision, log_weight

    def _find_message(self, i: int) -> tuple[float, float]:
        """Return the precision and the weighted mean that a subtree adds to its parent."""
        precision = self._precisions[i]
        shrink = 1 + self._changes[i] * precision
        return precision / shrink, (self._weighted[i] - EXPECTED_CHANGE * precision) / shrink

    def _find_cavity(self, i: int) -> tuple[float, float]:
        """Return the mean and the variance of a version's parent without the version's subtree."""
        parent = self._parents[i]
        sent, weight = self._find_message(i)
        variance = 1 / (1 / self._variances[parent] - sent)
        return variance * (self._means[parent] / self._variances[parent] - weight), variance

    def find_mean(self, skill_hash: str) -> float:
        """Return the expected true mean of one version."""
        return self._means[self._indices[skill_hash]]

    def find_belief(self, skill_hash: str) -> Belief:
        """Return the marginal distribution of one version's true mean."""
        i = self._indices[skill_hash]
        return Belief(
            skill_hash=skill_hash, mean=self._means[i], deviation=math.sqrt(self._variances[i])
        )

    def covariance(self, first: str, second: str) -> float:
        """Return the covariance of two versions' true means."""
        a = self._indices[first]
        b = self._indices[second]
        product = 1.0
        while a != b:
            younger = max(a, b)
            product *= self._slopes[younger]
            a, b = (self._parents[younger], b) if a == younger else (a, self._parents[younger])
        return product * self._variances[a]

    def find_probability(self, better: str, than: str) -> float:
        """Return the probability that one version's true mean is the greater; 0.5 for the same."""
        if better == than:
            return 0.5
        i = self._indices[better]
        j = self._indices[than]
        if self._parents[i] == j:
            effect = self.find_effect(better, SCEPTICAL_WEIGHTS)
            if effect is not None:
                return effect.p_better
        variance = self._variances[i] + self._variances[j] - 2 * self.covariance(better, than)
        return _STANDARD.cdf((self._means[i] - self._means[j]) / math.sqrt(max(variance, 1e-18)))

    def find_worth(self, measured: str, first: str, second: str, noise: float) -> float:
        """Return what another pass of ``measured`` adds to the choice between two versions.

        In mean scores, it is the expected gain of choosing after the pass instead of before it (the
        knowledge gradient); ``noise`` is the variance of a pass's mean.
        """
        spread = abs(self.covariance(first, measured) - self.covariance(second, measured))
        spread /= math.sqrt(self.covariance(measured, measured) + noise)
        if spread <= 0.0:
            return 0.0
        gap = abs(self._means[self._indices[first]] - self._means[self._indices[second]]) / spread
        return max(0.0, spread * (_STANDARD.pdf(gap) - gap * _STANDARD.cdf(-gap)))


def start_ranking(
    baseline: str, trials: Sequence[Mapping[str, float | None]], *, is_hard: bool
) -> Ranking:
    """Return the ranking after the baseline's first passes, whose scores are by item.

    The variance within an item is expected as for hard scores, or as in these passes if scores are
    fractions.
    """
    ranking = Ranking(nodes=(VersionNode(skill_hash=baseline),))
    passes = [
        build_pass(ranking, baseline, scores, earlier=trials[:i], others=())
        for i, scores in enumerate(trials)
    ]
    repeats = sum(result.repeats for result in passes)
    if not is_hard and repeats:
        squares = math.fsum(result.squares for result in passes)
        room = math.fsum(result.repeats * (result.room or 0.0) for result in passes)
        prior = {"prior_variance": squares / repeats, "prior_room": room / repeats}
        ranking = ranking.model_copy(update=prior)
        for i, result in enumerate(passes):
            variance = ranking.find_variance(result.mean)
            passes[i] = result.model_copy(update={"variance": variance})
    return reduce(Ranking.add_pass, passes, ranking)


def choose_pass(
    ranking: Ranking, candidate: str, current: str, *, worth: float, n: int
) -> str | None:
    """Return which of two versions gets another pass of ``n`` items; None if none is worth it.

    A candidate without a pass gets one. ``worth`` is the least gain of the mean for each rollout; a
    version gets at most ``MAX_PASSES``.
    """
    if not ranking.count_passes(candidate):
        return candidate
    posterior = Posterior(ranking)
    chosen = None
    greatest = worth * n
    for version in (candidate, current):
        noise = ranking.find_variance(posterior.find_mean(version)) / n
        gain = posterior.find_worth(version, candidate, current, noise)
        if gain > greatest and ranking.count_passes(version) < MAX_PASSES:
            chosen = version
            greatest = gain
    return chosen


def choose_version(posterior: Posterior, contenders: Sequence[str]) -> str:
    """Return the contender with the highest expected mean; the earlier one of equals."""
    return max(contenders, key=posterior.find_mean)


def build_pass(
    ranking: Ranking,
    skill_hash: str,
    scores: ItemScores,
    *,
    earlier: Sequence[ItemScores],
    others: Sequence[ItemScores],
) -> PassResult:
    """Return the scores of a version's next pass as an observation; one must be measured.

    ``earlier`` are the same version's passes before. ``others`` are passes of another version: if
    items stayed unmeasured, the mean is adjusted by the others' means on the missing items.
    """
    measured = {item: score for item, score in scores.items() if score is not None}
    mean = raw = fmean(measured.values())
    means = _mean_by_item(others or earlier)
    shared = [item for item in measured if item in means]
    missing = [item for item in scores if item not in measured and item in means]
    if shared and missing:
        usual = fmean(means[item] for item in shared)
        mean += math.fsum(means[item] - usual for item in missing) / (len(measured) + len(missing))
    squares = 0.0
    repeats = 0
    for item, score in measured.items():
        before = [known for each in earlier if (known := each.get(item)) is not None]
        if before:
            repeats += 1
            gap = score - fmean(before)
            squares += gap * gap * len(before) / (len(before) + 1)
    mean = min(1.0, max(0.0, mean))
    result = PassResult(
        skill_hash=skill_hash,
        trial=len(earlier),
        mean=mean,
        n=len(measured),
        variance=HARD_VARIANCE,
        squares=squares,
        repeats=repeats,
        room=find_room(mean),
        measured=None if mean == raw else raw,
    )
    usual = Posterior(ranking).find_mean(skill_hash)
    after = ranking.add_pass(result)
    update: dict[str, float] = {"variance": max(map(after.find_variance, (mean, usual)))}
    result = result.model_copy(update=update)
    change_variance = Posterior(ranking.add_pass(result)).find_change_variance(skill_hash)
    return result.model_copy(update={"change_variance": change_variance})


def _mean_by_item(passes: Sequence[ItemScores]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for each in passes:
        for item, score in each.items():
            if score is not None:
                scores.setdefault(item, []).append(score)
    return {item: fmean(values) for item, values in scores.items()}
