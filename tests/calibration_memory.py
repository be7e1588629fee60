"""A memory of cards and traces in lists: no file, no threads, so that time may be virtual."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Literal

from reflact.calibration.splits import list_labeled_events
from reflact.calibration.trace import Trace
from reflact.memory import models
from reflact.memory.cards import TraceIdentity, count_tests
from reflact.memory.models import (
    BatchTest,
    CardStatus,
    ContrastPair,
    PromotionEvidence,
    Scope,
    ScoreEvent,
    StoredCalibration,
    StoredPair,
    StoredTrace,
    Submission,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class ListMemory:
    """The methods of ``MemoryStore`` that calibration calls."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredPair] = {}
        self.traces: dict[str, StoredTrace] = {}
        self.booked: list[BatchTest] = []
        self.kept: tuple[ContrastPair, ...] = ()
        self.begun: dict[str, StoredCalibration] = {}

    async def submit(self, pair: ContrastPair, *, created_by: str = "") -> Submission:
        new = pair.id not in self.stored
        if new:
            self.stored[pair.id] = StoredPair(pair=pair, status="quarantined", created_at=NOW, changed_at=NOW)
        origins = sorted(
            {*self.stored[pair.id].origins, *pair.provenance.as_origins},
            key=lambda one: (one.trace_id, one.step),
        )
        self.stored[pair.id] = self.stored[pair.id].model_copy(update={"origins": tuple(origins)})
        return Submission(unit_id=pair.id, is_new=new, status=self.stored[pair.id].status)

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        return tuple(one.pair for one in self.stored.values() if one.status == "promoted")

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        return tuple(self.stored[one] for one in sorted(self.stored))

    async def remaining_capacity(self) -> int:
        return 1_000_000

    async def open_test(
        self,
        unit_ids: Sequence[str],
        *,
        holdout_id: str,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        test = BatchTest(
            number=len(self.booked) + 1,
            holdout_id=holdout_id,
            n_earlier_tests=count_tests(self.booked, traces),
            unit_ids=tuple(unit_ids),
            content_fingerprints=tuple(sorted({trace.fingerprint for trace in traces})),
            kind=kind,
            at=NOW,
        )
        self.booked.append(test)
        return test

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        test = self.booked[number - 1] = self.booked[number - 1].model_copy(update={"evidence": evidence})
        after = "promoted" if evidence.passed_test else "quarantined"
        for unit in test.unit_ids:
            self.stored[unit] = self.stored[unit].model_copy(update={"status": after})

    async def tests(self) -> tuple[BatchTest, ...]:
        return tuple(self.booked)

    async def anchors(self) -> tuple[ContrastPair, ...]:
        return self.kept

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        self.traces.setdefault(trace_id, StoredTrace(id=trace_id, purpose=purpose, events=()))

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        trace = self.traces[trace_id]
        if any(known.step == event.step for known in trace.events):
            return False
        self.traces[trace_id] = trace.model_copy(update={"events": (*trace.events, event)})
        return True

    async def trace(self, trace_id: str) -> StoredTrace | None:
        return self.traces.get(trace_id)

    async def start_calibration(self, identity: str, baseline: str) -> StoredCalibration:
        self.begun[identity] = StoredCalibration(number=len(self.begun) + 1, baseline=baseline)
        return self.begun[identity]

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        return self.begun.get(identity)

    async def finish_calibration(self, number: int, result: str) -> None:
        for identity, one in self.begun.items():
            if one.number == number and one.result is None:
                self.begun[identity] = one.model_copy(update={"result": result})

    async def testable_traces(self, *, before: int | None, limit: int) -> tuple[models.TestableTrace, ...]:
        taught = {origin.trace_id for one in self.stored.values() for origin in one.origins}
        listed = [
            models.TestableTrace(
                number,
                one.id,
                one.purpose,
                Trace.from_stored(one).recording.content_hashes[-1],
                one.id in taught,
            )
            for number, one in enumerate(self.traces.values())
            if list_labeled_events(Trace.from_stored(one))
        ]
        return tuple(one for one in reversed(listed) if before is None or one.number < before)[:limit]

    async def purposes(self, *, limit: int) -> frozenset[str]:
        return frozenset(sorted({one.purpose for one in self.traces.values()})[:limit])
