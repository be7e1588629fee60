"""Measurements of skills, and their scores in the gate's metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from reflact.types import Measurement, Rollout, Split

Metric = Literal["hard", "soft", "mixed"]


def build_measurement(skill_hash: str, split: Split, rollouts: Sequence[Rollout]) -> Measurement:
    """Return the means of one skill's rollouts on a split; their order does not matter.

    Raises:
        ValueError: A rollout belongs to another skill.
    """
    if any(rollout.skill_hash != skill_hash for rollout in rollouts):
        raise ValueError(f"rollouts of another skill than {skill_hash} cannot measure it")
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    return Measurement(
        skill_hash=skill_hash,
        split=split,
        n=len(scores),
        unmeasured=tuple(sorted({rollout.item_id for rollout in rollouts if rollout.score is None})),
        hard=_mean([score.hard for score in scores]),
        soft=_mean([score.soft for score in scores]),
    )


def score_measurement(measurement: Measurement, *, metric: Metric, mixed_weight: float) -> float | None:
    """Return a measurement as one number in 0..1; None if nothing was measured.

    ``mixed`` is ``(1 - mixed_weight) * hard + mixed_weight * soft``.
    """
    if measurement.hard is None or measurement.soft is None:
        return None
    return combine_scores(measurement.hard, measurement.soft, metric=metric, mixed_weight=mixed_weight)


def combine_scores(hard: float, soft: float, *, metric: Metric, mixed_weight: float) -> float:
    """Return the two scores combined by the metric, in 0..1."""
    match metric:
        case "hard":
            return hard
        case "soft":
            return soft
        case "mixed":
            return (1 - mixed_weight) * hard + mixed_weight * soft


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
