"""Which mistakes the next round asks for, how near to right, and when rounds end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import NamedTuple

from reflact.calibration.metrics import ScoredStep, pairwise_accuracy
from reflact.calibration.pairs import MIN_DISTANCE, DistanceBand
from reflact.calibration.significance import MIN_ERROR_DROP
from reflact.data import make_rng, shuffle
from reflact.gate.intervals import wilson_interval

# Wrong scores may always lie this far apart, however late the round.
MIN_BAND_WIDTH = 0.5

# The part of a round that goes to all kinds equally, whatever was measured.
EXPLORED_SHARE = 0.5

# The least rise of held-out pairwise accuracy for which another round follows.
MIN_GAIN = 0.01

# On so many steps of a round's pairs at most, the critic's weak kinds of mistakes are measured: the
# first by hash.
MAX_MEASURED_STEPS = 24

# Equal inputs give equal rounds; nothing is gained by another draw.
SEED = 0


class RoundPlan(NamedTuple):
    """What a round asks for: the share of each kind of mistake, and the distance of scores."""

    number: int
    shares: Mapping[str, float]
    band: DistanceBand


class RoundMeasurement(NamedTuple):
    """A critic's pairwise accuracy and mean absolute error on held-out steps.

    ``by_mistake`` has, for each kind, how many steps of pairs it scored wrongly, and how many it
    scored.
    """

    accuracy: float
    error: float
    by_mistake: Mapping[str, tuple[int, int]]


def measure(
    held_out: Sequence[ScoredStep | None], learned: Sequence[ScoredStep | None] = ()
) -> RoundMeasurement | None:
    """Return what a curriculum may know: accuracy on held-out steps, kinds on those that are
    learned from.

    Held-out steps never say which kinds the critic is weak on: tests stay blind to how their
    batches were made. None if no held-out steps can be ordered.
    """
    measured = [step for step in held_out if step is not None]
    accuracy = pairwise_accuracy(measured)
    if accuracy is None:
        return None
    n_steps: Counter[str] = Counter()
    n_wrong: Counter[str] = Counter()
    for step in learned:
        if step is not None:
            n_steps.update(step.mistakes)
            n_wrong.update(step.mistakes if not step.is_right else ())
    by_mistake = {mistake: (n_wrong[mistake], n_steps[mistake]) for mistake in sorted(n_steps)}
    return RoundMeasurement(accuracy, fmean(abs(step.error) for step in measured), by_mistake)


def plan_next_round(
    history: Sequence[RoundMeasurement], mistakes: Sequence[str], *, max_rounds: int
) -> RoundPlan | None:
    """Return the next round, or None if all were made or neither accuracy nor error still moves.

    Half of a round is dealt to all kinds equally. The other half goes by the lower 95% bound of the
    critic's error rate on each kind. The room for distances beyond the smallest one halves from
    round to round.

    Args:
        history: How the critic was measured before the first round and after each; may be empty
            before it.
        mistakes: The names of all kinds.
        max_rounds: The largest number of rounds.
    """
    n_done = max(0, len(history) - 1)
    if n_done >= max_rounds or has_plateaued(history):
        return None
    width = max(MIN_BAND_WIDTH, (10 - MIN_DISTANCE) * 0.5**n_done)
    by_mistake = history[-1].by_mistake if history else {}
    return RoundPlan(
        number=n_done + 1,
        shares=_compute_shares(mistakes, by_mistake),
        band=DistanceBand(MIN_DISTANCE, min(10.0, MIN_DISTANCE + width)),
    )


def has_plateaued(history: Sequence[RoundMeasurement]) -> bool:
    """Whether the last round gained too little over the best before it, in accuracy and in error.

    Accuracy alone is not enough: a critic that inflates evenly orders all states rightly from the
    start.
    """
    if len(history) < 2:
        return False
    rise = history[-1].accuracy - max(one.accuracy for one in history[:-1])
    drop = min(one.error for one in history[:-1]) - history[-1].error
    return rise < MIN_GAIN and drop < MIN_ERROR_DROP


def _compute_shares(
    mistakes: Sequence[str], by_mistake: Mapping[str, tuple[int, int]]
) -> Mapping[str, float]:
    equal = 1 / len(mistakes)
    weakness = dict.fromkeys(mistakes, 0.0)
    for mistake in weakness.keys() & by_mistake.keys():
        weakness[mistake] = wilson_interval(*by_mistake[mistake])[0]
    total = sum(weakness.values())
    parts = {mistake: weak / total if total > 0 else equal for mistake, weak in weakness.items()}
    return {
        mistake: EXPLORED_SHARE * equal + (1 - EXPLORED_SHARE) * parts[mistake]
        for mistake in mistakes
    }


def deal_mistakes(
    plan: RoundPlan, *, trace_id: str, n_events: int, per_event: int
) -> tuple[tuple[str, ...], ...]:
    """Return for each event of a trace which kinds of mistakes to make pairs of: ``per_event`` of
    them.

    The kinds have their shares, rounded by chance. An event gets a kind twice only if it must.
    """
    label = f"contrast/deal/{plan.number}/{trace_id}"
    counts = apportion(
        shuffle(plan.shares.items(), SEED, f"{label}/kinds"),
        n_events * per_event,
        offset=make_rng(SEED, label).random(),
    )
    row = [
        kind
        for kind, count in sorted(counts.items(), key=lambda k: (-k[1], k[0]))
        for _ in range(count)
    ]
    hands: list[list[str]] = [[] for _ in range(n_events)]
    order = shuffle(range(n_events), SEED, f"{label}/events")
    for index, kind in enumerate(row):
        hands[order[index % n_events]].append(kind)
    return tuple(tuple(hand) for hand in hands)


def apportion(
    shares: Sequence[tuple[str, float]], n_places: int, *, offset: float
) -> dict[str, int]:
    """Return how many of so many places each kind gets: its share, rounded up or down without bias.

    Systematic sampling (W. G. Madow, 1949): the shares lie end to end, and a place goes to the kind
    in whose part its mark falls. Marks lie one place apart, the first one at ``offset`` in [0, 1).
    """
    total = sum(share for _, share in shares)
    counts = {}
    start = 0.0
    n_before = ceil(-offset)
    for kind, share in shares:
        start += share
        n_after = ceil(start / total * n_places - offset)
        counts[kind] = n_after - n_before
        n_before = n_after
    return counts
