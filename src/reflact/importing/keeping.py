"""Puts an imported run where runs are kept: a store of its own, and the files beside it."""

from __future__ import annotations

from pathlib import Path

from reflact.exports import export_best, export_summary, export_version
from reflact.importing.run import ImportedRun
from reflact.store.lock import run_lock
from reflact.store.runs import open_store


async def keep(run: ImportedRun, out: Path) -> None:
    """Write a run into a folder; the same run may be written again, whatever a crash has left of it.

    Raises:
        RunConflict: The folder holds another run, or another process works in it.
        StoreError: The folder cannot be written.
    """
    with run_lock(out):
        async with open_store(out / "run.db") as store:
            await store.refuse_others(run.run_id, run.identity)
            await store.open_run(run.run_id, run.identity, run.summary.config, goes_on=False)
            for commit in run.commits:
                await store.commit(run.run_id, commit.record, commit.state, run.skills)
            if await store.add_seconds(run.run_id, 0.0, {}) == 0.0:
                stages = {entry.stage: entry.seconds for entry in run.summary.stages}
                await store.add_seconds(run.run_id, run.summary.seconds, stages)
            summary = run.summary
            await store.finish(run.run_id, summary.status, summary.reason, summary.model_dump_json())
        for version in run.versions:
            export_version(out, version.number, run.text(version))
        if run.summary.best is not None:
            export_best(out, run.text(run.summary.best))
        export_summary(out, run.summary)
