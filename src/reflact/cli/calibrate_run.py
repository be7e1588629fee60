"""What ``reflact calibrate`` does: it reads the inputs, calibrates, and prints the result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import typer
from pydantic import ValidationError
from rich.console import Console

from reflact.calibration.calibrator import Calibrator
from reflact.calibration.config import CalibrateConfig
from reflact.calibration.critic import Critic
from reflact.calibration.report import CalibrationCostEstimate, CalibrationReport
from reflact.calibration.setup import account_name, open_connection
from reflact.calibration.trace import Trace
from reflact.cli.calibrate_output import (
    CalibrationDisplay,
    print_calibration,
    print_calibration_spend,
    print_estimate,
)
from reflact.cli.common import (
    InterruptHandler,
    ShowMode,
    guard_callback,
    ignore_broken_pipe,
    open_console,
)
from reflact.cli.memory import print_incomplete_files
from reflact.config.loading import load_section
from reflact.errors import BudgetSpent, ConfigError, DataError, ModelError, RunFailed
from reflact.jsonutil import describe_problems
from reflact.llm.budget import Account, require_cap
from reflact.llm.client import Client
from reflact.memory.models import ContrastPair
from reflact.memory.store import MemoryStore
from reflact.prompts import load_prompts
from reflact.reporting.html.calibration import render_calibration_page
from reflact.store.artifacts import write_atomically
from reflact.store.runs import open_store
from reflact.text import suggest_path
from reflact.training.shutdown import GracefulStop, StoppableLLM

CRITIC_ROLE = "critic"

# What calls under way may take after the first signal.
STOP_SECONDS = 10.0


def load_calibrate_config(path: Path, overrides: Sequence[str] | None) -> CalibrateConfig:
    """Return the configuration of a file with overrides."""
    settings = load_section(CalibrateConfig, path, overrides=overrides or ())
    if not settings.models.critic.model:
        raise ConfigError("models.critic.model is required: name the model that scores")
    require_cap(settings.budget, settings.models.critic, role=CRITIC_ROLE)
    return settings


async def load_traces(
    config: CalibrateConfig, memory: MemoryStore
) -> tuple[tuple[Trace, ...], tuple[Trace, ...] | None]:
    """Return the traces to learn from, and those that are held out (None: the rule chooses)."""
    heldout = None if config.heldout is None else Trace.load_all(config.heldout)
    traces = (
        await load_stored_traces(memory) if config.traces is None else Trace.load_all(config.traces)
    )
    print_incomplete_files(
        (*traces, *(heldout or ())), folders=[config.traces, config.heldout], err=True
    )
    return traces, heldout


def read_pairs(path: Path) -> list[ContrastPair]:
    """Return the pairs of a file."""
    pairs = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the anchors {path}: {getattr(error, 'strerror', error)}"
            f"{suggest_path(path)}"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            pairs.append(ContrastPair.model_validate_json(line))
        except ValidationError as error:
            raise DataError(
                f"{path}, line {number}, is no contrast pair: {describe_problems(error)}; "
                "correct the line, which must be the output of ContrastPair.model_dump_json"
            ) from None
    return pairs


async def load_stored_traces(memory: MemoryStore) -> tuple[Trace, ...]:
    """Return the traces of the memory, in the order of their names."""
    found = [await memory.trace(name) for name in await memory.trace_ids()]
    if not found:
        raise DataError(
            "the memory has no traces: set `traces` to a folder, or import traces into the memory"
        )
    return tuple(Trace.from_stored(one) for one in found if one is not None)


def require_writable(path: Path) -> None:
    """Make sure that a page can be written, before what it is to show is paid for."""
    trial = path.with_name(f".{path.name}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write --html {path}: {error.strerror or error}; name another file. No call "
            "was made"
        ) from None


def estimate_and_show(config: CalibrateConfig, *, as_json: bool) -> None:
    """Print how many calls a calibration takes; nothing is called and nothing is written."""
    estimate, paid = anyio.run(_estimate, config)
    if as_json:
        typer.echo(estimate.model_dump_json())
    else:
        print_estimate(Console(), estimate, paid=paid)


async def _estimate(config: CalibrateConfig) -> tuple[CalibrationCostEstimate, int]:
    """Return what a calibration takes, and how many calls earlier starts have paid for."""
    prompts = load_prompts(config.prompts)
    run_id = account_name(config.memory)
    path = config.store or config.memory
    async with AsyncExitStack() as stack:
        empty = Path(stack.enter_context(TemporaryDirectory()))
        known = config.memory if config.memory.is_file() else empty / "memory.db"
        memory = await stack.enter_async_context(
            MemoryStore(known, read_only=known == config.memory)
        )
        traces, heldout = await load_traces(config, memory)
        stored = path.is_file()
        calls = await stack.enter_async_context(
            open_store(path if stored else empty / "calls.db", read_only=stored)
        )
        account = Account(run_id, calls, calls.decision_log(run_id))
        llm = Client(
            config.models.critic, CRITIC_ROLE, account
        )  # never entered: it only gives its identity
        critic = Critic(llm, memory=memory, settings=config.critic, prompts=prompts)
        calibrator = Calibrator(
            llm, memory, critic=critic, settings=config.calibrator, prompts=prompts
        )
        anchors = () if config.anchors is None else read_pairs(config.anchors)
        reasks = config.models.critic.reasks
        estimate = await calibrator.estimate_cost(
            traces, heldout=heldout, anchors=anchors, reasks=reasks
        )
        return estimate, sum(one.usage.calls for one in await calls.spend(run_id))


def calibrate_and_show(
    config: CalibrateConfig,
    *,
    show: ShowMode | None = None,
    as_json: bool = False,
    html: Path | None = None,
    anyway: bool = False,
    again: bool = False,
) -> None:
    """Calibrate as a file describes it, show what happens meanwhile, and print what it did."""
    if html is not None:
        require_writable(html)
    show = show or (ShowMode.quiet if as_json else ShowMode.lines)
    display = CalibrationDisplay(show)
    with InterruptHandler(STOP_SECONDS) as interrupts:
        try:
            report = anyio.run(
                partial(_calibrate, config, display, interrupts, anyway=anyway, again=again)
            )
        except KeyboardInterrupt:
            raise typer.Exit(interrupts.exit_code or 130) from None
        except (BudgetSpent, ModelError, RunFailed):
            _print_stopped(display)
            raise
        if report is None:
            _print_stopped(display)
            raise typer.Exit(interrupts.exit_code or 1)
    if html is not None:
        write_atomically(html, render_calibration_page(report))
    with ignore_broken_pipe():
        if as_json and show is not ShowMode.json:
            typer.echo(report.model_dump_json())
        elif show is not ShowMode.json:
            _print_report(report, display, html)


def _print_report(
    report: CalibrationReport, display: CalibrationDisplay, html: Path | None
) -> None:
    console = open_console()
    print_calibration(console, report)
    print_calibration_spend(console, display.spend_before, display.spend_after)
    if html is not None:
        typer.echo(f"{html} shows this as a page.")


async def _calibrate(
    config: CalibrateConfig,
    display: CalibrationDisplay,
    interrupts: InterruptHandler,
    *,
    anyway: bool,
    again: bool,
) -> CalibrationReport | None:
    """Return the report; None if the calibration was stopped."""
    prompts = load_prompts(config.prompts)
    graceful_stop = GracefulStop(STOP_SECONDS)
    connection = open_connection(
        config.models.critic,
        store=config.store or config.memory,
        role=CRITIC_ROLE,
        run_id=account_name(config.memory),
        budget=config.budget,
        replay=config.replay,
        on_limit=guard_callback(display.show_pause),
    )
    async with MemoryStore(config.memory) as memory, connection as (model, read_spend):
        traces, heldout = await load_traces(config, memory)
        if config.anchors is not None:
            await memory.add_anchors(read_pairs(config.anchors))
        display.spend_before = await read_spend()
        report = None
        llm = StoppableLLM(model, graceful_stop)
        critic = Critic(llm, memory=memory, settings=config.critic, prompts=prompts)
        calibrator = Calibrator(
            llm,
            memory,
            critic=critic,
            settings=config.calibrator,
            prompts=prompts,
            on_event=guard_callback(display.show_event),
        )
        try:
            with anyio.CancelScope() as scope:
                interrupts.bind(stop=graceful_stop.request, cancel=scope.cancel)
                with graceful_stop.cancel_scope():
                    report = await calibrator.calibrate(
                        traces, heldout=heldout, allow_untested=anyway, ignore_finished=again
                    )
        finally:
            with anyio.CancelScope(shield=True):
                display.spend_after = await read_spend()
        return report


def _print_stopped(display: CalibrationDisplay) -> None:
    """Say what was done, what is kept, and that the same command resumes."""
    paid = sum(one.usage.calls for one in display.spend_after)
    when = f"in round {display.round}" if display.round else "before the first round"
    line = f"stopped {when}: no call was answered, so nothing was stored"
    if paid or display.round:
        line = (
            f"stopped {when}: all pairs are in the memory, and the replies of {paid:,} paid calls "
            "are in the store; run the same command again to resume"
        )
    with ignore_broken_pipe():
        typer.echo(line, err=True)
