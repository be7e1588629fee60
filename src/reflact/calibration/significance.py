"""The replay test: whether a batch of contrast pairs makes the critic better.

The effect of a trace is by how much the batch lowers its mean error, since steps of a trace are
alike. The signs of all effects are flipped in all ways (an exact test). The only assumption is
symmetry: if a batch is useless, an effect is as likely to be any amount above 0 as that amount
below it.

The k-th test on the same held-out traces is given ``TOTAL_ALPHA * 6 / (pi * k) ** 2``; these sum to
``TOTAL_ALPHA`` over any number of tests. That holds although later batches follow earlier outcomes,
if only the decisions come back from the held-out traces. Accuracy on them may end a calibration,
never shape a batch.

A step without a valid score counts as the largest error that is possible there, on either side
alike, so it changes its sign with the sides as any other step does. To leave it out would hide a
batch that silences the critic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

from reflact.calibration.metrics import ScoredStep, estimate_effect, pairwise_accuracy
from reflact.memory.cards import MAX_ACCURACY_FALL, MIN_TRACES, TOTAL_ALPHA, compute_alpha
from reflact.memory.models import Label
from reflact.records import IntervalEstimate

# The share of held-out steps that must have a valid score without the batch, before a promotion.
MIN_COVERAGE = 0.9

# The share of helpful batches that the planning of tests asks for.
TEST_POWER = 0.95

# The least fall of the held-out error, in points, that counts as a gain.
MIN_ERROR_DROP = 0.1

# The test is exact on a grid: all effects together make about so many steps.
MAX_SIGN_FLIPS = 10_000

ReplayTestUse = Literal["promote", "demote"]

# How a test ended; to promote: the first three, to demote: the last two.
ReplayTestOutcome = Literal["better", "not_shown", "accuracy_fell", "worse", "no_harm_shown"]


class NotTested(NamedTuple):
    """Why no batch was tested and what to do, in a sentence; and the labelled held-out traces."""

    explanation: str
    n_traces: int = 0


class ReplayTestResult(NamedTuple):
    """The result of a replay test; see ``PromotionEvidence``."""

    outcome: ReplayTestOutcome
    n_traces: int
    n_transitions: int
    n_unscored: int
    effect: IntervalEstimate
    p_value: float
    alpha: float
    accuracy_change: float | None

    @property
    def has_passed(self) -> bool:
        """Whether the batch is promoted, or may stay."""
        return self.outcome in {"better", "no_harm_shown"}


class StepScores(NamedTuple):
    """A held-out step, scored without the batch and with it; None is no valid score."""

    trace_id: str
    label: Label
    without: ScoredStep | None
    with_batch: ScoredStep | None

    @property
    def effect(self) -> float:
        """By how much the batch lowers the error."""
        return compute_error(self.label, self.without) - compute_error(self.label, self.with_batch)


def find_missing_traces(
    traces: Collection[object], *, n_earlier_tests: int = 0
) -> NotTested | None:
    """Return what is missing if traces are too few to test on; else None."""
    n_traces = len(traces)
    if n_traces < MIN_TRACES:
        return NotTested(_explain_too_few(n_traces), n_traces)
    # The least p-value of so many traces is 1 / 2 ** n.
    if compute_alpha(n_earlier_tests) < 0.5**n_traces:
        explanation = (
            f"the error probability of the {n_traces} held-out traces is used up by "
            f"{n_earlier_tests} tests: record at least {MIN_TRACES} fresh traces with labels"
        )
        return NotTested(explanation, n_traces)
    return None


def _explain_too_few(n_traces: int) -> str:
    return (
        f"{n_traces} held-out traces have labelled steps, and a test needs {MIN_TRACES}: label or "
        "record more traces, or hold out a larger part of them"
    )


def compute_error(label: Label, score: ScoredStep | None) -> float:
    """Return the error of a score; without a valid one, the largest that is possible."""
    if score is None:
        return max(label.progress_after, 10 - label.progress_after)
    return abs(score.error)


def select_scored(scores: Iterable[StepScores]) -> tuple[list[ScoredStep], list[ScoredStep]]:
    """Return the scores without and with the batch of the steps that have both."""
    without: list[ScoredStep] = []
    with_batch: list[ScoredStep] = []
    for step in scores:
        if step.without is not None and step.with_batch is not None:
            without.append(step.without)
            with_batch.append(step.with_batch)
    return without, with_batch


def compute_trace_effects(scores: Iterable[StepScores]) -> tuple[float, ...]:
    """Return by how much the batch lowers each trace's mean error, in the order of their ids."""
    return _average_by_trace((step.trace_id, step.effect) for step in scores)


def decide_replay_test(
    scores: Sequence[StepScores], *, n_earlier_tests: int, use: ReplayTestUse = "promote"
) -> ReplayTestResult | NotTested:
    """Decide on a batch: to promote it, the error must have fallen; to demote it, risen.

    ``n_earlier_tests`` counts the tests on these traces.
    """
    effects = compute_trace_effects(scores)
    if len(effects) < MIN_TRACES:
        return NotTested(_explain_too_few(len(effects)), len(effects))
    alpha = compute_alpha(n_earlier_tests)
    sign = 1 if use == "promote" else -1
    p_value = sign_flip_p_value([sign * effect for effect in effects])
    without, with_batch = select_scored(scores)
    change, has_fallen = _compare_accuracy(without, with_batch)
    outcome: ReplayTestOutcome = "better"
    if use == "demote":
        outcome = "worse" if p_value <= alpha else "no_harm_shown"
    elif p_value > alpha:
        outcome = "not_shown"
    elif has_fallen:
        outcome = "accuracy_fell"
    return ReplayTestResult(
        outcome=outcome,
        n_traces=len(effects),
        n_transitions=len(scores),
        n_unscored=len(scores) - len(without),
        effect=estimate_effect(effects),
        p_value=p_value,
        alpha=alpha,
        accuracy_change=change,
    )


def _compare_accuracy(
    without: Sequence[ScoredStep], with_batch: Sequence[ScoredStep]
) -> tuple[float | None, bool]:
    """Return the change of pairwise accuracy, None if nothing can be ordered, and whether it fell.

    The change is the lower of two: the mean over traces, and that over all comparisons. It fell if
    that is more than ``MAX_ACCURACY_FALL``, or if the mean fell significantly.
    """
    sides: dict[str, tuple[list[ScoredStep], list[ScoredStep]]] = {}
    for old, new in zip(without, with_batch, strict=True):
        old_steps, new_steps = sides.setdefault(old.trace_id, ([], []))
        old_steps.append(old)
        new_steps.append(new)
    changes = []
    for old_steps, new_steps in ((list(without), list(with_batch)), *sides.values()):
        old_share = pairwise_accuracy(old_steps)
        new_share = pairwise_accuracy(new_steps)
        if old_share is not None and new_share is not None:
            changes.append(new_share - old_share)
    if len(changes) < 2:  # the first one is over all traces
        return None, False
    overall, *by_trace = changes
    mean = fmean(by_trace)
    change = min(mean, overall)
    is_significant = mean < 0 and sign_flip_p_value([-one for one in by_trace]) <= TOTAL_ALPHA
    return change, change < -MAX_ACCURACY_FALL or is_significant


def explain_nothing_to_learn(
    errors: Iterable[tuple[str, float]], *, n_earlier_tests: int
) -> str | None:
    """Return why no batch can lower these errors, by trace, enough to count; None if one can.

    The best possible batch removes all error. If not even that is a gain of ``MIN_ERROR_DROP``, or
    reaches the level of the next test, then no batch does, so to end costs no power. None if there
    are too few traces for a test.
    """
    ceilings = _average_by_trace(errors)
    if len(ceilings) < MIN_TRACES:
        return None
    error = fmean(ceilings)
    if error >= MIN_ERROR_DROP and sign_flip_p_value(ceilings) <= compute_alpha(n_earlier_tests):
        return None
    return (
        f"there is nothing to learn: averaged within each trace, the error is {error:.2f} points, "
        "too little for a gain that a test could show"
    )


def _average_by_trace(changes: Iterable[tuple[str, float]]) -> tuple[float, ...]:
    """Return the mean of each trace's values, in the order of trace ids."""
    values: dict[str, list[float]] = defaultdict(list)
    for trace_id, change in changes:
        values[trace_id].append(change)
    return tuple(fmean(values[trace_id]) for trace_id in sorted(values))


def sign_flip_p_value(effects: Sequence[float]) -> float:
    """Return the one-sided p-value of effects that are symmetric about 0 if nothing has changed.

    It is the share of the 2 ** n choices of signs whose sum is at least the observed one, of
    effects rounded to a grid. One long integer holds the counts of all sums; each effect adds a
    shifted copy of it. Source: B. Streitberg and J. Roehmel, Biometrical Journal 29 (1987), 1-7.
    """
    unit = math.fsum(map(abs, effects)) / MAX_SIGN_FLIPS
    if unit == 0:
        return 1.0
    sizes = [round(abs(effect) / unit) for effect in effects]
    observed = sum(size for size, effect in zip(sizes, effects, strict=True) if effect > 0)
    width = len(effects) + 1
    counts = 1
    for size in sizes:
        counts += counts << (size * width)
    # A number is its digits' sum modulo its base less 1; the digits are the counts of sums.
    extreme = (counts >> (observed * width)) % ((1 << width) - 1)
    return float(extreme / (1 << len(effects)))


def count_needed_traces(effect_ratio: float, *, n_earlier_tests: int = 0) -> int:
    """Return how many held-out traces show an effect with 95% power, by the normal approximation.

    ``effect_ratio`` is the effect over its standard deviation between traces, above 0.
    """
    return max(MIN_TRACES, math.ceil((_sum_quantiles(n_earlier_tests) / effect_ratio) ** 2))


def describe_test_power(n_traces: int, *, n_earlier_tests: int = 0) -> str:
    """Return in a sentence what so many held-out traces can show."""
    if n_traces < MIN_TRACES:
        return _explain_too_few(n_traces)
    ratio = _sum_quantiles(n_earlier_tests) / math.sqrt(n_traces)
    return (
        f"{n_traces} held-out traces show with 95% power a batch that lowers the error by "
        f"{ratio:.2f} of its standard deviation between traces, as batch {n_earlier_tests + 1} on "
        "them; half of that effect takes "
        f"{count_needed_traces(ratio / 2, n_earlier_tests=n_earlier_tests)} traces"
    )


def _sum_quantiles(n_earlier_tests: int) -> float:
    quantile = NormalDist().inv_cdf
    return quantile(1 - compute_alpha(n_earlier_tests)) + quantile(TEST_POWER)
