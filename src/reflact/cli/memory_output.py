"""What the commands of ``reflact memory`` share: the file, ids by their beginnings, what is printed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reflact.calibration.trace import Trace
    from reflact.memory.models import ContrastPair, MemoryCard, ScoreEvent
    from reflact.memory.protocols import StatusChange, StoredTrace, TraceSummary
    from reflact.memory.store import MemoryStore
    from reflact.types import FrozenModel

MIN_PREFIX_LENGTH = 4
"""Characters that the beginning of an id needs at least."""

MAX_LISTED_IDS = 10
"""Ids that a store names at most where several begin as asked for."""

MAX_CELL_CHARS = 60
"""Characters of a card or a purpose in a table."""

MAX_CHANGE_TOKENS = 200
"""Room for a purpose, an action, and what a step changed, each; what is cut is marked."""

COLUMN_GAP = "  "
"""What stands between two columns."""

StoreArgument = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="The memory's file, such as a run's run.db.", show_default=False),
]
NewStoreArgument = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="The memory's file; made where missing.", show_default=False),
]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")]


def open_existing(path: Path, *, read_only: bool = True) -> MemoryStore:
    """Return the memory of a file, to be opened; what only reads changes nothing in it, its schema neither.

    Raises:
        UsageError: There is no such file.
    """
    from reflact.errors import UsageError
    from reflact.memory.store import MemoryStore

    if not path.is_file():
        raise UsageError(f"there is no memory at {path}; name its file")
    return MemoryStore(path, read_only=read_only)


def resolve_id(name: str, ids: Sequence[str], *, noun: str, store: Path) -> str:
    """Return the one id that a name stands for: the name itself, or the only id that begins so.

    Args:
        name: What was asked for.
        ids: Ids that begin so.
        noun: What the ids name, in the singular.
        store: Where they were looked for.

    Raises:
        UsageError: None begins so, several do, or the name is too short to stand for a longer id.
    """
    from reflact.errors import UsageError

    if name in ids:
        return name
    listed = f"list them with `reflact memory list {store}{' --kind trace' if noun == 'trace' else ''}`"
    if len(name) < MIN_PREFIX_LENGTH:
        raise UsageError(
            f"no {noun} in {store} is called {name!r}, and the beginning of an id needs at least {MIN_PREFIX_LENGTH} "
            f"characters; {listed}"
        )
    if not ids:
        raise UsageError(f"no {noun} in {store} begins with {name!r}; {listed}")
    if len(ids) > 1:
        more = ", and perhaps more" if len(ids) >= MAX_LISTED_IDS else ""
        raise UsageError(f"{name!r} begins several ids, give more of one: {', '.join(ids)}{more}")
    return ids[0]


def format_json_line(value: FrozenModel) -> str:
    """Return a value as a line of JSON."""
    from reflact.memory.encoding import encode_value

    return encode_value(value)


def format_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, right_aligned: Collection[int] = ()
) -> Iterator[str]:
    """Yield a table's lines: the names of its columns, then one line for each row, whatever is in it.

    What cannot be seen is written out. Columns are as wide as what stands in them, at a terminal the last one
    ends where that does; elsewhere nothing is cut.

    Args:
        names: The columns.
        rows: A text for each column.
        right_aligned: Numbers of columns that stand at their right edge.
    """
    import shutil
    import sys

    from rich.cells import cell_len, set_cell_size

    from reflact.reporting.lines import escape_line

    table = [[escape_line(text) for text in row] for row in (names, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    end = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in table:
        cells = (
            " " * (width - cell_len(text)) + text
            if number in right_aligned
            else text + " " * (width - cell_len(text))
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        whole = COLUMN_GAP.join(cells).rstrip()
        yield whole if end is None or cell_len(whole) <= end else f"{set_cell_size(whole, end - 1)}…"


def shorten(text: str, limit: int) -> str:
    """Return a text on one line, cut where it is longer than so many characters."""
    words = " ".join(text.split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def print_traces(summaries: Sequence[TraceSummary], store: Path, *, json: bool) -> None:
    """Print traces as a table, or as lines of JSON."""
    if json:
        for one in summaries:
            typer.echo(format_json_line(one))
        return
    rows = [
        (
            one.id,
            *map(str, (one.n_events, one.n_scored, one.n_labelled, one.n_pairs)),
            shorten(one.purpose, MAX_CELL_CHARS),
        )
        for one in summaries
    ]
    names = ("trace", "steps", "scored", "gold", "pairs", "purpose")
    for text in format_table(names, rows, right_aligned=range(1, 5)):
        typer.echo(text)
    if not summaries:
        typer.echo(
            f"{store} keeps no trace: a calibration with `traces: FOLDER` reads its files in their folder; "
            f"`reflact memory import {store} FOLDER` puts them in",
            err=True,
        )


def print_anchors(anchors: Sequence[ContrastPair], store: Path, *, json: bool) -> None:
    """Print anchors as a table, or as lines of JSON."""
    if json:
        for one in anchors:
            typer.echo(format_json_line(one))
        return
    rows = [
        (
            one.id[:12],
            one.provenance.trace_id or "",
            "" if one.provenance.step is None else str(one.provenance.step),
            f"{one.right.progress_after:g}",
            shorten(one.purpose, MAX_CELL_CHARS),
        )
        for one in anchors
    ]
    for text in format_table(("anchor", "trace", "step", "phi after", "purpose"), rows, right_aligned={2, 3}):
        typer.echo(text)
    if not anchors:
        typer.echo(
            f"{store} holds no anchors: the key `anchors` of a calibration names a file of them", err=True
        )


def print_cards(cards: Sequence[MemoryCard], store: Path, limit: int, *, json: bool) -> None:
    """Print cards as a table, or as lines of JSON."""
    if json:
        for card in cards:
            typer.echo(format_json_line(card))
        return
    rows = [
        (
            card.id[:12],
            card.kind,
            card.status if card.reason is None else f"{card.status} ({card.reason})",
            f"{card.utility:.2f}",
            shorten(card.strategy or card.content, MAX_CELL_CHARS),
        )
        for card in cards
    ]
    for text in format_table(("card", "kind", "status", "utility", "says"), rows, right_aligned={3}):
        typer.echo(text)
    if not cards:
        typer.echo(f"{store} holds no card that was asked for", err=True)
    elif len(cards) == limit:
        typer.echo(f"the first {limit} cards; --limit shows more, where there are any", err=True)


def render_unit(cards: Sequence[MemoryCard], history: Sequence[StatusChange]) -> Iterator[str]:
    """Yield the lines that show a unit with its history."""
    from reflact.reporting.lines import escape_controls, escape_line

    for card in cards:
        yield f"{card.kind} {escape_line(card.id)}"
        for field, value in _list_facts(card):
            yield f"  {field}: {escape_line(value)}"
        for text in filter(None, (card.content, card.pattern, card.strategy)):
            yield "\n" + "\n".join(f"    {one}" for one in escape_controls(text).split("\n"))
        yield ""
    for change in history:
        why = f" ({escape_line(change.reason)})" if change.reason else ""
        test = "" if change.test_number is None else f", test {change.test_number}"
        yield f"{change.at:%Y-%m-%d %H:%M:%S} version {change.version}: {change.after}{why}{test}"


def _list_facts(card: MemoryCard) -> list[tuple[str, str]]:
    origin = card.provenance
    facts = {
        "pair": card.pair_id,
        "status": card.status if card.reason is None else f"{card.status} ({card.reason})",
        "trust, utility": f"{card.trust:.2f}, {card.utility:.2f}",
        "version": str(card.version),
        "roles": ", ".join(card.scope.roles),
        "tools": ", ".join(card.scope.tools),
        "task categories": ", ".join(card.scope.task_categories),
        "user": card.scope.user,
        "trace": origin.trace_id,
        "step": None if origin.step is None else str(origin.step),
        "prompt": origin.prompt,
        "model": origin.model,
        "made by": card.created_by,
    }
    return [(name, value) for name, value in facts.items() if value]


def render_trace(trace: StoredTrace, summary: TraceSummary) -> Iterator[str]:
    """Yield the lines that show a trace step by step."""
    from reflact.calibration.rendering import truncate_to_tokens
    from reflact.reporting.lines import escape_line

    yield f"trace {escape_line(trace.id)}"
    yield f"  purpose: {escape_line(truncate_to_tokens(trace.purpose, MAX_CHANGE_TOKENS))}"
    yield f"  steps: {summary.n_events}, {summary.n_scored} scored, {summary.n_labelled} with gold"
    yield f"  pairs made of it: {summary.n_pairs}"
    for event in trace.events:
        yield ""
        for text in _render_event(event):
            yield escape_line(text)


def _render_event(event: ScoreEvent) -> Iterator[str]:
    from reflact.calibration.rendering import show_action, truncate_to_tokens
    from reflact.calibration.state_diff import show_change

    step, said, gold = event.transition, event.evaluation, event.label
    yield f"step {event.step}: {' '.join(truncate_to_tokens(show_action(step.action), MAX_CHANGE_TOKENS).split())}"
    if said is not None:
        yield f"  critic: {said.progress_before:g} to {said.progress_after:g}, confidence {said.confidence:g}"
        yield f"    {' '.join(said.reasoning.split())}"
    if gold is not None:
        before = "" if gold.progress_before is None else f"{gold.progress_before:g} to "
        yield f"  gold: {before}{gold.progress_after:g}, from {gold.source}"
    for text in truncate_to_tokens(
        show_change(step.before, step.after, shorten=True), MAX_CHANGE_TOKENS
    ).splitlines():
        yield f"  | {text}"


def print_incomplete_files(traces: Iterable[Trace], *, err: bool = False) -> None:
    """Print which files of traces are not whole, and what of them was left out."""
    from reflact.reporting.lines import escape_line

    for trace in traces:
        if trace.n_lost_bytes:
            typer.echo(
                f"trace {escape_line(trace.id)}: {trace.n_lost_bytes} bytes of its file are not whole, left out",
                err=err,
            )
