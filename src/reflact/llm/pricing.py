"""What calls cost, in dollars: by the price that the configuration gives, or else by the provider's list.

Money is counted in whole billionths of a dollar, rounded up for each call, so that sums are exact and no
limit is missed by a rounding.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from reflact.config.models import ModelConfig, Price
from reflact.records import Usage

BILLION = 10**9
MILLION = 10**6

OVERHEAD_TOKENS = 256
"""What a provider may add to the input of a request, such as its chat template: an upper bound."""


def usd_of(usage: Usage, config: ModelConfig, *, at: datetime | None = None) -> float | None:
    """Return what one call cost, in dollars, None where no price is known.

    Never for sums of calls: a price may depend on the length of each.

    Args:
        usage: What the call consumed.
        config: Whose model was asked.
        at: When it was asked; now, where it is not said. Some prices depend on the time of day.
    """
    exact = (
        _price_by_list(usage, config, at) if config.price is None else _price_by_config(usage, config.price)
    )
    return None if exact is None else math.ceil(exact * BILLION) / BILLION


def worst_case(size: int, cap: int | None, config: ModelConfig, *, at: datetime | None = None) -> Usage:
    """Return the most that one call can consume: what is reserved for it before it is sent.

    A token is at least a byte long, so a body has at most as many tokens as bytes.

    Args:
        size: The request's body, in bytes.
        cap: The most tokens of the answer; None where it has no cap, and nothing is reserved for it.
        config: Whose model is asked.
        at: When it is asked.
    """
    most = Usage(calls=1, input_tokens=size + OVERHEAD_TOKENS, output_tokens=cap or 0)
    cached = most.model_copy(update={"cached_tokens": most.input_tokens})
    prices = [p for p in (usd_of(usage, config, at=at) for usage in (most, cached)) if p is not None]
    return most.model_copy(update={"usd": max(prices, default=None)})


def read_cap(body: Any) -> int | None:
    """Return the most tokens that the answer to a request's body may have, None where it has no cap."""
    if not isinstance(body, dict):
        return None
    caps = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    known = [cap for cap in caps if type(cap) is int]
    answers = body.get("n")
    return max(known) * (answers if type(answers) is int else 1) if known else None


def _price_by_config(usage: Usage, price: Price) -> Decimal:
    cached_price = price.input if price.cached_input is None else price.cached_input
    cost = (
        (usage.input_tokens - usage.cached_tokens) * Decimal(str(price.input))
        + usage.cached_tokens * Decimal(str(cached_price))
        + usage.output_tokens * Decimal(str(price.output))
    )
    return cost / MILLION


def _price_by_list(usage: Usage, config: ModelConfig, at: datetime | None) -> Decimal | None:
    tier = config.extra_body.get("service_tier")
    return _list_price(
        config.model,
        config.base_url,
        tier if isinstance(tier, str) else None,
        (usage.input_tokens, usage.cached_tokens, usage.output_tokens),
        (at or datetime.now(UTC)).replace(second=0, microsecond=0),
    )


@lru_cache(maxsize=1024)
def _list_price(
    model: str, address: str, tier: str | None, tokens: tuple[int, int, int], minute: datetime
) -> Decimal | None:
    """Return a list price; the same is asked for the ledger and for the reply, and takes its time."""
    from genai_prices import Usage as Tokens
    from genai_prices import calc_price

    given, cached, written = tokens
    try:
        found = calc_price(
            Tokens(input_tokens=given, cache_read_tokens=cached, output_tokens=written),
            model,
            provider_api_url=address,
            genai_request_timestamp=minute,
            price_context=None if tier is None else {"service_tier": tier},
        )
    except LookupError:
        return None
    by_token = (getattr(found.model_price, f"{way}_mtok", None) for way in ("input", "output"))
    return None if None in by_token else found.total_price
