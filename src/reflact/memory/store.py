"""The memory of a critic: one SQLite file of contrast pairs, tests and traces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio.to_thread

from reflact.concurrency import run_in_thread
from reflact.errors import DataError
from reflact.memory import batch_tests, export, pairs, traces
from reflact.memory.cards import TraceIdentity, is_visible_to
from reflact.memory.export import ImportResult
from reflact.memory.models import (
    BatchTest,
    CardStatus,
    ContrastPair,
    ForgetResult,
    Label,
    PromotionEvidence,
    Scope,
    ScoreEvent,
    StoredCalibration,
    StoredPair,
    StoredTrace,
    Submission,
    TestableTrace,
    TraceSummary,
)
from reflact.memory.pairs import PairWriter
from reflact.memory.scan import ScanFinding, Scanner, scan_texts
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database, Tables
from reflact.store.schema import SCHEMA

T = TypeVar("T")

# The default bound on active pairs.
MAX_ACTIVE_PAIRS = 2_000

CHOSEN_CONDITION = """
(?1 IS NULL OR status = ?1) AND (?2 IS NULL OR id IN (SELECT value FROM json_each(?2))) ORDER BY id
"""


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class MemoryStore:
    """Contrast pairs and traces in a SQLite file, opened and closed by ``async with``, once.

    The file may be that of a run, and several processes may share it. When a method returns, its
    change is on disk. The next read of each process sees what another has promoted.

    Args:
        path: The file. It and its folder are created if they are missing.
        max_active_pairs: The bound on candidate, quarantined and promoted pairs. Beyond it the
            weakest are archived.
        scan: Scans every text before it is stored; None: the rules of docs/calibration.md.
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
        self._database = Database(
            Path(path), SCHEMA, lock_timeout=lock_timeout, read_only=read_only
        )
        self._scan = scan or scan_texts
        self._max_active_pairs = max_active_pairs
        self._clock = clock
        # The promoted pairs as they were last read, because a critic asks for them at every score.
        self._promoted: Mapping[str, ContrastPair] = {}

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._database.__aexit__(kind, error, trace)

    async def _change_pairs(self, change: Callable[[PairWriter], T]) -> T:
        """Change pairs in one transaction."""

        def work(tables: Tables) -> T:
            return change(PairWriter(tables, self._clock(), self._max_active_pairs))

        return await self._database.write(work)

    # ---------------------------------------------------------------------------------------- pairs

    async def submit(self, pair: ContrastPair) -> Submission:
        """Scan a pair and store it; to one that is stored already, add the step of this copy."""

        def scan() -> ScanFinding | None:
            # Says what is wrong with a number, before the pair's id needs it.
            pairs.encode_pair(pair)
            return self._scan(pairs.list_pair_texts(pair))

        finding = await run_in_thread(scan, *pair.transition.payloads)
        origins = pair.provenance.as_origins
        return await self._change_pairs(lambda writer: writer.submit(pair, finding, origins))

    async def find(
        self, words: str = "", *, statuses: Sequence[CardStatus] = (), limit: int = 50
    ) -> tuple[StoredPair, ...]:
        """Return pairs for people to read: the highest utility first, then the latest change.

        Args:
            words: A pair must hold all words of at least three characters, also as parts of others;
                any text is valid.
            statuses: Only pairs with one of these statuses; empty for all.
            limit: The largest number of pairs.
        """
        find = partial(pairs.find_pairs, words=words, statuses=statuses, limit=limit)
        return await self._database.read(find)

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        """Return stored pairs by their ids: all, or those of ``pair_ids`` and ``status``."""
        ids = None if pair_ids is None else json.dumps(list(pair_ids))

        return await self._database.read(
            lambda tables: pairs.select_pairs(tables, CHOSEN_CONDITION, (status, ids))
        )

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return all promoted pairs that a scope may see, in the order of their ids.

        A pair that was returned before is the same object.
        """
        promoted = await self._database.read(self._read_promoted)
        return tuple(pair for pair in promoted if is_visible_to(pair.scope, scope))

    def _read_promoted(self, tables: Tables) -> tuple[ContrastPair, ...]:
        """Return the promoted pairs by their ids; only new ones are read."""
        sql = "SELECT id FROM memory_pairs WHERE status = 'promoted' ORDER BY id"
        ids = [pair_id for (pair_id,) in tables.execute(sql).fetchall()]
        known = self._promoted
        new_ids = json.dumps([pair_id for pair_id in ids if pair_id not in known])
        new = pairs.select_pairs(tables, "id IN (SELECT value FROM json_each(?))", (new_ids,))
        known = {**known, **{stored.pair.id: stored.pair for stored in new}}
        self._promoted = {pair_id: known[pair_id] for pair_id in ids}
        return tuple(self._promoted.values())

    async def move(
        self,
        pair_ids: Sequence[str],
        status: Literal["quarantined", "rejected", "archived"],
        *,
        reason: str | None = None,
    ) -> None:
        """Give pairs another status, all or none; only a test promotes.

        A pair that is quarantined with a reason needs review and is not tested. Quarantine it again
        without one to release it.
        """
        if status not in {"quarantined", "rejected", "archived"}:
            raise DataError(f"no pair can be moved to {status!r}; only a test promotes pairs")

        def change(writer: PairWriter) -> None:
            for pair_id in pair_ids:
                writer.move(pairs.read_pair(writer.tables, pair_id), status, reason)

        await self._change_pairs(change)

    async def remaining_capacity(self) -> int:
        """Return how many pairs fit before one is archived that has not failed a test."""
        return await self._database.read(
            partial(pairs.count_free, max_active=self._max_active_pairs)
        )

    # ---------------------------------------------------------------------------------------- tests

    async def open_test(
        self,
        pair_ids: Sequence[str],
        *,
        holdout_id: str,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Record a test before its alpha is chosen, so that ``n_earlier_tests`` is exact.

        The number is exact even if several processes test at once. A test that never ends still
        counts against the error probability of its traces.

        Args:
            pair_ids: The batch.
            holdout_id: The name of the held-out set.
            traces: The held-out traces. Tests are counted by their content and their names.
            kind: Whether the test promotes the batch, or measures promoted pairs again.

        Raises:
            DataError: A pair has the wrong status or needs review, or comes from one of the traces.
                Or the batch or the traces are empty.
        """
        batch = tuple(pair_ids)
        holdout = frozenset(traces)
        return await self._database.write(
            lambda tables: batch_tests.open_test(
                tables, batch, holdout_id=holdout_id, traces=holdout, kind=kind, now=self._clock()
            )
        )

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """Store the result of a test and change the pairs in one transaction.

        If the test passed, a ``promote`` test promotes its batch and a ``demote`` test changes
        nothing. If a ``demote`` test failed, its pairs go back to quarantine and need review. Pairs
        that changed since the test was opened keep their status.

        Raises:
            DataError: The evidence does not fit the test, or the test is over or was never opened.
        """
        await self._change_pairs(lambda writer: batch_tests.close_test(writer, number, evidence))

    async def tests(self) -> tuple[BatchTest, ...]:
        """Return all tests in their order."""
        return await self._database.read(batch_tests.read_tests)

    # --------------------------------------------------------------------------------------- traces

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        """Add a trace, unless it is stored; DataError if it is stored with another purpose."""
        await self._database.write(lambda tables: traces.open_trace(tables, trace_id, purpose))

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        """Append an event and return whether it is new.

        If the stored event has no label, the label of this one is added. A stored label stays.

        Raises:
            DataError: The trace is unknown, or another event has the same step.
        """
        return await self._database.write(
            lambda tables: traces.append_event(tables, trace_id, event)
        )

    async def label(self, trace_id: str, step: int, label: Label, *, replace: bool = True) -> None:
        """Label a stored step.

        Raises:
            DataError: The trace has no such step. Or ``replace`` is false, and it has a label that
                is not by agreement.
        """
        await self._database.write(
            lambda tables: traces.label_step(tables, trace_id, step, label, replace=replace)
        )

    async def trace(self, trace_id: str) -> StoredTrace | None:
        """Return a trace with its events in the order of their steps, or None."""
        return await self._database.read(partial(traces.find_trace, trace_id=trace_id))

    async def trace_ids(self) -> tuple[str, ...]:
        """Return the ids of all traces, sorted."""
        rows = await self._database.fetch_rows("SELECT id FROM traces ORDER BY id")
        return tuple(trace_id for (trace_id,) in rows)

    async def content_hashes(self) -> Mapping[str, str]:
        """Return the hash of each trace's content, by its id."""
        return dict(await self._database.fetch_rows("SELECT id, content_hash FROM traces"))

    async def testable_traces(self, *, before: int | None, limit: int) -> tuple[TestableTrace, ...]:
        """Return traces with steps that a program or a person labelled, newest first.

        Args:
            before: Only traces with a smaller number; None: from the newest on.
            limit: The largest number of traces.
        """
        return await self._database.read(
            partial(traces.list_testable_traces, before=before, limit=limit)
        )

    async def purposes(self, *, limit: int) -> frozenset[str]:
        """Return the distinct purposes of all traces, at most ``limit``."""
        sql = "SELECT DISTINCT purpose FROM traces LIMIT ?"
        rows = await self._database.fetch_rows(sql, (limit,))
        return frozenset(json.loads(purpose) for (purpose,) in rows)

    async def summaries(self) -> tuple[TraceSummary, ...]:
        """Return the counts of each trace, in the order of their ids."""
        return await self._database.read(traces.list_summaries)

    # --------------------------------------------------------------------------------- calibrations

    async def start_calibration(self, identity: str, baseline: str) -> StoredCalibration:
        """Store the start of a calibration."""

        def insert(tables: Tables) -> StoredCalibration:
            sql = "INSERT INTO calibrations (identity, baseline) VALUES (?, ?)"
            number = tables.execute(sql, (identity, baseline)).lastrowid
            return StoredCalibration(number=int(number or 0), baseline=baseline)

        return await self._database.write(insert)

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        """Return the latest calibration of an identity, or None."""
        sql = (
            "SELECT number, baseline, result FROM calibrations WHERE identity = ? "
            "ORDER BY number DESC LIMIT 1"
        )
        for number, baseline, result in await self._database.fetch_rows(sql, (identity,)):
            return StoredCalibration(number=number, baseline=baseline, result=result)
        return None

    async def finish_calibration(self, number: int, result: str) -> None:
        """Store the result of a calibration; a result that is stored already stays."""
        sql = "UPDATE calibrations SET result = ? WHERE number = ? AND result IS NULL"
        await self._database.execute(sql, (result, number))

    # ----------------------------------------------------------- anchors, forgetting, export,
    # import

    async def add_anchors(self, anchors: Sequence[ContrastPair]) -> int:
        """Store labelled pairs that calibration never learns from; return the number of new ones.

        Raises:
            DataError: A stored pair has the same transition, or comes from the same trace.
        """
        for pair in anchors:
            pairs.encode_pair(pair)
        return await self._database.write(
            lambda tables: sum(
                pairs.add_anchor(tables, pair, pair.provenance.as_origins) for pair in anchors
            )
        )

    async def anchors(self) -> tuple[ContrastPair, ...]:
        """Return the anchors in the order of their ids."""
        return await self._database.read(pairs.read_anchors)

    async def forget(self, trace_id: str, *, calls: bool = False) -> ForgetResult:
        """Remove a trace and everything that came from it: events, pairs, history and anchors.

        A pair that also came from another trace is removed too. The evidence of tests stays,
        because tests must be counted; it contains only hashes and numbers.

        The removed data is overwritten in the file, and the write-ahead log is emptied. If another
        process reads the file, the log cannot be emptied. The result then says so, and a second
        call empties it.

        Args:
            trace_id: The trace.
            calls: Whether to remove all cached responses to questions of calibrations, of any
                trace. Later calibrations ask these questions again.
        """
        result = await self._database.write(
            lambda tables: pairs.forget_trace(tables, trace_id, calls=calls)
        )
        return result.model_copy(update={"remains_in_wal": not await self._database.checkpoint()})

    async def export_lines(self) -> AsyncIterator[str]:
        """Yield the memory as lines of ASCII JSON; equal memories give equal lines.

        Tests, histories, and rejected or archived pairs are not exported. Concurrent writes may be
        missing or included.
        """
        async for line in export.read_lines(self._database):
            yield pairs.encode_value(line)

    async def import_lines(self, lines: Iterable[str]) -> ImportResult:
        """Import the lines of ``export_lines``, all or none; a second import changes nothing.

        Each new pair is scanned and quarantined, whatever its status was. Pairs that are stored
        already only get the new origins. Pairs that share a transition or a trace with an anchor
        are left out.

        Raises:
            DataError: A line is not part of an export; names the line.
        """
        parsed = await anyio.to_thread.run_sync(export.parse_and_scan, lines, self._scan)
        return await self._change_pairs(lambda writer: export.import_parsed(writer, parsed))
