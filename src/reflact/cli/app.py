"""The command line: all commands, and the output of errors.

Exit codes: 0 completed; 1 a run did not complete; 2 the input is wrong and no call was paid;
130, 143 and 129 Ctrl-C, SIGTERM or a closed terminal (SIGHUP) ended the run.
"""

from __future__ import annotations

from errno import EDQUOT, EFBIG, EIO, ENOSPC
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from reflact.cli.calibrate import calibrate
from reflact.cli.common import discard_output, print_error
from reflact.cli.init import init
from reflact.cli.memory import memory_app
from reflact.cli.runs import compare, export, print_diff, runs, serve, show
from reflact.cli.train import check, demo, evaluate, train
from reflact.errors import CassetteError, ReflactError, StoreError, UsageError

FULL = frozenset({ENOSPC, EDQUOT, EFBIG, EIO})
"""Errors of an output that cannot take more."""


class CommandGroup(TyperGroup):
    """Prints an error as one sentence on standard error and sets the exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of the context."""
        try:
            return super().invoke(ctx)
        except (UsageError, CassetteError, StoreError) as error:
            print_error(str(error), getattr(error, "difference", ()))
            raise typer.Exit(2) from None
        except ReflactError as error:
            print_error(str(error))
            raise typer.Exit(1) from None
        except OSError as error:
            if error.filename is None and error.errno in FULL:
                discard_output()
                print_error(
                    f"the output cannot be written: {error.strerror}; what the command stored is safe"
                )
                raise typer.Exit(1) from None
            if error.filename is None:
                raise
            print_error(
                f"{error.filename}: {error.strerror}; correct the path, or the permissions of the file or folder"
            )
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted; run the same command again to resume", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="reflact",
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"reflact {version('reflact')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Train skill documents for frozen LLM agents, and keep the evidence.

    Begin with `reflact init DATA`, which writes a configuration for your data, or look at `reflact demo`.
    """


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
    from reflact.integrations.skillopt import convert_config, read_config, read_document
    from reflact.reporting.lines import escape_line
    from reflact.store.artifacts import write_atomically

    if source.is_dir():
        raise UsageError(f"{source} is a folder; name its config.json or its best_skill.md")
    is_config = source.suffix in {".yaml", ".yml", ".json"}
    if not is_config and source.suffix not in {".md", ".txt"}:
        raise UsageError(f"{source} ends neither in .yaml, .yml or .json nor in .md or .txt; rename the file")
    target = out or Path(f"{source.stem}.reflact.{'yaml' if is_config else 'md'}")
    if target.exists():
        raise UsageError(f"{target} exists already; choose another file with --out")
    if is_config and target.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"{target} does not end in .yaml; choose another file with --out")
    if is_config:
        converted = convert_config(read_config(source), source.stem)
        text = converted.to_yaml(source.name)
        secrets = {"left out, because keys in clear text are not copied": converted.omitted_secrets}
        reasons = {**secrets, **converted.unsupported}
        lines = [f"{', '.join(names)}: {reason}." for reason, names in reasons.items() if names]
        notes = (*lines, *converted.remarks)
    else:
        text, notes = read_document(source)
    write_atomically(target, text)
    for note in dict.fromkeys(notes):
        typer.echo(f"note: {escape_line(note)}")
    typer.echo(f"wrote {target}")


app.command("init")(init)
app.command("check")(check)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("demo")(demo)
app.command("runs")(runs)
app.command("show")(show)
app.command("serve")(serve)
app.command("diff")(print_diff)
app.command("export")(export)
app.command("compare")(compare)
app.command("calibrate")(calibrate)
app.command("import-skillopt")(import_skillopt)
app.add_typer(memory_app)
