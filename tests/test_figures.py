"""Quantities in few characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.reporting.lines import about, clock, format_count


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00"), (-3, "0:00")]
)
def test_a_clock_shows_whole_seconds(seconds: float, shown: str) -> None:
    """Minutes and seconds, hours where there are any, never less than nothing."""
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.4, "~0.4 s"),
        (42, "~42 s"),
        (240, "~4 min"),
        (9000, "~2.5 h"),
        (3 * 86400, "~3.0 days"),
    ],
)
def test_an_estimate_has_one_unit(seconds: float | None, shown: str) -> None:
    """What is only estimated is not shown to the second; nothing known is a dash."""
    assert about(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0"), (9999, "9,999"), (45_210, "45.2k"), (999_700, "1M"), (1_234_000, "1.23M")]
)
def test_a_quantity_has_few_digits(number: int, shown: str) -> None:
    """Small counts are exact, large ones have three digits and a unit."""
    assert format_count(number) == shown


@given(st.integers(0, 10**12))
def test_a_quantity_is_short(number: int) -> None:
    """No count takes more than six characters."""
    assert len(format_count(number)) <= 6
