"""How a run spends its rollouts: what is planned, what is left, and what a step took. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reflact.config.training import BudgetConfig
from reflact.records import StepRecord, Usage
from reflact.types import RaceEntry, Rollout, Verdict

STEPS_PER_BUDGET = 30
"""A step rolls out at most this part of a run's rollouts on train items, and at least one minibatch."""

TARGET_SHARE = 0.7
"""The part of a budget that is planned for rollouts."""

UNKNOWN_ROLLOUTS = 1_000
"""The rollouts that are planned if nothing is known of their cost."""


def estimate_rollouts(limits: BudgetConfig, spent: Usage, done: int) -> float:
    """Return how many rollouts fit the limits if ``done`` rollouts cost what was spent; the optimizer needs a share too."""
    costs = (
        (limits.max_calls, spent.calls),
        (limits.max_tokens, spent.input_tokens + spent.output_tokens),
        (limits.max_usd, spent.usd or 0.0),
    )
    fitting = [limit * done / cost for limit, cost in costs if limit is not None and cost]
    return TARGET_SHARE * min(fitting) if fitting else float(UNKNOWN_ROLLOUTS)


def count_step_items(planned: float, minibatch_size: int) -> int | None:
    """Return how many items a step may roll out if the run pays for so many rollouts; None for any number."""
    return None if planned == math.inf else max(minibatch_size, int(planned) // STEPS_PER_BUDGET)


def count_passes_left(
    planned: float, *, n_items: int, baseline_passes: int, earlier: Sequence[StepRecord]
) -> float:
    """Return how many passes over the ``n_items`` validation items the rest of the planned rollouts pays for."""
    used = baseline_passes * n_items + sum(record.n_rollouts for record in earlier)
    return (planned - used) / n_items


def count_new_rollouts(
    rollouts: Sequence[Rollout],
    race: Sequence[RaceEntry],
    verdict: Verdict,
    candidate: str,
    *,
    current: str,
    earlier: Sequence[StepRecord],
) -> int:
    """Return how many rollouts a step took that no earlier step had.

    They are those of train items under the ``current`` document, of the race, and of the gate beyond what the race had
    measured of the ``candidate`` (hashes).
    """
    known = {item for record in earlier if record.skill_before == current for item in record.item_ids}
    gate = 0 if verdict.candidate is None else verdict.candidate.n
    if verdict.ranked is not None:
        gate = sum(result.n for result in verdict.ranked.passes)
    shared = sum(entry.n for entry in race if entry.skill_hash == candidate)
    trained = len({rollout.item_id for rollout in rollouts} - known)
    return trained + sum(entry.n for entry in race) + max(0, gate - shared)
