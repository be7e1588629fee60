"""Room for pairs: no direction crowds out the others, and few candidates need calls."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from calibration_memory import ListMemory
from critic_flaws import FLAWS, Flaw, count_calls, make_flaw
from critic_world import event, round_of
from memory_pairs import make_pair
from reflact.calibration.config import PairSettings
from reflact.calibration.mistakes import AskedMistakePlan, CandidatePlan, ImpossiblePlan
from reflact.calibration.planning import (
    GenerationTask,
    TracePlan,
    choose_batch,
    count_room,
    draw_candidates,
    plan_jobs,
    plan_labeled_jobs,
)
from reflact.memory.models import ContrastPair, Evaluation

MOST_CALLS = 600


@pytest.mark.parametrize(
    ("flaw", "before", "after"),
    [
        ("flattered", 1.76, 0.0),
        ("exact", 0.0, 0.0),
        pytest.param("inflated", 4.0, 1.0, marks=pytest.mark.slow),
    ],
)
async def test_forty_traces_take_at_most_600_calls(flaw: Flaw, before: float, after: float) -> None:
    """At the defaults, whatever the critic does; what it can learn is learned, and without error it is only measured."""
    assert flaw in FLAWS
    memory = ListMemory()
    report, calls = await count_calls(make_flaw(flaw), memory)
    assert calls.total() == report.usage.calls <= MOST_CALLS
    assert report.n_candidates >= 320 * report.n_rounds  # pairs of measured mistakes come on top
    assert report.n_candidates == report.n_pairs + sum(drop.n_candidates for drop in report.dropped)
    assert report.held_out.before.error.value == pytest.approx(before, abs=0.01)
    assert report.held_out.after.error.value <= after
    if flaw == "exact":
        assert (calls.total(), report.n_rounds, report.tests) == (80, 0, ())
        assert "nothing to learn" in report.end_reason
    for test in report.tests:
        pairs = [one.pair for one in await memory.pairs(test.pair_ids)]
        directions = Counter(pair.right.direction for pair in pairs)
        assert len(pairs) <= 120
        assert max(directions.values()) <= 40


def moved(number: int, delta: float) -> ContrastPair:
    """Return a pair whose right side moves by so much."""
    right = Evaluation(progress_before=5, progress_after=5 + delta, reasoning=f"right {number}")
    wrong = Evaluation(progress_before=5, progress_after=9, reasoning="wrong")
    return make_pair(number).model_copy(update={"right": right, "wrong": wrong})


def test_no_direction_crowds_out_the_others() -> None:
    """Of 54 pairs, 34 of which stay, at most a third of the batch stays; the order of the pairs makes no difference."""
    pairs = [moved(n, 1 if n < 9 else -1 if n < 20 else 0) for n in range(54)]
    batch = choose_batch(pairs, max_pairs=30)
    assert Counter(pair.right.direction for pair in batch) == {"rises": 9, "stays": 10, "falls": 10}
    assert choose_batch(Random(1).sample(pairs, 54), max_pairs=30) == batch
    assert choose_batch(pairs, max_pairs=None) == tuple(pairs)


SETTINGS = PairSettings()


async def plans_of(n_traces: int, *, gold: bool = True, n_steps: int = 4) -> dict[str, TracePlan]:
    """Return the candidates of traces; every second step stays."""
    plans = {}
    for trace in range(n_traces):
        task = GenerationTask("Write it.", f"t{trace}", round_of())
        numbers = range(trace * n_steps, (trace + 1) * n_steps)
        events = [event(n, after=2 + n % 2 * 3, gold=gold, changed=n % 2 == 1) for n in numbers]
        plan = await plan_jobs(events, task, SETTINGS)
        plans[task.trace_id] = await plan_labeled_jobs(plan, task, SETTINGS, can_sample=True)
    return plans


def ways_of(plans: dict[str, TracePlan]) -> list[CandidatePlan | None]:
    """Return the candidates that are left."""
    ways = [way for name in sorted(plans) for job in plans[name].jobs for way in job.plans]
    return [way for way in ways if not isinstance(way, ImpossiblePlan)]


@pytest.mark.parametrize(
    ("max_pairs", "max_unproven"), [(3, 0), (12, 2), (48, 8), (300, 4), (10_000, 10_000)]
)
async def test_candidates_have_the_room_of_their_direction(max_pairs: int, max_unproven: int) -> None:
    """Of each direction a third is drawn at most, and of those that need calls no more than may be."""
    plans = await plans_of(12)
    drawn = draw_candidates(plans, max_pairs=max_pairs, max_unproven=max_unproven, seed=0, label="x")
    ways = ways_of(drawn)
    proven = [way for way in ways if isinstance(way, ContrastPair)]
    directions = Counter(pair.right.direction for pair in proven)
    directions.update(w.step.right.direction for w in ways if isinstance(w, AskedMistakePlan))
    assert max(directions.values()) <= count_room(max_pairs)
    assert len(ways) - len(proven) <= max_unproven
    shuffled = dict(Random(3).sample(sorted(plans.items()), len(plans)))
    assert (
        draw_candidates(shuffled, max_pairs=max_pairs, max_unproven=max_unproven, seed=0, label="x") == drawn
    )
    if max_pairs == 10_000:
        assert len(ways) == len(ways_of(plans))


async def test_models_are_asked_where_proven_pairs_are_scarce() -> None:
    """No perturbed input rises, so mistakes on true rising steps replace perturbed inputs, one for each step."""
    drawn = draw_candidates(await plans_of(12), max_pairs=48, max_unproven=8, seed=0, label="x")
    asked = [way for way in ways_of(drawn) if not isinstance(way, ContrastPair)]
    assert len(asked) == 8
    assert all(isinstance(way, AskedMistakePlan) and way.step.right.delta > 0 for way in asked)
    assert len({way.step.event.step for way in asked if isinstance(way, AskedMistakePlan)}) == 8


async def test_steps_without_a_label_are_drawn_last() -> None:
    """Their direction is unknown until samples agree, so they have the calls that labelled ones leave."""
    bare = await plans_of(3, gold=False)
    assert len(ways_of(draw_candidates(bare, max_pairs=48, max_unproven=8, seed=0, label="x"))) == 8
    mixed = {**{f"bare {name}": plan for name, plan in bare.items()}, **await plans_of(12)}
    drawn = draw_candidates(mixed, max_pairs=48, max_unproven=8, seed=0, label="x")
    assert None not in ways_of(drawn)
