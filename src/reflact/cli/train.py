"""The commands that train and measure: ``train``, ``eval`` and ``demo``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

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
    train_and_show,
)
from reflact.errors import (
    ConfigError,
    UsageError,
)
from reflact.text import (
    escape_controls,
    escape_line,
    shorten,
    suggest_path,
)

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.protocols import Approver
    from reflact.records import CandidateReview

# The most characters of a document's name in a table.
MAX_NAME_CHARS = 40


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
