"""The commands that work with models: ``check``, ``train``, ``eval`` and ``demo``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import anyio
import typer

from reflact.cli.common import (
    ConfigArgument,
    OverrideOption,
    PaidCalls,
    ShowMode,
    ShowOption,
    TimesOption,
    build_view,
    load_trainer_config,
    print_error,
    train_and_show,
)
from reflact.errors import (
    BudgetSpent,
    ConfigError,
    EnvironmentFailure,
    ModelError,
    RunConflict,
    UsageError,
)
from reflact.text import (
    escape_controls,
    escape_line,
    format_count,
    format_duration,
    shorten,
    suggest_path,
)

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.protocols import Approver
    from reflact.records import CandidateReview, Spend
    from reflact.training.check import SetupCheck
    from reflact.training.plan import RunPlan

MAX_SHOWN_CHARS = 300

# The most characters of a document's name in a table.
MAX_NAME_CHARS = 40


def check(
    config: ConfigArgument,
    overrides: OverrideOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Test the models and grade one item.

    The command makes one small call to each model, and lets the target answer one train item. If
    the agent is a command, it first tests, without a model, whether the skill reaches the agent. It
    writes nothing to the run's folder. If a key, a model, an address or the data is wrong, it ends
    with exit code 2.
    """
    from reflact.training.check import check_setup

    settings = load_trainer_config(config, overrides)
    try:
        found = anyio.run(check_setup, settings)
    except (ModelError, EnvironmentFailure, BudgetSpent) as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(found.model_dump_json(ensure_ascii=True))
        return
    for line in list_check_lines(found, settings):
        typer.echo(escape_line(line))
    typer.echo(escape_line(f"next: {join_command(config, overrides)} --dry-run"))


def join_command(config: Path, overrides: Sequence[str] | None, *options: str) -> str:
    """Return the command that trains under a configuration with its overrides, for a shell."""
    settings = [word for each in overrides or () for word in ("--set", each)]
    return shlex.join(["reflact", "train", str(config), *settings, *options])


def list_check_lines(found: SetupCheck, config: TrainerConfig) -> Iterator[str]:
    """Yield what a check found: data, models, the graded item, the likely time, and warnings."""
    from reflact.reporting.facts import SpendFact

    yield f"data: {found.n_train} train, {found.n_val} validation, {found.n_test} test items"
    if found.skill is not None:
        yield f"skill: {found.skill}"
    for role in found.roles:
        mode = "" if role.mode is None else f", typed replies by {role.mode}"
        spent = SpendFact(usage=role.usage)
        price = f", price {spent.price}" if role.usage.usd is None else ""
        yield f"{role.role}: {role.title}: {role.seconds:.1f} s{mode}, {spent.details}{price}"
    yield from _list_item_lines(found, config)
    at_once = config.models.target.concurrency
    for seconds in [role.seconds for role in found.roles if role.role == "target"]:
        whole = found.target_calls * seconds
        yield (
            f"time: {format_count(round(found.target_calls))} calls of the target are likely; at "
            f"{format_duration(seconds)} each they take about {format_duration(whole / at_once)} "
            f"if its server answers {at_once} at once, and up to {format_duration(whole)} if not"
        )
    yield from (f"warning: {warning}" for warning in found.warnings)
    if not config.environment.description.strip():
        yield (
            "hint: environment.description is empty; the optimizer reads it, so say what a good "
            "answer is"
        )


def _list_item_lines(found: SetupCheck, config: TrainerConfig) -> Iterator[str]:
    """Yield the graded item; below a full score also what the grader said."""
    from reflact.reporting.facts import format_value

    item = found.item
    grade = found.grade
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


def evaluate(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    skill: Annotated[
        Path, typer.Option(metavar="FILE", help="The document to measure.", show_default=False)
    ],
    split: Annotated[
        Literal["val", "test"] | None,
        typer.Option(
            metavar="val|test", help="The split to measure it on. Default: val.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure it on all items of this data file instead. The results are in "
            "OUT_DIR/eval-NAME.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="none|placebo|null|FILE",
            help="Compare it with no document, a text about something else, constant answers, or a "
            "document. Repeatable.",
            show_default=False,
        ),
    ] = None,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
) -> None:
    """Measure one skill document, alone or against others.

    The command works in the run's folder: it reuses stored rollouts, and counts each opening of the
    test split. With --show json, the last line is the score. With --against, it has all scores and
    the differences.
    """
    from rich.console import Console

    from reflact.errors import UsageError
    from reflact.reporting.facts import describe_gain
    from reflact.reporting.terminal import build_score_table
    from reflact.skills.package import load_skill
    from reflact.trainer import Trainer
    from reflact.types import Control, Split

    settings = load_trainer_config(config, overrides)
    if data is not None:
        if split is not None:
            raise UsageError("--data measures on all items of the file; leave --split out")
        settings = use_all_items(settings, data)
    named = against or []
    document = load_skill(skill, settings.skill_files if skill.is_dir() else ())
    if document.text.startswith("---"):
        typer.echo(
            "note: the document begins with front matter, which is measured with it", err=True
        )
    controls: dict[str, Control] = {name: name for name in get_args(Control)}
    others = [controls.get(name) or load_skill(Path(name)) for name in named]
    console = Console()
    paid = PaidCalls()
    view = build_view(show, console, name=settings.out_dir.name)
    with paid.exit_if_none(), view:

        async def emit(event: Event) -> None:
            paid.observe(event)
            view.show_event(event)

        measure = partial(
            Trainer(settings).compare, document, others, Split(split or "val"), on_event=emit
        )
        compared = anyio.run(measure)
    if show is ShowMode.json:
        typer.echo((compared if named else compared.skill).model_dump_json(ensure_ascii=True))
        return
    files = {
        "skill": str(skill),
        **{f"other_{number}": name for number, name in enumerate(named, 1)},
    }
    scores = []
    for score in (compared.skill, *compared.others):
        name = shorten(files.get(score.name, score.name), MAX_NAME_CHARS)
        scores.append(score.model_copy(update={"name": name}))
    if data is not None:
        n_items = compared.skill.n + compared.skill.unmeasured
        typer.echo(escape_line(f"all {n_items} items of {data}, as the split val"))
    console.print(build_score_table(scores, console.width))
    for gain in compared.improvements:
        typer.echo(escape_line(describe_gain(str(skill), files.get(gain.name, gain.name), gain)))


def use_all_items(config: TrainerConfig, data: Path) -> TrainerConfig:
    """Return a configuration whose validation split is a data file, in a folder of its own."""
    from reflact.errors import UsageError

    if not data.is_file():
        raise UsageError(f"--data needs one data file, and {data} is none{suggest_path(data)}")
    changes = {"path": data.absolute(), "ratio": "0:1:0"}
    source = config.data.model_copy(update=changes)
    out_dir = config.out_dir / f"eval-{data.stem}"
    return config.model_copy(update={"data": source, "out_dir": out_dir})


def create_approver() -> Approver:
    """Return an approver that shows a candidate's evidence and diff on standard error.

    An empty answer or ``y`` approves; ``n`` vetoes; any other text is a veto with that reason.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "--review asks you at a terminal, but standard input is not a terminal; leave --review "
            "out"
        )

    def ask(review: CandidateReview) -> bool | str:
        text = f"\n{review.diff}\n{review.part} {review.step}: {review.verdict.reason}"
        typer.echo(escape_controls(text), err=True)
        question = "take it? [Y/n/reason]"
        answer = str(typer.prompt(question, default="y", show_default=False, err=True)).strip()
        return {"y": True, "yes": True, "n": False, "no": False}.get(answer.lower(), answer)

    async def approve(review: CandidateReview) -> bool | str:
        import anyio.to_thread

        return await anyio.to_thread.run_sync(ask, review, abandon_on_cancel=True)

    return approve


def print_cost_estimate(config: TrainerConfig, command: str, *, as_json: bool) -> None:
    """Print the estimated cost of the rest of a run, and the command that trains."""
    from rich.console import Console

    from reflact.reporting.terminal import build_estimate_table
    from reflact.training.cost_estimate import estimate_run
    from reflact.training.gating import estimate_gate_power
    from reflact.training.plan import Overrides, prepare_run

    plan = prepare_run(config, Overrides())
    path = config.store or config.out_dir / "run.db"
    progress = anyio.run(_read_progress, path, plan) if path.is_file() else _Progress()
    estimate = estimate_run(plan, done=progress.n_done, skill=progress.skill, spent=progress.spent)
    if as_json:
        typer.echo(estimate.model_dump_json(ensure_ascii=True))
        return
    console = Console()
    data = plan.data
    typer.echo(f"run {plan.run_id}: {estimate.steps} steps to take, {progress.n_done} taken")
    typer.echo(f"items: {len(data.train)} train, {len(data.val)} validation, {len(data.test)} test")
    console.print(build_estimate_table(estimate, console.width))
    for line in estimate.assumptions:
        typer.echo(line)
    limits = config.budget.model_dump(exclude_none=True)
    named = ", ".join(f"budget.{name} {limit:g}" for name, limit in limits.items())
    typer.echo(
        f"the run stops before it exceeds {named}" if named else "no limit: set budget.max_usd"
    )
    typer.echo(estimate_gate_power(plan).description)
    if progress.conflict is None or config.store is not None or config.fork:
        typer.echo(f"next: {escape_line(command)}")
    else:
        reason = escape_line(str(progress.conflict))
        typer.echo(f"warning: without a change, reflact train will refuse to start: {reason}")


class _Progress(NamedTuple):
    """What a run has done: its steps, its skill, its spend, and why it cannot go on."""

    n_done: int = 0
    skill: str | None = None
    spent: tuple[Spend, ...] = ()
    conflict: RunConflict | None = None


async def _read_progress(path: Path, plan: RunPlan) -> _Progress:
    from reflact.store.runs import open_store

    async with open_store(path) as store:
        records = await store.records(plan.run_id)
        text = (await store.skill(records[-1].current.skill_hash)).text if records else None
        conflict = await store.find_conflict(plan.run_id, plan.identity)
        return _Progress(len(records), text, await store.spend(plan.run_id), conflict)


def train(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
    review: Annotated[
        bool, typer.Option("--review", help="Ask you before each candidate is accepted.")
    ] = False,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork", help="If keys changed, start another run in out_dir and reuse results."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and its estimated cost; call no model."),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help="Record each response in this file.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="FILE",
            help="Take all responses from this recording.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a skill, or resume a stopped run.

    If a run has stopped, the same command resumes it and repeats no finished call. With --replay no
    network is used; if the recording lacks a request, the run ends and reflact prints the
    difference.
    """
    changes = [*(overrides or ())]
    if fork:
        changes.append("fork=true")
    if record is not None and replay is not None:
        raise UsageError("--record and --replay exclude each other; leave one of them out")
    if record is not None:
        changes += _name_cassette(record, "record")
    if replay is not None:
        changes += _name_cassette(replay, "replay")
    settings = load_trainer_config(config, changes)
    if dry_run:
        command = join_command(config, overrides, *(["--fork"] if fork else []))
        print_cost_estimate(settings, command, as_json=show is ShowMode.json)
        return
    train_and_show(settings, show=show, times=times, approve=create_approver() if review else None)


def _name_cassette(cassette: Path, mode: str) -> list[str]:
    """Return the keys of a cassette; a relative path counts from the current folder."""
    path = json.dumps(str(cassette.expanduser().absolute()))
    return [f"replay.cassette={path}", f"replay.mode={mode}"]


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the run.")] = Path(
        "demo-run"
    ),
    show: ShowOption = ShowMode.live,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Replay a recorded round of calibration instead.")
    ] = False,
) -> None:
    """Replay two recorded training runs.

    The command prints the best skill of each. It needs no key and no network. It writes the second
    run into the subfolder arithmetic.
    """
    from reflact.prompts import find_data_folder

    if calibrate:
        from reflact.cli.calibrate_run import calibrate_and_show, load_calibrate_config

        memory = out / "memory.db"
        if memory.exists():
            raise ConfigError(
                f"{memory} exists, but the recording starts with an empty memory; choose another "
                "--out"
            )
        path = find_data_folder("calibration") / "calibrate.yaml"
        config = load_calibrate_config(path, [f"memory={json.dumps(str(memory))}"])
        mode = ShowMode.quiet if show is ShowMode.live else show
        calibrate_and_show(config, show=mode, html=out / "calibration.html")
        return
    folder = find_data_folder("demo")
    _replay_demo(folder, out, show=show)
    if show is not ShowMode.json:
        typer.echo("\nThe second task is sums:\n")
    _replay_demo(folder / "arithmetic", out / "arithmetic", show=show)


def _replay_demo(folder: Path, out: Path, *, show: ShowMode) -> None:
    cassette = _name_cassette(folder / "cassette.jsonl", "replay")
    settings = load_trainer_config(
        folder / "demo.yaml", [f"out_dir={json.dumps(str(out))}", *cassette]
    )
    train_and_show(settings, show=show)
    if show is not ShowMode.json:
        best = out / "best_skill.md"
        typer.echo(f"\n{best}:\n\n{escape_controls(best.read_text(encoding='utf-8').strip())}")
