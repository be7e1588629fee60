"""The command line: all commands, and the output of errors.

Exit codes: 0 completed; 1 a run did not complete; 2 the input is wrong and no call was paid;
130 and 143 Ctrl-C or SIGTERM ended the run.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from reflact.cli.calibrate import calibrate
from reflact.cli.cassettes import demo, record, replay
from reflact.cli.common import print_error
from reflact.cli.import_skillopt import import_skillopt
from reflact.cli.memory import memory_app
from reflact.cli.runs import runs, show
from reflact.cli.train import evaluate, train
from reflact.errors import CassetteError, ReflactError, StoreError, UsageError


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
        typer.echo(f"reflact {version('reflact')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Train skill documents for frozen LLM agents, and keep the evidence."""


app.command("train")(train)
app.command("eval")(evaluate)
app.command("demo")(demo)
app.command("runs")(runs)
app.command("show")(show)
app.command("calibrate")(calibrate)
app.command("record")(record)
app.command("replay")(replay)
app.command("import-skillopt")(import_skillopt)
app.add_typer(memory_app)
