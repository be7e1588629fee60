"""Room for pairs: a batch has as many whose right side rises as stays and falls, and few that models take part in.

Perturbed inputs nearly always have less effect than the true ones. Without limits, most right sides say that nothing has
changed, and a critic that sees such examples learns to say that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

from reflact.calibration.mistakes import (
    AskedMistakePlan,
    CandidatePlan,
    ImpossiblePlan,
    OtherPurposePlan,
)
from reflact.calibration.planning import TracePlan
from reflact.data import shuffle
from reflact.memory.models import ContrastPair, Direction

DIRECTIONS: Final[tuple[Direction, ...]] = ("rises", "falls", "stays")


CROWDED: Final = ImpossiblePlan("no_room", "the round has enough other candidates of this direction")


def count_room(max_pairs: int) -> int:
    """Return how many pairs of one direction a batch has at most: a third, rounded up."""
    return ceil(max_pairs / len(DIRECTIONS))


def choose_batch(pairs: Sequence[ContrastPair], *, max_pairs: int | None) -> tuple[ContrastPair, ...]:
    """Return the pairs of a batch: as many of each direction as there is room for, the first by their hashes."""
    if max_pairs is None:
        return tuple(pairs)
    found: dict[Direction, list[ContrastPair]] = defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: pair.id):
        found[pair.right.direction].append(pair)
    chosen = [pair for same in found.values() for pair in same[: count_room(max_pairs)]]
    return tuple(sorted(chosen, key=lambda pair: pair.id))


class _Candidate(NamedTuple):
    """A candidate with its position and its direction; None: only samples will tell.

    ``replaces_proven``: It is a mistake on the true input, in place of a pair with a perturbed one.
    """

    trace_id: str
    job: int
    number: int
    plan: CandidatePlan | None
    replaces_proven: bool = False

    @property
    def position(self) -> tuple[str, int, int]:
        return self.trace_id, self.job, self.number

    @property
    def is_proven(self) -> bool:
        return isinstance(self.plan, ContrastPair)

    @property
    def direction(self) -> Direction | None:
        match self.plan:
            case ContrastPair():
                return self.plan.right.direction
            case AskedMistakePlan():
                return self.plan.step.right.direction
            case OtherPurposePlan():
                return "stays"  # for another purpose, a step nearly always has no effect
            case _:
                return None


def draw_candidates(
    plans: Mapping[str, TracePlan],
    *,
    max_pairs: int,
    max_unproven: int,
    seed: int,
    label: str,
    taken: Sequence[ContrastPair] = (),
) -> dict[str, TracePlan]:
    """Return the plans of a round by trace id, in which candidates without room are impossible.

    Candidates are drawn by chance, whatever the order of traces. Those that models take part in go to the direction that
    has the fewest proven ones first, and to steps without a label last. If a direction has too few candidates, mistakes
    on true inputs replace perturbed inputs there. Proven candidates fill the room that is left. Pairs that are in the batch
    already have ``taken`` some of it.
    """
    candidates = shuffle(
        [one for name in sorted(plans) for one in _list_candidates(name, plans[name])], seed, label
    )
    used = Counter(pair.right.direction for pair in taken)
    room = {direction: count_room(max_pairs) - used[direction] for direction in DIRECTIONS}
    drawn = _draw(candidates, room=room, max_unproven=max_unproven)
    return {trace_id: _keep_drawn(plan, trace_id, drawn) for trace_id, plan in plans.items()}


def _list_candidates(trace_id: str, plan: TracePlan) -> Iterator[_Candidate]:
    for n, job in enumerate(plan.jobs):
        for number, way in enumerate(job.plans):
            if not isinstance(way, ImpossiblePlan):
                yield _Candidate(trace_id, n, number, way)
        for number, asked in enumerate(job.on_true_input):
            if asked is not None:
                yield _Candidate(trace_id, n, number, asked, replaces_proven=True)


def _draw(
    candidates: Sequence[_Candidate], *, room: Mapping[Direction, int], max_unproven: int
) -> dict[tuple[str, int, int], _Candidate]:
    n_proven = Counter(one.direction for one in candidates if one.is_proven)
    drawn: dict[tuple[str, int, int], _Candidate] = {}
    for direction in (*sorted(DIRECTIONS, key=lambda direction: n_proven[direction]), None):
        n_left = max_unproven - len(drawn)
        unproven = [one for one in candidates if not one.is_proven and one.direction == direction]
        unproven.sort(key=lambda one: one.replaces_proven)
        n_most = n_left if direction is None else min(n_left, room[direction])
        for one in _skip_replacements_of_one_step(unproven)[:n_most]:
            drawn[one.position] = one
    n_drawn = Counter(one.direction for one in drawn.values())
    for direction in DIRECTIONS:
        proven = [
            one
            for one in candidates
            if one.is_proven and one.direction == direction and one.position not in drawn
        ]
        drawn |= {one.position: one for one in proven[: room[direction] - n_drawn[direction]]}
    return drawn


def _skip_replacements_of_one_step(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return candidates with at most one replacement of each step."""
    seen: set[tuple[str, int]] = set()
    found = []
    for one in candidates:
        if one.replaces_proven and one.position[:2] in seen:
            continue
        if one.replaces_proven:
            seen.add(one.position[:2])
        found.append(one)
    return found


def _keep_drawn(
    plan: TracePlan, trace_id: str, drawn: Mapping[tuple[str, int, int], _Candidate]
) -> TracePlan:
    def choose(job: int, number: int, way: CandidatePlan | None) -> CandidatePlan | None:
        if isinstance(way, ImpossiblePlan):
            return way
        one = drawn.get((trace_id, job, number))
        return CROWDED if one is None else one.plan

    jobs = (
        job._replace(
            plans=tuple(choose(n, number, way) for number, way in enumerate(job.plans)), on_true_input=()
        )
        for n, job in enumerate(plan.jobs)
    )
    return plan._replace(jobs=tuple(jobs))
