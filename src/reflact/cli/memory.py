"""``reflact memory``: list, show, label, forget, export and import a memory's content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import anyio
import typer

from reflact.errors import DataError, UsageError
from reflact.text import escape_controls, escape_line, shorten, suggest_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from reflact.calibration.trace import Trace
    from reflact.memory.export import ImportResult
    from reflact.memory.models import (
        ForgetResult,
        ScoreEvent,
        StoredPair,
        StoredTrace,
        TraceSummary,
        Transition,
    )
    from reflact.memory.store import MemoryStore
    from reflact.types import FrozenModel

T = TypeVar("T")

# The least number of characters of an id's prefix; shorter ones soon mean several ids.
MIN_PREFIX_LENGTH = 4

# The most ids that an ambiguous prefix lists.
MAX_LISTED_IDS = 10

# Traces that are imported at a time; concurrent writes share a transaction.
MAX_CONCURRENT_TRACES = 8

# The largest number of characters of a text in a table.
MAX_CELL_CHARS = 60

# The largest number of tokens of a purpose, an action or a change; cuts are marked.
MAX_CHANGE_TOKENS = 200

StoreArgument = Annotated[
    Path,
    typer.Argument(
        metavar="STORE", help="The memory's file, such as a run's run.db.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of text.")]

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
    status: Annotated[
        Literal["quarantined", "promoted", "rejected", "archived"] | None,
        typer.Option(
            metavar="STATUS",
            help="Only this status: quarantined, promoted, rejected or archived.",
        ),
    ] = None,
    kind: Annotated[
        Literal["pair", "trace"], typer.Option(metavar="KIND", help="`pair` or `trace`.")
    ] = "pair",
    limit: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Maximum number of pairs.")
    ] = 50,
    name: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Show one pair or trace in full. The beginning of its id is enough.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List pairs or traces, or show one in full.

    The most useful pairs come first. A trace is shown step by step: the action, the change, the
    critic's evaluation and the label.
    """
    from reflact.memory.store import MemoryStore

    if name is not None:
        if words or status:
            raise UsageError("--id cannot be combined with words or --status; leave them out")
        _show_stored(store, name, json=json)
        return
    if kind == "trace" and (words or status):
        raise UsageError("--kind trace cannot be combined with words or --status; list it alone")
    values: Sequence[FrozenModel]
    columns: tuple[str, ...]
    if kind == "trace":
        values = summaries = _use_store(store, MemoryStore.summaries)
        rows = list(map(_build_trace_row, summaries))
        columns = ("trace", "steps", "scored", "labelled", "pairs", "purpose")
    else:
        values = pairs = _use_store(
            store, lambda memory: memory.find(words, status=status, limit=limit)
        )
        rows = list(map(_build_pair_row, pairs))
        columns = ("pair", "mistake", "status", "utility", "reason")
    print_values(values, format_table((columns, *rows)), json=json)
    if not values:
        typer.echo(f"{store} has no matching {kind}s", err=True)
    elif kind == "pair" and len(values) == limit and not json:
        typer.echo(f"only the first {limit} pairs; --limit shows more", err=True)


def _show_stored(store: Path, name: str, *, json: bool) -> None:
    """Show a pair or a trace in full, by its id or the beginning of it."""

    async def read(memory: MemoryStore) -> StoredPair | StoredTrace | None:
        pairs = {stored.pair.id: stored for stored in await memory.pairs()}
        found = _resolve_id(name, (*pairs, *await memory.trace_ids()), "pair or trace", store)
        return pairs.get(found) or await memory.trace(found)

    from reflact.memory.models import StoredPair

    value = _use_store(store, read)
    assert value is not None
    lines = render_pair(value) if isinstance(value, StoredPair) else render_trace(value)
    print_values([value], lines, json=json)


@memory_app.command()
def label(
    store: StoreArgument,
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="The id of a trace, or its prefix.", show_default=False
        ),
    ],
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
) -> None:
    """Label the progress of a step.

    0 means no progress towards the trace's purpose, 10 means that it is complete. Labels of a
    person or a program stay unless you pass --replace.
    """
    from reflact.memory.models import Label

    human = Label(progress_before=before, progress_after=after, source="human", reasoning=reason)

    async def label_step(memory: MemoryStore) -> str:
        trace_id = _resolve_id(trace, await memory.trace_ids(), "trace", store)
        await memory.label(trace_id, step, human, replace=replace)
        return trace_id

    trace_id = _use_store(store, label_step, read_only=False)
    typer.echo(f"labelled step {step} of trace {escape_line(trace_id)}")


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
    result = _use_store(store, lambda memory: memory.forget(trace, calls=calls), read_only=False)
    removed = result.trace_removed or result.pair_ids or result.n_anchors
    if not (calls or removed or result.remains_in_wal):
        raise UsageError(
            f"nothing in {store} came from a trace {trace!r}, and forget needs a complete id; list "
            f"traces with `reflact memory list {store} --kind trace`"
        )
    print_values([result], _describe_removal(result, store, calls), json=json)


def _describe_removal(result: ForgetResult, store: Path, calls: bool) -> Iterator[str]:
    yield (
        f"forgot trace {escape_line(result.trace_id)}: {result.n_events} events, "
        f"{len(result.pair_ids)} pairs, {result.n_anchors} anchors"
    )
    if calls:
        yield f"removed {result.n_responses} cached replies to questions of calibrations"
    elif result.n_responses_left:
        yield (
            f"{result.n_responses_left} cached replies to questions of calibrations may quote it; "
            "--calls removes them all, and later calibrations ask these questions again"
        )
    if result.remains_in_wal:
        yield (
            f"{store.name}-wal still contains removed data, because another process reads the "
            "memory; end that process and run this command again"
        )


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

    async def export(memory: MemoryStore) -> None:
        if target is None:
            async for text in memory.export_lines():
                typer.echo(text)
            return
        n_lines = 0
        with target.open("w", encoding="ascii") as file:
            async for text in memory.export_lines():
                file.write(f"{text}\n")
                n_lines += 1
        typer.echo(f"wrote {n_lines:,} lines to {target}")

    _use_store(store, export)


@memory_app.command("import")
def import_store(
    store: Annotated[
        Path,
        typer.Argument(
            metavar="STORE", help="The memory's file; created if missing.", show_default=False
        ),
    ],
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

    if source.is_dir():
        return Trace.load_all(source), []
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}{suggest_path(source)}") from None
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
    """Open the memory of an existing file, by default unchanged, and return the result of work."""
    from reflact.memory.store import MemoryStore

    async def run() -> T:
        async with MemoryStore(path, read_only=read_only) as memory:
            return await work(memory)

    if not path.is_file():
        advice = suggest_path(path) or "; pass the path of its file"
        raise UsageError(f"there is no memory at {path}{advice}")
    return anyio.run(run)


def _resolve_id(name: str, ids: Sequence[str], noun: str, store: Path) -> str:
    """Return the id that a name means: the name itself, or the only id that starts with it."""
    if name in ids:
        return name
    matching = sorted(one for one in ids if one.startswith(name))
    if not matching or len(name) < MIN_PREFIX_LENGTH:
        raise UsageError(
            f"{store} has no {noun} {name!r}, and a prefix of an id needs at least "
            f"{MIN_PREFIX_LENGTH} characters; list them with `reflact memory list {store}`, traces "
            "with `--kind trace`"
        )
    if len(matching) > 1:
        listed = ", ".join(matching[:MAX_LISTED_IDS])
        raise UsageError(f"several ids begin with {name!r}, so type more of one: {listed}")
    return matching[0]


# --------------------------------------------------------------------------------------- the output


def print_values(values: Sequence[FrozenModel], lines: Iterable[str], *, json: bool) -> None:
    """Print values as lines of JSON, or else their lines of text."""
    from reflact.memory.rows import encode_value

    for text in map(encode_value, values) if json else lines:
        typer.echo(text)


def format_table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose first row names its columns; controls are escaped."""
    from rich.cells import cell_len

    table = [[escape_line(text) for text in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _shorten(text: str) -> str:
    return shorten(" ".join(text.split()), MAX_CELL_CHARS)


def _build_trace_row(one: TraceSummary) -> tuple[str, ...]:
    counts = map(str, (one.n_events, one.n_scored, one.n_labelled, one.n_pairs))
    return (one.id, *counts, _shorten(one.purpose))


def _build_pair_row(one: StoredPair) -> tuple[str, ...]:
    pair = one.pair
    return (
        pair.id[:12],
        pair.mistake,
        _describe_status(one),
        f"{one.utility:.2f}",
        _shorten(pair.reason),
    )


def _describe_status(stored: StoredPair) -> str:
    return stored.status if stored.reason is None else f"{stored.status} ({stored.reason})"


def render_pair(stored: StoredPair) -> Iterator[str]:
    """Yield the lines of a pair: its facts, its transition, and both evaluations in words."""
    from reflact.memory.cards import build_cards

    pair = stored.pair
    origin = pair.provenance
    scope = [*pair.scope.roles, *pair.scope.tools, *pair.scope.task_categories, pair.scope.user]
    facts = {
        "purpose": pair.purpose,
        "status": f"{_describe_status(stored)}, since {stored.changed_at:%Y-%m-%d %H:%M:%S}",
        "utility": f"{stored.utility:.2f}",
        "scope": ", ".join(filter(None, scope)),
        "trace": "" if origin.trace_id is None else f"{origin.trace_id}, step {origin.step}",
        "prompt": ", ".join(filter(None, (origin.prompt, origin.model))),
        "action": _show_action(pair.transition),
    }
    yield f"pair {pair.id}"
    for field, value in facts.items():
        if value:
            yield f"  {field}: {escape_line(value)}"
    yield from map(escape_line, _render_change(pair.transition))
    for card in build_cards(pair):
        yield f"{card.kind} ({escape_line(card.mistake)})"
        for text in (card.content, card.strategy):
            yield from (f"    {line}" for line in escape_controls(text).split("\n"))


def render_trace(trace: StoredTrace) -> Iterator[str]:
    """Yield the lines of a trace, step by step."""
    from reflact.calibration.transition_view import truncate_to_tokens

    yield f"trace {escape_line(trace.id)}"
    yield f"  purpose: {escape_line(truncate_to_tokens(trace.purpose, MAX_CHANGE_TOKENS))}"
    yield f"  steps: {len(trace.events)}"
    for event in trace.events:
        yield ""
        yield from map(escape_line, _render_event(event))


def _render_event(event: ScoreEvent) -> Iterator[str]:
    yield f"step {event.step}: {_show_action(event.transition)}"
    evaluation = event.evaluation
    if evaluation is not None:
        change = f"{evaluation.progress_before:g} to {evaluation.progress_after:g}"
        yield f"  critic: {change}, confidence {evaluation.confidence:g}"
        yield f"    {' '.join(evaluation.reasoning.split())}"
    label = event.label
    if label is not None:
        before = "" if label.progress_before is None else f"{label.progress_before:g} to "
        yield f"  label: {before}{label.progress_after:g}, from {label.source}"
    yield from _render_change(event.transition)


def _show_action(step: Transition) -> str:
    from reflact.calibration.transition_view import show_action, truncate_to_tokens

    return " ".join(truncate_to_tokens(show_action(step.action), MAX_CHANGE_TOKENS).split())


def _render_change(step: Transition) -> Iterator[str]:
    from reflact.calibration.transition_view import TransitionView, truncate_to_tokens

    change = TransitionView(step).short_change_text
    for line in truncate_to_tokens(change, MAX_CHANGE_TOKENS).splitlines():
        yield f"  | {line}"


def print_incomplete_files(
    traces: Iterable[Trace], *, folders: Iterable[Path | None] = (), err: bool = False
) -> None:
    """Print which files of traces are incomplete, and which files of the folders are no traces."""
    for folder in folders:
        others = [] if folder is None else sorted(map(str, folder.rglob("*.json")))
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            reason = "a trace is a .jsonl file that reflact wrote"
            typer.echo(f"left out {escape_line(others[0])}{more}: {reason}", err=err)
    for trace in traces:
        if trace.n_lost_bytes:
            lost = f"left out {trace.n_lost_bytes} incomplete bytes of its file"
            typer.echo(f"trace {escape_line(trace.id)}: {lost}", err=err)
