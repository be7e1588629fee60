"""What calibration needs from storage: cards and pairs with their states, tests that promote them, traces.

A *unit* is what is stored, scanned, promoted and retired as one: a contrast pair with its two cards, named by
the pair's id, or a card that stands alone, named by its own. All methods raise StoreError where the file
cannot be read or written, and DataError where an id names nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Literal, NamedTuple, Protocol

from pydantic import Field

from reflact.memory import (
    CardKind,
    CardStatus,
    ContrastPair,
    Gold,
    MemoryCard,
    Origin,
    Promotion,
    Scope,
    ScoreEvent,
    Share,
)
from reflact.memory_cards import Recording
from reflact.types import Frozen


class Submission(Frozen):
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
    new: bool
    status: CardStatus
    reason: str | None = None


class StoredPair(Frozen):
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
    created: datetime
    changed: datetime
    origins: tuple[Origin, ...] = ()

    @property
    def held(self) -> bool:
        """Whether somebody has to look at it before it counts; see ``CardStore.release``."""
        return self.status == "quarantined" and self.reason is not None


class Query(Frozen):
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


class StatusChange(Frozen):
    """One entry of a unit's history; ``promotion`` is the number of the evidence it rests on."""

    before: CardStatus | None
    after: CardStatus
    reason: str | None
    promotion: int | None = None
    version: int = 1
    at: datetime


class BatchTest(Frozen):
    """A batch that was tested, or is being tested while it has no evidence yet.

    Args:
        number: Counts all batches of the store, from 1.
        held_out: What the held-out traces are called; nothing is counted by it but whose turn a slice is.
        before: Batches opened before it on any of its traces.
        unit_ids: The batch.
        evidence: How it ended.
        use: Whether it was tested to promote, or measured again.
        traces: What stands for the traces on which it was tested, sorted: the mark of what each held, of its
            name in tests of earlier versions; see ``mark_of``. None for a test from before they were stored.
        names: What stands for the names of these traces, sorted; none in tests of earlier versions.
    """

    number: int
    held_out: str
    before: int
    unit_ids: tuple[str, ...]
    evidence: Promotion | None = None
    use: Literal["promote", "demote"] = "promote"
    traces: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    at: datetime

    @property
    def marks(self) -> frozenset[str]:
        """By what its traces are known: what each held, and what it was called."""
        return frozenset((*(self.traces or ()), *self.names))


def count_tests(tests: Iterable[BatchTest], traces: Iterable[Recording]) -> int:
    """Return how many tests were made on any of these traces.

    One that does not say on which it was made counts always, so that error probability is never spent twice.
    """
    marks = frozenset[str]().union(*(trace.marks for trace in traces))
    return sum(test.traces is None or not marks.isdisjoint(test.marks) for test in tests)


class Forgotten(Frozen):
    """What ``forget`` removed; the ids of units are hashes and hold nothing of their content.

    ``replies`` are those of models to calibration's questions that were removed, ``replies_left`` those that
    stay in the file and may quote the trace. ``logged`` says that the log beside the file could not be
    emptied, since another process was reading: what was removed stays in there until the log is.
    """

    trace_id: str
    trace: bool
    events: int
    unit_ids: tuple[str, ...]
    cards: int
    anchors: int
    replies: int = 0
    replies_left: int = 0
    logged: bool = False


class StoredTrace(Frozen):
    """A trace as far as it was appended."""

    id: str
    purpose: str
    events: tuple[ScoreEvent, ...]


class ListedTrace(NamedTuple):
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
    content: str
    taught: bool


class TraceSummary(Frozen):
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
    events: int
    scored: int
    gold: int
    pairs: int


class CardStore(Protocol):
    """Pairs and cards, from submission to promotion and back."""

    async def submit(self, pair: ContrastPair, *, created_by: str = "") -> Submission:
        """Store a pair with its two cards, scanned; on disk when this returns.

        The same pair twice is one; made of another step, it has that origin as well.
        """
        ...

    async def submit_card(self, card: MemoryCard) -> Submission:
        """Store a card that stands alone, scanned, made by ``memory_cards.new_card``.

        Raises:
            DataError: It is no candidate, belongs to a pair, or its id does not follow from its content.
        """
        ...

    async def edit(
        self,
        card_id: str,
        *,
        content: str | None = None,
        pattern: str | None = None,
        strategy: str | None = None,
    ) -> Submission:
        """Change a card's text: its unit is scanned again and goes back to quarantine, one version up."""
        ...

    async def find(self, query: Query) -> tuple[MemoryCard, ...]:
        """Return cards, the best first; the same store and query give the same order."""
        ...

    async def find_pairs(self, query: Query) -> tuple[StoredPair, ...]:
        """Return whole pairs of which a card is found, the best first; ``limit`` counts pairs."""
        ...

    async def promoted(self, scope: Scope) -> tuple[ContrastPair, ...]:
        """Return all promoted pairs that whoever asks may see, in the order of their ids.

        Among these a critic chooses its worked examples. Pairs that were given before are the same objects.
        """
        ...

    async def pairs(
        self, pair_ids: Sequence[str] | None = None, *, status: CardStatus | None = None
    ) -> tuple[StoredPair, ...]:
        """Return pairs in the order of their ids; those of ``pair_ids`` that are stored, or all."""
        ...

    async def known(self, pair_ids: Sequence[str]) -> frozenset[str]:
        """Return those of the ids that were ever submitted and not forgotten."""
        ...

    async def open_test(
        self,
        unit_ids: Sequence[str],
        *,
        held_out: str,
        traces: Collection[Recording],
        use: Literal["promote", "demote"] = "promote",
    ) -> BatchTest:
        """Book a test before its level is chosen: ``before`` is exact, however many processes test at once.

        A test that never ends stays booked: it counts against the error probability.

        Args:
            unit_ids: The batch.
            held_out: What the held-out traces are called.
            traces: These, by whose content tests are counted.
            use: To promote the batch, or to measure it again.

        Raises:
            DataError: A unit is not quarantined, or held (to promote), or not promoted (to demote), or was
                made of one of the traces; or there is none.
        """
        ...

    async def close_test(self, number: int, evidence: Promotion) -> None:
        """Store how a test ended and do what follows, in one transaction.

        To promote: the batch is promoted where ``evidence.promoted``. To demote: ``promoted`` says whether
        it may stay; where not, it goes back to quarantine and is held.

        Raises:
            DataError: The evidence speaks of another batch or of other tests before it, or the test is over.
        """
        ...

    async def tests(self) -> tuple[BatchTest, ...]:
        """Return all tests, in their order."""
        ...

    async def reject(self, unit_ids: Sequence[str], *, reason: str) -> None:
        """Reject quarantined units."""
        ...

    async def archive(self, unit_ids: Sequence[str], *, reason: str) -> None:
        """Retire units."""
        ...

    async def release(self, unit_id: str, *, reason: str) -> None:
        """Let a held unit be tested: somebody looked at it."""
        ...

    async def room(self) -> int:
        """Return how many pairs can be added before a bound archives one that no test has refused."""
        ...

    async def measure(self, unit_id: str, *, utility: float) -> None:
        """Store a unit's measured utility, in 0..1."""
        ...

    async def history(self, unit_id: str) -> tuple[StatusChange, ...]:
        """Return all status changes of a unit, the first first."""
        ...

    async def keep_anchors(self, pairs: Sequence[ContrastPair]) -> int:
        """Keep gold pairs that are never learned from; returns how many were new.

        Raises:
            DataError: A stored pair speaks of the same transition, or was made of the same trace.
        """
        ...

    async def anchors(self) -> tuple[ContrastPair, ...]:
        """Return the anchors in the order of their ids."""
        ...

    async def forget(self, trace_id: str, *, calls: bool = False) -> Forgotten:
        """Remove everything that came from a trace: it, its events, units, cards, history, anchors.

        A unit that also came from another trace goes as well. With ``calls``, all stored replies of models
        to calibration's questions go too, of whatever trace: they would have to be asked anew.
        The evidence of tests stays: it holds hashes and numbers, and tests have to be counted.
        """
        ...


class TraceStore(Protocol):
    """Traces, appended event by event."""

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        """Make a trace, or go on with it.

        Raises:
            DataError: It is known with another purpose.
        """
        ...

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        """Append an event, whole; on disk when this returns. False where it is there already.

        Raises:
            DataError: The trace is unknown, or another event has the same step.
        """
        ...

    async def label(self, trace_id: str, step: int, gold: Gold) -> None:
        """Say what is right for a step that was appended without it, or otherwise."""
        ...

    async def trace(self, trace_id: str) -> StoredTrace | None:
        """Return a trace with its events in the order of their steps, or None."""
        ...

    async def trace_ids(self) -> tuple[str, ...]:
        """Return the ids of all traces, sorted."""
        ...

    async def testable(self, *, before: int | None, most: int) -> tuple[ListedTrace, ...]:
        """Return traces with steps of which a program or a person said what is right, the newest first.

        Args:
            before: Only those that came before the trace of this number; None: from the newest on.
            most: At most so many.
        """
        ...

    async def purposes(self, *, most: int) -> frozenset[str]:
        """Return the different purposes of all traces, at most so many."""
        ...
