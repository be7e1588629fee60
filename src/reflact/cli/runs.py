"""``reflact runs``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reflact.results import RunSummary
    from reflact.store.runs import RunRow


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or one that holds runs.")
    ] = Path("runs"),
) -> None:
    """List the runs below a folder."""
    import anyio
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from reflact.reporting.lines import format_score

    table = Table("folder", "run", "status", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("steps", "best", "started"):
        table.add_column(heading, justify="right", no_wrap=True)
    for path in find_stores(folder):
        for row, summary in anyio.run(_read_runs, path):
            best = summary.best.score if summary is not None and summary.best is not None else None
            table.add_row(
                str(path.parent),
                row.run_id,
                row.status or "open",
                str(row.steps),
                format_score(best),
                f"{row.created:%Y-%m-%d %H:%M}",
            )
    Console().print(table)


def find_stores(folder: Path) -> list[Path]:
    """Return the databases of all runs in or below a folder.

    Raises:
        UsageError: There are none.
    """
    from reflact.errors import UsageError

    found = sorted(folder.rglob("run.db")) if folder.is_dir() else []
    if not found:
        raise UsageError(f"there is no run in {folder}; name the out_dir of a run, or a folder above it")
    return found


async def _read_runs(path: Path) -> list[tuple[RunRow, RunSummary | None]]:
    from reflact.store.runs import open_store

    async with open_store(path) as store:
        return [(row, await store.summary(row.run_id)) for row in await store.runs()]
