"""``reflact eval``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reflact.cli.running import ConfigArgument, OverrideOption, load_trainer_config
from reflact.cli.showing import ShowMode, ShowOption, TimesOption, build_view

if TYPE_CHECKING:
    from reflact.config import TrainerConfig
    from reflact.reporting.live import RunView
    from reflact.results import SkillScore
    from reflact.types import Skill, Split


class MeasuredSplit(StrEnum):
    """The splits that a skill can be measured on."""

    val = "val"
    test = "test"


def evaluate(  # noqa: PLR0917 - one for each option of the command
    config: ConfigArgument,
    skill: Annotated[Path, typer.Option(metavar="FILE", help="The document to measure.", show_default=False)],
    split: Annotated[MeasuredSplit, typer.Option(metavar="val|test", help="Where to measure it.")] = MeasuredSplit.val,
    overrides: OverrideOption = None,
    show: ShowOption = ShowMode.live,
    times: TimesOption = False,
) -> None:
    """Measure one skill document on a split.

    Uses the run's folder: rollouts that it holds are not repeated, and each opening of the test
    split is counted there. As JSON, the last line is the score.
    """
    import anyio
    from rich.console import Console

    from reflact.reporting.summary import build_score_table
    from reflact.types import Split

    settings = load_trainer_config(config, overrides)
    document = _read_skill(skill)
    console = Console()
    with build_view(show, console, name=settings.out_dir.name, times=times) as view:
        scored = anyio.run(_measure, settings, document, Split(split.value), view)
    if show is ShowMode.json:
        typer.echo(scored.model_dump_json(ensure_ascii=True))
    else:
        console.print(build_score_table([scored]))


async def _measure(config: TrainerConfig, skill: Skill, split: Split, view: RunView) -> SkillScore:
    from reflact.events import Event
    from reflact.trainer import evaluate_skill

    async def emit(event: Event) -> None:
        view.show_event(event)

    return await evaluate_skill(config, skill, split, on_event=emit)


def _read_skill(path: Path) -> Skill:
    from reflact.errors import SkillError
    from reflact.skill import check_document
    from reflact.types import Skill

    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SkillError(f"cannot read the skill {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SkillError(f"the skill {path} is not UTF-8 text: {error.reason}") from None
    check_document(text)
    return Skill(text=text)
