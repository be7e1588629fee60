"""``reflact memory anchors``: the gold pairs that a critic is measured on and never learns from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from reflact.cli.stored import Json, Store, columns, existing, line, short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reflact.memory import ContrastPair

SHOWN = 60
"""Characters of a purpose in a table."""


def list_anchors(store: Store, json: Json = False) -> None:
    """List anchors: the step that each was made of, the right score of the state after it, the purpose."""
    import anyio

    found = anyio.run(_anchors, store)
    if json:
        for one in found:
            typer.echo(line(one))
        return
    _print_anchors(found)
    if not found:
        typer.echo(
            f"{store} holds no anchors: the key `anchors` of a calibration names a file of them", err=True
        )


async def _anchors(path: Path) -> tuple[ContrastPair, ...]:
    async with existing(path) as store:
        return await store.anchors()


def _print_anchors(found: Sequence[ContrastPair]) -> None:
    rows = [
        (
            one.id[:12],
            one.provenance.trace_id or "",
            "" if one.provenance.step is None else str(one.provenance.step),
            f"{one.right.phi_after:g}",
            short(one.purpose, SHOWN),
        )
        for one in found
    ]
    for text in columns(("anchor", "trace", "step", "phi after", "purpose"), rows, right={2, 3}):
        typer.echo(text)
