"""What the objects that a run works with must have; ``adapters`` adds what they may have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from pydantic import JsonValue, TypeAdapter

from reflact.config.models import ModelConfig
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
        """Send a prompt and return a validated reply.

        Args:
            prompt: The messages.
            reply_type: The type of the reply; ``Text`` for plain text.
            call_id: The call's logical identity; part of the key under which the reply is stored.
            check: Raises ValueError if a well-formed reply does not fit the data; the reply is then
                sent back with that reason. It must depend only on the prompt's data.

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


class RequestSender(Protocol):
    """Makes an agent's requests part of a run: stored, limited, charged, recorded, replayed."""

    @property
    def identity(self) -> str:
        """The endpoint, model and settings that influence answers; never credentials."""

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a request of a chat completion and return the completion, in JSON.

        The run's endpoint, model and settings win over those of ``body``. Raises as ``send``.
        """

    async def send(
        self,
        body: Mapping[str, JsonValue],
        *,
        call_id: CallId,
        answer: Callable[[], Awaitable[AgentAnswer]],
    ) -> str:
        """Return the text of the stored answer, or of a new one.

        Args:
            body: All that the answer depends on, as the key of the request and as its record;
                without credentials.
            call_id: The call's logical identity.
            answer: Asks the agent's model once. It raises ConnectionError if the model cannot be
                reached; any other error with an HTTP status as ``status_code`` counts as the
                provider's refusal.

        Raises:
            ModelError: There is no answer, after all retries.
            BudgetSpent: A limit of the budget allows no further call.
        """


class ConnectedTarget(Target, Protocol):
    """A target that asks its own model, and lets the run see these requests."""

    def describe_model(self, config: ModelConfig) -> ModelConfig:
        """Return the settings of ``models.target`` with the agent's model and endpoint."""

    def connect(self, sender: RequestSender, config: ModelConfig) -> Target:
        """Return the target with its requests going through a run, under ``models.target``."""


class StepEvidence(FrozenModel):
    """What a proposer learns from in a step; the texts of cases come from agents and environments.

    Args:
        step: The step.
        cases: The measured rollouts, in the order of the step's items; without successes if
            ``reflect.failure_only`` is on.
        attempts: The earlier steps of the epoch with their verdicts.
        rejected_edits: Changes of earlier epochs that did not help and are relevant to the cases.
        meta_skill: The optimizer's memory.
        task: What is known of the tasks, the score and the agent, as a section of a prompt.
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

        Args:
            prompt: The messages.
            reply_type: The type of the reply.
            purpose: The calls' name in events and in the spend, such as ``my_proposal``.
            part: Distinguishes the calls of a purpose in a step; each has a reply of its own.
            check: Raises ValueError if a reply cannot be used; it is then sent back with that.
            shorten: Returns a prompt to send if the first does not fit the model's context.

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
    """Stored responses, and reservations of the calls in flight."""

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return the response stored under a key, or None."""

    async def reserve(self, reservation: CallReservation) -> None:
        """Add an open call to the ledger before it is sent; on disk when this returns."""

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store a response and settle its call in one transaction; on disk when this returns."""

    async def release(self, reservation: CallReservation) -> None:
        """Remove an open call that cost nothing."""

    async def forget_responses(self, keys: Sequence[str]) -> None:
        """Remove the responses under some keys; what they cost stays in the ledger."""

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        """Count a failed attempt of a run's call; on disk when this returns."""


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
