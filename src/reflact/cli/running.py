"""What the commands that start runs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reflact.config import TrainerConfig
    from reflact.ports import Approve
    from reflact.report.terminal import Show
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
            a wrong key, model or port looks like.
    """
    import anyio
    from rich.console import Console

    from reflact.report.terminal import print_summary, watching
    from reflact.report.visible import visible
    from reflact.trainer import Trainer

    trainer = Trainer(config, approve=approve)
    if as_json:
        summary = anyio.run(_follow, trainer, _print_json)
    else:
        console = Console()
        with watching(console, bars=approve is None) as show:
            summary = anyio.run(_follow, trainer, show)
        print_summary(console, summary, config.out_dir)
    if summary.status != "completed":
        reason = visible(f"the run ended as {summary.status}: {summary.reason}")
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1 if any(entry.usage.calls for entry in summary.spend) else 2)


async def _follow(trainer: Trainer, show: Show) -> RunSummary:
    from reflact.errors import RunFailed
    from reflact.events import Finished

    summary: RunSummary | None = None
    async with trainer.stream() as happenings:
        async for event in happenings:
            show(event)
            if isinstance(event, Finished):
                summary = event.summary
    if summary is None:
        raise RunFailed(f"run {trainer.run_id} stopped without a summary; start it again to go on")
    return summary


def _print_json(event: object) -> None:
    from pydantic import BaseModel

    if isinstance(event, BaseModel):
        typer.echo(event.model_dump_json())
