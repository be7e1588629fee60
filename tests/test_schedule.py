"""The edit budget of each step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.stages.select import SchedulerName, edit_budget

schedulers: st.SearchStrategy[SchedulerName] = st.sampled_from(("constant", "linear", "cosine"))
bounds = st.integers(0, 50).flatmap(lambda top: st.tuples(st.just(top), st.integers(0, top)))


def _budgets(total: int, scheduler: SchedulerName, max_edits: int, floor: int) -> list[int]:
    steps = range(1, total + 1)
    return [edit_budget(s, total, scheduler=scheduler, max_edits=max_edits, floor=floor) for s in steps]


@given(st.integers(1, 200), schedulers, bounds)
def test_budgets_fall_from_the_largest_to_the_floor(
    total: int, scheduler: SchedulerName, bounds: tuple[int, int]
) -> None:
    """The first step has max_edits, the last the floor, and no step has more than the one before."""
    max_edits, floor = bounds
    budgets = _budgets(total, scheduler, max_edits, floor)
    assert budgets[0] == max_edits
    assert budgets[-1] == (max_edits if scheduler == "constant" or total == 1 else floor)
    assert budgets == sorted(budgets, reverse=True)


@given(st.integers(0, 60), schedulers, bounds)
def test_middle_steps_have_the_middle_budget_rounded_up(
    half: int, scheduler: SchedulerName, bounds: tuple[int, int]
) -> None:
    """Half-way, both falling schedules stand at the mean of the ends, halves rounded upward."""
    max_edits, floor = bounds
    middle = edit_budget(half + 2, 2 * half + 3, scheduler=scheduler, max_edits=max_edits, floor=floor)
    assert middle == (max_edits if scheduler == "constant" else (max_edits + floor + 1) // 2)


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_budgets_of_one_and_none_stay_as_they_are(scheduler: SchedulerName) -> None:
    """A budget of 1 is 1 in every step and a budget of 0 is none; neither is raised to a default."""
    assert _budgets(5, scheduler, 1, 1) == [1] * 5
    assert _budgets(5, scheduler, 0, 0) == [0] * 5


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [7, 7, 7, 7, 7, 7]),
        ("linear", [7, 6, 5, 4, 3, 2]),
        ("cosine", [7, 7, 5, 4, 2, 2]),
    ],
)
def test_known_schedules(scheduler: SchedulerName, expected: list[int]) -> None:
    """Six steps from 7 to 2, worked out by hand."""
    assert _budgets(6, scheduler, 7, 2) == expected


def test_exact_halves_are_rounded_upward() -> None:
    """Halves are known as such, although binary arithmetic may put them a digit below."""
    assert edit_budget(6, 7, scheduler="linear", max_edits=3, floor=0) == 1
    assert _budgets(4, "cosine", 6, 0) == [6, 5, 2, 0]
    assert _budgets(4, "cosine", 2, 0) == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("step", "total", "max_edits", "floor"),
    [(0, 4, 4, 2), (5, 4, 4, 2), (1, 0, 4, 2), (1, 4, 1, 2), (1, 4, 4, -1)],
)
def test_arguments_out_of_range_are_errors(step: int, total: int, max_edits: int, floor: int) -> None:
    """Steps are counted from 1, and a floor lies between none and the largest budget."""
    with pytest.raises(ValueError, match="is not within"):
        edit_budget(step, total, scheduler="linear", max_edits=max_edits, floor=floor)
