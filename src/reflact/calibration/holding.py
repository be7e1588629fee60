"""Which traces are held out: they test batches and are never learned from. Pure.

Whether a trace is held out follows from its id or its purpose alone, so it is the same in every process and
stays so while traces come and go. Batches that were tested on any of the same traces share one error
probability. When it is used up, only traces count on which nothing was tested yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reflact.calibration.config import SlicesBy
from reflact.calibration.review import slice_of, used_up
from reflact.calibration.trace import Trace
from reflact.memory import ScoreEvent
from reflact.memory_cards import LEAST_TRACES
from reflact.memory_ports import BatchTest, count_tests

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

    def holds(self, trace_id: str, purpose: str) -> bool:
        """Whether a trace is held out."""
        return slice_of(purpose if self.by == "purpose" else trace_id, slices=self.total) == 0

    @property
    def name(self) -> str:
        """What the held-out traces are called."""
        return f"1 slice of {self.total}{', by purpose' if self.by == 'purpose' else ''}"


class Taught(NamedTuple):
    """What was ever learned from: traces by their ids, and purposes."""

    traces: frozenset[str] = frozenset()
    purposes: frozenset[str] = frozenset()

    def spoils(self, slices: Slices, trace_id: str, purpose: str) -> bool:
        """Whether a trace tests nothing any more."""
        return trace_id in self.traces or (slices.by == "purpose" and purpose in self.purposes)


def choose_tested(usable: Sequence[Trace], tests: Sequence[BatchTest], *, most: int) -> tuple[Trace, ...]:
    """Return the traces that test next: all that may; once their error probability is used up, fresh ones.

    Args:
        usable: Traces that may test, those that come first first.
        tests: All tests that were made.
        most: At most so many.
    """
    chosen = tuple(usable[:most])
    if used_up(len(chosen), count_tests(tests, (trace.recording for trace in chosen))):
        marks = marks_tested(tests)
        fresh = tuple(trace for trace in usable if trace.recording.marks.isdisjoint(marks))
        chosen = fresh[:most] if len(fresh) >= LEAST_TRACES else chosen
    return chosen


def marks_tested(tests: Iterable[BatchTest]) -> frozenset[str]:
    """Return the marks of all traces on which something was tested to be promoted."""
    return frozenset(mark for test in tests if test.use == "promote" for mark in test.marks)


def split(
    traces: Sequence[Trace], *, taught: Taught, tests: Sequence[BatchTest], slices: Slices, most: int
) -> Split:
    """Deal traces into those to learn from and those held out, of which at most ``most`` are used.

    Copies of one recording are on one side.
    """
    own = Taught(taught.traces, taught.purposes | {t.purpose for t in traces if t.id in taught.traces})
    dealt = _dealt_by(traces)
    held = {trace.id for trace in traces if slices.holds(dealt[trace.id], trace.purpose)}
    seen = Contents.of(trace for trace in traces if trace.id in own.traces)
    usable = [
        trace
        for trace in distinct(trace for trace in traces if trace.id in held)
        if not own.spoils(slices, trace.id, trace.purpose) and not seen.holds(trace)
    ]
    return Split(
        learn=tuple(trace for trace in traces if trace.id not in held),
        held_out=choose_tested(sorted(usable, key=lambda trace: trace.id), tests, most=most),
        name=slices.name,
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
