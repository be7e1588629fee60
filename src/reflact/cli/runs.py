"""The commands on runs: ``runs``, ``show``, ``report``, ``skill``, ``diff``, ``export``, ``compare`` and ``serve``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reflact.cli.common import print_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from reflact.training.history import RunHistory, RunListing, StepDetails
    from reflact.training.items import ItemResult
    from reflact.types import Split


MAX_LISTED_IDS, MAX_LISTED_FILES = 5, 10
"""The most ids of items, and names of files, that a message lists."""

JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")]

MAX_SHOWN_STEPS = 500
"""The most steps in the table of a run; a table of 10,000 takes ten seconds."""


def runs(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run's folder, a folder above several, or a database."),
    ] = Path("runs"),
    as_json: JsonLinesOption = False,
) -> None:
    """List the runs below a folder.

    Columns val and test are the scores of the best skill. The baseline is the score of the initial skill on
    the test split, or on the validation split if there is no test score. If a database cannot be read, an error
    names it, the other runs are listed, and the exit code is 1.
    """
    import anyio
    from rich.console import Console

    from reflact.errors import StoreError, UsageError
    from reflact.reporting.tables import build_run_table
    from reflact.training.history import list_databases, list_runs

    paths = (folder,) if folder.is_file() else list_databases(folder)
    if not paths:
        raise UsageError(f"there is no run in {folder}; name the out_dir of a run, or a folder above it")
    found: list[RunListing] = []
    unreadable = 0
    for path in paths:
        try:
            found += anyio.run(list_runs, path)
        except StoreError as error:
            print_error(str(error))
            unreadable += 1
    if as_json:
        for listing in found:
            typer.echo(listing.model_dump_json(ensure_ascii=True))
    elif found or not unreadable:
        Console().print(build_run_table(found, folder))
    if unreadable:
        raise typer.Exit(1)


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR",
        help="The out_dir of a run, or its database. If it has several runs, RUN_DIR/RUN_ID names one.",
        show_default=False,
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        metavar="RUN_ID", help="The run of the folder, or the beginning of its id. Default: the newest."
    ),
]


def _find_run(folder: Path, run: str | None = None) -> str:
    """Return the id of the run that a command is about.

    If the folder has several runs and the caller named none, standard error says which one this is.
    """
    import anyio

    from reflact.reporting.lines import escape_line, name_count
    from reflact.training.history import find_run

    choice = anyio.run(find_run, folder, run)
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
    item: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show one item in full. The beginning of its id is enough."),
    ] = None,
    split: Annotated[
        Literal["val", "test"] | None,
        typer.Option(metavar="val|test", help="Which items. Default: test if it was opened, otherwise val."),
    ] = None,
    costs: Annotated[bool, typer.Option("--costs", help="List calls, tokens and time of each step.")] = False,
    skill: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Print a version of the skill: a number, or baseline, best or final."
        ),
    ] = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show a run, one of its steps, its items, or its skill.

    A run is shown with its steps and scores, a step with its edits, its verdict, its diff and the cost of its
    stages. Items are shown with the answers, scores and costs under the initial and the best skill.
    """
    import anyio
    from rich.console import Console

    from reflact.errors import UsageError
    from reflact.training.history import read_run, read_step
    from reflact.types import Split

    of_items = {"--items": items, "--wrong": wrong, "--changed": changed, "--item": item is not None}
    named = [option for option, is_set in of_items.items() if is_set]
    conflict = _find_conflict(step, named, costs=costs, split=split)
    if conflict is not None:
        raise UsageError(conflict)
    run = _find_run(folder, run)
    if skill is not None and (step is not None or named or costs):
        raise UsageError("--skill prints a version alone; leave out all else but --run and --json")
    if skill is not None:
        _print_skill(folder, run, skill, as_json=as_json)
        return
    console = Console()
    if named:
        chosen = None if split is None else Split(split)
        if item is not None:
            _print_item(anyio.run(_read_item, folder, run, chosen, item), item, as_json=as_json)
            return
        history = anyio.run(partial(read_run, folder, run, items=True, split=chosen))
        _print_items(console, history, wrong=wrong, changed=changed, as_json=as_json)
        return
    if step is not None:
        _print_step(console, anyio.run(read_step, folder, step, run), as_json=as_json)
        return
    history = anyio.run(partial(read_run, folder, run, events=False))
    if costs:
        _print_costs(console, history, as_json=as_json)
    elif as_json:
        typer.echo(history.model_dump_json(ensure_ascii=True, exclude={"events", "items", "items_note"}))
    else:
        _print_run(console, history, folder)


def _find_conflict(
    step: int | None, of_items: Sequence[str], *, costs: bool, split: str | None
) -> str | None:
    """Return why arguments of ``show`` exclude each other, and which to leave out; None if they do not.

    ``of_items`` are the options that ask for items.
    """
    if step is not None and of_items:
        return f"a step has no items of its own; leave out the step, or {of_items[0]}"
    if step is not None and costs:
        return (
            "--costs lists all steps, and a step is shown with its own costs; leave out the step, or --costs"
        )
    if costs and of_items:
        return f"--costs lists steps, and {of_items[0]} is about items; leave one of them out"
    if "--item" in of_items and (filters := [name for name in of_items if name in {"--wrong", "--changed"}]):
        return f"--item shows one item, and {filters[0]} chooses among all; leave one of them out"
    if split is not None and not of_items:
        return "--split says which items to show; add --items, or leave out --split"
    return None


def _print_items(
    console: Console,
    history: RunHistory,
    *,
    wrong: bool,
    changed: bool,
    as_json: bool,
) -> None:
    from reflact.reporting.tables import build_item_table, choose_items, summarize_items

    chosen = choose_items(history.items, wrong=wrong, changed=changed)
    if as_json:
        for result in chosen:
            typer.echo(result.model_dump_json(ensure_ascii=True))
        return
    if chosen:
        is_terminal = console.is_terminal
        table = build_item_table(chosen, width=console.width, is_terminal=is_terminal)
        console.print(table, soft_wrap=not is_terminal)
    typer.echo(summarize_items(history.items, history.items[0].split))


async def _read_item(folder: Path, run: str | None, split: Split | None, item_id: str) -> RunHistory:
    """Return a run with one item, by its id or a beginning of it, and its exceptions.

    Without a split, the item may be in any measured one. An item that raised an exception need not be measured.
    """
    from reflact.errors import UsageError
    from reflact.training.history import read_run
    from reflact.types import Split

    history = await read_run(folder, run)
    found: dict[str, tuple[ItemResult, ...]] = {
        failure.item_id: () for failure in history.failures if failure.item_id is not None
    }
    for each in [split] if split is not None else [Split.test, Split.val]:
        try:
            measured = (await read_run(folder, history.run_id, items=True, split=each)).items
        except UsageError:  # nothing is measured on this split
            continue
        found |= {result.item_id: (result,) for result in measured}
    ids = [item_id] if item_id in found else [each for each in found if each.startswith(item_id)]
    if len(ids) != 1:
        where = "validation or test" if split is None else split.value
        problem = f"no {where} item of run {history.run_id} has an id that begins with {item_id}"
        if ids:
            more = ", ..." if len(ids) > MAX_LISTED_IDS else ""
            listed = ", ".join(ids[:MAX_LISTED_IDS])
            problem = f"no item is {item_id}, and the ids of {len(ids)} begin with it: {listed}{more}"
        raise UsageError(f"{problem}; --items lists the ids")
    failures = tuple(failure for failure in history.failures if failure.item_id == ids[0])
    return history.model_copy(update={"items": found[ids[0]], "failures": failures})


def _print_item(history: RunHistory, item_id: str, *, as_json: bool) -> None:
    """Print one item in full, and the exceptions that it raised."""
    from reflact.reporting.tables import list_failure_lines, list_item_lines

    if as_json:
        for entry in (*history.items, *history.failures):
            typer.echo(entry.model_dump_json(ensure_ascii=True))
        return
    for item in history.items:
        for line in list_item_lines(item):
            typer.echo(line)
    for failure in history.failures:
        for line in list_failure_lines(failure):
            typer.echo(line)


def _print_run(console: Console, history: RunHistory, folder: Path) -> None:
    from reflact.reporting.lines import escape_controls, format_epoch, name_count
    from reflact.reporting.summary import print_summary
    from reflact.reporting.tables import build_score_table, build_step_table, list_failure_lines

    console.print(f"run {history.run_id}, started {history.created:%Y-%m-%d %H:%M}", highlight=False)
    if history.steps:
        if hidden := len(history.steps[:-MAX_SHOWN_STEPS]):
            console.print(f"{name_count(hidden, 'earlier step')} left out; --json lists all", highlight=False)
        console.print(build_step_table(history.steps[-MAX_SHOWN_STEPS:]))
    for end in history.epochs[-MAX_SHOWN_STEPS:]:
        console.print(escape_controls(format_epoch(end)), markup=False, highlight=False, soft_wrap=True)
    if history.evaluations:
        console.print("documents that were measured with `reflact eval`:", markup=False, highlight=False)
        console.print(build_score_table(history.evaluations, with_hash=True))
    if history.summary is None and not history.versions and history.evaluations:
        console.print("no training was started", highlight=False)
    elif history.summary is None or history.is_open:
        console.print(
            f"{history.status or 'open'}: {name_count(len(history.steps), 'committed step')}, not ended",
            highlight=False,
        )
    else:
        print_summary(console, history.summary, _find_exports(folder, history))
    if history.failures:
        count = len(history.failures)
        typer.echo(f"{count} exception{'s' if count > 1 else ''} in your own code; the last one:")
        for line in list_failure_lines(history.failures[-1]):
            typer.echo(line)


def _find_exports(path: Path, history: RunHistory) -> Path:
    """Return the folder of a run's files; ``path`` is what the caller named, see ``read_run``."""
    from reflact.store.artifacts import find_exports

    config = None if history.summary is None else history.summary.config
    if not path.is_dir():
        database = path.parent if path.parent.is_file() else path
        is_shared = database.is_file() and database.name != "run.db"
        path = Path(str(config["out_dir"])) if is_shared and isinstance(config, dict) else database.parent
    return find_exports(path, history.run_id)


def _print_costs(console: Console, history: RunHistory, *, as_json: bool) -> None:
    from reflact.records import sum_step_costs
    from reflact.reporting.tables import build_cost_table

    if as_json:
        for cost in sum_step_costs(history.costs):
            typer.echo(cost.model_dump_json(ensure_ascii=True))
        return
    console.print(build_cost_table(history.costs))


def _print_step(console: Console, details: StepDetails, *, as_json: bool) -> None:
    from reflact.reporting.lines import escape_controls
    from reflact.reporting.summary import format_details
    from reflact.reporting.tables import build_step_table

    if as_json:
        typer.echo(details.model_dump_json(ensure_ascii=True))
        return
    console.print(build_step_table([details.record]))
    for line in format_details(details):
        console.print(escape_controls(line), markup=False, highlight=False, soft_wrap=True)
    if details.diff:
        _print_diff(console, details.diff)


def _print_diff(console: Console, diff: str) -> None:
    from rich.syntax import Syntax

    from reflact.reporting.lines import escape_controls, hide_positions

    if console.is_terminal:
        text = escape_controls(hide_positions(diff))
        console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        typer.echo(escape_controls(diff))


def serve(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run's folder, a folder above several, or a database."),
    ] = Path("runs"),
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="The address to listen at. Any other one needs a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="The port. With 0, a free one is chosen.")
    ] = 8321,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The token. Default: a new one, if the address needs a token."),
    ] = None,
) -> None:
    """Show runs in a browser, also active ones.

    The command serves a list of runs, the page of each run, and the comparison of runs that you choose. The pages
    show active runs too, and change nothing. Install it with `pip install 'reflact[serve]'`. Ctrl-C ends it.
    """
    from reflact.errors import UsageError

    try:
        from reflact.reporting.html.serve import serve_runs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"starlette", "uvicorn"}:
            raise
        raise UsageError(f"reflact serve needs {error.name}; run pip install 'reflact[serve]'") from None

    def show_address(address: str) -> None:
        typer.echo(f"the pages are at {address} (Ctrl-C ends this)")

    try:
        serve_runs(folder, host=host, port=port, token=token, on_start=show_address)
    except KeyboardInterrupt:
        typer.echo("ended", err=True)


def _print_skill(folder: Path, run: str, version: str, *, as_json: bool) -> None:
    """Print a version of the skill: exactly in a file or a pipe, with escaped controls at a terminal."""
    import sys

    import anyio

    from reflact.reporting.lines import escape_controls
    from reflact.training.history import read_versions

    (found,) = anyio.run(read_versions, folder, [version], run)
    if not found.skill.text:
        typer.echo(f"note: v{found.version.number} is an empty document", err=True)
    if as_json:
        typer.echo(found.model_dump_json(ensure_ascii=True))
    elif sys.stdout.isatty():
        typer.echo(escape_controls(found.skill.text))
    else:
        typer.echo(found.skill.text.encode("utf-8"), nl=False)


def print_diff(
    folder: RunArgument,
    before: Annotated[
        str, typer.Argument(metavar="A", help="A number, or baseline, best or final.")
    ] = "baseline",
    after: Annotated[str, typer.Argument(metavar="B", help="The second version. The same choices.")] = "best",
    run: RunOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Print the difference between two versions.

    The difference is a unified diff, by default from the initial skill to the best one. A pipe or a file gets the
    positions of its lines too.
    """
    import anyio
    from rich.console import Console

    from reflact.skills.document import diff_texts
    from reflact.training.history import read_versions

    old, new = anyio.run(read_versions, folder, [before, after], _find_run(folder, run))
    diff = diff_texts(old.skill.text, new.skill.text)
    if as_json:
        versions = {name: found.version.model_dump(mode="json") for name, found in (("a", old), ("b", new))}
        typer.echo(json.dumps({**versions, "diff": diff}))
    elif not diff:
        typer.echo(f"v{old.version.number} and v{new.version.number} have the same text")
    else:
        names = (f"v{found.version.number} ({found.version.origin})" for found in (old, new))
        _print_diff(Console(), "\n".join((f"--- {next(names)}", f"+++ {next(names)}", *diff.split("\n")[2:])))


def export(  # noqa: PLR0917 - one for each option of the command
    folder: RunArgument,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to write the skill's folder, such as .claude/skills.")
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
    run: RunOption = None,
) -> None:
    """Write a skill as a folder for agents.

    The folder has the name of the skill and follows the Agent Skills specification: SKILL.md begins with the skill's
    name and description. If the initial skill has front matter or other files, they are copied unchanged. Hidden
    files, caches and links stay behind, and the markers of protected regions are removed.
    """
    import anyio

    from reflact.reporting.lines import escape_line
    from reflact.reporting.verdict import find_doubt
    from reflact.store.artifacts import write_package
    from reflact.training.history import read_package, read_run

    run = _find_run(folder, run)
    package = anyio.run(partial(read_package, folder, version, run, name=name, description=description))
    summary = anyio.run(read_run, folder, run).summary if version == "best" else None
    doubt = None if summary is None else find_doubt(summary)
    written = write_package(package, out)
    for hint in (*([] if doubt is None else [f"the run's result: {doubt}"]), *package.hints):
        typer.echo(f"hint: {escape_line(hint)}")
    typer.echo(f"wrote {escape_line(str(written / 'SKILL.md'))}")
    if len(package.files) > 1:
        others = len(package.files) - 1
        typer.echo(f"and {others} other file{'s' if others > 1 else ''} of the folder")
    if package.left_out:
        rest = len(package.left_out) - MAX_LISTED_FILES
        more = f" and {rest} more" if rest > 0 else ""
        listed = ", ".join(package.left_out[:MAX_LISTED_FILES])
        typer.echo(escape_line(f"left out of the folder (hidden, caches or links): {listed}{more}"))


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="The out_dirs of runs, one with several runs, or a folder with out_dirs. RUN_DIR/RUN_ID names one of "
            "several.",
        ),
    ],
    as_json: JsonLinesOption = False,
) -> None:
    """Compare runs with the first of them.

    The output shows cost, time, the settings that differ, and the scores of the best skills. It also shows the
    difference between the skills, and between their scores on the items that the runs have in common.
    """
    import anyio
    from rich.console import Console

    from reflact.reporting.lines import escape_line
    from reflact.reporting.tables import (
        build_comparison_table,
        build_settings_table,
        describe_prompts,
        list_gain_lines,
    )
    from reflact.training.history import compare_runs

    if len(folders) == 1 and not (folders[0] / "run.db").exists():
        folders = sorted(database.parent for database in folders[0].glob("*/run.db")) or folders
    ids = [_find_run(folder) for folder in folders] if len(folders) > 1 else None
    comparison = anyio.run(partial(compare_runs, folders, run_ids=ids))
    if as_json:
        typer.echo(comparison.model_dump_json(ensure_ascii=True))
        return
    console = Console()
    console.print(build_comparison_table(comparison))
    for line in list_gain_lines(comparison):
        typer.echo(escape_line(line))
    settings = build_settings_table(comparison)
    if settings.row_count:
        typer.echo()
        console.print(settings)
    if (prompts := describe_prompts(comparison)) is not None:
        typer.echo(escape_line(prompts))
    first, *others = comparison.runs
    for run, diff in zip(others, comparison.diffs, strict=True):
        if diff:
            typer.echo()
            typer.echo(escape_line(f"best skill of {first.name} (---) and of {run.name} (+++):"))
            _print_diff(console, diff)
        else:
            typer.echo(escape_line(f"{run.name} has the same best skill"))
