"""``reflact runs`` and ``reflact show``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reflact.cli.common import print_error

if TYPE_CHECKING:
    from rich.console import Console

    from reflact.records import RunSummary, StepRecord
    from reflact.store.runs import RunRow
    from reflact.training.history import RunHistory


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or a folder above several.")
    ] = Path("runs"),
) -> None:
    """List the runs below a folder.

    A database that cannot be read is an error of its own, and the others are listed. The exit code is then 1.
    """
    import anyio
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from reflact.errors import StoreError, UsageError
    from reflact.reporting.lines import format_score

    paths = sorted(folder.rglob("run.db")) if folder.is_dir() else []
    unreadable = 0
    if not paths:
        raise UsageError(f"there is no run in {folder}; name the out_dir of a run, or a folder above it")
    table = Table("folder", "run", "status", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("steps", "best", "started"):
        table.add_column(heading, justify="right", no_wrap=True)
    for path in paths:
        try:
            found = anyio.run(_read_runs, path)
        except StoreError as error:
            print_error(str(error))
            unreadable += 1
            continue
        for row, summary in found:
            best = summary.best.score if summary is not None and summary.best is not None else None
            started, status = f"{row.created:%Y-%m-%d %H:%M}", row.status or "open"
            table.add_row(str(path.parent), row.run_id, status, str(row.steps), format_score(best), started)
    if table.row_count or not unreadable:
        Console().print(table)
    if unreadable:
        raise typer.Exit(1)


async def _read_runs(path: Path) -> list[tuple[RunRow, RunSummary | None]]:
    from reflact.store.runs import open_store

    async with open_store(path, read_only=True) as store:
        return [(row, await store.summary(row.run_id)) for row in await store.runs()]


RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="The out_dir of a run, or its database.", show_default=False)
]
RunOption = Annotated[
    str | None, typer.Option(metavar="RUN_ID", help="The run of the folder to show. Default: the newest.")
]


def show(  # noqa: PLR0917 - one for each option of the command
    folder: RunArgument,
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="The step to show in full.", show_default=False)
    ] = None,
    run: RunOption = None,
    items: Annotated[
        bool, typer.Option("--items", help="List what the target answered to each item.")
    ] = False,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Only items that the best skill gets wrong.")
    ] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Only items whose score changed.")] = False,
    item: Annotated[str | None, typer.Option(metavar="ID", help="Show one item in full.")] = None,
    split: Annotated[
        Literal["val", "test"] | None,
        typer.Option(metavar="val|test", help="Which items. Default: test if it was opened, otherwise val."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")] = False,
) -> None:
    """Show a run, one of its steps, or its items.

    A run is shown with its steps and scores, a step with its edits, its verdict and its diff. Items are
    shown with the answers, scores and costs under the initial and the best skill.
    """
    import anyio
    from rich.console import Console

    from reflact.errors import UsageError
    from reflact.training.history import read_run
    from reflact.types import Split

    console = Console()
    if items or wrong or changed or item is not None:
        if step is not None:
            raise UsageError("a step has no items of its own; leave out the step, or --items")
        chosen = None if split is None else Split(split)
        history = anyio.run(partial(read_run, folder, run, items=True, split=chosen))
        _print_items(console, history, wrong=wrong, changed=changed, item_id=item, as_json=as_json)
        return
    history = anyio.run(read_run, folder, run)
    if step is None:
        _print_run(console, history, folder)
        return
    record = next((record for record in history.steps if record.step == step), None)
    if record is None:
        raise UsageError(f"run {history.run_id} has no step {step}; {len(history.steps)} steps are committed")
    anyio.run(_print_step, console, folder / "run.db", record)


def _print_items(
    console: Console,
    history: RunHistory,
    *,
    wrong: bool,
    changed: bool,
    item_id: str | None,
    as_json: bool,
) -> None:
    from reflact.errors import UsageError
    from reflact.reporting.items import build_item_table, choose_items, list_item_lines, summarize_items
    from reflact.reporting.lines import escape_line

    chosen = choose_items(history.items, wrong=wrong, changed=changed)
    split = history.items[0].split
    if item_id is not None:
        chosen = tuple(result for result in history.items if result.item_id == item_id)
        if not chosen:
            raise UsageError(f"the {split.value} split of run {history.run_id} has no item {item_id}")
    if as_json:
        for result in chosen:
            typer.echo(result.model_dump_json(ensure_ascii=True))
        return
    if item_id is not None:
        for line in list_item_lines(chosen[0]):
            typer.echo(line)
    else:
        if chosen:
            console.print(build_item_table(chosen, width=console.width))
        typer.echo(summarize_items(history.items, split))
    if history.items_note is not None:
        typer.echo(f"note: {escape_line(history.items_note)}")


def _print_run(console: Console, history: RunHistory, folder: Path) -> None:
    from reflact.reporting.lines import escape_controls, format_epoch
    from reflact.reporting.summary import build_step_table, print_summary

    console.print(f"run {history.run_id}, started {history.created:%Y-%m-%d %H:%M}", highlight=False)
    console.print(build_step_table(history.steps))
    for end in history.epochs:
        console.print(escape_controls(format_epoch(end)), markup=False, highlight=False, soft_wrap=True)
    if history.summary is None:
        console.print(f"open: {len(history.steps)} steps committed, not ended", highlight=False)
    else:
        print_summary(console, history.summary, folder)


async def _print_step(console: Console, path: Path, record: StepRecord) -> None:
    from rich.syntax import Syntax

    from reflact.reporting.lines import escape_controls
    from reflact.reporting.summary import build_step_table, format_step
    from reflact.skills.document import diff_texts
    from reflact.store.runs import open_store

    console.print(build_step_table([record]))
    for line in format_step(record):
        console.print(escape_controls(line), markup=False, highlight=False, soft_wrap=True)
    if record.candidate_hash == record.skill_before:
        return
    async with open_store(path) as store:
        before, after = await store.skill(record.skill_before), await store.skill(record.candidate_hash)
    text = escape_controls(diff_texts(before.text, after.text))
    if console.is_terminal:
        console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        typer.echo(text)
