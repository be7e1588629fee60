"""What the commands of ``reflact memory`` share: the file, and ids by their beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reflact.memory_store import MemoryStore
    from reflact.types import Frozen

LEAST = 4
"""Characters that the beginning of an id needs at least."""

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
        raise UsageError(f"{name!r} begins the ids of several {what}s, give more of one: {', '.join(ids)}")
    return ids[0]


def line(value: Frozen) -> str:
    """Return a value as a line of JSON."""
    from reflact.types import canonical

    return canonical(value.model_dump(mode="json"))
