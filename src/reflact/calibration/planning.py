"""Which candidates a trace has in a round, and how each is to be made; nothing is asked."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

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
from reflact.errors import ConfigError
from reflact.memory.models import ContrastPair, Evaluation, ScoreEvent
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
