"""``reflact import-skillopt``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONFIG_SUFFIXES = {".yaml", ".yml", ".json"}
DOCUMENT_SUFFIXES = {".md", ".txt"}


def import_skillopt(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A configuration (.yaml, .yml, .json) or a skill document (.md, .txt).",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="The new file. Default: NAME.reflact.yaml or NAME.reflact.md in the current folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Convert a configuration or skill document of SkillOpt.

    The command reads FILE and writes a new file. It lists each key without a counterpart, with the
    reason. Keys in clear text are left out.
    """
    from reflact.errors import UsageError
    from reflact.reporting.lines import escape_line
    from reflact.store.artifacts import write_atomically

    if source.is_dir():
        raise UsageError(f"{source} is a folder; name its config.json or its best_skill.md")
    if source.suffix not in CONFIG_SUFFIXES | DOCUMENT_SUFFIXES:
        raise UsageError(f"{source} ends neither in .yaml, .yml or .json nor in .md or .txt")
    is_config = source.suffix in CONFIG_SUFFIXES
    target = out or Path(f"{source.stem}.reflact.{'yaml' if is_config else 'md'}")
    if target.exists():
        raise UsageError(f"{target} exists already; choose another file with --out")
    if is_config and target.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"{target} does not end in .yaml; choose another file with --out")
    text, lines = _convert_config(source) if is_config else _convert_document(source)
    write_atomically(target, text)
    for line in dict.fromkeys(lines):
        typer.echo(f"note: {escape_line(line)}")
    typer.echo(f"wrote {target}")


def _convert_config(source: Path) -> tuple[str, list[str]]:
    from reflact.integrations.skillopt.config import convert_config
    from reflact.integrations.skillopt.files import read_config

    converted = convert_config(read_config(source), source.stem)
    secrets = ", ".join(converted.omitted_secrets)
    lines = [f"{secrets}: left out, because keys in clear text are not copied."] if secrets else []
    lines += [f"{', '.join(names)}: {reason}." for reason, names in converted.unsupported.items()]
    return converted.to_yaml(source.name), [*lines, *converted.remarks]


def _convert_document(source: Path) -> tuple[str, list[str]]:
    from reflact.integrations.skillopt.files import read_document

    document = read_document(source)
    return document.skill.text, list(document.remarks)
