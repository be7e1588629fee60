"""Statistics of the final test: scores, improvements over the baseline, and the placebo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from reflact.gate.cases import CaseScores, compare_cases
from reflact.gate.intervals import (
    CLAIM_LEVEL,
    compute_chance,
    improvement_interval,
    mean_interval,
    within_item_interval,
)
from reflact.records import (
    CaseComparison,
    Claim,
    Improvement,
    ItemSides,
    SkillScore,
    TaskTypeScore,
    average_metrics,
)
from reflact.stages.evaluate import GateMetric, build_measurement
from reflact.types import Item, Rollout, Skill, Split

# The task type of items that have none, if others have one.
OTHER_TASKS = "other"


def make_placebo(text: str, template: Skill) -> Skill:
    """Return a document about something else, with as many characters as ``template``."""
    size = len(template.text)
    repeats = size // max(len(text), 1) + 1
    return Skill(text=(text * repeats)[:size])


def score_skill(
    name: str,
    skill: Skill,
    split: Split,
    rollouts: Sequence[Rollout],
    items: Sequence[Item],
    *,
    metric: GateMetric,
) -> SkillScore:
    """Return the mean, count, 95% interval and task types of one skill's rollouts, in any order.

    The interval is that of the hard score. Several trials of an item count as one value in the
    interval, because they are not independent.
    """
    measured = build_measurement(skill.hash, split, rollouts)
    means = _mean_by_item(rollouts, GateMetric(metric="hard"))
    low, high = mean_interval(list(means.values())) if means else (None, None)
    return SkillScore(
        name=name,
        skill_hash=skill.hash,
        split=split,
        n=measured.n,
        trials=len({r.trial for r in rollouts}),
        buckets=_score_task_types(skill, split, rollouts, items),
        unmeasured=sum(r.score is None for r in rollouts),
        successes=math.fsum(r.score.hard for r in rollouts if r.score is not None),
        hard=measured.hard,
        soft=measured.soft,
        low=low,
        high=high,
        metrics=average_metrics(rollouts),
        soft_weight=metric.soft_weight,
    )


def measure_improvement(
    name: str,
    split: Split,
    baseline: Sequence[Rollout],
    rollouts: Sequence[Rollout],
    *,
    metric: GateMetric,
) -> Improvement | None:
    """Return the improvement over the baseline, paired by item; None without a common item."""
    cases = _pair_by_item(baseline, rollouts, metric)
    if not cases:
        return None
    mean, low, high = improvement_interval(*_list_means(cases))
    return Improvement(
        name=name,
        split=split,
        n=len(cases),
        mean=mean,
        low=low,
        high=high,
        soft_weight=metric.soft_weight,
    )


def compare_on_cases(
    name: str, baseline: Sequence[Rollout], rollouts: Sequence[Rollout], *, metric: GateMetric
) -> tuple[CaseComparison | None, tuple[ItemSides, ...]]:
    """Return what the repeats say on these items, and the items that flip or have no score.

    The comparison is None without an item that is measured on both sides.
    """
    cases = _pair_by_item(baseline, rollouts, metric)
    compared = compare_cases(cases, name=name) if cases else None
    before = _mean_by_item(baseline, metric)
    after = _mean_by_item(rollouts, metric)
    # The first answers stand for all trials.
    answers_before = {r.item_id: r.answer for r in reversed(baseline)}
    answers_after = {r.item_id: r.answer for r in reversed(rollouts)}
    shown = answers_after.keys() - {case.case_id for case in cases}
    if compared is not None:
        shown |= {*compared.better, *compared.worse}
    sides = []
    for item_id in sorted(shown):
        side = ItemSides(
            name=name,
            item_id=item_id,
            before=before.get(item_id),
            after=after.get(item_id),
            answer_before=answers_before.get(item_id, ""),
            answer_after=answers_after[item_id],
        )
        sides.append(side)
    return compared, tuple(sides)


def judge_claim(
    split: Split,
    baseline: Sequence[Rollout],
    best: Sequence[Rollout],
    *,
    metric: GateMetric,
    on_these_items: bool,
) -> Claim | None:
    """Return the claim that the best skill is better; None without a common item.

    ``on_these_items``: several trials of each item, whose variance within the items alone counts.
    """
    gain = measure_improvement("best", split, baseline, best, metric=metric)
    if gain is None:
        return None
    cases = _pair_by_item(baseline, best, metric)
    repeated = [case for case in cases if len(case.before) > 1 and len(case.after) > 1]
    if on_these_items and repeated:
        mean, low, high = within_item_interval(
            [case.before for case in repeated], [case.after for case in repeated]
        )
        gain = gain.model_copy(update={"n": len(repeated), "mean": mean, "low": low, "high": high})
        chance = compare_cases(repeated, name="baseline").chance_better
    else:
        chance = compute_chance(*_list_means(cases))
    return Claim(improvement=gain, confirmed=gain.low > 0 and chance <= CLAIM_LEVEL, chance=chance)


def _pair_by_item(
    before: Sequence[Rollout], after: Sequence[Rollout], metric: GateMetric
) -> list[CaseScores]:
    """Return the scores of the items that were measured on both sides."""
    first = _group_by_item(before, metric)
    second = _group_by_item(after, metric)
    return [
        CaseScores(case_id=item_id, before=tuple(first[item_id]), after=tuple(second[item_id]))
        for item_id in first
        if item_id in second
    ]


def _list_means(cases: Sequence[CaseScores]) -> tuple[list[float], list[float]]:
    return [fmean(case.before) for case in cases], [fmean(case.after) for case in cases]


def _mean_by_item(rollouts: Sequence[Rollout], metric: GateMetric) -> dict[str, float]:
    return {item: fmean(scores) for item, scores in _group_by_item(rollouts, metric).items()}


def _group_by_item(rollouts: Sequence[Rollout], metric: GateMetric) -> dict[str, list[float]]:
    scores: dict[str, list[float]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.item_id):
        if (score := metric.score_rollout(rollout)) is not None:
            scores.setdefault(rollout.item_id, []).append(score)
    return scores


def _score_task_types(
    skill: Skill, split: Split, rollouts: Sequence[Rollout], items: Sequence[Item]
) -> tuple[TaskTypeScore, ...]:
    if not any(item.task_type for item in items):
        return ()
    types = {item.id: item.task_type or OTHER_TASKS for item in items}
    buckets = []
    for name in sorted({*types.values()}):
        of_type = [rollout for rollout in rollouts if types.get(rollout.item_id) == name]
        measured = build_measurement(skill.hash, split, of_type)
        if measured.hard is not None and measured.soft is not None:
            bucket = TaskTypeScore(
                task_type=name, n=measured.n, hard=measured.hard, soft=measured.soft
            )
            buckets.append(bucket)
    return tuple(buckets)
