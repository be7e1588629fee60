"""Anchors out of recorded steps: gold pairs that measure a critic and are never learned from. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from reflact.calibration.constructions import kind_of_error, label_of
from reflact.calibration.holding import known
from reflact.calibration.trace import Trace
from reflact.memory import ContrastPair, Evaluation, Provenance, ScoreEvent

LEAST = 1.0
"""So far a wrong phi after lies from the right one at least."""

CARELESS = 3.0
"""So many points a careless evaluation is off, where it credits what was not achieved."""


def anchors_of(traces: Iterable[Trace]) -> tuple[ContrastPair, ...]:
    """Return one gold pair for each step whose gold is known before and after, by a program or a person.

    The right side is gold. The wrong one is what the critic said where that is off by a point or more, else a
    careless evaluation: no credit where there was progress, credit where there was none.

    Args:
        traces: Runs that are set apart: neither learned from nor held out.
    """
    return tuple(
        pair for trace in traces for event in known(trace) if (pair := _anchor(trace, event)) is not None
    )


def _anchor(trace: Trace, event: ScoreEvent) -> ContrastPair | None:
    label = None if event.gold is None else label_of(event, event.gold)
    if label is None:
        return None
    own = event.evaluation
    observed = own is not None and abs(own.phi_after - label.right.phi_after) >= LEAST
    wrong = own if own is not None and observed else _careless(label.right)
    high = wrong.phi_after > label.right.phi_after
    return ContrastPair(
        purpose=trace.purpose,
        transition=event.transition,
        right=label.right,
        wrong=wrong,
        why="It credits what was not achieved." if high else "It overlooks what was achieved.",
        mistake=kind_of_error(wrong, label.right),
        construction="observed" if observed else "written",
        label=label.source,
        provenance=Provenance(trace_id=trace.id, step=event.step),
    )


def _careless(right: Evaluation) -> Evaluation:
    """Return an evaluation that overlooks progress, or else one that believes in it."""
    if right.delta >= LEAST:
        return _off(right, right.phi_before, "Nothing has changed.")
    high = right.phi_after + CARELESS <= 10
    phi = right.phi_after + (CARELESS if high else -CARELESS)
    return _off(right, phi, "The agent does what it wants to do." if high else "Little of it is there.")


def _off(right: Evaluation, phi: float, reasoning: str) -> Evaluation:
    return right.model_copy(update={"phi_after": phi, "reasoning": reasoning, "evidence": ()})
