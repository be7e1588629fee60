"""The end of a run: documents measured side by side, and the placebo among them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reflact.gate import measure
from reflact.intervals import improvement, interval_of
from reflact.results import Bucket, Improvement, Scored
from reflact.types import Frozen, Item, Rollout, Skill, Split


class Contender(Frozen):
    """A document under the name it is reported by."""

    name: str
    skill: Skill


def placebo(text: str, like: Skill) -> Skill:
    """Return a document about something else, cut or repeated to the length of ``like`` in characters."""
    size = len(like.text)
    repeats = size // max(len(text), 1) + 1
    return Skill(text=(text * repeats)[:size])


def scored(contender: Contender, split: Split, rollouts: Sequence[Rollout], items: Sequence[Item]) -> Scored:
    """Return the mean, count, 95% interval and task types of one contender's rollouts, in any order.

    Several trials of an item count as one value in the interval, since they are not independent items.
    """
    measured = measure(contender.skill.hash, split, rollouts)
    means = _means(rollouts)
    low, high = interval_of(list(means.values())) if means else (None, None)
    return Scored(
        name=contender.name,
        skill_hash=contender.skill.hash,
        split=split,
        n=measured.n,
        trials=len({r.trial for r in rollouts}),
        buckets=_buckets(rollouts, items),
        unmeasured=sum(r.score is None for r in rollouts),
        successes=math.fsum(r.score.hard for r in rollouts if r.score is not None),
        hard=measured.hard,
        soft=measured.soft,
        low=low,
        high=high,
    )


def improved(
    name: str, split: Split, baseline: Sequence[Rollout], rollouts: Sequence[Rollout]
) -> Improvement | None:
    """Return what a contender gained over the baseline, item by item; None without a common item."""
    before, after = _means(baseline), _means(rollouts)
    common = [item_id for item_id in before if item_id in after]
    if not common:
        return None
    mean, low, high = improvement([before[i] for i in common], [after[i] for i in common])
    return Improvement(name=name, split=split, n=len(common), mean=mean, low=low, high=high)


def _means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.score is not None:
            scores.setdefault(rollout.item_id, []).append(rollout.score.hard)
    return {item_id: math.fsum(scores[item_id]) / len(scores[item_id]) for item_id in sorted(scores)}


def _buckets(rollouts: Sequence[Rollout], items: Sequence[Item]) -> tuple[Bucket, ...]:
    types = {item.id: item.task_type for item in items if item.task_type is not None}
    scores: dict[str, list[tuple[float, float]]] = {}
    for rollout in rollouts:
        if rollout.score is not None and rollout.item_id in types:
            pair = (rollout.score.hard, rollout.score.soft)
            scores.setdefault(types[rollout.item_id], []).append(pair)
    return tuple(
        Bucket(
            task_type=task_type,
            n=len(scores[task_type]),
            hard=math.fsum(hard for hard, _ in scores[task_type]) / len(scores[task_type]),
            soft=math.fsum(soft for _, soft in scores[task_type]) / len(scores[task_type]),
        )
        for task_type in sorted(scores)
    )
