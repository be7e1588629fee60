"""The race: candidates are measured on growing slices of the validation split; losers go early.

All candidates are compared with the current document on the same items. Decisions are pure
functions of the measured scores, so a resumed run repeats them. Source of the method: O. Maron and
A. Moore, Hoeffding races (NIPS 1993), here with Bayesian beliefs in place of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from reflact.concurrency import fan_out
from reflact.gate.ranked_decision import EffectBelief, ItemScores, compare_paired
from reflact.skills.document import digest_form
from reflact.types import Candidate, FrozenModel, RaceEntry, Rollout, Skill

# The least items of a first look.
FIRST_ITEMS = 6

# The least items of a first look if the budget has room for few candidates only.
FEWEST_ITEMS = 3

# A budget that pays for fewer whole passes than this has smaller slices.
FEW_CANDIDATES = 10

# A candidate is dropped if it is better than the current document with a smaller probability.
#
# A tie has about .33, so it is dropped: each slice holds items that the current document fails, and
# none was mended.
DROP_BELOW = 0.35

# A candidate is dropped if it is better than the leader with a smaller probability.
BEATEN_BELOW = 0.2

# Rolls a document out on validation items, in their order.
Measure = Callable[[Skill, Sequence[str]], Awaitable[Sequence[Rollout]]]


class RaceResult(FrozenModel):
    """What a race measured of each candidate, in order, and the index of the winner."""

    entries: tuple[RaceEntry, ...]
    winner: int | None = None
    unmeasured: tuple[Rollout, ...] = ()


class RaceSettings(FrozenModel):
    """The inputs of a race beside the candidates.

    Args:
        item_ids: All validation items, in the order of the race.
        slices: How many of them are measured after each round, growing; the last slice is left to
            the gate.
        variance: The variance of a score within an item; 0 for a deterministic target.
    """

    item_ids: tuple[str, ...]
    slices: tuple[int, ...]
    variance: float

    def compare(self, scores: ItemScores, others: ItemScores) -> EffectBelief | None:
        """Return the belief about the difference of two documents; None without a common item."""
        differences = []
        for item, score in scores.items():
            other = others.get(item)
            if score is not None and other is not None:
                differences.append(score - other)
        if not differences:
            return None
        return compare_paired(differences, n_items=len(self.item_ids), variance=self.variance)


def plan_slices(n_items: int, passes: float) -> tuple[int, ...]:
    """Return the sizes of a race's slices: a first look, half, and all ``n_items``.

    ``passes`` is how many whole passes over the items the rest of the budget pays for.
    """
    least, share = (FIRST_ITEMS, 4) if passes >= FEW_CANDIDATES else (FEWEST_ITEMS, 8)
    first = min(n_items, max(least, math.ceil(n_items / share)))
    half = max(first, math.ceil(n_items / 2))
    return tuple(sorted({first, half, n_items}))


def limit_candidates(
    candidates: Sequence[Candidate], slices: Sequence[int], rollouts: float
) -> Sequence[Candidate]:
    """Return as many candidates as so many rollouts pay for, at least one."""
    first = slices[0]
    half = slices[max(0, len(slices) - 2)]
    rest = slices[-1] - half
    n = len(candidates)
    while n > 1 and n * first + math.ceil(n / 2) * (half - first) + rest > rollouts:
        n -= 1
    return candidates[:n]


def order_items(item_ids: Sequence[str], current: ItemScores) -> tuple[str, ...]:
    """Return the items so that each slice holds solved and failed items in proportion.

    ``current`` are the current document's scores; items without one count as solved. Without this
    order, a first look might hold no item that a good document fails, and nothing could be gained.
    """
    failed = [item for item in item_ids if (score := current.get(item)) is not None and score < 1]
    others = [item for item in item_ids if item not in set(failed)]
    ranks = {}
    for group in (failed, others):
        for place, item in enumerate(group):
            ranks[item] = (place + 0.5) / len(group)
    # The first look holds a failed item, however few there are.
    ranks |= dict.fromkeys(failed[:1], 0.0)
    return tuple(sorted(item_ids, key=lambda item: ranks[item]))


async def run_race(
    candidates: Sequence[Candidate],
    current: Skill,
    settings: RaceSettings,
    *,
    measure: Measure,
    score: Callable[[Rollout], float | None],
) -> RaceResult:
    """Measure candidates and the current document on growing slices, and return who is left.

    Losers are dropped after each slice; one at most is left before the last slice, which the gate
    measures.
    """
    skills = [current, *(candidate.skill for candidate in candidates)]
    scores: list[dict[str, float | None]] = [{} for _ in skills]
    lost: list[Rollout] = []
    alive = list(range(1, len(skills)))
    done = 0
    looks = settings.slices[:-1] or settings.slices
    for size in looks:
        fresh = settings.item_ids[done:size]
        runners = [0, *alive]

        async def look(index: int, items: Sequence[str] = fresh) -> Sequence[Rollout]:
            return await measure(skills[index], items)

        rolled = await fan_out(look, runners)
        for index, rollouts in zip(runners, rolled, strict=True):
            scores[index] |= {rollout.item_id: score(rollout) for rollout in rollouts}
            lost += [rollout for rollout in rollouts if rollout.score is None]
        done = size
        most = 1 if size == looks[-1] else max(1, (len(alive) + 1) // 2)
        racing = {index: scores[index] for index in alive}
        alive = choose_survivors(racing, scores[0], settings, most=most)
        if not alive:
            break
    entries = []
    for index, candidate in enumerate(candidates, 1):
        is_judged = alive[:1] == [index]
        entries.append(_build_entry(candidate, scores[index], scores[0], settings, is_judged))
    winner = alive[0] - 1 if alive else None
    return RaceResult(entries=tuple(entries), winner=winner, unmeasured=tuple(lost))


def choose_survivors(
    racing: Mapping[int, ItemScores], current: ItemScores, settings: RaceSettings, *, most: int
) -> list[int]:
    """Return the candidates that stay in a race, the best first, the earlier one of equals.

    One of which nothing could be measured stays only if that holds for all.
    """
    beliefs = {index: settings.compare(scores, current) for index, scores in racing.items()}
    measured = {index: belief for index, belief in beliefs.items() if belief is not None}
    if not measured:
        return list(racing)[:most]
    hopeful = [index for index, belief in measured.items() if belief.p_better >= DROP_BELOW]
    hopeful.sort(key=lambda index: (-measured[index].mean, index))
    alive = hopeful[:1]
    for index in hopeful[1:]:
        belief = settings.compare(racing[index], racing[hopeful[0]])
        if belief is None or belief.p_better >= BEATEN_BELOW:
            alive.append(index)
    return alive[:most]


def _build_entry(
    candidate: Candidate,
    scores: ItemScores,
    current: ItemScores,
    settings: RaceSettings,
    is_judged: bool,
) -> RaceEntry:
    measured = {item: score for item, score in scores.items() if score is not None}
    before = [score for item in measured if (score := current.get(item)) is not None]
    belief = settings.compare(scores, current)
    return RaceEntry(
        label=candidate.label,
        skill_hash=candidate.skill.hash,
        form=digest_form(candidate.skill.text),
        n=len(measured),
        score=_average(list(measured.values())),
        current_score=_average(before),
        p_better=None if belief is None else belief.p_better,
        judged=is_judged,
    )


def _average(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
