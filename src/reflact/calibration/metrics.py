"""How good a critic's scores are: plain numbers with intervals that know that steps of a trace are
alike.

An interval is the 95% percentile interval over ``N_RESAMPLES`` resamples of whole traces.
Everything is deterministic. Source: B. Efron and R. Tibshirani, An Introduction to the Bootstrap
(1993), 13.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple, TypeVar

from pydantic import Field

from reflact.data import make_rng
from reflact.memory.models import Evaluation, Label, Progress, Share
from reflact.records import IntervalEstimate
from reflact.types import FrozenModel

T = TypeVar("T")

N_RESAMPLES = 1000

# Bins of equal width that confidences are sorted into; the last one holds 1 as well.
N_BINS = 10

# A score is right if it is at most so far from the correct one: what confidences are about.
RIGHT_TOLERANCE = 1.0

# States count as ordered where their correct values differ at least so much.
MIN_LABEL_DIFFERENCE = 0.5


class ScoredStep(FrozenModel):
    """A critic's evaluation of one step beside the correct one.

    Args:
        evaluation: What the critic said, after its guards.
        wrong_progress: Progress after of the wrong evaluations in contrast pairs of this
            transition.
        mistakes: The kinds of mistakes that these show.
    """

    trace_id: str
    step: int = Field(ge=0)
    label: Label
    evaluation: Evaluation
    wrong_progress: tuple[Progress, ...] = ()
    mistakes: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Critic minus label, of the progress after the step."""
        return self.evaluation.progress_after - self.label.progress_after

    @property
    def is_right(self) -> bool:
        """Whether the score is within ``RIGHT_TOLERANCE`` of the correct one."""
        return abs(self.error) <= RIGHT_TOLERANCE


class ReliabilityBin(FrozenModel):
    """The steps whose confidence lies in ``low``..``high``, and how often they are right."""

    low: Share
    high: Share
    n_transitions: int = Field(ge=1)
    confidence: Share
    right_share: Share


class ConstantBaseline(FrozenModel):
    """What the best constant, the median correct progress, would reach: a critic below it knows
    nothing.

    ``brier`` is the score of a confidence that always is the critic's share of right scores.
    """

    progress: Progress
    error: float
    accuracy: float = 0.5
    brier: float


class CriticMetrics(FrozenModel):
    """A critic, measured.

    Args:
        error: Mean absolute error of progress, in 0..10.
        bias: Mean error, in -10..10; above 0 the critic inflates.
        accuracy: Pairwise accuracy: the share of comparisons that the critic gets right, a tie as
            half; None without any. Three kinds are counted together: the states before and after a
            step, and the states after any two steps of a trace, if their labels differ by at least
            ``MIN_LABEL_DIFFERENCE``; and the right and a wrong evaluation of a step, of which the
            right one should be nearer to the critic's.
        consistency: The critic sees the states A and B in one call (the step from A to B), and each
            in a call of its own (as the state after its step). This is the share of successive
            steps in which both ways give the same order; None without successive steps.
        brier: Mean squared difference of confidence and being right.
        calibration: Expected calibration error over ``N_BINS`` bins of confidence; above 0 by
            chance alone where steps are few.
        reliability: The filled bins of confidence, lowest first.
    """

    n_traces: int = Field(ge=1)
    n_transitions: int = Field(ge=1)
    error: IntervalEstimate
    bias: IntervalEstimate
    accuracy: IntervalEstimate | None
    consistency: IntervalEstimate | None
    brier: IntervalEstimate
    calibration: IntervalEstimate
    constant: ConstantBaseline
    reliability: tuple[ReliabilityBin, ...] = ()


def compute_metrics(scored: Sequence[ScoredStep]) -> CriticMetrics | None:
    """Return what a critic's scores are worth, None if there are none."""
    if not scored:
        return None
    by_trace = [_sum_steps(steps) for steps in _group_by_trace(scored).values()]
    total = _add_sums(by_trace)
    resampled = [_add_sums(sample) for sample in _resample(by_trace, "0/all")]

    def estimate(
        figure: Callable[[_TraceSums], float], low: float, high: float
    ) -> IntervalEstimate:
        return _build_interval(figure(total), map(figure, resampled), low, high)

    correct = [step.label.progress_after for step in scored]
    constant = median(correct)
    right_share = total.right / total.steps
    # A resample may lack what can be compared although the whole has it.
    accuracy = None
    if total.pairs:
        accuracy = estimate(lambda t: t.ordered / t.pairs if t.pairs else 0.5, 0, 1)
    consistency = None
    if total.successions:
        consistency = estimate(lambda t: t.consistent / t.successions if t.successions else 1, 0, 1)
    return CriticMetrics(
        n_traces=len(by_trace),
        n_transitions=len(scored),
        error=estimate(lambda t: t.error / t.steps, 0, 10),
        bias=estimate(lambda t: t.bias / t.steps, -10, 10),
        accuracy=accuracy,
        consistency=consistency,
        brier=estimate(lambda t: t.brier / t.steps, 0, 1),
        calibration=estimate(lambda t: math.fsum(map(abs, t.overconfidence)) / t.steps, 0, 1),
        constant=ConstantBaseline(
            progress=constant,
            error=math.fsum(abs(progress - constant) for progress in correct) / len(correct),
            brier=right_share * (1 - right_share),
        ),
        reliability=_build_bins(scored),
    )


def pairwise_accuracy(steps: Sequence[ScoredStep]) -> float | None:
    """Return the pairwise accuracy (see ``CriticMetrics``), None if nothing can be ordered."""
    pairs = 0
    right = 0.0
    for trace in _group_by_trace(steps).values():
        n_compared, n_right = _count_ordered(trace)
        pairs += n_compared
        right += n_right
    return right / pairs if pairs else None


def estimate_effect(effects: Sequence[float]) -> IntervalEstimate:
    """Return the mean of one change of error for each trace, with its interval."""
    means = [sum(sample) / len(sample) for sample in _resample(effects, "effect")]
    return _build_interval(math.fsum(effects) / len(effects), means, -10, 10)


def _resample(values: Sequence[T], stream_name: str) -> Iterator[list[T]]:
    """Yield resamples of as many values, none of a single one."""
    draw = make_rng(0, stream_name).random
    n = len(values)
    for _ in range(N_RESAMPLES if n > 1 else 0):
        yield [values[int(draw() * n)] for _ in range(n)]


def _build_interval(
    value: float, figures: Iterable[float], low: float, high: float
) -> IntervalEstimate:
    """Return a figure with the interval of its resamples; without any, its range."""
    ordered = sorted(figures)
    tail = round(0.025 * N_RESAMPLES) - 1
    if ordered:
        low = ordered[tail]
        high = ordered[-1 - tail]
    return IntervalEstimate(value=value, low=low, high=high)


class _TraceSums(NamedTuple):
    """Sums over the steps of a trace, or of several; every figure is a function of such sums."""

    steps: float
    error: float
    bias: float
    right: float
    brier: float
    pairs: float
    ordered: float
    successions: float
    consistent: float
    overconfidence: tuple[float, ...]


def _sum_steps(steps: Sequence[ScoredStep]) -> _TraceSums:
    pairs, ordered = _count_ordered(steps)
    consistent = list(_list_consistent(steps))
    overconfidence = [0.0] * N_BINS
    for step in steps:
        confidence = step.evaluation.confidence
        overconfidence[_find_bin(confidence)] += confidence - step.is_right
    return _TraceSums(
        steps=len(steps),
        error=math.fsum(abs(step.error) for step in steps),
        bias=math.fsum(step.error for step in steps),
        right=sum(step.is_right for step in steps),
        brier=math.fsum((step.evaluation.confidence - step.is_right) ** 2 for step in steps),
        pairs=pairs,
        ordered=ordered,
        successions=len(consistent),
        consistent=sum(consistent),
        overconfidence=tuple(overconfidence),
    )


def _add_sums(sums: Iterable[_TraceSums]) -> _TraceSums:
    *plain, bins = zip(*sums, strict=True)
    return _TraceSums._make([*map(sum, plain), tuple(map(sum, zip(*bins, strict=True)))])


def _count_ordered(steps: Sequence[ScoredStep]) -> tuple[int, float]:
    """Return the number of comparisons in the steps of one trace, and of right ones; see
    ``CriticMetrics.accuracy``.
    """
    shares = []
    for step in steps:
        delta = step.label.delta
        if delta is not None and abs(delta) >= MIN_LABEL_DIFFERENCE:
            shares.append(_compare_signs(step.evaluation.delta, delta))
    for step in steps:
        for wrong in step.wrong_progress:
            nearer = abs(step.evaluation.progress_after - wrong) - abs(step.error)
            shares.append(_compare_signs(nearer, 1))
    across = []
    for one, other in combinations(steps, 2):
        difference = one.label.progress_after - other.label.progress_after
        if abs(difference) >= MIN_LABEL_DIFFERENCE:
            said = one.evaluation.progress_after - other.evaluation.progress_after
            across.append(_compare_signs(said, difference))
    return len(shares) + len(across), sum(shares) + sum(across)


def _list_consistent(steps: Sequence[ScoredStep]) -> Iterator[bool]:
    often = Counter(step.step for step in steps)
    # A perturbed pair repeats the number of its step, and no state follows from it.
    single = [step for step in steps if often[step.step] == 1]
    single.sort(key=lambda step: step.step)
    for earlier, later in pairwise(single):
        if later.step == earlier.step + 1:
            apart = later.evaluation.progress_after - earlier.evaluation.progress_after
            yield _sign(later.evaluation.delta) == _sign(apart)


def _compare_signs(value: float, expected: float) -> float:
    """Return 1 for equal signs, 0 for opposite ones, and a half if a value is 0."""
    return (1 + _sign(value) * _sign(expected)) / 2


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _build_bins(scored: Sequence[ScoredStep]) -> tuple[ReliabilityBin, ...]:
    members: dict[int, list[ScoredStep]] = defaultdict(list)
    for step in scored:
        members[_find_bin(step.evaluation.confidence)].append(step)
    bins = []
    for number, steps in sorted(members.items()):
        confidence = math.fsum(step.evaluation.confidence for step in steps) / len(steps)
        one = ReliabilityBin(
            low=number / N_BINS,
            high=(number + 1) / N_BINS,
            n_transitions=len(steps),
            confidence=min(1.0, confidence),
            right_share=sum(step.is_right for step in steps) / len(steps),
        )
        bins.append(one)
    return tuple(bins)


def _find_bin(confidence: float) -> int:
    return min(int(confidence * N_BINS), N_BINS - 1)


def _group_by_trace(scored: Iterable[ScoredStep]) -> dict[str, list[ScoredStep]]:
    traces: dict[str, list[ScoredStep]] = defaultdict(list)
    for step in scored:
        traces[step.trace_id].append(step)
    return traces
