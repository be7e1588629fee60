"""Reads a run from its store, during or after the run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from reflact.errors import UsageError
from reflact.events import Event
from reflact.records import EpochRecord, RunStatus, RunSummary, SkillVersion, StepRecord
from reflact.training.items import ItemResult, read_items
from reflact.types import FrozenModel, Split

if TYPE_CHECKING:
    from reflact.protocols import Environment
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
        items: The items of one split with the target's answers, if they were asked for.
        items_note: What is not known of the items, and why.
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
    items: tuple[ItemResult, ...] = ()
    items_note: str | None = None


async def read_run(
    path: Path | str,
    run_id: str | None = None,
    *,
    items: bool = False,
    split: Split | None = None,
    environment: Environment | None = None,
) -> RunHistory:
    """Return the stored history of a run; the run may be under way.

    Args:
        path: The run's ``out_dir``, or its database file.
        run_id: The run to read; None: the newest.
        items: Also read what the target answered to each item under the initial and the best document.
        split: The split of these items; None: the test split if it was measured, otherwise the validation split.
        environment: Has the items of a run that was given an environment or lists of items in Python. Without it,
            their right answers are unknown.

    Raises:
        UsageError: There is no store, or no such run in it, or nothing is measured on the split.
        StoreError: It cannot be read.
    """
    from reflact.store.runs import open_store

    database = _find_database(Path(path))
    async with open_store(database) as store:
        row = choose_run(await store.runs(), run_id, database)
        table = await read_items(store, row, split=split, environment=environment) if items else None
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
            items=() if table is None else table.results,
            items_note=None if table is None else table.note,
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
