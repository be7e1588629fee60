"""Measurements, and their scores in a metric."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.stages.evaluate import GateMetric, build_measurement
from reflact.types import Rollout, Score, Split

CANDIDATE = "c" * 64
scores = st.none() | st.sampled_from((0.0, 0.1, 1 / 3, 0.5, 1.0)) | st.floats(0, 1)


def _rollouts(skill_hash: str, values: Sequence[float | Score | None]) -> list[Rollout]:
    return [
        Rollout(
            key=f"{skill_hash}/{n}",
            item_id=f"item-{n:02}",
            skill_hash=skill_hash,
            score=Score.of(value) if isinstance(value, float) else value,
            error="the endpoint is down" if value is None else None,
        )
        for n, value in enumerate(values)
    ]


def test_a_measurement_is_the_mean_of_what_was_measured() -> None:
    """Unmeasured items are listed and left out; fractions of success count as such."""
    rollouts = _rollouts(CANDIDATE, [None, Score(hard=1, soft=0.5), Score(hard=0.1, soft=0.3), None])
    found = build_measurement(CANDIDATE, Split.val, rollouts)
    assert (found.n, found.hard, found.soft) == (2, 0.55, 0.4)
    assert found.unmeasured == ("item-00", "item-03")


def test_nothing_measured_has_no_score() -> None:
    """Absence is None, never a zero."""
    found = build_measurement(CANDIDATE, Split.val, _rollouts(CANDIDATE, [None]))
    assert (found.n, found.hard, found.soft) == (0, None, None)
    assert GateMetric(metric="hard").score_measurement(found) is None


@given(st.lists(scores, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_measurements_do_not_depend_on_order(values: list[float | None], chance: random.Random) -> None:
    """The same rollouts in any order give the same bytes."""
    rollouts = _rollouts(CANDIDATE, values)
    mixed = chance.sample(rollouts, len(rollouts))
    one, other = (build_measurement(CANDIDATE, Split.val, order) for order in (rollouts, mixed))
    assert one.model_dump_json() == other.model_dump_json()


def test_a_score_belongs_to_one_skill() -> None:
    """Rollouts of another skill are never counted for this one."""
    with pytest.raises(ValueError, match="another skill"):
        build_measurement(CANDIDATE, Split.val, _rollouts("d" * 64, [1.0]))


def test_metrics_pick_and_mix() -> None:
    """Hard and soft are taken as they are, mixed weighs soft by its weight."""
    found = build_measurement(CANDIDATE, Split.val, _rollouts(CANDIDATE, [Score(hard=1, soft=0.5)]))
    assert GateMetric(metric="hard", mixed_weight=0.2).score_measurement(found) == 1
    assert GateMetric(metric="soft", mixed_weight=0.2).score_measurement(found) == 0.5
    assert GateMetric(metric="mixed", mixed_weight=0.2).score_measurement(found) == 0.9
