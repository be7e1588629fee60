"""The storage that calibration needs: protocols of card, trace and calibration stores, and their values.

A *unit* is stored, scanned, promoted and archived as one: a contrast pair with its two cards, named by the
pair's id, or a card without a pair, named by its own id. All methods raise ``StoreError`` if the file cannot
be read or written, and ``DataError`` for an unknown id. ``SQLiteCardStore`` and ``SQLiteTraceStore`` document
the methods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Literal, NamedTuple, Protocol

from pydantic import Field

from reflact.memory.cards import TraceIdentity
from reflact.memory.models import (
    CardKind,
    CardStatus,
    ContrastPair,
    Origin,
    PromotionEvidence,
    Scope,
    ScoreEvent,
    Share,
)
from reflact.types import FrozenModel


class Submission(FrozenModel):
    """The result of a submission.

    Args:
        unit_id: The id of the pair or the card.
        is_new: False if the unit was stored already; it then stays as it is.
        status: The status of the unit now.
        reason: The rule that quarantined or rejected it, or None. ``anchor``: an anchor has the same
            transition. ``anchor_trace``: an anchor came from the same trace.
    """

    unit_id: str
    is_new: bool
    status: CardStatus
    reason: str | None = None


class StoredPair(FrozenModel):
    """A pair in the store, with its status and measurements.

    ``origins`` are all steps that gave this pair, sorted. The pair's own provenance is the first submitted.
    """

    pair: ContrastPair
    status: CardStatus
    reason: str | None = None
    version: int = 1
    trust: Share = 0.5
    utility: Share = 0.5
    created_by: str = ""
    created_at: datetime
    changed_at: datetime
    origins: tuple[Origin, ...] = ()

    @property
    def needs_review(self) -> bool:
        """Whether it is quarantined for a reason and cannot be tested; see ``SQLiteCardStore.release``."""
        return self.status == "quarantined" and self.reason is not None


class CardQuery(FrozenModel):
    """A query for cards.

    Args:
        text: Words that count for relevance; any text is valid. Without words, all cards match.
        kinds: Kinds of cards; empty for all.
        statuses: Statuses of cards; empty for all.
        scope: Who asks. A card is found only if this shares a value with each of its fields that is not empty.
        all_scopes: Ignore scopes: for lists that people read, never for a prompt.
        now: The time from which recency is counted; without it recency does not count.
        limit: The largest number of results, 1 to 1000.
    """

    text: str = ""
    kinds: tuple[CardKind, ...] = ()
    statuses: tuple[CardStatus, ...] = ("promoted",)
    scope: Scope = Scope()
    all_scopes: bool = False
    now: datetime | None = None
    limit: int = Field(default=10, ge=1, le=1000)


class StatusChange(FrozenModel):
    """One entry of a unit's history; ``test_number`` names the test that caused it."""

    before: CardStatus | None
    after: CardStatus
    reason: str | None
    test_number: int | None = None
    version: int = 1
    at: datetime


class BatchTest(FrozenModel):
    """A test of a batch.

    Args:
        number: The number of the test in its store, from 1.
        holdout_id: The name of the held-out set.
        n_earlier_tests: Tests that were opened before it on any of its traces.
        unit_ids: The batch.
        evidence: The result; None while the test runs.
        kind: Whether the test promotes the batch, or measures promoted units again.
        content_fingerprints: The fingerprints of the traces' contents, sorted; see ``compute_fingerprint``.
        name_fingerprints: The fingerprints of the traces' names, sorted.
    """

    number: int
    holdout_id: str
    n_earlier_tests: int
    unit_ids: tuple[str, ...]
    evidence: PromotionEvidence | None = None
    kind: Literal["promote", "demote"] = "promote"
    content_fingerprints: tuple[str, ...] = ()
    name_fingerprints: tuple[str, ...] = ()
    at: datetime

    @property
    def fingerprints(self) -> frozenset[str]:
        """All fingerprints of the traces."""
        return frozenset((*self.content_fingerprints, *self.name_fingerprints))


def count_tests(tests: Iterable[BatchTest], traces: Iterable[TraceIdentity]) -> int:
    """Return how many tests used any of these traces."""
    fingerprints = frozenset[str]().union(*(trace.fingerprints for trace in traces))
    return sum(not fingerprints.isdisjoint(test.fingerprints) for test in tests)


class ForgetResult(FrozenModel):
    """What ``forget`` removed; the ids of units are hashes and reveal no content.

    ``n_responses`` counts the removed responses to questions of calibrations. ``n_responses_left`` counts
    those that stay in the file and may quote the trace. ``remains_in_wal`` says that another process was
    reading, so that the write-ahead log still contains the removed data.
    """

    trace_id: str
    trace_removed: bool
    n_events: int
    unit_ids: tuple[str, ...]
    n_cards: int
    n_anchors: int
    n_responses: int = 0
    n_responses_left: int = 0
    remains_in_wal: bool = False


class StoredTrace(FrozenModel):
    """A stored trace with its events."""

    id: str
    purpose: str
    events: tuple[ScoreEvent, ...]


class TestableTrace(NamedTuple):
    """A stored trace with labelled steps, without the steps themselves.

    Args:
        number: Its position in the order of insertion.
        id: The id of the trace.
        purpose: The purpose of the agent.
        content_hash: The hash of its content; see ``TraceIdentity``.
        has_pairs: Whether a stored pair came from this trace or from one with equal content.
    """

    number: int
    id: str
    purpose: str
    content_hash: str
    has_pairs: bool


class TraceSummary(FrozenModel):
    """Counts of a stored trace.

    Args:
        id: The id of the trace.
        purpose: The purpose of the agent.
        n_events: Its steps.
        n_scored: Steps with an evaluation of a critic.
        n_labelled: Steps with a label of a program or a person; agreement does not count.
        n_pairs: Stored pairs that came from it; a trace with pairs tests no batch.
    """

    id: str
    purpose: str
    n_events: int
    n_scored: int
    n_labelled: int
    n_pairs: int


class CardStore(Protocol):
    """The store of pairs and cards that calibration needs."""

    async def submit(self, pair: ContrastPair, *, created_by: str = "") -> Submission:
        """Scan a pair and store it with its two cards."""
        ...

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return all promoted pairs that a scope may see; a known pair is the same object as before."""
        ...

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        """Return pairs in the order of their ids."""
        ...

    async def remaining_capacity(self) -> int:
        """Return how many pairs can be added before the bound archives one that has not failed a test."""
        ...

    async def open_test(
        self,
        unit_ids: Sequence[str],
        *,
        holdout_id: str,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Record a test before its alpha is chosen."""
        ...

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """Store the result of a test and change the units."""
        ...

    async def tests(self) -> tuple[BatchTest, ...]:
        """Return all tests, in their order."""
        ...

    async def anchors(self) -> tuple[ContrastPair, ...]:
        """Return the anchors."""
        ...


class TraceStore(Protocol):
    """The store of traces that calibration needs."""

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        """Add a trace, unless it is stored with the same purpose."""
        ...

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        """Append an event; return False if it is stored already."""
        ...

    async def trace(self, trace_id: str) -> StoredTrace | None:
        """Return a trace, or None."""
        ...

    async def testable_traces(self, *, before: int | None, limit: int) -> tuple[TestableTrace, ...]:
        """Return traces with steps that a program or a person labelled, newest first."""
        ...

    async def purposes(self, *, limit: int) -> frozenset[str]:
        """Return the distinct purposes of all traces."""
        ...


class StoredCalibration(FrozenModel):
    """A calibration that has started.

    Args:
        number: The number of the calibration in its store, from 1.
        baseline: The memory's state at the start, as JSON.
        result: The result as JSON; None before the end.
    """

    number: int
    baseline: str
    result: str | None = None


class CalibrationStore(Protocol):
    """Stores the start and the result of calibrations, so that a stopped one resumes from its start."""

    async def start_calibration(self, identity: str, baseline: str) -> StoredCalibration:
        """Store the start of a calibration; ``identity`` is equal for equal calibrations."""
        ...

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        """Return the latest calibration of an identity, or None."""
        ...

    async def finish_calibration(self, number: int, result: str) -> None:
        """Store the result of a calibration; a result that is stored already stays."""
        ...
