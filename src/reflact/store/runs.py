"""A store of runs: their identity, committed steps, skills, journal and durable events.

Values are kept as their JSON text and validated again when read. Wall times stand in columns of their
own, never inside a value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter

from reflact.errors import RunConflict, StoreError
from reflact.events import EVENT, Event
from reflact.results import RunSummary, Status
from reflact.store.database import Database, Tables
from reflact.store.effects import SQLiteEffects, unsettle
from reflact.store.migrations import MIGRATIONS
from reflact.store.reading import read_back
from reflact.types import Frozen, RunState, Skill, StepRecord, Version, canonical

JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
IDENTITY: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
SHOWN = 60


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
async def open_store(path: Path) -> AsyncIterator[SQLiteStore]:
    """Open a store for the length of the block; the file is made where missing.

    Raises:
        StoreError: It cannot be opened: no folder, read-only, not a database, or of a newer version.
    """
    async with Database(path, MIGRATIONS) as database:
        yield SQLiteStore(database)


class SQLiteStore(SQLiteEffects):
    """Implements ``ports.RunStore`` on a database that many runs and processes may share."""

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
            lambda tables: _open_run(tables, path, run_id, dict(identity), config, goes_on=goes_on)
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
        raise _conflict(known, self._database.path, _changes(before, identity))

    def journal(self, run_id: str) -> SQLiteJournal:
        """Return the run's journal."""
        return SQLiteJournal(self._database, run_id)

    async def commit(
        self, run_id: str, record: StepRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        """Write a step's record, the state after it and its skills as one transaction.

        Without a record the state is the run's first. The same commit twice is harmless.

        Raises:
            StoreError: The step is committed already and differs, or a skill it names is not stored.
        """
        await self._database.write(lambda tables: _commit(tables, run_id, record, state, skills))

    async def records(self, run_id: str) -> tuple[StepRecord, ...]:
        """Return all committed records, in order."""
        rows = await self._database.rows(
            "SELECT step, record FROM steps WHERE run_id = ? AND record IS NOT NULL ORDER BY step", (run_id,)
        )
        return tuple(
            read_back(StepRecord.model_validate_json, text, f"record of step {step} of run {run_id}")
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
            "INSERT INTO events (run_id, id, event) VALUES (?, ?, ?) ON CONFLICT (run_id, id) DO NOTHING",
            (event.run_id, event.id, event.model_dump_json()),
        )
        return added == 1

    async def events(self, run_id: str) -> tuple[Event, ...]:
        """Return the run's durable events, in order."""
        rows = await self._database.rows(
            "SELECT id, event FROM events WHERE run_id = ? ORDER BY sequence", (run_id,)
        )
        return tuple(
            read_back(EVENT.validate_json, text, f"event {event_id} of run {run_id}")
            for event_id, text in rows
        )

    async def add_seconds(self, run_id: str, seconds: float) -> float:
        """Add active time and return the run's total, in seconds."""

        def add(tables: Tables) -> float:
            tables.execute("UPDATE runs SET seconds = seconds + ? WHERE run_id = ?", (seconds, run_id))
            total: float = _column(tables, "seconds", run_id)
            return total

        return await self._database.write(add)

    async def finish(self, run_id: str, status: Status, reason: str | None, summary: str) -> None:
        """Store how this start of the run ended, with its summary as JSON text."""

        def end(tables: Tables) -> None:
            _column(tables, "status", run_id)
            tables.execute(
                "UPDATE runs SET status = ?, reason = ?, summary = ? WHERE run_id = ?",
                (status, reason, summary, run_id),
            )

        await self._database.write(end)

    async def runs(self) -> tuple[RunRow, ...]:
        """Return all runs of the store, oldest first."""
        rows = await self._database.rows(
            "SELECT run_id, status, reason, created, config, (SELECT count(record) FROM steps"
            " WHERE steps.run_id = runs.run_id) FROM runs ORDER BY runs.rowid"
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
            "SELECT json_extract(state, '$.current') FROM steps WHERE run_id = ? ORDER BY step", (run_id,)
        )
        versions = [
            read_back(Version.model_validate_json, text, f"version of run {run_id}") for (text,) in rows
        ]
        latest = {version.number: version for version in versions}
        return tuple(latest[number] for number in sorted(latest))

    async def summary(self, run_id: str) -> RunSummary | None:
        """Return the summary of the run's latest end, None where it never ended in order."""
        text = await self._database.read(lambda tables: _column(tables, "summary", run_id))
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


def _open_run(
    tables: Tables,
    path: Path,
    run_id: str,
    identity: dict[str, JsonValue],
    config: JsonValue,
    *,
    goes_on: bool,
) -> RunState | None:
    known = tables.execute("SELECT identity FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    if known is None:
        tables.execute(
            "INSERT INTO runs (run_id, identity, config) VALUES (?, ?, ?)",
            (run_id, canonical(identity), canonical(config)),
        )
        return None
    before = read_back(IDENTITY.validate_json, known[0], f"identity of run {run_id}")
    changes = _changes(before, identity)
    if changes:
        raise _conflict(run_id, path, changes)
    if goes_on:
        tables.execute(
            "UPDATE runs SET config = ?, status = NULL, reason = NULL WHERE run_id = ?",
            (canonical(config), run_id),
        )
    unsettle(tables, run_id)
    last = tables.execute(
        "SELECT state FROM steps WHERE run_id = ? ORDER BY step DESC LIMIT 1", (run_id,)
    ).fetchone()
    if last is None:
        return None
    return read_back(RunState.model_validate_json, last[0], f"state of run {run_id}")


def _conflict(run_id: str, path: Path, changes: Sequence[str]) -> RunConflict:
    return RunConflict(
        f"run {run_id} in {path} was started with other settings: {'; '.join(changes)}; "
        "put the old values back, or choose another out_dir (a fork) for the changed run"
    )


def _changes(before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]) -> list[str]:
    def shown(values: Mapping[str, JsonValue], key: str) -> str:
        if key not in values:
            return "absent"
        text = canonical(values[key])
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."

    return [
        f"{key} was {shown(before, key)} and is now {shown(after, key)}"
        for key in sorted({*before, *after})
        if (key in before) != (key in after) or canonical(before[key]) != canonical(after[key])
    ]


def _commit(
    tables: Tables, run_id: str, record: StepRecord | None, state: RunState, skills: Sequence[Skill]
) -> None:
    _column(tables, "run_id", run_id)
    if record is not None and record.step != state.step:
        raise StoreError(f"run {run_id}: the record of step {record.step} came with a state of {state.step}")
    texts = (None if record is None else record.model_dump_json(), state.model_dump_json())
    stored = tables.execute(
        "SELECT record, state FROM steps WHERE run_id = ? AND step = ?", (run_id, state.step)
    ).fetchone()
    if stored is not None:
        if stored != texts:
            raise StoreError(
                f"run {run_id}: step {state.step} is committed already and differs from what was to be "
                "committed; the committed one stands, start again to go on from it"
            )
        return
    for skill in skills:
        tables.execute(
            "INSERT INTO skills (hash, text) VALUES (?, ?) ON CONFLICT (hash) DO NOTHING",
            (skill.hash, skill.text),
        )
    for skill_hash in (state.current.skill_hash, state.best.skill_hash):
        if not tables.execute("SELECT 1 FROM skills WHERE hash = ?", (skill_hash,)).fetchone():
            raise StoreError(
                f"run {run_id}: step {state.step} names the skill {skill_hash}, which is not stored"
            )
    tables.execute(
        "INSERT INTO steps (run_id, step, record, state) VALUES (?, ?, ?, ?)", (run_id, state.step, *texts)
    )


def _column(tables: Tables, column: str, run_id: str) -> Any:
    row = tables.execute(
        f"SELECT {column} FROM runs WHERE run_id = ?",  # noqa: S608 - a constant of this module
        (run_id,),
    ).fetchone()
    if row is None:
        raise StoreError(f"the store holds no run {run_id}; open it first")
    return row[0]
