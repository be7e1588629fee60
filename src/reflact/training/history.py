"""Reads a run from its store, during or after the run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from reflact.errors import UsageError
from reflact.events import Event
from reflact.records import EpochRecord, RunStatus, RunSummary, SkillVersion, StepRecord
from reflact.types import FrozenModel

if TYPE_CHECKING:
    from reflact.store.runs import RunRow


class RunHistory(FrozenModel):
    """The stored history of a run.

    Args:
        run_id: The run.
        status: How its latest start ended; None if the run is under way or was killed before any start ended.
        reason: The reason if it did not complete.
        created: The time of its first start.
        summary: The summary of its latest end; None if there is none.
        steps: All committed steps, in order.
        epochs: The committed ends of epochs, in order.
        versions: All skill versions by number, each with its latest score.
        events: All durable events, in order.
    """

    run_id: str
    status: RunStatus | None
    reason: str | None
    created: datetime
    summary: RunSummary | None
    steps: tuple[StepRecord, ...]
    epochs: tuple[EpochRecord, ...]
    versions: tuple[SkillVersion, ...]
    events: tuple[Event, ...]


async def read_run(path: Path | str, run_id: str | None = None) -> RunHistory:
    """Return the stored history of a run; the run may be under way.

    Args:
        path: The run's ``out_dir``, or its database file.
        run_id: The run to read; None: the newest.

    Raises:
        UsageError: There is no store, or no such run in it.
        StoreError: It cannot be read.
    """
    from reflact.store.runs import open_store

    database = _find_database(Path(path))
    async with open_store(database) as store:
        row = choose_run(await store.runs(), run_id, database)
        return RunHistory(
            run_id=row.run_id,
            status=row.status,
            reason=row.reason,
            created=row.created,
            summary=await store.summary(row.run_id),
            steps=await store.records(row.run_id),
            epochs=await store.epochs(row.run_id),
            versions=await store.versions(row.run_id),
            events=await store.events(row.run_id),
        )


def choose_run(rows: Sequence[RunRow], run_id: str | None, path: Path) -> RunRow:
    """Return the run with an id, or the newest run; a UsageError lists the known ids."""
    named = [row for row in rows if run_id is None or row.run_id == run_id]
    if named:
        return named[-1]
    known = ", ".join(row.run_id for row in rows)
    words = f"{path} holds no run {run_id or ''}".rstrip()
    raise UsageError(words + (f"; it holds {known}" if known else ""))


def _find_database(path: Path) -> Path:
    database = path / "run.db" if path.is_dir() else path
    if not database.is_file():
        raise UsageError(f"there is no run at {path}; name the out_dir of a run, or its database")
    return database
