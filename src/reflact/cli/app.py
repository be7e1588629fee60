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

from reflact.cli.ask import ask
from reflact.cli.calibrate import calibrate
from reflact.cli.check import check
from reflact.cli.common import discard_output, print_error
from reflact.cli.gate import gate
from reflact.cli.init import init
from reflact.cli.memory import memory_app
from reflact.cli.prompts import prompts
from reflact.cli.runs import compare, export, runs, serve, show
from reflact.cli.train import demo, evaluate, train
from reflact.cli.verify import verify
from reflact.errors import CassetteError, ReflactError, StoreError, UsageError
from reflact.text import suggest_path

# Errors of an output that cannot take more.
FULL = frozenset({ENOSPC, EDQUOT, EFBIG, EIO})


class CommandGroup(TyperGroup):
    """Prints an error as one sentence on standard error and sets the exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of the context."""
        try:
            return super().invoke(ctx)
        except (UsageError, CassetteError, StoreError) as error:
            print_error(str(error), getattr(error, "difference", ()))
            code = 2
        except ReflactError as error:
            print_error(str(error))
            code = 1
        except OSError as error:
            code = _report_os_error(error)
        except RecursionError:
            print_error("a folder or a value is nested too deeply; name another, or flatten it")
            code = 2
        except SystemExit as ending:  # rich ends the process if its reader has gone
            if not isinstance(ending.__context__, BrokenPipeError):
                raise
            code = _report_os_error(ending.__context__)
        except KeyboardInterrupt:
            typer.echo("interrupted; run the same command again to resume", err=True)
            code = 130
        raise typer.Exit(code)


def _report_os_error(error: OSError) -> int:
    """Print what cannot be read or written, and return the exit code."""
    if error.filename is not None:
        advice = suggest_path(Path(str(error.filename)))
        advice = advice or "; correct the path, or the permissions of the file or folder"
        print_error(f"{error.filename}: {error.strerror}{advice}")
        return 2
    if isinstance(error, BrokenPipeError):  # the reader of the output has gone
        discard_output()
        return 0
    if error.errno not in FULL:
        raise error
    discard_output()
    print_error(f"the output cannot be written: {error.strerror}; what the command stored is safe")
    return 1


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
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train skill documents for frozen LLM agents, and keep the evidence.

    Begin with `reflact init DATA`, which writes a configuration for your data, or look at `reflact
    demo`.
    """


app.command("init")(init)
app.command("check")(check)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("demo")(demo)
app.command("runs")(runs)
app.command("show")(show)
app.command("serve")(serve)
app.command("export")(export)
app.command("compare")(compare)
app.command("gate")(gate)
app.command("ask")(ask)
app.command("verify")(verify)
app.command("calibrate")(calibrate)
app.command("prompts")(prompts)
app.add_typer(memory_app)
