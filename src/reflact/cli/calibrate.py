"""``reflact calibrate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from reflact.cli.common import ConfigArgument, OverrideOption, ShowMode, guard_callback, ignore_broken_pipe

if TYPE_CHECKING:
    from reflact.calibration.config import CalibrateConfig
    from reflact.calibration.cost_estimate import CalibrationCostEstimate
    from reflact.calibration.events import CalibrationEvent, CalibrationEventCallback
    from reflact.calibration.report import CalibrationReport
    from reflact.calibration.setup import ModelConnection
    from reflact.calibration.trace import Trace
    from reflact.cli.common import InterruptHandler
    from reflact.llm.rate_limit import LimitChange
    from reflact.memory.models import ContrastPair, PromotionEvidence
    from reflact.memory.store import MemoryStore
    from reflact.messages import CallId, RenderedPrompt, Reply
    from reflact.protocols import R
    from reflact.records import Spend


CRITIC_ROLE = "critic"


class UncalledLLM:
    """A model that nobody asks: what is foreseen is foreseen without it.

    Args:
        identity: That of the model which is meant, by which a calibration that was stopped is known.
    """

    def __init__(self, identity: str = "unasked") -> None:
        self._identity = identity

    @property
    def identity(self) -> str:
        """That of the model."""
        return self._identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Refuse."""
        raise AssertionError(f"a forecast asked a model: {call_id.label}")


def calibration_run_id(config: CalibrateConfig) -> str:
    """Return under which name the calls are counted: one for each memory."""
    from reflact.calibration.setup import account_name

    return account_name(config.memory)


def open_model(
    config: CalibrateConfig, on_limit: Callable[[LimitChange], None] | None = None
) -> AbstractAsyncContextManager[ModelConnection]:
    """Return what opens the store of model calls and connects the model, see ``connection.connected``."""
    from reflact.calibration.setup import open_connection

    return open_connection(
        config.models.critic,
        store=config.store or config.memory,
        role=CRITIC_ROLE,
        run_id=calibration_run_id(config),
        budget=config.budget,
        replay=config.replay,
        on_limit=on_limit,
    )


async def read_earlier_spend(config: CalibrateConfig) -> tuple[UncalledLLM, tuple[Spend, ...]]:
    """Return the model without asking it, and what earlier starts have paid for."""
    from reflact.llm.client import identify_model
    from reflact.store.runs import open_store

    path, run_id = config.store or config.memory, calibration_run_id(config)
    if not path.is_file():
        return UncalledLLM(), ()
    async with open_store(path, read_only=True) as store:
        return UncalledLLM(identify_model(config.models.critic)), await store.spend(run_id)


async def load_traces(
    config: CalibrateConfig, memory: MemoryStore
) -> tuple[tuple[Trace, ...], tuple[Trace, ...] | None]:
    """Return the traces to learn from, and those that are held out, None if the rule chooses them.

    Files that are not whole are told on standard error, and files of which the memory has more labels.

    Raises:
        DataError: A folder of traces is wrong, or the memory holds none.
    """
    from reflact.calibration.trace import Trace
    from reflact.cli.memory_output import print_incomplete_files

    heldout = None if config.heldout is None else Trace.load_all(config.heldout)
    traces = await load_stored_traces(memory) if config.traces is None else Trace.load_all(config.traces)
    print_incomplete_files((*traces, *(heldout or ())), err=True)
    if config.traces is not None:
        await _print_ignored_labels(traces, memory)
    return traces, heldout


async def _print_ignored_labels(traces: Sequence[Trace], memory: MemoryStore) -> None:
    """Say on standard error where labels in the memory do not count, since the traces come from files."""
    known = {one.id: one.n_labelled for one in await memory.summaries()}
    richer = sum(
        known.get(trace.id, 0)
        > sum(event.label is not None and event.label.source != "agreement" for event in trace.events)
        for trace in traces
    )
    if richer:
        typer.echo(
            f"{richer} of these traces have labels in the memory that their files lack, and files count where "
            "`traces` names them; leave `traces` out to take all traces from the memory",
            err=True,
        )


def read_pairs(path: Path) -> list[ContrastPair]:
    """Return the pairs of a file.

    Raises:
        DataError: It cannot be read, or a line is no pair.
    """
    from pydantic import ValidationError

    from reflact.calibration.arguments import describe_first_error
    from reflact.errors import DataError
    from reflact.memory.models import ContrastPair

    pairs = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"cannot read the anchors {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"the anchors {path} are not UTF-8 text: {error.reason}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            pairs.append(ContrastPair.model_validate_json(line))
        except ValidationError as error:
            raise DataError(
                f"{path}, line {number}, is no contrast pair: {describe_first_error(error)}; a line is what "
                "ContrastPair.model_dump_json gives"
            ) from None
    return pairs


async def load_stored_traces(memory: MemoryStore) -> tuple[Trace, ...]:
    """Return the traces of the memory, in the order of their names."""
    from reflact.calibration.trace import Trace
    from reflact.errors import DataError

    found = [await memory.trace(name) for name in await memory.trace_ids()]
    if not found:
        raise DataError("the memory holds no trace: name a folder as `traces`, or keep traces in the memory")
    return tuple(Trace.from_stored(one) for one in found if one is not None)


def require_writable(path: Path) -> None:
    """Make sure that a page can be written, before what it is to show is paid for.

    Raises:
        ConfigError: It cannot be; says why.
    """
    from reflact.errors import ConfigError

    trial = path.with_name(f".{path.name}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"--html {path} cannot be written: {error.strerror or error}; name another file, nothing "
            "was asked yet"
        ) from None


def write_calibration_page(path: Path, report: CalibrationReport) -> None:
    """Write a calibration's page in one step, so that nobody reads a part of it.

    Raises:
        StoreError: The file cannot be written.
    """
    from reflact.reporting.html.calibration import render_calibration_page
    from reflact.store.artifacts import write_atomically

    write_atomically(path, render_calibration_page(report))


STOP_SECONDS = 10.0
"""What calls under way may take after the first signal."""


def calibrate(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    overrides: OverrideOption = None,
    show: Annotated[
        ShowMode | None,
        typer.Option(
            metavar="live|lines|quiet|json",
            help="lines: one for each thing that matters, on standard error (live is the same here); quiet: "
            "only the report; json: events, one a line, the report in the last, and nothing else. Without "
            "it: lines, or quiet with --json.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the report as a page as well.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how many calls it takes; call nothing and write nothing.")
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Make pairs also where nothing can be tested yet.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Make and test further pairs of the same traces, though nothing has changed.",
        ),
    ] = False,
) -> None:
    """Calibrate a critic from recorded traces.

    Makes contrast pairs of the traces, promotes those that help the critic, and measures it before and after.

    Calls that were paid for are not asked again: a stopped calibration resumes.
    """
    if dry_run:
        estimate_and_show(config, overrides, as_json=as_json)
    else:
        how = CalibrateOptions(anyway=anyway, again=again)
        calibrate_and_show(config, overrides, show=show, as_json=as_json, html=html, options=how)


def load_calibrate_config(path: Path, overrides: Sequence[str] | None) -> CalibrateConfig:
    """Return the configuration of a file with overrides, checked as far as that goes without traces.

    Raises:
        ConfigError: The file, a key or a value is wrong.
    """
    from reflact.calibration.config import CalibrateConfig, resolve_paths
    from reflact.config.loading import load_section
    from reflact.errors import ConfigError
    from reflact.llm.budget import require_cap

    settings = load_section(CalibrateConfig, path, overrides=overrides or ())
    settings = resolve_paths(settings, path.resolve().parent)
    if not settings.models.critic.model:
        raise ConfigError("models.critic.model is required: name the model that scores")
    require_cap(settings.budget, settings.models.critic, role=CRITIC_ROLE)
    return settings


# ------------------------------------------------------------------------------------------------ before


def estimate_and_show(path: Path, overrides: Sequence[str] | None, *, as_json: bool = False) -> None:
    """Print how many calls a calibration takes; nothing is called and nothing is written.

    Raises:
        UsageError: The configuration, a trace or an anchor is wrong.
        StoreError: The memory cannot be read.
    """
    import anyio
    from rich.console import Console

    from reflact.cli.calibrate_output import print_estimate

    estimate, spent = anyio.run(_estimate, load_calibrate_config(path, overrides))
    if as_json:
        typer.echo(estimate.model_dump_json())
    else:
        print_estimate(Console(), estimate, spent)


async def _estimate(config: CalibrateConfig) -> tuple[CalibrationCostEstimate, tuple[Spend, ...]]:
    from tempfile import TemporaryDirectory

    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.critic import Critic
    from reflact.memory.store import MemoryStore
    from reflact.prompts import load_prompts

    prompts = load_prompts(config.prompts.versions, config.prompts.folder)
    llm, spent = await read_earlier_spend(config)
    with TemporaryDirectory() as empty:
        known = config.memory if config.memory.is_file() else Path(empty) / "memory.db"
        async with MemoryStore(known, read_only=known == config.memory) as memory:
            traces, heldout = await load_traces(config, memory)
            critic = Critic(llm, memory=memory, settings=config.critic, prompts=prompts)
            calibrator = Calibrator(llm, memory, critic=critic, settings=config.calibrator, prompts=prompts)
            anchors = () if config.anchors is None else read_pairs(config.anchors)
            reasks = config.models.critic.reasks
            estimate = await calibrator.estimate_cost(traces, heldout=heldout, anchors=anchors, reasks=reasks)
    return estimate, spent


# ------------------------------------------------------------------------------------- during and after


class CalibrateOptions(NamedTuple):
    """How a calibration is started; see ``Calibrator.calibrate``."""

    anyway: bool = False
    again: bool = False


DEFAULT_OPTIONS = CalibrateOptions()


class _CalibrationOutcome(NamedTuple):
    """What came of a start: its report (None if it was stopped), and the spend before and after it."""

    report: CalibrationReport | None
    before: tuple[Spend, ...]
    after: tuple[Spend, ...]


def calibrate_and_show(
    path: Path,
    overrides: Sequence[str] | None,
    *,
    show: ShowMode | None = None,
    as_json: bool = False,
    html: Path | None = None,
    options: CalibrateOptions = DEFAULT_OPTIONS,
) -> None:
    """Calibrate as a file describes it, tell what happens meanwhile, and print what it did.

    Raises:
        UsageError: The configuration, a trace or an anchor is wrong.
        ModelError: The endpoint refused, failed or could not be reached; the cassette lacks an answer.
        StoreError: The memory cannot be read or written.
        typer.Exit: It was stopped; the code is 128 and the signal's number.
    """
    from reflact.cli.calibrate_output import choose_event_printer, choose_pause_printer
    from reflact.cli.common import InterruptHandler
    from reflact.errors import BudgetSpent, ModelError, RunFailed

    settings = load_calibrate_config(path, overrides)
    if html is not None:
        require_writable(html)
    tell = choose_event_printer((ShowMode.quiet if as_json else ShowMode.lines) if show is None else show)
    done = CalibrationProgress(None if tell is None else guard_callback(tell))
    told = choose_pause_printer(show, as_json=as_json, terminal=sys.stderr.isatty())
    with InterruptHandler(STOP_SECONDS) as interrupts:
        try:
            ended = _run_calibration(
                settings, done, interrupts, options, None if told is None else guard_callback(told)
            )
        except (BudgetSpent, ModelError, RunFailed):
            _print_stopped(settings, done)
            raise
        if ended.report is None:
            _print_stopped(settings, done)
            raise typer.Exit(interrupts.exit_code or 1)
    if html is not None:
        write_calibration_page(html, ended.report)
    with ignore_broken_pipe():
        if not as_json and show is not ShowMode.json:
            _print_outcome(ended.report, ended, html)
        elif show is not ShowMode.json:
            typer.echo(ended.report.model_dump_json())


def _print_outcome(report: CalibrationReport, ended: _CalibrationOutcome, html: Path | None) -> None:
    from rich.console import Console

    from reflact.cli.calibrate_output import print_calibration, print_calibration_spend

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with code 1

    console = Pipe()
    print_calibration(console, report)
    print_calibration_spend(console, ended.before, ended.after)
    if html is not None:
        typer.echo(f"{html} shows this as a page.")


def _run_calibration(
    config: CalibrateConfig,
    on_event: Callable[[CalibrationEvent], None],
    interrupts: InterruptHandler,
    options: CalibrateOptions,
    on_limit: Callable[[LimitChange], None] | None,
) -> _CalibrationOutcome:
    import anyio

    try:
        return anyio.run(_calibrate, config, on_event, interrupts, options, on_limit)
    except KeyboardInterrupt:
        raise typer.Exit(interrupts.exit_code or 130) from None


async def _calibrate(
    config: CalibrateConfig,
    on_event: Callable[[CalibrationEvent], None],
    interrupts: InterruptHandler,
    options: CalibrateOptions,
    on_limit: Callable[[LimitChange], None] | None,
) -> _CalibrationOutcome:
    import anyio

    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.critic import Critic
    from reflact.memory.store import MemoryStore
    from reflact.prompts import load_prompts
    from reflact.training.shutdown import GracefulStop, StoppableLLM

    prompts, graceful_stop = (
        load_prompts(config.prompts.versions, config.prompts.folder),
        GracefulStop(STOP_SECONDS),
    )
    async with MemoryStore(config.memory) as memory, open_model(config, on_limit) as model:
        traces, heldout = await load_traces(config, memory)
        if config.anchors is not None:
            await memory.add_anchors(read_pairs(config.anchors))
        before, report = await model.spend(), None
        llm = StoppableLLM(model.llm, graceful_stop)
        critic = Critic(llm, memory=memory, settings=config.critic, prompts=prompts)
        calibrator = Calibrator(
            llm, memory, critic=critic, settings=config.calibrator, prompts=prompts, on_event=on_event
        )
        with anyio.CancelScope() as scope:
            interrupts.bind(stop=graceful_stop.request, cancel=scope.cancel)
            with graceful_stop.cancel_scope():
                report = await calibrator.calibrate(
                    traces, heldout=heldout, allow_untested=options.anyway, ignore_finished=options.again
                )
        return _CalibrationOutcome(report, before, await model.spend())


def _print_stopped(config: CalibrateConfig, progress: CalibrationProgress) -> None:
    """Say what was done, what is kept, and what the same command goes on with."""
    import anyio

    from reflact.records import Usage

    _, spent = anyio.run(read_earlier_spend, config)
    paid = sum((one.usage for one in spent), Usage()).calls
    if not paid and not progress.has_begun:
        with ignore_broken_pipe():
            typer.echo(
                f"stopped {progress.description}: no call was answered, so there is nothing to keep", err=True
            )
        return
    with ignore_broken_pipe():
        typer.echo(
            f"stopped {progress.description}: all pairs that were made are in the memory, and the answers of the "
            f"{paid:,} calls that were paid for are in the store; the same command goes on {progress.resume_point} "
            "and pays for none of them again",
            err=True,
        )


class CalibrationProgress:
    """Counts what a calibration has done, for when it is stopped.

    Args:
        on_event: Gets each event after it was counted; None: nobody.
    """

    def __init__(self, on_event: CalibrationEventCallback | None) -> None:
        self._on_event = on_event
        self._round = 0
        self._n_done = 0
        self._n_traces = 0
        self._pairs = 0
        self._tests: list[PromotionEvidence] = []

    def __call__(self, event: CalibrationEvent) -> None:
        """Count what an event tells."""
        from reflact.calibration import events

        match event:
            case events.RoundStarted():
                self._round, self._n_done, self._n_traces = event.number, 0, event.n_traces
            case events.PairsGenerated():
                self._n_done, self._pairs = self._n_done + 1, self._pairs + event.n_pairs
            case events.PairBatchTested():
                self._tests.append(event.evidence)
        if self._on_event is not None:
            self._on_event(event)

    @property
    def has_begun(self) -> bool:
        """Whether a round had begun."""
        return self._round > 0

    @property
    def description(self) -> str:
        """If it was, and what it has done until then."""
        if not self._round:
            return "before the first round"
        promoted = sum(len(test.pair_ids) for test in self._tests if test.passed_test)
        found = f", of which {promoted:,} pairs are promoted and count from now on" if promoted else ""
        return (
            f"in round {self._round}, with {self._n_done:,} of its {self._n_traces:,} traces done, {self._pairs:,} "
            f"pairs made in all, and batches tested: {len(self._tests)}{found}"
        )

    @property
    def resume_point(self) -> str:
        """What the same command does next."""
        if not self._round:
            return "with its first measurement"
        left = self._n_traces - self._n_done
        if left:
            return f"with the pairs of {left:,} more traces of round {self._round}"
        if len(self._tests) < self._round:
            return f"with the test of round {self._round}"
        return f"after the test of round {self._round}"
