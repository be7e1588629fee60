"""Learns from one trace after the other, beside an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.calibration.config import CalibratorSettings
from reflact.calibration.generation import GeneratedPairs
from reflact.calibration.labeled_steps import list_labeled_steps
from reflact.calibration.loop import CalibrationLoop
from reflact.calibration.pairs import choose_batch
from reflact.calibration.promotion import MemorySnapshot, take_snapshot
from reflact.calibration.significance import NotTested, find_missing_traces
from reflact.calibration.splits import MIN_PURPOSES, HoldoutRule, list_labeled_events, list_tested_marks
from reflact.calibration.trace import Trace
from reflact.memory.cards import TraceIdentity, compute_fingerprint, count_tests

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

PAGE_SIZE = 200
"""Stored traces that are read at a time, without their steps."""


class HoldoutCollection:
    """The ids of held-out traces that can test now, by their content; the first ones added."""

    def __init__(
        self, rule: HoldoutRule, snapshot: MemorySnapshot, *, limit: int, only_untested: bool = False
    ) -> None:
        self.rule = rule
        self._limit = limit
        self._training_history = snapshot.learned
        self._tests = snapshot.tests
        self._excluded_marks = list_tested_marks(snapshot.tests) if only_untested else frozenset[str]()
        self._trace_ids_by_content: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether there are enough."""
        return len(self._trace_ids_by_content) >= self._limit

    def add(self, trace_id: str, purpose: str, content_hash: str) -> None:
        """Add a trace with labelled steps, if it is held out and may test."""
        marks = {compute_fingerprint(trace_id), compute_fingerprint(content_hash)}
        if (
            not self.is_full
            and self.rule.is_held_out(trace_id, purpose)
            and not self._training_history.disqualifies(self.rule, trace_id, purpose)
            and self._excluded_marks.isdisjoint(marks)
        ):
            self._trace_ids_by_content.setdefault(content_hash, trace_id)

    @property
    def missing_traces(self) -> NotTested | None:
        """What is missing for a test; None if nothing is."""
        contents = self._trace_ids_by_content.items()
        traces = [TraceIdentity(trace_id, (content,)) for content, trace_id in contents]
        return find_missing_traces(traces, n_earlier_tests=count_tests(self._tests, traces))

    @property
    def trace_ids(self) -> tuple[str, ...]:
        """The traces, the newest first."""
        return tuple(self._trace_ids_by_content.values())


class TraceLearner:
    """Stores traces, makes pairs of those that are not held out, and tests the pairs when there are enough.

    The store is read at the first trace, and before and after every test; between these, the work of other
    processes makes no difference. Traces are read without their steps, the newest first and no further than
    needed; only those that test are loaded. Missing traces are reported once, until there are enough.
    """

    def __init__(self, store: MemoryStore, loop: CalibrationLoop, *, settings: CalibratorSettings) -> None:
        self._store = store
        self._loop = loop
        self._settings = settings
        self._purposes: set[str] = set()
        self._holdout: HoldoutCollection | None = None
        self._known_pair_ids: frozenset[str] = frozenset()
        self._n_waiting = 0
        self._next_test_at = settings.batch_size
        self._reported_missing = False

    async def store_trace(self, trace: Trace) -> bool:
        """Store a trace and return whether it is held out."""
        await trace.save_to(self._store)
        holdout = await self._update_holdout(trace.purpose)
        held_out = holdout.rule.is_held_out(trace.id, trace.purpose)
        if held_out and list_labeled_events(trace):
            holdout.add(trace.id, trace.purpose, trace.recording.content_hashes[-1])
            if holdout.is_full and holdout.missing_traces is not None:
                await self._refresh_holdout(await take_snapshot(self._store))
        return held_out

    async def make_pairs(self, trace: Trace) -> GeneratedPairs:
        """Make the pairs of a trace."""
        generated = await self._loop.generator.make_trace_pairs(trace, known_pair_ids=self._known_pair_ids)
        self._n_waiting += generated.n_new
        return generated

    async def test_if_due(self) -> None:
        """Test the waiting pairs, if they are enough for a batch and the held-out traces for a test.

        Pairs that had no room in a batch, or that no test followed for, wait until another batch of pairs is made.
        """
        if self._n_waiting < self._next_test_at or self._holdout is None:
            return
        snapshot, holdout = await take_snapshot(self._store), self._holdout
        if holdout.missing_traces is None:
            holdout = await self._refresh_holdout(snapshot)
        if holdout.missing_traces is not None:
            if not self._reported_missing:
                self._loop.emit_tested(holdout.missing_traces, self._n_waiting)
            self._reported_missing = True
            return
        self._reported_missing = False
        traces = await self._load_traces(holdout.trace_ids)
        waiting = snapshot.list_testable_pairs(traces)
        batch = choose_batch(waiting, max_pairs=self._settings.max_pairs)
        if batch:
            name, steps = holdout.rule.held_out_name, list_labeled_steps(traces)
            await self._loop.test_batch(batch, steps, promoted=snapshot.promoted, name=name)
            snapshot = await take_snapshot(self._store)
        self._next_test_at = self._settings.batch_size + len(snapshot.waiting_pairs)
        await self._refresh_holdout(snapshot)

    async def _update_holdout(self, purpose: str) -> HoldoutCollection:
        """Return the held-out traces by the rule that follows from the number of known purposes."""
        n_wanted = MIN_PURPOSES * self._settings.holdout_folds
        if self._holdout is None:
            self._purposes |= await self._store.purposes(limit=n_wanted)
        self._purposes |= {purpose} if len(self._purposes) < n_wanted else set()
        if self._holdout is None or self._holdout.rule != self._holdout_rule:
            return await self._refresh_holdout(await take_snapshot(self._store))
        return self._holdout

    @property
    def _holdout_rule(self) -> HoldoutRule:
        settings = self._settings
        return HoldoutRule.choose(
            len(self._purposes), n_folds=settings.holdout_folds, holdout_by=settings.holdout_by
        )

    async def _refresh_holdout(self, snapshot: MemorySnapshot) -> HoldoutCollection:
        holdout = await self._collect_holdout(snapshot)
        if holdout.missing_traces is not None and holdout.missing_traces.reason == "level_used_up":
            fresh = await self._collect_holdout(snapshot, only_untested=True)
            holdout = fresh if fresh.missing_traces is None else holdout
        self._holdout = holdout
        self._known_pair_ids = snapshot.known_pair_ids
        self._n_waiting = len(snapshot.waiting_pairs)
        return holdout

    async def _collect_holdout(
        self, snapshot: MemorySnapshot, *, only_untested: bool = False
    ) -> HoldoutCollection:
        limit, before = self._settings.max_held_out_traces, None
        holdout = HoldoutCollection(self._holdout_rule, snapshot, limit=limit, only_untested=only_untested)
        while not holdout.is_full and (
            page := await self._store.testable_traces(before=before, limit=PAGE_SIZE)
        ):
            for one in page:
                if not one.has_pairs:
                    holdout.add(one.id, one.purpose, one.content_hash)
            before = page[-1].number
        return holdout

    async def _load_traces(self, ids: tuple[str, ...]) -> list[Trace]:
        stored_traces = [await self._store.trace(trace) for trace in ids]
        return [Trace.from_stored(stored) for stored in stored_traces if stored is not None]
