"""Which source a step asks: each once, those with gains for their cost more often, and another one in a stall."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import cases
from reflact.config.training import BudgetConfig
from reflact.records import StepRecord, Usage
from reflact.search.bandit import (
    STALLED_STEPS,
    choose_source,
    count_step_items,
    estimate_rollouts,
    is_stalled,
)
from reflact.types import Verdict

SOURCES = ("examples", "rewrite", "edits")


def make_record(
    step: int, source: str, gain: float | None = None, *, rollouts: int = 40, tokens: int = 0
) -> StepRecord:
    """Return the record of a step that accepted a candidate with a gain; None: it accepted nothing."""
    verdict = Verdict(action="reject", reason="no better", candidate_score=0.2, current_score=0.3)
    if gain is not None:
        update = {"action": "accept_new_best", "candidate_score": 0.3 + gain}
        verdict = verdict.model_copy(update=update)
    return StepRecord.model_construct(
        step=step, source=source, verdict=verdict, n_rollouts=rollouts, n_tokens=tokens
    )


def make_history(*steps: tuple[str, float | None]) -> list[StepRecord]:
    return [make_record(n, source, gain) for n, (source, gain) in enumerate(steps, 1)]


def count_choices(
    records: Sequence[StepRecord], *, sources: Sequence[str] = SOURCES, draws: int = 200
) -> Counter[str]:
    """Return how often each source is chosen after a history, over many seeds."""
    step = len(records) + 1
    return Counter(choose_source(sources, records, seed=seed, step=step).name for seed in range(draws))


histories = st.lists(
    st.tuples(st.sampled_from(SOURCES), st.none() | st.sampled_from([0.0, 0.05, 0.5])), max_size=12
).map(lambda steps: make_history(*steps))


@pytest.mark.parametrize("order", [SOURCES, ("edits", "examples", "rewrite"), ("rewrite", "module:own")])
def test_each_source_is_tried_once_in_order(order: tuple[str, ...]) -> None:
    for gain in (None, 0.6):
        records: list[StepRecord] = []
        for step, name in enumerate(order, 1):
            assert choose_source(order, records, seed=3, step=step).name == name
            records.append(make_record(step, name, gain))


@cases(200)
@given(histories, st.integers(0, 50))
def test_the_same_records_give_the_same_choice(records: list[StepRecord], seed: int) -> None:
    step = len(records) + 1
    first = choose_source(SOURCES, records, seed=seed, step=step)
    assert choose_source(SOURCES, [*records], seed=seed, step=step) == first
    assert first.is_stalled == is_stalled(records)


@pytest.mark.parametrize("winner", SOURCES)
def test_a_source_with_gains_is_preferred_in_most_draws(winner: str) -> None:
    records = make_history(*((name, 0.3 if name == winner else None) for name in SOURCES))
    counts = count_choices(records)
    assert counts[winner] > 150


def test_a_source_that_costs_less_for_its_gain_is_preferred_in_most_draws() -> None:
    for dear in ({"rollouts": 400}, {"rollouts": 40, "tokens": 30_000}):
        records = [
            make_record(1, "examples", 0.1, rollouts=40),
            make_record(2, "rewrite", 0.1, **dear),
            make_record(3, "edits", 0.1, **dear),
        ]
        assert count_choices(records)["examples"] > 150


def test_three_steps_without_a_gain_are_a_stall() -> None:
    failed = ("edits", None)
    assert not is_stalled(make_history(*[failed] * (STALLED_STEPS - 1)))
    assert is_stalled(make_history(("edits", 0.1), *[failed] * STALLED_STEPS))
    assert not is_stalled(make_history(failed, ("edits", 0.1), failed))
    assert not is_stalled([])


@pytest.mark.parametrize("last", SOURCES)
def test_a_stalled_run_changes_the_source(last: str) -> None:
    others = [name for name in SOURCES if name != last]
    records = make_history(*((name, 0.2) for name in SOURCES), *[(last, None)] * STALLED_STEPS)
    for seed in range(100):
        choice = choose_source(SOURCES, records, seed=seed, step=len(records) + 1)
        assert choice.name in others
        assert choice.is_stalled


def test_a_budget_pays_for_rollouts_at_the_cost_of_the_earlier_ones() -> None:
    spent = Usage(calls=40, input_tokens=900, output_tokens=100)
    assert estimate_rollouts(BudgetConfig(max_calls=400), spent, 20) == pytest.approx(0.7 * 200)
    assert estimate_rollouts(BudgetConfig(max_calls=400, max_tokens=1_000), spent, 20) == pytest.approx(14)
    assert estimate_rollouts(BudgetConfig(max_usd=1), spent, 20) == math.inf
    assert [count_step_items(planned, 4) for planned in (math.inf, 300, 30)] == [None, 10, 4]
