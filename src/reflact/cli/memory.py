"""``reflact memory``: what a memory holds, listed, shown, labelled, forgotten, taken out and brought in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reflact.cli.memory_output import (
    JsonLinesOption,
    NewStoreArgument,
    StoreArgument,
    format_json_line,
    open_existing,
    print_anchors,
    print_cards,
    print_incomplete_files,
    print_traces,
    render_trace,
    render_unit,
    resolve_id,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reflact.calibration.trace import Trace
    from reflact.memory.models import ContrastPair, Label, MemoryCard
    from reflact.memory.protocols import ForgetResult, TraceSummary
    from reflact.memory.store import ImportResult

MAX_CONCURRENT_TRACES = 8
"""Traces that are written at a time; writes that wait together share a transaction."""

NON_CARD_KINDS = ("trace", "anchor")
"""What `list --kind` names beside kinds of cards."""

StatusOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STATE", help="Only this: candidate, quarantined, promoted, rejected, archived; repeatable."
    ),
]
KindOption = Annotated[
    list[str] | None, typer.Option(metavar="KIND", help="Only this kind of card; repeatable.")
]
LimitOption = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="At most so many cards.")]

memory_app = typer.Typer(
    name="memory",
    help="Show and change what calibration has learned.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@memory_app.command("list")
def list_stored(
    store: StoreArgument,
    status: StatusOption = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Only this kind of card, repeatable; or `trace` for traces, `anchor` for anchors.",
        ),
    ] = None,
    limit: LimitOption = 50,
    json: JsonLinesOption = False,
) -> None:
    """List cards, traces or anchors.

    Cards stand the best first, in all states and scopes unless options say otherwise.
    """
    import anyio

    from reflact.errors import UsageError

    kinds = kind or []
    if not set(NON_CARD_KINDS).isdisjoint(kinds) and (len(kinds) > 1 or status):
        raise UsageError(f"--kind {kinds[0]} is combined with other options; list traces and anchors alone")
    if kinds == ["trace"]:
        print_traces(anyio.run(_read_summaries, store), store, json=json)
    elif kinds == ["anchor"]:
        print_anchors(anyio.run(_read_anchors, store), store, json=json)
    else:
        print_cards(anyio.run(_find_cards, store, "", status, kind, limit), store, limit, json=json)


@memory_app.command()
def search(  # noqa: PLR0917 - what the command line offers
    store: StoreArgument,
    words: Annotated[str, typer.Argument(metavar="WORDS", help="What to look for; any text.")],
    status: StatusOption = None,
    kind: KindOption = None,
    limit: LimitOption = 10,
    json: JsonLinesOption = False,
) -> None:
    """Find cards by their words.

    The best match comes first. Without options, cards of all states and scopes are searched.
    """
    import anyio

    print_cards(anyio.run(_find_cards, store, words, status, kind, limit), store, limit, json=json)


@memory_app.command()
def show(
    store: StoreArgument,
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a card, pair or trace, or its beginning.")
    ],
    json: JsonLinesOption = False,
) -> None:
    """Show a card, a pair or a trace in full.

    A pair stands with its history, a trace step by step: what was done, what changed, what a critic said,
    what is right.
    """
    import anyio

    for text in anyio.run(_render_by_name, store, name, json):
        typer.echo(text)


@memory_app.command()
def label(
    store: StoreArgument,
    trace: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="A trace's id, or its beginning.", show_default=False),
    ],
    step: Annotated[
        int,
        typer.Argument(
            metavar="STEP", min=0, help="Its step, from 0, as `show` counts them.", show_default=False
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
    """Say how far a step came.

    0 is nothing of the trace's purpose, 10 all of it. Gold that a person or a program gave stays, unless
    --replace says otherwise.
    """
    import anyio

    from reflact.memory.models import Label
    from reflact.reporting.lines import escape_line

    gold = Label(progress_before=before, progress_after=after, source="human", reasoning=reason)
    name, known, steps = anyio.run(_label_step, store, trace, step, gold, replace)
    typer.echo(f"labelled step {step} of trace {escape_line(name)}; {known} of its {steps} steps have gold")


@memory_app.command()
def forget(
    store: StoreArgument,
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="A trace's id; its beginning is not enough.", show_default=False
        ),
    ],
    calls: Annotated[
        bool,
        typer.Option("--calls", help="Also all replies of models to calibration's questions, of any trace."),
    ] = False,
    json: JsonLinesOption = False,
) -> None:
    """Remove everything that came from a trace.

    Prints what was removed. This cannot be undone.
    """
    import anyio

    from reflact.reporting.lines import escape_line

    gone = anyio.run(_forget_trace, store, trace, calls)
    if json:
        typer.echo(format_json_line(gone))
        return
    if _removed_anything(gone):
        typer.echo(
            f"forgot trace {escape_line(gone.trace_id)}: {gone.n_events} events, {len(gone.unit_ids)} units "
            f"with {gone.n_cards} cards, {gone.n_anchors} anchors"
        )
    if calls:
        typer.echo(f"removed {gone.n_responses} stored replies of models to calibration's questions")
    elif gone.n_responses_left:
        typer.echo(
            f"{gone.n_responses_left} stored replies of models to calibration's questions may quote it; --calls "
            "removes them all, and they would be asked anew"
        )
    if gone.remains_in_wal:
        typer.echo(
            f"what was removed still stands in {store.name}-wal, since another process reads the memory; end "
            "that and give this command again, which finds no trace then, but empties the log"
        )


@memory_app.command("export")
def export_store(
    store: StoreArgument,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Where to write; standard output without it.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a memory as JSON lines.

    Tests and what was rejected or archived stay behind; copy the file itself to copy all of it.
    """
    import anyio

    anyio.run(_export_memory, store, target)


@memory_app.command("import")
def import_store(
    store: NewStoreArgument,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="What `export` wrote; or traces, a file of one or a folder.",
            show_default=False,
        ),
    ],
    json: JsonLinesOption = False,
) -> None:
    """Bring in an export or traces.

    What is there stays. Each new card is scanned and quarantined, whatever it was elsewhere.
    """
    import anyio

    from reflact.errors import DataError

    traces, lines = _read_source(source)
    print_incomplete_files(traces, err=json)
    try:
        done = anyio.run(_import_memory, store, traces, lines)
    except DataError as error:
        raise error if traces else DataError(f"{source}: {error}; nothing was brought in") from None
    if json:
        typer.echo(format_json_line(done))
        return
    typer.echo(
        f"new: {done.n_units} units, {done.n_traces} traces with {done.n_events} steps, {done.n_anchors} anchors; "
        f"{done.n_blocked} of the units are held or rejected"
    )


# -------------------------------------------------------------------------------------------- reading


async def _find_cards(
    path: Path, text: str, status: list[str] | None, kind: list[str] | None, limit: int
) -> tuple[MemoryCard, ...]:
    from pydantic import ValidationError

    from reflact.errors import UsageError
    from reflact.memory.protocols import CardQuery

    asked: dict[str, Any] = {"statuses": status or (), "kinds": kind or ()}
    try:
        query = CardQuery(text=text, all_scopes=True, limit=limit, **asked)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['input']!r} is none: {first['msg']}") from None
    async with open_existing(path) as store:
        return await store.find(query)


async def _read_summaries(path: Path) -> tuple[TraceSummary, ...]:
    async with open_existing(path) as store:
        return await store.summaries()


async def _read_anchors(path: Path) -> tuple[ContrastPair, ...]:
    async with open_existing(path) as store:
        return await store.anchors()


async def _render_by_name(path: Path, name: str, json: bool) -> list[str]:
    from reflact.errors import UsageError

    async with open_existing(path) as store:
        units, traces = await store.find_unit_ids(name), await store.find_trace_ids(name)
        found = resolve_id(name, (*units, *traces), noun="unit or trace", store=path)
        if found in units:
            cards, history = await store.cards(found), await store.history(found)
            return (
                [*map(format_json_line, cards), *map(format_json_line, history)]
                if json
                else [*render_unit(cards, history)]
            )
        trace = await store.trace(found)
        summary = next((one for one in await store.summaries() if one.id == found), None)
    if trace is None or summary is None:
        raise UsageError(f"{path} holds what came from trace {found}, but not the trace itself")
    return [format_json_line(trace)] if json else [*render_trace(trace, summary)]


async def _label_step(path: Path, name: str, step: int, label: Label, replace: bool) -> tuple[str, int, int]:
    """Label a step; returns the trace's id, and how many of how many steps have gold then."""
    async with open_existing(path, read_only=False) as store:
        trace_id = resolve_id(name, await store.find_trace_ids(name), noun="trace", store=path)
        await store.label(trace_id, step, label, replace=replace)
        summary = next(one for one in await store.summaries() if one.id == trace_id)
    return trace_id, summary.n_labelled, summary.n_events


async def _forget_trace(path: Path, trace: str, calls: bool) -> ForgetResult:
    from reflact.errors import UsageError

    async with open_existing(path, read_only=False) as store:
        found = await store.find_trace_ids(trace)
        if found and trace not in found and not calls:
            raise UsageError(
                f"no trace in {path} is called {trace!r}, and forgetting takes a whole id; these begin so: "
                f"{', '.join(found)}"
            )
        gone = await store.forget(trace, calls=calls)
    if not calls and not _removed_anything(gone):
        log = f"; what was removed before may still stand in {path.name}-wal, which is being read"
        raise UsageError(
            f"nothing in {path} came from a trace {trace!r}; list them with "
            f"`reflact memory list {path} --kind trace`{log if gone.remains_in_wal else ''}"
        )
    return gone


def _removed_anything(result: ForgetResult) -> bool:
    """Whether anything had come from the trace."""
    return result.trace_removed or bool(result.unit_ids) or result.n_anchors > 0


async def _export_memory(path: Path, target: Path | None) -> None:
    from reflact.errors import UsageError

    async with open_existing(path) as store:
        if target is None:
            async for text in store.export_lines():
                typer.echo(text)
            return
        lines = 0
        try:
            with target.open("w", encoding="ascii") as file:
                async for text in store.export_lines():
                    file.write(f"{text}\n")
                    lines += 1
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror or error}") from None
    typer.echo(f"wrote {lines:,} lines to {target}")


def _read_source(source: Path) -> tuple[tuple[Trace, ...], list[str]]:
    """Return the traces in a source, or the lines of an export."""
    import json

    from reflact.calibration.trace import Trace
    from reflact.errors import UsageError

    if source.is_dir():
        return Trace.load_all(source), []
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}") from None
    try:
        first = json.loads(lines[0])
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict) and "trace" in first and "type" not in first:
        return (Trace.load(source),), []
    return (), lines


async def _import_memory(path: Path, traces: Sequence[Trace], lines: list[str]) -> ImportResult:
    from reflact.concurrency import fan_out
    from reflact.memory.store import ImportResult, MemoryStore

    async with MemoryStore(path) as store:
        if not traces:
            return await store.import_lines(lines)
        known = set(await store.trace_ids())
        new = sum(trace.id not in known for trace in traces)
        events = sum(await fan_out(lambda trace: trace.save_to(store), traces, limit=MAX_CONCURRENT_TRACES))
        return ImportResult(n_traces=new, n_events=events)
