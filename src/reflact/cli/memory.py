"""``reflact memory``: list, show, label, forget, export and import a memory's content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from reflact.cli.memory_output import (
    JsonLinesOption,
    NewStoreArgument,
    StoreArgument,
    format_json_line,
    open_existing,
    print_anchors,
    print_incomplete_files,
    print_pairs,
    print_traces,
    render_pair,
    render_trace,
    resolve_id,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from reflact.calibration.trace import Trace
    from reflact.memory.export import ImportResult
    from reflact.memory.models import ForgetResult, Label, StoredPair
    from reflact.memory.store import MemoryStore

T = TypeVar("T")

MAX_CONCURRENT_TRACES = 8
"""Traces that are imported at a time; concurrent writes share a transaction."""

StatusOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STATUS",
        help="Only this status: candidate, quarantined, promoted, rejected, archived. Repeatable.",
    ),
]

memory_app = typer.Typer(
    name="memory",
    help="Show and change what calibration has learned.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@memory_app.command("list")
def list_stored(  # noqa: PLR0917 - what the command line offers
    store: StoreArgument,
    words: Annotated[
        str, typer.Argument(metavar="WORDS", help="Only pairs with all these words.", show_default=False)
    ] = "",
    status: StatusOption = None,
    kind: Annotated[str, typer.Option(metavar="KIND", help="`pair`, `trace` or `anchor`.")] = "pair",
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Maximum number of pairs.")] = 50,
    json: JsonLinesOption = False,
) -> None:
    """List pairs, traces or anchors.

    The most useful pairs come first. Words of one or two characters do not count.
    """
    import anyio

    from reflact.errors import UsageError
    from reflact.memory.store import MemoryStore

    if kind not in {"pair", "trace", "anchor"}:
        raise UsageError(f"--kind {kind} is unknown; choose pair, trace or anchor")
    if kind != "pair" and (words or status):
        raise UsageError(f"--kind {kind} cannot be combined with words or --status; list it alone")
    if kind == "trace":
        print_traces(anyio.run(_read_all, store, MemoryStore.summaries), store, json=json)
    elif kind == "anchor":
        print_anchors(anyio.run(_read_all, store, MemoryStore.anchors), store, json=json)
    else:
        print_pairs(anyio.run(_find_pairs, store, words, status, limit), store, limit, json=json)


@memory_app.command()
def show(
    store: StoreArgument,
    name: Annotated[str, typer.Argument(metavar="ID", help="The id of a pair or trace, or its prefix.")],
    json: JsonLinesOption = False,
) -> None:
    """Show a pair or a trace in full.

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
    from reflact.text import escape_line

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

    from reflact.text import escape_line

    result = anyio.run(_forget_trace, store, trace, calls)
    if json:
        typer.echo(format_json_line(result))
        return
    if _removed_anything(result):
        typer.echo(
            f"forgot trace {escape_line(result.trace_id)}: {result.n_events} events, {len(result.pair_ids)} pairs, "
            f"{result.n_anchors} anchors"
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

    Tests and rejected or archived pairs are left out. To copy everything, copy the file itself.
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

    Stored entries stay as they are. Each new pair is scanned and quarantined, whatever its status was.
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
        f"new: {result.n_pairs} pairs, {result.n_traces} traces with {result.n_events} steps, "
        f"{result.n_anchors} anchors; {result.n_blocked} of the pairs need review or were rejected"
    )


# -------------------------------------------------------------------------------------------- reading


async def _find_pairs(path: Path, words: str, status: list[str] | None, limit: int) -> tuple[StoredPair, ...]:
    from typing import cast, get_args

    from reflact.errors import UsageError
    from reflact.memory.models import CardStatus

    known = get_args(CardStatus)
    wrong = [name for name in status or () if name not in known]
    if wrong:
        raise UsageError(f"unknown status {wrong[0]!r}; choose from {', '.join(known)}")
    async with open_existing(path) as store:
        return await store.find(words, statuses=cast("list[CardStatus]", status or []), limit=limit)


async def _read_all(path: Path, read: Callable[[MemoryStore], Awaitable[T]]) -> T:
    async with open_existing(path) as store:
        return await read(store)


async def _render_by_name(path: Path, name: str, json: bool) -> list[str]:
    from reflact.errors import UsageError

    async with open_existing(path) as store:
        pairs, traces = await store.find_pair_ids(name), await store.find_trace_ids(name)
        found = resolve_id(name, (*pairs, *traces), noun="pair or trace", store=path)
        if found in pairs:
            (stored,) = await store.pairs([found])
            history = await store.history(found)
            if json:
                return [format_json_line(stored), *map(format_json_line, history)]
            return [*render_pair(stored, history)]
        trace = await store.trace(found)
        summary = next((one for one in await store.summaries() if one.id == found), None)
    if trace is None or summary is None:
        raise UsageError(
            f"{path} has pairs of trace {found}, but not the trace itself; name one of the pairs"
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
    return result.trace_removed or bool(result.pair_ids) or result.n_anchors > 0


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
