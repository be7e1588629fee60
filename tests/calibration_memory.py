"""A memory without a file and without threads, so that time may be virtual."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from memory_pairs import make_pair
from reflact import MemoryStore
from reflact.memory import rows
from reflact.memory.cards import TraceIdentity
from reflact.memory.models import BatchTest, Scope, StoredPair
from reflact.testing.doubles import InMemoryDatabase

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class ListMemory(MemoryStore):
    """A memory in this process; tests look at what it holds without waiting."""

    def __init__(self) -> None:
        super().__init__(":memory:", max_active_pairs=1_000_000, scan=lambda _: None, clock=lambda: NOW)
        self._database = InMemoryDatabase()

    @property
    def stored(self) -> Mapping[str, StoredPair]:
        tables = self._database._tables
        return {one.pair.id: one for one in rows.select_pairs(tables, "1 ORDER BY id")}

    @property
    def booked(self) -> list[BatchTest]:
        return list(rows.read_tests(self._database._tables))

    async def open_test(
        self,
        pair_ids: Sequence[str],
        *,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        if not pair_ids:
            pair = make_pair(trace=None, scope=Scope(user="nobody"))
            await self.submit(pair)
            pair_ids = [pair.id]
        return await super().open_test(pair_ids, traces=traces, kind=kind)
