"""Which steps of traces units and anchors were made of: all of them, since equal ones are stored once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reflact.memory import Origin
from reflact.store.database import Tables


class Kept(NamedTuple):
    """A table of origins, and the column that says whose they are."""

    table: str
    owner: str


UNITS = Kept("memory_origins", "unit")
ANCHORS = Kept("memory_anchor_origins", "anchor")


def add(tables: Tables, kept: Kept, owner: int | str, origins: Iterable[Origin]) -> None:
    """Write origins that are not there yet."""
    table, column = kept
    for origin in origins:
        values = (owner, origin.trace_id, origin.step)
        tables.execute(
            f"INSERT INTO {table} ({column}, trace_id, step) SELECT ?1, ?2, ?3 WHERE NOT EXISTS "  # noqa: S608 - constants
            f"(SELECT 1 FROM {table} WHERE {column} = ?1 AND trace_id = ?2 AND step IS ?3)",
            values,
        )


def of(tables: Tables, kept: Kept, owners: Sequence[int | str]) -> Mapping[int | str, tuple[Origin, ...]]:
    """Return the origins of each, sorted by trace and step."""
    table, column = kept
    found: dict[int | str, list[Origin]] = {owner: [] for owner in owners}
    for owner, trace_id, step in tables.execute(
        f"SELECT {column}, trace_id, step FROM {table} "  # noqa: S608 - constants
        f"WHERE {column} IN (SELECT value FROM json_each(?)) ORDER BY trace_id, step",
        (json.dumps(list(owners)),),
    ):
        found[owner].append(Origin(trace_id=trace_id, step=step))
    return {owner: tuple(origins) for owner, origins in found.items()}


def owners(tables: Tables, kept: Kept, trace_id: str) -> tuple[int | str, ...]:
    """Return who was made of any step of a trace."""
    table, column = kept
    found = tables.execute(
        f"SELECT DISTINCT {column} FROM {table} WHERE trace_id = ? ORDER BY {column}",  # noqa: S608 - constants
        (trace_id,),
    ).fetchall()
    return tuple(owner for (owner,) in found)
