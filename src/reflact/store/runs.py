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

from pydantic import JsonValue, TypeAdapter
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
    Reuse,
    RunState,
    RunStatus,
    RunSummary,
    SkillComparison,
    SkillEvaluation,
    SkillVersion,
    StepRecord,
    StoredStatus,
)
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database, Tables
from reflact.store.errors import build_conflict, describe_changes
from reflact.store.ledger import Ledger, mark_unsettled
from reflact.store.lock import Ownership, is_owned
from reflact.store.outcomes import (
    JSON_ADAPTER,
    compute_checksum,
    insert_outcome,
    parse_checked,
)
from reflact.store.schema import SCHEMA
from reflact.types import FrozenModel, Rollout, Skill, canonical_json

IDENTITY_ADAPTER: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
VERSIONS_ADAPTER: TypeAdapter[list[SkillVersion]] = TypeAdapter(list[SkillVersion])
Record = TypeVar("Record", StepRecord, EpochRecord, PromotionRecord)

# The first commit of a run is its state, the others are the records since.
RECORD_TYPES: Mapping[str, type[RunState] | type[CommitRecord]] = {
    "first": RunState,
    "step": StepRecord,
    "epoch": EpochRecord,
    "promotion": PromotionRecord,
}

# The most exceptions of the caller's code that are stored of a run.
MAX_FAILURES = 1_000
COMMITS = "SELECT number, kind, step, record, checksum FROM commits WHERE run_id = ?"

# Runs that committed and paid nothing.
#
# Calls of a target from Python are not seen, so with rollouts its run has paid.
IDLE_RUNS = (
    "SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM commits) AND run_id NOT IN"
    " (SELECT run_id FROM calls WHERE calls > 0 OR uncounted > 0 OR state <> 'settled') AND"
    " (json_extract(identity, '$.target') IS NULL"
    " OR NOT EXISTS (SELECT 1 FROM outcomes WHERE kind = 'rollout')) AND"
    " json_extract(identity, '$.eval') IS NULL"
)

# The evaluations beside a run, or the one with the id itself.
OF_EVALUATION = (
    "json_extract(identity, '$.eval') IS NOT NULL"
    " AND ?1 IN (run_id, json_extract(identity, '$.eval.run_id'))"
)

# The tables with rows of one run; the run itself is the last one.
TABLES_OF_A_RUN = ("calls", "faults", "stage_times", "outcomes", "runs")


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


class SQLiteRunStore(Ledger):
    """Implements ``protocols.RolloutStore`` too, on a database that runs and processes may share.

    A damaged value is a StoreError from every method that reads it.
    """

    def __init__(self, database: Database, ownership: Ownership | None = None) -> None:
        super().__init__(database)
        self._ownership = ownership
        self._n_rollouts_reused = 0

    @property
    def reuse(self) -> Reuse:
        """Number of stored responses and rollouts that were found since the store was opened."""
        return Reuse(rollouts=self._n_rollouts_reused, replies=self._n_replies_reused)

    async def check_integrity(self) -> None:
        """Read the whole file; StoreError if it is damaged."""
        await self._database.check_integrity()

    # ---- a run

    async def open_run(
        self,
        run_id: str,
        identity: Mapping[str, JsonValue],
        config: JsonValue,
        *,
        resume: bool = True,
    ) -> RunState | None:
        """Start or resume a run, and own it; RunConflict names each key of another identity."""

        def start(tables: Tables) -> RunState | None:
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
            if self._ownership is not None and self._database.fence is None:
                sql = "UPDATE runs SET owners = owners + 1, owner = ? WHERE run_id = ?"
                tables.execute(sql, (self._ownership.owner, run_id))
                owners = read_run(tables, run_id)["owners"]
                self._database.fence = partial(self._check_owner, run_id=run_id, owners=owners)
            return read_state(tables, run_id)

        return await self._database.write(start)

    def _check_owner(self, tables: Tables, *, run_id: str, owners: int) -> None:
        """Check that no other process has continued the run since; StoreError otherwise."""
        sql = "SELECT owners, owner FROM runs WHERE run_id = ?"
        count, owner = tables.execute(sql, (run_id,)).fetchone() or (0, "another process")
        if count != owners:
            raise StoreError(
                f"database {self._database.path}: run {run_id} was continued by {owner}, so this "
                "process stops; only one of them may own a run"
            )

    def _check_files(self) -> None:
        if self._ownership is not None:
            self._ownership.check()

    async def identity(self, run_id: str) -> Mapping[str, JsonValue]:
        """Return the identity of a run; StoreError if there is no such run."""
        return parse_identity(run_id, (await self._read_run(run_id))["identity"])

    async def finish(
        self, run_id: str, status: RunStatus, reason: str | None, summary: str
    ) -> None:
        """Store status, reason and summary (JSON text) of this start's end."""
        end = {"status": status, "reason": reason, "summary": summary}
        self._check_files()
        await self._database.write(lambda tables: tables.table("runs").update(run_id, end))

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

    # ---- all runs

    async def runs(self) -> tuple[RunRow, ...]:
        """Return all runs of the store, oldest first."""
        sql = (
            "SELECT run_id, status, reason, created, config, json_extract(identity, '$.eval') AS"
            " evaluation, (SELECT count(*) FROM commits WHERE commits.run_id = runs.run_id AND"
            " kind = 'step') AS steps FROM runs ORDER BY runs.rowid"
        )

        def read(tables: Tables) -> tuple[RunRow, ...]:
            rows = []
            for row in tables.query(sql):
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
        if not rows or run_id in {other for other, _ in rows}:
            return None
        latest, text = rows[-1]
        changes = describe_changes(parse_identity(latest, text), identity)
        return build_conflict(latest, self._database.path, changes)

    # ---- commits

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

    async def last_commit(self, run_id: str) -> CommitRecord | RunState | None:
        """Return the record of the last commit; the state if there is only the first one."""
        rows = await self._database.fetch_rows(f"{COMMITS} ORDER BY number DESC LIMIT 1", (run_id,))
        return parse_commit(run_id, rows[0]) if rows else None

    async def records(self, run_id: str) -> tuple[StepRecord, ...]:
        """Return the records of all committed steps, in order."""
        return await self._read_commits(run_id, "step", StepRecord)

    async def epochs(self, run_id: str) -> tuple[EpochRecord, ...]:
        """Return the records of all committed epochs, in order."""
        return await self._read_commits(run_id, "epoch", EpochRecord)

    async def promotions(self, run_id: str) -> tuple[PromotionRecord, ...]:
        """Return the comparisons of the last with the best skill, in order."""
        return await self._read_commits(run_id, "promotion", PromotionRecord)

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

    async def _read_commits(
        self, run_id: str, kind: str, record_type: type[Record]
    ) -> tuple[Record, ...]:
        sql = f"{COMMITS} AND kind = ? ORDER BY number"
        commits = [
            parse_commit(run_id, row)
            for row in await self._database.fetch_rows(sql, (run_id, kind))
        ]
        return tuple(commit for commit in commits if isinstance(commit, record_type))

    async def versions(self, run_id: str) -> tuple[SkillVersion, ...]:
        """Return the run's skill versions by number, each with its latest score."""
        rows = await self._database.fetch_rows(
            "SELECT coalesce(json_extract(record, '$.created_versions'), '[]'),"
            " json_array(json_extract(record, '$.current')) FROM commits WHERE run_id = ?"
            " ORDER BY number",
            (run_id,),
        )
        what = f"versions of run {run_id}"
        latest = {}
        for text in (text for row in rows for text in row):
            for version in parse_stored(VERSIONS_ADAPTER.validate_json, text, what):
                latest[version.number] = version
        return tuple(latest[number] for number in sorted(latest))

    async def skill(self, skill_hash: str) -> Skill:
        """Return a stored document; StoreError if there is none."""
        found = await self.find_outcomes("skill", [skill_hash], lambda text: Skill(text=text))
        if not found:
            raise StoreError(
                f"database {self._database.path}: it has no skill with the hash {skill_hash}"
            )
        return found[skill_hash]

    # ---- other outcomes

    async def latest_rollouts(self, count: int) -> tuple[Rollout, ...]:
        """Return the rollouts that were stored last, of any run, the newest first."""
        rows = await self._database.fetch_rows(
            "SELECT key FROM outcomes WHERE kind = 'rollout' ORDER BY rowid DESC LIMIT ?", (count,)
        )
        keys = [key for (key,) in rows]
        return tuple(
            (await self.find_outcomes("rollout", keys, Rollout.model_validate_json)).values()
        )

    async def find_rollouts(self, keys: Sequence[str]) -> Mapping[str, Rollout]:
        """Return the stored rollouts among the keys, in their order."""
        found = await self.find_outcomes("rollout", keys, Rollout.model_validate_json)
        self._n_rollouts_reused += len(found)
        return found

    async def store_rollout(self, rollout: Rollout) -> None:
        """Store a measured rollout, unless its key has one; StoreError if it is unmeasured."""
        if rollout.score is None:
            raise StoreError(
                f"rollout {rollout.key} was not measured ({rollout.error}) and cannot be stored"
            )
        await self.put_outcome("rollout", rollout.key, rollout.model_dump_json())

    async def unmeasured(self, run_id: str) -> Mapping[str, str]:
        """Return the error of each rollout of a run that could not be measured, by its key."""
        found = await self.list_outcomes(
            "decision", JSON_ADAPTER.validate_json, run_id, pattern="%/unmeasured/%"
        )
        return {key.partition("/unmeasured/")[2]: str(error) for key, error in found.items()}

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
            "SELECT value FROM outcomes JOIN runs USING (run_id) WHERE kind = 'decision' AND"  # noqa: S608 - own words
            f" key LIKE '0/test_opening/%' AND (run_id = ?1 OR {OF_EVALUATION})"
            " ORDER BY outcomes.rowid",
            (run_id,),
        )
        return tuple(str(JSON_ADAPTER.validate_json(text)) for (text,) in rows)

    async def append_event(self, event: Event) -> bool:
        """Store a durable event; False if the run already has it."""
        text = event.model_dump_json()
        return await self.put_outcome("event", event.id, text, event.run_id)

    async def events(self, run_id: str) -> tuple[Event, ...]:
        """Return the run's durable events, in order."""
        found = await self.list_outcomes("event", EVENT_ADAPTER.validate_json, run_id)
        return tuple(found.values())

    async def store_items(self, data: DataSet) -> None:
        """Store all items under the fingerprint of their data, unless they are stored."""
        fingerprint = data.fingerprint
        # The text is written on the writer's thread, since it may be long.
        await self._database.write(
            lambda tables: insert_outcome(
                tables, "data", fingerprint, data.model_dump_json(exclude={"rows"})
            )
        )

    async def items(self, fingerprint: str) -> DataSet:
        """Return the items under a fingerprint; StoreError if they are missing."""
        found = await self.find_outcomes("data", [fingerprint], DataSet.model_validate_json)
        if not found:
            raise StoreError(
                f"database {self._database.path}: the items of a run are missing; put back a copy "
                "of the database"
            )
        return found[fingerprint]

    async def store_failure(self, run_id: str, key: str, failure: CodeFailure) -> None:
        """Store an exception of the caller's code under a key, at most ``MAX_FAILURES`` of them."""

        def store(tables: Tables) -> None:
            failures = "kind = 'failure' AND run_id = ?"
            if tables.table("outcomes").count_where(failures, [run_id]) < MAX_FAILURES:
                text = failure.model_dump_json()
                insert_outcome(tables, "failure", key, text, run_id, replaces=True)

        await self._database.write(store)

    async def failures(self, run_id: str) -> tuple[CodeFailure, ...]:
        """Return the exceptions of the caller's code by step and item."""
        found = await self.list_outcomes("failure", CodeFailure.model_validate_json, run_id)
        ordered = sorted(found.items(), key=lambda one: (one[1].step, one[1].item_id or "", one[0]))
        return tuple(failure for _, failure in ordered)


def delete_idle_runs(tables: Tables, *, run_id: str) -> None:
    """Delete the other runs that left no work, if the store does not contain this one."""
    if tables.table("runs").count_where("run_id = ?", [run_id]):
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
    value = state if record is None else record
    kind = next(kind for kind, known in RECORD_TYPES.items() if isinstance(value, known))
    content = (kind, value.model_dump_json())

    sql = "SELECT kind, record FROM commits WHERE run_id = ? AND number = ?"
    stored = tables.execute(sql, (run_id, state.commits)).fetchone()
    if stored == content:
        return
    if stored is not None:
        raise StoreError(
            f"run {run_id}: commit {state.commits} (step {state.step}) exists and differs from the "
            "new one; the stored commit stays, start again to resume from it"
        )

    for skill in skills:
        insert_outcome(tables, "skill", skill.hash, skill.text)
    for skill_hash in (state.current.skill_hash, state.best.skill_hash):
        stored_skills = "kind = 'skill' AND run_id = '' AND key = ?"
        if not tables.table("outcomes").count_where(stored_skills, [skill_hash]):
            raise StoreError(
                f"run {run_id}: step {state.step} names the skill {skill_hash}, which is not stored"
            )
    row = (run_id, state.commits, kind, state.step, content[1])
    tables.execute(
        "INSERT INTO commits (run_id, number, kind, step, record, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (*row, compute_checksum(*row)),
    )


def read_state(tables: Tables, run_id: str) -> RunState | None:
    """Return a run's state after its last commit: the first state, and the records since."""
    state: RunState | None = None
    records: list[CommitRecord] = []
    for row in tables.execute(f"{COMMITS} ORDER BY number", (run_id,)):
        commit = parse_commit(run_id, row)
        if isinstance(commit, RunState):
            state = commit
        else:
            records.append(commit)
    return None if state is None else state.after(records)


def parse_commit(run_id: str, row: Sequence[Any]) -> CommitRecord | RunState:
    """Return the record in a commit's columns, or the first state."""
    number, kind, step, record, checksum = row
    what = f"commit {number} ({kind}, step {step}) of run {run_id}"
    valid = checksum == compute_checksum(run_id, *row[:-1])
    validate: Callable[[str], CommitRecord | RunState] = RECORD_TYPES[kind].model_validate_json
    return parse_checked(validate, record, what, valid=valid)


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
