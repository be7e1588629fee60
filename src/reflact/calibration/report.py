"""The report of a calibration, and the words for its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from reflact.calibration.asked import DroppedCandidate
from reflact.calibration.metrics import CriticMetrics
from reflact.memory.cards import TOTAL_ALPHA, compute_alpha
from reflact.memory.models import ContrastPair, PromotionEvidence
from reflact.records import IntervalEstimate, Usage
from reflact.text import name_count
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
        min_calls: One score for each held-out step and anchor.
        max_calls: A bound: every round takes place, and every reply is sent back as often as
            allowed.
        power_summary: What the held-out traces can show, in words.
        missing_reason: Why nothing could be tested, and what to do; None if something can.
        n_earlier_tests: Batches that were tested on these held-out traces before it began.
        resumed: Whether an earlier start was stopped.
        is_finished: Whether nothing has changed since it ended; the counts are for another one.
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
        n_candidates: Kept pairs and dropped candidates together.
        n_quarantined: Kept pairs that the scan quarantined or rejected; they are in no test.
        not_tested_reason: Why a batch was not tested; None if all were.
        end_reason: Why no further round followed although one was allowed.
        held_out: The change on held-out traces, which decided the promotions.
        anchors: The change on anchors, which decided nothing.
        metrics_by_round: The critic on the held-out traces before the first round and after each.
        power_summary: What the held-out traces can show, in words.
        usage: The usage of all calls, invalid and stored replies included.
        n_questions: Questions; a reply that is sent back belongs to its question.
        is_earlier_result: Whether an earlier call made this report, since nothing had changed.
    """

    critic: str
    prompt: str
    n_rounds: int
    n_training_traces: int
    n_candidates: int
    pairs: tuple[PairCount, ...]
    dropped: tuple[DropCount, ...]
    n_quarantined: int
    tests: tuple[PromotionEvidence, ...]
    not_tested_reason: str | None
    end_reason: str | None = None
    held_out: MetricsChange
    anchors: MetricsChange
    metrics_by_round: tuple[CriticMetrics, ...] = ()
    power_summary: str
    usage: Usage
    n_questions: int = 0
    n_unanswered: int = 0
    n_invalid: int = 0
    is_earlier_result: bool = False

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
        """Batches that were tested on these held-out traces so far; None: none was now."""
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


class MetricRow(NamedTuple):
    """A figure before and after, as it is shown; an empty text stands for none."""

    name: str
    note: str
    before: str
    after: str
    constant: str


class MetricTable(NamedTuple):
    """The figures of one set of steps before and after."""

    caption: str
    rows: tuple[MetricRow, ...]


def build_metric_table(name: str, before: CriticMetrics, after: CriticMetrics) -> MetricTable:
    """Return the figures of one set of steps, as terminal and page show them."""
    rows = []
    for label, field, note in METRIC_DESCRIPTIONS:
        constant = getattr(before.constant, field, None)
        row = MetricRow(
            label,
            note,
            format_estimate(getattr(before, field)),
            format_estimate(getattr(after, field)),
            "" if constant is None else format_number(constant),
        )
        rows.append(row)
    caption = (
        f"{name}: {name_count(before.n_traces, 'trace')}, "
        f"{name_count(before.n_transitions, 'step')}; mean absolute error "
        f"{format_number(before.error.value)} -> {format_number(after.error.value)}"
    )
    return MetricTable(caption, tuple(rows))


def list_pair_lines(report: CalibrationReport) -> tuple[str, ...]:
    """Return what was made of the traces, and what became of it, in lines."""
    dropped = report.n_candidates - report.n_pairs
    lines = [
        f"{name_count(report.n_training_traces, 'trace')}, "
        f"{name_count(report.n_candidates, 'candidate')}, rounds: {report.n_rounds}; "
        f"{name_count(report.n_pairs, 'pair')}, {dropped} dropped, {report.n_promoted} promoted"
    ]
    lines += [f"  {kind.mistake}: {name_count(kind.n_pairs, 'pair')}" for kind in report.pairs]
    lines += [f"  dropped, {drop.reason}: {drop.n_candidates}" for drop in report.dropped]
    if report.n_quarantined:
        lines.append(f"  quarantined or rejected by the scan: {report.n_quarantined}")
    return tuple(lines)


def list_test_lines(report: CalibrationReport) -> tuple[str, ...]:
    """Return how each batch was tested, and why no further one was, in sentences."""
    lines = [f"{describe_test(test)}." for test in report.tests]
    if report.not_tested_reason is not None:
        lines.append(f"Not tested: {report.not_tested_reason}.")
    if report.end_reason is not None:
        lines.append(f"No further round: {report.end_reason}.")
    return tuple(lines)


def list_change_lines(change: MetricsChange) -> tuple[str, ...]:
    """Return what changed between two measurements, in sentences."""
    lines = []
    if change.gain is not None:
        lines.append(f"Averaged within each trace, the error {describe_gain(change.gain)}.")
    if change.n_unscored:
        steps = name_count(change.n_unscored, "step")
        lines.append(f"Not included: {steps} without a valid score before or after.")
    if change.after is not None:
        lines.append(compare_with_constant(change.after))
    return tuple(lines)


def compare_with_constant(metrics: CriticMetrics) -> str:
    """Return whether a critic is better than the best constant answer, in a sentence."""
    constant = metrics.constant
    verdict = "is not shown to be better than a constant"
    if metrics.error.high < constant.error:
        verdict = "is better than a constant"
    elif metrics.error.low > constant.error:
        verdict = "is worse than a constant"
    return (
        f"This critic {verdict}: it is off by {format_number(metrics.error.value)} points, and "
        f"always answering {format_number(constant.progress)} by {format_number(constant.error)}."
    )


def list_power_lines(report: CalibrationReport) -> tuple[str, ...]:
    """Return what the held-out traces can show, and what is left of them, in sentences."""
    lines = [f"{report.power_summary}."]
    if report.n_tests is not None:
        lines.append(f"{describe_tests_left(report.n_tests)}.")
    return tuple(lines)


def describe_test(test: PromotionEvidence) -> str:
    """Return how a test of a batch came out, in a sentence without its full stop."""
    effect = IntervalEstimate(value=test.effect, low=test.low, high=test.high)
    fallback = "promoted" if test.passed_test else "not promoted"
    return (
        f"Batch {test.n_earlier_tests + 1} on these traces, "
        f"{name_count(len(test.pair_ids), 'pair')}: the error {describe_gain(effect)} "
        f"over {name_count(test.n_traces, 'trace')}, p = {test.p_value:.2g} of {test.alpha:.2g}: "
        f"{OUTCOME_TEXTS.get(test.outcome, test.outcome or fallback)}"
    )


def describe_consumption(report: CalibrationReport) -> str:
    """Return what the calibration asked and used, in a sentence."""
    return (
        f"{name_count(report.n_questions, 'question')} took {describe_usage(report.usage)}, "
        f"including stored replies; {name_count(report.n_invalid, 'reply was', 'replies were')} "
        f"invalid, {name_count(report.n_unanswered, 'question')} got no valid reply."
    )


def describe_usage(usage: Usage) -> str:
    """Return calls, tokens and price."""
    return (
        f"{name_count(usage.calls, 'call')}, {usage.input_tokens:,} tokens in, "
        f"{usage.output_tokens:,} out{format_price(usage)}"
    )


def describe_gain(gain: IntervalEstimate) -> str:
    """Return how an error moved: ``fell by 1.20 points [0.80, 1.60]``."""
    if gain.value == gain.low == gain.high == 0:
        return "did not change"
    if gain.value >= 0:
        return f"fell by {format_number(gain.value)} points {format_interval(gain)}"
    rise = IntervalEstimate(value=-gain.value, low=-gain.high, high=-gain.low)
    return f"rose by {format_number(rise.value)} points {format_interval(rise)}"


def describe_tests_left(tests: int) -> str:
    """Return what so many tests on the same held-out traces leave for the next one."""
    return (
        f"{name_count(tests, 'batch was', 'batches were')} tested on these held-out traces: "
        f"another one passes at p of at most {compute_alpha(tests):.2g}, since all of them share "
        f"an error probability of {TOTAL_ALPHA:.1%}"
    )


def format_number(value: float, decimals: int = 2) -> str:
    """Return a number with so many decimals; nothing is minus zero."""
    return f"{value:z.{decimals}f}"


def format_interval(estimate: IntervalEstimate) -> str:
    """Return an interval in brackets."""
    return f"[{format_number(estimate.low)}, {format_number(estimate.high)}]"


def format_estimate(estimate: IntervalEstimate | None) -> str:
    """Return a figure with its interval; nothing for none."""
    if estimate is None:
        return ""
    return f"{format_number(estimate.value)} {format_interval(estimate)}"


def format_price(usage: Usage) -> str:
    """Return the price after a comma; nothing if it is not known."""
    return "" if usage.usd is None else f", ${usage.usd:.4f}"
