"""Protocols of the collaborators of a run: models, targets, environments, proposers, annotators, stores."""

from __future__ import annotations

import inspect
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import JsonValue, TypeAdapter

from reflact.config.models import ModelConfig
from reflact.data import DataSet
from reflact.errors import InterfaceError
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
from reflact.records import (
    CandidateReview,
    CodeFailure,
    CommitRecord,
    CriticDescription,
    EpochRecord,
    FaultCount,
    FaultKind,
    PromotionRecord,
    Reuse,
    RunState,
    RunStatus,
    Spend,
    StageCost,
    StageTime,
    StepBufferEntry,
    StepRecord,
    Usage,
)
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
            check: Raises ValueError if a well-formed reply does not fit the data; the reply is then sent
                back with that reason. It must depend only on the prompt's data.

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
        """Let the session work on an item and grade the result; ``seed`` derives from the item and the trial.

        Do not catch a ``ModelError``. Any other exception leaves the item unmeasured.
        """


@runtime_checkable
class ItemTarget(Target, Protocol):
    """A target whose sessions need the item and not only its messages, for example to prepare the agent's tools."""

    def session_for(self, item: Item, skill: Skill, *, rollout: str) -> Session:
        """Start a conversation about an item, instead of ``session``."""


class RequestSender(Protocol):
    """Makes the requests of an agent part of a run: stored, limited, charged, recorded and replayed."""

    @property
    def identity(self) -> str:
        """The endpoint, model and settings that influence answers; never credentials."""

    async def forward(self, body: Mapping[str, JsonValue], *, call_id: CallId) -> str:
        """Send a request of a chat completion to the run's endpoint and return the completion, in JSON.

        The run's model and settings win over those of ``body``. Raises as ``send``.
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
            body: All that the answer depends on, as the key of the request and as its record; without credentials.
            call_id: The call's logical identity.
            answer: Asks the agent's model once. It raises ConnectionError if the model cannot be reached; any other
                error with an HTTP status as ``status_code`` counts as the provider's refusal.

        Raises:
            ModelError: There is no answer, after all retries.
            BudgetSpent: A limit of the budget allows no further call.
        """


@runtime_checkable
class ConnectedTarget(Target, Protocol):
    """A target that asks its own model, and lets the run see these requests."""

    def describe_model(self, config: ModelConfig) -> ModelConfig:
        """Return the settings of ``models.target`` with the agent's model and endpoint."""

    def connect(self, sender: RequestSender, config: ModelConfig) -> Target:
        """Return the target with its requests going through a run, under the settings of ``models.target``."""


@runtime_checkable
class ProbedTarget(ConnectedTarget, Protocol):
    """A target that can find out without a model whether its agent's requests have the skill."""

    preflight: bool
    """Whether a training begins with this test."""

    async def test_skill(
        self, environment: Environment, items: Sequence[Item], skill: Skill, config: ModelConfig
    ) -> str | None:
        """Run the agent on the first item until a request has the skill; no model is asked, and nothing is graded.

        If the agent asks nothing, further items are tried. Return a warning if the request has the skill more than once,
        or if the environment fails before the agent gets its task; else None.

        Raises:
            EnvironmentFailure: No request has the skill; says which file or setting to look at. Or the agent failed
                before it asked.
        """


@runtime_checkable
class InstructedTarget(Target, Protocol):
    """A target whose agent has instructions, with which a training begins unless ``skill`` names a document."""

    @property
    def instructions(self) -> str:
        """The instructions that the skill replaces; empty if there are none."""


@runtime_checkable
class Described(Protocol):
    """An environment or a target that tells the optimizer what it should know, in plain text."""

    @property
    def description(self) -> str:
        """What the tasks are and the score measures, or what the agent can do (its tools); never a reference."""


@runtime_checkable
class Answerable(Protocol):
    """An environment that knows right answers; the most frequent one is then a control at the end of a run."""

    def list_right_answers(self, item: Item) -> Sequence[str]:
        """Return an item's right answers, equal ones as equal texts; empty if none can be written down."""


@runtime_checkable
class MessageRenderer(Protocol):
    """An environment that knows beforehand which message an item's task begins with."""

    def render_message(self, item: Item) -> str:
        """Return an item's task as the target sees it."""


@runtime_checkable
class ManagedEnvironment(Protocol):
    """An environment with something to start and to end, such as a server; its items are known before."""

    async def set_up(self) -> None:
        """Start what rollouts need; called once, before the first one. If it raises, the run fails with a reason."""

    async def close(self) -> None:
        """End what was started; called after the last rollout, also if the run failed or was cancelled."""


@runtime_checkable
class Prompted(Protocol):
    """An environment that brings its own prompts for the optimizer, such as those of its analysts."""

    @property
    def prompt_folder(self) -> Path:
        """A folder like ``prompts.folder``: ``NAME/vN.md``; prompts that it lacks come from the package."""


class StepEvidence(FrozenModel):
    """What a proposer learns from in a step; the texts of cases come from agents and environments.

    Args:
        step: The step.
        cases: The measured rollouts, in the order of the step's items; without successes if
            ``reflect.failure_only`` is on.
        attempts: The earlier steps of the epoch with their verdicts, if ``reflect.step_buffer`` is on.
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
    """What a proposer may spend in a step; the run's budget, its store and its records cover all of it."""

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
            purpose: The calls' name in events and in the spend, of lower-case letters and underscores.
            part: Distinguishes the calls of a purpose in a step; each has a reply and a seed of its own.
            check: Raises ValueError if a reply cannot be used; it is then sent back with the reason.
            shorten: Returns a shorter prompt, which is sent if the first does not fit the model's context.

        Raises:
            ProviderError: The endpoint refused, failed or could not be reached; do not catch it.
        """

    async def roll_out(self, documents: Sequence[str]) -> tuple[tuple[Rollout, ...], ...]:
        """Roll documents out on the step's items, in the items' order; what is stored is not paid for again.

        Raises:
            RunFailed: No rollout of a document could be measured; do not catch it.
        """


class Proposer(Protocol):
    """Turns the evidence of a step into a new document, which the gate then judges."""

    @property
    def identity(self) -> str:
        """A name with the settings that its documents depend on; part of the run's identity."""

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> Sequence[Rewrite]:
        """Return new documents; they race on the validation items, and the best one goes to the gate.

        Protected regions of the skill stay as they are; a text may repeat them or leave them out. The result must
        depend on the arguments and on what the budget returns alone, so that a resumed run repeats it.
        """


class Annotator(Protocol):
    """Writes notes on failed trajectories for the failure analysts."""

    @property
    def identity(self) -> str:
        """The settings that its notes depend on; part of the run's identity."""

    async def annotate(self, item: Item, rollout: Rollout) -> Sequence[str]:
        """Return notes on a failed rollout, each one line; do not catch a ``ModelError``."""


@runtime_checkable
class CriticBacked(Protocol):
    """A grader, an environment or an annotator that may use a critic; the summary then names the critic."""

    @property
    def scored_by(self) -> CriticDescription | None:
        """The critic; None if no critic is used."""


class ResponseStore(Protocol):
    """Stored responses, and reservations of the calls in flight."""

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return the response stored under a key, or None."""

    async def reserve(self, reservation: CallReservation) -> None:
        """Add an open call to the ledger before it is sent; on disk when this returns."""

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store a response and settle its call in one transaction; on disk when this returns."""

    async def settle(self, reservation: CallReservation, usage: Usage) -> None:
        """Settle a call without a stored response."""

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
    """Outcomes that decisions of one run used and that no response or rollout stores, by step and label."""

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


class RunStore(RolloutStore, ResponseStore, Protocol):
    """The histories of runs in one store."""

    async def open_run(
        self, run_id: str, identity: Mapping[str, JsonValue], config: JsonValue, *, resume: bool = True
    ) -> RunState | None:
        """Start or resume a run; returns its last committed state, or None for a new run.

        Open reservations of an earlier process become unsettled. Without ``resume`` the run is only read or
        measured, and its end and its configuration stay as they are.
        """

    def decision_log(self, run_id: str) -> DecisionLog:
        """Return the run's decision log."""

    async def commit(
        self, run_id: str, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        """Write a record and its skills in one transaction; ``state`` is the one after it, see ``RunState.after``.

        Without a record, the state is the run's first, which is written too.
        """

    async def records(self, run_id: str) -> tuple[StepRecord, ...]:
        """Return the records of all committed steps, in order."""

    async def epochs(self, run_id: str) -> tuple[EpochRecord, ...]:
        """Return the records of all committed epoch ends, in order."""

    async def promotions(self, run_id: str) -> tuple[PromotionRecord, ...]:
        """Return the comparisons of the last skill with the best one, in order."""

    async def records_of_other_runs(
        self, environment: str, *, exclude: str
    ) -> Mapping[str, tuple[StepRecord, ...]]:
        """Return the committed steps of the other runs of an environment's identity, the oldest run first."""

    async def skill(self, skill_hash: str) -> Skill:
        """Return a stored document; StoreError if there is none with this hash."""

    async def append_event(self, event: Event) -> bool:
        """Store a durable event; returns False if this run already has it."""

    async def events(self, run_id: str) -> tuple[Event, ...]:
        """Return the run's durable events, in order."""

    @property
    def reuse(self) -> Reuse:
        """What this process reused from the store since opening it."""

    async def spend(self, run_id: str) -> tuple[Spend, ...]:
        """Return the run's spend by role and purpose, sorted; calls in flight count as unsettled."""

    async def add_seconds(
        self, run_id: str, seconds: float, stages: Mapping[tuple[int, str], float] | None = None
    ) -> float:
        """Add active seconds, in total and by step and stage, and return the run's total."""

    async def stage_times(self, run_id: str) -> tuple[StageTime, ...]:
        """Return the active time of each stage over all starts of the run."""

    async def stage_costs(self, run_id: str) -> tuple[StageCost, ...]:
        """Return what each stage of each step took, over all starts of the run, in the order of the steps."""

    async def faults(self, run_id: str) -> tuple[FaultCount, ...]:
        """Return the number of failed attempts of each kind over all starts of the run, sorted."""

    async def store_items(self, data: DataSet) -> None:
        """Store all items, unless a run with the same items has stored them."""

    async def store_failure(self, run_id: str, key: str, failure: CodeFailure) -> None:
        """Store an exception of the caller's code under a key, in place of an earlier one."""

    async def finish(self, run_id: str, status: RunStatus, reason: str | None, summary: str) -> None:
        """Store the end of this start of the run, with its summary as JSON text."""


# ------------------------------------------------------------------------------------------ messages


def write_definition(method: Callable[..., Any]) -> str:
    """Return the first line of a protocol's method as a caller would write it, without types."""
    signature = inspect.signature(method)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    written = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    begin = "async def" if inspect.iscoroutinefunction(method) else "def"
    return f"{begin} {method.__name__}{written}:"


def find_wrong_arguments(own: Callable[..., Any], method: Callable[..., Any]) -> str | None:
    """Return why a caller's method cannot be called like that of a protocol, with its place; None if it can."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    named = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):  # it is written in C
        return None
    try:
        signature.bind(*[None] * (len(parameters) - len(named)), **named)
    except TypeError as error:
        return f"has other arguments{locate_method(own)}: {error}; write {write_definition(method)}"
    return None


def locate_method(method: Any) -> str:
    """Return the file and line of a method in words; empty if it has none."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def describe_not_async(value: object, method: Callable[..., Any], returned: object) -> InterfaceError:
    """Return the error about a method of a protocol that returned something that cannot be awaited."""
    return InterfaceError(
        f"`{method.__name__}` of {type(value).__name__} is not async: it returned a value of type "
        f"{type(returned).__name__}; write {write_definition(method)}"
    )


# ------------------------------------------------------------------------------------ the caller's code

INTERRUPTIONS = (KeyboardInterrupt, CancelledError, GeneratorExit)
"""Exceptions that pass through everything: Ctrl-C, a cancellation, and the end of a generator."""


MAX_TEXT_CHARS = 2_000
"""The most characters of an exception's text that are stored and shown."""


class ExitRaised(Exception):
    """Code of the caller raised an exception that ends a process, such as ``SystemExit``; the traceback is its own."""


class CatchExits:
    """A block that calls code of the caller: ``sys.exit()`` in it becomes an ``ExitRaised``, and ends no process.

    So does every other exception that is no ``Exception``, except for ``INTERRUPTIONS``.
    """

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise ``ExitRaised`` in place of an exit."""
        if error is None or isinstance(error, (Exception, *INTERRUPTIONS)):
            return
        if isinstance(error, BaseExceptionGroup):
            if error.subgroup(INTERRUPTIONS) is not None:
                return
            error = _find_exit(error)
        words = f"the code raised {error!r:.200}, which would end the process; let it raise another exception"
        raise ExitRaised(words).with_traceback(trace) from None


def read_text(error: BaseException) -> str:
    """Return the text of an exception of the caller's code, cut to ``MAX_TEXT_CHARS``; it may raise an exception itself."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001 - it is the caller's code
        return f"(its text cannot be read: {type(another).__name__})"
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}... ({len(text):,} characters)"


def _find_exit(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception in a group that is no ``Exception``."""
    inner = next(each for each in group.exceptions if not isinstance(each, Exception))
    return _find_exit(inner) if isinstance(inner, BaseExceptionGroup) else inner
