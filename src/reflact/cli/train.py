"""The commands that train and measure: ``train``, ``eval`` and ``demo``."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import anyio
import typer

from reflact.cli.common import (
    ChangedOption,
    ConfigArgument,
    CsvOption,
    InterruptHandler,
    ItemFilter,
    ItemsOption,
    OverrideOption,
    PaidCalls,
    ShowMode,
    ShowOption,
    TaskTypeOption,
    TimesOption,
    WrongOption,
    build_view,
    choose_exit_code,
    guard_callback,
    load_trainer_config,
    open_console,
    print_error,
    print_matrix_items,
    train_and_show,
)
from reflact.errors import (
    ConfigError,
    UsageError,
)
from reflact.text import escape_controls, escape_line, format_score, suggest_path

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.protocols import Approver
    from reflact.records import CandidateReview
    from reflact.sweep import SweepSummary


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
    items: ItemsOption = False,
    changed: ChangedOption = False,
    wrong: WrongOption = False,
    task_type: TaskTypeOption = None,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    as_csv: CsvOption = False,
) -> None:
    """Measure one skill document, alone or against others.

    The command works in the run's folder: it reuses stored rollouts, and counts each opening of the
    test split. The measurement has a cost of its own, which is not the run's: budget limits it
    alone. reflact runs lists it, and reflact show shows it again. With --show json, the last line
    is the score; with --against, it has all scores and the differences; with --items, all items.
    """
    from rich.console import Console

    from reflact.errors import UsageError
    from reflact.reporting.facts import describe_judge, list_evaluation_gains
    from reflact.reporting.history import read_matrix
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
    # Progress goes to standard error if standard output is a file of values.
    console = Console(stderr=as_csv)
    paid = PaidCalls()
    view = build_view(show, console, name=settings.out_dir.name)
    with paid.exit_if_none(), view:

        async def emit(event: Event) -> None:
            paid.observe(event)
            view.show_event(event)

        measure = partial(
            Trainer(settings).compare,
            document,
            others,
            Split(split or "val"),
            names=[str(skill), *named],
            on_event=emit,
        )
        compared = anyio.run(measure)
    chosen = ItemFilter(changed, wrong, task_type)
    if items or as_csv or any(chosen):
        path = settings.store or settings.out_dir
        matrix = anyio.run(read_matrix, path, compared.run_id)
        is_json = show is ShowMode.json
        print_matrix_items(matrix, chosen, as_json=is_json, as_csv=as_csv)
        if as_csv or is_json:
            return
    if show is ShowMode.json:
        typer.echo((compared if named else compared.skill).model_dump_json(ensure_ascii=True))
        return
    if data is not None:
        n_items = compared.skill.n + compared.skill.unmeasured
        typer.echo(escape_line(f"all {n_items} items of {data}, as the split val"))
    console.print(build_score_table((compared.skill, *compared.others), console.width))
    for line in list_evaluation_gains(compared):
        typer.echo(escape_line(line))
    if compared.judge is not None:
        typer.echo(escape_line(describe_judge(compared.judge)))
    shown = shlex.join(("reflact", "show", str(settings.out_dir / compared.run_id)))
    typer.echo(f"again, with the items: {shown} --items")


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
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Run with so many seeds at once.")
    ] = 1,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Run with each of these values at once. Repeatable."),
    ] = None,
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
    difference. With --seeds or --vary, runs in folders below out_dir share the budget equally, and
    are compared at the end.
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
    if seeds > 1 or vary:
        if review:
            raise UsageError("--review asks about one run; leave it or --seeds and --vary out")
        _train_many(settings, seeds, dict(map(_read_values, vary or ())), show)
        return
    train_and_show(settings, show=show, times=times, approve=create_approver() if review else None)


def _read_values(assignment: str) -> tuple[str, list[str]]:
    """Return the key and the values of an option ``--vary``."""
    key, sign, values = assignment.partition("=")
    if not sign or not key or not all(values.split(",")):
        raise UsageError(f"--vary takes section.key=value,value, got {assignment!r}")
    return key, values.split(",")


def _train_many(
    config: TrainerConfig, seeds: int, vary: dict[str, list[str]], show: ShowMode
) -> None:
    """Run a sweep, with a line for each important event of each run, and show how it ended."""
    from reflact.reporting.live import EventLines
    from reflact.sweep import plan_sweep, run_sweep
    from reflact.trainer import Trainer

    configs = plan_sweep(config, seeds=seeds, vary=vary)
    trainers = {name: Trainer(each) for name, each in configs.items()}
    lines = {name: EventLines() for name in trainers}

    @guard_callback
    def show_event(entry: tuple[str, Event]) -> None:
        name, event = entry
        if show is ShowMode.json:
            typer.echo(event.model_dump_json(ensure_ascii=True))
        elif show is not ShowMode.quiet and (line := lines[name].format_event(event)):
            typer.echo(escape_controls(f"{name}: {line}"))

    def stop(reason: str) -> None:
        for trainer in trainers.values():
            trainer.stop(reason)

    async def run(interrupts: InterruptHandler) -> SweepSummary | None:
        with anyio.CancelScope() as scope:
            interrupts.bind(stop=stop, cancel=scope.cancel)
            return await run_sweep(trainers, lambda name, event: show_event((name, event)))
        return None

    with InterruptHandler(config.train.grace_seconds) as interrupts:
        sweep = anyio.run(run, interrupts)
    if sweep is not None:
        _print_sweep(sweep, as_json=show is ShowMode.json)
    if sweep is None or interrupts.exit_code is not None:
        raise typer.Exit(interrupts.exit_code or 1)
    failed = [run for run in sweep.runs if run.summary.status != "completed"]
    for one in failed:
        print_error(f"run {one.name} ended as {one.summary.status}: {one.summary.reason}")
    if failed:
        raise typer.Exit(min(map(choose_exit_code, [run.summary for run in failed])))


def _print_sweep(sweep: SweepSummary, *, as_json: bool) -> None:
    from reflact.reporting import facts
    from reflact.reporting.terminal import build_table

    if as_json:
        typer.echo(sweep.model_dump_json(ensure_ascii=True))
        return
    console = open_console()
    if sweep.comparison is not None:
        rows = [facts.build_compared_row(run) for run in sweep.comparison.runs]
        optional = ("characters", "calls", "steps")
        console.print(build_table(rows, console.width, optional=optional, wrapped=("run",)))
    scores = []
    for score in sweep.scores:
        row = {"setting": score.setting or "all", "runs": str(score.n), "split": score.split.value}
        spread = "-" if score.spread is None else format_score(score.spread)
        row |= {
            "baseline": format_score(score.baseline),
            "best": format_score(score.best),
        }
        scores.append({**row, "spread": spread})
    if scores:
        console.print(build_table(scores, console.width, wrapped=("setting",)))
        typer.echo("best: the mean of the best skills; spread: its standard deviation between runs")
    for line in () if sweep.comparison is None else facts.list_gain_lines(sweep.comparison):
        typer.echo(escape_line(line))


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
