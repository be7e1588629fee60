"""Which traces are held out: they test batches and are never learned from. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reflact.calibration.config import HoldoutBy
from reflact.calibration.trace import Trace

# The number of purposes for each fold from which on whole purposes are sorted into folds.
MIN_PURPOSES = 2


class HoldoutSplit(NamedTuple):
    """The traces that are learned from, and those that test."""

    training: tuple[Trace, ...]
    held_out: tuple[Trace, ...]


def deduplicate_traces(traces: Iterable[Trace]) -> tuple[Trace, ...]:
    """Return traces with labelled steps; of copies, the one with most labels."""
    labeled = [trace for trace in traces if trace.n_labels]
    chosen: dict[str, Trace] = {}
    for trace in sorted(labeled, key=lambda trace: (-trace.n_labels, trace.id)):
        chosen.setdefault(trace.content_hash, trace)
    return tuple(trace for trace in labeled if chosen[trace.content_hash] is trace)


class HoldoutRule(NamedTuple):
    """How traces are sorted into ``n_folds`` folds: by purpose, or each by its id."""

    n_folds: int
    holdout_by: HoldoutBy

    @classmethod
    def choose(cls, n_purposes: int, *, n_folds: int, holdout_by: HoldoutBy | None) -> HoldoutRule:
        """Return how traces of so many purposes are sorted, unless ``holdout_by`` says it."""
        usual: HoldoutBy = "purpose" if n_purposes >= MIN_PURPOSES * n_folds else "trace"
        return cls(n_folds, holdout_by or usual)

    def is_held_out(self, trace_id: str, purpose: str) -> bool:
        """Whether a trace is held out: a hash sorts its id or its purpose into the first fold."""
        name = purpose if self.holdout_by == "purpose" else trace_id
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % self.n_folds == 0


class TrainingHistory(NamedTuple):
    """What was ever learned from: traces by their ids, and purposes."""

    trace_ids: frozenset[str] = frozenset()
    purposes: frozenset[str] = frozenset()

    def disqualifies(self, rule: HoldoutRule, trace_id: str, purpose: str) -> bool:
        """Whether a trace tests nothing any more."""
        is_known_purpose = rule.holdout_by == "purpose" and purpose in self.purposes
        return trace_id in self.trace_ids or is_known_purpose


def split_by_rule(
    traces: Sequence[Trace], *, training: TrainingHistory, rule: HoldoutRule, limit: int
) -> HoldoutSplit:
    """Deal traces into those to learn from and those held out, of which at most ``limit`` are used.

    Copies of one recording are on one side.
    """
    learned = _list_learned(traces, training)
    seen = {trace.content_hash for trace in learned}
    history = training._replace(
        purposes=training.purposes.union(trace.purpose for trace in learned)
    )
    first_ids: dict[str, str] = {}
    for trace in sorted(traces, key=lambda trace: trace.id):
        first_ids.setdefault(trace.content_hash, trace.id)
    learn: list[Trace] = []
    hold_out: list[Trace] = []
    for trace in traces:
        is_held_out = rule.is_held_out(first_ids[trace.content_hash], trace.purpose)
        (hold_out if is_held_out else learn).append(trace)
    usable = [
        trace
        for trace in deduplicate_traces(hold_out)
        if not history.disqualifies(rule, trace.id, trace.purpose)
        and trace.content_hash not in seen
    ]
    usable.sort(key=lambda trace: trace.id)
    return HoldoutSplit(tuple(learn), tuple(usable[:limit]))


def split_by_caller(
    traces: Sequence[Trace], heldout: Sequence[Trace], *, training: TrainingHistory
) -> HoldoutSplit:
    """Return the parts that a caller chose, without what would be in both."""
    learned = _list_learned((*traces, *heldout), training)
    seen = {trace.content_hash for trace in learned}
    tests = tuple(
        trace
        for trace in heldout
        if trace.n_labels and trace.id not in training.trace_ids and trace.content_hash not in seen
    )
    ids = {trace.id for trace in heldout}
    contents = {trace.content_hash for trace in tests}
    learn = [
        trace for trace in traces if trace.id not in ids and trace.content_hash not in contents
    ]
    return HoldoutSplit(tuple(learn), tests)


def _list_learned(traces: Iterable[Trace], training: TrainingHistory) -> list[Trace]:
    """Return the traces with steps that pairs were made from."""
    return [trace for trace in traces if trace.events and trace.id in training.trace_ids]
