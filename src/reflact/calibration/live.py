"""What a calibrator does with one trace after the other, beside an agent."""

from __future__ import annotations

from reflact.calibration.holding import held_slice, known, slice_name
from reflact.calibration.replay import steps_of
from reflact.calibration.review import NotEnoughTraces, enough, slice_of
from reflact.calibration.reviewing import Standing
from reflact.calibration.rounds import Memory, Rounds
from reflact.calibration.settings import CalibratorSettings
from reflact.calibration.tally import Stored
from reflact.calibration.trace import Trace


class Learning:
    """Keeps traces, makes pairs of those that are not held out, tests them once there are enough.

    Which slice is held out, and what is known, is read from the store at the first trace and after every
    test: between these, other processes' work makes no difference to it. That there are too few held-out
    traces is told once, until there are enough.

    Args:
        store: Where everything is.
        rounds: Makes and tests pairs.
        settings: How many of each.
    """

    def __init__(self, store: Memory, rounds: Rounds, *, settings: CalibratorSettings) -> None:
        self._store = store
        self._rounds = rounds
        self._settings = settings
        self._slice: int | None = None
        self._known: frozenset[str] = frozenset()
        self._waiting = 0
        self._due = settings.batch
        self._held: set[str] = set()
        self._told = False

    async def keep(self, trace: Trace) -> bool:
        """Store a trace and say whether it is held out."""
        await trace.keep(self._store)
        if self._slice is None:
            await self._look(await self._rounds.reviewer.standing())
        held_out = slice_of(trace.id, slices=self._settings.slices) == self._slice
        if held_out and known(trace):
            self._held.add(trace.id)
        return held_out

    async def learn(self, trace: Trace) -> Stored:
        """Make the pairs of a trace."""
        if not await self._store.room():
            return Stored(full=True)
        made = await self._rounds.make(trace, self._rounds.first, known_ids=self._known)
        self._waiting += made.new
        return made

    async def test(self) -> None:
        """Test the pairs that wait, if they are enough for a batch and the held-out traces for a test.

        Where scoring came to no test, it is paid for again only once another batch of pairs waits.
        """
        if self._waiting < self._due or self._slice is None:
            return
        few = enough(self._held)
        if few is not None:
            if not self._told:
                self._rounds.tested(few, self._waiting, "promote")
            self._told = True
            return
        self._told = False
        standing = await self._rounds.reviewer.standing()
        traces = await self._held_out(standing)
        batch = standing.testable(traces)
        self._due = self._settings.batch
        if batch:
            name = slice_name(self._slice, self._settings.slices)
            result = await self._rounds.test(batch, steps_of(traces), standing=standing, name=name)
            standing = await self._rounds.reviewer.standing()
            if isinstance(result, NotEnoughTraces):
                self._due += len(standing.waiting)
        await self._look(standing)

    async def _look(self, standing: Standing) -> None:
        ids = [trace.id for trace in await self._stored(None) if known(trace)]
        self._slice = held_slice(
            ids, learned=standing.learned, tests=standing.tests, slices=self._settings.slices
        )
        self._held = {
            trace
            for trace in ids
            if trace not in standing.learned and slice_of(trace, slices=self._settings.slices) == self._slice
        }
        self._known = standing.known
        self._waiting = len(standing.waiting)

    async def _held_out(self, standing: Standing) -> list[Trace]:
        traces = [t for t in await self._stored(self._slice) if known(t) and t.id not in standing.learned]
        return traces[: self._settings.most_held_out]

    async def _stored(self, number: int | None) -> list[Trace]:
        """Return stored traces in the order of their ids: those of a slice, or all."""
        slices = self._settings.slices
        ids = [
            trace
            for trace in await self._store.trace_ids()
            if number is None or slice_of(trace, slices=slices) == number
        ]
        found = [await self._store.trace(trace) for trace in ids]
        return [Trace.of(stored) for stored in found if stored is not None]
