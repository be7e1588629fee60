"""What a calibrator does with one trace after the other, beside an agent."""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

import anyio

from reflact.calibration.config import CalibratorSettings, WhenFull
from reflact.calibration.course import Stored
from reflact.calibration.holding import PURPOSES, Slices, known, marks_tested
from reflact.calibration.replay import look_through, steps_of
from reflact.calibration.review import NotEnoughTraces, enough
from reflact.calibration.reviewing import Standing
from reflact.calibration.rounds import Memory, Rounds
from reflact.calibration.trace import Trace
from reflact.memory_cards import Recording, mark_of
from reflact.memory_ports import count_tests

T = TypeVar("T")

PAGE = 200
"""Stored traces that are looked at together, without their steps."""


class Offered(NamedTuple, Generic[T]):
    """What became of an offer: whether it was queued, and what had to leave for it."""

    taken: bool
    dropped: T | None = None


class Waiting(Generic[T]):
    """What waits to be taken, first come, first served.

    Args:
        size: Elements at most.
        when_full: ``drop_oldest`` makes room by dropping what waited longest; ``reject`` and ``block`` refuse
            an offer, and ``block`` means that ``put`` waits for room instead.
    """

    def __init__(self, size: int, when_full: WhenFull) -> None:
        self._size = size
        self._when_full = when_full
        self._elements: deque[T] = deque()
        self._changed = anyio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._elements)

    def offer(self, element: T) -> Offered[T]:
        """Queue an element if that is possible at once."""
        if self._closed:
            return Offered(taken=False)
        dropped = None
        if len(self._elements) >= self._size:
            if self._when_full != "drop_oldest":
                return Offered(taken=False)
            dropped = self._elements.popleft()
        self._elements.append(element)
        self._change()
        return Offered(taken=True, dropped=dropped)

    async def put(self, element: T) -> Offered[T]:
        """Queue an element; waits for room where the policy is ``block``."""
        while self._when_full == "block" and len(self._elements) >= self._size and not self._closed:
            await self._changed.wait()
        return self.offer(element)

    async def take(self) -> T:
        """Return what waited longest, once there is something."""
        while not self._elements:
            await self._changed.wait()
        element = self._elements.popleft()
        self._change()
        return element

    def close(self) -> None:
        """Refuse everything from now on, also what waits for room."""
        self._closed = True
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class Gathered:
    """Held-out traces that can test now: the newest, by what they hold, and their ids.

    Args:
        slices: Which traces are held out.
        standing: What was learned from, and what was tested.
        most: Traces that are enough.
        fresh: Whether only traces count on which nothing was tested.
    """

    def __init__(self, slices: Slices, standing: Standing, *, most: int, fresh: bool = False) -> None:
        self.slices = slices
        self._most = most
        self._taught = standing.taught
        self._tests = standing.tests
        self._left_out = marks_tested(standing.tests) if fresh else frozenset[str]()
        self._found: dict[str, str] = {}

    @property
    def full(self) -> bool:
        """Whether there are enough."""
        return len(self._found) >= self._most

    def take(self, trace_id: str, purpose: str, content: str) -> None:
        """Take up a trace with known steps, if it is held out and may test."""
        if not self.slices.holds(trace_id, purpose) or self._taught.spoils(self.slices, trace_id, purpose):
            return
        if not self.full and self._left_out.isdisjoint({mark_of(trace_id), mark_of(content)}):
            self._found.setdefault(content, trace_id)

    @property
    def few(self) -> NotEnoughTraces | None:
        """What is missing for a test; None if nothing is."""
        traces = [Recording(trace_id, (content,)) for content, trace_id in self._found.items()]
        return enough(traces, before=count_tests(self._tests, traces))

    @property
    def ids(self) -> tuple[str, ...]:
        """The traces, the newest first."""
        return tuple(self._found.values())


class Learning:
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

    def __init__(self, store: Memory, rounds: Rounds, *, settings: CalibratorSettings) -> None:
        self._store = store
        self._rounds = rounds
        self._writer = rounds.writer()
        self._settings = settings
        self._purposes: set[str] = set()
        self._gathered: Gathered | None = None
        self._known: frozenset[str] = frozenset()
        self._waiting = 0
        self._due = settings.batch
        self._told = False

    async def keep(self, trace: Trace) -> bool:
        """Store a trace and say whether it is held out."""
        await trace.keep(self._store)
        gathered = await self._current(trace.purpose)
        held_out = gathered.slices.holds(trace.id, trace.purpose)
        if held_out and known(trace):
            await look_through([trace])
            gathered.take(trace.id, trace.purpose, trace.recording.contents[-1])
        return held_out

    async def learn(self, trace: Trace) -> Stored:
        """Make the pairs of a trace."""
        if not await self._store.room():
            return Stored(full=True)
        made = await self._rounds.make(trace, self._rounds.first, writer=self._writer, known_ids=self._known)
        self._writer.settle()
        self._waiting += made.new
        return made

    async def test(self) -> None:
        """Test the pairs that wait, if they are enough for a batch and the held-out traces for a test.

        Where scoring came to no test, it is paid for again only once another batch of pairs waits.
        """
        if self._waiting < self._due or self._gathered is None:
            return
        standing = await self._rounds.reviewer.standing()
        gathered = await self._look(standing) if self._gathered.few is None else self._gathered
        if gathered.few is not None:
            if not self._told:
                self._rounds.tested(gathered.few, self._waiting, "promote")
            self._told = True
            return
        self._told = False
        traces = await self._loaded(gathered.ids)
        batch = standing.testable(traces)
        self._due = self._settings.batch
        if batch:
            name = gathered.slices.name
            result = await self._rounds.test(batch, steps_of(traces), standing=standing, name=name)
            standing = await self._rounds.reviewer.standing()
            if isinstance(result, NotEnoughTraces):
                self._due += len(standing.waiting)
        await self._look(standing)

    async def _current(self, purpose: str) -> Gathered:
        """Return what is gathered, with traces sorted as many purposes as are known ask for."""
        wanted = PURPOSES * self._settings.slices
        if self._gathered is None:
            self._purposes |= await self._store.purposes(most=wanted)
        self._purposes |= {purpose} if len(self._purposes) < wanted else set()
        if self._gathered is None or self._gathered.slices != self._slices:
            return await self._look(await self._rounds.reviewer.standing())
        return self._gathered

    @property
    def _slices(self) -> Slices:
        settings = self._settings
        return Slices.of(len(self._purposes), total=settings.slices, by=settings.slices_by)

    async def _look(self, standing: Standing) -> Gathered:
        gathered = await self._gather(standing)
        if gathered.few is not None and gathered.few.tested:
            fresh = await self._gather(standing, fresh=True)
            gathered = fresh if fresh.few is None else gathered
        self._gathered = gathered
        self._known = standing.known
        self._waiting = len(standing.waiting)
        return gathered

    async def _gather(self, standing: Standing, *, fresh: bool = False) -> Gathered:
        gathered = Gathered(self._slices, standing, most=self._settings.most_held_out, fresh=fresh)
        before: int | None = None
        while not gathered.full and (page := await self._store.testable(before=before, most=PAGE)):
            for one in page:
                if not one.taught:
                    gathered.take(one.id, one.purpose, one.content)
            before = page[-1].number
        return gathered

    async def _loaded(self, ids: tuple[str, ...]) -> list[Trace]:
        found = [await self._store.trace(trace) for trace in ids]
        traces = [Trace.of(stored) for stored in found if stored is not None]
        await look_through(traces)
        return traces
