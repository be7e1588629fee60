"""What a calibrator does with one trace after the other, beside an agent."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio

from reflact.calibration.checkpoint import StoredGeneration
from reflact.calibration.config import CalibratorSettings, FullQueuePolicy
from reflact.calibration.promotion import MemorySnapshot
from reflact.calibration.replay import list_labeled_steps, load_recordings
from reflact.calibration.rounds import RoundRunner
from reflact.calibration.significance import NotEnoughTraces, find_missing_traces
from reflact.calibration.splits import MIN_PURPOSES, HoldoutRule, list_labeled_events, list_tested_marks
from reflact.calibration.trace import Trace
from reflact.memory.cards import TraceIdentity, compute_fingerprint, count_tests

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

T = TypeVar("T")

PAGE_SIZE = 200
"""Stored traces that are looked at together, without their steps."""


class QueueResult(NamedTuple, Generic[T]):
    """What became of an offer: whether it was queued, and what had to leave for it."""

    is_queued: bool
    dropped_element: T | None = None


class BoundedQueue(Generic[T]):
    """What waits to be taken, first come, first served.

    Args:
        size: Elements at most.
        full_queue_policy: ``drop_oldest`` makes room by dropping what waited longest; ``reject`` and ``block`` refuse
            an offer, and ``block`` means that ``put`` waits for room instead.
    """

    def __init__(self, size: int, full_queue_policy: FullQueuePolicy) -> None:
        self._size = size
        self._full_queue_policy = full_queue_policy
        self._elements: deque[T] = deque()
        self._changed = anyio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._elements)

    def offer(self, element: T) -> QueueResult[T]:
        """Queue an element if that is possible at once."""
        if self._closed:
            return QueueResult(is_queued=False)
        dropped = None
        if len(self._elements) >= self._size:
            if self._full_queue_policy != "drop_oldest":
                return QueueResult(is_queued=False)
            dropped = self._elements.popleft()
        self._elements.append(element)
        self._notify()
        return QueueResult(is_queued=True, dropped_element=dropped)

    async def put(self, element: T) -> QueueResult[T]:
        """Queue an element; waits for room if the policy is ``block``."""
        while self._full_queue_policy == "block" and len(self._elements) >= self._size and not self._closed:
            await self._changed.wait()
        return self.offer(element)

    async def take(self) -> T:
        """Return what waited longest, once there is something."""
        while not self._elements:
            await self._changed.wait()
        element = self._elements.popleft()
        self._notify()
        return element

    def close(self) -> None:
        """Refuse everything from now on, also what waits for room."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class HoldoutCollection:
    """Held-out traces that can test now: the newest, by what they hold, and their ids.

    Args:
        rule: Which traces are held out.
        snapshot: What was learned from, and what was tested.
        limit: Traces that are enough.
        only_untested: Whether only traces count on which nothing was tested.
    """

    def __init__(
        self, rule: HoldoutRule, snapshot: MemorySnapshot, *, limit: int, only_untested: bool = False
    ) -> None:
        self.rule = rule
        self._limit = limit
        self._training_history = snapshot.training_history
        self._tests = snapshot.tests
        self._excluded_marks = list_tested_marks(snapshot.tests) if only_untested else frozenset[str]()
        self._trace_ids_by_content: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether there are enough."""
        return len(self._trace_ids_by_content) >= self._limit

    def add(self, trace_id: str, purpose: str, content_hash: str) -> None:
        """Take up a trace with known steps, if it is held out and may test."""
        if not self.rule.is_held_out(trace_id, purpose) or self._training_history.disqualifies(
            self.rule, trace_id, purpose
        ):
            return
        if not self.is_full and self._excluded_marks.isdisjoint(
            {compute_fingerprint(trace_id), compute_fingerprint(content_hash)}
        ):
            self._trace_ids_by_content.setdefault(content_hash, trace_id)

    @property
    def missing_traces(self) -> NotEnoughTraces | None:
        """What is missing for a test; None if nothing is."""
        traces = [
            TraceIdentity(trace_id, (content,)) for content, trace_id in self._trace_ids_by_content.items()
        ]
        return find_missing_traces(traces, n_earlier_tests=count_tests(self._tests, traces))

    @property
    def trace_ids(self) -> tuple[str, ...]:
        """The traces, the newest first."""
        return tuple(self._trace_ids_by_content.values())


class TraceLearner:
    """Keeps traces, makes pairs of those that are not held out, tests them once there are enough.

    What is held out, and what is known, is read from the store at the first trace and before and after every
    test: between these, other processes' work makes no difference to it. Traces are looked at without their
    steps, the newest first and only as far as that decides something; those that test are loaded for their
    test. That there are too few of them is told once, until there are enough.

    Args:
        store: Where everything is.
        rounds: Makes and tests pairs.
        settings: How many of each.
    """

    def __init__(self, store: MemoryStore, rounds: RoundRunner, *, settings: CalibratorSettings) -> None:
        self._store = store
        self._rounds = rounds
        self._writer = rounds.make_writer()
        self._settings = settings
        self._purposes: set[str] = set()
        self._holdout: HoldoutCollection | None = None
        self._known_pair_ids: frozenset[str] = frozenset()
        self._n_waiting = 0
        self._next_test_at = settings.batch_size
        self._reported_missing = False

    async def store_trace(self, trace: Trace) -> bool:
        """Store a trace and say whether it is held out."""
        await trace.save_to(self._store)
        gathered = await self._holdout_for(trace.purpose)
        held_out = gathered.rule.is_held_out(trace.id, trace.purpose)
        if held_out and list_labeled_events(trace):
            await load_recordings([trace])
            gathered.add(trace.id, trace.purpose, trace.recording.content_hashes[-1])
        return held_out

    async def generate_pairs(self, trace: Trace) -> StoredGeneration:
        """Make the pairs of a trace."""
        if not await self._store.remaining_capacity():
            return StoredGeneration(is_memory_full=True)
        generation = await self._rounds.generate_pairs(
            trace, self._rounds.first_round_plan, writer=self._writer, known_pair_ids=self._known_pair_ids
        )
        self._writer.stop_if_silent()
        self._n_waiting += generation.n_new
        return generation

    async def test_if_due(self) -> None:
        """Test the pairs that wait, if they are enough for a batch and the held-out traces for a test.

        If scoring came to no test, it is paid for again only once another batch of pairs waits.
        """
        if self._n_waiting < self._next_test_at or self._holdout is None:
            return
        snapshot = await self._rounds.tester.take_snapshot()
        holdout = (
            await self._refresh_holdout(snapshot) if self._holdout.missing_traces is None else self._holdout
        )
        if holdout.missing_traces is not None:
            if not self._reported_missing:
                self._rounds.emit_tested(holdout.missing_traces, self._n_waiting)
            self._reported_missing = True
            return
        self._reported_missing = False
        traces = await self._load_traces(holdout.trace_ids)
        batch = snapshot.list_testable_pairs(traces)
        self._next_test_at = self._settings.batch_size
        if batch:
            name = holdout.rule.held_out_name
            result = await self._rounds.test_batch(
                batch, list_labeled_steps(traces), snapshot=snapshot, name=name
            )
            snapshot = await self._rounds.tester.take_snapshot()
            if isinstance(result, NotEnoughTraces):
                self._next_test_at += len(snapshot.waiting_pairs)
        await self._refresh_holdout(snapshot)

    async def _holdout_for(self, purpose: str) -> HoldoutCollection:
        """Return what is gathered, with traces sorted as many purposes as are known ask for."""
        n_wanted = MIN_PURPOSES * self._settings.holdout_folds
        if self._holdout is None:
            self._purposes |= await self._store.purposes(limit=n_wanted)
        self._purposes |= {purpose} if len(self._purposes) < n_wanted else set()
        if self._holdout is None or self._holdout.rule != self._holdout_rule:
            return await self._refresh_holdout(await self._rounds.tester.take_snapshot())
        return self._holdout

    @property
    def _holdout_rule(self) -> HoldoutRule:
        settings = self._settings
        return HoldoutRule.choose(
            len(self._purposes), n_folds=settings.holdout_folds, holdout_by=settings.holdout_by
        )

    async def _refresh_holdout(self, snapshot: MemorySnapshot) -> HoldoutCollection:
        gathered = await self._collect_holdout(snapshot)
        if gathered.missing_traces is not None and gathered.missing_traces.n_tested:
            fresh = await self._collect_holdout(snapshot, only_untested=True)
            gathered = fresh if fresh.missing_traces is None else gathered
        self._holdout = gathered
        self._known_pair_ids = snapshot.known_pair_ids
        self._n_waiting = len(snapshot.waiting_pairs)
        return gathered

    async def _collect_holdout(
        self, snapshot: MemorySnapshot, *, only_untested: bool = False
    ) -> HoldoutCollection:
        gathered = HoldoutCollection(
            self._holdout_rule,
            snapshot,
            limit=self._settings.max_held_out_traces,
            only_untested=only_untested,
        )
        before: int | None = None
        while not gathered.is_full and (
            page := await self._store.testable_traces(before=before, limit=PAGE_SIZE)
        ):
            for one in page:
                if not one.has_pairs:
                    gathered.add(one.id, one.purpose, one.content_hash)
            before = page[-1].number
        return gathered

    async def _load_traces(self, ids: tuple[str, ...]) -> list[Trace]:
        stored_traces = [await self._store.trace(trace) for trace in ids]
        traces = [Trace.from_stored(stored) for stored in stored_traces if stored is not None]
        await load_recordings(traces)
        return traces
