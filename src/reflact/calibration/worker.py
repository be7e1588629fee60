"""Learns from one trace after the other, beside an agent."""

from __future__ import annotations

from reflact.calibration.generation import CalibrationRuntime
from reflact.calibration.labeled_steps import list_labeled_steps
from reflact.calibration.loop import CalibrationLoop
from reflact.calibration.pairs import choose_batch
from reflact.calibration.promotion import MemorySnapshot, take_snapshot
from reflact.calibration.significance import NotTested, find_missing_traces
from reflact.calibration.splits import MIN_PURPOSES, HoldoutRule, list_labeled_events
from reflact.calibration.trace import Trace
from reflact.memory.cards import TraceIdentity, count_tests

# Stored traces that are read at a time, without their steps.
PAGE_SIZE = 200


class TraceLearner:
    """Stores traces, makes pairs of those that are not held out, and tests the pairs once so many
    new ones wait.

    The memory is read at the first trace and at every test; between these, the work of other
    processes makes no difference.
    """

    def __init__(self, runtime: CalibrationRuntime, loop: CalibrationLoop) -> None:
        self._store = runtime.store
        self._settings = runtime.settings
        self._loop = loop
        self._purposes: set[str] = set()
        self._known_pair_ids: frozenset[str] | None = None
        self._n_new = 0
        self._has_new_holdout = True
        self._has_reported_missing = False

    async def store_trace(self, trace: Trace) -> bool:
        """Store a trace and return whether it is held out."""
        await trace.save_to(self._store)
        n_wanted = MIN_PURPOSES * self._settings.holdout_folds
        if self._known_pair_ids is None:
            self._purposes |= await self._store.purposes(limit=n_wanted)
            snapshot = await take_snapshot(self._store)
            self._known_pair_ids = snapshot.known_pair_ids
            self._n_new = len(snapshot.waiting_pairs)
        if len(self._purposes) < n_wanted:
            self._purposes.add(trace.purpose)
        is_held_out = self._rule.is_held_out(trace.id, trace.purpose)
        if is_held_out and list_labeled_events(trace):
            self._has_new_holdout = True
        return is_held_out

    async def make_pairs(self, trace: Trace) -> None:
        """Make the pairs of a trace."""
        known = self._known_pair_ids or frozenset()
        generated = await self._loop.generator.make_trace_pairs(trace, known_pair_ids=known)
        self._n_new += generated.n_new

    async def test_if_due(self) -> None:
        """Test the waiting pairs once there are a batch of new ones and enough held-out traces.

        Missing traces are reported once. Pairs that no test followed for wait for another batch.
        """
        if self._n_new < self._settings.batch_size or not self._has_new_holdout:
            return
        snapshot = await take_snapshot(self._store)
        trace_ids, missing = await self._find_test_traces(snapshot)
        if missing is not None:
            self._has_new_holdout = False
            if not self._has_reported_missing:
                self._loop.emit_tested(missing, self._n_new)
            self._has_reported_missing = True
            return
        self._has_reported_missing = False
        self._n_new = 0
        stored = [await self._store.trace(trace_id) for trace_id in trace_ids]
        traces = [Trace.from_stored(one) for one in stored if one is not None]
        waiting = snapshot.list_testable_pairs(traces)
        batch = choose_batch(waiting, max_pairs=self._settings.max_pairs)
        if batch:
            await self._loop.test_batch(
                batch,
                list_labeled_steps(traces),
                promoted=snapshot.promoted,
                name=self._rule.held_out_name,
            )
            snapshot = await take_snapshot(self._store)
        self._known_pair_ids = snapshot.known_pair_ids

    @property
    def _rule(self) -> HoldoutRule:
        """The rule that follows from the number of known purposes."""
        settings = self._settings
        return HoldoutRule.choose(
            len(self._purposes), n_folds=settings.holdout_folds, holdout_by=settings.holdout_by
        )

    async def _find_test_traces(
        self, snapshot: MemorySnapshot
    ) -> tuple[tuple[str, ...], NotTested | None]:
        """Return the newest held-out traces that may test, and what is missing."""
        limit = self._settings.max_held_out_traces
        rule = self._rule
        ids_by_content: dict[str, str] = {}
        before: int | None = None
        while len(ids_by_content) < limit:
            page = await self._store.testable_traces(before=before, limit=PAGE_SIZE)
            if not page:
                break
            before = page[-1].number
            for one in page:
                if (
                    not one.has_pairs
                    and rule.is_held_out(one.id, one.purpose)
                    and not snapshot.learned.disqualifies(rule, one.id, one.purpose)
                    and len(ids_by_content) < limit
                ):
                    ids_by_content.setdefault(one.content_hash, one.id)
        identities = [TraceIdentity(one, (content,)) for content, one in ids_by_content.items()]
        n_tests = count_tests(snapshot.tests, identities)
        missing = find_missing_traces(identities, n_earlier_tests=n_tests)
        return tuple(ids_by_content.values()), missing
