"""What a calibration lacks to come to a test, said before anything is paid for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.calibration.contrast import selected
from reflact.calibration.holding import GIVEN, Slices, Split, distinct, known, split
from reflact.calibration.reviewing import Standing
from reflact.calibration.settings import CalibratorSettings
from reflact.calibration.trace import Trace
from reflact.memory import Origin, ScoreEvent
from reflact.memory_cards import LEAST_TRACES, Anchored


def lacking(
    parts: Split,
    traces: Sequence[Trace],
    heldout: Sequence[Trace] | None,
    *,
    standing: Standing,
    anchored: Anchored,
    settings: CalibratorSettings,
) -> str | None:
    """Return in a sentence what is missing for a test, and how to come by it; None where nothing is.

    Args:
        parts: What is learned from and what is held out.
        traces: All traces that were given.
        heldout: Those that were given to be held out; None where a slice is.
        standing: Where the memory's pairs stand.
        anchored: Which steps are anchors; they teach nothing.
        settings: How pairs are made and tested.
    """
    there = len(distinct(parts.held_out))
    if there < LEAST_TRACES:
        if parts.name == GIVEN and heldout is not None:
            return _few_given(there, heldout, standing)
        return _few_in_slice(there, traces, standing, settings)
    return None if standing.testable(parts.held_out) else _nothing_taught(parts, anchored, settings)


def _nothing_taught(parts: Split, anchored: Anchored, settings: CalibratorSettings) -> str | None:
    if not parts.learn:
        return (
            "there is no trace to learn from: all that were given are held out, or were of the held-out "
            "slice and learned from earlier; pass others, or more of them"
        )
    events = sum(len(trace.events) for trace in parts.learn)
    free = [_free(trace, anchored) for trace in parts.learn]
    if any(selected(each, settings.contrast) for each in free):
        return None
    about = f"none of {events} steps of {_counted(len(parts.learn))} to learn from teaches anything"
    if not any(free):
        return (
            f"{about}: all of them are of anchors' traces, or show what an anchor scores; learn from "
            "other traces, or take other anchors"
        )
    still = "" if settings.contrast.include_no_change else ", and contrast.include_no_change is false"
    return (
        f"{about}: no score moves by contrast.min_delta {settings.contrast.min_delta:g}{still}; record "
        "traces whose steps get somewhere, or set a smaller contrast.min_delta"
    )


def _few_given(there: int, heldout: Sequence[Trace], standing: Standing) -> str:
    told = [trace for trace in heldout if known(trace)]
    spoilt = sum(trace.id in standing.learned for trace in told)
    copies = len(told) - spoilt - there
    left_out = [
        f"{count} {what}"
        for count, what in (
            (len(heldout) - len(told), "without a gold score"),
            (spoilt, "that pairs were made from earlier"),
            (copies, "that are copies of others"),
        )
        if count
    ]
    beside = f" beside {', '.join(left_out)}" if left_out else ""
    return (
        f"{there} held-out traces have steps with a gold score{beside}; a batch is tested on at least "
        f"{LEAST_TRACES}, so {_more(LEAST_TRACES - there)} missing: hold out more traces with gold"
    )


def _few_in_slice(
    there: int, traces: Sequence[Trace], standing: Standing, settings: CalibratorSettings
) -> str:
    usable = [trace for trace in distinct(traces) if trace.id not in standing.learned]
    slices, missing = settings.slices, LEAST_TRACES - there
    spoilt = [trace for trace in usable if trace.purpose in standing.purposes]
    words = (
        f"{there} held-out traces have steps with a gold score; a batch is tested on at least "
        f"{LEAST_TRACES}, so {_more(missing)} missing: one slice of {slices} tests, and of "
        f"{_counted(len(traces))} {len(usable)} have gold and were not learned from"
    )
    for fewer in range(slices - 1, 1, -1):
        testing = _testing(traces, standing, settings.model_copy(update={"slices": fewer}))
        if testing >= LEAST_TRACES:
            return f"{words}; set calibrator.slices to {fewer}, which holds out {testing} of them"
    if spoilt and _testing(traces, standing, settings.model_copy(update={"slices_by": "trace"})) > there:
        return (
            f"{words}, {len(spoilt)} of these with a purpose of others that were; record traces of further "
            "purposes, or set calibrator.slices_by to trace"
        )
    return (
        f"{words}; label or record about {missing * slices} more with gold, or {missing} and name those that "
        "are to be held out as `heldout`"
    )


def _testing(traces: Sequence[Trace], standing: Standing, settings: CalibratorSettings) -> int:
    """Return how many of the traces would test with such settings."""
    slices = Slices.of(len({trace.purpose for trace in traces}), total=settings.slices, by=settings.slices_by)
    most = settings.most_held_out
    parts = split(traces, taught=standing.taught, tests=standing.tests, slices=slices, most=most)
    return len(parts.held_out) if parts.learn else 0


def _free(trace: Trace, anchored: Anchored) -> list[ScoreEvent]:
    """Return the steps of a trace that are no anchors."""
    return [
        event
        for event in trace.events
        if not anchored.holds(trace.purpose, event.transition, Origin(trace_id=trace.id, step=event.step))
    ]


def _more(traces: int) -> str:
    return f"{traces} more {'is' if traces == 1 else 'are'}"


def _counted(traces: int) -> str:
    return "1 trace" if traces == 1 else f"{traces} traces"
