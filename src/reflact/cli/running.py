"""What the commands that start runs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reflact.cli.showing import ShowMode

if TYPE_CHECKING:
    from reflact.cli.interrupts import InterruptHandler
    from reflact.config import TrainerConfig
    from reflact.events import Event
    from reflact.ports import Approver
    from reflact.reporting.live import RunView
    from reflact.results import RunSummary
    from reflact.trainer import Trainer

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A .yaml or .toml file.", show_default=False)]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, such as budget.max_calls=500. Repeatable."
    ),
]
CassetteOption = Annotated[Path, typer.Option(metavar="FILE", help="The recording.", show_default=False)]


def load_trainer_config(path: Path, overrides: Sequence[str] | None) -> TrainerConfig:
    """Return the configuration of a file with overrides.

    Raises:
        ConfigError: The file, a key or a value is wrong.
    """
    from reflact.loading import load_config

    return load_config(path, overrides=overrides or ())


def add_cassette_overrides(overrides: Sequence[str] | None, cassette: Path, mode: str) -> list[str]:
    """Return overrides that make a run use a cassette; a relative path counts from the current folder."""
    path = json.dumps(str(cassette.expanduser().absolute()))
    return [*(overrides or ()), f"replay.cassette={path}", f"replay.mode={mode}"]


def train_and_show(
    config: TrainerConfig,
    *,
    show: ShowMode = ShowMode.live,
    times: bool = False,
    approve: Approver | None = None,
) -> None:
    """Run a training to its end and show it; where a person is asked, in lines at most.

    Raises:
        typer.Exit: The run did not complete. The code is 1, or 2 where not one call was answered, which
            a wrong key, model or port looks like; 128 and a signal's number where that stopped it.
    """
    from rich.console import Console

    from reflact.cli.interrupts import InterruptHandler
    from reflact.cli.showing import build_view, show_interrupt
    from reflact.reporting.summary import print_summary
    from reflact.trainer import Trainer

    trainer = Trainer(config, approve=approve)
    console = Console()
    if approve is not None and show is ShowMode.live:
        show = ShowMode.lines
    view = build_view(show, console, name=config.out_dir.name, epochs=config.train.num_epochs, times=times)
    grace, tell = config.train.grace_seconds, partial(show_interrupt, view)
    with InterruptHandler(grace, on_signal=tell, build_cleanup=view.build_cleanup) as interrupts:
        with view:
            summary = _run_training(_RunFollower(trainer, config, view), interrupts)
        if show is not ShowMode.json:
            print_summary(console, summary, config.out_dir)
        if summary.status == "cancelled" and interrupts.exit_code is not None:
            raise typer.Exit(interrupts.exit_code)
    if summary.status != "completed":
        _print_error(f"the run ended as {summary.status}: {summary.reason}")
        raise typer.Exit(1 if any(entry.usage.calls for entry in summary.spend) else 2)


def _run_training(follower: _RunFollower, interrupts: InterruptHandler) -> RunSummary:
    import anyio

    from reflact.errors import RunFailed, StoreError

    try:
        anyio.run(follower.follow, interrupts)
    except StoreError as error:
        if not follower.has_begun:
            raise
        raise RunFailed(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupts.exit_code or 130) from None
    if follower.summary is not None:
        return follower.summary
    if interrupts.exit_code is not None:
        raise typer.Exit(interrupts.exit_code)
    raise RunFailed(f"run {follower.run_id} stopped without a summary; start it again to go on")


class _RunFollower:
    """Shows what happens in a run, and keeps its summary."""

    def __init__(self, trainer: Trainer, config: TrainerConfig, view: RunView) -> None:
        self.has_begun = False
        self.summary: RunSummary | None = None
        self.run_id = trainer.run_id
        self._trainer = trainer
        self._store = config.out_dir / "run.db"
        self._view = view

    async def follow(self, interrupts: InterruptHandler) -> None:
        """Run the training and show each event."""
        import anyio

        from reflact.events import RunFinished, RunStarted
        from reflact.reporting.live import LineView

        with anyio.CancelScope() as scope:
            interrupts.bind(stop=self._trainer.stop, cancel=scope.cancel)
            async with self._trainer.stream() as happenings:
                async for event in happenings:
                    if isinstance(self._view, LineView) and not (self.has_begun or isinstance(event, RunStarted)):
                        self._view.restore(await self._read_earlier_events())
                    self.has_begun = True
                    self._view.show_event(event)
                    if isinstance(event, RunFinished):
                        self.summary = event.summary

    async def _read_earlier_events(self) -> tuple[Event, ...]:
        """Return the durable events of earlier starts; nothing if the store cannot be read."""
        from reflact.errors import StoreError
        from reflact.store.runs import open_store

        try:
            async with open_store(self._store) as store:
                return await store.events(self.run_id)
        except StoreError:
            return ()


def _print_error(text: str) -> None:
    from reflact.reporting.lines import escape_controls

    typer.echo(f"error: {escape_controls(text)}", err=True)
