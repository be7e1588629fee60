"""How many calls a calibration takes at least and at most, before any is made. Pure.

The low count is what measuring the critic once takes. The high count is a bound: every reply is sent back as
often as may be, every score is asked for anew each time, every candidate takes every way that it may take.
What the store of calls holds already costs nothing and is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from reflact.calibration.config import CalibratorSettings
from reflact.calibration.contrast import selected
from reflact.calibration.course import Course, free_events
from reflact.calibration.metrics import measure_accuracy
from reflact.calibration.mistakes import ELSEWHERE_KIND
from reflact.calibration.replay import Step, steps_in, steps_of
from reflact.calibration.review import enough, outlook
from reflact.memory import ContrastPair, Evaluation
from reflact.memory_cards import Anchored, subject_of
from reflact.types import FrozenModel


class CostEstimate(FrozenModel):
    """What a calibration takes.

    Args:
        learn: Traces that pairs are made of.
        held_out: Traces that test and measure.
        steps: Steps of these whose correct score is known.
        anchors: Steps that anchors speak of.
        rounds: Rounds of contrast pairs, at most.
        candidates: Candidates of all rounds, at most.
        calls_low: Calls that it takes at least.
        calls_high: Calls that it takes at most.
        outlook: What the held-out traces can show, or what is missing, in words.
        missing: Why nothing would come to a test, and what to do; None if something can.
        tests_before: Batches that were tested on these held-out traces before the calibration began.
        resumed: Whether it was begun and stopped; what it asked before is in these numbers and costs nothing.
        over: Whether it is over and nothing has changed since, so that these numbers are for another one.
    """

    learn: int
    held_out: int
    steps: int
    anchors: int
    rounds: int
    candidates: int
    calls_low: int
    calls_high: int
    outlook: str
    missing: str | None = None
    tests_before: int = 0
    resumed: bool = False
    over: bool = False


def estimate_cost(
    course: Course,
    *,
    missing: str | None,
    anchors: Sequence[ContrastPair],
    settings: CalibratorSettings,
    samples: int,
    reasks: int,
) -> CostEstimate:
    """Return what a calibration takes.

    Args:
        course: The calibration as it begins, or as it began if it was stopped.
        missing: Why nothing would come to a test.
        anchors: Gold pairs that are measured.
        settings: How pairs are made and tested.
        samples: Samples of each of the critic's scores.
        reasks: How often an invalid reply is sent back at most.
    """
    contrast = settings.contrast
    steps, anchored = steps_of(course.parts.held_out), steps_in(anchors)
    traces = {step.trace for step in steps}
    testable = enough(traces, before=course.tests_before) is None
    rounds = settings.curriculum.rounds if testable and _ordered(steps) else 1
    free = [free_events(trace, Anchored.of(anchors)) for trace in course.parts.learn]
    chosen = [event for events in free for event in selected(events, contrast)]
    events, candidates = rounds * len(chosen), rounds * len(chosen) * contrast.per_event
    agreeing = events * any(event.gold is None for event in chosen)
    purposes = {trace.purpose for trace in course.parts.learn}
    able = contrast.near_misses or len(purposes) > 1
    elsewhere = events * (able and ELSEWHERE_KIND in settings.curriculum.mistakes)
    scores = (
        len(steps) * (2 + rounds)  # before, after, and after each round
        + len(steps) * 2 * rounds * testable  # both sides of each test
        + len(anchored) * 2
        + candidates * (rounds > 1)  # which kinds the critic is weak on
        + (agreeing + elsewhere) * contrast.samples
    )
    written = candidates + elsewhere * contrast.near_misses
    once = {subject_of(step.purpose, step.transition) for step in (*steps, *anchored)}
    return CostEstimate(
        learn=len(course.parts.learn),
        held_out=len(traces),
        steps=len(steps),
        anchors=len(anchored),
        rounds=rounds,
        candidates=candidates,
        calls_low=len(once) * samples,
        calls_high=(scores * samples + written + candidates * contrast.judges) * (1 + reasks),
        outlook=outlook(len(traces), before=course.tests_before),
        missing=missing,
        tests_before=course.tests_before,
        resumed=course.resumed,
        over=course.report is not None,
    )


def _ordered(steps: Sequence[Step]) -> bool:
    """Whether a critic's scores of these steps can be ordered, so that rounds can go on by its accuracy."""
    said = Evaluation(phi_before=0, phi_after=0, reasoning="whatever it says")
    return measure_accuracy([step.scored(said) for step in steps]) is not None
