"""The command ``check``: what a run would cost, what its budget buys, and whether it can start."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from reflact.cli.common import (
    ConfigArgument,
    OverrideOption,
    load_trainer_config,
    print_error,
)
from reflact.errors import BudgetSpent, EnvironmentFailure, ModelError
from reflact.text import (
    escape_line,
    format_count,
    format_duration,
    format_value,
    name_count,
    shorten,
)

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig
    from reflact.training.check import SetupCheck, Trial

MAX_SHOWN_CHARS = 300


def check(
    config: ConfigArgument,
    overrides: OverrideOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Send nothing; print the plan and its cost.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan a run, and test its models.

    The command prints the likely calls, tokens and dollars, what the budget buys, and why a start
    would be refused. It makes one small call to each model, and lets the target answer one train
    item, so that the time is known too. If the agent is a command, it first tests, without a model,
    whether the skill reaches the agent. It writes nothing to the run's folder. If a key, a model,
    an address or the data is wrong, it ends with exit code 2.
    """
    from rich.console import Console

    from reflact.reporting.terminal import build_estimate_table
    from reflact.training.check import check_setup

    settings = load_trainer_config(config, overrides)

    async def run() -> SetupCheck:
        return await check_setup(settings, sends=not dry_run)

    try:
        found = anyio.run(run)
    except (ModelError, EnvironmentFailure, BudgetSpent) as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(found.model_dump_json(ensure_ascii=True))
        return
    estimate = found.estimate
    _print_lines(
        [
            f"run {found.run_id}: {estimate.steps} steps to take, {found.n_done} taken",
            f"data: {found.n_train} train, {found.n_val} validation, {found.n_test} test items",
        ]
    )
    if found.trial is not None:
        _print_lines(_list_trial_lines(found, found.trial, settings))
    console = Console()
    console.print(build_estimate_table(estimate, console.width))
    if found.trial is not None:
        _print_lines([_describe_time(found, found.trial, settings)])
    _print_lines(estimate.assumptions)
    _print_lines(_list_budget_lines(found, settings))
    _print_lines([found.gate])
    if found.trial is not None:
        _print_lines(f"warning: {warning}" for warning in found.trial.warnings)
    if not settings.environment.description.strip():
        hint = "the optimizer reads it, so say what a good answer is"
        _print_lines([f"hint: environment.description is empty; {hint}"])
    if found.conflict is not None:
        line = f"warning: without a change, reflact train will refuse to start: {found.conflict}"
        _print_lines([line])
    elif dry_run:
        _print_lines([f"next: {_join_command('check', config, overrides)}"])
    else:
        _print_lines([f"next: {_join_command('train', config, overrides)}"])


def _print_lines(lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        typer.echo(escape_line(line))


def _join_command(name: str, config: Path, overrides: Sequence[str] | None) -> str:
    """Return a command with a configuration and its overrides, for a shell."""
    settings = [word for each in overrides or () for word in ("--set", each)]
    return shlex.join(["reflact", name, str(config), *settings])


def _describe_time(found: SetupCheck, trial: Trial, config: TrainerConfig) -> str:
    """Return how long the target's rollouts take, by that of the check."""
    calls = sum(row.calls for row in found.estimate.rows if row.role == "target")
    own = sum(one.usage.calls for one in trial.roles if one.role == "target")
    rollouts = calls / max(own, 1)
    at_once = config.models.target.concurrency
    whole = rollouts * trial.seconds
    return (
        f"time: {format_count(round(rollouts))} rollouts are likely; at "
        f"{format_duration(trial.seconds)} each they take about {format_duration(whole / at_once)} "
        f"if {at_once} run at once, and up to {format_duration(whole)} if not"
    )


def _list_budget_lines(found: SetupCheck, config: TrainerConfig) -> Iterator[str]:
    """Yield the limits, and what they buy."""
    limits = config.budget.model_dump(exclude_none=True)
    named = ", ".join(f"budget.{name} {limit:g}" for name, limit in limits.items())
    forecast = found.forecast
    if not named:
        is_priced = all(row.usd is not None for row in found.estimate.rows)
        yield f"no limit: set budget.{'max_usd' if is_priced else 'max_calls'}"
        return
    yield f"the run stops before it exceeds {named}"
    if forecast is None:
        return
    total = found.estimate.steps
    bought = f"{forecast.steps} of {total} steps" if forecast.steps < total else "all steps"
    tried = name_count(forecast.candidates, "candidate")
    if forecast.passes_first_step:
        yield f"budget.{forecast.key} buys about {bought}, which is about {tried}"
    else:
        yield (
            f"warning: budget.{forecast.key} is too small for the first step, so the run will stop "
            "without a result; set a larger one"
        )


def _list_trial_lines(found: SetupCheck, trial: Trial, config: TrainerConfig) -> Iterator[str]:
    """Yield the models that answered, and the graded item, below a full score with its feedback."""
    from reflact.reporting.facts import SpendFact

    if trial.skill is not None:
        yield f"skill: {trial.skill}"
    for role in trial.roles:
        mode = "" if role.mode is None else f", typed replies by {role.mode}"
        spent = SpendFact(usage=role.usage)
        price = f", price {spent.price}" if role.usage.usd is None else ""
        yield f"{role.role}: {role.title}: {role.seconds:.1f} s{mode}, {spent.details}{price}"
    item = trial.item
    grade = trial.grade
    is_dataset = config.environment.name == "dataset"
    grader = config.environment.grader if is_dataset else config.environment.name
    yield (
        f"item {item.id}, one of {found.n_train} train items, graded by {grader}: score "
        f"{grade.score.hard:g}"
    )
    texts = {"input": item.input, "answer": grade.answer, "expected": item.reference}
    if grade.score.hard < 1:
        texts["grader"] = grade.feedback
    for name, text in texts.items():
        if text is not None:
            yield f"  {name}: {shorten(format_value(text), MAX_SHOWN_CHARS)}"
    if is_dataset and grade.score.hard <= 0:
        yield (
            "hint: if the answer is right, another environment.grader may fit; if only its form is "
            "wrong, training can teach it"
        )
