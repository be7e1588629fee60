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
from reflact.types import FrozenModel, RaceEntry, Rollout, Verdict

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


class SourceChoice(FrozenModel):
    """The source of a step; ``is_stalled``: no step gained anything lately."""

    name: str
    is_stalled: bool = False


def choose_source(
    sources: Sequence[str], records: Sequence[StepRecord], *, seed: int, step: int
) -> SourceChoice:
    """Return the source of the next step.

    Args:
        sources: The allowed sources, in the order in which they are tried first.
        records: The committed steps.
        seed: The run's seed.
        step: The next step.
    """
    usable = list(sources)
    tried = {record.source for record in records}
    untried = [name for name in usable if name not in tried]
    stalled = is_stalled(records)
    if untried:
        return SourceChoice(name=untried[0], is_stalled=stalled)
    if stalled and len(usable) > 1:
        usable = [name for name in usable if name != records[-1].source]
    rng = make_rng(seed, f"source/{step}")
    worths = {name: _draw_worth(name, records, rng) for name in usable}
    return SourceChoice(name=max(usable, key=lambda name: worths[name]), is_stalled=stalled)


def is_stalled(records: Sequence[StepRecord]) -> bool:
    """Whether none of the last steps gained anything."""
    last = records[-STALLED_STEPS:]
    return len(last) == STALLED_STEPS and not any(record.verdict.accepted for record in last)


def count_cost(record: StepRecord) -> float:
    """Return what a step cost, in rollouts."""
    return record.n_rollouts + record.n_tokens / TOKENS_PER_ROLLOUT


def _draw_worth(name: str, records: Sequence[StepRecord], rng: Random) -> float:
    """Return a draw of the expected gain of a source for each rollout that it costs."""
    own = [record for record in records if record.source == name]
    weights = [FADING ** (len(own) - 1 - place) for place in range(len(own))]
    gains = [_find_gain(record) for record in own]
    wins = sum(weight for weight, gain in zip(weights, gains, strict=True) if gain > 0)
    losses = sum(weights) - wins
    gain = (PRIOR_GAIN + sum(w * g for w, g in zip(weights, gains, strict=True))) / (1 + wins)
    costs = [max(LEAST_COST, count_cost(record)) for record in own]
    cost = (PRIOR_COST + sum(w * c for w, c in zip(weights, costs, strict=True))) / (
        1 + sum(weights)
    )
    return _draw_rate(1 + wins, 1 + losses, rng) * gain / cost


def _draw_rate(wins: float, losses: float, rng: Random) -> float:
    """Return a draw of a rate of success: the normal approximation of a beta distribution."""
    total = wins + losses
    mean = wins / total
    deviation = math.sqrt(mean * (1 - mean) / (total + 1))
    quantile = min(max(rng.random(), 1e-9), 1 - 1e-9)
    return min(1.0, max(0.0, NormalDist(mean, deviation).inv_cdf(quantile)))


def _find_gain(record: StepRecord) -> float:
    """Return the gain of an accepted candidate in the gate's metric; 0 for any other step."""
    verdict = record.verdict
    if not verdict.accepted or verdict.candidate_score is None or verdict.current_score is None:
        return 0.0
    return max(0.0, verdict.candidate_score - verdict.current_score)


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

    They are those of train items under the ``current`` document, of the race, and of the gate
    beyond what the race had measured of the ``candidate`` (hashes).
    """
    known = {
        item for record in earlier if record.skill_before == current for item in record.item_ids
    }
    gate = 0 if verdict.candidate is None else verdict.candidate.n
    if verdict.ranked is not None:
        gate = sum(result.n for result in verdict.ranked.passes)
    elif any(candidate in {record.candidate_hash, record.skill_before} for record in earlier):
        gate = 0
    shared = sum(entry.n for entry in race if entry.skill_hash == candidate)
    trained = len({rollout.item_id for rollout in rollouts} - known)
    return trained + sum(entry.n for entry in race) + max(0, gate - shared)
