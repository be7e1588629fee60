"""Prices: each kind of token has its own, and no call costs more than reserved."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reflact.config.models import ModelConfig, Price
from reflact.llm.pricing import usd_of, worst_case
from reflact.records import Usage

MILLION = Usage(calls=1, input_tokens=1_000_000, cached_tokens=400_000, output_tokens=1_000_000)
OPENAI = "https://api.openai.com/v1"


def model(**settings: Any) -> ModelConfig:
    return ModelConfig(**{"model": "gpt-4o-mini", **settings})


def test_a_given_price_counts_each_kind_of_token() -> None:
    """Cached input has a price of its own, or else that of all input."""
    cached = model(price=Price(input=2, cached_input=0.5, output=8))
    assert usd_of(MILLION, cached) == 0.6 * 2 + 0.4 * 0.5 + 8
    assert usd_of(MILLION, model(price=Price(input=2, output=8))) == 10


PRICES = st.builds(
    Price, input=st.floats(0, 1000), cached_input=st.none() | st.floats(0, 1000), output=st.floats(0, 1000)
)
LISTED = st.sampled_from(
    [
        ("gpt-4o-mini", OPENAI),
        ("gpt-5", OPENAI),
        ("deepseek-chat", "https://api.deepseek.com/v1"),
        ("gemini-2.5-pro", "https://generativelanguage.googleapis.com/v1beta/openai/"),
    ]
)
CONFIGS = st.builds(lambda price: model(price=price), PRICES) | st.builds(
    lambda found: model(model=found[0], base_url=found[1]), LISTED
)


@given(
    config=CONFIGS,
    size=st.integers(0, 10**6),
    cap=st.integers(1, 10**5),
    shares=st.tuples(*(st.floats(0, 1) for _ in range(3))),
    hour=st.integers(0, 23),
)
def test_no_call_costs_more_than_its_worst_case(
    config: ModelConfig, size: int, cap: int, shares: tuple[float, float, float], hour: int
) -> None:
    at = datetime(2026, 3, 1, hour, tzinfo=UTC)
    worst = worst_case(size, cap, config, at=at)
    read = int(shares[0] * worst.input_tokens)
    usage = Usage(
        calls=1,
        input_tokens=read,
        cached_tokens=int(shares[1] * read),
        output_tokens=int(shares[2] * worst.output_tokens),
    )
    most, cost = worst.usd, usd_of(usage, config, at=at)
    assert most is not None
    assert cost is not None
    assert Decimal(str(cost)) <= Decimal(str(most))
