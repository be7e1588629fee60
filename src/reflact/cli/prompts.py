"""The command ``prompts``: the packaged prompts, and copies to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reflact.errors import UsageError
from reflact.text import escape_controls, escape_line


def prompts(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The prompt to print.", show_default=False),
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Copy it to FOLDER/NAME, to change it.", show_default=False
        ),
    ] = None,
) -> None:
    """List the prompts, print one, or copy it.

    A run takes the changed copy if prompts.folder names the folder. Keep its variables and its
    reply; the text is yours. Changed prompts make another run.
    """
    from rich.console import Console

    from reflact.prompts import find_prompt_file, list_prompt_names, read_prompt
    from reflact.reporting.terminal import build_table
    from reflact.store.artifacts import write_atomically

    if name is None:
        if copy is not None:
            raise UsageError("--copy needs the NAME of a prompt; reflact prompts lists them")
        rows = []
        for each in list_prompt_names():
            header = read_prompt(find_prompt_file(each)).header
            version = f"v{header.version}"
            rows.append({"prompt": each, "version": version, "role": header.role})
            rows[-1]["reply"] = header.reply
        console = Console()
        console.print(build_table(rows, console.width))
        return
    file = find_prompt_file(name)
    text = file.read_text(encoding="utf-8")
    if copy is None:
        typer.echo(escape_controls(text), nl=False)
        return
    target = copy / name / file.name
    if target.exists():
        raise UsageError(f"{target} exists already; change it, or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text)
    typer.echo(escape_line(f"wrote {target}; set prompts.folder to {copy} to use it"))
