"""Which source a step asks for candidates: each once, then the one with the best expected gain for its cost.

The choice is a pure function of the committed steps, so a resumed run repeats it. Source of the method: Thompson
sampling (W. Thompson 1933), here of a source's rate of success times its mean gain, divided by its mean cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import NormalDist

from reflact.data import make_rng
from reflact.records import StepRecord
from reflact.types import FrozenModel

STALLED_STEPS = 3
"""Steps in a row without a gain after which another source is tried, with more candidates."""

TOKENS_PER_ROLLOUT = 80.0
"""Tokens of the optimizer that cost as much as a rollout: 20,000 tokens stand beside 240 rollouts."""

PRIOR_GAIN, PRIOR_COST = 0.05, 40.0
"""The gain in points and the cost in rollouts that are expected of a source before it was tried."""

FADING = 0.8
"""The weight of a source's earlier step, relative to its next one: what helped early need not help late."""


class SourceChoice(FrozenModel):
    """The source of a step; ``is_stalled``: no step gained anything lately, so it may ask for more candidates."""

    name: str
    is_stalled: bool = False


def choose_source(
    sources: Sequence[str], records: Sequence[StepRecord], *, seed: int, step: int, barred: Sequence[str] = ()
) -> SourceChoice:
    """Return the source of the next step.

    Args:
        sources: The allowed sources, in the order in which they are tried first.
        records: The committed steps.
        seed: The run's seed.
        step: The next step.
        barred: Sources that cannot give a candidate any more, such as those that need an optimizer without credit.
    """
    usable = [name for name in sources if name not in barred] or list(sources)
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
    cost = (PRIOR_COST + sum(w * count_cost(r) for w, r in zip(weights, own, strict=True))) / (
        1 + sum(weights)
    )
    return _draw_rate(1 + wins, 1 + losses, rng) * gain / cost


def _draw_rate(wins: float, losses: float, rng: Random) -> float:
    """Return a draw of a rate of success, by the normal approximation of a beta distribution; from ``random()`` alone."""
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
