"""The closed union of events of a calibration.

``usage`` of an event is that of all calls of the calibrator so far, invalid and stored replies
included.
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
    """A critic's scores of some steps: mean absolute error (0..10) and pairwise accuracy (0..1), if
    known.

    ``n_unscored`` counts steps without a valid score.
    """

    n_steps: int
    n_unscored: int = 0
    error: float | None = None
    accuracy: float | None = None


class CalibrationStarted(ShortReprModel):
    """``calibrate`` began; if it is ``resumed``, the events before the stop come again."""

    kind: Literal["calibration_started"] = "calibration_started"
    n_training_traces: int
    n_held_out_traces: int
    n_held_out_steps: int
    n_anchor_steps: int
    resumed: bool = False


class RoundStarted(ShortReprModel):
    """A round of contrast pairs began."""

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
    """A trace was taken from the queue, to learn from it or to test on it."""

    kind: Literal["trace_accepted"] = "trace_accepted"
    trace_id: str
    use: Literal["learn", "hold_out"]


class TraceSkipped(ShortReprModel):
    """A trace was not queued, or it was ``dropped`` from the queue for a newer one."""

    kind: Literal["trace_skipped"] = "trace_skipped"
    trace_id: str
    reason: Literal["full", "dropped", "stopped"]


class PairsGenerated(ShortReprModel):
    """The contrast pairs of a trace are in the store.

    The scan quarantined or rejected ``n_quarantined`` of them.
    """

    kind: Literal["pairs_generated"] = "pairs_generated"
    trace_id: str
    n_candidates: int
    n_pairs: int
    n_quarantined: int
    dropped: tuple[DropCount, ...] = ()
    usage: Usage = Usage()


class PairBatchTested(ShortReprModel):
    """A batch was tested on held-out traces; promoted pairs count from the next score on."""

    kind: Literal["pair_batch_tested"] = "pair_batch_tested"
    use: Literal["promote", "demote"] = "promote"
    evidence: PromotionEvidence
    usage: Usage = Usage()


class BatchTestPostponed(ShortReprModel):
    """A batch waits: there are too few held-out traces to decide on it."""

    kind: Literal["batch_test_postponed"] = "batch_test_postponed"
    n_pairs: int
    n_traces: int
    explanation: str
    usage: Usage = Usage()


class TraceFailed(ShortReprModel):
    """An error occurred with a trace; the calibrator goes on with the next one."""

    kind: Literal["trace_failed"] = "trace_failed"
    trace_id: str | None
    error: str
    message: str


class CalibratorStopped(ShortReprModel):
    """The calibrator takes no further traces: its budget is spent, or its model cannot be used."""

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

# Gets an event; must not block.
CalibrationEventCallback = Callable[[CalibrationEvent], None]

# Reads an event from JSON.
CALIBRATION_EVENT_ADAPTER: TypeAdapter[CalibrationEvent] = TypeAdapter(CalibrationEvent)


def summarize_scores(scored: Sequence[ScoredStep | None]) -> ScoreSummary:
    """Return the figures of scores, of which None stands for a step without a valid one."""
    steps = [one for one in scored if one is not None]
    return ScoreSummary(
        n_steps=len(steps),
        n_unscored=len(scored) - len(steps),
        error=math.fsum(abs(one.error) for one in steps) / len(steps) if steps else None,
        accuracy=pairwise_accuracy(steps),
    )
