"""The memory of a critic: one SQLite file of contrast pairs, tests and traces."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import anyio.to_thread

from reflact.concurrency import run_in_thread
from reflact.memory import batch_tests, export, lifecycle, rows
from reflact.memory.cards import ScanFinding, Scanner, TraceIdentity, is_visible_to
from reflact.memory.export import ImportResult
from reflact.memory.models import (
    BatchTest,
    CardStatus,
    ContrastPair,
    ForgetResult,
    PromotionEvidence,
    Scope,
    StatusChange,
    StoredPair,
    Submission,
)
from reflact.memory.scan import CachingScanner
from reflact.memory.trace_store import SQLiteTraceStore
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database, Tables
from reflact.store.schema import SCHEMA

MAX_ACTIVE_PAIRS = 2_000
"""The default bound on active pairs."""


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class MemoryStore(SQLiteTraceStore):
    """Contrast pairs and traces in a SQLite file, opened and closed by ``async with``, once.

    The file may be that of a run, and several processes may share it. The next read of each process sees what
    another has promoted.

    Args:
        path: The file. It and its folder are created if they are missing.
        max_active_pairs: The bound on candidate, quarantined and promoted pairs. Beyond it the weakest are
            archived.
        scan: Scans every text before it is stored; None: the rules of docs/memory.md.
        clock: Returns the time of a change, with its time zone.
        lock_timeout: Seconds to wait for another process's lock.
        read_only: Write nothing to the file, which must exist. Methods that write raise.

    Raises:
        StoreError: On opening and from every method; names the file and the problem.
        DataError: From every method; an id is unknown.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        max_active_pairs: int = MAX_ACTIVE_PAIRS,
        scan: Scanner | None = None,
        clock: Callable[[], datetime] = utc_now,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        read_only: bool = False,
    ) -> None:
        super().__init__(Database(Path(path), SCHEMA, lock_timeout=lock_timeout, read_only=read_only))
        self._scan = CachingScanner() if scan is None else scan
        self._max_active_pairs = max_active_pairs
        self._clock = clock
        self._promoted_cache = PromotedPairCache()

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._database.__aexit__(kind, error, trace)

    # --------------------------------------------------------------------------------------- submissions

    async def submit(self, pair: ContrastPair, *, created_by: str = "") -> Submission:
        """Scan a pair and store it; it is on disk when this returns.

        A pair that is already stored stays as it is. The store only adds the step that this copy names.
        """

        def scan() -> ScanFinding | None:
            rows.require_pair_id(pair)
            return self._scan(rows.list_pair_texts(pair))

        finding = await run_in_thread(scan, *pair.transition.payloads)
        return await self._database.write(
            lambda tables: lifecycle.submit_pair(
                tables,
                pair,
                finding,
                pair.provenance.as_origins,
                created_by=created_by,
                max_active=self._max_active_pairs,
                now=self._clock(),
            )
        )

    # ----------------------------------------------------------------------------------------- reading

    async def find(
        self, words: str = "", *, statuses: Sequence[CardStatus] = (), limit: int = 50
    ) -> tuple[StoredPair, ...]:
        """Return pairs for people to read: the highest measured utility first, then the latest change.

        Args:
            words: A pair must hold all words of at least three characters, also as parts of others; any text is
                valid.
            statuses: Only pairs with one of these statuses; empty for all.
            limit: The largest number of pairs.
        """
        return await self._database.read(
            partial(rows.find_pairs, words=words, statuses=statuses, limit=limit)
        )

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return all promoted pairs that a scope may see, in the order of their ids.

        A pair that was returned before is the same object.
        """
        return await self._database.read(lambda tables: self._promoted_cache.get_visible(tables, scope))

    async def find_pair_ids(self, name: str) -> tuple[str, ...]:
        """Return up to ten ids of pairs that start with a text, sorted."""
        sql = "SELECT id FROM memory_pairs WHERE substr(id, 1, length(?1)) = ?1 ORDER BY id LIMIT 10"
        return tuple(pair_id for (pair_id,) in await self._database.fetch_rows(sql, (name,)))

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        """Return stored pairs in the order of their ids: all, or those of ``pair_ids`` and ``status``."""
        chosen = None if pair_ids is None else json.dumps(list(pair_ids))
        where = (
            "(?1 IS NULL OR status = ?1) "
            "AND (?2 IS NULL OR id IN (SELECT value FROM json_each(?2))) ORDER BY id"
        )
        return await self._database.read(
            lambda tables: rows.build_stored_pairs(tables, rows.select_rows(tables, where, (status, chosen)))
        )

    async def history(self, pair_id: str) -> tuple[StatusChange, ...]:
        """Return all status changes of a pair in their order.

        Raises:
            DataError: There is no such pair.
        """
        return await self._database.read(partial(rows.read_history, pair_id=pair_id))

    # ------------------------------------------------------------------------------------ status changes

    async def open_test(
        self,
        pair_ids: Sequence[str],
        *,
        holdout_id: str,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Record a test before its alpha is chosen, so that ``n_earlier_tests`` is exact.

        The number is exact even if several processes test at once. A test that never ends still counts
        against the error probability of its traces.

        Args:
            pair_ids: The batch.
            holdout_id: The name of the held-out set.
            traces: The held-out traces. Tests are counted by their content and their names.
            kind: Whether the test promotes the batch, or measures promoted pairs again.

        Raises:
            DataError: A pair has the wrong status or needs review, or comes from one of the traces. Or the
                batch or the traces are empty.
        """
        batch, holdout = tuple(pair_ids), frozenset(traces)
        return await self._database.write(
            lambda tables: batch_tests.open_test(
                tables, batch, holdout_id=holdout_id, traces=holdout, kind=kind, now=self._clock()
            )
        )

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """Store the result of a test and change the pairs in one transaction.

        If the test passed, a ``promote`` test promotes its batch and a ``demote`` test changes nothing. If a
        ``demote`` test failed, its pairs go back to quarantine and need review. Pairs that changed since the
        test was opened keep their status.

        Raises:
            DataError: The evidence does not fit the test, or the test is over or was never opened.
        """
        await self._database.write(
            lambda tables: batch_tests.close_test(tables, number, evidence, now=self._clock())
        )

    async def tests(self) -> tuple[BatchTest, ...]:
        """Return all tests in their order."""
        return await self._database.read(batch_tests.read_tests)

    async def reject(self, pair_ids: Sequence[str], *, reason: str) -> None:
        """Reject quarantined pairs, all or none."""
        await self._change_status(pair_ids, "rejected", reason)

    async def archive(self, pair_ids: Sequence[str], *, reason: str) -> None:
        """Archive pairs, all or none."""
        await self._change_status(pair_ids, "archived", reason)

    async def _change_status(self, pair_ids: Sequence[str], after: CardStatus, reason: str) -> None:
        def change(tables: Tables) -> None:
            for row in rows.read_rows(tables, pair_ids):
                lifecycle.change_status(tables, row, after, now=self._clock(), reason=reason)

        await self._database.write(change)

    async def release(self, pair_id: str, *, reason: str) -> None:
        """Allow tests of a pair that needed review.

        Raises:
            DataError: The pair does not need review.
        """
        await self._database.write(
            lambda tables: lifecycle.release_pair(tables, pair_id, reason=reason, now=self._clock())
        )

    async def remaining_capacity(self) -> int:
        """Return how many pairs can be added before the bound archives one that has not failed a test."""
        return await self._database.read(lambda tables: lifecycle.count_free(tables, self._max_active_pairs))

    # ----------------------------------------------------------------- anchors, forgetting, export, import

    async def add_anchors(self, pairs: Sequence[ContrastPair]) -> int:
        """Store labelled pairs that calibration never learns from, and return the number of new ones.

        Raises:
            DataError: A stored pair has the same transition, or comes from the same trace.
        """
        for pair in pairs:
            rows.require_pair_id(pair)
        return await self._database.write(
            lambda tables: sum(rows.add_anchor(tables, pair, pair.provenance.as_origins) for pair in pairs)
        )

    async def anchors(self) -> tuple[ContrastPair, ...]:
        """Return the anchors in the order of their ids."""
        return await self._database.read(rows.read_anchors)

    async def forget(self, trace_id: str, *, calls: bool = False) -> ForgetResult:
        """Remove a trace and everything that came from it: events, pairs, history and anchors.

        A pair that also came from another trace is removed too. Pairs of other traces are removed if they
        use the purpose of this trace, and no other stored trace has that purpose. The evidence of tests
        stays, because tests must be counted; it contains only hashes and numbers.

        The removed data is overwritten in the file, and the write-ahead log is emptied. If another process
        reads the file, the log cannot be emptied. The result then says so, and a second call empties it.

        Args:
            trace_id: The trace.
            calls: Whether to remove all cached responses to questions of calibrations, of any trace. Later
                calibrations ask these questions again.
        """
        result = await self._database.write(
            lambda tables: lifecycle.forget_trace(tables, trace_id, calls=calls)
        )
        return result.model_copy(update={"remains_in_wal": not await self._database.checkpoint()})

    async def export_lines(self) -> AsyncIterator[str]:
        """Yield the memory as lines of ASCII JSON without line breaks; equal memories give equal lines.

        Tests, histories, and rejected or archived pairs are not exported. Concurrent writes may be missing
        or included.
        """
        async for line in export.read_lines(self._database):
            yield rows.encode_value(line)

    async def import_lines(self, lines: Iterable[str]) -> ImportResult:
        """Import the lines of ``export_lines``, all or none; a second import changes nothing.

        Each new pair is scanned and quarantined, whatever its status was. Pairs that are stored already only
        get the new origins. Pairs that share a transition or a trace with an anchor are left out.

        Raises:
            DataError: A line is not part of an export, or an id does not match its content; names the line.
        """
        parsed = await anyio.to_thread.run_sync(export.parse_and_scan, lines, self._scan)
        bound = self._max_active_pairs
        return await self._database.write(
            lambda tables: export.import_parsed(tables, parsed, max_active=bound, now=self._clock())
        )


PROMOTED_IDS_QUERY = """
SELECT coalesce(group_concat(id, ' '), '') FROM
(SELECT id FROM memory_pairs WHERE status = 'promoted' ORDER BY id)
"""
"""All ids in one text, which SQLite builds without the interpreter's lock."""


class PromotedPairCache:
    """Keeps the promoted pairs of a file in memory; it reads only pairs that are new.

    Threads wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids_text = ""
        self._pairs: dict[str, ContrastPair] = {}
        self._last_result: tuple[Scope, tuple[ContrastPair, ...]] | None = None

    def get_visible(self, tables: Tables, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return the pairs that a scope may see, by id; a pair that was returned before is the same object."""
        with self._lock:
            (ids_text,) = tables.execute(PROMOTED_IDS_QUERY).fetchone()
            if ids_text != self._ids_text:
                ids = ids_text.split()
                new = json.dumps([pair_id for pair_id in ids if pair_id not in self._pairs])
                for row in rows.select_rows(tables, "id IN (SELECT value FROM json_each(?))", (new,)):
                    self._pairs[row.id] = row.parse_pair()
                self._pairs = {pair_id: self._pairs[pair_id] for pair_id in ids}
                self._ids_text, self._last_result = ids_text, None
            if self._last_result is None or self._last_result[0] != scope:
                pairs = self._pairs.values()
                self._last_result = scope, tuple(pair for pair in pairs if is_visible_to(pair.scope, scope))
            return self._last_result[1]
