"""What the house needs from outside: small protocols, a few methods each.

Stages and the trainer know these and nothing else of models, targets, environments and storage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from pydantic import JsonValue

from reflact.concurrency import Stream
from reflact.events import Event
from reflact.messages import CallId, CallReservation, Draft, RenderedPrompt, Reply, ReplyModel, StoredResponse
from reflact.records import (
    CandidateReview,
    CriticDescription,
    EpochRecord,
    FaultCount,
    FaultKind,
    PromotionRecord,
    Reuse,
    RunState,
    RunStatus,
    Spend,
    StageTime,
    StepRecord,
    Usage,
)
from reflact.types import Grade, Item, Rollout, Skill, Split, Turn

R = TypeVar("R", bound=ReplyModel)

CommitRecord = StepRecord | EpochRecord | PromotionRecord
"""What a run commits, each with the state after it."""

EventCallback = Callable[[Event], Awaitable[None]]
"""Is told of everything that happens; waits where whoever listens is slow."""

Approver = Callable[[CandidateReview], Awaitable[bool | str]]
"""Looks at a candidate that the gate would accept: True lets it pass; False, or a reason, is a veto."""


class LLM(Protocol):
    """The one door to a role's model."""

    @property
    def identity(self) -> str:
        """The endpoint, model and settings that influence replies; never credentials."""
        ...

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Send a prompt and return a validated reply.

        Args:
            prompt: The messages.
            reply_type: What is asked for; ``Text`` for plain text.
            call_id: The call's logical identity; part of the key under which the reply is stored.
            check: Raises ValueError where a well-formed reply does not fit the data at hand; the
                reply is then sent back with that reason. Must depend on nothing but the data that
                the prompt was made from.

        Raises:
            ReplyError: No attempt gave a valid reply.
            ContextOverflow: The request is larger than the model's context.
            ProviderError: The endpoint refused, failed or could not be reached.
            BudgetSpent: The run's budget has no room for a call.
        """
        ...


class DraftingLLM(LLM, Protocol):
    """A door that shows replies while they are written."""

    def draft(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Stream[Draft[R]]:
        """Ask as ``LLM.ask`` does, and iterate over drafts; the last one carries the reply.

        Nothing is sent before the first step; leaving ``async with`` around it, or the loop, cancels the
        call. Where nothing is streamed (the answer is stored, the endpoint does not stream, the reply is
        plain text) the last draft is the only one.
        """
        ...


class Session(Protocol):
    """A target at work on one item: holds the conversation."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation so far, without the skill."""
        ...

    async def reply(self, message: str) -> str:
        """Give the target a message (a question, an observation) and return its answer."""
        ...


class Target(Protocol):
    """The frozen agent whose instructions are the skill."""

    @property
    def identity(self) -> str:
        """The settings that influence answers; part of every rollout's key."""
        ...

    def session(self, skill: Skill, *, rollout: str) -> Session:
        """Start a conversation under a skill; ``rollout`` is the rollout's key."""
        ...


class Environment(Protocol):
    """Where tasks come from and how they are judged."""

    @property
    def identity(self) -> str:
        """Name, version and settings that influence scores; part of every rollout's key."""
        ...

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items, in a fixed order."""
        ...

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Let the session work on an item and judge the result.

        ``seed`` derives from the item and the trial. A model error is passed on as it is; any other
        exception leaves the item unmeasured.
        """
        ...


class Annotator(Protocol):
    """Adds to what failure analysts are told of a trajectory."""

    @property
    def identity(self) -> str:
        """All that its notes depend on beside item and rollout; part of the run's identity."""
        ...

    async def annotate(self, item: Item, rollout: Rollout) -> Sequence[str]:
        """Return notes on a failed rollout, each a line; a model error is passed on as it is."""
        ...


@runtime_checkable
class CriticBacked(Protocol):
    """A grader, an environment or an annotator that may tell a critic's opinion; the summary says so then."""

    @property
    def scored_by(self) -> CriticDescription | None:
        """The critic, or None where scores come from elsewhere."""
        ...


class ResponseStore(Protocol):
    """Model calls that were paid for, and those that are under way."""

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return what was stored under a key, or None."""
        ...

    async def reserve(self, reservation: CallReservation) -> None:
        """Add an open call to the ledger before it is sent; on disk when this returns."""
        ...

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store a response and settle its call in one transaction; on disk when this returns."""
        ...

    async def settle(self, reservation: CallReservation, usage: Usage) -> None:
        """Settle a call without a stored response."""
        ...

    async def release(self, reservation: CallReservation) -> None:
        """Remove an open call that cost nothing."""
        ...

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        """Count a failed attempt of a run's call; on disk when this returns."""
        ...


class RolloutStore(Protocol):
    """Rollouts that finished."""

    async def find_rollouts(self, keys: Sequence[str]) -> Mapping[str, Rollout]:
        """Return those of the keys that are stored."""
        ...

    async def store_rollout(self, rollout: Rollout) -> None:
        """Store a measured rollout; on disk when this returns."""
        ...


class DecisionLog(Protocol):
    """Outcomes that decisions used but that are no effects, under (step, label), within one run."""

    async def get(self, step: int, label: str) -> JsonValue:
        """Return what was noted, or None."""
        ...

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        """Note an outcome before it is used; the first note under a label stands."""
        ...


class RunStore(RolloutStore, ResponseStore, Protocol):
    """One run's history in a store that other runs may share."""

    async def open_run(
        self, run_id: str, identity: Mapping[str, JsonValue], config: JsonValue, *, resume: bool = True
    ) -> RunState | None:
        """Start or go on with a run: returns its last committed state, None for a new run.

        Intents that an earlier process left open become unsettled. Without ``goes_on`` the run is only
        looked at or measured: how it ended and under which configuration stay as they are.
        """
        ...

    def decision_log(self, run_id: str) -> DecisionLog:
        """Return the run's journal."""
        ...

    async def commit(
        self, run_id: str, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        """Write what a step, an epoch's end or a promotion did, the state after it and its skills.

        One transaction. Without a record the state is the run's first.
        """
        ...

    async def records(self, run_id: str) -> tuple[StepRecord, ...]:
        """Return the records of all committed steps, in order."""
        ...

    async def epochs(self, run_id: str) -> tuple[EpochRecord, ...]:
        """Return the records of all committed ends of epochs, in order."""
        ...

    async def promotions(self, run_id: str) -> tuple[PromotionRecord, ...]:
        """Return the comparisons of the last skill with the best one, in order."""
        ...

    async def records_of_other_runs(
        self, environment: str, *, exclude: str
    ) -> Mapping[str, tuple[StepRecord, ...]]:
        """Return the committed steps of other runs of an environment by run, the oldest run first.

        Args:
            environment: The environment's identity.
            exclude: The run to leave out.
        """
        ...

    async def skill(self, skill_hash: str) -> Skill:
        """Return a stored document.

        Raises:
            StoreError: There is none with this hash.
        """
        ...

    async def append_event(self, event: Event) -> bool:
        """Store a durable event; False where this run already has it."""
        ...

    async def events(self, run_id: str) -> tuple[Event, ...]:
        """Return the run's durable events, in order."""
        ...

    @property
    def reuse(self) -> Reuse:
        """What was found in the store since it was opened."""
        ...

    async def spend(self, run_id: str) -> tuple[Spend, ...]:
        """Return what the run has paid for, by role and purpose, sorted; calls in flight as unsettled."""
        ...

    async def add_seconds(
        self, run_id: str, seconds: float, stages: Mapping[str, float] | None = None
    ) -> float:
        """Add active time, in all and by stage, and return the run's total, in seconds."""
        ...

    async def stage_times(self, run_id: str) -> tuple[StageTime, ...]:
        """Return the active time of each stage over all starts of the run."""
        ...

    async def faults(self, run_id: str) -> tuple[FaultCount, ...]:
        """Return how often attempts failed in each way, over all starts of the run, sorted by kind."""
        ...

    async def finish(self, run_id: str, status: RunStatus, reason: str | None, summary: str) -> None:
        """Store how this start of the run ended, with its summary as JSON text."""
        ...


@runtime_checkable
class EventSink(Protocol):
    """Something that events are handed to; must not block."""

    async def __call__(self, event: Event) -> None:
        """Take one event."""
        ...
