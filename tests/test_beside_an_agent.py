"""Beside an agent: what is held out, in which turns, and how little of the store is looked at for it."""

from __future__ import annotations

from collections import Counter

import anyio

from calibration_memory import ListMemory
from flattered_world import PURPOSE, flattered, steps
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.events import BatchTested, CalibrationEvent, NotTested, TraceTaken
from reflact.calibration.holding import ROTATE, Slices, Taught, kept
from reflact.calibration.settings import CalibratorSettings, PairSettings, SlicesBy
from reflact.calibration.trace import Trace
from reflact.memory import Evaluation
from reflact.memory_cards import level
from reflact.memory_ports import ListedTrace, StoredTrace

BY_TRACE = Slices(4, "trace")


def settings(batch: int = 4, *, by: SlicesBy | None = None, most: int = 100) -> CalibratorSettings:
    """Return settings without judges, with a pair for each step."""
    contrast = PairSettings(judges=0, per_event=1)
    return CalibratorSettings(contrast=contrast, batch=batch, slices_by=by, most_held_out=most)


def recorded(name: str, purpose: str = PURPOSE, content: str | None = None) -> Trace:
    """Return a trace of a step that claims success; it holds what its name says, unless told otherwise."""
    trace = Trace(purpose, id=name)
    for step, gold in steps(content or name, 0, count=1, claims=[True]):
        said = Evaluation(phi_before=0, phi_after=gold.phi_after + 3, reasoning="Done.", evidence=("filed",))
        trace.record(step, said, gold=gold)
    return trace


class Counting(ListMemory):
    """Counts what is read of stored traces."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.pages: list[int] = []

    async def trace(self, trace_id: str) -> StoredTrace | None:
        self.loaded.append(trace_id)
        return await super().trace(trace_id)

    async def testable(self, *, before: int | None, most: int) -> tuple[ListedTrace, ...]:
        found = await super().testable(before=before, most=most)
        self.pages.append(len(found))
        return found


def worked_on(
    traces: list[Trace], chosen: CalibratorSettings, memory: ListMemory | None = None
) -> tuple[ListMemory, list[CalibrationEvent]]:
    """Hand traces over, one after the other, and return what is stored and what was told."""
    told: list[CalibrationEvent] = []
    memory = memory or ListMemory()

    async def main() -> None:
        async with Calibrator(flattered(), memory, settings=chosen, tell=told.append) as calibrator:
            for trace in traces:
                calibrator.submit(trace)
                await calibrator.idle()

    anyio.run(main)
    return memory, told


def learned(memory: ListMemory) -> set[str]:
    """Return the traces that pairs were made of."""
    return {origin.trace_id for one in memory.stored.values() for origin in one.origins}


def test_slices_take_turns_on_traces_that_nothing_was_tested_on() -> None:
    """Two slices test in turns of eight, no test comes after more than seven, and none was learned from."""
    memory, told = worked_on([recorded(f"t{n}") for n in range(400)], settings())
    tests = memory.booked
    names = [test.held_out for test in tests]
    assert len(set(names)) == 2
    assert set(Counter(names[:-1][i] for i in range(0, len(names) - 1, ROTATE)).values()) <= {1, 2, 3}
    assert max(test.before for test in tests) < ROTATE
    assert min(t.evidence.alpha for t in told if isinstance(t, BatchTested)) >= level(ROTATE - 1)
    held = {t.trace_id for t in told if isinstance(t, TraceTaken) and t.use == "hold_out"}
    assert not held & learned(memory)
    assert {BY_TRACE.place(name, PURPOSE) for name in held} == set(kept(BY_TRACE, Taught()))
    marks = {recorded(f"t{n}").recording.mark for n in range(400) if f"t{n}" in held}
    assert {mark for test in tests for mark in test.traces or ()} <= marks


def test_pairs_wait_where_no_slice_has_fresh_traces() -> None:
    """After a turn of each slice pairs wait instead of lowering the level; it is told once, and goes on."""
    known = [recorded(f"t{n}") for n in range(120)]
    silent = [recorded(f"s{n}") for n in range(300)]
    more = [recorded(f"u{n}") for n in range(120)]
    for trace in silent:
        trace._events[0] = trace._events[0].model_copy(update={"gold": None})
    memory, told = worked_on([*known, *silent], settings(1))
    made = len(memory.booked)
    assert made == 2 * ROTATE
    waits = [one for one in told if isinstance(one, NotTested)]
    assert "next turn takes at least 20" in waits[-1].words
    assert len(waits) <= 3
    worked_on(more, settings(1), memory)
    assert len(memory.booked) > made
    assert max(test.before for test in memory.booked) < ROTATE


def test_a_trace_that_grew_is_as_worn_as_it_was() -> None:
    """Handed over again with a step more, traces that had their turn begin no new one."""
    chosen = settings(1, most=30)
    memory, _ = worked_on([recorded(f"t{n}") for n in range(250)], chosen)
    made = len(memory.booked)
    grown = [recorded(f"t{n}") for n in range(250) if BY_TRACE.place(f"t{n}", PURPOSE) in {0, 1}]
    for trace in grown:
        ((step, gold), *_) = steps(f"{trace.id} later", 1, count=1, claims=[True])
        trace.record(step, gold=gold)
    more = [name for n in range(400) if BY_TRACE.place(name := f"u{n}", PURPOSE) not in {0, 1}][:20]
    worked_on([*grown, *map(recorded, more)], chosen, memory)
    assert max(test.before for test in memory.booked) < ROTATE
    assert len(memory.booked) - made <= ROTATE


def test_the_newest_held_out_traces_test() -> None:
    """Of more traces than are scored those count that came last, whatever they are called."""
    names = [f"t{n}" for n in range(400) if BY_TRACE.place(f"t{n}", PURPOSE) == 0][:60]
    first = [name for n in range(400) if BY_TRACE.place(name := f"l{n}", PURPOSE) not in {0, 1}][:4]
    order = sorted(names, reverse=True)
    memory, _ = worked_on([recorded(name) for name in (*order, *first)], settings(most=25))
    (test,) = memory.booked
    assert set(test.traces or ()) == {recorded(name).recording.mark for name in order[-25:]}


def test_copies_beside_an_agent_are_one_trace() -> None:
    """Thirty recordings of one run are no thirty traces to test on."""
    names = [f"t{n}" for n in range(400) if BY_TRACE.place(f"t{n}", PURPOSE) == 0][:30]
    others = [name for n in range(400) if BY_TRACE.place(name := f"l{n}", PURPOSE) not in {0, 1}][:8]
    traces = [*(recorded(name, content="one run") for name in names), *map(recorded, others)]
    memory, told = worked_on(traces, settings())
    assert memory.booked == []
    assert [one.traces for one in told if isinstance(one, NotTested)] == [1]


def test_purposes_stay_on_their_side_beside_an_agent() -> None:
    """By purpose none that is learned from is held out; with enough of them that is what happens unasked."""
    runs = [(f"t{n}", f"Purpose {n % 40}.") for n in range(400)]
    for by in ("purpose", None):
        memory, told = worked_on([recorded(*run) for run in runs], settings(by=by))
        purposes = dict(runs)
        taught = {purposes[name] for name in learned(memory)}
        late = {t.trace_id for t in told if isinstance(t, TraceTaken) and t.use == "hold_out"} - {
            f"t{n}" for n in range(8)
        }
        tested = {test.held_out for test in memory.booked}
        assert tested
        assert all(name.endswith(", by purpose") for name in tested)
        marks = {mark for test in memory.booked for mark in test.traces or ()}
        testing = {purposes[n] for n, p in runs if recorded(n, p).recording.mark in marks}
        assert not testing & taught
        assert late


def test_a_large_store_is_not_loaded_to_begin() -> None:
    """The first trace beside thousands loads none of them, and looks at the pages that decide something."""
    memory = Counting()

    async def fill() -> None:
        for number in range(3000):
            await recorded(f"old {number}").keep(memory)

    anyio.run(fill)
    worked_on([recorded("new")], settings(100), memory)
    assert memory.loaded == []
    assert len(memory.pages) <= 3
    memory.pages.clear()
    names = [name for n in range(400) if BY_TRACE.place(name := f"l{n}", PURPOSE) not in {0, 1}][:4]
    worked_on([recorded(name) for name in names], settings(4, most=30), memory)
    assert len(memory.loaded) == 30
    assert max(memory.pages) <= 200
