"""The command line."""

from __future__ import annotations

# How many objects are made before Python looks for unreachable ones among them; its default is 700.
#
# A call in flight consists of about a hundred objects. With a thousand in flight, the default
# searches them so often that this takes a quarter of the processor time.
GARBAGE_THRESHOLD = 50_000


def main() -> None:
    """Run the command that the process was started with, and exit with its code."""
    import gc
    import io
    import sys

    gc.set_threshold(GARBAGE_THRESHOLD)
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # words of models in an encoding that lacks their letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from reflact.cli.app import app

        app(prog_name="reflact")
    except KeyboardInterrupt:
        sys.exit(130)
