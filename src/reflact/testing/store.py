"""A run store in memory."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from reflact.errors import RunConflict, StoreError
from reflact.events import Event
from reflact.messages import CallReservation, StoredResponse
from reflact.protocols import CommitRecord
from reflact.records import (
    EpochRecord,
    FaultCount,
    FaultKind,
    PromotionRecord,
    Reuse,
    RunState,
    RunStatus,
    Spend,
    StageTime,
    StepRecord,
    Usage,
)
from reflact.types import Rollout, Skill, canonical_json


@dataclass
class _ReservedCall:
    reservation: CallReservation
    state: str = "open"
    usage: Usage = field(default_factory=Usage)


@dataclass
class _StoredRun:
    identity: str
    commits: dict[int, tuple[CommitRecord | None, RunState]] = field(default_factory=dict)
    outcomes: dict[tuple[int, str], str] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class InMemoryRunStore:
    """Implements ``protocols.RunStore`` as the database does, with dictionaries and in one event loop."""

    def __init__(self) -> None:
        self._responses: dict[str, StoredResponse] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._skills: dict[str, Skill] = {}
        self._calls: list[_ReservedCall] = []
        self._runs: dict[str, _StoredRun] = {}
        self._faults: dict[str, Counter[FaultKind]] = defaultdict(Counter)
        self._reuse = Reuse()

    @property
    def reuse(self) -> Reuse:
        return self._reuse

    async def find_response(self, key: str) -> StoredResponse | None:
        self._reuse = self._reuse.add(replies=key in self._responses)
        return self._responses.get(key)

    async def reserve(self, reservation: CallReservation) -> None:
        self._calls.append(_ReservedCall(reservation))

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        await self.settle(reservation, response.usage)
        self._responses.setdefault(response.key, response)

    async def settle(self, reservation: CallReservation, usage: Usage) -> None:
        open_call = self._open_call(reservation)
        if open_call is None:
            open_call = _ReservedCall(reservation)
            self._calls.append(open_call)
        open_call.state, open_call.usage = "settled", usage

    async def release(self, reservation: CallReservation) -> None:
        open_call = self._open_call(reservation)
        if open_call is not None:
            self._calls.remove(open_call)

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        self._faults[run_id][kind] += 1

    async def faults(self, run_id: str) -> tuple[FaultCount, ...]:
        counts = self._faults.get(run_id, Counter())
        return tuple(FaultCount(kind=kind, count=counts[kind]) for kind in sorted(counts))

    async def find_rollouts(self, keys: Sequence[str]) -> Mapping[str, Rollout]:
        found = {key: self._rollouts[key] for key in keys if key in self._rollouts}
        self._reuse = self._reuse.add(rollouts=len(found))
        return found

    async def store_rollout(self, rollout: Rollout) -> None:
        if rollout.score is None:
            raise StoreError(f"rollout {rollout.key} was not measured ({rollout.error}) and cannot be stored")
        self._rollouts.setdefault(rollout.key, rollout)

    async def open_run(
        self, run_id: str, identity: Mapping[str, JsonValue], config: JsonValue, *, resume: bool = True
    ) -> RunState | None:
        text = canonical_json({**identity})
        run = self._runs.setdefault(run_id, _StoredRun(text))
        if run.identity != text:
            raise RunConflict(f"run {run_id} was started with other settings; give the changed run a new id")
        for call in self._calls:
            if call.reservation.run_id == run_id and call.state == "open":
                call.state = "unsettled"
        return run.commits[max(run.commits)][1] if run.commits else None

    def decision_log(self, run_id: str) -> InMemoryDecisionLog:
        return InMemoryDecisionLog(self._runs, run_id)

    async def commit(
        self, run_id: str, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        commits = _find_run(self._runs, run_id).commits
        if record is not None and record.step != state.step:
            raise StoreError(f"run {run_id}: the record of step {record.step} has a state of {state.step}")
        if commits.get(state.commits, (record, state)) != (record, state):
            raise StoreError(f"run {run_id}: commit {state.commits} exists and differs")
        known = {**self._skills, **{skill.hash: skill for skill in skills}}
        missing = {state.current.skill_hash, state.best.skill_hash} - known.keys()
        if missing:
            raise StoreError(f"run {run_id}: step {state.step} names skills that are not stored: {missing}")
        commits[state.commits] = (record, state)
        self._skills = known

    async def records(self, run_id: str) -> tuple[StepRecord, ...]:
        return tuple(r for r in self._list_commits(run_id) if isinstance(r, StepRecord))

    async def epochs(self, run_id: str) -> tuple[EpochRecord, ...]:
        return tuple(r for r in self._list_commits(run_id) if isinstance(r, EpochRecord))

    async def promotions(self, run_id: str) -> tuple[PromotionRecord, ...]:
        return tuple(r for r in self._list_commits(run_id) if isinstance(r, PromotionRecord))

    async def records_of_other_runs(
        self, environment: str, *, exclude: str
    ) -> Mapping[str, tuple[StepRecord, ...]]:
        return {
            run_id: await self.records(run_id)
            for run_id, run in self._runs.items()
            if run_id != exclude and json.loads(run.identity).get("environment") == environment
        }

    def _list_commits(self, run_id: str) -> list[CommitRecord | None]:
        commits = self._runs[run_id].commits if run_id in self._runs else {}
        return [record for _, (record, _) in sorted(commits.items())]

    async def skill(self, skill_hash: str) -> Skill:
        if skill_hash not in self._skills:
            raise StoreError(f"the store has no skill with the hash {skill_hash}")
        return self._skills[skill_hash]

    async def append_event(self, event: Event) -> bool:
        events = _find_run(self._runs, event.run_id).events
        is_new = event.id not in events
        events.setdefault(event.id, event)
        return is_new

    async def events(self, run_id: str) -> tuple[Event, ...]:
        return tuple(self._runs[run_id].events.values()) if run_id in self._runs else ()

    async def spend(self, run_id: str) -> tuple[Spend, ...]:
        groups: dict[tuple[str, str], list[_ReservedCall]] = defaultdict(list)
        for call in self._calls:
            if call.reservation.run_id == run_id:
                groups[call.reservation.role, call.reservation.purpose].append(call)
        return tuple(_sum_spend(group, groups[group]) for group in sorted(groups))

    async def add_seconds(
        self, run_id: str, seconds: float, stages: Mapping[str, float] | None = None
    ) -> float:
        run = _find_run(self._runs, run_id)
        run.seconds += seconds
        for stage, spent in (stages or {}).items():
            run.stages[stage] += spent
        return run.seconds

    async def stage_times(self, run_id: str) -> tuple[StageTime, ...]:
        stages = _find_run(self._runs, run_id).stages
        return tuple(StageTime(stage=stage, seconds=stages[stage]) for stage in sorted(stages))

    async def finish(self, run_id: str, status: RunStatus, reason: str | None, summary: str) -> None:
        _find_run(self._runs, run_id)

    def _open_call(self, reservation: CallReservation) -> _ReservedCall | None:
        wanted = (reservation.run_id, reservation.key, "open")
        matches = [c for c in self._calls if (c.reservation.run_id, c.reservation.key, c.state) == wanted]
        return matches[-1] if matches else None


class InMemoryDecisionLog:
    """Implements ``protocols.DecisionLog`` for one run of an ``InMemoryRunStore``."""

    def __init__(self, runs: Mapping[str, _StoredRun], run_id: str) -> None:
        self._runs = runs
        self._run_id = run_id

    async def get(self, step: int, label: str) -> JsonValue:
        outcomes = self._runs[self._run_id].outcomes if self._run_id in self._runs else {}
        value: JsonValue = json.loads(outcomes.get((step, label), "null"))
        return value

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        _find_run(self._runs, self._run_id).outcomes.setdefault((step, label), canonical_json(value))


def _find_run(runs: Mapping[str, _StoredRun], run_id: str) -> _StoredRun:
    if run_id not in runs:
        raise StoreError(f"the store has no run {run_id}; open it first")
    return runs[run_id]


def _sum_spend(group: tuple[str, str], calls: Sequence[_ReservedCall]) -> Spend:
    unsettled = [call.reservation.worst_case for call in calls if call.state != "settled"]
    uncounted = [
        call.reservation.worst_case.model_copy(update={"calls": 0}) for call in calls if call.usage.uncounted
    ]
    return Spend(
        role=group[0],
        purpose=group[1],
        usage=_sum_usage([call.usage for call in calls]),
        unsettled=len(unsettled),
        worst_case=_sum_usage([*unsettled, *uncounted]),
    )


def _sum_usage(usages: Sequence[Usage]) -> Usage:
    prices = [usage.usd for usage in usages if usage.usd is not None]
    return sum(usages, Usage()).model_copy(update={"usd": math.fsum(prices) if prices else None})
