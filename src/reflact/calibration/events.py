"""The closed union of what can happen beside an agent: what a calibrator tells whoever listens.

A calibrator raises nothing into the agent's loop: what goes wrong is told here, like everything else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from reflact.memory import Promotion
from reflact.types import Frozen


class TraceTaken(Frozen):
    """A trace came up in the queue: it is learned from, or kept to test on."""

    kind: Literal["trace_taken"] = "trace_taken"
    trace_id: str
    use: Literal["learn", "hold_out"]


class TraceLeftOut(Frozen):
    """A trace was not taken: the queue was full, or the calibrator had stopped.

    ``dropped`` ones had been queued and made room for newer ones.
    """

    kind: Literal["trace_left_out"] = "trace_left_out"
    trace_id: str
    reason: Literal["full", "dropped", "stopped"]


class PairsMade(Frozen):
    """The contrast pairs of a trace are in the store.

    ``held`` of them the scan keeps back or rejected.
    """

    kind: Literal["pairs_made"] = "pairs_made"
    trace_id: str
    candidates: int
    kept: int
    held: int


class BatchTested(Frozen):
    """A batch of pairs was tested on held-out traces; promoted ones count from the next score on."""

    kind: Literal["batch_tested"] = "batch_tested"
    use: Literal["promote", "demote"] = "promote"
    evidence: Promotion


class NotTested(Frozen):
    """A batch waits: there are too few held-out traces to decide on it."""

    kind: Literal["not_tested"] = "not_tested"
    pairs: int
    traces: int
    needed: int
    words: str


class Failed(Frozen):
    """Something went wrong with a trace, or beside any; the calibrator goes on with the next one."""

    kind: Literal["failed"] = "failed"
    trace_id: str | None
    error: str
    message: str


class Stopped(Frozen):
    """The calibrator takes no further traces: its budget is spent, or its model cannot be reached at all."""

    kind: Literal["stopped"] = "stopped"
    reason: str


CalibrationEvent = Annotated[
    TraceTaken | TraceLeftOut | PairsMade | BatchTested | NotTested | Failed | Stopped,
    Field(discriminator="kind"),
]

CALIBRATION_EVENT: TypeAdapter[CalibrationEvent] = TypeAdapter(CalibrationEvent)
"""Reads such an event from JSON."""
