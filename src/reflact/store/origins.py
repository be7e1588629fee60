"""Which steps of traces units and anchors were made of, and which anchors keep units from being stored.

Equal units are stored once and have all their origins. A unit and an anchor are never one, so their ids tell
them apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from reflact.errors import DataError
from reflact.memory import ContrastPair, Origin
from reflact.memory_cards import subject_hash
from reflact.store.database import Tables
from reflact.store.encoding import decode_value, encode_value

FROM_TRACE = "id IN (SELECT owner FROM memory_origins WHERE trace_id = ?1)"
"""Units or anchors that were made of a trace."""


def add_origins(tables: Tables, owner: str, origins: Iterable[Origin]) -> None:
    """Write origins that are not there yet."""
    records = ({"owner": owner, "trace_id": origin.trace_id, "step": origin.step} for origin in origins)
    tables.table("memory_origins").insert_all(records, ignore=True)


def read_origins(tables: Tables, owners: Sequence[str]) -> Mapping[str, tuple[Origin, ...]]:
    """Return the origins of each, sorted by trace and step."""
    found: dict[str, list[Origin]] = {owner: [] for owner in owners}
    for owner, trace_id, step in tables.execute(
        "SELECT owner, trace_id, step FROM memory_origins "
        "WHERE owner IN (SELECT value FROM json_each(?)) ORDER BY trace_id, step",
        (json.dumps(list(owners)),),
    ):
        found[owner].append(Origin(trace_id=trace_id, step=step))
    return {owner: tuple(origins) for owner, origins in found.items()}


def find_exclusion(tables: Tables, pair: ContrastPair | None, unit_origins: Iterable[Origin]) -> str | None:
    """Return why a unit is never learned from, None if it may be.

    ``anchor``: it speaks of an anchor's transition. ``anchor_trace``: it was made of an anchor's trace, whose
    steps show each other's states.
    """
    if pair is None:
        return None
    if tables.execute("SELECT 1 FROM memory_anchors WHERE subject = ?", (subject_hash(pair),)).fetchone():
        return "anchor"
    sql = f"SELECT 1 FROM memory_anchors WHERE {FROM_TRACE}"  # noqa: S608 - constant
    shared = any(tables.execute(sql, (origin.trace_id,)).fetchone() for origin in unit_origins)
    return "anchor_trace" if shared else None


def add_anchor(tables: Tables, pair: ContrastPair, unit_origins: Sequence[Origin]) -> bool:
    """Keep an anchor that was made of these steps; returns whether it is new."""
    kept = tables.execute("SELECT 1 FROM memory_anchors WHERE id = ?", (pair.id,)).fetchone()
    if kept and set(unit_origins) <= set(read_origins(tables, [pair.id])[pair.id]):
        return False
    spoken_of = subject_hash(pair)
    taken = tables.execute("SELECT id FROM memory_units WHERE subject = ?", (spoken_of,)).fetchone()
    if taken:
        raise DataError(
            f"anchor {pair.id} speaks of the transition of stored pair {taken[0]}; anchors are never learned "
            "from, so take another one"
        )
    sql = f"SELECT id FROM memory_units WHERE pair IS NOT NULL AND {FROM_TRACE} ORDER BY id"  # noqa: S608 - constant
    for origin in unit_origins:
        taught = tables.execute(sql, (origin.trace_id,)).fetchone()
        if taught:
            raise DataError(
                f"anchor {pair.id} was made of trace {origin.trace_id}, and so was stored pair {taught[0]}; "
                "what anchors are made of is never learned from, so take another trace"
            )
    record = {"id": pair.id, "subject": spoken_of, "pair": encode_value(pair)}
    tables.table("memory_anchors").insert(record, ignore=True)
    add_origins(tables, pair.id, unit_origins)
    return not kept


def read_anchors(tables: Tables) -> list[ContrastPair]:
    """Return the anchors in the order of their ids."""
    found = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return [decode_value(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in found]
