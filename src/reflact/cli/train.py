"""The commands ``train``, ``eval``, ``record``, ``replay`` and ``demo``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reflact.cli.calibrate import calibrate_and_show
from reflact.cli.common import (
    ConfigArgument,
    JsonOption,
    OverrideOption,
    ShowMode,
    ShowOption,
    TimesOption,
    build_view,
    load_trainer_config,
    resolve_show_mode,
    train_and_show,
)

if TYPE_CHECKING:
    from rich.table import Table

    from reflact.config.training import TrainerConfig
    from reflact.events import Event
    from reflact.llm.pricing import CostEstimate, EstimateRange
    from reflact.protocols import Approver
    from reflact.records import CandidateReview, Spend


CassetteOption = Annotated[Path, typer.Option(metavar="FILE", help="The recording.", show_default=False)]


def evaluate(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    skill: Annotated[Path, typer.Option(metavar="FILE", help="The document to measure.", show_default=False)],
    split: Annotated[
        Literal["val", "test"], typer.Option(metavar="val|test", help="Where to measure it.")
    ] = "val",
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
) -> None:
    """Measure one skill document on a split.

    The command uses the run's folder: it does not repeat stored rollouts, and it counts each opening of the
    test split there. With --show json the last line is the score.
    """
    import anyio
    from rich.console import Console

    from reflact.reporting.summary import build_score_table
    from reflact.trainer import evaluate_skill
    from reflact.training.setup import load_skill
    from reflact.types import Split

    settings = load_trainer_config(config, overrides)
    document = load_skill(skill)
    console = Console()
    with build_view(show, console, name=settings.out_dir.name, times=times) as view:

        async def emit(event: Event) -> None:
            view.show_event(event)

        scored = anyio.run(partial(evaluate_skill, settings, document, Split(split), on_event=emit))
    if show is ShowMode.json:
        typer.echo(scored.model_dump_json(ensure_ascii=True))
    else:
        console.print(build_score_table([scored]))


def create_approver() -> Approver:
    """Return an approver that shows a candidate's evidence and diff on standard error and asks there.

    An empty answer or ``y`` approves; ``n`` vetoes; any other text is a veto with that reason.

    Raises:
        UsageError: Standard input is no terminal.
    """
    from reflact.errors import UsageError
    from reflact.reporting.lines import escape_controls

    if not sys.stdin.isatty():
        raise UsageError("--review asks at a terminal, and standard input is none; leave it out")

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


def print_cost_estimate(config: TrainerConfig) -> None:
    """Print the estimated cost of the rest of a run; call nothing and write nothing.

    Raises:
        UsageError: The configuration, the data, a prompt or the initial skill is wrong.
    """
    import anyio
    from rich.console import Console

    from reflact.training.gating import estimate_gate_power
    from reflact.training.setup import Overrides, prepare_run

    plan = prepare_run(config, Overrides())
    path = config.store or config.out_dir / "run.db"
    done, text, spent = anyio.run(_read_progress, path, plan.run_id) if path.is_file() else (0, None, ())
    estimate = plan.estimate_cost(done=done, skill=text, spent=spent)
    console = Console()
    console.print(f"run {plan.run_id}: {estimate.steps} steps to take, {done} taken", highlight=False)
    data = plan.data
    sizes = f"{len(data.train)} train, {len(data.val)} validation, {len(data.test)} test"
    console.print(f"items: {sizes}", highlight=False)
    console.print(build_estimate_table(estimate))
    for line in estimate.assumptions:
        typer.echo(line)
    typer.echo(estimate_gate_power(plan).description)


async def _read_progress(path: Path, run_id: str) -> tuple[int, str | None, tuple[Spend, ...]]:
    from reflact.store.runs import open_store

    async with open_store(path) as store:
        records = await store.records(run_id)
        text = (await store.skill(records[-1].current.skill_hash)).text if records else None
        return len(records), text, await store.spend(run_id)


def build_estimate_table(estimate: CostEstimate) -> Table:
    """Return a table of the least, expected and most calls, with tokens and, if priced, US dollars."""
    from rich import box
    from rich.table import Table

    from reflact.reporting.lines import format_count

    priced = any(row.usd is not None for row in estimate.rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("role", no_wrap=True)
    table.add_column("calls for", no_wrap=True)
    for heading in ("least", "calls", "most", "tokens", "most", *(("$", "most") if priced else ())):
        table.add_column(heading, justify="right", no_wrap=True)

    def format_usd(usd: float) -> str:
        return f"{usd:.3f}" if usd < 99.9995 else format_count(round(usd))

    def add_row(
        role: str, purpose: str, calls: EstimateRange, tokens: EstimateRange, usd: EstimateRange | None
    ) -> None:
        counts = (calls.low, calls.expected, calls.high, tokens.expected, tokens.high)
        prices = ("-", "-") if usd is None else (format_usd(usd.expected), format_usd(usd.high))
        table.add_row(role, purpose, *(format_count(round(n)) for n in counts), *(prices if priced else ()))

    for row in estimate.rows:
        add_row(row.role, row.purpose, row.calls, row.input_tokens + row.output_tokens, row.usd)
    table.add_section()
    add_row("all", "", estimate.calls, estimate.tokens(), estimate.usd)
    return table


def train(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    as_json: JsonOption = False,
    times: TimesOption = False,
    review: Annotated[
        bool, typer.Option("--review", help="Show each candidate that the gate would accept, and ask.")
    ] = False,
    fork: Annotated[
        bool,
        typer.Option("--fork", help="Start a changed run in the same out_dir and reuse matching results."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its estimated cost; call nothing.")
    ] = False,
) -> None:
    """Train a skill, or resume a stopped run.

    A resumed run does not repeat calls that it has paid for.
    """
    settings = load_trainer_config(config, [*(overrides or ()), *(["fork=true"] if fork else [])])
    if dry_run:
        print_cost_estimate(settings)
        return
    mode = resolve_show_mode(show, as_json=as_json)
    train_and_show(settings, show=mode, times=times, approve=create_approver() if review else None)


def record(
    config: ConfigArgument,
    cassette: CassetteOption,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
) -> None:
    """Train and record each response in a cassette."""
    settings = _load_with_cassette(config, overrides, cassette, "record")
    train_and_show(settings, show=show, times=times)


def replay(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    cassette: CassetteOption,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    as_json: JsonOption = False,
    times: TimesOption = False,
) -> None:
    """Train from a cassette, without network.

    If the cassette lacks a request, the run ends and reflact prints the difference.
    """
    settings = _load_with_cassette(config, overrides, cassette, "replay")
    train_and_show(settings, show=resolve_show_mode(show, as_json=as_json), times=times)


def _load_with_cassette(
    config: Path, overrides: Sequence[str] | None, cassette: Path, mode: str
) -> TrainerConfig:
    """Return a configuration that uses a cassette; a relative path counts from the current folder."""
    path = json.dumps(str(cassette.expanduser().absolute()))
    return load_trainer_config(config, [*(overrides or ()), f"replay.cassette={path}", f"replay.mode={mode}"])


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the run.")] = Path("demo-run"),
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Replay a recorded round of calibration instead.")
    ] = False,
) -> None:
    """Replay a recorded training run and show its best skill.

    The demo needs no key and no network.
    """
    from reflact.errors import ConfigError
    from reflact.prompts import find_data_folder
    from reflact.reporting.lines import escape_controls

    if calibrate:
        memory = out / "memory.db"
        if memory.exists():
            raise ConfigError(
                f"{memory} exists, but the recording starts with an empty memory; choose another --out"
            )
        calibrate_and_show(
            find_data_folder("calibration") / "calibrate.yaml",
            [f"memory={json.dumps(str(memory))}"],
            show=ShowMode.quiet if show is ShowMode.live else show,
            html=out / "calibration.html",
        )
        return
    folder = find_data_folder("demo")
    place = [f"out_dir={json.dumps(str(out))}"]
    settings = _load_with_cassette(folder / "demo.yaml", place, folder / "cassette.jsonl", "replay")
    train_and_show(settings, show=show, times=times)
    if show is not ShowMode.json:
        best = out / "best_skill.md"
        typer.echo(f"\n{best}:\n\n{escape_controls(best.read_text(encoding='utf-8').strip())}")
