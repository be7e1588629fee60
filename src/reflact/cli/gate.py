"""The command ``gate``: whether a build may go on with a document, measured beside another one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import typer

from reflact.cli.common import ConfigArgument, OverrideOption, load_trainer_config
from reflact.errors import RunFailed, UsageError
from reflact.text import escape_line

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.records import CaseComparison
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
    from reflact.events import BudgetUpdated
    from reflact.records import Usage
    from reflact.reporting.ci import GateReport, render_comment, render_junit, render_sarif
    from reflact.trainer import Trainer
    from reflact.types import Split

    if fail_if_worse and fail_unless_better:
        raise UsageError("--fail-unless-better includes --fail-if-worse; leave one out")
    settings = load_trainer_config(config, overrides)
    usage = Usage()

    async def watch(event: Event) -> None:
        nonlocal usage
        if isinstance(event, BudgetUpdated):
            usage = event.usage

    ours, theirs = (_load(path, settings) for path in (skill, against))
    measure = partial(
        Trainer(settings).compare,
        ours,
        [theirs],
        Split(split),
        repeats=repeats,
        on_event=watch,
    )
    compared = anyio.run(measure)
    if not compared.on_cases:
        raise RunFailed("no item was measured under both documents")
    (found,) = compared.on_cases
    score = compared.skill.hard or 0.0
    reasons: list[str] = []
    if fail_if_worse or fail_unless_better:
        reasons += _list_failures(found, must_gain=fail_unless_better)
    if fail_below is not None and score < fail_below:
        reasons.append(f"The mean score is {score:.3g}, below {fail_below:g}.")
    flipped = {*found.better, *found.worse}
    report = GateReport(
        skill=str(skill),
        base=str(against),
        split=Split(split),
        score=score,
        on_cases=found,
        on_new=next(iter(compared.improvements), None),
        changes=tuple(item for item in compared.items if item.item_id in flipped),
        unmeasured=tuple(
            item.item_id for item in compared.items if item.before is None or item.after is None
        ),
        usage=usage,
        failed=tuple(reasons),
    )
    written = ((comment, render_comment), (junit, render_junit), (sarif, render_sarif))
    for path, render in written:
        if path is not None:
            _write(path, render(report))
    if as_json:
        typer.echo(report.model_dump_json(ensure_ascii=True))
    else:
        for line in (*report.failed, report.verdict, report.words_on_new):
            typer.echo(escape_line(line))
    if report.failed:
        raise typer.Exit(1)


def _load(path: Path, settings: TrainerConfig) -> Skill:
    from reflact.skills.package import load_skill

    if path.is_dir():
        return load_skill(path, settings.skill_files)
    return load_skill(path)


def _list_failures(found: CaseComparison, *, must_gain: bool) -> Iterator[str]:
    if found.proven == "worse":
        yield f"It is proven worse on these items: {', '.join(found.worse) or 'by its mean score'}."
    elif must_gain and found.proven != "better":
        yield "It is not proven better on these items."


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from error
