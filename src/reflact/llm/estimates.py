"""Estimates of calls, tokens and money, each as a low, an expected and a high value."""

from __future__ import annotations

import math
from collections.abc import Callable

from reflact.records import Usage
from reflact.types import FrozenModel

BYTES_PER_TOKEN = 3.5
"""Typical for English text and code in current tokenizers; the worst case is one byte per token."""

MESSAGE_TOKENS = 16
"""Typical tokens that a request adds to its texts."""

UNCAPPED_REPLY_TOKENS = 1000
"""Assumed most tokens of a reply without a cap."""


class EstimateRange(FrozenModel):
    """An unknown number."""

    low: float = 0.0
    expected: float = 0.0
    high: float = 0.0

    def __add__(self, other: EstimateRange) -> EstimateRange:
        return EstimateRange(
            low=self.low + other.low, expected=self.expected + other.expected, high=self.high + other.high
        )

    def __mul__(self, other: EstimateRange) -> EstimateRange:
        return EstimateRange(
            low=self.low * other.low, expected=self.expected * other.expected, high=self.high * other.high
        )


def exact_range(value: float) -> EstimateRange:
    """Return the range of a known number."""
    return EstimateRange(low=value, expected=value, high=value)


class EstimateRow(FrozenModel):
    """Calls of one role for one purpose; ``usd`` is None if no price is known."""

    role: str
    purpose: str
    calls: EstimateRange
    input_tokens: EstimateRange
    output_tokens: EstimateRange
    usd: EstimateRange | None = None

    def with_price(self, price: Callable[[Usage], float | None]) -> EstimateRow:
        """Return the row with money; ``price`` gives the dollars of one call of mean length."""
        bounds = {bound: self._usd(bound, price) for bound in ("low", "expected", "high")}
        if None in bounds.values():
            return self
        return self.model_copy(update={"usd": EstimateRange.model_validate(bounds)})

    def _usd(self, bound: str, price: Callable[[Usage], float | None]) -> float | None:
        calls, given, written = (
            getattr(amount, bound) for amount in (self.calls, self.input_tokens, self.output_tokens)
        )
        if not calls:
            return 0.0
        mean = Usage(calls=1, input_tokens=math.ceil(given / calls), output_tokens=math.ceil(written / calls))
        usd = price(mean)
        return None if usd is None else usd * calls


class CostEstimate(FrozenModel):
    """Rows of calls, and the assumptions behind them."""

    rows: tuple[EstimateRow, ...]
    assumptions: tuple[str, ...]

    @property
    def calls(self) -> EstimateRange:
        """All calls."""
        return sum((row.calls for row in self.rows), EstimateRange())

    def tokens(self, role: str | None = None) -> EstimateRange:
        """All tokens, of one role or of all."""
        rows = [row for row in self.rows if role is None or row.role == role]
        return sum((row.input_tokens + row.output_tokens for row in rows), EstimateRange())

    @property
    def usd(self) -> EstimateRange | None:
        """All money in dollars; None if a row with possible calls has no price."""
        if any(row.usd is None and row.calls.high for row in self.rows):
            return None
        return sum((row.usd for row in self.rows if row.usd is not None), EstimateRange())


class CallTokens(FrozenModel):
    """Input and output tokens of one call."""

    input_tokens: EstimateRange
    output_tokens: EstimateRange

    @classmethod
    def estimate(cls, size: float, *, cap: int | None, usage: Usage | None = None) -> CallTokens:
        """Return the tokens of a call.

        Args:
            size: Bytes of its texts.
            cap: The most tokens of its reply; None: no cap.
            usage: Usage of earlier calls of its kind; None if there were none.
        """
        most = cap or UNCAPPED_REPLY_TOKENS
        given, written = size / BYTES_PER_TOKEN + MESSAGE_TOKENS, most / 4
        if usage is not None:
            given, written = usage.input_tokens / usage.calls, usage.output_tokens / usage.calls
        return cls(
            input_tokens=EstimateRange(
                low=0, expected=given, high=max(given, 4 * size + 40 * MESSAGE_TOKENS)
            ),
            output_tokens=EstimateRange(low=0, expected=written, high=max(written, most)),
        )
