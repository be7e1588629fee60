"""The command ``gate``: whether a build may go on with a document, measured beside another one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import typer

from reflact.cli.common import (
    ConfigArgument,
    OverrideOption,
    PaidCalls,
    ShowMode,
    build_view,
    load_trainer_config,
)
from reflact.errors import UsageError
from reflact.text import escape_line

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.types import Skill


def gate(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    skill: Annotated[
        Path, typer.Option(metavar="FILE", help="The document of this build.", show_default=False)
    ],
    against: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The document that it must hold against.", show_default=False
        ),
    ],
    split: Annotated[
        Literal["val", "test"], typer.Option(metavar="val|test", help="The split to measure on.")
    ] = "val",
    repeats: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="How often each item is run under each document."),
    ] = 4,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="Fail if it is proven worse on these items.")
    ] = False,
    fail_unless_better: Annotated[
        bool,
        typer.Option(
            "--fail-unless-better", help="Fail unless it is proven better on these items."
        ),
    ] = False,
    fail_below: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            min=0,
            max=1,
            help="Fail if its mean score is lower.",
            show_default=False,
        ),
    ] = None,
    comment: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a comment in Markdown.", show_default=False),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JUnit file.", show_default=False)
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a SARIF file.", show_default=False)
    ] = None,
    overrides: OverrideOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Tell a build whether a document holds against another one.

    Both are measured on the same items, several times. A claim about these items is proven by an
    exact test, so that noise alone fails at most one build in forty. Answers are stored in the
    run's folder: those of the other document are paid once. The exit code is 1 if a condition
    fails; without one, the command only reports.
    """
    from rich.console import Console

    from reflact.events import BudgetUpdated
    from reflact.records import Usage
    from reflact.reporting.ci import (
        build_gate_report,
        render_comment,
        render_junit,
        render_sarif,
    )
    from reflact.reporting.facts import describe_judge
    from reflact.trainer import Trainer
    from reflact.types import Split

    if fail_if_worse and fail_unless_better:
        raise UsageError("--fail-unless-better includes --fail-if-worse; leave one out")
    written = ((comment, render_comment), (junit, render_junit), (sarif, render_sarif))
    for path, _ in written:
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}; make it")
    settings = load_trainer_config(config, overrides)
    ours = load_document(skill, settings)
    theirs = load_document(against, settings)
    usage = Usage()

    # Progress goes to standard error, since a build reads the report from standard output.
    name = settings.out_dir.name
    paid = PaidCalls()
    view = build_view(ShowMode.lines, Console(stderr=True), name=name)
    with paid.exit_if_none(), view:

        async def follow(event: Event) -> None:
            nonlocal usage
            if isinstance(event, BudgetUpdated):
                usage = event.usage
            paid.observe(event)
            view.show_event(event)

        measure = partial(
            Trainer(settings).compare,
            ours,
            [theirs],
            Split(split),
            repeats=repeats,
            names=[str(skill), str(against)],
            on_event=follow,
        )
        compared = anyio.run(measure)
    report = build_gate_report(
        compared,
        skill=str(skill),
        base=str(against),
        usage=usage,
        fail_if_worse=fail_if_worse,
        fail_unless_better=fail_unless_better,
        fail_below=fail_below,
    )
    for path, render in written:
        if path is not None:
            _write(path, render(report))
    if as_json:
        typer.echo(report.model_dump_json(ensure_ascii=True))
    else:
        for line in (*report.failed, report.verdict, report.words_on_new):
            typer.echo(escape_line(line))
        if report.judge is not None:
            typer.echo(escape_line(describe_judge(report.judge)))
    if report.failed:
        raise typer.Exit(1)


def load_document(path: Path, settings: TrainerConfig) -> Skill:
    """Return a document, or the folder of a skill with the files that are trained."""
    from reflact.skills.package import load_skill

    if path.is_dir():
        return load_skill(path, settings.skill_files)
    return load_skill(path)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from error
