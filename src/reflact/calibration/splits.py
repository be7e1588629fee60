"""Which traces are held out: they test batches and are never learned from. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reflact.calibration.config import HoldoutBy
from reflact.calibration.trace import Trace
from reflact.memory.models import ScoreEvent

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
    """Return the events whose label comes from outside the critic."""
    return tuple(e for e in trace.events if e.label is not None and e.label.source != "agreement")


def deduplicate_traces(traces: Iterable[Trace]) -> tuple[Trace, ...]:
    """Return traces with known steps; of copies, the one of which most is known."""
    labeled = [trace for trace in traces if list_labeled_events(trace)]
    chosen: dict[str, Trace] = {}
    for trace in sorted(labeled, key=lambda trace: (-len(list_labeled_events(trace)), trace.id)):
        chosen.setdefault(trace.content_hash, trace)
    return tuple(trace for trace in labeled if chosen[trace.content_hash] is trace)


def assign_fold(trace_id: str, *, n_folds: int) -> int:
    """Return the fold of a trace, from its id alone: 0 to ``n_folds - 1``."""
    return int.from_bytes(hashlib.sha256(trace_id.encode()).digest()[:8]) % n_folds


class HoldoutRule(NamedTuple):
    """How traces are sorted into ``n_folds`` folds: by purpose, or each by its id."""

    n_folds: int
    holdout_by: HoldoutBy

    @classmethod
    def choose(cls, n_purposes: int, *, n_folds: int, holdout_by: HoldoutBy | None) -> HoldoutRule:
        """Return how traces of so many purposes are sorted, unless ``holdout_by`` says it."""
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


def split_by_rule(
    traces: Sequence[Trace], *, training: TrainingHistory, rule: HoldoutRule, limit: int
) -> HoldoutSplit:
    """Deal traces into those to learn from and those held out, of which at most ``limit`` are used.

    Copies of one recording are on one side.
    """
    learned = _list_learned(traces, training)
    own = TrainingHistory(
        training.trace_ids, training.purposes | {trace.purpose for trace in learned}
    )
    first_ids: dict[str, str] = {}
    for trace in sorted(traces, key=lambda trace: trace.id):
        first_ids.setdefault(trace.content_hash, trace.id)
    held_out_ids = {
        trace.id
        for trace in traces
        if rule.is_held_out(first_ids[trace.content_hash], trace.purpose)
    }
    seen = {trace.content_hash for trace in learned}
    usable = [
        trace
        for trace in deduplicate_traces(trace for trace in traces if trace.id in held_out_ids)
        if not own.disqualifies(rule, trace.id, trace.purpose) and trace.content_hash not in seen
    ]
    return HoldoutSplit(
        training=tuple(trace for trace in traces if trace.id not in held_out_ids),
        held_out=tuple(sorted(usable, key=lambda trace: trace.id)[:limit]),
        held_out_name=rule.held_out_name,
    )


def split_by_caller(
    traces: Sequence[Trace], heldout: Sequence[Trace], *, training: TrainingHistory
) -> HoldoutSplit:
    """Return the parts that a caller chose, without what would be in both."""
    learned = _list_learned((*traces, *heldout), training)
    seen = {trace.content_hash for trace in learned}
    tests = tuple(
        trace
        for trace in heldout
        if trace.id not in training.trace_ids
        and trace.content_hash not in seen
        and list_labeled_events(trace)
    )
    ids = {trace.id for trace in heldout}
    contents = {trace.content_hash for trace in tests}
    return HoldoutSplit(
        training=tuple(
            trace for trace in traces if trace.id not in ids and trace.content_hash not in contents
        ),
        held_out=tests,
        held_out_name=CALLER_HOLDOUT_NAME,
    )


def _list_learned(traces: Iterable[Trace], training: TrainingHistory) -> list[Trace]:
    """Return the traces with steps that pairs were made from."""
    return [trace for trace in traces if trace.events and trace.id in training.trace_ids]
