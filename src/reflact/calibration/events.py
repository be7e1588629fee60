"""The closed union of what can happen in a calibration: what a calibrator tells whoever listens.

Beside an agent a calibrator raises nothing into the agent's loop: what goes wrong is told here, like
everything else. ``usage``, if an event has it, is what all calls of the calibrator consumed until then,
replies that were refused or found in a store included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from reflact.calibration.metrics import ScoredStep, pairwise_accuracy
from reflact.calibration.report import CalibrationReport, DropCount
from reflact.memory.models import PromotionEvidence
from reflact.records import Usage
from reflact.types import ShortReprModel


class ScoreSummary(ShortReprModel):
    """A critic's scores of some steps, in short; the report has all figures, with intervals.

    Args:
        n_steps: Steps that were scored.
        n_unscored: Steps of which the model gave no valid score.
        error: Mean absolute error of progress after, in 0..10; None if nothing was scored.
        accuracy: Pairwise accuracy, 0..1; None if nothing can be ordered.
    """

    n_steps: int
    n_unscored: int = 0
    error: float | None = None
    accuracy: float | None = None


class CalibrationStarted(ShortReprModel):
    """A call of ``calibrate`` began: so many traces, and steps whose correct score is known.

    ``resumed`` says that it goes on with one that was stopped; what happened then is told again.
    """

    kind: Literal["calibration_started"] = "calibration_started"
    n_training_traces: int
    n_held_out_traces: int
    n_held_out_steps: int
    n_anchor_steps: int
    resumed: bool = False


class RoundStarted(ShortReprModel):
    """A round of contrast pairs began, over so many traces."""

    kind: Literal["round_started"] = "round_started"
    number: int
    n_traces: int
    usage: Usage = Usage()


class CriticMeasured(ShortReprModel):
    """The critic was measured, before the first round or after the last."""

    kind: Literal["critic_measured"] = "critic_measured"
    when: Literal["before", "after"]
    held_out: ScoreSummary
    anchors: ScoreSummary
    usage: Usage = Usage()


class CalibrationFinished(ShortReprModel):
    """A call of ``calibrate`` ended; the last of its events."""

    kind: Literal["calibration_finished"] = "calibration_finished"
    report: CalibrationReport


class TraceAccepted(ShortReprModel):
    """A trace came up in the queue: it is learned from, or kept to test on."""

    kind: Literal["trace_accepted"] = "trace_accepted"
    trace_id: str
    use: Literal["learn", "hold_out"]


class TraceSkipped(ShortReprModel):
    """A trace was not taken: the queue was full, or the calibrator had stopped.

    ``dropped`` ones had been queued and made room for newer ones.
    """

    kind: Literal["trace_skipped"] = "trace_skipped"
    trace_id: str
    reason: Literal["full", "dropped", "stopped"]


class PairsGenerated(ShortReprModel):
    """The contrast pairs of a trace are in the store.

    ``n_quarantined`` of them the scan keeps back or rejected; ``dropped`` are the candidates that became none. Where the
    memory is ``is_memory_full`` nothing was made: its bound would have put away what waits or is promoted.
    """

    kind: Literal["pairs_generated"] = "pairs_generated"
    trace_id: str
    n_candidates: int
    n_pairs: int
    n_quarantined: int
    is_memory_full: bool = False
    dropped: tuple[DropCount, ...] = ()
    usage: Usage = Usage()


class PairBatchTested(ShortReprModel):
    """A batch of pairs was tested on held-out traces; promoted ones count from the next score on."""

    kind: Literal["pair_batch_tested"] = "pair_batch_tested"
    use: Literal["promote", "demote"] = "promote"
    evidence: PromotionEvidence
    usage: Usage = Usage()


class BatchTestPostponed(ShortReprModel):
    """A batch waits: there are too few held-out traces to decide on it."""

    kind: Literal["batch_test_postponed"] = "batch_test_postponed"
    n_pairs: int
    n_traces: int
    n_needed_traces: int
    explanation: str
    usage: Usage = Usage()


class TraceFailed(ShortReprModel):
    """Something went wrong with a trace, or beside any; the calibrator goes on with the next one."""

    kind: Literal["trace_failed"] = "trace_failed"
    trace_id: str | None
    error: str
    message: str


class CalibratorStopped(ShortReprModel):
    """The calibrator takes no further traces: its budget is spent, or its model cannot be reached at all."""

    kind: Literal["calibrator_stopped"] = "calibrator_stopped"
    reason: str


CalibrationEvent = Annotated[
    CalibrationStarted
    | RoundStarted
    | CriticMeasured
    | CalibrationFinished
    | TraceAccepted
    | TraceSkipped
    | PairsGenerated
    | PairBatchTested
    | BatchTestPostponed
    | TraceFailed
    | CalibratorStopped,
    Field(discriminator="kind"),
]

CalibrationEventCallback = Callable[[CalibrationEvent], None]
"""Gets an event; must not block."""

CALIBRATION_EVENT_ADAPTER: TypeAdapter[CalibrationEvent] = TypeAdapter(CalibrationEvent)
"""Reads such an event from JSON."""


def summarize_scores(scored: Sequence[ScoredStep | None]) -> ScoreSummary:
    """Return the figures of scores, of which None stands for a step without a valid one."""
    steps = [one for one in scored if one is not None]
    return ScoreSummary(
        n_steps=len(steps),
        n_unscored=len(scored) - len(steps),
        error=math.fsum(abs(one.error) for one in steps) / len(steps) if steps else None,
        accuracy=pairwise_accuracy(steps),
    )
