"""The commands on runs: ``runs``, ``show``, ``export``, ``compare`` and ``serve``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import typer

from reflact.cli.common import (
    ChangedOption,
    CsvOption,
    ItemFilter,
    ItemsOption,
    TaskTypeOption,
    WrongOption,
    print_error,
    print_matrix_items,
)
from reflact.errors import StoreError, UsageError
from reflact.text import escape_controls, escape_line, name_count, suggest_path

if TYPE_CHECKING:
    from pydantic import BaseModel

    from reflact.reporting.history import RunHistory, RunListing
    from reflact.reporting.items import ItemMatrix
    from reflact.types import Split


MAX_LISTED_IDS = 5

# The most ids of items, and names of files, that a message lists.
MAX_LISTED_FILES = 10

JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print JSON lines instead of tables.")
]

FolderArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="A run's folder, a folder above several, or a database."),
]

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR",
        help="The out_dir of a run, or its database. If it has several runs, RUN_DIR/RUN_ID names "
        "one; the beginning of the id is enough.",
        show_default=False,
    ),
]


def _print_json(values: Iterable[BaseModel]) -> None:
    for value in values:
        typer.echo(value.model_dump_json(ensure_ascii=True))


def runs(folder: FolderArgument = Path("runs"), as_json: JsonLinesOption = False) -> None:
    """List the runs below a folder.

    Columns val and test are the scores of the best skill. The baseline is the score of the initial
    skill on the test split, or on the validation split if there is no test score. Runs that failed
    before anything was paid are left out. If a database cannot be read, an error names it, the
    other runs are listed, and the exit code is 1.
    """
    from rich.console import Console

    from reflact.reporting.history import list_databases, list_runs
    from reflact.reporting.terminal import build_run_table

    paths = (folder,) if folder.is_file() else list_databases(folder)
    listings: list[RunListing] = []
    n_unreadable = 0
    for path in paths:
        try:
            listings += anyio.run(list_runs, path)
        except StoreError as error:
            print_error(str(error))
            n_unreadable += 1
    if not listings and not n_unreadable:
        raise UsageError(
            f"there is no run in {folder}; name the out_dir of a run, or a folder above it"
            f"{suggest_path(folder)}"
        )
    if as_json:
        _print_json(listings)
    elif listings:
        console = Console()
        console.print(build_run_table(listings, folder, console.width))
    if n_unreadable:
        raise typer.Exit(1)


def _find_run(folder: Path) -> str:
    """Return the id of the run that a command is about.

    If the folder has several runs and the caller named none, standard error says which one this is.
    """
    from reflact.reporting.history import find_run

    choice = anyio.run(find_run, folder)
    if choice.others:
        count = name_count(len(choice.others) + 1, "run")
        named = f"{folder / choice.others[-1]} names another"
        listed = f", and reflact runs {folder} lists all" if len(choice.others) > 1 else ""
        line = f"note: {folder} has {count}; this is the newest, {choice.run_id} ({named}{listed})"
        typer.echo(escape_line(line), err=True)
    return choice.run_id


def show(  # noqa: PLR0917 - one for each option of the command
    folder: RunArgument,
    step: Annotated[
        int | None,
        typer.Argument(metavar="STEP", help="The step to show in full.", show_default=False),
    ] = None,
    items: ItemsOption = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Show each item under all versions.")
    ] = False,
    changed: ChangedOption = False,
    wrong: WrongOption = False,
    task_type: TaskTypeOption = None,
    item: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Show one item in full. The beginning of its id is enough."
        ),
    ] = None,
    split: Annotated[
        Literal["val", "test"] | None,
        typer.Option(
            metavar="val|test",
            help="Which items. Default: test if it was opened, otherwise val; with --matrix val.",
        ),
    ] = None,
    costs: Annotated[
        bool, typer.Option("--costs", help="List calls, tokens and time of each step.")
    ] = False,
    skill: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Print a version of the skill: a number, or baseline, best or final. A..B prints "
            "the difference of two.",
        ),
    ] = None,
    as_json: JsonLinesOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show a run, one of its steps, its items, or its skill.

    A run is shown with its steps and scores, a step with its edits, its verdict, its diff and the
    cost of its stages. Items are shown with the answers, scores and costs under the initial and the
    best skill; with --matrix under all versions, those that are still wrong first. With --item,
    --matrix adds the answers under the other versions.
    """
    from rich.console import Console

    from reflact.reporting import terminal
    from reflact.reporting.history import read_matrix, read_run, read_step
    from reflact.types import Split

    chosen = ItemFilter(changed, wrong, task_type)
    of_items = item is None and (items or matrix or as_csv or split is not None or any(chosen))
    views = {"a step": step is not None, "--items": of_items, "--item": item is not None}
    views |= {"--costs": costs, "--skill": skill is not None}
    named = [name for name, is_named in views.items() if is_named]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other; leave out all but one of them")
    run_id = _find_run(folder)
    asked = None if split is None else Split(split)
    if skill is not None:
        _print_skill(folder, run_id, skill, as_json=as_json)
    elif step is not None:
        details = anyio.run(read_step, folder, step, run_id)
        if as_json:
            _print_json([details])
        else:
            terminal.print_step(Console(), details)
    elif item is not None:
        _show_item(folder, run_id, asked, item, all_versions=matrix, as_json=as_json)
    elif of_items:
        read = partial(read_matrix, folder, run_id, split=asked, ends_only=not matrix)
        found = anyio.run(read)
        if as_json and not matrix:
            _print_json(found.select(**chosen._asdict()).list_results())
        else:
            print_matrix_items(found, chosen, as_table=matrix, as_json=as_json, as_csv=as_csv)
    else:
        history = anyio.run(partial(read_run, events=False), folder, run_id)
        _show_run(folder, history, costs=costs, as_json=as_json)


def _show_item(
    folder: Path,
    run_id: str,
    split: Split | None,
    item_id: str,
    *,
    all_versions: bool,
    as_json: bool,
) -> None:
    """Show an item by its id or a beginning of it, and its exceptions."""
    from rich.console import Console

    from reflact.reporting import terminal
    from reflact.reporting.history import read_run

    failures = [*anyio.run(partial(read_run, events=False), folder, run_id).failures]
    matrices = anyio.run(_read_matrices, folder, run_id, split, not all_versions)
    failed = [failure.item_id for failure in failures if failure.item_id is not None]
    known = [*dict.fromkeys((*matrices, *failed))]
    ids = [item_id] if item_id in known else [each for each in known if each.startswith(item_id)]
    if not ids:
        raise UsageError(
            f"no item of run {run_id} has an id that begins with {item_id}; --items lists the ids"
        )
    if len(ids) > 1:
        listed = ", ".join(ids[:MAX_LISTED_IDS])
        raise UsageError(f"no item is {item_id}, and the ids of {len(ids)} begin with it: {listed}")
    matrix = matrices.get(ids[0])
    failures = [failure for failure in failures if failure.item_id == ids[0]]
    if as_json:
        if matrix is not None and all_versions:
            _print_json([matrix])
        elif matrix is not None:
            _print_json(matrix.list_results())
        _print_json(failures)
        return
    if matrix is not None:
        terminal.print_item(Console(), matrix)
    for failure in failures:
        terminal.print_failure(Console(), failure)


async def _read_matrices(
    folder: Path, run_id: str, split: Split | None, ends_only: bool
) -> dict[str, ItemMatrix]:
    """Return each measured item of a split, or of any, as a matrix of its own, by its id."""
    from reflact.reporting.history import read_matrix
    from reflact.types import Split

    matrices: dict[str, ItemMatrix] = {}
    for each in [Split.test, Split.val] if split is None else [split]:
        with suppress(UsageError):  # nothing is measured on this split
            read = await read_matrix(folder, run_id, split=each, ends_only=ends_only)
            for row in read.rows:
                matrices.setdefault(row.item_id, read.model_copy(update={"rows": (row,)}))
    return matrices


def _show_run(folder: Path, history: RunHistory, *, costs: bool, as_json: bool) -> None:
    from rich.console import Console

    from reflact.records import sum_step_costs
    from reflact.reporting.terminal import build_cost_table, print_run
    from reflact.store.artifacts import find_exports

    console = Console()
    if costs and as_json:
        _print_json(sum_step_costs(history.costs))
    elif costs:
        console.print(build_cost_table(history.costs, console.width))
    elif as_json:
        hidden = {"events", "items"}
        typer.echo(history.model_dump_json(ensure_ascii=True, exclude=hidden))
    else:
        # the path may end in the name of a database or of one of its runs
        while not folder.is_dir():
            folder = folder.parent
        print_run(console, history, find_exports(folder, history.run_id))


def _print_skill(folder: Path, run_id: str, version: str, *, as_json: bool) -> None:
    """Print a version of the skill: exactly in a file or a pipe, escaped at a terminal."""
    if ".." in version:
        _print_diff(folder, run_id, version, as_json=as_json)
        return
    from reflact.reporting.history import read_versions

    (found,) = anyio.run(read_versions, folder, [version], run_id)
    if not found.skill.text:
        typer.echo(f"note: v{found.version.number} is an empty document", err=True)
    if as_json:
        _print_json([found])
    elif sys.stdout.isatty():
        typer.echo(escape_controls(found.skill.text))
    else:
        typer.echo(found.skill.text.encode("utf-8"), nl=False)


def _print_diff(folder: Path, run_id: str, versions: str, *, as_json: bool) -> None:
    """Print the unified diff of two versions; a pipe or a file gets the positions of its lines."""
    from rich.console import Console

    from reflact.reporting import terminal
    from reflact.reporting.history import read_versions
    from reflact.skills.document import diff_texts

    before, _, after = versions.partition("..")
    old, new = anyio.run(read_versions, folder, [before, after], run_id)
    diff = diff_texts(old.skill.text, new.skill.text)
    if as_json:
        named = {
            "a": old.version.model_dump(mode="json"),
            "b": new.version.model_dump(mode="json"),
        }
        typer.echo(json.dumps({**named, "diff": diff}))
    elif not diff:
        typer.echo(f"v{old.version.number} and v{new.version.number} have the same text")
    else:
        head = f"--- v{old.version.number} ({old.version.origin})"
        head += f"\n+++ v{new.version.number} ({new.version.origin})"
        terminal.print_diff(Console(), "\n".join((head, *diff.split("\n")[2:])))


def export(  # noqa: PLR0917 - one for each option of the command
    folder: RunArgument,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Where to write the skill's folder, such as .claude/skills."
        ),
    ] = Path(),
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The skill's name. Default: from its front matter, or the run's name.",
            show_default=False,
        ),
    ] = None,
    description: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Its purpose, and when to use it. Default: from its front matter, or "
            "environment.description.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        str, typer.Option(metavar="VERSION", help="A number, or baseline, best or final.")
    ] = "best",
    receipt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a receipt of the run instead, which reflact verify checks.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a skill as a folder for agents.

    The folder has the name of the skill and follows the Agent Skills specification: SKILL.md begins
    with the skill's name and description. If the initial skill has front matter or other files,
    they are copied unchanged. Hidden files, caches and links stay behind, and the markers of
    protected regions are removed.
    """
    from reflact.reporting.facts import ResultFact
    from reflact.reporting.history import read_package, read_run
    from reflact.store.artifacts import write_package

    run_id = _find_run(folder)
    if receipt is not None:
        _write_receipt(folder, run_id, receipt)
        return
    package = anyio.run(
        partial(read_package, folder, version, run_id, name=name, description=description)
    )
    hints = list(package.hints)
    summary = anyio.run(read_run, folder, run_id).summary if version == "best" else None
    if summary is not None and (warning := ResultFact(summary=summary).warning) is not None:
        hints.insert(0, f"the run's result: {warning}")
    written = write_package(package, out)
    for hint in hints:
        typer.echo(f"hint: {escape_line(hint)}")
    typer.echo(f"wrote {escape_line(str(written / 'SKILL.md'))}")
    if len(package.files) > 1:
        typer.echo(f"and {name_count(len(package.files) - 1, 'other file')} of the folder")
    if package.left_out:
        rest = len(package.left_out) - MAX_LISTED_FILES
        more = f" and {rest} more" if rest > 0 else ""
        listed = ", ".join(package.left_out[:MAX_LISTED_FILES])
        typer.echo(escape_line(f"left out of the folder (hidden, caches or links): {listed}{more}"))


def _write_receipt(folder: Path, run_id: str, path: Path) -> None:
    from reflact.reporting.asking import find_answer_file
    from reflact.reporting.receipt import build_receipt, describe_receipt

    made = anyio.run(build_receipt, folder, run_id, find_answer_file(folder, run_id))
    path.write_text(f"{made.model_dump_json(indent=1)}\n", encoding="utf-8")
    typer.echo(f"wrote {escape_line(str(path))}: {escape_line(describe_receipt(made))}")


def compare(  # noqa: PLR0917 - one for each option of the command
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="The out_dirs of runs, one with several runs, or a folder with out_dirs. "
            "RUN_DIR/RUN_ID names one of several.",
        ),
    ],
    items: ItemsOption = False,
    changed: ChangedOption = False,
    wrong: WrongOption = False,
    task_type: TaskTypeOption = None,
    as_json: JsonLinesOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Compare runs with the first of them.

    The output shows scores, cost, time, and the settings that differ. It also shows what each best
    skill gains on the items that the runs share, and the difference of the skills. With --items, it
    shows the answers of the best skills beside each other, on the test items if all runs have them.
    """
    from rich.console import Console

    from reflact.reporting.history import compare_runs
    from reflact.reporting.terminal import print_comparison

    if len(folders) == 1 and not (folders[0] / "run.db").exists():
        folders = sorted(database.parent for database in folders[0].glob("*/run.db")) or folders
    ids = [_find_run(folder) for folder in folders] if len(folders) > 1 else None
    comparison = anyio.run(partial(compare_runs, folders, run_ids=ids))
    chosen = ItemFilter(changed, wrong, task_type)
    if items or as_csv or any(chosen):
        print_matrix_items(comparison.items, chosen, as_json=as_json, as_csv=as_csv)
    elif as_json:
        _print_json([comparison])
    else:
        print_comparison(Console(), comparison)


def serve(
    folder: FolderArgument = Path("runs"),
    port: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=65535, help="The port. With 0, a free one is chosen."),
    ] = 8321,
) -> None:
    """Show runs in a browser, also active ones.

    The command serves a list of runs and the page of each run. The pages change nothing, and only
    this machine can reach them. It needs `pip install 'reflact[serve]'`. Ctrl-C ends it.
    """
    try:
        from reflact.reporting.html.serve import serve_runs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"starlette", "uvicorn"}:
            raise
        raise UsageError(
            f"reflact serve needs {error.name}; run pip install 'reflact[serve]'"
        ) from None

    def show_address(address: str) -> None:
        typer.echo(f"the pages are at {address} (Ctrl-C ends this)")

    try:
        serve_runs(folder, port=port, on_start=show_address)
    except KeyboardInterrupt:
        typer.echo("ended", err=True)
