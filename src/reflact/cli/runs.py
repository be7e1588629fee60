"""``reflact runs`` and ``reflact show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from reflact.records import RunSummary, StepRecord
    from reflact.store.runs import RunRow, SQLiteRunStore


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or a folder above several.")
    ] = Path("runs"),
) -> None:
    """List the runs below a folder."""
    import anyio
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from reflact.errors import UsageError
    from reflact.reporting.lines import format_score

    paths = sorted(folder.rglob("run.db")) if folder.is_dir() else []
    if not paths:
        raise UsageError(f"there is no run in {folder}; name the out_dir of a run, or a folder above it")
    table = Table("folder", "run", "status", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("steps", "best", "started"):
        table.add_column(heading, justify="right", no_wrap=True)
    for path in paths:
        for row, summary in anyio.run(_read_runs, path):
            best = summary.best.score if summary is not None and summary.best is not None else None
            started, status = f"{row.created:%Y-%m-%d %H:%M}", row.status or "open"
            table.add_row(str(path.parent), row.run_id, status, str(row.steps), format_score(best), started)
    Console().print(table)


async def _read_runs(path: Path) -> list[tuple[RunRow, RunSummary | None]]:
    from reflact.store.runs import open_store

    async with open_store(path) as store:
        return [(row, await store.summary(row.run_id)) for row in await store.runs()]


def show(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The out_dir of a run.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="The step to show in full.", show_default=False)
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN_ID", help="The run of the folder to show. Default: the newest."),
    ] = None,
) -> None:
    """Show a run, or one of its steps.

    A run is shown with its steps and scores, a step with its edits, its verdict and its diff.
    """
    import anyio

    from reflact.errors import UsageError

    path = folder / "run.db"
    if not path.is_file():
        raise UsageError(f"there is no run in {folder}; name the out_dir of a run")
    anyio.run(_print_stored_run, path, step, run)


async def _print_stored_run(path: Path, step: int | None, run: str | None) -> None:
    from rich.console import Console

    from reflact.errors import UsageError
    from reflact.store.runs import open_store
    from reflact.training.history import choose_run

    console = Console()
    async with open_store(path) as store:
        row = choose_run(await store.runs(), run, path)
        records = await store.records(row.run_id)
        if step is None:
            await _print_run(console, store, row, records, path.parent)
            return
        record = next((record for record in records if record.step == step), None)
        if record is None:
            raise UsageError(f"run {row.run_id} has no step {step}; {len(records)} steps are committed")
        await _print_step(console, store, record)


async def _print_run(
    console: Console, store: SQLiteRunStore, row: RunRow, records: Sequence[StepRecord], folder: Path
) -> None:
    from reflact.reporting.lines import escape_controls, format_epoch
    from reflact.reporting.summary import build_step_table, print_summary

    console.print(f"run {row.run_id}, started {row.created:%Y-%m-%d %H:%M}", highlight=False)
    console.print(build_step_table(records))
    for end in await store.epochs(row.run_id):
        console.print(escape_controls(format_epoch(end)), markup=False, highlight=False, soft_wrap=True)
    summary = await store.summary(row.run_id)
    if summary is None:
        console.print(f"open: {row.steps} steps committed, not ended", highlight=False)
    else:
        print_summary(console, summary, folder)


async def _print_step(console: Console, store: SQLiteRunStore, record: StepRecord) -> None:
    from rich.syntax import Syntax

    from reflact.reporting.lines import escape_controls
    from reflact.reporting.summary import build_step_table, format_step
    from reflact.skills.document import diff_texts

    console.print(build_step_table([record]))
    for line in format_step(record):
        console.print(escape_controls(line), markup=False, highlight=False, soft_wrap=True)
    if record.candidate_hash == record.skill_before:
        return
    before = await store.skill(record.skill_before)
    after = await store.skill(record.candidate_hash)
    text = escape_controls(diff_texts(before.text, after.text))
    if console.is_terminal:
        console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        typer.echo(text)
