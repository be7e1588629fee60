"""Measurements, their scores in the gate's metric, and the strict rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from reflact.config import GateConfig
from reflact.paired import ROUNDING
from reflact.types import Action, Measurement, Rollout, Split, Verdict

Metric = Literal["hard", "soft", "mixed"]


def measure(skill_hash: str, split: Split, rollouts: Sequence[Rollout]) -> Measurement:
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


def score(measurement: Measurement, *, metric: Metric, mixed_weight: float) -> float | None:
    """Return a measurement as one number in 0..1; None where nothing was measured.

    ``mixed`` is ``(1 - mixed_weight) * hard + mixed_weight * soft``.
    """
    if measurement.hard is None or measurement.soft is None:
        return None
    if metric == "hard":
        return measurement.hard
    if metric == "soft":
        return measurement.soft
    return (1 - mixed_weight) * measurement.hard + mixed_weight * measurement.soft


def decide(
    candidate: Sequence[Rollout],
    current: Sequence[Rollout],
    best_score: float | None,
    config: GateConfig,
    *,
    split: Split = Split.val,
) -> Verdict:
    """Compare a candidate with the current skill on the pairs of rollouts that are measured on both sides.

    Strict policy: a greater mean is accepted, and is the new best if it is also greater than
    ``best_score`` (None: no skill has a score yet). Where the gate is off everything is accepted. The
    verdict's measurements cover the pairs used; the items left out are the unmeasured ones of both.

    Args:
        candidate: The candidate's rollouts, one for each item and trial, in any order.
        current: The current skill's rollouts of the same items and trials.
        best_score: The best skill's score in the gate's metric.
        config: The gate's settings.
        split: The split that both were measured on.

    Raises:
        ValueError: The sides are empty, mix skills, or do not cover the same items and trials.
    """
    theirs, ours = _pairs(candidate, current)
    kept = [key for key in theirs if theirs[key].score is not None and ours[key].score is not None]
    new = _paired(list(theirs.values()), [theirs[key] for key in kept], split)
    old = _paired(list(ours.values()), [ours[key] for key in kept], split)
    left_out = tuple(sorted({theirs[key].item_id for key in theirs.keys() - set(kept)}))
    new_score = score(new, metric=config.metric, mixed_weight=config.mixed_weight)
    old_score = score(old, metric=config.metric, mixed_weight=config.mixed_weight)
    action, reason = _ruling(new_score, old_score, best_score, (len(kept), len(theirs)), config)
    return Verdict(
        action=action,
        reason=reason,
        candidate=new.model_copy(update={"unmeasured": left_out}),
        current=old.model_copy(update={"unmeasured": left_out}),
        candidate_score=new_score,
        current_score=old_score,
    )


def _ruling(
    new: float | None,
    old: float | None,
    best: float | None,
    pairs: tuple[int, int],
    config: GateConfig,
) -> tuple[Action, str]:
    measured, total = pairs
    counted = f"over {measured} of {total} pairs"
    if not config.enabled:
        return "force_accept", f"The gate is off; the candidate has {_shown(new)} {counted}."
    if new is None or old is None or measured / total < config.coverage:
        return "unmeasured", (
            f"Only {measured} of {total} pairs are measured on both sides; "
            f"the gate needs a share of {config.coverage:g}."
        )
    if not _exceeds(new, old):
        return "reject", f"The candidate's {_shown(new)} is not above the current {_shown(old)} {counted}."
    above = f"The candidate's {_shown(new)} is above the current {_shown(old)} {counted}"
    if best is None:
        return "accept_new_best", f"{above}; there was no best score yet."
    if _exceeds(new, best):
        return "accept_new_best", f"{above}, and above the best {_shown(best)}."
    return "accept", f"{above}, but not above the best {_shown(best)}."


def _exceeds(score: float, other: float) -> bool:
    return score > other + ROUNDING


def _shown(score: float | None) -> str:
    return "no score" if score is None else f"{score:.4f}"


_Key = tuple[str, int]


def _pairs(
    candidate: Sequence[Rollout], current: Sequence[Rollout]
) -> tuple[dict[_Key, Rollout], dict[_Key, Rollout]]:
    theirs = {(rollout.item_id, rollout.trial): rollout for rollout in candidate}
    ours = {(rollout.item_id, rollout.trial): rollout for rollout in current}
    if not theirs or theirs.keys() != ours.keys():
        raise ValueError("candidate and current need rollouts of the same items and trials, at least one")
    if len(theirs) != len(candidate) or len(ours) != len(current):
        raise ValueError("candidate and current need one rollout for each item and trial")
    return theirs, ours


def _paired(side: Sequence[Rollout], kept: Sequence[Rollout], split: Split) -> Measurement:
    skills = {rollout.skill_hash for rollout in side}
    if len(skills) > 1:
        raise ValueError(f"one side of a comparison mixes rollouts of {len(skills)} skills")
    return measure(skills.pop(), split, kept)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
