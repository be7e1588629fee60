"""What ``reflact memory`` prints: tables, and pairs and traces in full."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from reflact.calibration.trace import Trace
    from reflact.memory.models import (
        ContrastPair,
        ScoreEvent,
        StoredPair,
        StoredTrace,
        TraceSummary,
        Transition,
    )
    from reflact.types import FrozenModel

# The largest number of characters of a text in a table.
MAX_CELL_CHARS = 60

# The largest number of tokens of a purpose, an action or a change; cuts are marked.
MAX_CHANGE_TOKENS = 200


def print_values(values: Sequence[FrozenModel], lines: Iterable[str], *, json: bool) -> None:
    """Print values as lines of JSON, or else their lines of text."""
    from reflact.memory.pairs import encode_value

    for text in map(encode_value, values) if json else lines:
        typer.echo(text)


def format_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, right_aligned: Collection[int] = ()
) -> Iterator[str]:
    """Yield the lines of a table: the names of its columns, then one line for each row.

    Control characters are escaped. A terminal cuts lines at its width.
    """
    import shutil
    import sys

    from rich.cells import cell_len, set_cell_size

    from reflact.text import escape_line

    table = [[escape_line(text) for text in row] for row in (names, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    end = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in table:
        cells = []
        for number, (text, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(text))
            cells.append(space + text if number in right_aligned else text + space)
        line = "  ".join(cells).rstrip()
        yield line if end is None or cell_len(line) <= end else f"{set_cell_size(line, end - 1)}…"


def _shorten(text: str) -> str:
    """Return a text on one line, as long as a cell."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_CELL_CHARS else f"{line[: MAX_CELL_CHARS - 1]}…"


def print_traces(summaries: Sequence[TraceSummary], store: Path, *, json: bool) -> None:
    """Print traces as a table, or as lines of JSON."""
    names = ("trace", "steps", "scored", "labelled", "pairs", "purpose")
    rows = []
    for one in summaries:
        counts = map(str, (one.n_events, one.n_scored, one.n_labelled, one.n_pairs))
        rows.append((one.id, *counts, _shorten(one.purpose)))
    print_values(summaries, format_table(names, rows, right_aligned=range(1, 5)), json=json)
    if not summaries:
        typer.echo(
            f"{store} has no traces: `reflact memory import {store} FOLDER` imports them", err=True
        )


def print_anchors(anchors: Sequence[ContrastPair], store: Path, *, json: bool) -> None:
    """Print anchors as a table, or as lines of JSON."""
    names = ("anchor", "trace", "step", "progress after", "purpose")
    rows = []
    for one in anchors:
        origin = one.provenance
        step = "" if origin.step is None else str(origin.step)
        after = f"{one.right.progress_after:g}"
        rows.append((one.id[:12], origin.trace_id or "", step, after, _shorten(one.purpose)))
    print_values(anchors, format_table(names, rows, right_aligned={2, 3}), json=json)
    if not anchors:
        typer.echo(
            f"{store} has no anchors: the key `anchors` of a calibration names a file", err=True
        )


def print_pairs(pairs: Sequence[StoredPair], store: Path, limit: int, *, json: bool) -> None:
    """Print pairs as a table, or as lines of JSON."""
    names = ("pair", "mistake", "status", "utility", "reason")
    rows = []
    for one in pairs:
        status = _describe_status(one)
        utility = f"{one.utility:.2f}"
        rows.append(
            (one.pair.id[:12], one.pair.mistake, status, utility, _shorten(one.pair.reason))
        )
    print_values(pairs, format_table(names, rows, right_aligned={3}), json=json)
    if not pairs:
        typer.echo(f"{store} has no matching pairs", err=True)
    elif len(pairs) == limit and not json:
        typer.echo(f"only the first {limit} pairs; --limit shows more", err=True)


def _describe_status(stored: StoredPair) -> str:
    return stored.status if stored.reason is None else f"{stored.status} ({stored.reason})"


def render_pair(stored: StoredPair) -> Iterator[str]:
    """Yield the lines of a pair: its facts, its transition, and both evaluations in words."""
    from reflact.memory.cards import build_cards
    from reflact.text import escape_controls, escape_line

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
        "created by": stored.created_by,
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
    from reflact.calibration.transition_view import show_change, truncate_to_tokens

    change = truncate_to_tokens(
        show_change(step.before, step.after, shorten=True), MAX_CHANGE_TOKENS
    )
    yield from (f"  | {text}" for text in change.splitlines())


def print_incomplete_files(
    traces: Iterable[Trace], *, folders: Iterable[Path | None] = (), err: bool = False
) -> None:
    """Print which files of traces are incomplete, and which files of the folders are no traces."""
    from reflact.text import escape_line

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
