"""Which source a step asks: each once, those with gains for their cost more often, and another one in a stall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import cases
from reflact.records import SkillVersion, StepRecord
from reflact.search.bandit import STALLED_STEPS, choose_source, is_stalled
from reflact.types import AggregateResult, Measurement, Patch, SelectResult, Split, Verdict

SOURCES = ("examples", "rewrite", "edits")
VERSION = SkillVersion(number=0, skill_hash="h", origin="initial")


def make_record(
    step: int, source: str, gain: float | None = None, *, rollouts: int = 40, tokens: int = 0
) -> StepRecord:
    """Return the record of a step that accepted a candidate with a gain; None: it accepted nothing."""
    verdict = Verdict(action="reject", reason="no better", candidate_score=0.2, current_score=0.3)
    if gain is not None:
        verdict = Verdict(
            action="accept_new_best", reason="better", candidate_score=0.3 + gain, current_score=0.3
        )
    return StepRecord(
        step=step,
        epoch=1,
        skill_before="h",
        item_ids=(),
        rollout=Measurement(skill_hash="h", split=Split.train, n=0),
        n_failures=0,
        reports=(),
        merged=AggregateResult(patch=Patch()),
        chosen=SelectResult(patch=Patch(), pool_size=0),
        edits=(),
        candidate_hash="c",
        verdict=verdict,
        current=VERSION,
        best=VERSION,
        source=source,
        n_rollouts=rollouts,
        n_tokens=tokens,
    )


def make_history(*steps: tuple[str, float | None]) -> list[StepRecord]:
    """Return the records of steps, each with its source and gain."""
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
    stored = [StepRecord.model_validate_json(record.model_dump_json()) for record in records]
    first = choose_source(SOURCES, records, seed=seed, step=step)
    assert choose_source(SOURCES, stored, seed=seed, step=step) == first
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


# ---------------------------------------------------------------------------------------------- stalls


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
