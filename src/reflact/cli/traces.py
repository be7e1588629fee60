"""``reflact memory keep``, ``traces`` and ``trace``: the traces in a memory, handed in, listed and shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reflact.cli.stored import Json, NewStore, Store, columns, existing, line, only, short

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reflact.calibration.trace import Trace
    from reflact.memory import ScoreEvent
    from reflact.memory_ports import StoredTrace, TraceSummary

AT_ONCE = 8
"""Traces that are written at a time; writes that wait together share a transaction."""

CHANGE_TOKENS = 200
"""Room for a purpose, an action, and what a step changed, each; what is cut is marked."""

PURPOSE_SHOWN = 60
"""Characters of a purpose in a table."""

LISTED = "reflact memory traces"


def keep(
    store: NewStore,
    places: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files of traces, or folders of them.", show_default=False),
    ],
) -> None:
    """Put traces that `Trace(path=...)` wrote into a memory; those that are there get what is new in them."""
    import anyio

    traces = [trace for place in places for trace in _read(place)]
    events = anyio.run(_keep, store, traces)
    gold = sum(event.gold is not None for trace in traces for event in trace.events)
    steps = sum(len(trace.events) for trace in traces)
    tell_lost(traces)
    typer.echo(f"{len(traces)} traces with {steps} steps, {gold} of them with gold; {events} steps were new")


def tell_lost(traces: Iterable[Trace], *, err: bool = False) -> None:
    """Print which files of traces are not whole, and what of them was left out."""
    from reflact.report.visible import in_line

    for trace in traces:
        if trace.lost:
            typer.echo(
                f"trace {in_line(trace.id)}: {trace.lost} bytes of its file are not whole, left out", err=err
            )


def list_traces(store: Store, json: Json = False) -> None:
    """List traces: their steps, how many were scored and have gold, and the pairs that were made of them."""
    import anyio

    found = anyio.run(_summaries, store)
    if json:
        for one in found:
            typer.echo(line(one))
        return
    _print_traces(found)
    if not found:
        typer.echo(
            f"{store} keeps no trace: a calibration with `traces: FOLDER` reads its files where they are; "
            f"`reflact memory keep {store} FOLDER` puts them in",
            err=True,
        )


def show_trace(
    store: Store,
    name: Annotated[str, typer.Argument(metavar="TRACE", help="A trace's id, or its beginning.")],
    json: Json = False,
) -> None:
    """Show a trace step by step: what was done, what changed, what a critic said, what is right."""
    import anyio

    trace, summary = anyio.run(_trace, store, name)
    if json:
        typer.echo(line(trace))
        return
    for text in _shown(trace, summary):
        typer.echo(text)


def _read(place: Path) -> tuple[Trace, ...]:
    from reflact.calibration.trace import Trace

    return Trace.load_all(place) if place.is_dir() else (Trace.load(place),)


async def _keep(path: Path, traces: Sequence[Trace]) -> int:
    from reflact.memory_store import MemoryStore
    from reflact.tasks import fan_out

    async with MemoryStore(path) as store:
        return sum(await fan_out(lambda trace: trace.keep(store), traces, limit=AT_ONCE))


async def _summaries(path: Path) -> tuple[TraceSummary, ...]:
    async with existing(path) as store:
        return await store.summaries()


async def _trace(path: Path, name: str) -> tuple[StoredTrace, TraceSummary]:
    from reflact.errors import UsageError

    async with existing(path) as store:
        found = await store.traces_named(name)
        trace_id = only(name, found, what="trace", store=path, listed=f"{LISTED} {path}")
        trace = await store.trace(trace_id)
        summary = next((one for one in await store.summaries() if one.id == trace_id), None)
    if trace is None or summary is None:
        raise UsageError(f"{path} holds what came from trace {trace_id}, but not the trace itself")
    return trace, summary


def _print_traces(found: Sequence[TraceSummary]) -> None:
    rows = [
        (one.id, *map(str, (one.events, one.scored, one.gold, one.pairs)), short(one.purpose, PURPOSE_SHOWN))
        for one in found
    ]
    names = ("trace", "steps", "scored", "gold", "pairs", "purpose")
    for text in columns(names, rows, right=range(1, 5)):
        typer.echo(text)


def _shown(trace: StoredTrace, summary: TraceSummary) -> Iterator[str]:
    from reflact.calibration.showing import cut
    from reflact.report.visible import in_line

    yield f"trace {in_line(trace.id)}"
    yield f"  purpose: {in_line(cut(trace.purpose, CHANGE_TOKENS))}"
    yield f"  steps: {summary.events}, {summary.scored} scored, {summary.gold} with gold"
    yield f"  pairs made of it: {summary.pairs}"
    for event in trace.events:
        yield ""
        for text in _lines(event):
            yield in_line(text)


def _lines(event: ScoreEvent) -> Iterator[str]:
    from reflact.calibration.changes import show_change
    from reflact.calibration.showing import cut, show_action

    step, said, gold = event.transition, event.evaluation, event.gold
    yield f"step {event.step}: {' '.join(cut(show_action(step.action), CHANGE_TOKENS).split())}"
    if said is not None:
        yield f"  critic: {said.phi_before:g} to {said.phi_after:g}, confidence {said.confidence:g}"
        yield f"    {' '.join(said.reasoning.split())}"
    if gold is not None:
        before = "" if gold.phi_before is None else f"{gold.phi_before:g} to "
        yield f"  gold: {before}{gold.phi_after:g}, from {gold.source}"
    for text in cut(show_change(step.before, step.after, brief=True), CHANGE_TOKENS).splitlines():
        yield f"  | {text}"
