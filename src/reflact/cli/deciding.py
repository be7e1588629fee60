"""``reflact memory release``, ``reject``, ``archive``, ``label``: what a person says of a unit or a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reflact.cli.stored import Store, existing, only
from reflact.cli.traces import LISTED

if TYPE_CHECKING:
    from reflact.memory import Gold
    from reflact.memory_store import MemoryStore

Unit = Annotated[
    str,
    typer.Argument(metavar="UNIT", help="A card's or pair's id, or its beginning.", show_default=False),
]
Reason = Annotated[
    str, typer.Option(metavar="WORDS", help="Why; it stands in the unit's history.", show_default=False)
]


def release(store: Store, unit: Unit, *, reason: Reason) -> None:
    """Let a unit be tested that was held, by the scan or by a test: you looked at it."""
    import anyio

    typer.echo(f"released {anyio.run(_release, store, unit, reason)}: it may be tested")


def reject(store: Store, unit: Unit, *, reason: Reason) -> None:
    """Keep a quarantined unit from ever being tested or shown; its text stays, and there is no way back."""
    import anyio

    typer.echo(f"rejected {anyio.run(_reject, store, unit, reason)}")


def archive(store: Store, unit: Unit, *, reason: Reason) -> None:
    """Take a unit out of use, a promoted one too; its text stays, and there is no way back."""
    import anyio

    typer.echo(f"archived {anyio.run(_archive, store, unit, reason)}: no critic is shown it any more")


def label(
    store: Store,
    trace: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="A trace's id, or its beginning.", show_default=False),
    ],
    step: Annotated[
        int,
        typer.Argument(
            metavar="STEP", min=0, help="Its step, from 0, as `trace` shows it.", show_default=False
        ),
    ],
    *,
    after: Annotated[
        float,
        typer.Option(
            metavar="N", min=0, max=10, help="How far the state after the step has come.", show_default=False
        ),
    ],
    before: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, max=10, help="How far the state before it had come, where known."),
    ] = None,
    reason: Annotated[str, typer.Option(metavar="WORDS", help="Why that is right.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Change gold of a person or a program that is there.")
    ] = False,
) -> None:
    """Say how far a step of a trace came towards its purpose, 0 nothing and 10 all of it: gold of a person.

    Gold that is there already stays, unless --replace says otherwise.
    """
    import anyio

    from reflact.memory import Gold
    from reflact.reporting.lines import escape_line

    gold = Gold(phi_before=before, phi_after=after, source="human", reasoning=reason)
    name, known, steps = anyio.run(_label, store, trace, step, gold, replace)
    typer.echo(f"labelled step {step} of trace {escape_line(name)}; {known} of its {steps} steps have gold")


async def _release(path: Path, name: str, reason: str) -> str:
    async with existing(path, read_only=False) as store:
        unit = await _unit(store, path, name)
        await store.release(unit, reason=_said(reason))
    return unit


async def _reject(path: Path, name: str, reason: str) -> str:
    async with existing(path, read_only=False) as store:
        unit = await _unit(store, path, name)
        await store.reject([unit], reason=_said(reason))
    return unit


async def _archive(path: Path, name: str, reason: str) -> str:
    async with existing(path, read_only=False) as store:
        unit = await _unit(store, path, name)
        await store.archive([unit], reason=_said(reason))
    return unit


async def _unit(store: MemoryStore, path: Path, name: str) -> str:
    found = await store.units_named(name)
    return only(name, found, what="unit", store=path, listed=f"reflact memory list {path}")


async def _label(path: Path, name: str, step: int, gold: Gold, replace: bool) -> tuple[str, int, int]:
    """Label a step; returns the trace's id, and how many of how many steps have gold then."""
    async with existing(path, read_only=False) as store:
        found = await store.traces_named(name)
        trace_id = only(name, found, what="trace", store=path, listed=f"{LISTED} {path}")
        await store.label(trace_id, step, gold, replace=replace)
        summary = next(one for one in await store.summaries() if one.id == trace_id)
    return trace_id, summary.gold, summary.events


def _said(reason: str) -> str:
    from reflact.errors import UsageError

    if not reason.strip():
        raise UsageError("--reason is empty; say in words why, since it stands in the unit's history")
    return reason
