"""What calibration needs from storage: cards and pairs with their states, tests that promote them, traces.

A *unit* is what is stored, scanned, promoted and retired as one: a contrast pair with its two cards, named by
the pair's id, or a card that stands alone, named by its own. All methods raise StoreError where the file
cannot be read or written, and DataError where an id names nothing. ``store.cards.SQLiteCards`` and
``store.traces.SQLiteTraces`` say what each method does.
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
    """What became of a unit that was handed in.

    Args:
        unit_id: The pair's id, or the card's.
        new: False where the store had it already; it is then as it was.
        status: Where it stands now: quarantined, rejected, or whatever it was.
        reason: The rule that held or rejected it, ``anchor`` where its transition is one that is never
            learned from, ``anchor_trace`` where it was made of a trace that an anchor was made of; None where
            nothing was found.
    """

    unit_id: str
    is_new: bool
    status: CardStatus
    reason: str | None = None


class StoredPair(FrozenModel):
    """A pair as the store has it; ``held`` ones are quarantined for a reason and are not to be tested.

    ``origins`` are all steps that it was made of, sorted; the pair's own provenance is that of the first one.
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
        """Whether somebody has to look at it before it counts; see ``CardStore.release``."""
        return self.status == "quarantined" and self.reason is not None


class CardQuery(FrozenModel):
    """What is looked for.

    Args:
        text: Words that count for relevance; any text is valid, and one without words finds everything by
            worth.
        kinds: Kinds of cards; empty for all.
        statuses: Their states, empty for all; only promoted cards count anywhere but in a list.
        scope: Who asks: a card with a field that is not empty is found only where this names one
            of its values.
        all_scopes: Look past scopes: for lists that a person reads, never for a prompt.
        now: The time against which recency is counted; without it recency does not count.
        limit: At most so many.
    """

    text: str = ""
    kinds: tuple[CardKind, ...] = ()
    statuses: tuple[CardStatus, ...] = ("promoted",)
    scope: Scope = Scope()
    all_scopes: bool = False
    now: datetime | None = None
    limit: int = Field(default=10, ge=1, le=1000)


class StatusChange(FrozenModel):
    """One entry of a unit's history; ``promotion`` is the number of the evidence it rests on."""

    before: CardStatus | None
    after: CardStatus
    reason: str | None
    test_number: int | None = None
    version: int = 1
    at: datetime


class BatchTest(FrozenModel):
    """A batch that was tested, or is being tested while it has no evidence yet.

    Args:
        number: Counts all batches of the store, from 1.
        held_out: What the held-out traces are called; nothing is counted by it but whose turn a slice is.
        before: Batches opened before it on any of its traces.
        unit_ids: The batch.
        evidence: How it ended.
        use: Whether it was tested to promote, or measured again.
        traces: What stands for what each of the traces held on which it was tested, sorted; see ``mark_of``.
        names: What stands for the names of these traces, sorted.
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
        """By what its traces are known: what each held, and what it was called."""
        return frozenset((*self.content_fingerprints, *self.name_fingerprints))


def count_tests(tests: Iterable[BatchTest], traces: Iterable[TraceIdentity]) -> int:
    """Return how many tests were made on any of these traces."""
    marks = frozenset[str]().union(*(trace.fingerprints for trace in traces))
    return sum(not marks.isdisjoint(test.fingerprints) for test in tests)


class ForgetResult(FrozenModel):
    """What ``forget`` removed; the ids of units are hashes and hold nothing of their content.

    ``replies`` are those of models to calibration's questions that were removed, ``replies_left`` those that
    stay in the file and may quote the trace. ``logged`` says that the log beside the file could not be
    emptied, since another process was reading: what was removed stays in there until the log is.
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
    """A trace as far as it was appended."""

    id: str
    purpose: str
    events: tuple[ScoreEvent, ...]


class TestableTrace(NamedTuple):
    """A stored trace by which something could be tested, without its steps.

    Args:
        number: Its place in the order in which traces came.
        id: The trace.
        purpose: What the agent was to achieve.
        content: What it holds, see ``Recording``.
        taught: Whether a stored pair was made of it, or of a trace that holds the same.
    """

    number: int
    id: str
    purpose: str
    content_hash: str
    has_pairs: bool


class TraceSummary(FrozenModel):
    """What a stored trace holds, in numbers.

    Args:
        id: The trace.
        purpose: What the agent was to achieve.
        events: Its steps.
        scored: Those that a critic scored as they happened.
        gold: Those of which a program or a person said what is right; what samples agree on is none.
        pairs: Stored contrast pairs that were made of it; a trace that has any tests no batch.
    """

    id: str
    purpose: str
    n_events: int
    n_scored: int
    n_labelled: int
    n_pairs: int


class CardStore(Protocol):
    """What calibration does with pairs and cards."""

    async def submit(self, pair: ContrastPair, *, created_by: str = "") -> Submission:
        """Store a pair with its two cards, scanned."""
        ...

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return all promoted pairs that a scope may see; the same objects as before."""
        ...

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        """Return pairs in the order of their ids."""
        ...

    async def remaining_capacity(self) -> int:
        """Return how many pairs can be added before the bound archives one that no test refused."""
        ...

    async def open_test(
        self,
        unit_ids: Sequence[str],
        *,
        holdout_id: str,
        traces: Collection[TraceIdentity],
        kind: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Record a test before its level is chosen."""
        ...

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """Store how a test ended and do what follows."""
        ...

    async def tests(self) -> tuple[BatchTest, ...]:
        """Return all tests, in their order."""
        ...

    async def anchors(self) -> tuple[ContrastPair, ...]:
        """Return the anchors."""
        ...


class TraceStore(Protocol):
    """What calibration does with traces."""

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        """Make a trace, or go on with it."""
        ...

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        """Append an event, whole; False if it is there already."""
        ...

    async def trace(self, trace_id: str) -> StoredTrace | None:
        """Return a trace, or None."""
        ...

    async def testable_traces(self, *, before: int | None, limit: int) -> tuple[TestableTrace, ...]:
        """Return traces with steps of which a program or a person said what is right."""
        ...

    async def purposes(self, *, limit: int) -> frozenset[str]:
        """Return the different purposes of all traces."""
        ...


class StoredCalibration(FrozenModel):
    """A calibration that was begun.

    Args:
        number: Counts all calibrations of the store, from 1.
        baseline: What stood in the memory when it began, as JSON.
        result: What came of it, as JSON; None while it is not over.
    """

    number: int
    baseline: str
    result: str | None = None


class CalibrationStore(Protocol):
    """Calibrations that were begun, so that one which was stopped goes on from what it began with."""

    async def start_calibration(self, identity: str, baseline: str) -> StoredCalibration:
        """Book a calibration, on disk when this returns; ``identity`` is equal for equal ones."""
        ...

    async def find_calibration(self, identity: str) -> StoredCalibration | None:
        """Return the latest calibration of an identity, or None."""
        ...

    async def finish_calibration(self, number: int, result: str) -> None:
        """Store what came of a calibration; of one that is over the first result stays."""
        ...
