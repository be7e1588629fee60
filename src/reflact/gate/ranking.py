"""Beliefs about the versions of a run: Bayesian ranking and selection with the value of information.

The true validation mean of the baseline has a broad prior; that of a child is its parent's, plus a small loss and
normal noise. A pass over all items is one observation. All functions are pure, and take time in proportion to
the number of versions.

Source: P. Frazier, W. Powell and S. Dayanik, SIAM Journal on Control and Optimization 47 (2008), 2410-2439.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from reflact.types import Belief, FrozenModel, PassResult

BASELINE_MEAN, BASELINE_VARIANCE = 0.5, 0.25
"""The prior of the baseline's true mean."""

EXPECTED_CHANGE, CHANGE_VARIANCE = -0.01, 0.06**2
"""The prior of the difference between a version's true mean and its parent's."""

PSEUDO_REPEATS, HARD_VARIANCE, MIN_VARIANCE = 20, 0.14, 1e-4
"""The weight and the mean of the prior of the variance within an item, and the least variance that is used."""

BASELINE_PASSES, MAX_PASSES = 2, 4
"""The passes of a baseline that may be noisy, and the most passes of any version."""

REJECT_BELOW = 0.2
"""A candidate is rejected if it is better than the current version with a smaller probability."""

BEST_ABOVE = 0.9
"""A version replaces the baseline as the best one if it is better with at least this probability."""

_STANDARD = NormalDist()


class VersionNode(FrozenModel):
    """A document in the tree of a run's versions; ``parent`` is the hash of the one it was made from."""

    skill_hash: str
    parent: str | None = None


class Ranking(FrozenModel):
    """All that the ranked gate has observed, in the order of the commits: the input of all beliefs.

    The first node is the baseline; a parent comes before its children. ``squares`` are the summed squared
    deviations of repeated scores from their item's mean, ``repeats`` their degrees of freedom.
    ``prior_variance`` is the variance within an item that is expected before any repeat.
    """

    nodes: tuple[VersionNode, ...]
    passes: tuple[PassResult, ...] = ()
    squares: float = 0.0
    repeats: int = 0
    prior_variance: float = HARD_VARIANCE

    @property
    def variance(self) -> float:
        """The variance of a score within an item: of the repeats, shrunk towards the prior."""
        pooled = PSEUDO_REPEATS * self.prior_variance + self.squares
        return max(MIN_VARIANCE, pooled / (PSEUDO_REPEATS + self.repeats))

    def add_version(self, skill_hash: str, parent: str) -> Ranking:
        """Return the ranking with one more version; a known one keeps its place."""
        if any(node.skill_hash == skill_hash for node in self.nodes):
            return self
        node = VersionNode(skill_hash=skill_hash, parent=parent)
        return self.model_copy(update={"nodes": (*self.nodes, node)})

    def add_pass(self, result: PassResult) -> Ranking:
        """Return the ranking with one more pass, unless the same trial of the version is known."""
        if any((known.skill_hash, known.trial) == (result.skill_hash, result.trial) for known in self.passes):
            return self
        return self.model_copy(
            update={
                "passes": (*self.passes, result),
                "squares": self.squares + result.squares,
                "repeats": self.repeats + result.repeats,
            }
        )

    def count_passes(self, skill_hash: str) -> int:
        """Return the number of passes of a version."""
        return sum(known.skill_hash == skill_hash for known in self.passes)

    def list_contenders(self, kept: Sequence[str]) -> tuple[str, ...]:
        """Return the kept versions that can become the current one.

        A version without a pass stands for the one it was made from, which it would otherwise never beat.
        """
        measured = {result.skill_hash for result in self.passes}
        replaced = {
            node.parent for node in self.nodes if node.skill_hash in kept and node.skill_hash not in measured
        }
        return tuple(skill_hash for skill_hash in kept if skill_hash not in replaced)


class Posterior:
    """The joint normal distribution of all versions' true means, given the passes."""

    def __init__(self, ranking: Ranking) -> None:
        self._indices = {node.skill_hash: i for i, node in enumerate(ranking.nodes)}
        size = len(ranking.nodes)
        precisions, weighted = [0.0] * size, [0.0] * size
        for result in ranking.passes:
            i, precision = self._indices[result.skill_hash], result.n / result.variance
            precisions[i] += precision
            weighted[i] += precision * result.mean
        self._parents = [-1] + [self._indices[node.parent or ""] for node in ranking.nodes[1:]]
        for i in range(size - 1, 0, -1):
            parent, shrink = self._parents[i], 1 + CHANGE_VARIANCE * precisions[i]
            precisions[parent] += precisions[i] / shrink
            weighted[parent] += (weighted[i] - EXPECTED_CHANGE * precisions[i]) / shrink
        root = 1 / BASELINE_VARIANCE + precisions[0]
        self._means = [(BASELINE_MEAN / BASELINE_VARIANCE + weighted[0]) / root]
        self._variances, self._slopes = [1 / root], [1.0]
        for i in range(1, size):
            parent, slope = self._parents[i], 1 / (1 + CHANGE_VARIANCE * precisions[i])
            self._slopes.append(slope)
            self._means.append(
                slope * (self._means[parent] + EXPECTED_CHANGE + CHANGE_VARIANCE * weighted[i])
            )
            self._variances.append(slope**2 * self._variances[parent] + slope * CHANGE_VARIANCE)

    def find_belief(self, skill_hash: str) -> Belief:
        """Return the marginal distribution of one version's true mean."""
        i = self._indices[skill_hash]
        return Belief(skill_hash=skill_hash, mean=self._means[i], deviation=math.sqrt(self._variances[i]))

    def covariance(self, first: str, second: str) -> float:
        """Return the covariance of two versions' true means."""
        a, b = self._indices[first], self._indices[second]
        product = 1.0
        while a != b:
            younger = max(a, b)
            product *= self._slopes[younger]
            a, b = (self._parents[younger], b) if a == younger else (a, self._parents[younger])
        return product * self._variances[a]

    def find_probability(self, better: str, than: str) -> float:
        """Return the probability that one version's true mean is greater than another's; 0.5 for the same."""
        if better == than:
            return 0.5
        i, j = self._indices[better], self._indices[than]
        variance = self._variances[i] + self._variances[j] - 2 * self.covariance(better, than)
        return _STANDARD.cdf((self._means[i] - self._means[j]) / math.sqrt(max(variance, 1e-18)))

    def find_worth(self, measured: str, first: str, second: str, noise: float) -> float:
        """Return what another pass of ``measured`` adds to the choice between two versions, as a mean score.

        It is the expected gain of choosing after the pass instead of before it (the knowledge gradient);
        ``noise`` is the variance of a pass's mean.
        """
        spread = abs(self.covariance(first, measured) - self.covariance(second, measured))
        spread /= math.sqrt(self.covariance(measured, measured) + noise)
        if spread <= 0.0:
            return 0.0
        gap = abs(self._means[self._indices[first]] - self._means[self._indices[second]]) / spread
        return spread * (_STANDARD.pdf(gap) - gap * _STANDARD.cdf(-gap))


def start_ranking(baseline: str, trials: Sequence[Mapping[str, float | None]], *, is_hard: bool) -> Ranking:
    """Return the ranking after the baseline's first passes, whose scores are by item.

    The variance within an item is expected as for hard scores, or as in these passes if scores are fractions.
    """
    ranking = Ranking(nodes=(VersionNode(skill_hash=baseline),))
    passes = [build_pass(baseline, i, scores, trials[:i], (), ranking) for i, scores in enumerate(trials)]
    repeats = sum(result.repeats for result in passes)
    if not is_hard and repeats:
        squares = math.fsum(result.squares for result in passes)
        ranking = ranking.model_copy(update={"prior_variance": squares / repeats})
        passes = [result.model_copy(update={"variance": ranking.variance}) for result in passes]
    for result in passes:
        ranking = ranking.add_pass(result)
    return ranking


def choose_pass(
    ranking: Ranking, candidate: str, current: str, *, worth: float, n: int, most: int
) -> str | None:
    """Return which of two versions gets another pass of ``n`` items; None if none is worth its rollouts.

    A candidate without a pass gets one. ``worth`` is the least gain of the mean for each rollout; a version
    gets at most ``most`` passes.
    """
    if not ranking.count_passes(candidate):
        return candidate
    posterior, noise = Posterior(ranking), ranking.variance / n
    open_versions = [version for version in (candidate, current) if ranking.count_passes(version) < most]
    worths = [posterior.find_worth(version, candidate, current, noise) for version in open_versions]
    if not worths or max(worths) <= worth * n:
        return None
    return open_versions[worths.index(max(worths))]


def choose_version(posterior: Posterior, contenders: Sequence[str]) -> str:
    """Return the contender with the highest expected mean; the earlier one of equals."""
    means = [posterior.find_belief(version).mean for version in contenders]
    return contenders[means.index(max(means))]


def build_pass(
    skill_hash: str,
    trial: int,
    scores: Mapping[str, float | None],
    earlier: Sequence[Mapping[str, float | None]],
    others: Sequence[Mapping[str, float | None]],
    ranking: Ranking,
) -> PassResult:
    """Return a pass as an observation; ``scores`` are by item, None if unmeasured; one must be measured.

    ``earlier`` are the same version's passes before. ``others`` are passes of another version: if items stayed
    unmeasured, the mean is adjusted by the others' means on the missing items.
    """
    measured = {item: score for item, score in scores.items() if score is not None}
    mean = math.fsum(measured.values()) / len(measured)
    means = _mean_by_item(others or earlier)
    shared = [item for item in measured if item in means]
    missing = [item for item in scores if item not in measured and item in means]
    if shared and missing:
        usual = math.fsum(means[item] for item in shared) / len(shared)
        mean += math.fsum(means[item] - usual for item in missing) / (len(measured) + len(missing))
    squares, repeats = 0.0, 0
    for item, score in measured.items():
        before = [known for each in earlier if (known := each.get(item)) is not None]
        if before:
            repeats += 1
            gap = score - math.fsum(before) / len(before)
            squares += gap * gap * len(before) / (len(before) + 1)
    known = ranking.model_copy(
        update={"squares": ranking.squares + squares, "repeats": ranking.repeats + repeats}
    )
    return PassResult(
        skill_hash=skill_hash,
        trial=trial,
        mean=min(1.0, max(0.0, mean)),
        n=len(measured),
        variance=known.variance,
        squares=squares,
        repeats=repeats,
    )


def _mean_by_item(passes: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for each in passes:
        for item, score in each.items():
            if score is not None:
                scores.setdefault(item, []).append(score)
    return {item: math.fsum(values) / len(values) for item, values in scores.items()}
