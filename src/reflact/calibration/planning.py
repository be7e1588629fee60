"""Which candidates the traces have in a round, how each is to be made, and which have room; nothing is asked.

Perturbed inputs nearly always have less effect than the true ones. Without limits, most right sides say that nothing has
changed, and a critic that sees such examples learns to say that. So a batch has as many pairs whose right side rises as
stays and falls, and few that models take part in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Final, NamedTuple

from reflact.calibration.curriculum import RoundPlan, deal_mistakes
from reflact.calibration.mistakes import (
    KNOWN_MISTAKES,
    AskedMistakePlan,
    CandidatePlan,
    ContrastSettings,
    ImpossiblePlan,
    Mistake,
    OtherPurposePlan,
    compute_reach,
    find_other_purpose,
    plan_candidates,
)
from reflact.calibration.perturbations import DistanceBand, StepToContrast, build_pairs, find_reference
from reflact.concurrency import run_in_thread
from reflact.data import shuffle
from reflact.errors import ConfigError
from reflact.memory.models import ContrastPair, Direction, Evaluation, ScoreEvent
from reflact.types import digest_json


class GenerationTask(NamedTuple):
    """What the pairs of a trace are to be in one round.

    Args:
        round_plan: Which mistakes are asked for, and how near to right; see ``curriculum.plan_next_round``.
        known_pair_ids: Ids of pairs that were there before the round, which are not generated again.
        other_purposes: The purposes of other traces.
    """

    purpose: str
    trace_id: str
    round_plan: RoundPlan
    known_pair_ids: Container[str] = ()
    other_purposes: Sequence[str] = ()


class EventJob(NamedTuple):
    """An event, the mistakes it was dealt, the number of its first candidate, and how each candidate is made.

    A plan is None until it is made: that of a step without a label needs samples that agree. ``on_true_input`` has, for
    candidates with a perturbed input, the same mistake on the true one, which a model would have to write.
    """

    event: ScoreEvent
    mistakes: tuple[str, ...]
    first_candidate: int
    plans: tuple[CandidatePlan | None, ...]
    on_true_input: tuple[AskedMistakePlan | None, ...] = ()


class TracePlan(NamedTuple):
    """The candidates of a trace; ``n_skipped`` events were not selected."""

    jobs: tuple[EventJob, ...]
    n_skipped: int


def select_events(events: Sequence[ScoreEvent], settings: ContrastSettings) -> tuple[ScoreEvent, ...]:
    """Return the events to learn from: those that moved enough, by critic or label, and still ones.

    If neither spoke, it counts whether the state changed: agreement has still to say by how much.
    """
    return tuple(event for event in events if _is_selected(event, settings))


def _is_selected(event: ScoreEvent, settings: ContrastSettings) -> bool:
    judged = (event.evaluation, event.label)
    deltas = [one.delta for one in judged if one is not None and one.delta is not None]
    changed = event.transition.changes_state
    if settings.include_no_change and (deltas[:1] == [0] or not changed):
        return True
    return any(delta != 0 and abs(delta) >= settings.min_delta for delta in deltas) if deltas else changed


async def plan_jobs(
    events: Sequence[ScoreEvent], task: GenerationTask, settings: ContrastSettings
) -> TracePlan:
    """Return the candidates of a trace: events with the mistakes that they are dealt. Repeated events have no way."""
    states = [state for event in events for state in event.transition.payloads]
    chosen, repeated = await run_in_thread(partial(_select_with_repeats, events, settings), *states)
    per_event, seed = settings.candidates_per_event, settings.seed
    hands = deal_mistakes(
        task.round_plan, trace_id=task.trace_id, n_events=len(chosen), per_event=per_event, seed=seed
    )
    copy = ImpossiblePlan("duplicate", "an earlier step of this trace is equal")
    jobs = (
        EventJob(event, hand, n * per_event, ((copy if is_repeated else None),) * len(hand))
        for n, (event, hand, is_repeated) in enumerate(zip(chosen, hands, repeated, strict=True))
    )
    return TracePlan(tuple(jobs), n_skipped=len(events) - len(chosen))


async def plan_labeled_jobs(
    plan: TracePlan, task: GenerationTask, settings: ContrastSettings, *, can_sample: bool
) -> TracePlan:
    """Return a plan in which the candidates of labelled events know how they are made."""
    jobs = []
    for job in plan.jobs:
        if job.event.label is not None and None in job.plans:
            planned = partial(plan_ways, job, task, settings, can_sample=can_sample)
            plans = await run_in_thread(planned, *job.event.transition.payloads)
            job = job._replace(plans=plans, on_true_input=_plan_on_true_input(job, plans, task, settings))  # noqa: PLW2901
        jobs.append(job)
    return plan._replace(jobs=tuple(jobs))


def _plan_on_true_input(
    job: EventJob, plans: Sequence[CandidatePlan], task: GenerationTask, settings: ContrastSettings
) -> tuple[AskedMistakePlan | None, ...]:
    right = find_reference(job.event)
    if right is None:
        return (None,) * len(plans)
    mistakes, band = collect_mistakes(task.round_plan, settings), _find_band(task)
    step = StepToContrast(job.event, right, task.purpose, task.trace_id, band)
    asked = {plan.mistake.name for plan in plans if isinstance(plan, AskedMistakePlan)}
    found: list[AskedMistakePlan | None] = []
    for name, plan in zip(job.mistakes, plans, strict=True):
        is_perturbed = isinstance(plan, ContrastPair) and plan.construction != "observed"
        reach = (
            compute_reach(mistakes[name], right, band=band) if is_perturbed and name not in asked else None
        )
        found.append(None if reach is None else AskedMistakePlan(step, mistakes[name], reach, 0))
    return tuple(found)


def _find_band(task: GenerationTask) -> DistanceBand:
    return DistanceBand(task.round_plan.nearest, task.round_plan.farthest)


def plan_ways(
    job: EventJob,
    task: GenerationTask,
    settings: ContrastSettings,
    *,
    can_sample: bool,
    agreed: Evaluation | None = None,
) -> tuple[CandidatePlan, ...]:
    """Return how each candidate of an event is made; ``agreed`` is right if there is no label.

    Only with a critic that can give samples, the step is looked at under another purpose.
    """
    right = agreed or find_reference(job.event)
    if right is None:
        explanation = "the label has the progress after, and not the progress before"
        return (ImpossiblePlan("unverified", explanation),) * len(job.mistakes)
    band = _find_band(task)
    mistakes = collect_mistakes(task.round_plan, settings)
    step = StepToContrast(job.event, right, task.purpose, task.trace_id, band)
    return plan_candidates(
        [mistakes[name] for name in job.mistakes],
        step,
        ready_pairs=[pair for pair in build_pairs(step) if pair.id not in task.known_pair_ids],
        other_purpose=_plan_other_purpose(step, task, settings) if can_sample else None,
    )


def collect_mistakes(round_plan: RoundPlan, settings: ContrastSettings) -> Mapping[str, Mistake]:
    """Return all kinds of mistakes by name.

    Raises:
        ConfigError: The round asks for a kind that nobody described.
    """
    known = {mistake.name: mistake for mistake in (*KNOWN_MISTAKES, *settings.mistakes)}
    missing = sorted(kind.mistake for kind in round_plan.shares if kind.mistake not in known)
    if missing:
        raise ConfigError(
            f"contrast.mistakes: the round asks for {', '.join(missing)}, which have no description; add "
            "their names and descriptions"
        )
    return known


def _plan_other_purpose(
    step: StepToContrast, task: GenerationTask, settings: ContrastSettings
) -> OtherPurposePlan | None:
    """Return the round's look at a step under another purpose, each purpose in one round only."""
    purpose = find_other_purpose(step.purpose, task.other_purposes, index=task.round_plan.number - 1)
    is_possible = purpose is not None or settings.write_other_purposes
    return OtherPurposePlan(step, purpose) if is_possible else None


def _select_with_repeats(
    events: Sequence[ScoreEvent], settings: ContrastSettings
) -> tuple[tuple[ScoreEvent, ...], tuple[bool, ...]]:
    """Return the selected events, and for each whether an earlier one equals it but for its number."""
    chosen = select_events(events, settings)
    contents = [
        digest_json(
            {
                **event.model_dump(mode="json", exclude={"step", "transition"}),
                "transition": event.transition.json_object,
            }
        )
        for event in chosen
    ]
    first = {content: n for n, content in reversed(list(enumerate(contents)))}
    return chosen, tuple(first[content] != n for n, content in enumerate(contents))


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
