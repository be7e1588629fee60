"""What a calibration's results are called, wherever they are shown. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from reflact.memory import PromotionEvidence
from reflact.memory_cards import TOTAL_ALPHA, compute_alpha
from reflact.results import IntervalEstimate

OUTCOME_TEXTS: Final = {
    "better": "promoted",
    "not_shown": "not promoted: no gain was shown",
    "accuracy_fell": "not promoted: pairwise accuracy fell",
    "worse": "taken back: it does harm",
    "no_harm_shown": "kept: no harm was shown",
}
"""How a test ended, in words."""


class MetricDescription(NamedTuple):
    """A figure of ``Measures``: its name, the field, and what to know when reading it."""

    label: str
    field_name: str
    note: str


METRIC_DESCRIPTIONS: Final = (
    MetricDescription("mean absolute error", "error", "in points; lower is better"),
    MetricDescription("bias", "bias", "in points; above 0 inflates"),
    MetricDescription("pairwise accuracy", "accuracy", "higher is better; 0.5 is guessing"),
    MetricDescription("order consistency", "consistency", "higher is better"),
    MetricDescription("Brier score", "brier", "lower is better"),
    MetricDescription("calibration error", "calibration", "lower is better"),
)


def format_number(value: float, decimals: int = 2) -> str:
    """Return a number with so many decimals; nothing is minus zero."""
    return f"{value:z.{decimals}f}"


def capitalize_first(text: str) -> str:
    """Return words as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def format_interval(estimate: IntervalEstimate) -> str:
    """Return an interval in brackets."""
    return f"[{format_number(estimate.low)}, {format_number(estimate.high)}]"


def describe_gain(gain: IntervalEstimate) -> str:
    """Return how an error moved: ``fell by 1.20 points [0.80, 1.60]``."""
    if gain.value == gain.low == gain.high == 0:
        return "did not change"
    if gain.value >= 0:
        return f"fell by {format_number(gain.value)} points {format_interval(gain)}"
    risen = IntervalEstimate(value=-gain.value, low=-gain.high, high=-gain.low)
    return f"rose by {format_number(risen.value)} points {format_interval(risen)}"


def describe_outcome(test: PromotionEvidence) -> str:
    """Return how a test ended, in words; an outcome that nobody knows as it is."""
    return OUTCOME_TEXTS.get(test.outcome, test.outcome or ("promoted" if test.passed_test else "not promoted"))


def describe_tests_left(tests: int) -> str:
    """Return in a sentence what so many tests on the same held-out traces leave for the next one."""
    made = "1 batch was" if tests == 1 else f"{tests} batches were"
    return (
        f"{made} tested on these held-out traces: another one passes at p of at most {compute_alpha(tests):.2g}, "
        f"since all of them share an error probability of {TOTAL_ALPHA:.1%}"
    )
