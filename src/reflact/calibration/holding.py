"""Which traces are held out: they test batches and are never learned from. Pure.

A trace's slice follows from its id alone, so it is the same in every process and stays so while traces come
and go. One slice is held out at a time. After ``ROTATE`` batches the next slice takes its place, if enough of
its traces were never learned from. Batches that were tested on a trace share one error probability, whatever
the held-out set was called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from reflact.calibration.review import slice_of
from reflact.calibration.trace import Trace
from reflact.memory import ScoreEvent
from reflact.memory_cards import LEAST_TRACES
from reflact.memory_ports import BatchTest

ROTATE = 8
"""Batches that are tested on a slice before another one is held out."""

GIVEN = "given"
"""The name of held-out traces that a caller chose."""


class Split(NamedTuple):
    """The traces of a round, and what the held-out ones are called."""

    learn: tuple[Trace, ...]
    held_out: tuple[Trace, ...]
    name: str


def known(trace: Trace) -> tuple[ScoreEvent, ...]:
    """Return the events whose correct score somebody outside the critic gave.

    What samples of a critic agree on is not among them: a critic that always inflates agrees with itself.
    """
    return tuple(e for e in trace.events if e.gold is not None and e.gold.source != "agreement")


def distinct(traces: Iterable[Trace]) -> tuple[Trace, ...]:
    """Return traces with known steps, of those that are one recording only one, in their order.

    Copies under several names are one recording, and so is one that another goes on with: the longest counts,
    of equal ones that of which most is known. A test over copies would take one opinion for many.
    """
    told = [trace for trace in traces if known(trace)]
    parts = {content for trace in told for content in trace.recording.contents[:-1]}
    whole: dict[str, Trace] = {}
    for trace in sorted(told, key=lambda trace: (-len(known(trace)), trace.id)):
        whole.setdefault(trace.recording.contents[-1], trace)
    kept = {trace.id for content, trace in whole.items() if content not in parts}
    return tuple(trace for trace in told if trace.id in kept)


def held_slice(
    trace_ids: Collection[str],
    *,
    learned: Collection[str],
    tests: Sequence[BatchTest],
    slices: int,
) -> int:
    """Return the slice that is held out now.

    Args:
        trace_ids: Traces with known steps.
        learned: Traces that pairs were ever made from.
        tests: All tests of the store.
        slices: Into how many slices traces are sorted.
    """
    unspoilt = Counter(slice_of(trace, slices=slices) for trace in trace_ids if trace not in learned)
    made = Counter(test.held_out for test in tests)
    order = sorted(range(slices), key=lambda n: (made[slice_name(n, slices)] // ROTATE, n))
    enough = [number for number in order if unspoilt[number] >= LEAST_TRACES]
    return (enough or order)[0]


def slice_name(number: int, slices: int) -> str:
    """Return what the traces of a slice are called, by which tests on it are counted for its turn."""
    return f"slice {number} of {slices}"


def split(
    traces: Sequence[Trace], *, learned: Collection[str], tests: Sequence[BatchTest], slices: int, most: int
) -> Split:
    """Deal traces into those to learn from and those held out, of which at most ``most`` are used.

    Traces of the held-out slice that were learned from earlier are in neither part.
    """
    testable = [trace.id for trace in traces if known(trace)]
    number = held_slice(testable, learned=learned, tests=tests, slices=slices)
    here = [trace for trace in traces if slice_of(trace.id, slices=slices) == number]
    usable = sorted((t for t in here if t.id not in learned and known(t)), key=lambda t: t.id)
    outside = {trace.id for trace in here}
    return Split(
        learn=tuple(trace for trace in traces if trace.id not in outside),
        held_out=tuple(usable[:most]),
        name=slice_name(number, slices),
    )
