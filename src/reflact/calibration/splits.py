"""Which traces are held out: they test batches and are never learned from. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reflact.calibration.config import HoldoutBy
from reflact.calibration.significance import is_level_used_up
from reflact.calibration.trace import Trace
from reflact.memory.cards import MIN_TRACES, count_tests
from reflact.memory.models import BatchTest, ScoreEvent

# The number of purposes for each fold from which on whole purposes are sorted into folds.
MIN_PURPOSES = 2

# The name of held-out traces that a caller chose.
CALLER_HOLDOUT_NAME = "caller"


class HoldoutSplit(NamedTuple):
    """The traces of a round, and what the held-out ones are called."""

    training: tuple[Trace, ...]
    held_out: tuple[Trace, ...]
    held_out_name: str


def list_labeled_events(trace: Trace) -> tuple[ScoreEvent, ...]:
    """Return the events whose label comes from outside the critic; one that always inflates agrees
    with itself.
    """
    return tuple(e for e in trace.events if e.label is not None and e.label.source != "agreement")


class TraceContents(NamedTuple):
    """What some traces hold: each as a whole, and up to each of its steps."""

    whole_hashes: frozenset[str]
    prefix_hashes: frozenset[str]

    @classmethod
    def from_traces(cls, traces: Iterable[Trace]) -> TraceContents:
        """Return what traces hold; those without steps hold nothing."""
        all_ = [trace.recording.content_hashes for trace in traces if trace.events]
        return cls(
            frozenset(contents[-1] for contents in all_),
            frozenset(content for contents in all_ for content in contents),
        )

    def contains(self, trace: Trace) -> bool:
        """Whether a trace is a copy of one of them, its beginning, or goes on with it."""
        contents = trace.recording.content_hashes
        return contents[-1] in self.prefix_hashes or not self.whole_hashes.isdisjoint(contents)


def deduplicate_traces(traces: Iterable[Trace]) -> tuple[Trace, ...]:
    """Return traces with known steps, of those that are one recording only one, in their order.

    A copy, or the beginning of another trace, is one recording with it: the longest one of which
    most is known counts.
    """
    labeled = [trace for trace in traces if list_labeled_events(trace)]
    parts = {content for trace in labeled for content in trace.recording.content_hashes[:-1]}
    whole: dict[str, Trace] = {}
    for trace in sorted(labeled, key=lambda trace: (-len(list_labeled_events(trace)), trace.id)):
        whole.setdefault(trace.recording.content_hashes[-1], trace)
    kept_ids = {trace.id for content, trace in whole.items() if content not in parts}
    return tuple(trace for trace in labeled if trace.id in kept_ids)


def assign_fold(trace_id: str, *, n_folds: int) -> int:
    """Return the fold of a trace, from its id alone: 0 to ``n_folds - 1``."""
    return int.from_bytes(hashlib.sha256(trace_id.encode()).digest()[:8]) % n_folds


class HoldoutRule(NamedTuple):
    """How traces are sorted into ``n_folds`` folds: all traces of a purpose into one, or each by
    its id.
    """

    n_folds: int
    holdout_by: HoldoutBy

    @classmethod
    def choose(cls, n_purposes: int, *, n_folds: int, holdout_by: HoldoutBy | None) -> HoldoutRule:
        """Return how traces of so many purposes are sorted; ``holdout_by``: what was asked for, if
        anything was.
        """
        return cls(
            n_folds, holdout_by or ("purpose" if n_purposes >= MIN_PURPOSES * n_folds else "trace")
        )

    def is_held_out(self, trace_id: str, purpose: str) -> bool:
        """Whether a trace is held out."""
        return (
            assign_fold(purpose if self.holdout_by == "purpose" else trace_id, n_folds=self.n_folds)
            == 0
        )

    @property
    def held_out_name(self) -> str:
        """What the held-out traces are called."""
        return f"1 fold of {self.n_folds}{', by purpose' if self.holdout_by == 'purpose' else ''}"


class TrainingHistory(NamedTuple):
    """What was ever learned from: traces by their ids, and purposes."""

    trace_ids: frozenset[str] = frozenset()
    purposes: frozenset[str] = frozenset()

    def disqualifies(self, rule: HoldoutRule, trace_id: str, purpose: str) -> bool:
        """Whether a trace tests nothing any more."""
        return trace_id in self.trace_ids or (
            rule.holdout_by == "purpose" and purpose in self.purposes
        )


def choose_test_traces(
    usable: Sequence[Trace], tests: Sequence[BatchTest], *, limit: int
) -> tuple[Trace, ...]:
    """Return the traces that test next: the first usable ones; once their error probability is used
    up, fresh ones.
    """
    chosen = tuple(usable[:limit])
    if is_level_used_up(len(chosen), count_tests(tests, (trace.recording for trace in chosen))):
        marks = list_tested_marks(tests)
        fresh = tuple(trace for trace in usable if trace.recording.fingerprints.isdisjoint(marks))
        chosen = fresh[:limit] if len(fresh) >= MIN_TRACES else chosen
    return chosen


def list_tested_marks(tests: Iterable[BatchTest]) -> frozenset[str]:
    """Return the marks of all traces on which something was tested to be promoted."""
    return frozenset(mark for test in tests if test.kind == "promote" for mark in test.fingerprints)


def split_by_rule(
    traces: Sequence[Trace],
    *,
    training: TrainingHistory,
    tests: Sequence[BatchTest],
    rule: HoldoutRule,
    limit: int,
) -> HoldoutSplit:
    """Deal traces into those to learn from and those held out, of which at most ``limit`` are used.

    Copies of one recording are on one side.
    """
    own = TrainingHistory(
        training.trace_ids,
        training.purposes | {t.purpose for t in traces if t.id in training.trace_ids},
    )
    dealt = _choose_dealing_ids(traces)
    held_out_ids = {
        trace.id for trace in traces if rule.is_held_out(dealt[trace.id], trace.purpose)
    }
    seen = TraceContents.from_traces(trace for trace in traces if trace.id in own.trace_ids)
    usable = [
        trace
        for trace in deduplicate_traces(trace for trace in traces if trace.id in held_out_ids)
        if not own.disqualifies(rule, trace.id, trace.purpose) and not seen.contains(trace)
    ]
    return HoldoutSplit(
        training=tuple(trace for trace in traces if trace.id not in held_out_ids),
        held_out=choose_test_traces(sorted(usable, key=lambda trace: trace.id), tests, limit=limit),
        held_out_name=rule.held_out_name,
    )


def split_by_caller(
    traces: Sequence[Trace], heldout: Sequence[Trace], *, training: TrainingHistory
) -> HoldoutSplit:
    """Return the parts that a caller chose, without what would be in both."""
    seen = TraceContents.from_traces(
        trace for trace in (*traces, *heldout) if trace.id in training.trace_ids
    )
    tests = tuple(
        trace
        for trace in heldout
        if trace.id not in training.trace_ids
        and list_labeled_events(trace)
        and not seen.contains(trace)
    )
    ids = {trace.id for trace in heldout}
    contents = TraceContents.from_traces(tests)
    learn = tuple(trace for trace in traces if trace.id not in ids and not contents.contains(trace))
    return HoldoutSplit(training=learn, held_out=tests, held_out_name=CALLER_HOLDOUT_NAME)


def _choose_dealing_ids(traces: Sequence[Trace]) -> dict[str, str]:
    """Return by which id each trace is dealt: copies by the first one's, a beginning by the longest
    one's.
    """
    longest = sorted(traces, key=lambda trace: (-len(trace.events), trace.id))
    owner: dict[str, str] = {}
    for trace in longest:
        first = owner.get(trace.recording.content_hashes[-1], trace.id)
        for content in trace.recording.content_hashes if trace.events else ():
            owner.setdefault(content, first)
    return {trace.id: owner.get(trace.recording.content_hashes[-1], trace.id) for trace in traces}
