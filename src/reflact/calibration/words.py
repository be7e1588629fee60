"""What a calibration's results are called, wherever they are shown. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from reflact.memory import Promotion
from reflact.memory_cards import LEVEL, level
from reflact.results import IntervalEstimate

OUTCOMES: Final = {
    "better": "promoted",
    "not_shown": "not promoted: no gain was shown",
    "accuracy_fell": "not promoted: pairwise accuracy fell",
    "worse": "taken back: it does harm",
    "no_harm_shown": "kept: no harm was shown",
}
"""How a test ended, in words."""


class Figure(NamedTuple):
    """A figure of ``Measures``: its name, the field, and what to know when reading it."""

    name: str
    field: str
    note: str


FIGURES: Final = (
    Figure("mean absolute error", "error", "in points; lower is better"),
    Figure("bias", "bias", "in points; above 0 inflates"),
    Figure("pairwise accuracy", "accuracy", "higher is better; 0.5 is guessing"),
    Figure("order consistency", "consistency", "higher is better"),
    Figure("Brier score", "brier", "lower is better"),
    Figure("calibration error", "calibration", "lower is better"),
)


def number(value: float, digits: int = 2) -> str:
    """Return a number with so many decimals; nothing is minus zero."""
    return f"{value:z.{digits}f}"


def first_up(words: str) -> str:
    """Return words as the beginning of a sentence."""
    return words[:1].upper() + words[1:]


def span(estimate: IntervalEstimate) -> str:
    """Return an interval in brackets."""
    return f"[{number(estimate.low)}, {number(estimate.high)}]"


def moved(gain: IntervalEstimate) -> str:
    """Return how an error moved: ``fell by 1.20 points [0.80, 1.60]``."""
    if gain.value == gain.low == gain.high == 0:
        return "did not change"
    if gain.value >= 0:
        return f"fell by {number(gain.value)} points {span(gain)}"
    risen = IntervalEstimate(value=-gain.value, low=-gain.high, high=-gain.low)
    return f"rose by {number(risen.value)} points {span(risen)}"


def outcome_of(test: Promotion) -> str:
    """Return how a test ended, in words; an outcome that nobody knows as it is."""
    return OUTCOMES.get(test.outcome, test.outcome or ("promoted" if test.promoted else "not promoted"))


def spent(tests: int) -> str:
    """Return in a sentence what so many tests on the same held-out traces leave for the next one."""
    made = "1 batch was" if tests == 1 else f"{tests} batches were"
    return (
        f"{made} tested on these held-out traces: another one passes at p of at most {level(tests):.2g}, "
        f"since all of them share an error probability of {LEVEL:.1%}"
    )
