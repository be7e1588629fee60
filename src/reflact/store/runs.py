"""The store of runs: their identities, committed steps, skills and durable events.

Values are stored as JSON text and validated again when they are read. Wall times have their own
columns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError
from sqlite_utils.db import NotFoundError

from reflact.data import DataSet
from reflact.errors import RunConflict, StoreError
from reflact.events import EVENT_ADAPTER, Event
from reflact.jsonutil import parse_stored
from reflact.records import (
    CodeFailure,
    CommitRecord,
    EpochRecord,
    PromotionRecord,
    RunState,
    RunStatus,
    RunSummary,
    SkillComparison,
    SkillEvaluation,
    SkillVersion,
    StageCost,
    StepRecord,
    StoredStatus,
)
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database, Tables
from reflact.store.errors import build_conflict, describe_changes
from reflact.store.lock import Ownership, is_owned
from reflact.store.responses import (
    JSON_ADAPTER,
    SQLiteDecisionLog,
    SQLiteResponseStore,
    compute_checksum,
    mark_unsettled,
    parse_checked,
    sum_spend_by_stage,
)
from reflact.store.schema import SCHEMA
from reflact.types import FrozenModel, Item, Skill, Split, canonical_json

IDENTITY_ADAPTER: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
VERSIONS_ADAPTER: TypeAdapter[list[SkillVersion]] = TypeAdapter(list[SkillVersion])
Record = TypeVar("Record", StepRecord, EpochRecord, PromotionRecord)
RECORD_TYPES: dict[str, type[StepRecord] | type[EpochRecord] | type[PromotionRecord]] = {
    "step": StepRecord,
    "epoch": EpochRecord,
    "promotion": PromotionRecord,
}

# The most exceptions of the caller's code that are stored of a run.
MAX_FAILURES = 1_000

# The evaluations beside a run, or the one with the id itself.
OF_EVALUATION = (
    "json_extract(identity, '$.eval') IS NOT NULL"
    " AND ?1 IN (run_id, json_extract(identity, '$.eval.run_id'))"
)

COMMITS = "SELECT number, kind, step, record, state, checksum FROM commits WHERE run_id = ?"


class RunRow(FrozenModel):
    """A run in a list of runs; ``status`` is None if it was killed.

    ``steps`` counts committed steps, and ``config`` is the configuration of the latest start.
    ``evaluation`` is what an ``eval`` measures; None: this is a training.
    """

    run_id: str
    status: StoredStatus | None
    reason: str | None
    steps: int
    created: datetime
    config: JsonValue
    evaluation: SkillEvaluation | None = None


@asynccontextmanager
async def open_store(
    path: Path,
    *,
    ownership: Ownership | None = None,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
    read_only: bool = False,
) -> AsyncIterator[SQLiteRunStore]:
    """Open a store while the block runs; with ``ownership`` it is written only while that lasts."""
    async with Database(path, SCHEMA, lock_timeout=lock_timeout, read_only=read_only) as database:
        if ownership is not None:
            ownership = ownership.including(path)
        yield SQLiteRunStore(database, ownership)


class SQLiteRunStore(SQLiteResponseStore):
    """Implements ``protocols.RunStore`` on a database that runs and processes may share."""

    def __init__(self, database: Database, ownership: Ownership | None = None) -> None:
        super().__init__(database)
        self._ownership = ownership

    async def check_integrity(self) -> None:
        """Read the whole file; StoreError if it is damaged."""
        await self._database.check_integrity()

    async def open_run(
        self,
        run_id: str,
        identity: Mapping[str, JsonValue],
        config: JsonValue,
        *,
        resume: bool = True,
    ) -> RunState | None:
        """Start or resume a run, and own it; RunConflict names each key of another identity."""

        def start(tables: Tables) -> tuple[RunState | None, int]:
            runs = tables.table("runs")
            texts = {"config": canonical_json(config)}
            if not runs.count_where("run_id = ?", [run_id]):
                runs.insert({"run_id": run_id, "identity": canonical_json(dict(identity)), **texts})
            else:
                before = parse_identity(run_id, read_run(tables, run_id)["identity"])
                if differences := describe_changes(before, identity):
                    raise build_conflict(run_id, self._database.path, differences)
                if resume:
                    runs.update(run_id, {**texts, "status": None, "reason": None})
                    mark_unsettled(tables, run_id)
            if claims:
                sql = "UPDATE runs SET owners = owners + 1, owner = ? WHERE run_id = ?"
                tables.execute(sql, (self._ownership.owner if self._ownership else None, run_id))
            return read_state(tables, run_id), read_run(tables, run_id)["owners"]

        claims = self._ownership is not None and self._database.fence is None
        state, owners = await self._database.write(start)
        if claims:
            self._database.fence = partial(self._check_owner, run_id=run_id, owners=owners)
        return state

    def _check_files(self) -> None:
        if self._ownership is not None:
            self._ownership.check()

    def _check_owner(self, tables: Tables, *, run_id: str, owners: int) -> None:
        """Check that no other process has continued the run since; StoreError otherwise."""
        sql = "SELECT owners, owner FROM runs WHERE run_id = ?"
        row = tables.execute(sql, (run_id,)).fetchone() or (0, "another process")
        if row[0] != owners:
            raise StoreError(
                f"database {self._database.path}: run {run_id} was continued by {row[1]}, so this "
                "process stops; only one of them may own a run"
            )

    async def identity(self, run_id: str) -> Mapping[str, JsonValue]:
        """Return the identity of a run; StoreError if there is no such run."""
        return parse_identity(run_id, (await self._read_run(run_id))["identity"])

    async def last_commit(self, run_id: str) -> CommitRecord | RunState | None:
        """Return the record of the last commit; the state if there is only the first one."""
        rows = await self._database.fetch_rows(f"{COMMITS} ORDER BY number DESC LIMIT 1", (run_id,))
        return parse_commit(run_id, rows[0]) if rows else None

    async def evaluations(self, run_id: str) -> tuple[SkillComparison, ...]:
        """Return the measurements of documents beside a run, or the one with this id, in order."""
        sql = f"SELECT summary FROM runs WHERE {OF_EVALUATION} AND summary NOT NULL ORDER BY rowid"  # noqa: S608 - constants
        rows = await self._database.fetch_rows(sql, (run_id,))
        what = f"evaluation of run {run_id}"
        validate = SkillComparison.model_validate_json
        return tuple(parse_stored(validate, text, what) for (text,) in rows)

    async def test_openings(self, run_id: str) -> tuple[str, ...]:
        """Return why the test split was opened, by a run and by the evaluations beside it."""
        rows = await self._database.fetch_rows(
            "SELECT value FROM decision_log JOIN runs USING (run_id) WHERE label LIKE"  # noqa: S608 - own words
            f" 'test_opening/%' AND (run_id = ?1 OR {OF_EVALUATION})"
            " ORDER BY decision_log.rowid",
            (run_id,),
        )
        return tuple(str(JSON_ADAPTER.validate_json(text)) for (text,) in rows)

    async def refuse_other_runs(self, run_id: str, identity: Mapping[str, JsonValue]) -> None:
        """Raise the ``RunConflict`` with another run; without one, delete runs that left
        no work.
        """
        if (conflict := await self.find_conflict(run_id, identity)) is not None:
            raise conflict
        await self._database.write(partial(delete_idle_runs, run_id=run_id))

    async def find_conflict(
        self, run_id: str, identity: Mapping[str, JsonValue]
    ) -> RunConflict | None:
        """Return the differences from the latest run, if the store has only other runs
        with work.
        """
        is_training = "json_extract(identity, '$.eval') IS NULL"
        shown = f"run_id = ? OR {is_training} AND run_id NOT IN ({IDLE_RUNS})"
        sql = f"SELECT run_id, identity FROM runs WHERE {shown} ORDER BY rowid"  # noqa: S608 - own words
        rows = await self._database.fetch_rows(sql, (run_id,))
        if not rows or run_id in {known for known, _ in rows}:
            return None
        known, text = rows[-1]
        changes = describe_changes(parse_identity(known, text), identity)
        return build_conflict(known, self._database.path, changes)

    def decision_log(self, run_id: str) -> SQLiteDecisionLog:
        """Return the run's decision log."""
        return SQLiteDecisionLog(self._database, run_id)

    async def commit(
        self, run_id: str, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        """Write a commit; a repeated one is harmless.

        StoreError if it differs from the stored one, or if a file of the run went away.
        """
        self._check_files()
        await self._database.write(
            lambda tables: write_commit(tables, run_id, record, state, skills)
        )

    async def records(self, run_id: str) -> tuple[StepRecord, ...]:
        """Return the records of all committed steps, in order."""
        return await self._read_commits(run_id, StepRecord)

    async def epochs(self, run_id: str) -> tuple[EpochRecord, ...]:
        """Return the records of all committed epochs, in order."""
        return await self._read_commits(run_id, EpochRecord)

    async def promotions(self, run_id: str) -> tuple[PromotionRecord, ...]:
        """Return the comparisons of the last with the best skill, in order."""
        return await self._read_commits(run_id, PromotionRecord)

    async def records_of_other_runs(
        self, environment: str, *, exclude: str
    ) -> Mapping[str, tuple[StepRecord, ...]]:
        """Return the steps of other runs of an environment by run, the oldest run first."""
        rows = await self._database.fetch_rows(
            "SELECT run_id FROM runs WHERE run_id <> ? AND json_extract(identity, '$.environment') "
            "= ? ORDER BY rowid",
            (exclude, environment),
        )
        return {run_id: await self.records(run_id) for (run_id,) in rows}

    async def _read_commits(self, run_id: str, record_type: type[Record]) -> tuple[Record, ...]:
        kind = find_kind(record_type)
        rows = await self._database.fetch_rows(
            f"{COMMITS} AND kind = ? ORDER BY number", (run_id, kind)
        )
        commits = (parse_commit(run_id, row) for row in rows)
        return tuple(commit for commit in commits if isinstance(commit, record_type))

    async def skill(self, skill_hash: str) -> Skill:
        """Return a stored document; StoreError if there is none."""
        rows = await self._database.fetch_rows(
            "SELECT text FROM skills WHERE hash = ?", (skill_hash,)
        )
        if not rows:
            raise StoreError(
                f"database {self._database.path}: it has no skill with the hash {skill_hash}"
            )
        skill = Skill(text=rows[0][0])
        if skill.hash != skill_hash:
            raise StoreError(
                f"database {self._database.path}: the skill {skill_hash} does not match its hash, "
                "so the database is damaged; put back a copy of it, or choose another out_dir"
            )
        return skill

    async def append_event(self, event: Event) -> bool:
        """Store a durable event; False if the run already has it."""
        sql = "INSERT OR IGNORE INTO events (run_id, id, event, at) VALUES (?, ?, ?, ?)"
        row = (event.run_id, event.id, event.canonical_content, event.at.isoformat())
        return await self._database.execute(sql, row) == 1

    async def events(self, run_id: str) -> tuple[Event, ...]:
        """Return the run's durable events, in order."""
        sql = "SELECT id, event, at FROM events WHERE run_id = ? ORDER BY sequence"
        events = []
        for event_id, text, at in await self._database.fetch_rows(sql, (run_id,)):
            event = parse_stored(
                EVENT_ADAPTER.validate_json, text, f"event {event_id} of run {run_id}"
            )
            events.append(event.model_copy(update={"at": datetime.fromisoformat(at)}))
        return tuple(events)

    async def add_seconds(
        self, run_id: str, seconds: float, stages: Mapping[tuple[int, str], float] | None = None
    ) -> float:
        """Add active seconds, total and by step and stage, and return the run's total."""

        def add(tables: Tables) -> float:
            tables.execute(
                "UPDATE runs SET seconds = seconds + ? WHERE run_id = ?", (seconds, run_id)
            )
            for (step, stage), spent in (stages or {}).items():
                tables.execute(
                    "INSERT INTO stage_times (run_id, step, stage, seconds) VALUES (?, ?, ?, ?) ON "
                    "CONFLICT (run_id, step, stage) DO UPDATE SET seconds = seconds + "
                    "excluded.seconds",
                    (run_id, step, stage, spent),
                )
            total: float = read_run(tables, run_id)["seconds"]
            return total

        return await self._database.write(add)

    async def stage_costs(self, run_id: str) -> tuple[StageCost, ...]:
        """Return what each stage of each step took: steps in order, stages as they ended first."""

        def read(tables: Tables) -> tuple[StageCost, ...]:
            sql = (
                "SELECT step, stage, seconds FROM stage_times WHERE run_id = ? ORDER BY step, rowid"
            )
            seconds = {(step, stage): time for step, stage, time in tables.execute(sql, (run_id,))}
            spend = sum_spend_by_stage(tables, run_id)
            keys = sorted({**seconds, **spend}, key=lambda key: key[0])
            return tuple(
                StageCost(
                    step=key[0],
                    stage=key[1],
                    seconds=seconds.get(key, 0.0),
                    spend=spend.get(key, ()),
                )
                for key in keys
            )

        return await self._database.read(read)

    async def store_items(self, data: DataSet) -> None:
        """Store all items under the fingerprint of their data, unless they are stored."""
        fingerprint = data.fingerprint  # computed once, since it reads all items

        def store(tables: Tables) -> None:
            table = tables.table("items")
            if table.count_where("data = ?", (fingerprint,)):
                return
            table.insert_all(
                {
                    "data": fingerprint,
                    "split": split.value,
                    "number": number,
                    "item": item.model_dump_json(),
                }
                for split in Split
                for number, item in enumerate(data.items(split))
            )

        await self._database.write(store)

    async def items(self, fingerprint: str) -> DataSet:
        """Return the items under a fingerprint; StoreError if they are missing or damaged."""
        sql = "SELECT split, item FROM items WHERE data = ? ORDER BY split, number"
        rows = await self._database.fetch_rows(sql, (fingerprint,))
        texts = {split: [text for name, text in rows if name == split.value] for split in Split}
        try:
            data = DataSet.model_validate(
                {
                    split.value: tuple(map(Item.model_validate_json, found))
                    for split, found in texts.items()
                }
            )
        except ValidationError:
            data = None
        if data is None or data.fingerprint != fingerprint:
            raise StoreError(
                f"database {self._database.path}: the items of a run are missing or damaged; put "
                "back a copy of the database"
            )
        return data

    async def store_failure(self, run_id: str, key: str, failure: CodeFailure) -> None:
        """Store an exception of the caller's code under a key, at most ``MAX_FAILURES`` of them."""
        sql = (
            "INSERT OR REPLACE INTO failures (run_id, key, step, item_id, reason, traceback)"
            " SELECT ?, ?, ?, ?, ?, ? WHERE (SELECT count(*) FROM failures WHERE run_id = ?) < ?"
        )
        texts = (failure.item_id, failure.reason, failure.traceback)
        await self._database.execute(sql, (run_id, key, failure.step, *texts, run_id, MAX_FAILURES))

    async def failures(self, run_id: str) -> tuple[CodeFailure, ...]:
        """Return the exceptions of the caller's code by step and item."""
        rows = await self._database.fetch_rows(
            "SELECT step, item_id, reason, traceback FROM failures WHERE run_id = ?"
            " ORDER BY step, item_id, key",
            (run_id,),
        )
        return tuple(CodeFailure(step=s, item_id=i, reason=r, traceback=t) for s, i, r, t in rows)

    async def finish(
        self, run_id: str, status: RunStatus, reason: str | None, summary: str
    ) -> None:
        """Store status, reason and summary (JSON text) of this start's end."""

        def end(tables: Tables) -> None:
            read_run(tables, run_id)
            tables.table("runs").update(
                run_id, {"status": status, "reason": reason, "summary": summary}
            )

        self._check_files()
        await self._database.write(end)

    async def runs(self) -> tuple[RunRow, ...]:
        """Return all runs of the store, oldest first."""
        sql = (
            "SELECT run_id, status, reason, created, config, json_extract(identity, '$.eval'),"
            " (SELECT count(*) FROM commits WHERE commits.run_id = runs.run_id AND kind = 'step')"
            " FROM runs ORDER BY runs.rowid"
        )
        names = ("run_id", "status", "reason", "created", "config", "evaluation", "steps")

        def read(tables: Tables) -> tuple[RunRow, ...]:
            rows = []
            for values in tables.execute(sql):
                row = dict(zip(names, values, strict=True))
                if row["status"] is None and is_owned(self._database.path, row["run_id"]):
                    row["status"] = "running"
                row["config"] = JSON_ADAPTER.validate_json(row["config"])
                if row["evaluation"] is not None:
                    row["evaluation"] = SkillEvaluation.model_validate_json(row["evaluation"])
                rows.append(RunRow(**row))
            return tuple(rows)

        return await self._database.read(read)

    async def idle_runs(self) -> frozenset[str]:
        """Return the runs that committed and paid nothing."""
        return frozenset(run_id for (run_id,) in await self._database.fetch_rows(IDLE_RUNS))

    async def versions(self, run_id: str) -> tuple[SkillVersion, ...]:
        """Return the run's skill versions by number, each with its latest score."""
        rows = await self._database.fetch_rows(
            "SELECT json_extract(coalesce(record, state), '$.current'), json_extract(record, "
            "'$.created_versions') FROM commits WHERE run_id = ? ORDER BY number",
            (run_id,),
        )
        lists = [text for current, created in rows for text in (created or "[]", f"[{current}]")]
        what = f"versions of run {run_id}"
        parsed = (parse_stored(VERSIONS_ADAPTER.validate_json, text, what) for text in lists)
        latest = {version.number: version for versions in parsed for version in versions}
        return tuple(latest[number] for number in sorted(latest))

    async def summary(self, run_id: str) -> RunSummary | None:
        """Return the summary of the run's latest end; None if it was always killed, and for an
        evaluation.
        """
        row = await self._read_run(run_id)
        text = row["summary"]
        if text is None or "eval" in parse_identity(run_id, row["identity"]):
            return None
        return parse_stored(RunSummary.model_validate_json, text, f"summary of run {run_id}")

    async def _read_run(self, run_id: str) -> Mapping[str, Any]:
        return await self._database.read(lambda tables: read_run(tables, run_id))


# Runs that committed and paid nothing.
#
# Calls of a target from Python are not seen, so with rollouts its run has paid.
IDLE_RUNS = (
    "SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM commits) AND run_id NOT IN"
    " (SELECT run_id FROM calls WHERE calls > 0 OR uncounted > 0 OR state <> 'settled') AND"
    " (json_extract(identity, '$.target') IS NULL OR NOT EXISTS (SELECT 1 FROM rollouts)) AND"
    " json_extract(identity, '$.eval') IS NULL"
)


# The tables with rows of one run; the run itself is the last one.
TABLES_OF_A_RUN = ("calls", "faults", "stage_times", "events", "decision_log", "failures", "runs")


def delete_idle_runs(tables: Tables, *, run_id: str) -> None:
    """Delete the other runs that left no work, if the store does not contain this one."""
    if tables.execute("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)).fetchone():
        return
    for (idle,) in tables.execute(IDLE_RUNS).fetchall():
        for name in TABLES_OF_A_RUN:
            tables.table(name).delete_where("run_id = ?", [idle])


def write_commit(
    tables: Tables,
    run_id: str,
    record: CommitRecord | None,
    state: RunState,
    skills: Sequence[Skill],
) -> None:
    """Write a commit; see ``SQLiteRunStore.commit``."""
    read_run(tables, run_id)
    if record is not None and record.step != state.step:
        raise StoreError(
            f"run {run_id}: the record is of step {record.step} and the state of step {state.step}"
        )
    content: tuple[str, str | None, str] = ("first", None, state.model_dump_json())
    if record is not None:
        content = (find_kind(type(record)), record.model_dump_json(), "")

    sql = "SELECT kind, record, state FROM commits WHERE run_id = ? AND number = ?"
    stored = tables.execute(sql, (run_id, state.commits)).fetchone()
    if stored == content:
        return
    if stored is not None:
        raise StoreError(
            f"run {run_id}: commit {state.commits} (step {state.step}) exists and differs from the "
            "new one; the stored commit stays, start again to resume from it"
        )

    documents = tables.table("skills")
    documents.insert_all(
        ({"hash": skill.hash, "text": skill.text} for skill in skills), ignore=True
    )
    for skill_hash in (state.current.skill_hash, state.best.skill_hash):
        if not documents.count_where("hash = ?", [skill_hash]):
            raise StoreError(
                f"run {run_id}: step {state.step} names the skill {skill_hash}, which is not stored"
            )
    kind, *texts = content
    row = (run_id, state.commits, kind, state.step, *texts)
    tables.execute(
        "INSERT INTO commits (run_id, number, kind, step, record, state, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*row, compute_checksum(*row)),
    )


def find_kind(record_type: type[CommitRecord]) -> str:
    """Return the kind of commits with a type of record."""
    return next(kind for kind, known in RECORD_TYPES.items() if issubclass(record_type, known))


def read_state(tables: Tables, run_id: str) -> RunState | None:
    """Return a run's state after its last commit: the first state, and the records since."""
    state = None
    records = list[CommitRecord]()
    for row in tables.execute(f"{COMMITS} ORDER BY number", (run_id,)):
        commit = parse_commit(run_id, row)
        if isinstance(commit, RunState):
            state = commit
            records = []
        else:
            records.append(commit)
    return None if state is None else state.after(records)


def parse_commit(run_id: str, row: Sequence[Any]) -> CommitRecord | RunState:
    """Return the record in a commit's columns, or the first state; StoreError if damaged."""
    number, kind, step, record, state, checksum = row
    validate: Callable[[str], CommitRecord | RunState] = RunState.model_validate_json
    if record is not None:
        validate = RECORD_TYPES[kind].model_validate_json
    what = f"commit {number} ({kind}, step {step}) of run {run_id}"
    valid = checksum == compute_checksum(run_id, *row[:-1])
    return parse_checked(validate, record or state, what, valid=valid)


def parse_identity(run_id: str, text: str) -> dict[str, JsonValue]:
    """Return the identity of a run; StoreError if it is damaged."""
    return parse_stored(IDENTITY_ADAPTER.validate_json, text, f"identity of run {run_id}")


def read_run(tables: Tables, run_id: str) -> Mapping[str, Any]:
    """Return the row of a run; StoreError if there is no such run."""
    try:
        row: dict[str, Any] = tables.table("runs").get(run_id)
    except NotFoundError:
        raise StoreError(f"the store has no run {run_id}; open it first") from None
    return row
