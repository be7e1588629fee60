"""``reflact import-skillopt``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reflact.importing.settings import Converted

PARTS = ("history.json", "summary.json", "runtime_state.json", "steps", "skills")
MADE = "run.yaml"


def import_skillopt(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The folder of a run, or a .yaml or config.json file.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Where to put it: a new folder for a run, a new .yaml file for a configuration. "
            "Default: runs/imported-NAME, or NAME.reflact.yaml.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Take over a run or a configuration of SkillOpt.

    A run's steps, documents and scores go into a folder of their own, where `reflact runs` and
    `reflact show` present them; it can be looked at, not continued. Its configuration is written
    beside it, in this library's terms. What has no counterpart is listed with the reason, and keys
    in clear text are left out. Nothing is written below DIR.
    """
    from reflact.errors import UsageError

    if not source.exists():
        raise UsageError(f"there is no {source}; name the folder of a run or a configuration")
    name = source.resolve().name if source.is_dir() else source.stem
    is_run = source.is_dir() and any((source / part).exists() for part in PARTS)
    place = out or (Path("runs") / f"imported-{name}" if is_run else Path(f"{name}.reflact.yaml"))
    if source.is_dir() and place.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{place} lies in the imported folder, which stays as it is; choose another --out")
    if is_run:
        _import_run(source, place)
    else:
        _import_config(source / "config.json" if source.is_dir() else source, name, place)


def _import_config(file: Path, name: str, out: Path) -> None:
    from reflact.errors import UsageError
    from reflact.exports import write
    from reflact.importing.older_config import read_config
    from reflact.importing.reading import Remarks
    from reflact.importing.settings import convert

    if out.exists() or out.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"{out} is there already, or does not end in .yaml; choose another file with --out")
    remarks = Remarks()
    converted = convert(read_config(file, remarks), name)
    write(out, converted.yaml(file.name))
    _tell([*remarks.lines, *_lines(converted)])
    typer.echo(f"wrote {out}")


def _import_run(source: Path, out: Path) -> None:
    import anyio

    from reflact.errors import ConfigError
    from reflact.exports import write
    from reflact.importing.keeping import keep
    from reflact.importing.older_config import read_config
    from reflact.importing.reading import Remarks
    from reflact.importing.run import read_run
    from reflact.importing.settings import convert

    remarks = Remarks()
    converted: Converted | None = None
    try:
        converted = convert(read_config(source / "config.json", remarks), f"{source.resolve().name}-again")
    except ConfigError as error:
        remarks.add(f"No configuration was made: {error}.")
    plain = None if converted is None else converted.config.model_dump(mode="json")
    run = read_run(source, plain)
    anyio.run(keep, run, out)
    if converted is not None:
        write(out / MADE, converted.yaml(f"{source.resolve().name}/config.json"))
    _tell([*remarks.lines, *(() if converted is None else _lines(converted)), *run.remarks])
    typer.echo(f"imported {len(run.commits) - 1} commits as run {run.run_id}; look at it: reflact show {out}")


def _lines(converted: Converted) -> list[str]:
    gone = [f"{', '.join(names)}: {reason}." for reason, names in converted.gone.items()]
    secrets = ", ".join(converted.dropped)
    said = [f"{secrets}: left out, because keys in clear text are not copied."] if secrets else []
    return [*said, *gone, *converted.remarks]


def _tell(lines: Iterable[str]) -> None:
    for line in dict.fromkeys(lines):
        typer.echo(f"note: {line}")
