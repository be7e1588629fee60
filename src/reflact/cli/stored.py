"""What the commands of ``reflact memory`` share: the file, ids by their beginnings, tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reflact.memory_store import MemoryStore
    from reflact.types import Frozen

LEAST = 4
"""Characters that the beginning of an id needs at least."""

NAMED = 10
"""Ids that a store names at most where several begin as asked for."""

GAP = "  "
"""What stands between two columns."""

Store = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="The memory's file, such as a run's run.db.", show_default=False),
]
NewStore = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="The memory's file; made where missing.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")]


def existing(path: Path, *, read_only: bool = True) -> MemoryStore:
    """Return the memory of a file, to be opened; what only reads changes nothing in it, its schema neither.

    Raises:
        UsageError: There is no such file.
    """
    from reflact.errors import UsageError
    from reflact.memory_store import MemoryStore

    if not path.is_file():
        raise UsageError(f"there is no memory at {path}; name its file")
    return MemoryStore(path, read_only=read_only)


def only(name: str, ids: Sequence[str], *, what: str, store: Path, listed: str) -> str:
    """Return the one id that a name stands for: the name itself, or the only id that begins so.

    Args:
        name: What was asked for.
        ids: Ids that begin so; an equal one stands first.
        what: What the ids name, in the singular.
        store: Where they were looked for.
        listed: The command that lists them.

    Raises:
        UsageError: None begins so, several do, or the name is too short to stand for a longer id.
    """
    from reflact.errors import UsageError

    if name in ids:
        return name
    if len(name) < LEAST:
        raise UsageError(
            f"no {what} in {store} is called {name!r}, and the beginning of an id needs at least {LEAST} "
            f"characters; list them with `{listed}`"
        )
    if not ids:
        raise UsageError(f"no {what} in {store} begins with {name!r}; list them with `{listed}`")
    if len(ids) > 1:
        more = ", and perhaps more" if len(ids) >= NAMED else ""
        raise UsageError(
            f"{name!r} begins the ids of several {what}s, give more of one: {', '.join(ids)}{more}"
        )
    return ids[0]


def line(value: Frozen) -> str:
    """Return a value as a line of JSON."""
    from reflact.store.units import written

    return written(value)


def columns(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()
) -> Iterator[str]:
    """Yield a table's lines: the names of its columns, then one line for each row, whatever is in it.

    What cannot be seen is written out. Columns are as wide as what stands in them, at a terminal the last one
    ends where that does; elsewhere nothing is cut.

    Args:
        names: The columns.
        rows: A text for each column.
        right: Numbers of columns that stand at their right edge.
    """
    import shutil
    import sys

    from rich.cells import cell_len, set_cell_size

    from reflact.reporting.lines import escape_line

    table = [[escape_line(text) for text in row] for row in (names, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    end = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in table:
        cells = (
            " " * (width - cell_len(text)) + text
            if number in right
            else text + " " * (width - cell_len(text))
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        whole = GAP.join(cells).rstrip()
        yield whole if end is None or cell_len(whole) <= end else f"{set_cell_size(whole, end - 1)}…"


def short(text: str, most: int) -> str:
    """Return a text on one line, cut where it is longer than so many characters."""
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[: most - 1]}…"
