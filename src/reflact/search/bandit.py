"""Which source a step asks for candidates, and what a run may still spend. Pure functions.

Each source is tried once, then the one with the best expected gain for its cost. The choice depends
on the committed steps alone, so a resumed run repeats it. Source of the method: Thompson sampling
(W. Thompson 1933), here of a source's rate of success times its mean gain, divided by its mean
cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import NormalDist

from reflact.config.training import BudgetConfig
from reflact.data import make_rng
from reflact.records import StepRecord, Usage

# Steps in a row without a gain after which another source is tried, with more candidates.
STALLED_STEPS = 3

# Tokens of the optimizer that cost as much as a rollout: 20,000 tokens stand beside 240 rollouts.
TOKENS_PER_ROLLOUT = 80.0

# The gain in points and the cost in rollouts that are expected of a source before it was tried.
PRIOR_GAIN = 0.05
PRIOR_COST = 40.0

# The least cost of a step in rollouts: one that finds nothing to try still takes the place of
# another.
LEAST_COST = 20.0

# The weight of a source's earlier step, relative to its next one: what helped early need not help
# late.
FADING = 0.8


def choose_source(
    sources: Sequence[str], records: Sequence[StepRecord], *, seed: int, step: int
) -> str:
    """Return the source of a step after the committed ones; ``sources`` are in order of trial."""
    tried = {record.source for record in records}
    for name in sources:
        if name not in tried:
            return name
    usable = list(sources)
    if is_stalled(records) and len(usable) > 1:
        usable = [name for name in usable if name != records[-1].source]
    rng = make_rng(seed, f"source/{step}")
    worths = {name: _draw_worth(name, records, rng) for name in usable}
    return max(worths, key=worths.__getitem__)


def is_stalled(records: Sequence[StepRecord]) -> bool:
    """Whether none of the last steps gained anything."""
    last = records[-STALLED_STEPS:]
    return len(last) == STALLED_STEPS and not any(record.verdict.accepted for record in last)


def _draw_worth(name: str, records: Sequence[StepRecord], rng: Random) -> float:
    """Return a draw of the expected gain of a source for each rollout that it costs."""
    wins = 0.0
    losses = 0.0
    gains = PRIOR_GAIN
    costs = PRIOR_COST
    weight = 1.0
    for record in reversed([record for record in records if record.source == name]):
        verdict = record.verdict
        gain = 0.0  # in the gate's metric; that of any step but an accepted one
        if verdict.accepted and None not in {verdict.candidate_score, verdict.current_score}:
            gain = max(0.0, (verdict.candidate_score or 0.0) - (verdict.current_score or 0.0))
        if gain > 0:
            wins += weight
        else:
            losses += weight
        gains += weight * gain
        cost = record.n_rollouts + record.n_tokens / TOKENS_PER_ROLLOUT
        costs += weight * max(LEAST_COST, cost)
        weight *= FADING
    rate = _draw_rate(1 + wins, 1 + losses, rng)
    return rate * gains / (1 + wins) / (costs / (1 + wins + losses))


def _draw_rate(wins: float, losses: float, rng: Random) -> float:
    """Return a draw of a rate of success: the normal approximation of a beta distribution."""
    total = wins + losses
    mean = wins / total
    deviation = math.sqrt(mean * (1 - mean) / (total + 1))
    quantile = min(max(rng.random(), 1e-9), 1 - 1e-9)
    return min(1.0, max(0.0, NormalDist(mean, deviation).inv_cdf(quantile)))


# A step rolls out at most this part of a run's rollouts on train items, and at least one minibatch.
STEPS_PER_BUDGET = 30

# The part of a budget that is planned for rollouts.
TARGET_SHARE = 0.7


def estimate_rollouts(limits: BudgetConfig, spent: Usage, done: int) -> float:
    """Return how many rollouts fit the limits if ``done`` rollouts cost what was spent."""
    costs = (
        (limits.max_calls, spent.calls),
        (limits.max_tokens, spent.input_tokens + spent.output_tokens),
        (limits.max_usd, spent.usd or 0.0),
    )
    fitting = [limit * done / cost for limit, cost in costs if limit is not None and cost]
    return TARGET_SHARE * min(fitting, default=math.inf)


def count_step_items(planned: float, minibatch_size: int) -> int | None:
    """Return how many items a step may roll out if the run pays for so many; None: any number."""
    if planned == math.inf:
        return None
    return max(minibatch_size, int(planned) // STEPS_PER_BUDGET)


def count_new_rollouts(record: StepRecord, earlier: Sequence[StepRecord]) -> int:
    """Return how many rollouts a step took that no earlier step had.

    They are those of train items, of the race, and of the gate beyond what the race had measured.
    """
    known: set[str] = set()
    documents: set[str] = set()
    for step in earlier:
        documents |= {step.candidate_hash, step.skill_before}
        if step.skill_before == record.skill_before:
            known |= {*step.item_ids}
    verdict = record.verdict
    gate = 0
    if verdict.ranked is not None:
        gate = sum(result.n for result in verdict.ranked.passes)
    elif verdict.candidate is not None and record.candidate_hash not in documents:
        gate = verdict.candidate.n
    shared = sum(entry.n for entry in record.race if entry.skill_hash == record.candidate_hash)
    raced = sum(entry.n for entry in record.race)
    return len({*record.item_ids} - known) + raced + max(0, gate - shared)
