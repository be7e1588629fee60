"""Which traces are held out: they test batches and are never learned from. Pure.

A trace's slice follows from its id or its purpose alone, so it is the same in every process and stays so
while traces come and go. Two slices, those of which least was ever learned, are kept from being learned from
for good: one tests, the other gathers traces until it is its turn. A turn is ``ROTATE`` tests, and in it only
traces count on which nothing was tested before it, so that no test of a turn has more than the others of its
turn before it. Batches that were tested on a trace share one error probability, whatever the held-out set was
called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reflact.calibration.review import slice_of
from reflact.calibration.settings import SlicesBy
from reflact.calibration.trace import Trace
from reflact.memory import ScoreEvent
from reflact.memory_cards import LEAST_TRACES
from reflact.memory_ports import BatchTest

ROTATE = 8
"""Batches that are tested on a slice before it is another one's turn."""

KEPT = 2
"""Slices that are not learned from."""

PURPOSES = 2
"""As many purposes there have to be for each slice before whole purposes are sorted into slices."""

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


class Contents(NamedTuple):
    """What some traces hold: each as a whole, and up to each of its steps."""

    wholes: frozenset[str]
    parts: frozenset[str]

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> Contents:
        """Return what traces hold; those without steps hold nothing."""
        all_ = [trace.recording.contents for trace in traces if trace.events]
        return cls(
            frozenset(contents[-1] for contents in all_),
            frozenset(content for contents in all_ for content in contents),
        )

    def holds(self, trace: Trace) -> bool:
        """Whether a trace is a copy of one of them, its beginning, or goes on with it."""
        contents = trace.recording.contents
        return contents[-1] in self.parts or not self.wholes.isdisjoint(contents)


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


class Slices(NamedTuple):
    """How traces are sorted into slices.

    Args:
        total: How many there are.
        by: ``purpose``: all traces of a purpose are in one. ``trace``: each is dealt by its id.
    """

    total: int
    by: SlicesBy

    @classmethod
    def of(cls, purposes: int, *, total: int, by: SlicesBy | None) -> Slices:
        """Return how traces of so many purposes are sorted; ``by`` is what was asked for, if anything was.

        Where there are fewer than two purposes for a slice, whole purposes would leave slices empty.
        """
        return cls(total, by or ("purpose" if purposes >= PURPOSES * total else "trace"))

    def place(self, trace_id: str, purpose: str) -> int:
        """Return the slice of a trace."""
        return slice_of(purpose if self.by == "purpose" else trace_id, slices=self.total)

    def name(self, number: int) -> str:
        """Return what the traces of a slice are called, by which tests on it are counted for its turn."""
        return f"slice {number} of {self.total}{', by purpose' if self.by == 'purpose' else ''}"


class Taught(NamedTuple):
    """What was ever learned from: traces by their ids, and purposes."""

    traces: frozenset[str] = frozenset()
    purposes: frozenset[str] = frozenset()

    def spoils(self, slices: Slices, trace_id: str, purpose: str) -> bool:
        """Whether a trace tests nothing any more."""
        return trace_id in self.traces or (slices.by == "purpose" and purpose in self.purposes)


def kept(slices: Slices, taught: Taught) -> tuple[int, ...]:
    """Return the slices that are not learned from: two, one of two.

    They are those of which least was learned, the first of equal ones; since the others are learned from
    they stay these.
    """
    learned = Counter(
        slice_of(one, slices=slices.total)
        for one in (taught.purposes if slices.by == "purpose" else taught.traces)
    )
    order = sorted(range(slices.total), key=lambda number: (learned[number], number))
    return tuple(sorted(order[: min(KEPT, slices.total - 1)]))


def in_turn(numbers: Iterable[int], slices: Slices, tests: Sequence[BatchTest]) -> list[int]:
    """Return slices in the order of their turns: the one that had the fewest is first, then the lower one."""
    made = Counter(test.held_out for test in tests if test.use == "promote")
    return sorted(numbers, key=lambda number: (made[slices.name(number)] // ROTATE, number))


def worn(name: str, tests: Sequence[BatchTest]) -> frozenset[str]:
    """Return the marks of traces on which something was tested before the present turn of a slice.

    To measure again what is promoted wears nothing out: it can only take back.
    """
    promoting = [test for test in tests if test.use == "promote"]
    own = [test.number for test in promoting if test.held_out == name]
    turn = frozenset(own[len(own) // ROTATE * ROTATE :])
    return frozenset(mark for test in promoting if test.number not in turn for mark in test.marks)


def split(
    traces: Sequence[Trace], *, taught: Taught, tests: Sequence[BatchTest], slices: Slices, most: int
) -> Split:
    """Deal traces into those to learn from and those held out, of which at most ``most`` are used.

    Of slices with enough traces that are not worn the one whose turn it is tests; where there is none, worn
    ones count too, at a lower level. What else is in kept slices is in neither part. Copies of one recording
    are on one side.
    """
    own = Taught(taught.traces, taught.purposes | {t.purpose for t in traces if t.id in taught.traces})
    dealt = _dealt_by(traces)
    sides: dict[int, list[Trace]] = {number: [] for number in kept(slices, own)}
    learn: list[Trace] = []
    for trace in traces:
        sides.get(slices.place(dealt[trace.id], trace.purpose), learn).append(trace)
    seen = Contents.of(trace for trace in traces if trace.id in own.traces)
    usable = {
        number: [
            trace
            for trace in distinct(here)
            if not own.spoils(slices, trace.id, trace.purpose) and not seen.holds(trace)
        ]
        for number, here in sides.items()
    }
    fresh = {
        number: [t for t in here if t.recording.marks.isdisjoint(worn(slices.name(number), tests))]
        for number, here in usable.items()
    }
    order = in_turn(sides, slices, tests)
    choices = [(number, part[number]) for part in (fresh, usable) for number in order]
    most_of_all = max(order, key=lambda number: len(usable[number]))
    number, held_out = next(
        (one for one in choices if len(one[1]) >= LEAST_TRACES), (most_of_all, usable[most_of_all])
    )
    return Split(
        learn=tuple(learn),
        held_out=tuple(sorted(held_out, key=lambda trace: trace.id)[:most]),
        name=slices.name(number),
    )


def split_given(traces: Sequence[Trace], heldout: Sequence[Trace], *, taught: Taught) -> Split:
    """Return the parts that a caller chose, without what would be in both."""
    seen = Contents.of(trace for trace in (*traces, *heldout) if trace.id in taught.traces)
    tests = tuple(
        trace for trace in heldout if trace.id not in taught.traces and known(trace) and not seen.holds(trace)
    )
    ids, contents = {trace.id for trace in heldout}, Contents.of(tests)
    learn = tuple(trace for trace in traces if trace.id not in ids and not contents.holds(trace))
    return Split(learn=learn, held_out=tests, name=GIVEN)


def _dealt_by(traces: Sequence[Trace]) -> dict[str, str]:
    """Return by which id each trace is dealt: copies by the first one's, a beginning by the longest one's."""
    longest = sorted(traces, key=lambda trace: (-len(trace.events), trace.id))
    owner: dict[str, str] = {}
    for trace in longest:
        first = owner.get(trace.recording.contents[-1], trace.id)
        for content in trace.recording.contents if trace.events else ():
            owner.setdefault(content, first)
    return {trace.id: owner.get(trace.recording.contents[-1], trace.id) for trace in traces}
