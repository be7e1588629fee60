"""The command line."""

from __future__ import annotations


def main() -> None:
    """Run the command that the process was started with, and exit with its code."""
    import io
    import sys

    if isinstance(sys.stdout, io.TextIOWrapper):  # words of models in an encoding that lacks their letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from reflact.cli.app import app

        app(prog_name="reflact")
    except KeyboardInterrupt:
        sys.exit(130)
