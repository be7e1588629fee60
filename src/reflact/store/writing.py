"""What opening a run and committing write, each within one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter

from reflact.errors import RunConflict, StoreError
from reflact.ports import Committed
from reflact.records import EpochRecord, Promotion, RunState, StepRecord
from reflact.store.database import Tables
from reflact.store.effects import unsettle
from reflact.store.reading import read_back
from reflact.types import Skill, canonical

IDENTITY: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
KINDS = {StepRecord: "step", EpochRecord: "epoch", Promotion: "promotion"}
SHOWN = 60


def open_run(
    tables: Tables,
    path: Path,
    run_id: str,
    identity: dict[str, JsonValue],
    config: JsonValue,
    *,
    goes_on: bool,
) -> RunState | None:
    """Start or go on with a run; see ``SQLiteStore.open_run``."""
    known = tables.execute("SELECT identity FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    if known is None:
        tables.execute(
            "INSERT INTO runs (run_id, identity, config) VALUES (?, ?, ?)",
            (run_id, canonical(identity), canonical(config)),
        )
        return None
    before = read_back(IDENTITY.validate_json, known[0], f"identity of run {run_id}")
    differences = changes(before, identity)
    if differences:
        raise conflict(run_id, path, differences)
    if goes_on:
        tables.execute(
            "UPDATE runs SET config = ?, status = NULL, reason = NULL WHERE run_id = ?",
            (canonical(config), run_id),
        )
    unsettle(tables, run_id)
    last = tables.execute(
        "SELECT state FROM commits WHERE run_id = ? ORDER BY number DESC LIMIT 1", (run_id,)
    ).fetchone()
    if last is None:
        return None
    return read_back(RunState.model_validate_json, last[0], f"state of run {run_id}")


def conflict(run_id: str, path: Path, differences: Sequence[str]) -> RunConflict:
    """Return the error for a folder that holds another run than the one to be started."""
    return RunConflict(
        f"run {run_id} in {path} was started with other settings: {'; '.join(differences)}; "
        "put the old values back, or start the changed run beside it with fork: true, or in another out_dir"
    )


def refuse_older(tables: Tables, path: Path, run_id: str, commits: int) -> None:
    """Make sure that a database holds as many commits of a run as were made.

    Raises:
        StoreError: It holds less: it was replaced by an older copy, or lost its write-ahead log.
    """
    stored = 0
    if tables.execute("SELECT 1 FROM sqlite_master WHERE name = 'commits'").fetchone():
        (latest,) = tables.execute("SELECT max(number) FROM commits WHERE run_id = ?", (run_id,)).fetchone()
        stored = latest or 0
    if stored < commits:
        raise StoreError(
            f"database {path}: it holds {stored} commits of run {run_id}, which made {commits}: this is an "
            f"older copy, or {path.name}-wal, which belongs to it, was left behind; restore the right files, "
            f"or delete {path.parent / 'run.lock'} to go on from what is there"
        )


def changes(before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]) -> list[str]:
    """Return a phrase for each key of an identity that differs."""

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


def commit(
    tables: Tables, run_id: str, record: Committed | None, state: RunState, skills: Sequence[Skill]
) -> None:
    """Write a commit; see ``SQLiteStore.commit``."""
    column(tables, "run_id", run_id)
    if record is not None and record.step != state.step:
        raise StoreError(f"run {run_id}: the record of step {record.step} came with a state of {state.step}")
    kind = "first" if record is None else KINDS[type(record)]
    texts = (kind, None if record is None else record.model_dump_json(), state.model_dump_json())
    stored = tables.execute(
        "SELECT kind, record, state FROM commits WHERE run_id = ? AND number = ?", (run_id, state.commits)
    ).fetchone()
    if stored is not None:
        if stored != texts:
            raise StoreError(
                f"run {run_id}: commit {state.commits} (step {state.step}) is there already and differs from "
                "what was to be committed; the committed one stands, start again to go on from it"
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
        "INSERT INTO commits (run_id, number, kind, step, record, state)"
        " VALUES (:run_id, :number, :kind, :step, :record, :state)",
        {
            "run_id": run_id,
            "number": state.commits,
            "kind": kind,
            "step": state.step,
            "record": texts[1],
            "state": texts[2],
        },
    )


def column(tables: Tables, name: str, run_id: str) -> Any:
    """Return a column of a run's row.

    Raises:
        StoreError: The store holds no such run.
    """
    row = tables.execute(
        f"SELECT {name} FROM runs WHERE run_id = ?",  # noqa: S608 - a constant of this module
        (run_id,),
    ).fetchone()
    if row is None:
        raise StoreError(f"the store holds no run {run_id}; open it first")
    return row[0]
