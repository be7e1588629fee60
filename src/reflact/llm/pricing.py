"""Usage and prices of calls, from the configuration or else from the provider's price list."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from pydantic import JsonValue

from reflact.config.models import ModelConfig, Price
from reflact.records import BILLION, Usage
from reflact.types import FrozenModel

MILLION = 10**6
# The names of a request's field for the most tokens of its answer; no provider takes both.
CAP_NAMES = ("max_tokens", "max_completion_tokens")
# A greater cap, which only an agent would send, is none: a ledger cannot store every number.
MAX_CAP = 2**40
# An upper bound on tokens that a provider adds to a request, such as its chat template.
OVERHEAD_TOKENS = 256


def usd_of(usage: Usage, config: ModelConfig, *, at: datetime | None = None) -> float | None:
    """Return the cost of one call in dollars; None if no price is known.

    Do not pass sums of calls. A price may depend on the length of the call, and on its time ``at``
    (None: now).
    """
    if config.price is not None:
        exact: Decimal | None = _price_by_config(usage, config.price)
    else:
        exact = _price_by_list(usage, config, at)
    return None if exact is None else math.ceil(exact * BILLION) / BILLION


def read_counts(counts: Any) -> Usage:
    """Return the tokens that a provider counted for one answer; uncounted zeros without them."""
    names = counts if isinstance(counts, dict) else {}
    n_input = _read_count(names.get("prompt_tokens"))
    n_output = _read_count(names.get("completion_tokens"))
    if n_input is None or n_output is None:
        return Usage(calls=1, uncounted=1)
    details = names.get("prompt_tokens_details")
    cached = _read_count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return Usage(
        calls=1,
        input_tokens=n_input,
        cached_tokens=min(cached or 0, n_input),
        output_tokens=n_output,
    )


def bound_usage(usage: Usage, worst: Usage) -> Usage:
    """Return a usage whose impossible counts are those of the worst case.

    A provider that ignores caps is believed up to a million tokens above the worst case.
    """

    def bound(count: int, most: int) -> int:
        return count if count <= most + MILLION else most or MILLION

    given = bound(usage.input_tokens, worst.input_tokens)
    written = bound(usage.output_tokens, worst.output_tokens)
    cached = min(usage.cached_tokens, given)
    return usage.model_copy(
        update={"input_tokens": given, "cached_tokens": cached, "output_tokens": written}
    )


def write_counts(usage: Usage) -> dict[str, JsonValue]:
    """Return the tokens of one answer as providers write them."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _read_count(value: Any) -> int | None:
    """Return a token count; None for a negative value, no integer, or 2**53 and more."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def worst_case(
    size: int, cap: int | None, config: ModelConfig, *, at: datetime | None = None
) -> Usage:
    """Return the most that one call can cost, which the budget reserves before the call.

    A body of ``size`` bytes has at most as many tokens. ``cap`` is the most tokens of the answer;
    None reserves no tokens for it.
    """
    most = Usage(calls=1, input_tokens=size + OVERHEAD_TOKENS, output_tokens=cap or 0)
    usd = usd_of(most, config, at=at)
    if usd is not None:
        # A configured price of cached input may be the higher one.
        cached = most.model_copy(update={"cached_tokens": most.input_tokens})
        usd = max(usd, usd_of(cached, config, at=at) or 0.0)
    return most.model_copy(update={"usd": usd})


def read_cap(body: Any) -> int | None:
    """Return the most tokens of the answer to a request's body; None if the body states no cap."""
    if not isinstance(body, dict):
        return None
    caps = [body.get(name) for name in CAP_NAMES]
    known = [cap for cap in caps if type(cap) is int and 0 <= cap <= MAX_CAP]
    answers = body.get("n")
    if type(answers) is not int:
        answers = 1
    return max(known) * answers if known else None


def _price_by_config(usage: Usage, price: Price) -> Decimal:
    cached_price = price.input if price.cached_input is None else price.cached_input
    cost = (
        (usage.input_tokens - usage.cached_tokens) * Decimal(str(price.input))
        + usage.cached_tokens * Decimal(str(cached_price))
        + usage.output_tokens * Decimal(str(price.output))
    )
    return cost / MILLION


def _price_by_list(usage: Usage, config: ModelConfig, at: datetime | None) -> Decimal | None:
    address = config.base_url
    name = config.model
    if config.api == "pydantic_ai":
        address, _, name = config.model.partition(":")
    tier = config.extra_body.get("service_tier")
    tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    minute = (at or datetime.now(UTC)).replace(second=0, microsecond=0)
    return _list_price(name, address, str(tier or ""), tokens, minute)


@lru_cache(maxsize=1024)
def _list_price(
    model: str, address: str, tier: str, tokens: tuple[int, int, int], minute: datetime
) -> Decimal | None:
    """Return a list price; cached, since a look-up is slow and each call needs it twice."""
    from genai_prices import Usage as Tokens
    from genai_prices import calc_price

    given, cached, written = tokens
    try:
        found = calc_price(
            Tokens(input_tokens=given, cache_read_tokens=cached, output_tokens=written),
            model,
            **{"provider_api_url" if "://" in address else "provider_id": address},
            genai_request_timestamp=minute,
            price_context={"service_tier": tier} if tier else None,
        )
    except LookupError:
        return None
    by_token = (getattr(found.model_price, f"{way}_mtok", None) for way in ("input", "output"))
    return None if None in by_token else found.total_price


# Typical for English text and code in current tokenizers; the worst case is one byte per token.
BYTES_PER_TOKEN = 3.5
# Typical tokens that a request adds to its texts.
MESSAGE_TOKENS = 16
# Assumed most tokens of a reply without a cap.
UNCAPPED_REPLY_TOKENS = 1000


class EstimateRow(FrozenModel):
    """Likely calls of one role for one purpose; ``usd`` is None if no price is known."""

    role: str
    purpose: str
    calls: float
    input_tokens: float
    output_tokens: float
    usd: float | None = None

    def with_price(self, price: Callable[[Usage], float | None]) -> EstimateRow:
        """Return the row with money; ``price`` gives the dollars of one call of mean length."""
        given = math.ceil(self.input_tokens / self.calls)
        written = math.ceil(self.output_tokens / self.calls)
        usd = price(Usage(calls=1, input_tokens=given, output_tokens=written))
        return self if usd is None else self.model_copy(update={"usd": usd * self.calls})


class CostEstimate(FrozenModel):
    """Rows of calls, and the assumptions behind them."""

    rows: tuple[EstimateRow, ...]
    assumptions: tuple[str, ...]

    @property
    def usd(self) -> float | None:
        """All money in dollars; None if a row has no price."""
        known = [row.usd for row in self.rows if row.usd is not None]
        return math.fsum(known) if len(known) == len(self.rows) else None
