"""The closed union of what can happen in a calibration: what a calibrator tells whoever listens.

Beside an agent a calibrator raises nothing into the agent's loop: what goes wrong is told here, like
everything else. ``usage``, where an event has it, is what all calls of the calibrator consumed until then,
replies that were refused or found in a store included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from reflact.brief import ShortReprModel
from reflact.calibration.metrics import Scored, measure_accuracy
from reflact.calibration.results import CalibrationReport, DropCount
from reflact.memory import Promotion
from reflact.results import Usage


class Figures(ShortReprModel):
    """A critic's scores of some steps, in short; the report has all figures, with intervals.

    Args:
        steps: Steps that were scored.
        unscored: Steps of which the model gave no valid score.
        error: Mean absolute error of phi after, in 0..10; None where nothing was scored.
        accuracy: Pairwise accuracy, 0..1; None where nothing can be ordered.
    """

    steps: int
    unscored: int = 0
    error: float | None = None
    accuracy: float | None = None


class Began(ShortReprModel):
    """A call of ``calibrate`` began: so many traces, and steps whose correct score is known.

    ``resumed`` says that it goes on with one that was stopped; what happened then is told again.
    """

    kind: Literal["began"] = "began"
    learn: int
    held_out: int
    steps: int
    anchors: int
    resumed: bool = False


class RoundBegan(ShortReprModel):
    """A round of contrast pairs began, over so many traces."""

    kind: Literal["round_began"] = "round_began"
    number: int
    traces: int
    usage: Usage = Usage()


class CriticMeasured(ShortReprModel):
    """The critic was measured, before the first round or after the last."""

    kind: Literal["critic_measured"] = "critic_measured"
    when: Literal["before", "after"]
    held_out: Figures
    anchors: Figures
    usage: Usage = Usage()


class Calibrated(ShortReprModel):
    """A call of ``calibrate`` ended; the last of its events."""

    kind: Literal["calibrated"] = "calibrated"
    report: CalibrationReport


class TraceTaken(ShortReprModel):
    """A trace came up in the queue: it is learned from, or kept to test on."""

    kind: Literal["trace_taken"] = "trace_taken"
    trace_id: str
    use: Literal["learn", "hold_out"]


class TraceLeftOut(ShortReprModel):
    """A trace was not taken: the queue was full, or the calibrator had stopped.

    ``dropped`` ones had been queued and made room for newer ones.
    """

    kind: Literal["trace_left_out"] = "trace_left_out"
    trace_id: str
    reason: Literal["full", "dropped", "stopped"]


class PairsMade(ShortReprModel):
    """The contrast pairs of a trace are in the store.

    ``held`` of them the scan keeps back or rejected; ``drops`` are the candidates that became none. Where the
    memory is ``full`` nothing was made: its bound would have put away what waits or is promoted.
    """

    kind: Literal["pairs_made"] = "pairs_made"
    trace_id: str
    candidates: int
    kept: int
    held: int
    full: bool = False
    drops: tuple[DropCount, ...] = ()
    usage: Usage = Usage()


class BatchTested(ShortReprModel):
    """A batch of pairs was tested on held-out traces; promoted ones count from the next score on."""

    kind: Literal["batch_tested"] = "batch_tested"
    use: Literal["promote", "demote"] = "promote"
    evidence: Promotion
    usage: Usage = Usage()


class NotTested(ShortReprModel):
    """A batch waits: there are too few held-out traces to decide on it."""

    kind: Literal["not_tested"] = "not_tested"
    pairs: int
    traces: int
    needed: int
    words: str
    usage: Usage = Usage()


class Failed(ShortReprModel):
    """Something went wrong with a trace, or beside any; the calibrator goes on with the next one."""

    kind: Literal["failed"] = "failed"
    trace_id: str | None
    error: str
    message: str


class Stopped(ShortReprModel):
    """The calibrator takes no further traces: its budget is spent, or its model cannot be reached at all."""

    kind: Literal["stopped"] = "stopped"
    reason: str


CalibrationEvent = Annotated[
    Began
    | RoundBegan
    | CriticMeasured
    | Calibrated
    | TraceTaken
    | TraceLeftOut
    | PairsMade
    | BatchTested
    | NotTested
    | Failed
    | Stopped,
    Field(discriminator="kind"),
]

Tell = Callable[[CalibrationEvent], None]
"""Is told of an event; must not block."""

CALIBRATION_EVENT: TypeAdapter[CalibrationEvent] = TypeAdapter(CalibrationEvent)
"""Reads such an event from JSON."""


def figures_of(scored: Sequence[Scored | None]) -> Figures:
    """Return the figures of scores, of which None stands for a step without a valid one."""
    found = [one for one in scored if one is not None]
    return Figures(
        steps=len(found),
        unscored=len(scored) - len(found),
        error=math.fsum(abs(one.error) for one in found) / len(found) if found else None,
        accuracy=measure_accuracy(found),
    )
