"""Beside an agent: what is held out, and how little of the store is looked at for it."""

from __future__ import annotations

import anyio
import pytest

from calibration_memory import ListMemory
from flattered_world import PURPOSE, flattered, name_traces, record_flattered, steps
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.config import CalibratorSettings, HoldoutBy
from reflact.calibration.events import BatchTestPostponed, CalibrationEvent, TraceAccepted
from reflact.calibration.significance import is_level_used_up
from reflact.calibration.splits import HoldoutRule
from reflact.calibration.trace import Trace
from reflact.memory import models
from reflact.memory.models import StoredTrace


def settings(batch: int = 4, *, by: HoldoutBy | None = None, most: int = 100) -> CalibratorSettings:
    """Return settings without judges, with a pair for each step."""
    return CalibratorSettings(
        max_asked=0, pairs_per_step=1, batch_size=batch, holdout_by=by, max_held_out_traces=most
    )


class Counting(ListMemory):
    """Counts what is read of stored traces."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.pages: list[int] = []

    async def trace(self, trace_id: str) -> StoredTrace | None:
        self.loaded.append(trace_id)
        return await super().trace(trace_id)

    async def testable_traces(self, *, before: int | None, limit: int) -> tuple[models.TestableTrace, ...]:
        found = await super().testable_traces(before=before, limit=limit)
        self.pages.append(len(found))
        return found


def worked_on(
    traces: list[Trace], chosen: CalibratorSettings, memory: ListMemory | None = None
) -> tuple[ListMemory, list[CalibrationEvent]]:
    """Hand traces over, one after the other, and return what is stored and what was told."""
    told: list[CalibrationEvent] = []
    memory = memory or ListMemory()

    async def main() -> None:
        async with Calibrator(flattered(), memory, settings=chosen, on_event=told.append) as calibrator:
            for trace in traces:
                calibrator.submit(trace)
                await calibrator.wait_until_idle()

    anyio.run(main)
    return memory, told


def learned(memory: ListMemory) -> set[str]:
    """Return the traces that pairs were made of."""
    return {origin.trace_id for one in memory.stored.values() for origin in one.origins}


def test_what_is_held_out_tests_and_is_never_learned_from() -> None:
    """One slice is held out, all tests are made on its traces, and the other slices are learned from."""
    memory, told = worked_on([record_flattered(f"t{n}") for n in range(120)], settings())
    held = {t.trace_id for t in told if isinstance(t, TraceAccepted) and t.use == "hold_out"}
    assert held == {f"t{n}" for n in range(120) if HoldoutRule(4, "trace").is_held_out(f"t{n}", PURPOSE)}
    assert not held & learned(memory)
    assert memory.booked
    marks = {record_flattered(name).recording.fingerprint for name in held}
    assert {mark for test in memory.booked for mark in test.content_fingerprints or ()} <= marks


@pytest.mark.slow
def test_pairs_wait_for_fresh_traces_when_the_error_probability_is_used_up() -> None:
    """It is told once what is missing, fresh traces end the wait, and traces that only grew are not fresh."""
    chosen, memory = settings(1, most=20), ListMemory()
    held = [record_flattered(name) for name in name_traces("hold_out", 20, letter="t")]
    learn = [record_flattered(name) for name in name_traces("learn", 30, letter="l")]

    async def wear_out() -> None:
        while not is_level_used_up(20, len(memory.booked)):
            await memory.open_test([], holdout_id="caller", traces=[one.recording for one in held])

    anyio.run(wear_out)
    made = len(memory.booked)
    _, told = worked_on([*held, *learn[:10]], chosen, memory)
    waits = [one.explanation for one in told if isinstance(one, BatchTestPostponed)]
    assert len(waits) == 1
    assert "record at least 20 fresh traces" in waits[0]
    for trace in held:
        ((step, gold),) = steps(f"{trace.id} later", 1, count=1, claims=[True])
        trace.record(step, label=gold)
    worked_on([*held, *learn[10:20]], chosen, memory)
    assert len(memory.booked) == made
    worked_on(
        [*(record_flattered(name) for name in name_traces("hold_out", 20, letter="u")), *learn[20:]],
        chosen,
        memory,
    )
    assert len(memory.booked) > made
    assert memory.booked[made].n_earlier_tests == 0


def test_the_newest_held_out_traces_test() -> None:
    """Of more traces than are scored those count that came last, whatever they are called."""
    first = name_traces("learn", 4, letter="l")
    order = sorted(name_traces("hold_out", 60, letter="t"), reverse=True)
    memory, _ = worked_on([record_flattered(name) for name in (*order, *first)], settings(most=25))
    (test,) = memory.booked
    assert set(test.content_fingerprints or ()) == {
        record_flattered(name).recording.fingerprint for name in order[-25:]
    }


def test_copies_beside_an_agent_are_one_trace() -> None:
    """Thirty recordings of one run are no thirty traces to test on."""
    held, others = name_traces("hold_out", 30, letter="t"), name_traces("learn", 8, letter="l")
    traces = [*(record_flattered(name, content="one run") for name in held), *map(record_flattered, others)]
    memory, told = worked_on(traces, settings())
    assert memory.booked == []
    assert [one.n_traces for one in told if isinstance(one, BatchTestPostponed)] == [1]


@pytest.mark.slow
def test_purposes_stay_on_their_side_beside_an_agent() -> None:
    """By purpose none that is learned from is held out; with enough of them that is what happens unasked."""
    runs = [(f"t{n}", f"Purpose {n % 40}.") for n in range(240)]
    for by in ("purpose", None):
        memory, told = worked_on(
            [record_flattered(name, purpose=purpose) for name, purpose in runs], settings(20, by=by, most=30)
        )
        purposes = dict(runs)
        taught = {purposes[name] for name in learned(memory)}
        late = {t.trace_id for t in told if isinstance(t, TraceAccepted) and t.use == "hold_out"} - {
            f"t{n}" for n in range(8)
        }
        tested = {test.holdout_id for test in memory.booked}
        assert tested
        assert all(name.endswith(", by purpose") for name in tested)
        marks = {mark for test in memory.booked for mark in test.content_fingerprints or ()}
        testing = {
            purposes[n] for n, p in runs if record_flattered(n, purpose=p).recording.fingerprint in marks
        }
        assert not testing & taught
        assert late


@pytest.mark.slow
def test_a_large_store_is_not_loaded_to_begin() -> None:
    """The first trace beside many loads none of them, and looks at the pages that decide something."""
    memory = Counting()

    async def fill() -> None:
        for number in range(1200):
            await record_flattered(f"old {number}").save_to(memory)

    anyio.run(fill)
    worked_on([record_flattered("new")], settings(100), memory)
    assert memory.loaded == []
    assert len(memory.pages) <= 3
    memory.pages.clear()
    learn = name_traces("learn", 4, letter="l")
    worked_on([record_flattered(name) for name in learn], settings(4, most=30), memory)
    assert len(memory.loaded) == 30
    assert max(memory.pages) <= 200
