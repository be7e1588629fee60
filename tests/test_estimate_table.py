"""The table of a forecast: nothing is cut at a terminal of 80 columns."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from reflact.cli.train import build_estimate_table
from reflact.llm.pricing import CostEstimate, EstimateRange, EstimateRow


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (9_999, "9,999"),
        (17_812, "17.8k"),
        (97_049, "97k"),
        (99_960, "100k"),
        (999_600, "1M"),
        (2_340_000_000, "2.34G"),
    ],
)
def test_counts_fit_their_columns(count: int, shown: str) -> None:
    """A count of any size is whole in its column, also where prices stand beside it."""
    amount = EstimateRange(low=count, expected=count, high=count)
    money = EstimateRange(low=1, expected=1234.567, high=9876.543)
    row = EstimateRow(
        role="optimizer",
        purpose="held-out steps, all",
        calls=amount,
        input_tokens=amount,
        output_tokens=EstimateRange(),
        usd=money,
    )
    out = StringIO()
    Console(file=out, width=80).print(build_estimate_table(CostEstimate(rows=(row,), assumptions=())))
    assert "…" not in out.getvalue()
    assert out.getvalue().split().count(shown) == 10
