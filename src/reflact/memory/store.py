"""The memory of a critic: one SQLite file of contrast pairs, tests and traces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import anyio.to_thread

from reflact.errors import DataError
from reflact.memory import export, rows
from reflact.memory.cards import (
    TraceIdentity,
    compute_fingerprint,
    compute_utility,
    count_tests,
    find_inconsistency,
    is_visible_to,
)
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
from reflact.memory.rows import FROM_TRACE
from reflact.memory.scan import Scanner, scan_texts
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database, Tables
from reflact.store.schema import SCHEMA
from reflact.types import canonical_json

T = TypeVar("T")

# The default bound on active pairs.
MAX_ACTIVE_PAIRS = 2_000

# The reason of a pair that a ``demote`` test took back.
MEASURED_HARM = "measured harm"

CHOSEN_CONDITION = """
(?1 IS NULL OR status = ?1) AND (?2 IS NULL OR id IN (SELECT value FROM json_each(?2))) ORDER BY id
"""

# The index holds all parts of three characters, so shorter words find nothing.
MIN_WORD_CHARS = 3

FOUND_CONDITION = """
(?1 IS NULL OR status = ?1) AND
(?2 = '' OR number IN (SELECT rowid FROM memory_pairs_fts WHERE memory_pairs_fts MATCH ?2))
ORDER BY utility DESC, changed_at DESC, id LIMIT ?3
"""

# Pairs of a batch that have not changed since their test was opened.
UNCHANGED_CONDITION = "id IN (SELECT value FROM json_each(?)) AND changed_at <= ? ORDER BY id"

# Whether an event has a label.
IS_LABELLED = "json_type(event, '$.label') = 'object'"

TESTABLE_QUERY = f"""
SELECT id, purpose, content_hash, EXISTS (
    SELECT 1 FROM memory_origins JOIN memory_pairs ON memory_pairs.id = owner
    JOIN traces AS copy ON copy.id = memory_origins.trace_id
    WHERE copy.content_hash = traces.content_hash
)
FROM traces
WHERE EXISTS (SELECT 1 FROM trace_events WHERE trace_id = traces.id AND {IS_LABELLED})
ORDER BY rowid DESC
"""  # noqa: S608 - constant

SUMMARIES_QUERY = f"""
SELECT traces.id, purpose,
    (
        SELECT count(DISTINCT owner)
        FROM memory_origins JOIN memory_pairs ON memory_pairs.id = owner
        WHERE memory_origins.trace_id = traces.id
    ) AS n_pairs,
    count(step) AS n_events,
    coalesce(sum(json_type(event, '$.evaluation') = 'object'), 0) AS n_scored,
    coalesce(sum({IS_LABELLED}), 0) AS n_labelled
FROM traces LEFT JOIN trace_events ON trace_events.trace_id = traces.id
GROUP BY traces.id ORDER BY traces.id
"""  # noqa: S608 - constant

# Cached responses to questions of calibrations, by the role that asked. A response does not record
# which traces its prompt showed, because worked examples come from other traces.
CALIBRATION_RESPONSES = """
kind = 'response' AND run_id = '' AND key IN
(SELECT key FROM calls WHERE substr(call_id, 1, instr(call_id, '/')) IN
('critic/', 'contrast/', 'judge/', 'meta_judge/'))
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
        max_active_pairs: The bound on quarantined and promoted pairs. Beyond it the weakest are
            archived.
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

    async def __aexit__(self, *error: Any) -> None:
        await self._database.__aexit__(*error)

    @property
    def _admission(self) -> rows.Admission:
        return rows.Admission(self._scan, self._clock(), self._max_active_pairs)

    # ---------------------------------------------------------------------------------------- pairs

    async def submit(self, pair: ContrastPair) -> Submission:
        """Scan a pair and store it; to one that is stored already, add the step of this copy."""

        def work(tables: Tables) -> Submission:
            return rows.submit_pair(tables, pair, pair.provenance.as_origins, self._admission)

        return await self._database.write(work)

    async def find(
        self, words: str = "", *, status: CardStatus | None = None, limit: int = 50
    ) -> tuple[StoredPair, ...]:
        """Return pairs for people to read: the highest utility first, then the latest change.

        A pair must hold all the words of three or more characters, also as parts of others.
        """
        parts = [word for word in rows.clean(words).split() if len(word) >= MIN_WORD_CHARS]

        def read(tables: Tables) -> tuple[StoredPair, ...]:
            query = tables.quote_fts(" ".join(parts)) if parts else ""
            return rows.select_pairs(tables, FOUND_CONDITION, (status, query, limit))

        return await self._database.read(read)

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        """Return stored pairs by their ids: all, or those of ``pair_ids`` and ``status``."""
        ids = None if pair_ids is None else json.dumps(list(pair_ids))

        return await self._database.read(
            lambda tables: rows.select_pairs(tables, CHOSEN_CONDITION, (status, ids))
        )

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return all promoted pairs that a scope may see, in the order of their ids.

        A pair that was returned before is the same object; only new ones are read.
        """

        def read(tables: Tables) -> tuple[ContrastPair, ...]:
            sql = "SELECT id FROM memory_pairs WHERE status = 'promoted' ORDER BY id"
            ids = [pair_id for (pair_id,) in tables.execute(sql).fetchall()]
            known = dict(self._promoted)
            new_ids = json.dumps([pair_id for pair_id in ids if pair_id not in known])
            for stored in rows.select_pairs(tables, CHOSEN_CONDITION, (None, new_ids)):
                known[stored.pair.id] = stored.pair
            self._promoted = {pair_id: known[pair_id] for pair_id in ids}
            return tuple(self._promoted.values())

        promoted = await self._database.read(read)
        return tuple(pair for pair in promoted if is_visible_to(pair.scope, scope))

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

        def work(tables: Tables) -> None:
            now = self._clock()
            for pair_id in pair_ids:
                rows.move_pair(tables, rows.read_pair(tables, pair_id), status, reason, now=now)

        await self._database.write(work)

    async def add_anchors(self, anchors: Sequence[ContrastPair]) -> int:
        """Store labelled pairs that calibration never learns from; return the number of new ones.

        Raises:
            DataError: A stored pair has the same transition, or comes from the same trace.
        """
        for pair in anchors:
            rows.encode_pair(pair)
        return await self._database.write(
            lambda tables: sum(
                rows.add_anchor(tables, pair, pair.provenance.as_origins) for pair in anchors
            )
        )

    async def anchors(self) -> tuple[ContrastPair, ...]:
        """Return the anchors in the order of their ids."""
        return await self._database.read(rows.read_anchors)

    # ---------------------------------------------------------------------------------------- tests

    async def open_test(
        self,
        pair_ids: Sequence[str],
        *,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Record a test before its alpha is chosen, so that ``n_earlier_tests`` is exact.

        The number is exact even if several processes test at once. A test that never ends still
        counts against the error probability of its traces.

        Args:
            pair_ids: The batch.
            traces: The held-out traces. Tests are counted by their content and their names.
            kind: Whether the test promotes the batch, or measures promoted pairs again.

        Raises:
            DataError: A pair has the wrong status or needs review, or comes from one of the traces.
                Or the batch or the traces are empty.
        """
        batch = tuple(pair_ids)
        holdout = frozenset(traces)
        if not holdout or not batch or len(set(batch)) < len(batch):
            raise DataError(
                "a batch is tested on held-out traces; name the traces, at least one pair, and "
                "each pair once"
            )

        def work(tables: Tables) -> BatchTest:
            trace_ids = {trace.id for trace in holdout}
            for pair_id in batch:
                _check_testable(rows.read_pair(tables, pair_id), trace_ids, kind)
            earlier = rows.read_tests(tables)
            test = BatchTest(
                number=len(earlier) + 1,
                n_earlier_tests=count_tests(earlier, holdout),
                pair_ids=batch,
                kind=kind,
                content_fingerprints=tuple(sorted({trace.fingerprint for trace in holdout})),
                name_fingerprints=tuple(sorted(map(compute_fingerprint, trace_ids))),
                at=self._clock(),
            )
            record = {"number": test.number, "test": rows.encode_value(test)}
            tables.table("memory_tests").insert(record)
            return test

        return await self._database.write(work)

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """Store the result of a test and change the pairs in one transaction.

        If the test passed, a ``promote`` test promotes its batch and a ``demote`` test changes
        nothing. If a ``demote`` test failed, its pairs go back to quarantine and need review. Pairs
        that changed since the test was opened keep their status.

        Raises:
            DataError: The evidence does not fit the test, or the test is over or was never opened.
        """

        def work(tables: Tables) -> None:
            now = self._clock()
            test = next((one for one in rows.read_tests(tables) if one.number == number), None)
            if test is None or test.evidence is not None:
                state = "was never opened" if test is None else "is over"
                raise DataError(f"test {number} {state}; open a test for each batch")
            problem = find_inconsistency(test, evidence)
            if problem is not None:
                raise DataError(
                    f"the evidence does not fit test {number}: {problem}; test the batch again"
                )
            ended = test.model_copy(update={"evidence": evidence})
            tables.table("memory_tests").update(number, {"test": rows.encode_value(ended)})
            batch = canonical_json(list(test.pair_ids))
            tables.execute(
                "UPDATE memory_pairs SET utility = ? WHERE id IN (SELECT value FROM json_each(?))",
                (compute_utility(evidence), batch),
            )
            unchanged = (batch, rows.format_time(test.at))
            for stored in rows.select_pairs(tables, UNCHANGED_CONDITION, unchanged):
                if test.kind == "promote" and evidence.passed_test:
                    rows.move_pair(tables, stored, "promoted", now=now)
                elif test.kind == "promote":
                    sql = "UPDATE memory_pairs SET failed_test = 1 WHERE id = ?"
                    tables.execute(sql, (stored.pair.id,))
                elif not evidence.passed_test:
                    rows.move_pair(tables, stored, "quarantined", MEASURED_HARM, now=now)

        await self._database.write(work)

    async def tests(self) -> tuple[BatchTest, ...]:
        """Return all tests in their order."""
        return await self._database.read(rows.read_tests)

    # --------------------------------------------------------------------------------------- traces

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        """Add a trace, unless it is stored; DataError if it is stored with another purpose."""
        await self._database.write(lambda tables: rows.open_trace(tables, trace_id, purpose))

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        """Append an event and return whether it is new.

        If the stored event has no label, the label of this one is added. A stored label stays.

        Raises:
            DataError: The trace is unknown, or another event has the same step.
        """
        return await self._database.write(lambda tables: rows.append_event(tables, trace_id, event))

    async def label(self, trace_id: str, step: int, label: Label, *, replace: bool = True) -> None:
        """Label a stored step.

        Raises:
            DataError: The trace has no such step. Or ``replace`` is false, and it has a label.
        """

        def work(tables: Tables) -> None:
            event = rows.find_event(tables, trace_id, step)
            if event is None:
                raise DataError(
                    f"trace {trace_id} has no step {step} to label; steps are numbered from 0"
                )
            old = event.label
            if old is not None and not replace:
                raise DataError(
                    f"step {step} of trace {trace_id} already has a label from a {old.source} with "
                    f"progress after {old.progress_after:g}; replace it explicitly if it is wrong"
                )
            rows.replace_event(tables, trace_id, event.model_copy(update={"label": label}))

        await self._database.write(work)

    async def trace(self, trace_id: str) -> StoredTrace | None:
        """Return a trace with its events in the order of their steps, or None."""
        return await self._database.read(partial(rows.find_trace, trace_id=trace_id))

    async def trace_ids(self) -> tuple[str, ...]:
        """Return the ids of all traces, sorted."""
        return tuple(sorted(await self.content_hashes()))

    async def content_hashes(self) -> Mapping[str, str]:
        """Return the hash of each trace's content, by its id."""
        return dict(await self._database.fetch_rows("SELECT id, content_hash FROM traces"))

    async def testable_traces(self) -> tuple[TestableTrace, ...]:
        """Return all traces with labelled steps, newest first."""
        return tuple(
            TestableTrace(trace_id, json.loads(purpose), content_hash, bool(has_pairs))
            for trace_id, purpose, content_hash, has_pairs in await self._database.fetch_rows(
                TESTABLE_QUERY
            )
        )

    async def purposes(self, *, limit: int) -> frozenset[str]:
        """Return the distinct purposes of all traces, at most ``limit``."""
        sql = "SELECT DISTINCT purpose FROM traces LIMIT ?"
        found = await self._database.fetch_rows(sql, (limit,))
        return frozenset(json.loads(purpose) for (purpose,) in found)

    async def summaries(self) -> tuple[TraceSummary, ...]:
        """Return the counts of each trace, in the order of their ids."""
        found = await self._database.read(lambda tables: list(tables.query(SUMMARIES_QUERY)))
        return tuple(
            TraceSummary(**{**row, "purpose": json.loads(row["purpose"])}) for row in found
        )

    # --------------------------------------------------------------------------------- calibrations

    async def start_calibration(self, identity: str, baseline: str) -> None:
        """Store the start of a calibration, in place of an earlier one of its identity."""
        record = {"identity": identity, "baseline": baseline}
        await self._database.write(
            lambda tables: tables.table("calibrations").insert(record, replace=True)
        )

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        """Return the latest calibration of an identity, or None."""
        sql = "SELECT baseline, result FROM calibrations WHERE identity = ?"
        found = await self._database.fetch_rows(sql, (identity,))
        return StoredCalibration(*found[0]) if found else None

    async def finish_calibration(self, identity: str, result: str) -> None:
        """Store the result of a calibration."""
        sql = "UPDATE calibrations SET result = ? WHERE identity = ?"
        await self._database.execute(sql, (result, identity))

    # ------------------------------------------------------------------- forgetting, export, import

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

        def delete(tables: Tables, rest: str) -> list[str]:
            found = tables.execute(f"DELETE FROM {rest}", (trace_id,))  # noqa: S608 - constants
            return [row_id for (row_id,) in found.fetchall()]

        def work(tables: Tables) -> ForgetResult:
            pair_ids = delete(tables, f"memory_pairs WHERE {FROM_TRACE} RETURNING id")
            anchors = delete(tables, f"memory_anchors WHERE {FROM_TRACE} RETURNING id")
            owners = json.dumps(pair_ids + anchors)
            owned = "owner IN (SELECT value FROM json_each(?))"
            tables.table("memory_origins").delete_where(owned, [owners])
            steps = delete(tables, "trace_events WHERE trace_id = ? RETURNING step")
            traces = delete(tables, "traces WHERE id = ? RETURNING id")
            # Merges the parts of the index; deleted words stay in the old ones until then.
            tables.table("memory_pairs").optimize()
            outcomes = tables.table("outcomes")
            n_responses = outcomes.count_where(CALIBRATION_RESPONSES)
            if calls:
                outcomes.delete_where(CALIBRATION_RESPONSES)
            return ForgetResult(
                trace_id=trace_id,
                trace_removed=bool(traces),
                n_events=len(steps),
                pair_ids=tuple(sorted(pair_ids)),
                n_anchors=len(anchors),
                n_responses=n_responses if calls else 0,
                n_responses_left=0 if calls else n_responses,
            )

        result = await self._database.write(work)
        return result.model_copy(update={"remains_in_wal": not await self._database.checkpoint()})

    async def export_lines(self) -> AsyncIterator[str]:
        """Yield the memory as lines of ASCII JSON; equal memories give equal lines.

        Tests, histories, and rejected or archived pairs are not exported. Concurrent writes may be
        missing or included.
        """
        async for line in export.read_lines(self._database):
            yield rows.encode_value(line)

    async def import_lines(self, lines: Iterable[str]) -> ImportResult:
        """Import the lines of ``export_lines``, all or none; a second import changes nothing.

        Each new pair is scanned and quarantined, whatever its status was. Pairs that are stored
        already only get the new origins. Pairs that share a transition or a trace with an anchor
        are left out.

        Raises:
            DataError: A line is not part of an export; names the line.
        """
        parsed = await anyio.to_thread.run_sync(export.parse_lines, lines)

        def work(tables: Tables) -> ImportResult:
            return export.import_parsed(tables, parsed, self._admission)

        return await self._database.write(work)


def _check_testable(
    stored: StoredPair, trace_ids: Collection[str], kind: Literal["promote", "demote"]
) -> None:
    """Check that a pair may be tested on traces; DataError says why not."""
    pair_id = stored.pair.id
    needed = "promoted" if kind == "demote" else "quarantined"
    if stored.status != needed:
        raise DataError(
            f"pair {pair_id} is {stored.status}; only {needed} pairs are in a {kind} test"
        )
    if stored.needs_review:
        raise DataError(f"pair {pair_id} needs review ({stored.reason}); release it first")
    for origin in stored.origins:
        if origin.trace_id in trace_ids:
            raise DataError(
                f"pair {pair_id} was made of trace {origin.trace_id}, which is held out; a trace "
                "cannot test a pair that came from it"
            )
