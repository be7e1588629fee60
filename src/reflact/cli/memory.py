"""``reflact memory``: what a memory holds, read, searched, forgotten, taken out and brought in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reflact.cli.anchors import list_anchors
from reflact.cli.deciding import archive, label, reject, release
from reflact.cli.stored import Json, NewStore, Store, columns, existing, line, only, short
from reflact.cli.traces import LISTED, keep, list_traces, show_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reflact.memory import MemoryCard
    from reflact.memory_ports import Forgotten
    from reflact.store.exchange import Imported

SHOWN = 60
"""Characters of a card in a table."""

Status = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STATE", help="Only this: candidate, quarantined, promoted, rejected, archived; repeatable."
    ),
]
Kind = Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only this kind of card; repeatable.")]
Limit = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="At most so many cards.")]

memory = typer.Typer(
    name="memory",
    help="Look at what calibration has learned, and change what is kept.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
memory.command("keep")(keep)
memory.command("traces")(list_traces)
memory.command("trace")(show_trace)
memory.command("label")(label)
memory.command("anchors")(list_anchors)


@memory.command("list")
def list_cards(
    store: Store, status: Status = None, kind: Kind = None, limit: Limit = 50, json: Json = False
) -> None:
    """List cards, the best first; all states and scopes unless options say otherwise."""
    import anyio

    _print_cards(anyio.run(_found, store, "", status, kind, limit), store, limit, json=json)


@memory.command()
def search(  # noqa: PLR0917 - what the command line offers
    store: Store,
    words: Annotated[str, typer.Argument(metavar="WORDS", help="What to look for; any text.")],
    status: Status = None,
    kind: Kind = None,
    limit: Limit = 10,
    json: Json = False,
) -> None:
    """Find cards by their words, the best first; all states and scopes unless options say otherwise."""
    import anyio

    _print_cards(anyio.run(_found, store, words, status, kind, limit), store, limit, json=json)


@memory.command()
def show(
    store: Store,
    name: Annotated[str, typer.Argument(metavar="ID", help="A card's or pair's id, or its beginning.")],
    json: Json = False,
) -> None:
    """Show a card or a pair in full, with its history."""
    import anyio

    anyio.run(_show, store, name, json)


memory.command("release")(release)
memory.command("reject")(reject)
memory.command("archive")(archive)


@memory.command()
def forget(
    store: Store,
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
    json: Json = False,
) -> None:
    """Remove everything that came from a trace, and say what was removed; there is no way back."""
    import anyio

    from reflact.reporting.lines import escape_line

    gone = anyio.run(_forget, store, trace, calls)
    if json:
        typer.echo(line(gone))
        return
    if _came_from(gone):
        typer.echo(
            f"forgot trace {escape_line(gone.trace_id)}: {gone.events} events, {len(gone.unit_ids)} units "
            f"with {gone.cards} cards, {gone.anchors} anchors"
        )
    if calls:
        typer.echo(f"removed {gone.replies} stored replies of models to calibration's questions")
    elif gone.replies_left:
        typer.echo(
            f"{gone.replies_left} stored replies of models to calibration's questions may quote it; --calls "
            "removes them all, and they would be asked anew"
        )
    if gone.logged:
        typer.echo(
            f"what was removed still stands in {store.name}-wal, since another process reads the memory; end "
            "that and give this command again, which finds no trace then, but empties the log"
        )


@memory.command("export")
def export_store(
    store: Store,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Where to write; standard output without it.", show_default=False
        ),
    ] = None,
) -> None:
    """Write everything in a memory as JSON lines."""
    import anyio

    anyio.run(_export, store, target)


@memory.command("import")
def import_store(
    store: NewStore,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.", show_default=False)],
    json: Json = False,
) -> None:
    """Bring in what was exported; what is there stays, and nothing is promoted without its evidence."""
    import anyio

    from reflact.errors import DataError, UsageError

    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}") from None
    try:
        done = anyio.run(_import, store, lines)
    except DataError as error:
        raise DataError(f"{source}: {error}; nothing was brought in") from None
    if json:
        typer.echo(line(done))
        return
    typer.echo(
        f"new: {done.units} units, {done.tests} tests, {done.traces} traces with {done.events} events, "
        f"{done.anchors} anchors; {done.held} of the units are held or rejected"
    )
    if done.recounted:
        typer.echo(
            f"{done.recounted} tests have more tests before them on their traces here than where they were "
            f"made; {done.unproven} promoted units do not pass at the level that is left, and are held"
        )


async def _found(
    path: Path, words: str, status: list[str] | None, kind: list[str] | None, limit: int
) -> tuple[MemoryCard, ...]:
    from pydantic import ValidationError

    from reflact.errors import UsageError
    from reflact.memory_ports import Query

    asked: dict[str, Any] = {"statuses": status or (), "kinds": kind or ()}
    try:
        query = Query(text=words, all_scopes=True, limit=limit, **asked)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['input']!r} is none: {first['msg']}") from None
    async with existing(path) as store:
        return await store.find(query)


async def _show(path: Path, name: str, json: bool) -> None:
    from reflact.reporting.lines import escape_controls, escape_line

    async with existing(path) as store:
        ids = await store.units_named(name)
        unit = only(name, ids, what="unit", store=path, listed=f"reflact memory list {path}")
        cards, history = await store.cards(unit), await store.history(unit)
    if json:
        for text in (*map(line, cards), *map(line, history)):
            typer.echo(text)
        return
    for card in cards:
        typer.echo(f"{card.kind} {escape_line(card.id)}")
        for field, value in _facts(card):
            typer.echo(f"  {field}: {escape_line(value)}")
        for text in filter(None, (card.content, card.pattern, card.strategy)):
            typer.echo("\n" + "\n".join(f"    {one}" for one in escape_controls(text).split("\n")))
        typer.echo()
    for change in history:
        why = f" ({escape_line(change.reason)})" if change.reason else ""
        test = "" if change.promotion is None else f", test {change.promotion}"
        typer.echo(f"{change.at:%Y-%m-%d %H:%M:%S} version {change.version}: {change.after}{why}{test}")


async def _forget(path: Path, trace: str, calls: bool) -> Forgotten:
    from reflact.errors import UsageError

    async with existing(path, read_only=False) as store:
        found = await store.traces_named(trace)
        if found and trace not in found and not calls:
            raise UsageError(
                f"no trace in {path} is called {trace!r}, and forgetting takes a whole id; these begin so: "
                f"{', '.join(found)}"
            )
        gone = await store.forget(trace, calls=calls)
    if not calls and not _came_from(gone):
        log = f"; what was removed before may still stand in {path.name}-wal, which is being read"
        raise UsageError(
            f"nothing in {path} came from a trace {trace!r}; list them with `{LISTED} {path}`"
            + (log if gone.logged else "")
        )
    return gone


def _came_from(gone: Forgotten) -> bool:
    """Whether anything had come from the trace."""
    return gone.trace or bool(gone.unit_ids) or gone.anchors > 0


async def _export(path: Path, target: Path | None) -> None:
    from reflact.errors import UsageError

    async with existing(path) as store:
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


async def _import(path: Path, lines: list[str]) -> Imported:
    from reflact.memory_store import MemoryStore

    async with MemoryStore(path) as store:
        return await store.import_lines(lines)


def _facts(card: MemoryCard) -> list[tuple[str, str]]:
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


def _print_cards(cards: Sequence[MemoryCard], store: Path, limit: int, *, json: bool) -> None:
    if json:
        for card in cards:
            typer.echo(line(card))
        return
    rows = [
        (
            card.id[:12],
            card.kind,
            card.status if card.reason is None else f"{card.status} ({card.reason})",
            f"{card.utility:.2f}",
            short(card.strategy or card.content, SHOWN),
        )
        for card in cards
    ]
    for text in columns(("card", "kind", "status", "utility", "says"), rows, right={3}):
        typer.echo(text)
    if not cards:
        typer.echo(f"{store} holds no card that was asked for", err=True)
    elif len(cards) == limit:
        typer.echo(f"the first {limit} cards; --limit shows more, where there are any", err=True)
