"""The promoted pairs of a store, each read once for as long as it stays promoted."""

from __future__ import annotations

import json
import threading

from reflact.memory import ContrastPair, Scope
from reflact.memory_cards import visible_to
from reflact.store import units
from reflact.store.database import Tables

STANDING = """
SELECT coalesce(group_concat(id, ' '), '') FROM
(SELECT id FROM memory_units WHERE status = 'promoted' ORDER BY id)
"""
"""One text for all of them, which SQLite makes while other threads compute."""

READ = "id IN (SELECT value FROM json_each(?))"


class Promoted:
    """Gives all promoted pairs of a file, whoever promoted them: asks which there are, reads the new ones.

    What is no longer promoted is forgotten. Looks of several threads wait for each other.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._standing = ""
        self._known: dict[str, ContrastPair | None] = {}
        self._seen: tuple[Scope, tuple[ContrastPair, ...]] | None = None

    def look(self, tables: Tables, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return those that a scope may see, by id; one that was given before is the same object."""
        with self._turn:
            (standing,) = tables.execute(STANDING).fetchone()
            if standing != self._standing:
                self._read(tables, standing)
            if self._seen is None or self._seen[0] != scope:
                pairs = (pair for pair in self._known.values() if pair is not None)
                self._seen = scope, tuple(pair for pair in pairs if visible_to(pair.scope, scope))
            return self._seen[1]

    def _read(self, tables: Tables, standing: str) -> None:
        ids = standing.split()
        new = json.dumps([unit_id for unit_id in ids if unit_id not in self._known])
        for row in units.rows(tables, READ, (new,)):
            self._known[row.id] = None if row.pair is None else units.pair_of(row)
        self._known = {unit_id: self._known[unit_id] for unit_id in ids}
        self._standing, self._seen = standing, None
