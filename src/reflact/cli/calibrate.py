"""``reflact calibrate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from reflact.cli.calibrating import require_writable, write_calibration_page
from reflact.cli.pipes import unbroken, undisturbed
from reflact.cli.running import Config, Overrides
from reflact.cli.showing import Shown

if TYPE_CHECKING:
    from reflact.calibration.config import CalibrateConfig
    from reflact.calibration.cost_estimate import CostEstimate
    from reflact.calibration.events import CalibrationEvent, Tell
    from reflact.calibration.results import CalibrationReport
    from reflact.cli.interrupts import Interrupts
    from reflact.llm.rate_limit import LimitChange
    from reflact.memory import Promotion
    from reflact.results import Spend

GRACE_SECONDS = 10.0
"""What calls under way may take after the first signal."""


def calibrate(  # noqa: PLR0917 - one for each option of the command
    config: Config,
    overrides: Overrides = None,
    show: Annotated[
        Shown | None,
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
    """Make contrast pairs of traces, promote those that help the critic, and measure it before and after.

    Calls that were paid for are not asked again: stopped and started anew, it goes on where it was.
    """
    if dry_run:
        estimate_and_show(config, overrides, as_json=as_json)
    else:
        how = How(anyway=anyway, again=again)
        calibrate_and_show(config, overrides, show=show, as_json=as_json, html=html, how=how)


def configured(path: Path, overrides: Sequence[str] | None) -> CalibrateConfig:
    """Return the configuration of a file with overrides, checked as far as that goes without traces.

    Raises:
        ConfigError: The file, a key or a value is wrong.
    """
    from reflact.calibration.config import CalibrateConfig, anchored
    from reflact.cli.calibrating import ROLE
    from reflact.errors import ConfigError
    from reflact.llm.allowance import require_cap
    from reflact.loading import load_section

    settings = load_section(CalibrateConfig, path, overrides=overrides or ())
    settings = anchored(settings, path.resolve().parent)
    if not settings.models.critic.model:
        raise ConfigError("models.critic.model is required: name the model that scores")
    require_cap(settings.budget, settings.models.critic, role=ROLE)
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

    from reflact.cli.calibrated import print_estimate

    estimate, spent = anyio.run(_estimated, configured(path, overrides))
    if as_json:
        typer.echo(estimate.model_dump_json())
    else:
        print_estimate(Console(), estimate, spent)


async def _estimated(config: CalibrateConfig) -> tuple[CostEstimate, tuple[Spend, ...]]:
    from tempfile import TemporaryDirectory

    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.critic import Critic
    from reflact.cli.calibrating import given, pairs_of, spent_before
    from reflact.memory_store import MemoryStore
    from reflact.prompts import load_prompts

    prompts = load_prompts(config.prompts.versions, config.prompts.folder)
    llm, spent = await spent_before(config)
    with TemporaryDirectory() as empty:
        known = config.memory if config.memory.is_file() else Path(empty) / "memory.db"
        async with MemoryStore(known, read_only=known == config.memory) as memory:
            traces, heldout = await given(config, memory)
            critic = Critic(llm, memory=memory, settings=config.critic, prompts=prompts)
            calibrator = Calibrator(llm, memory, critic=critic, settings=config.calibrator, prompts=prompts)
            anchors = () if config.anchors is None else pairs_of(config.anchors)
            reasks = config.models.critic.reasks
            estimate = await calibrator.estimate_cost(traces, heldout=heldout, anchors=anchors, reasks=reasks)
    return estimate, spent


# ------------------------------------------------------------------------------------- during and after


class How(NamedTuple):
    """How a calibration is started; see ``Calibrator.calibrate``."""

    anyway: bool = False
    again: bool = False


PLAIN = How()


class _Ended(NamedTuple):
    """What came of a start: its report, None where it was stopped, and the books before and after it."""

    report: CalibrationReport | None
    before: tuple[Spend, ...]
    after: tuple[Spend, ...]


def calibrate_and_show(
    path: Path,
    overrides: Sequence[str] | None,
    *,
    show: Shown | None = None,
    as_json: bool = False,
    html: Path | None = None,
    how: How = PLAIN,
) -> None:
    """Calibrate as a file describes it, tell what happens meanwhile, and print what it did.

    Raises:
        UsageError: The configuration, a trace or an anchor is wrong.
        ModelError: The endpoint refused, failed or could not be reached; the cassette lacks an answer.
        StoreError: The memory cannot be read or written.
        typer.Exit: It was stopped; the code is 128 and the signal's number.
    """
    from reflact.cli.interrupts import Interrupts
    from reflact.cli.progress import choose_event_printer, choose_pause_printer
    from reflact.errors import BudgetSpent, ModelError, RunFailed

    settings = configured(path, overrides)
    if html is not None:
        require_writable(html)
    tell = choose_event_printer((Shown.quiet if as_json else Shown.lines) if show is None else show)
    done = Done(None if tell is None else undisturbed(tell))
    told = choose_pause_printer(show, as_json=as_json, terminal=sys.stderr.isatty())
    with Interrupts(GRACE_SECONDS) as interrupts:
        try:
            ended = _run(settings, done, interrupts, how, None if told is None else undisturbed(told))
        except (BudgetSpent, ModelError, RunFailed):
            _tell_stopped(settings, done)
            raise
        if ended.report is None:
            _tell_stopped(settings, done)
            raise typer.Exit(interrupts.code or 1)
    if html is not None:
        write_calibration_page(html, ended.report)
    with unbroken():
        if not as_json and show is not Shown.json:
            _print(ended.report, ended, html)
        elif show is not Shown.json:
            typer.echo(ended.report.model_dump_json())


def _print(report: CalibrationReport, ended: _Ended, html: Path | None) -> None:
    from rich.console import Console

    from reflact.cli.calibrated import print_calibration, print_paid

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with code 1

    console = Pipe()
    print_calibration(console, report)
    print_paid(console, ended.before, ended.after)
    if html is not None:
        typer.echo(f"{html} shows this as a page.")


def _run(
    config: CalibrateConfig,
    tell: Callable[[CalibrationEvent], None],
    interrupts: Interrupts,
    how: How,
    told: Callable[[LimitChange], None] | None,
) -> _Ended:
    import anyio

    try:
        return anyio.run(_calibrated, config, tell, interrupts, how, told)
    except KeyboardInterrupt:
        raise typer.Exit(interrupts.code or 130) from None


async def _calibrated(
    config: CalibrateConfig,
    tell: Callable[[CalibrationEvent], None],
    interrupts: Interrupts,
    how: How,
    told: Callable[[LimitChange], None] | None,
) -> _Ended:
    import anyio

    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.critic import Critic
    from reflact.cli.calibrating import given, opened, pairs_of
    from reflact.halting import GracefulStop, StoppableLLM
    from reflact.memory_store import MemoryStore
    from reflact.prompts import load_prompts

    prompts, brake = load_prompts(config.prompts.versions, config.prompts.folder), GracefulStop(GRACE_SECONDS)
    async with MemoryStore(config.memory) as memory, opened(config, told) as model:
        traces, heldout = await given(config, memory)
        if config.anchors is not None:
            await memory.keep_anchors(pairs_of(config.anchors))
        before, report = await model.spend(), None
        llm = StoppableLLM(model.llm, brake)
        critic = Critic(llm, memory=memory, settings=config.critic, prompts=prompts)
        calibrator = Calibrator(
            llm, memory, critic=critic, settings=config.calibrator, prompts=prompts, tell=tell
        )
        with anyio.CancelScope() as scope:
            interrupts.bind(stop=brake.request, cancel=scope.cancel)
            with brake.cancel_scope():
                report = await calibrator.calibrate(
                    traces, heldout=heldout, anyway=how.anyway, again=how.again
                )
        return _Ended(report, before, await model.spend())


def _tell_stopped(config: CalibrateConfig, done: Done) -> None:
    """Say what was done, what is kept, and what the same command goes on with."""
    import anyio

    from reflact.cli.calibrating import spent_before
    from reflact.results import Usage

    _, spent = anyio.run(spent_before, config)
    paid = sum((one.usage for one in spent), Usage()).calls
    if not paid and not done.began:
        with unbroken():
            typer.echo(f"stopped {done.words}: no call was answered, so there is nothing to keep", err=True)
        return
    with unbroken():
        typer.echo(
            f"stopped {done.words}: all pairs that were made are in the memory, and the answers of the "
            f"{paid:,} calls that were paid for are in the store; the same command goes on {done.next_words} "
            "and pays for none of them again",
            err=True,
        )


class Done:
    """Counts what a calibration has done, for when it is stopped.

    Args:
        tell: Is told of each event after it was counted; None: nobody.
    """

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._round = 0
        self._traces = 0
        self._of = 0
        self._pairs = 0
        self._tests: list[Promotion] = []

    def __call__(self, event: CalibrationEvent) -> None:
        """Count what an event tells."""
        from reflact.calibration import events

        match event:
            case events.RoundBegan():
                self._round, self._traces, self._of = event.number, 0, event.traces
            case events.PairsMade():
                self._traces, self._pairs = self._traces + 1, self._pairs + event.kept
            case events.BatchTested():
                self._tests.append(event.evidence)
        if self._tell is not None:
            self._tell(event)

    @property
    def began(self) -> bool:
        """Whether a round had begun."""
        return self._round > 0

    @property
    def words(self) -> str:
        """Where it was, and what it has done until then."""
        if not self._round:
            return "before the first round"
        promoted = sum(len(test.pair_ids) for test in self._tests if test.promoted)
        found = f", of which {promoted:,} pairs are promoted and count from now on" if promoted else ""
        return (
            f"in round {self._round}, with {self._traces:,} of its {self._of:,} traces done, {self._pairs:,} "
            f"pairs made in all, and batches tested: {len(self._tests)}{found}"
        )

    @property
    def next_words(self) -> str:
        """From where the same command goes on."""
        if not self._round:
            return "with its first measurement"
        left = self._of - self._traces
        if left:
            return f"with the pairs of {left:,} more traces of round {self._round}"
        if len(self._tests) < self._round:
            return f"with the test of round {self._round}"
        return f"after the test of round {self._round}"
