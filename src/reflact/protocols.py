"""What the objects that a run works with must have; ``adapters`` adds what they may have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from pydantic import JsonValue, TypeAdapter

from reflact.events import Event
from reflact.jsonutil import parse_stored
from reflact.messages import (
    AgentAnswer,
    CallId,
    CallReservation,
    NoReply,
    RenderedPrompt,
    Reply,
    ReplyModel,
    StoredResponse,
)
from reflact.records import CandidateReview, FaultKind, StepBufferEntry
from reflact.skills.rejected_edits import RejectedEdit
from reflact.types import Case, FrozenModel, Grade, Item, Rewrite, Rollout, Skill, Split, Turn

R = TypeVar("R", bound=ReplyModel)
T = TypeVar("T")

EventCallback = Callable[[Event], Awaitable[None]]
"""Is called with every event; a slow callback delays the run."""

Approver = Callable[[CandidateReview], Awaitable[bool | str]]
"""Reviews a candidate that the gate would accept; True approves it, False or a reason is a veto."""


class LLM(Protocol):
    """The model of a role."""

    @property
    def identity(self) -> str:
        """The endpoint, model and settings that influence replies; never credentials."""

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Send a prompt and return a validated reply; for plain text, its type is ``Text``.

        ``call_id`` is part of the key of the stored reply. ``check`` raises ValueError if a reply
        does not fit the prompt's data; it is then sent back with that reason.

        Raises:
            ReplyError: No attempt gave a valid reply.
            ContextOverflow: The request is larger than the model's context.
            ProviderError: The endpoint refused, failed or could not be reached.
            BudgetSpent: A limit of the budget allows no further call.
        """


class Session(Protocol):
    """A target's conversation about one item."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation so far, without the skill."""

    async def reply(self, message: str) -> str:
        """Send the target a message (a question, an observation) and return its answer."""


class Target(Protocol):
    """The frozen agent whose instructions are the skill."""

    @property
    def identity(self) -> str:
        """The settings that influence answers; part of every rollout's key."""

    def session(self, skill: Skill, *, rollout: str) -> Session:
        """Start a conversation under a skill; ``rollout`` is the rollout's key."""


class Environment(Protocol):
    """The source of tasks and their grading."""

    @property
    def identity(self) -> str:
        """Name, version and settings that influence scores; part of every rollout's key."""

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items, in a fixed order."""

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Let the session work on an item and grade the result.

        ``seed`` derives from the item and the trial. Do not catch a ``ModelError``. Any other
        exception leaves the item unmeasured.
        """


class RequestForwarder(Protocol):
    """Makes an agent's requests part of a run: stored, limited, charged, recorded, replayed."""

    @property
    def identity(self) -> str:
        """The endpoint, model and settings that influence answers; never credentials."""

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a request of a chat completion and return the completion, in JSON.

        The run's endpoint, model and settings win over those of ``body``.

        Raises:
            ModelError: There is no answer, after all retries.
            BudgetSpent: A limit of the budget allows no further call.
        """


class RequestSender(RequestForwarder, Protocol):
    """Also takes the answers of an agent that asks its own model."""

    async def send(
        self,
        body: Mapping[str, JsonValue],
        *,
        call_id: CallId,
        answer: Callable[[], Awaitable[AgentAnswer]],
    ) -> str:
        """Return the text of the stored answer, or of a new one; raises as ``forward``.

        ``body`` is all that the answer depends on, without credentials. ``answer`` asks the agent's
        model once. It raises ConnectionError if the model cannot be reached; any other error with
        an HTTP status as ``status_code`` counts as the provider's refusal.
        """


class StepEvidence(FrozenModel):
    """What a proposer learns from in a step; the texts of cases come from agents and environments.

    ``cases`` are the measured rollouts, in the order of the step's items; without successes if
    ``reflect.failure_only`` is on. ``attempts`` are the earlier steps of the epoch with their
    verdicts, ``rejected_edits`` changes of earlier epochs that did not help and are relevant to the
    cases. ``meta_skill`` is the optimizer's memory. ``task`` says what is known of the tasks, the
    score and the agent, as a section of a prompt.
    """

    step: int
    cases: tuple[Case, ...]
    attempts: tuple[StepBufferEntry, ...] = ()
    rejected_edits: tuple[RejectedEdit, ...] = ()
    meta_skill: str = ""
    task: str = ""


class StepBudget(Protocol):
    """What a proposer may spend in a step; the run's budget, store and records cover all of it."""

    @property
    def max_edits(self) -> int | None:
        """The most changes that the step should make, by ``select``; None: any number."""

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        purpose: str = "proposal",
        part: str = "",
        check: Callable[[R], None] | None = None,
        shorten: Callable[[], RenderedPrompt] | None = None,
    ) -> R | NoReply:
        """Ask the optimizer.

        ``purpose`` is the calls' name in events and in the spend, such as ``my_proposal``; ``part``
        distinguishes the calls of a purpose in a step, each of which has a reply of its own.
        ``check`` is as in ``LLM.ask``. ``shorten`` returns a prompt to send if the first does not
        fit the model's context.

        Raises:
            ProviderError: The endpoint refused, failed or could not be reached; do not catch it.
        """

    async def roll_out(self, documents: Sequence[str]) -> tuple[tuple[Rollout, ...], ...]:
        """Roll documents out on the step's items; what is stored is not paid for again.

        Raises:
            RunFailed: No rollout of a document could be measured; do not catch it.
        """


class Proposer(Protocol):
    """Turns the evidence of a step into a new document, which the gate then judges."""

    @property
    def identity(self) -> str:
        """A name with the settings that its documents depend on; part of the run's identity."""

    async def propose(
        self, skill: Skill, evidence: StepEvidence, budget: StepBudget
    ) -> Sequence[Rewrite]:
        """Return new documents; they race, and the best one goes to the gate.

        Protected regions of the skill stay as they are; a text may repeat them or leave them out.
        The result must depend on the arguments and on what the budget returns alone, so that a
        resumed run repeats it.
        """


class Annotator(Protocol):
    """Writes notes on failed trajectories for the failure analysts."""

    @property
    def identity(self) -> str:
        """The settings that its notes depend on; part of the run's identity."""

    async def annotate(self, item: Item, rollout: Rollout) -> Sequence[str]:
        """Return notes on a failed rollout, each one line; do not catch a ``ModelError``."""


class ResponseStore(Protocol):
    """Stored responses, and reservations of the calls in flight; writes are on disk on return."""

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return the response stored under a key, or None."""

    async def reserve(self, reservation: CallReservation) -> None:
        """Add an open call to the ledger before it is sent."""

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store a response and settle its call in one transaction."""

    async def release(self, reservation: CallReservation) -> None:
        """Remove an open call that cost nothing."""

    async def forget_responses(self, keys: Sequence[str]) -> None:
        """Remove the responses under some keys; what they cost stays in the ledger."""

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        """Count a failed attempt of a run's call."""


class RolloutStore(Protocol):
    """Finished rollouts."""

    async def find_rollouts(self, keys: Sequence[str]) -> Mapping[str, Rollout]:
        """Return the stored rollouts among the keys."""

    async def store_rollout(self, rollout: Rollout) -> None:
        """Store a measured rollout; on disk when this returns."""


class DecisionLog(Protocol):
    """Outcomes that decisions of one run used, by step and label."""

    async def get(self, step: int, label: str) -> JsonValue:
        """Return the logged outcome, or None."""

    async def find(self, step: int, labels: Sequence[str]) -> Mapping[str, JsonValue]:
        """Return the logged outcomes among those of the labels."""

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        """Log an outcome before it is used; the first one under a label is kept."""

    async def once(
        self, step: int, label: str, work: Callable[[], Awaitable[T]], adapter: TypeAdapter[T]
    ) -> T:
        """Return the logged outcome, or do the work and log its outcome before anyone uses it.

        What has been seen is stored; what is stored is not done again. None is no outcome, and is
        not logged.
        """
        logged = await self.get(step, label)
        if logged is not None:
            return parse_stored(adapter.validate_python, logged, f"outcome {label} of step {step}")
        outcome = await work()
        if outcome is not None:
            await self.put(step, label, adapter.dump_python(outcome, mode="json"))
        return outcome
