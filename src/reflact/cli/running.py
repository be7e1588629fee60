"""What the commands that start runs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reflact.cli.interrupts import Interrupts
    from reflact.config import TrainerConfig
    from reflact.ports import Approve
    from reflact.report.live import Show
    from reflact.results import RunSummary
    from reflact.trainer import Trainer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A .yaml or .toml file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, such as train.num_epochs=2. Repeatable."
    ),
]
Cassette = Annotated[Path, typer.Option(metavar="FILE", help="The recording.", show_default=False)]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one event a line as JSON, and nothing else.")]


def configured(path: Path, overrides: Sequence[str] | None) -> TrainerConfig:
    """Return the configuration of a file with overrides.

    Raises:
        ConfigError: The file, a key or a value is wrong.
    """
    from reflact.loading import load

    return load(path, overrides=overrides or ())


def with_cassette(overrides: Sequence[str] | None, cassette: Path, mode: str) -> list[str]:
    """Return overrides that make a run use a cassette; a relative path counts from the current folder."""
    path = json.dumps(str(cassette.expanduser().absolute()))
    return [*(overrides or ()), f"replay.cassette={path}", f"replay.mode={mode}"]


def train_and_show(config: TrainerConfig, *, as_json: bool = False, approve: Approve | None = None) -> None:
    """Run a training to its end and show it.

    Raises:
        typer.Exit: The run did not complete. The code is 1, or 2 where not one call was answered, which
            a wrong key, model or port looks like; 128 and a signal's number where that stopped it.
    """
    from rich.console import Console

    from reflact.cli.interrupts import Interrupts
    from reflact.report.live import watching
    from reflact.report.terminal import print_summary
    from reflact.trainer import Trainer

    trainer = Trainer(config, approve=approve)
    console = Console()
    with Interrupts(config.train.grace_seconds) as interrupts:
        if as_json:
            summary = _run(trainer, _print_json, interrupts)
        else:
            with watching(console, bars=approve is None) as show:
                summary = _run(trainer, show, interrupts)
            print_summary(console, summary, config.out_dir)
        if summary.status == "cancelled" and interrupts.code is not None:
            raise typer.Exit(interrupts.code)
    if summary.status != "completed":
        _say_error(f"the run ended as {summary.status}: {summary.reason}")
        raise typer.Exit(1 if any(entry.usage.calls for entry in summary.spend) else 2)


def _run(trainer: Trainer, show: Show, interrupts: Interrupts) -> RunSummary:
    import anyio

    from reflact.errors import RunFailed, StoreError

    following = _Following(show)
    try:
        anyio.run(following.follow, trainer, interrupts)
    except StoreError as error:
        if not following.begun:
            raise
        _say_error(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupts.code or 130) from None
    if following.summary is not None:
        return following.summary
    if interrupts.code is not None:
        raise typer.Exit(interrupts.code)
    raise RunFailed(f"run {trainer.run_id} stopped without a summary; start it again to go on")


class _Following:
    """Shows what happens in a run, and keeps its summary."""

    def __init__(self, show: Show) -> None:
        self.begun = False
        self.summary: RunSummary | None = None
        self._show = show

    async def follow(self, trainer: Trainer, interrupts: Interrupts) -> None:
        import anyio

        from reflact.events import Finished

        with anyio.CancelScope() as scope:
            interrupts.bind(stop=trainer.stop, cancel=scope.cancel)
            async with trainer.stream() as happenings:
                async for event in happenings:
                    self.begun = True
                    self._show(event)
                    if isinstance(event, Finished):
                        self.summary = event.summary


def _say_error(text: str) -> None:
    from reflact.report.visible import visible

    typer.echo(f"error: {visible(text)}", err=True)


def _print_json(event: object) -> None:
    from pydantic import BaseModel

    if isinstance(event, BaseModel):
        typer.echo(event.model_dump_json())
