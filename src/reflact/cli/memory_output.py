"""Shared parts of ``reflact memory``: the store argument, ids by prefix, tables and details."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reflact.calibration.trace import Trace
    from reflact.memory.models import (
        ContrastPair,
        ScoreEvent,
        StatusChange,
        StoredPair,
        StoredTrace,
        TraceSummary,
        Transition,
    )
    from reflact.memory.store import MemoryStore
    from reflact.types import FrozenModel

MIN_PREFIX_LENGTH = 4
"""The least number of characters of an id's prefix."""

MAX_LISTED_IDS = 10
"""The largest number of ids that a store returns for a prefix."""

MAX_CELL_CHARS = 60
"""The largest number of characters of a text in a table."""

MAX_CHANGE_TOKENS = 200
"""The largest number of tokens of a purpose, an action or a change; cuts are marked."""

COLUMN_GAP = "  "
"""The gap between two columns."""

StoreArgument = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="The memory's file, such as a run's run.db.", show_default=False),
]
NewStoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="The memory's file; created if missing.", show_default=False)
]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")]


def open_existing(path: Path, *, read_only: bool = True) -> MemoryStore:
    """Return the memory of an existing file, not opened yet; by default it changes nothing in the file.

    Raises:
        UsageError: There is no such file.
    """
    from reflact.errors import UsageError
    from reflact.memory.store import MemoryStore

    try:
        is_file = path.is_file()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if not is_file:
        raise UsageError(f"there is no memory at {path}; pass the path of its file")
    return MemoryStore(path, read_only=read_only)


def resolve_id(name: str, ids: Sequence[str], *, noun: str, store: Path) -> str:
    """Return the id that a name means: the name itself, or the only one of the ids, which start with it.

    Raises:
        UsageError: No id or several start with the name, or the name is too short for a prefix.
    """
    from reflact.errors import UsageError

    if name in ids:
        return name
    listed = f"list them with `reflact memory list {store}{' --kind trace' if noun == 'trace' else ''}`"
    if len(name) < MIN_PREFIX_LENGTH:
        raise UsageError(
            f"{store} has no {noun} {name!r}, and the prefix of an id needs at least {MIN_PREFIX_LENGTH} "
            f"characters; {listed}"
        )
    if not ids:
        raise UsageError(f"{store} has no {noun} that begins with {name!r}; {listed}")
    if len(ids) > 1:
        more = ", and perhaps more" if len(ids) >= MAX_LISTED_IDS else ""
        raise UsageError(f"several ids begin with {name!r}, so type more of one: {', '.join(ids)}{more}")
    return ids[0]


def format_json_line(value: FrozenModel) -> str:
    """Return a value as a line of JSON."""
    from reflact.memory.rows import encode_value

    return encode_value(value)


def format_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, right_aligned: Collection[int] = ()
) -> Iterator[str]:
    """Yield the lines of a table: the names of its columns, then one line for each row.

    Control characters are escaped. Columns fit their longest text; those with the indices ``right_aligned`` are
    aligned to the right. A terminal cuts lines at its width.
    """
    import shutil
    import sys

    from rich.cells import cell_len, set_cell_size

    from reflact.text import escape_line

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
    """Return a text on one line, cut to ``limit`` characters."""
    words = " ".join(text.split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def _print_table(
    values: Sequence[FrozenModel],
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right_aligned: Collection[int],
    json: bool,
    if_empty: str,
) -> None:
    """Print values as lines of JSON, or their rows as a table; say so on standard error if there are none."""
    if json:
        lines: Iterable[str] = map(format_json_line, values)
    else:
        lines = format_table(names, [*rows], right_aligned=right_aligned)
    for text in lines:
        typer.echo(text)
    if not values and not json:
        typer.echo(if_empty, err=True)


def print_traces(summaries: Sequence[TraceSummary], store: Path, *, json: bool) -> None:
    """Print traces as a table, or as lines of JSON."""
    rows = (
        (
            one.id,
            *map(str, (one.n_events, one.n_scored, one.n_labelled, one.n_pairs)),
            shorten(one.purpose, MAX_CELL_CHARS),
        )
        for one in summaries
    )
    names = ("trace", "steps", "scored", "labelled", "pairs", "purpose")
    hint = (
        f"{store} has no traces: a calibration with `traces: FOLDER` reads files from their folder; "
        f"`reflact memory import {store} FOLDER` imports them"
    )
    _print_table(summaries, names, rows, right_aligned=range(1, 5), json=json, if_empty=hint)


def print_anchors(anchors: Sequence[ContrastPair], store: Path, *, json: bool) -> None:
    """Print anchors as a table, or as lines of JSON."""
    rows = (
        (
            one.id[:12],
            one.provenance.trace_id or "",
            "" if one.provenance.step is None else str(one.provenance.step),
            f"{one.right.progress_after:g}",
            shorten(one.purpose, MAX_CELL_CHARS),
        )
        for one in anchors
    )
    names = ("anchor", "trace", "step", "progress after", "purpose")
    hint = f"{store} has no anchors: the key `anchors` of a calibration names a file of anchors"
    _print_table(anchors, names, rows, right_aligned={2, 3}, json=json, if_empty=hint)


def print_pairs(pairs: Sequence[StoredPair], store: Path, limit: int, *, json: bool) -> None:
    """Print pairs as a table, or as lines of JSON."""
    rows = (
        (
            stored.pair.id[:12],
            stored.pair.mistake,
            _describe_status(stored),
            f"{stored.utility:.2f}",
            shorten(stored.pair.reason, MAX_CELL_CHARS),
        )
        for stored in pairs
    )
    names = ("pair", "mistake", "status", "utility", "reason")
    hint = f"{store} has no matching pairs"
    _print_table(pairs, names, rows, right_aligned={3}, json=json, if_empty=hint)
    if not json and len(pairs) == limit:
        typer.echo(f"only the first {limit} pairs; --limit shows more", err=True)


def _describe_status(stored: StoredPair) -> str:
    return stored.status if stored.reason is None else f"{stored.status} ({stored.reason})"


def render_pair(stored: StoredPair, history: Sequence[StatusChange]) -> Iterator[str]:
    """Yield the lines of a pair: its facts, its transition, both evaluations in words, and its history."""
    from reflact.memory.cards import build_cards
    from reflact.text import escape_controls, escape_line

    pair = stored.pair
    yield f"pair {pair.id}"
    for field, value in _list_facts(stored):
        yield f"  {field}: {escape_line(value)}"
    yield f"  action: {escape_line(_show_action(pair.transition))}"
    yield from map(escape_line, _render_change(pair.transition))
    for card in build_cards(pair):
        yield f"{card.kind} ({escape_line(card.mistake)})"
        for text in (card.content, card.strategy):
            yield from (f"    {line}" for line in escape_controls(text).split("\n"))
    for change in history:
        reason = f" ({escape_line(change.reason)})" if change.reason else ""
        test = "" if change.test_number is None else f", test {change.test_number}"
        yield f"{change.at:%Y-%m-%d %H:%M:%S} {change.after}{reason}{test}"


def _list_facts(stored: StoredPair) -> list[tuple[str, str]]:
    origin = stored.pair.provenance
    scope = stored.pair.scope
    facts = {
        "purpose": stored.pair.purpose,
        "status": _describe_status(stored),
        "utility": f"{stored.utility:.2f}",
        "roles": ", ".join(scope.roles),
        "tools": ", ".join(scope.tools),
        "task categories": ", ".join(scope.task_categories),
        "user": scope.user,
        "trace": origin.trace_id,
        "step": None if origin.step is None else str(origin.step),
        "prompt": origin.prompt,
        "model": origin.model,
        "created by": stored.created_by,
    }
    return [(name, value) for name, value in facts.items() if value]


def render_trace(trace: StoredTrace, summary: TraceSummary) -> Iterator[str]:
    """Yield the lines of a trace, step by step."""
    from reflact.calibration.transition_view import truncate_to_tokens
    from reflact.text import escape_line

    yield f"trace {escape_line(trace.id)}"
    yield f"  purpose: {escape_line(truncate_to_tokens(trace.purpose, MAX_CHANGE_TOKENS))}"
    yield f"  steps: {summary.n_events}, {summary.n_scored} scored, {summary.n_labelled} labelled"
    yield f"  pairs: {summary.n_pairs}"
    for event in trace.events:
        yield ""
        for text in _render_event(event):
            yield escape_line(text)


def _render_event(event: ScoreEvent) -> Iterator[str]:
    evaluation, label = event.evaluation, event.label
    yield f"step {event.step}: {_show_action(event.transition)}"
    if evaluation is not None:
        change = f"{evaluation.progress_before:g} to {evaluation.progress_after:g}"
        yield f"  critic: {change}, confidence {evaluation.confidence:g}"
        yield f"    {' '.join(evaluation.reasoning.split())}"
    if label is not None:
        before = "" if label.progress_before is None else f"{label.progress_before:g} to "
        yield f"  label: {before}{label.progress_after:g}, from {label.source}"
    yield from _render_change(event.transition)


def _show_action(step: Transition) -> str:
    from reflact.calibration.transition_view import show_action, truncate_to_tokens

    return " ".join(truncate_to_tokens(show_action(step.action), MAX_CHANGE_TOKENS).split())


def _render_change(step: Transition) -> Iterator[str]:
    from reflact.calibration.transition_view import show_change, truncate_to_tokens

    change = truncate_to_tokens(show_change(step.before, step.after, shorten=True), MAX_CHANGE_TOKENS)
    yield from (f"  | {text}" for text in change.splitlines())


def print_incomplete_files(
    traces: Iterable[Trace], *, folders: Iterable[Path | None] = (), err: bool = False
) -> None:
    """Print which files of traces are incomplete, and how much of them was left out; name files that are no traces."""
    from reflact.text import escape_line

    for folder in folders:
        others = [] if folder is None else sorted(map(str, folder.rglob("*.json")))
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            typer.echo(
                f"left out {escape_line(others[0])}{more}: a trace is a .jsonl file that reflact wrote",
                err=err,
            )

    for trace in traces:
        if trace.n_lost_bytes:
            typer.echo(
                f"trace {escape_line(trace.id)}: left out {trace.n_lost_bytes} incomplete bytes of its file",
                err=err,
            )
