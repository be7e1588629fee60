"""The calibrator beside an agent: it neither slows nor breaks it, and leaves a whole store behind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import anyio
import anyio.lowlevel
import pytest

import virtual_time
from calibration_memory import ListMemory
from flattered_world import (
    PURPOSE,
    answer,
    flattered,
    name_traces,
    phi,
    record_flattered,
    trace_of,
    transition,
    unscored,
)
from reflact import Calibrator, MemoryStore, Trace
from reflact.calibration.calibrator import TraceCounts
from reflact.calibration.config import CalibratorSettings, FullQueuePolicy
from reflact.calibration.events import (
    CALIBRATION_EVENT_ADAPTER,
    BatchTestPostponed,
    CalibrationEvent,
    CalibrationFinished,
    CalibrationStarted,
    CalibratorStopped,
    CriticMeasured,
    PairBatchTested,
    PairsGenerated,
    RoundStarted,
    TraceAccepted,
    TraceFailed,
    TraceSkipped,
)
from reflact.calibration.splits import HoldoutRule
from reflact.errors import BudgetSpent, ProviderDown, StoreError
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

STEPS, STEP_SECONDS = 20, 0.1


def settings(
    queue: int = 64, when_full: FullQueuePolicy = "drop_oldest", batch: int = 16
) -> CalibratorSettings:
    return CalibratorSettings(
        pairs_per_step=2, queue_size=queue, full_queue_policy=when_full, batch_size=batch
    )


def slow(seconds: float) -> ScriptedLLM:
    async def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await anyio.sleep(seconds)
        return answer(prompt, reply_type)

    return ScriptedLLM(script)


def raising(error: Exception) -> ScriptedLLM:
    return ScriptedLLM(lambda *_: error)


async def acting(calibrator: Calibrator | None, first: int = 0, last: int = STEPS) -> None:
    for name in name_traces("learn", STEPS)[first:last]:
        await anyio.sleep(STEP_SECONDS)
        if calibrator is not None:
            calibrator.submit(record_flattered(name))


class Broken(ListMemory):
    """A memory on a full disk."""

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        raise StoreError("the disk is full")


@pytest.mark.parametrize(
    ("llm", "queue", "when_full", "memory"),
    [
        (partial(slow, 30.0), 64, "drop_oldest", ListMemory),
        (partial(slow, 30.0), 2, "drop_oldest", ListMemory),
        (partial(slow, 30.0), 2, "reject", ListMemory),
        (partial(slow, 30.0), 2, "block", ListMemory),
        (partial(raising, ProviderDown("the endpoint is down")), 64, "drop_oldest", ListMemory),
        (partial(raising, BudgetSpent("no room for a call")), 64, "drop_oldest", ListMemory),
        (partial(raising, RuntimeError("a defect")), 64, "drop_oldest", ListMemory),
        (flattered, 64, "drop_oldest", Broken),
        (flattered, 64, "drop_oldest", ListMemory),
    ],
    ids=["slow", "drops", "rejects", "blocks", "down", "budget spent", "broken", "full disk", "well"],
)
@pytest.mark.parametrize("half", [STEPS, STEPS // 2], ids=["to the end", "cancelled"])
def test_the_agent_is_as_fast_as_without_a_calibrator(
    llm: Callable[[], ScriptedLLM],
    queue: int,
    when_full: FullQueuePolicy,
    memory: Callable[[], ListMemory],
    half: int,
) -> None:
    async def main() -> Calibrator:
        begun = anyio.current_time()
        async with Calibrator(llm(), memory(), settings=settings(queue, when_full)) as calibrator:
            await acting(calibrator, 0, half)
        await acting(calibrator, half)
        assert anyio.current_time() - begun == pytest.approx(STEPS * STEP_SECONDS, abs=1e-6)
        return calibrator

    counts = virtual_time.run(main).counts
    assert counts.n_accepted + counts.n_rejected == STEPS
    if memory is Broken:
        assert counts.n_failed >= half - 1


def test_a_score_does_not_wait_for_the_calibrator() -> None:
    async def main() -> list[float]:
        calibrator = Calibrator(slow(1.0), ListMemory(), settings=CalibratorSettings(concurrency=2))
        took: list[float] = []
        async with calibrator:
            for name in name_traces("learn", 4):
                calibrator.submit(record_flattered(name, claims=[True] * 4))
            for number in range(3):
                await anyio.sleep(0.5)
                begun = anyio.current_time()
                step = transition(f"the agent's {number}", 1, 2, claims=False)
                await calibrator.critic.score(step, purpose=PURPOSE)
                took.append(anyio.current_time() - begun)
        assert calibrator.usage.calls >= len(took)
        return took

    assert virtual_time.run(main) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("when_full", "queued", "skipped", "reason"),
    [
        ("drop_oldest", [True] * 4, ("t0", "t1"), "dropped"),
        ("reject", [True, True, False, False], ("t2", "t3"), "full"),
        ("block", [True, True, False, False], ("t2", "t3"), "full"),
    ],
)
async def test_a_full_queue_keeps_to_its_policy(
    when_full: FullQueuePolicy,
    queued: list[bool],
    skipped: tuple[str, ...],
    reason: Literal["dropped", "full"],
) -> None:
    """The newest traces stay, or the oldest; a submission cannot wait. Each that left is named and counted."""
    told: list[CalibrationEvent] = []
    calibrator = Calibrator(flattered(), ListMemory(), settings=settings(2, when_full), on_event=told.append)
    assert [calibrator.submit(record_flattered(f"t{n}")) for n in range(4)] == queued
    assert told == [TraceSkipped(trace_id=name, reason=reason) for name in skipped]
    dropped = 2 * (reason == "dropped")
    assert calibrator.counts == TraceCounts(n_accepted=2 + dropped, n_dropped=dropped, n_rejected=2 - dropped)


def test_nobody_waits_for_a_calibrator_that_stopped() -> None:
    async def main() -> tuple[list[bool], Calibrator]:
        calibrator = Calibrator(
            raising(BudgetSpent("no room for a call")), ListMemory(), settings=settings(1, "block")
        )
        async with calibrator:
            found = [
                await calibrator.submit_and_wait(record_flattered(name, claims=[False]))
                for name in name_traces("learn", 4)
            ]
            await calibrator.wait_until_idle()
            return found, calibrator

    found, calibrator = virtual_time.run(main)
    assert found[-1] is False
    assert calibrator.counts.n_failed == 1


async def test_what_happens_is_told(tmp_path: Path) -> None:
    told: list[CalibrationEvent] = []
    async with (
        MemoryStore(tmp_path / "memory.db") as store,
        Calibrator(flattered(), store, settings=settings(batch=4), on_event=told.append) as calibrator,
    ):
        for name in name_traces("learn", 4):
            calibrator.submit(record_flattered(name))
        await calibrator.wait_until_idle()
        assert [type(one) for one in told][:2] == [TraceAccepted, PairsGenerated]
        assert [one.n_traces for one in told if isinstance(one, BatchTestPostponed)] == [0]
        for name in name_traces("hold_out", 20):
            calibrator.submit(record_flattered(name))
        await calibrator.wait_until_idle()
        tested = [one for one in told if isinstance(one, PairBatchTested)]
        assert [one.evidence.passed_test for one in tested] == [True]
        assert tested[0].evidence.n_traces == 20
        promoted = await store.pairs(status="promoted")
        assert {one.pair.id for one in promoted} == set(tested[0].evidence.pair_ids)
        assert {one.pair.provenance.trace_id for one in promoted} <= set(name_traces("learn", 4))
        score = await trace_of(calibrator.critic, "next", 0, count=1, claims=[True])
        assert score.events[0].evaluation.progress_after == phi(1)
    assert Counter(type(one) for one in told)[TraceAccepted] == 24
    assert [CALIBRATION_EVENT_ADAPTER.validate_json(one.model_dump_json()) for one in told] == told


async def test_a_spent_budget_stops_it_and_a_failing_listener_harms_nobody() -> None:
    told: list[CalibrationEvent] = []

    def tell(event: CalibrationEvent) -> None:
        told.append(event)
        raise RuntimeError("listener")

    llm = raising(BudgetSpent("no room for a call"))
    async with Calibrator(llm, ListMemory(), settings=settings(), on_event=tell) as calibrator:
        calibrator.submit(record_flattered(name_traces("learn", 1)[0], claims=[False]))
        await calibrator.wait_until_idle()
        assert calibrator.submit(record_flattered("later")) is False
    assert [type(one) for one in told] == [TraceAccepted, TraceFailed, CalibratorStopped, TraceSkipped]


@pytest.mark.parametrize(
    ("make_llm", "make_memory", "n_traces", "n_warnings"),
    [
        (flattered, Broken, 5, 1),
        (partial(raising, ProviderDown("the endpoint is down")), ListMemory, 4, 1),
        (partial(raising, BudgetSpent("no room for a call")), ListMemory, 4, 1),
        (flattered, ListMemory, 4, 0),
    ],
    ids=["full disk", "down", "budget spent", "well"],
)
async def test_a_calibrator_that_learns_nothing_is_a_warning(
    make_llm: Callable[[], ScriptedLLM],
    make_memory: Callable[[], ListMemory],
    n_traces: int,
    n_warnings: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = name_traces("learn", n_traces)
    async with Calibrator(make_llm(), make_memory(), settings=settings()) as calibrator:
        for name in names:
            calibrator.submit(unscored(record_flattered(name)))
        await calibrator.wait_until_idle()
    records = [one for one in caplog.records if (one.name, one.levelname) == ("reflact", "WARNING")]
    assert len(records) == n_warnings
    assert all(any(name in one.getMessage() for name in names) for one in records)


async def test_pairs_of_one_trace_come_as_they_are_stored() -> None:
    memory = ListMemory()
    calibrator = Calibrator(flattered(), memory, settings=settings())
    seen = []
    async with calibrator.stream_pairs(record_flattered("t", claims=[True] * 3)) as pairs:
        async for pair in pairs:
            assert pair.id in memory.stored
            seen.append(pair.id)
            if len(seen) == 2:
                break
    assert len(seen) == 2


PAGE = Path(__file__).parents[1] / "docs" / "calibration.md"


def test_the_page_names_every_event() -> None:
    union = get_args(get_args(CalibrationEvent)[0])
    kinds = {kind.model_fields["kind"].default for kind in union}
    table = PAGE.read_text(encoding="utf-8").partition("\n## Events\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == kinds


async def test_a_calibration_is_told_from_its_beginning_to_its_report() -> None:
    """Its events come in order, each with what was consumed until then, and survive JSON."""
    told: list[CalibrationEvent] = []
    calibrator = Calibrator(flattered(), ListMemory(), settings=settings(), on_event=told.append)
    learn, held_out = (
        [record_flattered(f"t {n}", n) for n in range(3)],
        [record_flattered(f"h {n}", n) for n in range(20)],
    )
    report = await calibrator.calibrate(learn, heldout=held_out)
    types = [type(event) for event in told]
    assert types[:7] == [
        CalibrationStarted,
        CriticMeasured,
        RoundStarted,
        *[PairsGenerated] * 3,
        PairBatchTested,
    ]
    assert types[-2:] == [CriticMeasured, CalibrationFinished]
    assert told[-1] == CalibrationFinished(report=report)
    for event in told:
        if isinstance(event, PairsGenerated):
            assert event.n_candidates == event.n_pairs + sum(drop.n_candidates for drop in event.dropped)
    spent = [
        event.usage.calls
        for event in told
        if isinstance(event, PairsGenerated | PairBatchTested | RoundStarted)
    ]
    assert spent == sorted(spent)
    assert [CALIBRATION_EVENT_ADAPTER.validate_json(event.model_dump_json()) for event in told] == told


async def work_on(traces: list[Trace]) -> tuple[ListMemory, list[CalibrationEvent]]:
    """Submit traces one after the other, and return what is stored and what was told."""
    told: list[CalibrationEvent] = []
    memory, chosen = ListMemory(), CalibratorSettings(max_asked=0, pairs_per_step=1, batch_size=4)
    async with Calibrator(flattered(), memory, settings=chosen, on_event=told.append) as calibrator:
        for trace in traces:
            calibrator.submit(trace)
            await calibrator.wait_until_idle()
    return memory, told


async def test_what_is_held_out_tests_and_is_never_learned_from() -> None:
    memory, told = await work_on([record_flattered(f"t{n}") for n in range(120)])
    held = {t.trace_id for t in told if isinstance(t, TraceAccepted) and t.use == "hold_out"}
    assert held == {f"t{n}" for n in range(120) if HoldoutRule(4, "trace").is_held_out(f"t{n}", PURPOSE)}
    assert not held & {origin.trace_id for one in memory.stored.values() for origin in one.origins}
    assert memory.booked
    marks = {record_flattered(name).recording.fingerprint for name in held}
    assert {mark for test in memory.booked for mark in test.content_fingerprints or ()} <= marks


async def test_copies_beside_an_agent_are_one_trace() -> None:
    held, others = name_traces("hold_out", 30, letter="t"), name_traces("learn", 8, letter="l")
    traces = [*(record_flattered(name, content="one run") for name in held), *map(record_flattered, others)]
    memory, told = await work_on(traces)
    assert memory.booked == []
    assert [one.n_traces for one in told if isinstance(one, BatchTestPostponed)] == [1]
