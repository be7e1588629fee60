"""``reflact memory``: list, search, show, label, forget, export and import a memory's content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

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
    from collections.abc import Awaitable, Callable, Sequence

    from reflact.calibration.trace import Trace
    from reflact.memory.export import ImportResult
    from reflact.memory.models import ForgetResult, Label, MemoryCard
    from reflact.memory.store import MemoryStore

T = TypeVar("T")

MAX_CONCURRENT_TRACES = 8
"""Traces that are imported at a time; concurrent writes share a transaction."""

NON_CARD_KINDS = ("trace", "anchor")
"""Values of ``list --kind`` that are no kinds of cards."""

StatusOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STATUS",
        help="Only this status: candidate, quarantined, promoted, rejected, archived. Repeatable.",
    ),
]
KindOption = Annotated[
    list[str] | None, typer.Option(metavar="KIND", help="Only this kind of card. Repeatable.")
]
LimitOption = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Maximum number of cards.")]

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
            help="Only this kind of card (repeatable), or `trace`, or `anchor`.",
        ),
    ] = None,
    limit: LimitOption = 50,
    json: JsonLinesOption = False,
) -> None:
    """List cards, traces or anchors.

    The best cards come first. Without options, cards of all statuses and scopes are listed.
    """
    import anyio

    from reflact.errors import UsageError
    from reflact.memory.store import MemoryStore

    kinds = kind or []
    if not set(NON_CARD_KINDS).isdisjoint(kinds) and (len(kinds) > 1 or status):
        raise UsageError(f"--kind {kinds[0]} cannot be combined with other kinds or --status; list it alone")
    if kinds == ["trace"]:
        print_traces(anyio.run(_read_all, store, MemoryStore.summaries), store, json=json)
    elif kinds == ["anchor"]:
        print_anchors(anyio.run(_read_all, store, MemoryStore.anchors), store, json=json)
    else:
        print_cards(anyio.run(_find_cards, store, "", status, kind, limit), store, limit, json=json)


@memory_app.command()
def search(  # noqa: PLR0917 - what the command line offers
    store: StoreArgument,
    words: Annotated[str, typer.Argument(metavar="WORDS", help="The words to find; any text.")],
    status: StatusOption = None,
    kind: KindOption = None,
    limit: LimitOption = 10,
    json: JsonLinesOption = False,
) -> None:
    """Find cards by their words.

    The best match comes first. Without options, cards of all statuses and scopes are searched.
    """
    import anyio

    print_cards(anyio.run(_find_cards, store, words, status, kind, limit), store, limit, json=json)


@memory_app.command()
def show(
    store: StoreArgument,
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a card, pair or trace, or its prefix.")
    ],
    json: JsonLinesOption = False,
) -> None:
    """Show a card, a pair or a trace in full.

    A pair is shown with its history. A trace is shown step by step: the action, the change, the critic's
    evaluation and the label.
    """
    import anyio

    for text in anyio.run(_render_by_name, store, name, json):
        typer.echo(text)


@memory_app.command()
def label(
    store: StoreArgument,
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="The id of a trace, or its prefix.", show_default=False)
    ],
    step: Annotated[
        int, typer.Argument(metavar="STEP", min=0, help="The number of the step, from 0.", show_default=False)
    ],
    *,
    after: Annotated[
        float,
        typer.Option(
            metavar="N", min=0, max=10, help="The progress of the state after the step.", show_default=False
        ),
    ],
    before: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, max=10, help="The progress of the state before the step, if known."),
    ] = None,
    reason: Annotated[str, typer.Option(metavar="WORDS", help="The reason for the label.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a label of a person or a program.")
    ] = False,
) -> None:
    """Label the progress of a step.

    0 means no progress towards the trace's purpose, 10 means that it is complete. Labels of a person or a
    program stay unless you pass --replace.
    """
    import anyio

    from reflact.memory.models import Label
    from reflact.reporting.lines import escape_line

    human = Label(progress_before=before, progress_after=after, source="human", reasoning=reason)
    name, labelled, steps = anyio.run(_label_step, store, trace, step, human, replace)
    typer.echo(
        f"labelled step {step} of trace {escape_line(name)}; {labelled} of its {steps} steps are labelled"
    )


@memory_app.command()
def forget(
    store: StoreArgument,
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="The complete id of a trace.", show_default=False)
    ],
    calls: Annotated[
        bool,
        typer.Option("--calls", help="Also remove all cached model replies to calibrations, of any trace."),
    ] = False,
    json: JsonLinesOption = False,
) -> None:
    """Remove everything that came from a trace.

    The command prints the number of removed entries. It cannot be undone.
    """
    import anyio

    from reflact.reporting.lines import escape_line

    result = anyio.run(_forget_trace, store, trace, calls)
    if json:
        typer.echo(format_json_line(result))
        return
    if _removed_anything(result):
        typer.echo(
            f"forgot trace {escape_line(result.trace_id)}: {result.n_events} events, {len(result.unit_ids)} units "
            f"with {result.n_cards} cards, {result.n_anchors} anchors"
        )
    if calls:
        typer.echo(f"removed {result.n_responses} cached replies to questions of calibrations")
    elif result.n_responses_left:
        typer.echo(
            f"{result.n_responses_left} cached replies to questions of calibrations may quote it; --calls removes "
            "them all, and later calibrations ask these questions again"
        )
    if result.remains_in_wal:
        typer.echo(
            f"{store.name}-wal still contains the removed data, because another process reads the memory; end "
            "that process and run this command again, which then reports no trace but empties the log"
        )


@memory_app.command("export")
def export_store(
    store: StoreArgument,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="The file to write; standard output if omitted.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a memory as JSON lines.

    Tests and rejected or archived cards are left out. To copy everything, copy the file itself.
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
            help="A file that `export` wrote, or a file or folder of traces.",
            show_default=False,
        ),
    ],
    json: JsonLinesOption = False,
) -> None:
    """Import an export or traces.

    Stored entries stay as they are. Each new card is scanned and quarantined, whatever its status was.
    """
    import anyio

    from reflact.errors import DataError

    traces, lines = _read_source(source)
    print_incomplete_files(traces, folders=[source if source.is_dir() else None], err=json)
    try:
        result = anyio.run(_import_memory, store, traces, lines)
    except DataError as error:
        raise error if traces else DataError(f"{source}: {error}; nothing was imported") from None
    if json:
        typer.echo(format_json_line(result))
        return
    typer.echo(
        f"new: {result.n_units} units, {result.n_traces} traces with {result.n_events} steps, "
        f"{result.n_anchors} anchors; {result.n_blocked} of the units need review or were rejected"
    )


# -------------------------------------------------------------------------------------------- reading


async def _find_cards(
    path: Path, text: str, status: list[str] | None, kind: list[str] | None, limit: int
) -> tuple[MemoryCard, ...]:
    from pydantic import ValidationError

    from reflact.errors import UsageError
    from reflact.memory.models import CardQuery

    filters: dict[str, Any] = {"statuses": status or (), "kinds": kind or ()}
    try:
        query = CardQuery(text=text, all_scopes=True, limit=limit, **filters)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['input']!r} is invalid: {first['msg']}") from None
    async with open_existing(path) as store:
        return await store.find(query)


async def _read_all(path: Path, read: Callable[[MemoryStore], Awaitable[T]]) -> T:
    async with open_existing(path) as store:
        return await read(store)


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
        raise UsageError(
            f"{path} has units of trace {found}, but not the trace itself; name one of the units"
        )
    return [format_json_line(trace)] if json else [*render_trace(trace, summary)]


async def _label_step(path: Path, name: str, step: int, label: Label, replace: bool) -> tuple[str, int, int]:
    """Label a step; return the trace's id, its number of labelled steps, and its number of steps."""
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
                f"{path} has no trace {trace!r}, and forget needs a complete id; these ids begin with it: "
                f"{', '.join(found)}"
            )
        result = await store.forget(trace, calls=calls)
    if not calls and not _removed_anything(result):
        log = (
            f"; {path.name}-wal may still contain data that was removed before, and another process reads it"
        )
        raise UsageError(
            f"nothing in {path} came from a trace {trace!r}; list traces with "
            f"`reflact memory list {path} --kind trace`{log if result.remains_in_wal else ''}"
        )
    return result


def _removed_anything(result: ForgetResult) -> bool:
    """Whether something was removed besides cached replies."""
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
    """Return the traces of a source, or the lines of an export."""
    import json

    from reflact.calibration.trace import Trace, refuse_foreign_format
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
    if not isinstance(first, dict) or "type" not in first:
        refuse_foreign_format(source, "\n".join(lines).encode())
    return (), lines


async def _import_memory(path: Path, traces: Sequence[Trace], lines: list[str]) -> ImportResult:
    from reflact.concurrency import fan_out
    from reflact.memory.export import ImportResult
    from reflact.memory.store import MemoryStore

    async with MemoryStore(path) as store:
        if not traces:
            return await store.import_lines(lines)
        known = set(await store.trace_ids())
        new = sum(trace.id not in known for trace in traces)
        events = sum(await fan_out(lambda trace: trace.save_to(store), traces, limit=MAX_CONCURRENT_TRACES))
        return ImportResult(n_traces=new, n_events=events)
