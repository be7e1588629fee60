"""``reflact memory``: list, show, label, forget, export and import a memory's content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from reflact.cli.memory_output import (
    print_anchors,
    print_incomplete_files,
    print_pairs,
    print_traces,
    print_values,
    render_pair,
    render_trace,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from reflact.calibration.trace import Trace
    from reflact.memory.export import ImportResult
    from reflact.memory.models import ForgetResult, TraceSummary
    from reflact.memory.store import MemoryStore

T = TypeVar("T")

# The least number of characters of an id's prefix; shorter ones soon mean several ids.
MIN_PREFIX_LENGTH = 4

# Traces that are imported at a time; concurrent writes share a transaction.
MAX_CONCURRENT_TRACES = 8

StoreArgument = Annotated[
    Path,
    typer.Argument(
        metavar="STORE", help="The memory's file, such as a run's run.db.", show_default=False
    ),
]
NewStoreArgument = Annotated[
    Path,
    typer.Argument(
        metavar="STORE", help="The memory's file; created if missing.", show_default=False
    ),
]
TraceArgument = Annotated[
    str,
    typer.Argument(metavar="TRACE", help="The id of a trace, or its prefix.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of text.")]
StatusOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STATUS",
        help="Only this status: quarantined, promoted, rejected, archived. Repeatable.",
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
        str,
        typer.Argument(
            metavar="WORDS", help="Only pairs with all these words.", show_default=False
        ),
    ] = "",
    status: StatusOption = None,
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="`pair`, `trace` or `anchor`.")
    ] = "pair",
    limit: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Maximum number of pairs.")
    ] = 50,
    json: JsonOption = False,
) -> None:
    """List pairs, traces or anchors.

    The most useful pairs come first. Words of one or two characters do not count.
    """
    from typing import get_args

    from reflact.errors import UsageError
    from reflact.memory.models import CardStatus
    from reflact.memory.store import MemoryStore

    statuses: Any = status or []
    for name in statuses:
        if name not in get_args(CardStatus):
            raise UsageError(
                f"unknown status {name!r}; choose from {', '.join(get_args(CardStatus))}"
            )
    if kind not in {"pair", "trace", "anchor"}:
        raise UsageError(f"--kind {kind} is unknown; choose pair, trace or anchor")
    if kind != "pair" and (words or statuses):
        raise UsageError(f"--kind {kind} cannot be combined with words or --status; list it alone")
    if kind == "trace":
        print_traces(_use_store(store, MemoryStore.summaries), store, json=json)
    elif kind == "anchor":
        print_anchors(_use_store(store, MemoryStore.anchors), store, json=json)
    else:
        pairs = _use_store(store, lambda memory: memory.find(words, statuses=statuses, limit=limit))
        print_pairs(pairs, store, limit, json=json)


@memory_app.command()
def show(
    store: StoreArgument,
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a pair or trace, or its prefix.")
    ],
    json: JsonOption = False,
) -> None:
    """Show a pair or a trace in full.

    A trace is shown step by step: the action, the change, the critic's evaluation and the label.
    """
    from reflact.errors import UsageError

    async def render(memory: MemoryStore) -> None:
        pair_ids = await memory.find_pair_ids(name)
        found = _resolve_id(
            name, (*pair_ids, *await memory.find_trace_ids(name)), "pair or trace", store
        )
        if found in pair_ids:
            (stored,) = await memory.pairs([found])
            print_values([stored], render_pair(stored), json=json)
            return
        trace = await memory.trace(found)
        if trace is None:
            raise UsageError(
                f"{store} has pairs of trace {found}, but not the trace itself; name a pair"
            )
        summary = await _find_summary(memory, found)
        print_values([trace], render_trace(trace, summary), json=json)

    _use_store(store, render)


@memory_app.command()
def label(
    store: StoreArgument,
    trace: TraceArgument,
    step: Annotated[
        int,
        typer.Argument(
            metavar="STEP", min=0, help="The number of the step, from 0.", show_default=False
        ),
    ],
    *,
    after: Annotated[
        float,
        typer.Option(
            metavar="N",
            min=0,
            max=10,
            help="The progress of the state after the step.",
            show_default=False,
        ),
    ],
    before: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, max=10, help="The progress of the state before the step, if known."
        ),
    ] = None,
    reason: Annotated[str, typer.Option(metavar="WORDS", help="The reason for the label.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a label of a person or a program.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Label the progress of a step.

    0 means no progress towards the trace's purpose, 10 means that it is complete. Labels of a
    person or a program stay unless you pass --replace.
    """
    from reflact.memory.models import Label
    from reflact.text import escape_line

    human = Label(progress_before=before, progress_after=after, source="human", reasoning=reason)

    async def label_step(memory: MemoryStore) -> TraceSummary:
        trace_id = _resolve_id(trace, await memory.find_trace_ids(trace), "trace", store)
        await memory.label(trace_id, step, human, replace=replace)
        return await _find_summary(memory, trace_id)

    summary = _use_store(store, label_step, read_only=False)
    text = (
        f"labelled step {step} of trace {escape_line(summary.id)}; {summary.n_labelled} of its "
        f"{summary.n_events} steps are labelled"
    )
    print_values([summary], [text], json=json)


@memory_app.command()
def forget(
    store: StoreArgument,
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="The complete id of a trace.", show_default=False)
    ],
    calls: Annotated[
        bool,
        typer.Option(
            "--calls", help="Also remove all cached model replies to calibrations, of any trace."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove everything that came from a trace.

    The command prints the number of removed entries. It cannot be undone.
    """
    from reflact.errors import UsageError

    async def forget_trace(memory: MemoryStore) -> ForgetResult:
        names = await memory.find_trace_ids(trace)
        if names and trace not in names and not calls:
            raise UsageError(
                f"{store} has no trace {trace!r}, and forget needs a complete id; "
                f"these ids begin with it: {', '.join(names)}"
            )
        return await memory.forget(trace, calls=calls)

    result = _use_store(store, forget_trace, read_only=False)
    removed = result.trace_removed or result.pair_ids or result.n_anchors
    if not (calls or removed or result.remains_in_wal):
        raise UsageError(
            f"nothing in {store} came from a trace {trace!r}; list traces with "
            f"`reflact memory list {store} --kind trace`"
        )
    print_values([result], _describe_removal(result, store, calls), json=json)


def _describe_removal(result: ForgetResult, store: Path, calls: bool) -> list[str]:
    from reflact.text import escape_line

    lines = [
        f"forgot trace {escape_line(result.trace_id)}: {result.n_events} events, "
        f"{len(result.pair_ids)} pairs, {result.n_anchors} anchors"
    ]
    if calls:
        lines.append(f"removed {result.n_responses} cached replies to questions of calibrations")
    elif result.n_responses_left:
        lines.append(
            f"{result.n_responses_left} cached replies to questions of calibrations may quote it; "
            "--calls removes them all, and later calibrations ask these questions again"
        )
    if result.remains_in_wal:
        lines.append(
            f"{store.name}-wal still contains removed data, because another process reads the "
            "memory; end that process and run this command again"
        )
    return lines


@memory_app.command("export")
def export_store(
    store: StoreArgument,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The file to write; standard output if omitted.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a memory as JSON lines.

    Tests and rejected or archived pairs are left out. To copy everything, copy the file itself.
    """
    from reflact.errors import UsageError

    async def export(memory: MemoryStore) -> int:
        if target is None:
            async for text in memory.export_lines():
                typer.echo(text)
            return 0
        lines = 0
        try:
            with target.open("w", encoding="ascii") as file:
                async for text in memory.export_lines():
                    file.write(f"{text}\n")
                    lines += 1
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror or error}") from None
        return lines

    lines = _use_store(store, export)
    if target is not None:
        typer.echo(f"wrote {lines:,} lines to {target}")


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
    json: JsonOption = False,
) -> None:
    """Import an export or traces.

    Stored entries stay as they are. Each new pair is scanned and quarantined, whatever its status
    was.
    """
    import anyio

    from reflact.errors import DataError

    traces, lines = _read_source(source)
    print_incomplete_files(traces, folders=[source if source.is_dir() else None], err=json)
    try:
        result = anyio.run(_import_source, store, traces, lines)
    except DataError as error:
        raise error if traces else DataError(f"{source}: {error}; nothing was imported") from None
    text = (
        f"new: {result.n_pairs} pairs, {result.n_traces} traces with {result.n_events} steps, "
        f"{result.n_anchors} anchors; {result.n_blocked} of the pairs need review or were rejected"
    )
    print_values([result], [text], json=json)


def _read_source(source: Path) -> tuple[tuple[Trace, ...], list[str]]:
    """Return the traces of a source, or the lines of an export."""
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
    if isinstance(first, dict) and "type" in first:
        return (), lines
    return (Trace.load(source),), []


async def _import_source(path: Path, traces: Sequence[Trace], lines: list[str]) -> ImportResult:
    from reflact.concurrency import fan_out
    from reflact.memory.export import ImportResult
    from reflact.memory.store import MemoryStore

    async with MemoryStore(path) as memory:
        if not traces:
            return await memory.import_lines(lines)
        known = set(await memory.trace_ids())
        counts = await fan_out(
            lambda trace: trace.save_to(memory), traces, limit=MAX_CONCURRENT_TRACES
        )
        new = sum(trace.id not in known for trace in traces)
        return ImportResult(n_traces=new, n_events=sum(counts))


# ---------------------------------------------------------------------------------------- the store


def _use_store(
    path: Path, work: Callable[[MemoryStore], Awaitable[T]], *, read_only: bool = True
) -> T:
    """Open the memory of an existing file, by default unchanged, and return the result of some
    work.
    """
    import anyio

    from reflact.errors import UsageError
    from reflact.memory.store import MemoryStore

    async def run() -> T:
        async with MemoryStore(path, read_only=read_only) as memory:
            return await work(memory)

    try:
        is_file = path.is_file()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if not is_file:
        raise UsageError(f"there is no memory at {path}; pass the path of its file")
    return anyio.run(run)


def _resolve_id(name: str, ids: Sequence[str], noun: str, store: Path) -> str:
    """Return the id that a name means: the name itself, or the only id that starts with it."""
    from reflact.errors import UsageError

    if name in ids:
        return name
    if len(ids) > 1 and len(name) >= MIN_PREFIX_LENGTH:
        raise UsageError(f"several ids begin with {name!r}, so type more of one: {', '.join(ids)}")
    if not ids or len(name) < MIN_PREFIX_LENGTH:
        raise UsageError(
            f"{store} has no {noun} {name!r}, and a prefix of an id needs at least "
            f"{MIN_PREFIX_LENGTH} characters; list them with `reflact memory list {store}`, traces "
            "with `--kind trace`"
        )
    return ids[0]


async def _find_summary(memory: MemoryStore, trace_id: str) -> TraceSummary:
    return next(one for one in await memory.summaries() if one.id == trace_id)
