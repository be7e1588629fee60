"""A store of memory cards: pairs as units, states with their history, tests that promote them, anchors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from reflact.concurrency import run_in_thread
from reflact.errors import DataError
from reflact.memory import batch_tests as booking
from reflact.memory import lifecycle as changing
from reflact.memory import rows as origins
from reflact.memory import rows as units
from reflact.memory.cards import ScanFinding, Scanner, TraceIdentity, content_id, is_visible_to
from reflact.memory.encoding import require_pair_id
from reflact.memory.models import CardStatus, ContrastPair, MemoryCard, PromotionEvidence, Scope
from reflact.memory.protocols import BatchTest, CardQuery, ForgetResult, StatusChange, StoredPair, Submission
from reflact.memory.rows import Unit, list_pair_texts
from reflact.store.database import Database, Tables

MAX_ACTIVE_CARDS = 2_000
"""How many active cards of a kind a store holds unless told otherwise."""

TimeSource = Callable[[], datetime]


def utc_now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(UTC)


class SQLiteCardStore:
    """Pairs and cards, from submission to promotion and back, in a database that processes may share.

    Args:
        database: The database, open.
        scan: Looks at every text before it is stored.
        active_cards: At most so many active cards of a kind; beyond it the weakest are archived.
        clock: Gives the time of changes.
    """

    def __init__(
        self,
        database: Database,
        *,
        scan: Scanner,
        max_active_cards: int = MAX_ACTIVE_CARDS,
        clock: TimeSource = utc_now,
    ) -> None:
        self._database = database
        self._scan = scan
        self._max_active_cards = max_active_cards
        self._clock = clock
        self._promoted_cache = PromotedPairCache()

    # --------------------------------------------------------------------------------------- handing in

    async def submit(self, pair: ContrastPair, *, created_by: str = "") -> Submission:
        """Store a pair with its two cards, scanned; on disk when this returns.

        The same pair twice is one; made of another step, it has that origin as well.
        """
        return await self._submit(
            *await run_in_thread(partial(self._build_and_scan, pair, created_by), *pair.transition.payloads)
        )

    async def submit_card(self, card: MemoryCard) -> Submission:
        """Store a card that stands alone, scanned, made by ``memory_cards.new_card``.

        Raises:
            DataError: It is no candidate, belongs to a pair, or its id does not follow from its content.
        """
        if card.pair_id is not None:
            raise DataError(f"card {card.id} belongs to pair {card.pair_id}; submit the pair")
        if card.status != "candidate":
            raise DataError(f"card {card.id} is handed in as {card.status}; a card begins as a candidate")
        if card.id != content_id(card) or card.version != 1:
            raise DataError(f"card {card.id}: its id does not follow from its content; make it with new_card")
        unit = Unit(card.id, (card,), None)
        return await self._submit(
            unit, await run_in_thread(partial(self._scan, unit.all_texts), *unit.all_texts)
        )

    def _build_and_scan(self, pair: ContrastPair, created_by: str) -> tuple[Unit, ScanFinding | None]:
        return Unit.from_pair(pair, created_by), self._scan(list_pair_texts(pair))

    async def _submit(self, unit: Unit, finding: ScanFinding | None) -> Submission:
        made_of = unit.cards[0].provenance.as_origins
        return await self._database.write(
            lambda tables: changing.submit_unit(
                tables, unit, finding, made_of, max_active=self._max_active_cards, now=self._clock()
            )
        )

    async def edit(
        self,
        card_id: str,
        *,
        content: str | None = None,
        pattern: str | None = None,
        strategy: str | None = None,
    ) -> Submission:
        """Change a card's text: its unit is scanned again and goes back to quarantine, one version up.

        Raises:
            DataError: There is no such card, or its unit was rejected or archived.
        """
        given = {"content": content, "pattern": pattern, "strategy": strategy}
        changed = {name: text for name, text in given.items() if text is not None}

        def change(tables: Tables) -> Submission:
            row = units.read_unit_of_card(tables, card_id)
            if row.status not in {"quarantined", "promoted"}:
                raise DataError(f"card {card_id} is {row.status} and is not edited any more; hand in another")
            cards = [
                card.model_copy(update=changed) if card.id == card_id else card
                for card in units.read_cards(tables, row)
            ]
            pair = None if row.pair is None else units.parse_pair(row)
            finding = self._scan(Unit(row.id, tuple(cards), pair).all_texts)
            changing.edit_unit(tables, row, cards, finding, now=self._clock())
            (row,) = units.read_units(tables, [row.id])
            return Submission(unit_id=row.id, is_new=False, status=row.status, reason=row.reason)

        return await self._database.write(change)

    # ----------------------------------------------------------------------------------------- reading

    async def find(self, query: CardQuery) -> tuple[MemoryCard, ...]:
        """Return cards, the best first; the same store and query give the same order.

        Relevance is that of the unit, so that the cards of a pair stand side by side.
        """

        def look(tables: Tables) -> list[MemoryCard]:
            rows = units.find_units(tables, query)
            return [card for row in rows for card in units.read_cards(tables, row, query.kinds)]

        return tuple((await self._database.read(look))[: query.limit])

    async def find_pairs(self, query: CardQuery) -> tuple[StoredPair, ...]:
        """Return whole pairs of which a card is found, the best first; ``limit`` counts pairs."""

        def look(tables: Tables) -> list[StoredPair]:
            return units.build_stored_pairs(tables, units.find_units(tables, query, pairs=True))

        return tuple(await self._database.read(look))

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return all promoted pairs that whoever asks may see, in the order of their ids."""
        return await self._database.read(lambda tables: self._promoted_cache.get_visible(tables, scope))

    async def cards(self, unit_id: str) -> tuple[MemoryCard, ...]:
        """Return the cards of a unit; none where it is not stored."""

        def look(tables: Tables) -> list[MemoryCard]:
            rows = units.select_rows(tables, "id = ?", (unit_id,))
            return [card for row in rows for card in units.read_cards(tables, row)]

        return tuple(await self._database.read(look))

    async def find_unit_ids(self, name: str) -> tuple[str, ...]:
        """Return the ids of up to ten units which begin so, or with a card whose id begins so, sorted."""
        sql = (
            "SELECT id FROM memory_units WHERE substr(id, 1, length(?1)) = ?1 OR number IN "
            "(SELECT unit FROM memory_cards WHERE substr(id, 1, length(?1)) = ?1) ORDER BY id LIMIT 10"
        )
        return tuple(unit_id for (unit_id,) in await self._database.fetch_rows(sql, (name,)))

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        """Return pairs in the order of their ids; those of ``pair_ids`` that are stored, or all."""
        chosen = None if pair_ids is None else json.dumps(list(pair_ids))
        where = (
            "pair IS NOT NULL AND (?1 IS NULL OR status = ?1) "
            "AND (?2 IS NULL OR id IN (SELECT value FROM json_each(?2))) ORDER BY id"
        )

        def look(tables: Tables) -> list[StoredPair]:
            return units.build_stored_pairs(tables, units.select_rows(tables, where, (status, chosen)))

        return tuple(await self._database.read(look))

    async def history(self, unit_id: str) -> tuple[StatusChange, ...]:
        """Return all status changes of a unit, the first first.

        Raises:
            DataError: There is no such unit.
        """

        def look(tables: Tables) -> tuple[StatusChange, ...]:
            (row,) = units.read_units(tables, [unit_id])
            return units.read_history(tables, row.number)

        return await self._database.read(look)

    # ------------------------------------------------------------------------------------------ states

    async def open_test(
        self,
        unit_ids: Sequence[str],
        *,
        holdout_id: str,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Book a test before its level is chosen: ``before`` is exact, however many processes test at once.

        A test that never ends stays booked: it counts against the error probability.

        Args:
            unit_ids: The batch.
            holdout_id: What the held-out traces are called.
            traces: These, by whose content tests are counted.
            kind: To promote the batch, or to measure it again.

        Raises:
            DataError: A unit is not quarantined, or held (to promote), or not promoted (to demote), or was
                made of one of the traces; or there is none.
        """
        batch, held = tuple(unit_ids), frozenset(traces)

        def book(tables: Tables) -> BatchTest:
            now = self._clock()
            return booking.open_test(tables, batch, holdout_id=holdout_id, traces=held, kind=kind, now=now)

        return await self._database.write(book)

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """Store how a test ended and do what follows, in one transaction.

        To promote: the batch is promoted where ``evidence.promoted``. To demote: ``promoted`` says whether
        it may stay; where not, it goes back to quarantine and is held. What was edited or retired since the
        test was opened stays as it is.

        Raises:
            DataError: The evidence speaks of another batch or of other tests before it, or the test is over.
        """
        await self._database.write(
            lambda tables: booking.close_test(tables, number, evidence, now=self._clock())
        )

    async def tests(self) -> tuple[BatchTest, ...]:
        """Return all tests, in their order."""
        return tuple(await self._database.read(booking.read_tests))

    async def reject(self, unit_ids: Sequence[str], *, reason: str) -> None:
        """Reject quarantined units, all or none."""
        await self._change_status(unit_ids, "rejected", reason)

    async def archive(self, unit_ids: Sequence[str], *, reason: str) -> None:
        """Retire units, all or none."""
        await self._change_status(unit_ids, "archived", reason)

    async def _change_status(self, unit_ids: Sequence[str], after: CardStatus, reason: str) -> None:
        def change(tables: Tables) -> None:
            for row in units.read_units(tables, unit_ids):
                changing.change_status(tables, row, after, now=self._clock(), reason=reason)

        await self._database.write(change)

    async def release(self, unit_id: str, *, reason: str) -> None:
        """Let a held unit be tested: somebody looked at it.

        Raises:
            DataError: It is not held.
        """

        def change(tables: Tables) -> None:
            (row,) = units.read_units(tables, [unit_id])
            changing.release_unit(tables, row, reason=reason, now=self._clock())

        await self._database.write(change)

    async def remaining_capacity(self) -> int:
        """Return how many pairs can be added before the bound archives one that no test has refused."""
        return await self._database.read(
            lambda tables: changing.count_free(tables, units.PAIR_UNIT, self._max_active_cards)
        )

    # ----------------------------------------------------------------------------- anchors, forgetting

    async def add_anchors(self, pairs: Sequence[ContrastPair]) -> int:
        """Keep gold pairs that are never learned from; returns how many were new.

        Raises:
            DataError: A stored pair speaks of the same transition, or was made of the same trace.
        """
        for pair in pairs:
            require_pair_id(pair)

        def keep(tables: Tables) -> int:
            return sum(origins.add_anchor(tables, pair, pair.provenance.as_origins) for pair in pairs)

        return await self._database.write(keep)

    async def anchors(self) -> tuple[ContrastPair, ...]:
        """Return the anchors in the order of their ids."""
        return tuple(await self._database.read(origins.read_anchors))

    async def forget(self, trace_id: str, *, calls: bool = False) -> ForgetResult:
        """Remove everything that came from a trace: it, its events, units, cards, history, anchors.

        A unit that also came from another trace goes as well. So do pairs of other traces that look at their
        step under this one's purpose, unless another trace that is stored has the same purpose.
        The evidence of tests stays: it holds hashes and numbers, and tests have to be counted. What is
        removed is overwritten in the file, and the log beside it is emptied, unless another process reads
        from it; then ``logged`` says so, and forgetting again empties it once that has ended.

        Args:
            trace_id: The trace.
            calls: Whether all replies of models to calibration's questions that this file holds go too, of
                whatever trace; they would have to be asked anew.
        """
        gone = await self._database.write(lambda tables: changing.forget_trace(tables, trace_id, calls=calls))
        return gone.model_copy(update={"remains_in_wal": not await self._database.checkpoint()})


PROMOTED_IDS_QUERY = """
SELECT coalesce(group_concat(id, ' '), '') FROM
(SELECT id FROM memory_units WHERE status = 'promoted' ORDER BY id)
"""
"""One text for all of them, which SQLite makes while other threads compute."""


class PromotedPairCache:
    """Gives all promoted pairs of a file, whoever promoted them: asks which there are, reads the new ones.

    What is no longer promoted is forgotten. Looks of several threads wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids_text = ""
        self._pairs: dict[str, ContrastPair | None] = {}
        self._last_result: tuple[Scope, tuple[ContrastPair, ...]] | None = None

    def get_visible(self, tables: Tables, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return those that a scope may see, by id; one that was given before is the same object."""
        with self._lock:
            (ids,) = tables.execute(PROMOTED_IDS_QUERY).fetchone()
            if ids != self._ids_text:
                self._read(tables, ids)
            if self._last_result is None or self._last_result[0] != scope:
                pairs = (pair for pair in self._pairs.values() if pair is not None)
                self._last_result = scope, tuple(pair for pair in pairs if is_visible_to(pair.scope, scope))
            return self._last_result[1]

    def _read(self, tables: Tables, ids_text: str) -> None:
        ids = ids_text.split()
        new = json.dumps([unit_id for unit_id in ids if unit_id not in self._pairs])
        for row in units.select_rows(tables, "id IN (SELECT value FROM json_each(?))", (new,)):
            self._pairs[row.id] = None if row.pair is None else units.parse_pair(row)
        self._pairs = {unit_id: self._pairs[unit_id] for unit_id in ids}
        self._ids_text, self._last_result = ids_text, None
