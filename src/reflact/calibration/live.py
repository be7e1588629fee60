"""What a calibrator does with one trace after the other, beside an agent."""

from __future__ import annotations

from collections.abc import Iterable

from reflact.calibration.holding import PURPOSES, Slices, in_turn, kept, known, worn
from reflact.calibration.replay import look_through, steps_of
from reflact.calibration.review import NotEnoughTraces
from reflact.calibration.reviewing import Standing
from reflact.calibration.rounds import Memory, Rounds
from reflact.calibration.settings import CalibratorSettings
from reflact.calibration.tally import Stored
from reflact.calibration.trace import Trace
from reflact.memory_cards import LEAST_TRACES, mark_of

PAGE = 200
"""Stored traces that are looked at together, without their steps."""


class Gathered:
    """Traces that can test in this turn of each kept slice: the newest, by what they hold, and their ids.

    Args:
        slices: How traces are sorted.
        standing: What was learned from, and what was tested.
        most: Traces of each slice that are enough.
    """

    def __init__(self, slices: Slices, standing: Standing, *, most: int) -> None:
        self.slices = slices
        self._most = most
        self._taught = standing.taught
        numbers = kept(slices, standing.taught)
        self._order = in_turn(numbers, slices, standing.tests)
        self._worn = {number: worn(slices.name(number), standing.tests) for number in numbers}
        self._found: dict[int, dict[str, str]] = {number: {} for number in numbers}

    @property
    def full(self) -> bool:
        """Whether no slice needs more."""
        return all(len(found) >= self._most for found in self._found.values())

    def holds(self, trace_id: str, purpose: str) -> bool:
        """Whether a trace is in a kept slice."""
        return self.slices.place(trace_id, purpose) in self._found

    def take(self, trace_id: str, purpose: str, content: str) -> None:
        """Take up a trace with known steps, if it is in a kept slice, unspoilt, and not worn."""
        number = self.slices.place(trace_id, purpose)
        if number not in self._found or self._taught.spoils(self.slices, trace_id, purpose):
            return
        found = self._found[number]
        if len(found) < self._most and self._worn[number].isdisjoint({mark_of(trace_id), mark_of(content)}):
            found.setdefault(content, trace_id)

    @property
    def turn(self) -> int | None:
        """The slice that tests now: that whose turn it is, or the other where only that has enough traces."""
        return next((n for n in self._order if len(self._found[n]) >= LEAST_TRACES), None)

    @property
    def few(self) -> NotEnoughTraces:
        """What is missing where no slice has enough traces."""
        most = max(len(found) for found in self._found.values())
        return NotEnoughTraces(traces=most, worn=any(self._worn.values()))

    def rested(self, number: int, traces: Iterable[Trace]) -> list[Trace]:
        """Return loaded traces without those that were worn before they grew to what they hold now."""
        return [trace for trace in traces if self._worn[number].isdisjoint(trace.recording.marks)]

    def ids(self, number: int) -> tuple[str, ...]:
        """Return the traces of a slice, the newest first."""
        return tuple(self._found[number].values())


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
        if known(trace) and gathered.holds(trace.id, trace.purpose):
            await look_through([trace])
            gathered.take(trace.id, trace.purpose, trace.recording.contents[-1])
        return gathered.holds(trace.id, trace.purpose)

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
        gathered = self._gathered
        if gathered.turn is not None:
            gathered = await self._look(standing)
        if gathered.turn is None:
            if not self._told:
                self._rounds.tested(gathered.few, self._waiting, "promote")
            self._told = True
            return
        self._told = False
        loaded = await self._loaded(gathered.ids(gathered.turn))
        traces = gathered.rested(gathered.turn, loaded)
        batch = standing.testable(traces)
        self._due = self._settings.batch
        if batch:
            name = gathered.slices.name(gathered.turn)
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
        gathered = Gathered(self._slices, standing, most=self._settings.most_held_out)
        before: int | None = None
        while page := await self._store.testable(before=before, most=PAGE):
            for one in page:
                if not one.taught:
                    gathered.take(one.id, one.purpose, one.content)
            if gathered.full:
                break
            before = page[-1].number
        self._gathered = gathered
        self._known = standing.known
        self._waiting = len(standing.waiting)
        return gathered

    async def _loaded(self, ids: tuple[str, ...]) -> list[Trace]:
        found = [await self._store.trace(trace) for trace in ids]
        traces = [Trace.of(stored) for stored in found if stored is not None]
        await look_through(traces)
        return traces
