"""A store of runs: their identity, committed steps, skills, journal and durable events.

Values are kept as their JSON text and validated again when read. Wall times stand in columns of their
own, never inside a value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue, TypeAdapter

from reflact.errors import StoreError
from reflact.events import EVENT, Event
from reflact.ports import Committed
from reflact.records import EpochRecord, Promotion, RunState, StepRecord, Version
from reflact.results import RunSummary, StageTime, Status
from reflact.store.database import PATIENCE_SECONDS, Database, Tables
from reflact.store.effects import SQLiteEffects
from reflact.store.lock import Lease
from reflact.store.migrations import MIGRATIONS
from reflact.store.reading import read_back
from reflact.store.writing import (
    IDENTITY,
    changes,
    column,
    commit,
    conflict,
    open_run,
    refuse_older,
)
from reflact.types import Frozen, Skill, canonical

JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
VERSIONS: TypeAdapter[list[Version]] = TypeAdapter(list[Version])
Record = TypeVar("Record", StepRecord, EpochRecord, Promotion)


class RunRow(Frozen):
    """A run in a list of runs.

    ``status`` is None while no process has ended the run in order: it is running, or it was killed.
    ``steps`` counts committed steps; ``config`` is that of the latest start.
    """

    run_id: str
    status: Status | None
    reason: str | None
    steps: int
    created: datetime
    config: JsonValue


@asynccontextmanager
async def open_store(
    path: Path,
    *,
    lease: Lease | None = None,
    patience: float = PATIENCE_SECONDS,
    read_only: bool = False,
) -> AsyncIterator[SQLiteStore]:
    """Open a store for the length of the block; the file is made where missing.

    Args:
        path: The database.
        lease: Remembers what is committed, where the database belongs to one folder.
        patience: Seconds to wait for another process's lock.
        read_only: Write nothing to the file, see ``Database``.

    Raises:
        StoreError: It cannot be opened: no folder, read-only, not a database, of a newer version, or older
            than what the lease remembers.
    """
    guard = None if lease is None else _guard(path, lease)
    async with Database(path, MIGRATIONS, patience=patience, guard=guard, read_only=read_only) as database:
        yield SQLiteStore(database, lease)


def _guard(path: Path, lease: Lease) -> Callable[[Tables], None] | None:
    """Return what refuses a database that holds less than was committed; one that is gone starts anew."""
    if not path.exists():
        lease.forget()
    if lease.reached is None:
        return None
    run_id, commits = lease.reached
    return lambda tables: refuse_older(tables, path, run_id, commits)


class SQLiteStore(SQLiteEffects):
    """Implements ``ports.RunStore`` on a database that many runs and processes may share.

    Args:
        database: The database, open.
        lease: See ``open_store``.
    """

    def __init__(self, database: Database, lease: Lease | None = None) -> None:
        super().__init__(database)
        self._lease = lease

    async def check(self) -> None:
        """Make sure that the file is sound: what is done on a damaged one may be lost.

        Raises:
            StoreError: It is damaged.
        """
        await self._database.check()

    async def open_run(
        self, run_id: str, identity: Mapping[str, JsonValue], config: JsonValue, *, goes_on: bool = True
    ) -> RunState | None:
        """Start or go on with a run: returns its last committed state, None where there is none.

        Calls that an earlier process left open become unsettled. Without ``goes_on`` the run is only
        looked at or measured: how it ended and under which configuration stay as they are.

        Raises:
            RunConflict: The run was started with another identity; names each key that differs.
        """
        path = self._database.path
        return await self._database.write(
            lambda tables: open_run(tables, path, run_id, dict(identity), config, goes_on=goes_on)
        )

    async def refuse_others(self, run_id: str, identity: Mapping[str, JsonValue]) -> None:
        """Make sure that a run is new in an empty store, or known here.

        Raises:
            RunConflict: The store holds other runs only; names each key that differs from the latest.
        """
        rows = await self._database.rows("SELECT run_id, identity FROM runs ORDER BY rowid")
        if not rows or run_id in {known for known, _ in rows}:
            return
        known, text = rows[-1]
        before = read_back(IDENTITY.validate_json, text, f"identity of run {known}")
        raise conflict(known, self._database.path, changes(before, identity))

    def journal(self, run_id: str) -> SQLiteJournal:
        """Return the run's journal."""
        return SQLiteJournal(self._database, run_id)

    async def commit(
        self, run_id: str, record: Committed | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        """Write what a step, an epoch's end or a promotion did, the state after it and its skills.

        One transaction. Without a record the state is the run's first. The same commit twice is harmless.

        Raises:
            StoreError: Something else is committed in its place, or a skill it names is not stored.
        """
        await self._database.write(lambda tables: commit(tables, run_id, record, state, skills))
        if self._lease is not None:
            self._lease.reach(run_id, state.commits)

    async def records(self, run_id: str) -> tuple[StepRecord, ...]:
        """Return the records of all committed steps, in order."""
        return await self._committed(run_id, "step", StepRecord)

    async def epochs(self, run_id: str) -> tuple[EpochRecord, ...]:
        """Return the records of all committed ends of epochs, in order."""
        return await self._committed(run_id, "epoch", EpochRecord)

    async def promotions(self, run_id: str) -> tuple[Promotion, ...]:
        """Return the comparisons of the last skill with the best one, in order."""
        return await self._committed(run_id, "promotion", Promotion)

    async def histories(self, environment: str, *, but: str) -> Mapping[str, tuple[StepRecord, ...]]:
        """Return the committed steps of other runs of an environment by run, the oldest run first.

        Args:
            environment: The environment's identity.
            but: The run to leave out.
        """
        rows = await self._database.rows(
            "SELECT run_id FROM runs WHERE run_id <> ? AND json_extract(identity, '$.environment') = ?"
            " ORDER BY rowid",
            (but, environment),
        )
        return {run_id: await self.records(run_id) for (run_id,) in rows}

    async def _committed(self, run_id: str, kind: str, record_type: type[Record]) -> tuple[Record, ...]:
        rows = await self._database.rows(
            "SELECT step, record FROM commits WHERE run_id = ? AND kind = ? ORDER BY number", (run_id, kind)
        )
        return tuple(
            read_back(
                record_type.model_validate_json, text, f"record of {kind} at step {step} of run {run_id}"
            )
            for step, text in rows
        )

    async def skill(self, skill_hash: str) -> Skill:
        """Return a stored document.

        Raises:
            StoreError: There is none with this hash.
        """
        rows = await self._database.rows("SELECT text FROM skills WHERE hash = ?", (skill_hash,))
        if not rows:
            raise StoreError(f"database {self._database.path}: it holds no skill with the hash {skill_hash}")
        return Skill(text=rows[0][0])

    async def append(self, event: Event) -> bool:
        """Store a durable event; False where this run already has it."""
        added = await self._database.execute(
            "INSERT INTO events (run_id, id, event, at) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (run_id, id) DO NOTHING",
            (event.run_id, event.id, event.said, event.at.isoformat()),
        )
        return added == 1

    async def events(self, run_id: str) -> tuple[Event, ...]:
        """Return the run's durable events, in order."""
        rows = await self._database.rows(
            "SELECT id, event, at FROM events WHERE run_id = ? ORDER BY sequence", (run_id,)
        )
        return tuple(
            read_back(EVENT.validate_json, text, f"event {event_id} of run {run_id}").model_copy(
                update={"at": datetime.fromisoformat(at)}
            )
            for event_id, text, at in rows
        )

    async def add_seconds(
        self, run_id: str, seconds: float, stages: Mapping[str, float] | None = None
    ) -> float:
        """Add active time, in all and by stage, and return the run's total, in seconds."""

        def add(tables: Tables) -> float:
            tables.execute("UPDATE runs SET seconds = seconds + ? WHERE run_id = ?", (seconds, run_id))
            for stage, spent in (stages or {}).items():
                tables.execute(
                    "INSERT INTO stage_times (run_id, stage, seconds) VALUES (?, ?, ?)"
                    " ON CONFLICT (run_id, stage) DO UPDATE SET seconds = seconds + excluded.seconds",
                    (run_id, stage, spent),
                )
            total: float = column(tables, "seconds", run_id)
            return total

        return await self._database.write(add)

    async def stage_times(self, run_id: str) -> tuple[StageTime, ...]:
        """Return the active time of each stage over all starts of the run."""
        rows = await self._database.rows(
            "SELECT stage, seconds FROM stage_times WHERE run_id = ? ORDER BY stage", (run_id,)
        )
        return tuple(StageTime(stage=stage, seconds=seconds) for stage, seconds in rows)

    async def finish(self, run_id: str, status: Status, reason: str | None, summary: str) -> None:
        """Store how this start of the run ended, with its summary as JSON text."""

        def end(tables: Tables) -> None:
            column(tables, "status", run_id)
            tables.execute(
                "UPDATE runs SET status = ?, reason = ?, summary = ? WHERE run_id = ?",
                (status, reason, summary, run_id),
            )

        await self._database.write(end)

    async def runs(self) -> tuple[RunRow, ...]:
        """Return all runs of the store, oldest first."""
        rows = await self._database.rows(
            "SELECT run_id, status, reason, created, config, (SELECT count(*) FROM commits"
            " WHERE commits.run_id = runs.run_id AND kind = 'step') FROM runs ORDER BY runs.rowid"
        )
        return tuple(
            RunRow(
                run_id=run_id,
                status=status,
                reason=reason,
                steps=steps,
                created=datetime.fromisoformat(created),
                config=JSON.validate_json(config),
            )
            for run_id, status, reason, created, config, steps in rows
        )

    async def versions(self, run_id: str) -> tuple[Version, ...]:
        """Return the run's skill versions by number, each with its latest score."""
        rows = await self._database.rows(
            "SELECT json_extract(state, '$.current'), json_extract(record, '$.made') FROM commits"
            " WHERE run_id = ? ORDER BY number",
            (run_id,),
        )
        latest: dict[int, Version] = {}
        for current, made in rows:
            for text in (made or "[]", f"[{current}]"):
                for version in read_back(VERSIONS.validate_json, text, f"versions of run {run_id}"):
                    latest[version.number] = version
        return tuple(latest[number] for number in sorted(latest))

    async def summary(self, run_id: str) -> RunSummary | None:
        """Return the summary of the run's latest end, None where it never ended in order."""
        text = await self._database.read(lambda tables: column(tables, "summary", run_id))
        if text is None:
            return None
        return read_back(RunSummary.model_validate_json, text, f"summary of run {run_id}")


class SQLiteJournal:
    """Implements ``ports.Journal`` for one run."""

    def __init__(self, database: Database, run_id: str) -> None:
        self._database = database
        self._run_id = run_id

    async def recall(self, step: int, label: str) -> JsonValue:
        """Return what was noted, or None."""
        rows = await self._database.rows(
            "SELECT value FROM journal WHERE run_id = ? AND step = ? AND label = ?",
            (self._run_id, step, label),
        )
        if not rows:
            return None
        return read_back(JSON.validate_json, rows[0][0], f"note {label} of step {step} of run {self._run_id}")

    async def note(self, step: int, label: str, value: JsonValue) -> None:
        """Note an outcome before it is used; the first note under a label stands."""
        await self._database.execute(
            "INSERT INTO journal (run_id, step, label, value) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (run_id, step, label) DO NOTHING",
            (self._run_id, step, label, canonical(value)),
        )
