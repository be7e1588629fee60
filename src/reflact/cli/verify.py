"""The command ``verify``: check a receipt by a replay without a key, or under another model."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from reflact.cli.common import OverrideOption, ShowMode, build_view, load_trainer_config
from reflact.cli.gate import load_document
from reflact.errors import UsageError
from reflact.text import escape_line, list_items

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig
    from reflact.reporting.receipt import ModelCheck, Receipt


def verify(  # noqa: PLR0917 - one for each option of the command
    receipt: Annotated[
        Path, typer.Argument(metavar="RECEIPT", help="The receipt.", show_default=False)
    ],
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="The run's configuration.", show_default=False)
    ],
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The run's recording.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Measure under this model of the target.", show_default=False
        ),
    ] = None,
    skill: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --model: the best skill. Default: best_skill.md of the run.",
            show_default=False,
        ),
    ] = None,
    overrides: OverrideOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check the receipt of a run.

    With --replay, the run is made again from its recording, without a key: skill, answers, scores
    and claim must be those of the receipt. With --model, both skills answer the same items under
    another model, which costs calls. The exit code is 1 if the receipt does not hold.
    """
    from reflact.reporting.receipt import describe_receipt, read_receipt

    if (replay is None) == (model is None):
        raise UsageError("name what to check the receipt with: --replay FILE, or --model NAME")
    given = read_receipt(receipt)
    changes = list(overrides or ())
    if replay is not None:
        path = json.dumps(str(replay.expanduser().absolute()))
        changes += [f"replay.cassette={path}", "replay.mode=replay"]
        reasons = _replay(given, load_trainer_config(config, changes))
        if as_json:
            typer.echo(json.dumps({"holds": not reasons, "reasons": reasons}))
        else:
            typer.echo(escape_line(describe_receipt(given)))
            for reason in reasons:
                typer.echo(escape_line(f"does not hold: {reason}"))
            if not reasons:
                typer.echo("The replay gives the same skill, answers, scores and claim.")
        if reasons:
            raise typer.Exit(1)
        return
    changes.append(f"models.target.model={json.dumps(model)}")
    check = _measure(given, load_trainer_config(config, changes), skill)
    if as_json:
        typer.echo(check.model_dump_json())
    else:
        gain = check.gain
        typer.echo(escape_line(describe_receipt(given)))
        typer.echo(
            escape_line(
                f"Under {check.model}: {check.verdict}. The gain is {100 * gain.mean:+.0f} points "
                f"[{100 * gain.low:+.0f}, {100 * gain.high:+.0f}]."
            )
        )
        for word, item_ids in (("solved here alone", check.better), ("lost here", check.worse)):
            if item_ids:
                typer.echo(escape_line(f"{word}: {list_items(item_ids)}"))
    if check.verdict == "no longer true":
        raise typer.Exit(1)


def _replay(receipt: Receipt, settings: TrainerConfig) -> list[str]:
    """Return why a run from its recording is not that of a receipt; empty if it is."""
    from reflact.errors import CassetteError
    from reflact.reporting.history import read_matrix
    from reflact.reporting.receipt import (
        build_receipt,
        find_corrected_difference,
        list_changed_parts,
        list_differences,
    )
    from reflact.trainer import Trainer
    from reflact.types import Split

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        alone = {"out_dir": folder, "store": None, "report": False, "fork": False}
        trainer = Trainer(settings.model_copy(update=alone))
        changed = list(list_changed_parts(receipt, trainer.identity))
        if changed:
            return [f"{part} is not that of the receipt" for part in changed]
        try:
            summary = anyio.run(trainer.train)
        except CassetteError as error:
            return [f"the recording is not that of the run: {error}"]
        if summary.status != "completed":
            return [f"the replay ended as {summary.status}: {summary.reason}"]
        replayed = anyio.run(build_receipt, folder, trainer.run_id)
        reasons = list(list_differences(receipt, replayed))
        read = partial(read_matrix, folder, trainer.run_id, split=Split.test, ends_only=True)
        corrected = find_corrected_difference(receipt, anyio.run(read))
        return [*reasons, corrected] if corrected else reasons


def _measure(receipt: Receipt, settings: TrainerConfig, skill: Path | None) -> ModelCheck:
    """Measure both skills of a receipt under the configured model."""
    from rich.console import Console

    from reflact.reporting.history import read_matrix
    from reflact.reporting.receipt import check_model, list_changed_parts
    from reflact.trainer import Trainer
    from reflact.types import Skill, Split

    path = skill or settings.out_dir / "best_skill.md"
    best = load_document(path, settings)
    if best.hash != receipt.skill:
        raise UsageError(f"{path} is not the skill of the receipt; name its file with --skill")
    initial = Skill(text="")
    if settings.skill is not None:
        initial = load_document(settings.skill, settings)
    if initial.hash != receipt.initial_skill:
        raise UsageError("the configuration's `skill` is not the initial skill of the receipt")
    for part in list_changed_parts(receipt, Trainer(settings).identity):
        if not part.startswith(("models.", "target")):
            raise UsageError(f"{part}: not that of the receipt, so another claim would be checked")
    folder = settings.out_dir.with_name(f"{settings.out_dir.name}-verify")
    alone = settings.model_copy(update={"out_dir": folder, "store": None})
    with build_view(ShowMode.lines, Console(stderr=True), name=folder.name) as view:

        async def follow(event: object) -> None:
            view.show_event(event)  # type: ignore[arg-type]

        compare = partial(
            Trainer(alone).compare,
            best,
            [initial],
            Split.test,
            names=["best", "initial"],
            on_event=follow,
        )
        compared = anyio.run(compare)
    matrix = anyio.run(read_matrix, folder, compared.run_id)
    name = settings.models.target.model or ""
    return check_model(receipt, matrix, compared.improvements[0], name)
