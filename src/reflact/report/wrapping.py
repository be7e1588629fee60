"""Lines that are longer than a terminal is wide."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

INDENT = 10
"""Cells by which the rest of a long line is indented: as far as the labels of lines reach."""


def hanging(line: str, width: int) -> Text:
    """Return a line that is broken at words where it is wider than a terminal, with the rest indented."""
    text = Text(line)
    if cell_len(line) <= width or width < 3 * INDENT:
        return text
    console = Console(width=width)
    first = text.wrap(console, width)[0]
    rest = Text(line[len(first.plain) :].lstrip()).wrap(console, width - INDENT)
    return Text("\n").join([first, *(Text(" " * INDENT) + part for part in rest)])
