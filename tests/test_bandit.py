"""Which source a step asks: each once, those with gains for their cost more often, and another one in a stall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from reflact.records import StepRecord
from reflact.search.bandit import (
    STALLED_STEPS,
    choose_source,
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
    return Counter(choose_source(sources, records, seed=seed, step=step) for seed in range(draws))


@pytest.mark.parametrize("order", [SOURCES, ("edits", "examples", "rewrite"), ("rewrite", "module:own")])
def test_each_source_is_tried_once_in_order(order: tuple[str, ...]) -> None:
    for gain in (None, 0.6):
        records: list[StepRecord] = []
        for step, name in enumerate(order, 1):
            assert choose_source(order, records, seed=3, step=step) == name
            records.append(make_record(step, name, gain))


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


@pytest.mark.parametrize("last", SOURCES)
def test_a_stalled_run_changes_the_source(last: str) -> None:
    others = [name for name in SOURCES if name != last]
    records = make_history(*((name, 0.2) for name in SOURCES), *[(last, None)] * STALLED_STEPS)
    assert is_stalled(records)
    for seed in range(100):
        assert choose_source(SOURCES, records, seed=seed, step=len(records) + 1) in others
