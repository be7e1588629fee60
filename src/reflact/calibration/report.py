"""The report of a calibration, and the words for its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from reflact.calibration.asked import DroppedCandidate
from reflact.calibration.metrics import CriticMetrics
from reflact.calibration.usage import PurposeUsage
from reflact.memory.cards import TOTAL_ALPHA, compute_alpha
from reflact.memory.models import ContrastPair, PromotionEvidence
from reflact.records import IntervalEstimate, Usage
from reflact.types import FrozenModel, ShortReprModel


class PairCount(FrozenModel):
    """The number of kept pairs of one mistake."""

    mistake: str
    n_pairs: int


class DropCount(FrozenModel):
    """The number of mistakes that were asked for and became no pair, for one reason."""

    reason: str
    n_candidates: int


class MetricsChange(FrozenModel):
    """A critic measured before and after on the same steps; None if there were none.

    ``gain`` is by how much the error fell: the mean over traces. ``n_unscored`` steps are in
    neither measure, since they had no valid score before or after.
    """

    before: CriticMetrics | None
    after: CriticMetrics | None
    gain: IntervalEstimate | None
    n_unscored: int = 0


class CalibrationCostEstimate(FrozenModel):
    """What a calibration takes; the counts of calls include those that an earlier start has paid
    for.

    Args:
        n_training_traces: Traces to learn from.
        min_calls: One score for each held-out step and anchor.
        max_calls: A bound: every round takes place, and every reply is sent back as often as
            allowed.
        power_summary: What the held-out traces can show, in words.
        missing_reason: Why nothing could be tested, and what to do; None if something can.
        n_earlier_tests: Batches that were tested on these held-out traces before the calibration
            began.
        resumed: Whether an earlier start was stopped.
        is_finished: Whether nothing has changed since it ended, so that these counts are for
            another one.
    """

    n_training_traces: int
    n_held_out_traces: int
    n_held_out_steps: int
    n_anchor_steps: int
    min_calls: int
    max_calls: int
    power_summary: str
    missing_reason: str | None = None
    n_earlier_tests: int = 0
    resumed: bool = False
    is_finished: bool = False


class CalibrationReport(ShortReprModel):
    """The result of ``Calibrator.calibrate``.

    Args:
        critic: The identity of the critic, as canonical JSON.
        prompt: Its prompt's name and version, such as ``critic@1``.
        n_rounds: Rounds of contrast pairs.
        n_training_traces: Traces that pairs were made from.
        held_out_name: The name of the held-out traces: a fold, or given by the caller.
        n_candidates: Kept pairs and dropped candidates together.
        pairs: Kept pairs by kind of mistake, sorted.
        dropped: Dropped candidates by reason, sorted.
        n_quarantined: Kept pairs that the scan quarantined or rejected; they are in no test.
        n_left_out: Pairs that were not made, since the memory was full.
        tests: The evidence of all tested batches, in order.
        not_tested_reason: Why a batch was not tested; None if all were.
        end_reason: Why there was no further round although the curriculum had one; None if it had
            none.
        held_out: The change on held-out traces, which decided the promotions.
        anchors: The change on anchors, which decided nothing.
        metrics_by_round: The critic on the held-out traces before the first round and after each
            tested one.
        power_summary: What the held-out traces can show, in words.
        usage: The usage of all calls, invalid and stored replies included.
        usage_by_purpose: The same by role and purpose.
        is_earlier_result: Whether an earlier call made this report, since nothing had changed.
    """

    critic: str
    prompt: str
    n_rounds: int
    n_training_traces: int
    held_out_name: str
    n_candidates: int
    pairs: tuple[PairCount, ...]
    dropped: tuple[DropCount, ...]
    n_quarantined: int
    n_left_out: int = 0
    tests: tuple[PromotionEvidence, ...]
    not_tested_reason: str | None
    end_reason: str | None = None
    held_out: MetricsChange
    anchors: MetricsChange
    metrics_by_round: tuple[CriticMetrics, ...] = ()
    power_summary: str
    usage: Usage
    usage_by_purpose: tuple[PurposeUsage, ...] = ()
    is_earlier_result: bool = False

    def __repr__(self) -> str:
        before = self.held_out.before
        after = self.held_out.after
        error = ""
        if before is not None and after is not None:
            error = f", error={before.error.value:.3g} -> {after.error.value:.3g}"
        return (
            f"CalibrationReport(rounds={self.n_rounds}, candidates={self.n_candidates}, "
            f"pairs={self.n_pairs}, tests={len(self.tests)}, promoted={self.n_promoted}{error}, "
            f"calls={self.usage.calls})"
        )

    @property
    def n_pairs(self) -> int:
        """Pairs that were kept."""
        return sum(kind.n_pairs for kind in self.pairs)

    @property
    def n_promoted(self) -> int:
        """Pairs that were promoted."""
        return sum(len(test.pair_ids) for test in self.tests if test.passed_test)

    @property
    def n_tests(self) -> int | None:
        """Batches that were tested on these held-out traces, earlier ones included; None: none was
        now.
        """
        return self.tests[-1].n_earlier_tests + 1 if self.tests else None


def count_pairs(pairs: Sequence[ContrastPair]) -> tuple[PairCount, ...]:
    """Return pairs counted by kind of mistake."""
    counts = sorted(Counter(pair.mistake for pair in pairs).items())
    return tuple(PairCount(mistake=mistake, n_pairs=count) for mistake, count in counts)


def count_drops(drops: Iterable[DroppedCandidate]) -> tuple[DropCount, ...]:
    """Return drops counted by reason."""
    counts = sorted(Counter(drop.reason for drop in drops).items())
    return tuple(DropCount(reason=reason, n_candidates=count) for reason, count in counts)


# How a test ended, in words.
OUTCOME_TEXTS: Final = {
    "better": "promoted",
    "not_shown": "not promoted: no gain was shown",
    "accuracy_fell": "not promoted: pairwise accuracy fell",
    "worse": "taken back: it does harm",
    "no_harm_shown": "kept: no harm was shown",
}


# The figures of ``CriticMetrics``: the name of each, its field, and what to know when reading it.
METRIC_DESCRIPTIONS: Final = (
    ("mean absolute error", "error", "in points; lower is better"),
    ("bias", "bias", "in points; above 0 inflates"),
    ("pairwise accuracy", "accuracy", "higher is better; 0.5 is guessing"),
    ("order consistency", "consistency", "higher is better"),
    ("Brier score", "brier", "lower is better"),
    ("calibration error", "calibration", "lower is better"),
)


def format_number(value: float, decimals: int = 2) -> str:
    """Return a number with so many decimals; nothing is minus zero."""
    return f"{value:z.{decimals}f}"


def format_interval(estimate: IntervalEstimate) -> str:
    """Return an interval in brackets."""
    return f"[{format_number(estimate.low)}, {format_number(estimate.high)}]"


def describe_gain(gain: IntervalEstimate) -> str:
    """Return how an error moved: ``fell by 1.20 points [0.80, 1.60]``."""
    if gain.value == gain.low == gain.high == 0:
        return "did not change"
    if gain.value >= 0:
        return f"fell by {format_number(gain.value)} points {format_interval(gain)}"
    return (
        f"rose by {format_number(-gain.value)} points [{format_number(-gain.high)}, "
        f"{format_number(-gain.low)}]"
    )


def get_effect(test: PromotionEvidence) -> IntervalEstimate:
    """Return by how much a batch lowered the error, with its interval."""
    return IntervalEstimate(value=test.effect, low=test.low, high=test.high)


def describe_outcome(test: PromotionEvidence) -> str:
    """Return how a test ended, in words; an outcome that nobody knows as it is."""
    return OUTCOME_TEXTS.get(
        test.outcome, test.outcome or ("promoted" if test.passed_test else "not promoted")
    )


def describe_tests_left(tests: int) -> str:
    """Return in a sentence what so many tests on the same held-out traces leave for the
    next one.
    """
    made = "1 batch was" if tests == 1 else f"{tests} batches were"
    return (
        f"{made} tested on these held-out traces: another one passes at p of at most "
        f"{compute_alpha(tests):.2g}, since all of them share an error probability of "
        f"{TOTAL_ALPHA:.1%}"
    )
