"""A memory without a file and without threads, so that time may be virtual."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from reflact import MemoryStore
from reflact.memory import batch_tests, rows
from reflact.memory.cards import TraceIdentity, create_card
from reflact.memory.models import BatchTest, StoredPair
from reflact.testing.doubles import InMemoryDatabase

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class ListMemory(MemoryStore):
    """A memory in this process; tests look at what it holds without waiting."""

    def __init__(self) -> None:
        super().__init__(":memory:", max_active_cards=1_000_000, scan=lambda _: None, clock=lambda: NOW)
        self._database = InMemoryDatabase()

    @property
    def stored(self) -> Mapping[str, StoredPair]:
        """The pairs by their ids."""
        tables = self._database._tables
        units = rows.select_rows(tables, "pair IS NOT NULL ORDER BY id")
        return {one.pair.id: one for one in rows.build_stored_pairs(tables, units)}

    @property
    def booked(self) -> list[BatchTest]:
        """The tests."""
        return list(batch_tests.read_tests(self._database._tables))

    async def open_test(
        self,
        unit_ids: Sequence[str],
        *,
        holdout_id: str,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Open a test; without units it is a test of a card."""
        if not unit_ids:
            unit_ids = [(await self.submit_card(create_card("tool_policy", "Use grep."))).unit_id]
        return await super().open_test(unit_ids, holdout_id=holdout_id, traces=traces, kind=kind)
