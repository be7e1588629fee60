"""Beside an agent: what is held out, and how little of the store is looked at for it."""

from __future__ import annotations

import anyio

from calibration_memory import ListMemory
from flattered_world import PURPOSE, flattered, name_traces, record_flattered
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.config import CalibratorSettings, HoldoutBy
from reflact.calibration.events import BatchTestPostponed, CalibrationEvent, TraceAccepted
from reflact.calibration.splits import HoldoutRule
from reflact.calibration.trace import Trace


def settings(batch: int = 4, *, by: HoldoutBy | None = None, most: int = 100) -> CalibratorSettings:
    return CalibratorSettings(
        max_asked=0, pairs_per_step=1, batch_size=batch, holdout_by=by, max_held_out_traces=most
    )


def worked_on(
    traces: list[Trace], chosen: CalibratorSettings, memory: ListMemory | None = None
) -> tuple[ListMemory, list[CalibrationEvent]]:
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
    return {origin.trace_id for one in memory.stored.values() for origin in one.origins}


def test_what_is_held_out_tests_and_is_never_learned_from() -> None:
    memory, told = worked_on([record_flattered(f"t{n}") for n in range(120)], settings())
    held = {t.trace_id for t in told if isinstance(t, TraceAccepted) and t.use == "hold_out"}
    assert held == {f"t{n}" for n in range(120) if HoldoutRule(4, "trace").is_held_out(f"t{n}", PURPOSE)}
    assert not held & learned(memory)
    assert memory.booked
    marks = {record_flattered(name).recording.fingerprint for name in held}
    assert {mark for test in memory.booked for mark in test.content_fingerprints or ()} <= marks


def test_copies_beside_an_agent_are_one_trace() -> None:
    held, others = name_traces("hold_out", 30, letter="t"), name_traces("learn", 8, letter="l")
    traces = [*(record_flattered(name, content="one run") for name in held), *map(record_flattered, others)]
    memory, told = worked_on(traces, settings())
    assert memory.booked == []
    assert [one.n_traces for one in told if isinstance(one, BatchTestPostponed)] == [1]
