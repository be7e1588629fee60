"""Beside an agent: what is held out, and how little of the store is looked at for it."""

from __future__ import annotations

import anyio
import pytest

from calibration_memory import ListMemory
from flattered_world import PURPOSE, flattered, name_traces, record_flattered
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.config import CalibratorSettings, HoldoutBy
from reflact.calibration.events import BatchTestPostponed, CalibrationEvent, TraceAccepted
from reflact.calibration.splits import HoldoutRule
from reflact.calibration.trace import Trace


def settings(batch: int = 4, *, by: HoldoutBy | None = None, most: int = 100) -> CalibratorSettings:
    """Return settings without judges, with a pair for each step."""
    return CalibratorSettings(
        max_asked=0, pairs_per_step=1, batch_size=batch, holdout_by=by, max_held_out_traces=most
    )


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
