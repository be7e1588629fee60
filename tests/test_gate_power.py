"""What a validation split can resolve, and how many trials are planned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.gate.power import choose_trials, describe_power, detectable_effect


@pytest.mark.parametrize(("n", "trials"), [(20, 20), (50, 8), (100, 4), (400, 2), (5, 20)])
def test_trials_follow_from_the_split(n: int, trials: int) -> None:
    """Fewer items need more trials for 15 points in 8 decisions, within 2 and 20."""
    assert choose_trials(n, decisions=8, alpha=0.1, effect=0.15) == trials


def test_resolution_is_that_of_the_design() -> None:
    """Known values at a level of 0.0125; fewer pairs that differ resolve more, and nothing exceeds 1."""
    assert detectable_effect(20, 4, level=0.0125) == pytest.approx(0.311, abs=5e-4)
    assert detectable_effect(20, 20, level=0.0125) == pytest.approx(0.139, abs=5e-4)
    assert detectable_effect(20, 20, level=0.0125, discordant=0.125) == pytest.approx(0.139 / 2, abs=5e-4)
    assert detectable_effect(1, 1, level=0.0125) == 1.0


@given(st.integers(1, 500), st.integers(1, 40), st.sampled_from((0.05, 0.1)), st.floats(0.05, 0.5))
def test_planned_trials_resolve_the_effect(n: int, decisions: int, alpha: float, effect: float) -> None:
    """Where the number is not cut, it is enough for the effect and not by more than the allowance."""
    trials = choose_trials(n, decisions=decisions, alpha=alpha, effect=effect)
    level = alpha / decisions
    if trials < 20:
        assert detectable_effect(n, trials, level=level) <= effect
    if trials > 2:
        assert detectable_effect(n, trials - 1, level=level) > effect / 1.15**0.5


def test_the_outlook_names_what_it_would_take() -> None:
    """A plan that is too small says so before anything is spent on it."""
    assert describe_power(20, 4, decisions=8, alpha=0.1, effect=0.15) == (
        "20 items x 4 trials can detect only improvements of about 31 points if the target is noisy; "
        "for 15 points use 20 trials or 100 items x 4; otherwise expect `inconclusive`, or choose `strict` "
        "and treat its acceptances as unverified."
    )


def test_the_outlook_of_a_plan_that_is_enough_names_what_it_resolves() -> None:
    """There is nothing to choose then."""
    words = "20 items x 20 trials can detect improvements of about 14 points if the target is noisy."
    assert describe_power(20, 20, decisions=8, alpha=0.1, effect=0.15) == words
