"""How many calls a calibration takes at least and at most.

The low count measures the critic once. The high count is a bound: every reply is sent back as often as allowed,
no score is found in the cache, and every candidate takes the most expensive way. Stored replies are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from reflact.calibration.checkpoint import CalibrationState, list_free_events, list_unscored_steps
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.curriculum import MAX_MEASURED_STEPS
from reflact.calibration.labeled_steps import LabeledStep, list_labeled_steps, list_pair_steps
from reflact.calibration.metrics import pairwise_accuracy
from reflact.calibration.perturbations import OTHER_PURPOSE_MISTAKE
from reflact.calibration.planning import DIRECTIONS, count_room, select_events
from reflact.calibration.significance import describe_test_power, find_missing_traces
from reflact.memory.cards import AnchorExclusions, compute_subject_hash
from reflact.memory.models import ContrastPair, Evaluation
from reflact.types import FrozenModel


class CalibrationCostEstimate(FrozenModel):
    """What a calibration takes; the counts of calls include those that an earlier start has paid for.

    Args:
        power_summary: What the held-out traces can show, in words.
        missing_reason: Why nothing could be tested, and what to do; None if something can.
        n_earlier_tests: Batches that were tested on these held-out traces before the calibration began.
        resumed: Whether an earlier start was stopped.
        is_finished: Whether nothing has changed since it ended, so that these counts are for another one.
    """

    n_training_traces: int
    n_held_out_traces: int
    n_held_out_steps: int
    n_anchor_steps: int
    max_rounds: int
    max_candidates: int
    min_calls: int
    max_calls: int
    power_summary: str
    missing_reason: str | None = None
    n_earlier_tests: int = 0
    resumed: bool = False
    is_finished: bool = False


def estimate_cost(
    calibration: CalibrationState,
    *,
    missing: str | None,
    anchors: Sequence[ContrastPair],
    settings: CalibratorSettings,
    n_samples: int,
    max_reasks: int,
) -> CalibrationCostEstimate:
    """Return what a calibration takes, with so many samples of each score, and reasks of each invalid reply."""
    contrast = settings.contrast
    steps, anchored = list_labeled_steps(calibration.split.held_out), list_pair_steps(anchors)
    traces = {step.trace for step in steps}
    testable = find_missing_traces(traces, n_earlier_tests=calibration.n_earlier_tests) is None
    rounds = settings.curriculum.max_rounds if testable and _can_be_ordered(steps) else 1
    excluded = AnchorExclusions.from_anchors(anchors)
    free = [list_free_events(trace, excluded) for trace in calibration.split.training]
    chosen = [event for events in free for event in select_events(events, contrast)]
    candidates = rounds * len(chosen) * contrast.candidates_per_event
    unproven = made = candidates
    if contrast.max_pairs is not None:
        unproven = min(candidates, rounds * contrast.max_unproven)
        made = min(candidates, unproven + rounds * len(DIRECTIONS) * count_room(contrast.max_pairs))
    compared = made if contrast.judged_pairs == "all" else unproven
    agreeing = unproven * any(event.label is None for event in chosen)
    purposes = {trace.purpose for trace in calibration.split.training}
    able = contrast.write_other_purposes or len(purposes) > 1
    elsewhere = unproven * (able and OTHER_PURPOSE_MISTAKE in settings.curriculum.mistakes)
    scores = (
        len(steps) * (2 + rounds)  # before, after, and after each round
        + len(steps) * 2 * rounds * testable  # both sides of each test
        + len(anchored) * 2
        + len(list_unscored_steps(calibration.split.training, excluded, contrast))  # before the first round
        + min(candidates, MAX_MEASURED_STEPS * (rounds - 1))  # which kinds the critic is weak on
        + (agreeing + elsewhere) * contrast.n_samples
    )
    written = unproven + elsewhere * contrast.write_other_purposes
    once = {compute_subject_hash(step.purpose, step.transition) for step in (*steps, *anchored)}
    return CalibrationCostEstimate(
        n_training_traces=len(calibration.split.training),
        n_held_out_traces=len(traces),
        n_held_out_steps=len(steps),
        n_anchor_steps=len(anchored),
        max_rounds=rounds,
        max_candidates=candidates,
        min_calls=len(once) * n_samples,
        max_calls=(scores * n_samples + written + compared * contrast.n_judges) * (1 + max_reasks),
        power_summary=describe_test_power(len(traces), n_earlier_tests=calibration.n_earlier_tests),
        missing_reason=missing,
        n_earlier_tests=calibration.n_earlier_tests,
        resumed=calibration.number is not None,
        is_finished=calibration.report is not None,
    )


def _can_be_ordered(steps: Sequence[LabeledStep]) -> bool:
    """Whether scores of these steps can be ordered, so that more rounds can follow."""
    evaluation = Evaluation(progress_before=0, progress_after=0, reasoning="whatever it says")
    return pairwise_accuracy([step.build_scored_step(evaluation) for step in steps]) is not None
