"""Statistics of the final test: scores of documents, improvements over the baseline, and the placebo."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reflact.gate.intervals import improvement_interval, mean_interval
from reflact.records import Improvement, SkillScore, TaskTypeScore
from reflact.stages.evaluate import build_measurement
from reflact.types import FrozenModel, Item, Rollout, Skill, Split


class NamedSkill(FrozenModel):
    """A document and its name in the report."""

    name: str
    skill: Skill


def make_placebo(text: str, template: Skill) -> Skill:
    """Return a document about something else, cut or repeated to the length of ``template`` in characters."""
    size = len(template.text)
    repeats = size // max(len(text), 1) + 1
    return Skill(text=(text * repeats)[:size])


def score_skill(
    contender: NamedSkill, split: Split, rollouts: Sequence[Rollout], items: Sequence[Item]
) -> SkillScore:
    """Return the mean, count, 95% interval and task types of one skill's rollouts, in any order.

    Several trials of an item count as one value in the interval, because they are not independent.
    """
    measured = build_measurement(contender.skill.hash, split, rollouts)
    means = _mean_by_item(rollouts)
    low, high = mean_interval(list(means.values())) if means else (None, None)
    return SkillScore(
        name=contender.name,
        skill_hash=contender.skill.hash,
        split=split,
        n=measured.n,
        trials=len({r.trial for r in rollouts}),
        buckets=_score_task_types(rollouts, items),
        unmeasured=sum(r.score is None for r in rollouts),
        successes=math.fsum(r.score.hard for r in rollouts if r.score is not None),
        hard=measured.hard,
        soft=measured.soft,
        low=low,
        high=high,
    )


def measure_improvement(
    name: str, split: Split, baseline: Sequence[Rollout], rollouts: Sequence[Rollout]
) -> Improvement | None:
    """Return a skill's improvement over the baseline, paired by item; None without a common item."""
    before, after = _mean_by_item(baseline), _mean_by_item(rollouts)
    common = [item_id for item_id in before if item_id in after]
    if not common:
        return None
    mean, low, high = improvement_interval([before[i] for i in common], [after[i] for i in common])
    return Improvement(name=name, split=split, n=len(common), mean=mean, low=low, high=high)


def _mean_by_item(rollouts: Sequence[Rollout]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.score is not None:
            scores.setdefault(rollout.item_id, []).append(rollout.score.hard)
    return {item_id: math.fsum(scores[item_id]) / len(scores[item_id]) for item_id in sorted(scores)}


def _score_task_types(rollouts: Sequence[Rollout], items: Sequence[Item]) -> tuple[TaskTypeScore, ...]:
    types = {item.id: item.task_type for item in items if item.task_type is not None}
    scores: dict[str, list[tuple[float, float]]] = {}
    for rollout in rollouts:
        if rollout.score is not None and rollout.item_id in types:
            pair = (rollout.score.hard, rollout.score.soft)
            scores.setdefault(types[rollout.item_id], []).append(pair)
    return tuple(
        TaskTypeScore(
            task_type=task_type,
            n=len(scores[task_type]),
            hard=math.fsum(hard for hard, _ in scores[task_type]) / len(scores[task_type]),
            soft=math.fsum(soft for _, soft in scores[task_type]) / len(scores[task_type]),
        )
        for task_type in sorted(scores)
    )
