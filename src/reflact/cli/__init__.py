"""The command line."""

from __future__ import annotations


def main() -> None:
    """Run the command that the process was started with, and exit with its code."""
    import sys

    try:
        from reflact.cli.app import app

        app(prog_name="reflact")
    except KeyboardInterrupt:
        sys.exit(130)
