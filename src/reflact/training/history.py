"""A run as its store has it: read after the fact, or while it is under way."""

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
    """What a store holds of a run.

    Args:
        run_id: The run.
        status: How its latest start ended; None while none has ended in order: it is running, or was killed.
        reason: Why, where it did not complete.
        created: When it was first started.
        summary: Of its latest end; None where it never ended in order.
        steps: All committed steps, in order.
        epochs: All committed ends of epochs, in order.
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


async def read_run(place: Path | str, run_id: str | None = None) -> RunHistory:
    """Return what a store holds of a run; it may be under way.

    Args:
        place: The run's ``out_dir``, or the file that ``store`` names.
        run_id: Which run of the file; None: the newest.

    Raises:
        UsageError: There is no store, or no such run in it.
        StoreError: It cannot be read.
    """
    from reflact.store.runs import open_store

    path = _find_database(Path(place))
    async with open_store(path) as store:
        row = choose_run(await store.runs(), run_id, path)
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


def _find_database(place: Path) -> Path:
    path = place / "run.db" if place.is_dir() else place
    if not path.is_file():
        raise UsageError(f"there is no run at {place}; name the out_dir of a run, or its database")
    return path


def choose_run(rows: Sequence[RunRow], run_id: str | None, path: Path) -> RunRow:
    """Return the run of this name, or the newest.

    Raises:
        UsageError: There is none; names those that there are.
    """
    named = [row for row in rows if run_id is None or row.run_id == run_id]
    if named:
        return named[-1]
    known = ", ".join(row.run_id for row in rows)
    words = f"{path} holds no run {run_id or ''}".rstrip()
    raise UsageError(words + (f"; it holds {known}" if known else ""))
