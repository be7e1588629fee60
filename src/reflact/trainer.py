"""The trainer: trains a skill document and returns a summary or streams events."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from pydantic import Field, JsonValue

from reflact import events
from reflact.concurrency import Stream, finish_if_cancelled, require_asyncio
from reflact.config import loading
from reflact.config.models import ModelConfig, ModelsConfig
from reflact.config.training import ReplayConfig, TrainerConfig
from reflact.data import DataSet, make_id
from reflact.errors import (
    BudgetSpent,
    DataError,
    EnvironmentFailure,
    ModelError,
    QuotaSpent,
    ReflactError,
    ReplyError,
    RunFailed,
    StoreError,
)
from reflact.llm.middleware import EnvironmentMiddleware
from reflact.llm.pricing import usd_of
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel
from reflact.protocols import (
    LLM,
    Annotator,
    Approver,
    Environment,
    EventCallback,
    ProbedTarget,
    Proposer,
    Session,
    Target,
)
from reflact.records import (
    CriticDescription,
    RunStatus,
    RunSummary,
    SkillComparison,
    SkillScore,
    Usage,
)
from reflact.stages.rollout import describe_exception, run_environment, start_session
from reflact.store.artifacts import write_atomically
from reflact.training.evaluation import compare_skill
from reflact.training.rollouts import manage_environment
from reflact.training.run import Run
from reflact.training.setup import (
    Overrides,
    RunPlan,
    Runtime,
    check_config,
    connect_models,
    ignore_event,
    import_collaborators,
    open_runtime,
    prepare_run,
    refuse_idle_keys,
)
from reflact.training.shutdown import GracefulStop, make_approver_stoppable
from reflact.training.trouble import FailureLog, list_answer_faults
from reflact.types import Control, FrozenModel, Grade, Item, Rollout, Skill, Split

if TYPE_CHECKING:
    import httpx

    from reflact.environments.dataset import DatasetEnvironment
    from reflact.environments.graders import Grader
    from reflact.integrations.opentelemetry import Telemetry

LOCK_SECONDS = 0.4
"""How long the end of a cancelled run waits for a database that another process has locked."""

FINISH_SECONDS = 3.0
"""How long it may take in total to store the summary; only a busy machine needs more than a fraction of a second."""

CHECK_PROMPT = RenderedPrompt(
    name="check",
    version=1,
    messages=(
        Message(
            role="user",
            content='This is a test of the connection. Reply with this JSON object: {"word": "ready"}',
        ),
    ),
)

CHECK_RETRIES = 1
"""Retries during a check, since a person waits for it."""

Example = tuple[JsonValue, JsonValue]
"""An input and its right answer."""


class Trainer:
    """Trains a skill document.

    Args:
        config: A ``TrainerConfig``, a mapping, or the path of a YAML or TOML file.
        environment: Used instead of the one that the configuration names.
        target: Used instead of a chat model.
        optimizer: Used instead of the configured model.
        transport: Carries HTTP requests instead of the network.
        approve: Asked about each candidate that the gate would accept; it may veto (see ``protocols.Approver``).
        telemetry: Receives spans and metrics instead of the OpenTelemetry providers of this process.
        annotator: Adds notes to the trajectories in the prompts of failure analysts.
        proposer: Writes the candidate of each step instead of the stages (see ``protocols.Proposer``).
        label: Your name for the run, such as a customer's, in log lines; default: ``out_dir``.

    Raises:
        UsageError: The configuration is wrong.
    """

    def __init__(
        self,
        config: TrainerConfig | Mapping[str, Any] | Path | str,
        *,
        environment: Environment | None = None,
        target: Target | None = None,
        optimizer: LLM | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        approve: Approver | None = None,
        telemetry: Telemetry | None = None,
        annotator: Annotator | None = None,
        proposer: Proposer | None = None,
        label: str = "",
    ) -> None:
        self._approve = approve
        self._overrides = Overrides(
            environment, target, optimizer, transport, telemetry, annotator, proposer, label
        )
        self._config = loading.load_config(config)
        check_config(self._config, self._overrides)
        refuse_idle_keys(self._config, self._overrides)
        self._plan: RunPlan | None = None
        self._graceful_stop = GracefulStop(self._config.train.grace_seconds)

    @classmethod
    def from_items(
        cls,
        *,
        train: Sequence[Item | Example],
        val: Sequence[Item | Example],
        test: Sequence[Item | Example] = (),
        grade: Grader,
        target: Target | str,
        optimizer: LLM | str,
        label: str = "",
        **config: Any,
    ) -> Trainer:
        """Train on lists of items with a function that grades answers.

        Args:
            train: Items to learn from: ``Item`` objects, or pairs of an input and its right answer. A pair
                gets an id made from its content.
            val: Items on which candidates are judged.
            test: Items that stay sealed until the run is complete; without any, the closing claim rests on ``val``.
            grade: A function of an item and an answer, async or not. It returns a ``Grade``, a ``Score``,
                a number from 0 to 1, or a bool; anything else ends the run. Its code and the plain values that it
                uses are part of the run's identity, but not the code of installed packages. A function with an
                attribute ``identity`` is known by that alone.
            target: The agent under training, or the name of a chat model.
            optimizer: The model that writes the skill, or its name.
            label: Your name for the run in log lines.
            config: Keys of the configuration. Two underscores stand for the dot: ``train__num_epochs=2``,
                ``models__target__base_url="http://127.0.0.1:8000/v1"``, ``out_dir="runs/mine"``.

        Raises:
            ConfigError: A key is unknown or has a wrong value.
            DataError: Two items have the same id (raised when the run starts).
        """
        settings = {key.replace("__", "."): value for key, value in config.items()}
        if isinstance(target, str):
            settings["models.target.model"] = target
        if isinstance(optimizer, str):
            settings["models.optimizer.model"] = optimizer
        return cls(
            loading.load_keys(settings),
            environment=_ItemsEnvironment({Split.train: train, Split.val: val, Split.test: test}, grade),
            target=None if isinstance(target, str) else target,
            optimizer=None if isinstance(optimizer, str) else optimizer,
            label=label,
        )

    @property
    def config(self) -> TrainerConfig:
        """The configuration, with the defaults filled in."""
        return self._config

    @property
    def run_id(self) -> str:
        """The run's identity: equal for equal configuration, data, prompts and initial skill.

        Reading it before the run reads the data, which takes a moment if there are many items.

        Raises:
            UsageError: The data, a prompt or the initial skill is wrong.
        """
        return self._prepare().run_id

    async def train(self, *, show: bool = False, raise_on_failure: bool = False) -> RunSummary:
        """Run to the end, or resume where an earlier start stopped, and return the summary.

        With ``show``, standard output shows the run as ``reflact train`` does: a live view at a terminal, lines on
        events and progress otherwise, such as in a notebook, and closing lines.

        If a provider or the environment fails, the status is ``failed`` with a reason. If a limit of
        ``budget`` is reached, it is ``budget``. Both runs can be started again. ``verdict`` says why the run ended
        and what to do next. Cancelling ends the run within a second and keeps all finished work.

        The data is read on a worker thread, so that the event loop stays free.

        Raises:
            UsageError: The data, a prompt or the initial skill is wrong, or no asyncio event loop runs.
            RunConflict: The folder holds another run, or another process works in it.
            CassetteError: A recording is missing, malformed, or lacks a request.
            StoreError: The database cannot be opened, read or written.
            RunFailed: With ``raise_on_failure``, if the run is not complete; the message is the verdict.
        """
        summary = await (self._train_and_show() if show else self._train(ignore_event))
        if raise_on_failure and summary.status != "completed":
            raise RunFailed(summary.verdict)
        return summary

    async def _train_and_show(self) -> RunSummary:
        from reflact.reporting.live import show_run

        async with self.stream() as stream:
            return await show_run(stream, self._config, asks=self._approve is not None)

    def stream(self) -> Stream[events.Event]:
        """Run as ``train`` does and iterate over the events; ``RunFinished`` comes last.

        ``async with trainer.stream() as stream`` cleans up within a second of leaving the block. After a
        bare ``break`` the run is cancelled when the event loop finalises the iterator.
        """

        async def produce(emit: EventCallback) -> None:
            await self._train(emit)

        return Stream(produce, subject=lambda event: event.subject)

    def stop(self, reason: str) -> None:
        """Stop the run soon, with the status ``cancelled`` and a reason; the next start resumes it.

        The run begins nothing new. Work under way may finish within ``train.grace_seconds``; a step that
        completes is committed. ``train`` returns the summary, and ``stream`` ends with it. Call this in the
        thread of the event loop. To end the run at once, cancel the task instead.
        """
        self._graceful_stop.request(reason)

    async def evaluate(
        self, skill: Skill, split: Split = Split.val, *, on_event: EventCallback = ignore_event
    ) -> SkillScore:
        """Measure one document on a split, with the trainer's own objects; see ``compare``.

        The score is stored with the run, so that ``read_run`` and ``reflact show`` list it.
        """
        return (await self.compare(skill, (), split, on_event=on_event)).skill

    async def compare(
        self,
        skill: Skill,
        against: Sequence[Skill | Control],
        split: Split = Split.val,
        *,
        on_event: EventCallback = ignore_event,
    ) -> SkillComparison:
        """Measure a document beside others on a split, paired by item; finished rollouts are reused, so each is paid once.

        Args:
            skill: The document.
            against: Other documents; ``none``: an empty one; ``placebo``: one of equal length about something else;
                ``null``: constant answers, which no model has to give.
            split: Where to measure.
            on_event: Takes the events. A ``BudgetUpdated`` with what the run used before comes first.

        Raises:
            UsageError: The data is wrong, or the folder holds another run.
            ModelError, RunFailed: Too few items could be measured.
            EnvironmentFailure: The skill does not reach the agent.
            BudgetSpent: The run's budget has no room for a call.
        """
        plan = await anyio.to_thread.run_sync(partial(self._load_plan, needed=()))
        return await compare_skill(plan, self._overrides, skill, against, Split(split), on_event=on_event)

    def _prepare(self) -> RunPlan:
        if self._plan is None:
            self._plan = prepare_run(self._config, self._overrides)
        return self._plan

    def _load_plan(self, needed: Sequence[Split] | None = None) -> RunPlan:
        """Import the run's collaborators and prepare it, or a measurement; this takes long, so call it in a thread."""
        import_collaborators(self._config, self._overrides)
        return self._prepare() if needed is None else prepare_run(self._config, self._overrides, needed)

    async def _train(self, on_event: EventCallback) -> RunSummary:
        require_asyncio()
        database = (self._config.store or self._config.out_dir).absolute()
        plan = await anyio.to_thread.run_sync(self._load_plan)
        stop = self._graceful_stop
        approve = None if self._approve is None else make_approver_stoppable(self._approve, stop)
        emit = on_event if on_event is ignore_event else EventStepAssigner(on_event)
        try:
            async with open_runtime(plan, self._overrides, emit, graceful_stop=stop) as runtime:
                with runtime.tracing.run():
                    run = Run(
                        runtime,
                        runtime.tracing.count_events(emit),
                        approve,
                        tests_optimizer=must_test_optimizer(plan, self._overrides),
                        describe=_describe_verdict,
                    )
                    summary = await _run(run, runtime.plan.environment, stop)
                    runtime.tracing.record_outcome(summary)
                if self._config.report and summary.status != "cancelled":
                    await _write_report(plan.run_id, database, runtime.folder, emit)
        finally:
            self._graceful_stop = GracefulStop(self._config.train.grace_seconds)
        await on_event(events.RunFinished(run_id=plan.run_id, step=summary.steps, summary=summary))
        return summary


def must_test_optimizer(plan: RunPlan, overrides: Overrides) -> bool:
    """Whether a run makes one small call to its optimizer before it pays for the baseline.

    It does not if a recording or a transport of the caller answers, if the caller brings the optimizer, or if the
    optimizer has the connection of the target, which the baseline tests.
    """
    config = plan.config
    if overrides.transport is not None or config.replay.cassette is not None:
        return False
    return overrides.optimizer is None and (plan.target is not None or config.models.is_optimizer_separate)


async def _run(run: Run, environment: Environment, graceful_stop: GracefulStop) -> RunSummary:
    try:
        await run.start_or_resume()
        with graceful_stop.cancel_scope():
            async with manage_environment(environment, run.failures):
                summary = await run.run_to_end()
        if not graceful_stop.was_stopped:
            return summary
        ended: tuple[RunStatus, str | None] = "cancelled", graceful_stop.reason
    except (BudgetSpent, QuotaSpent) as error:
        ended = "budget", str(error)
    except (ModelError, EnvironmentFailure, RunFailed) as error:
        ended = "failed", str(error)
    except anyio.get_cancelled_exc_class():
        await _try_to_store_summary(run, "cancelled", graceful_stop.reason or "cancelled by its caller")
        raise
    except StoreError as error:
        await _try_to_store_summary(run, "failed", str(error))
        raise
    except Exception as error:  # whatever it is, the summary says so
        reason = str(error) if isinstance(error, ReflactError) else f"{type(error).__name__} was raised"
        with suppress(StoreError):
            await _store_summary(run, "failed", reason)
        raise
    except BaseExceptionGroup:  # it holds a KeyboardInterrupt of code, and the event loop is about to end
        await _try_to_store_summary(run, "cancelled", "KeyboardInterrupt was raised")
        raise
    return await _store_summary(run, *ended)


async def _store_summary(run: Run, status: RunStatus, reason: str | None) -> RunSummary:
    """Store how a run ended, also if it is cancelled meanwhile."""
    return await finish_if_cancelled(partial(run.store_summary, status, reason), seconds=FINISH_SECONDS)


async def _try_to_store_summary(run: Run, status: RunStatus, reason: str) -> None:
    """Store how a run ended, unless the database is locked or cannot be written."""
    with anyio.move_on_after(LOCK_SECONDS, shield=True) as scope, suppress(StoreError):
        await run.record_time()
        scope.deadline += FINISH_SECONDS - LOCK_SECONDS
        await run.store_summary(status, reason)


def _describe_verdict(summary: RunSummary) -> str:
    from reflact.reporting.facts import ResultFact

    return ResultFact(summary=summary).verdict


async def _write_report(run_id: str, database: Path, folder: Path, on_event: EventCallback) -> None:
    """Write the page of a run into the folder of its files; a failure is a warning, since the store has all of it."""

    def render() -> str:
        from reflact.reporting.html.run import read_report, render_run_page

        return render_run_page(anyio.run(read_report, database, run_id))

    try:
        page = await anyio.to_thread.run_sync(render, abandon_on_cancel=True)
        write_atomically(folder / "report.html", page)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run is complete without its page
        reason = f"the page of the run could not be written: {type(error).__name__}: {error}"
        await on_event(events.WarningIssued(run_id=run_id, message=reason))


class EventStepAssigner:
    """Passes events on; live events without a step get the step of the current stage."""

    def __init__(self, on_event: EventCallback) -> None:
        self._on_event = on_event
        self._step = 0

    async def __call__(self, event: events.Event) -> None:
        """Pass one event on."""
        if isinstance(event, events.StageStarted):
            self._step = event.step
        elif not (event.step or event.durable):
            event = event.model_copy(update={"step": self._step})
        await self._on_event(event)


class _ItemsEnvironment(EnvironmentMiddleware):
    """The environment of lists of items, built at its first use, which is on a worker thread."""

    def __init__(self, splits: Mapping[Split, Sequence[Item | Example]], grade: Grader) -> None:
        self._splits = splits
        self._grade = grade

    @cached_property
    def inner(self) -> DatasetEnvironment:  # type: ignore[override]
        from reflact.environments.dataset import DatasetEnvironment

        splits = {split.value: tuple(map(_build_item, items)) for split, items in self._splits.items()}
        return DatasetEnvironment(DataSet.model_validate(splits), grade=self._grade)

    @property
    def scored_by(self) -> CriticDescription | None:
        return self.inner.scored_by


def _build_item(item: Item | Example) -> Item:
    """Return an item; a pair of an input and its right answer gets a digest of its content as id."""
    if isinstance(item, Item):
        return item
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"an item is an Item or a pair of an input and its right answer, not {item!r:.200}")
    return Item(id=make_id(*item), input=item[0], reference=item[1])


class ReadyReply(ReplyModel):
    """The reply of the optimizer."""

    word: str = Field(min_length=1, description="The word ready.")


class RoleCheck(FrozenModel):
    """The answers of one role.

    ``title`` is the model and where it is asked. ``seconds`` is the mean time of a call, with its retries. ``usage.usd`` is None if no price is known. ``mode`` is
    the format of typed replies; None if the role gave none.
    """

    role: str
    title: str
    seconds: float
    usage: Usage
    mode: str | None = None


class SetupCheck(FrozenModel):
    """What a check of a configuration found; ``grade`` is that of the target's answer to ``item``.

    ``skill`` says in words if the skill reaches an agent behind a gateway; None if that was not tested.
    ``target_calls`` is the likely number of the target's calls in a run. ``warnings`` say if a prompt or an answer was
    cut, or an answer was empty.
    """

    n_train: int
    n_val: int
    n_test: int
    roles: tuple[RoleCheck, ...]
    item: Item
    grade: Grade
    target_calls: float
    skill: str | None = None
    warnings: tuple[str, ...] = ()


async def check_setup(config: TrainerConfig, overrides: Overrides | None = None) -> SetupCheck:
    """Let the target answer one train item, and make one small call to each other role.

    The calls have a temporary store: nothing is written to the run's folder. Recordings are ignored.

    Raises:
        UsageError: The configuration, the data, a prompt or a key is wrong.
        ModelError: A role gave no usable reply.
        EnvironmentFailure: The item could not be graded, or the skill does not reach the agent.
        RunFailed: The environment could not be set up or closed.
    """
    from reflact.store.runs import open_store

    overrides = overrides or Overrides()
    models = _limit_retries(config.models)
    plan = prepare_run(config.model_copy(update={"replay": ReplayConfig(), "models": models}), overrides)
    finished = list[events.ModelCallFinished]()

    async def collect(event: events.Event) -> None:
        if isinstance(event, events.ModelCallFinished):
            finished.append(event)

    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="reflact-check-"))
        store = await stack.enter_async_context(open_store(Path(folder) / "run.db"))
        runtime = await stack.enter_async_context(connect_models(plan, overrides, store, collect))
        await store.open_run(plan.run_id, plan.identity, plan.config.model_dump(mode="json"))
        runtime.budget.begin((), 0.0)
        item = plan.data.train[0]
        skill = None
        failures = FailureLog(plan.run_id, plan.config, store, collect, plan.label)
        async with manage_environment(plan.environment, failures):
            if isinstance(plan.target, ProbedTarget) and plan.target.preflight:
                warning = await plan.target.test_skill(
                    plan.environment, plan.data.train, plan.initial_skill, plan.config.models.target
                )
                skill = warning or "the agent's request has it, so it is in force"
            grade = await _grade_item(item, runtime)
        if "optimizer" not in overrides.brought_roles:
            call_id = CallId(role="optimizer", purpose="check", step=0)
            try:
                await runtime.optimizer.ask(CHECK_PROMPT, ReadyReply, call_id=call_id)
            except ReplyError as error:
                raise _explain_mute_optimizer(error, plan.config.models.optimizer) from None
        roles = [
            await _describe_role(role, getattr(plan.config.models, role), finished, runtime)
            for role in dict.fromkeys(event.role for event in finished)
        ]
        warnings = await list_answer_faults(store, plan.run_id, plan.config)
    data, likely = plan.data, plan.estimate_cost(done=0, skill=None, spent=())
    return SetupCheck(
        n_train=len(data.train),
        n_val=len(data.val),
        n_test=len(data.test),
        roles=tuple(roles),
        item=item,
        grade=grade,
        skill=skill,
        target_calls=math.fsum(row.calls for row in likely.rows if row.role == "target"),
        warnings=warnings,
    )


def _explain_mute_optimizer(error: ReplyError, settings: ModelConfig) -> ReplyError:
    """Return the error of a check whose optimizer gave no valid reply, in words of the configuration."""
    return ReplyError(
        f"models.optimizer: {settings.title} was asked for a reply in JSON of a given form, and none of its "
        f"{len(error.reasons)} replies had it ({error.reasons[-1]}); name another model with models.optimizer.model, or "
        "another way to ask with models.optimizer.mode",
        reasons=error.reasons,
    )


async def _grade_item(item: Item, runtime: Runtime) -> Grade:
    """Return the grade of the target's answer, after the annotator has seen it, if there is one."""
    target, skill, plan = runtime.target, runtime.plan.initial_skill, runtime.plan
    session: Session | None = None
    try:
        session = start_session(target, item, skill, rollout="check")
        grade = await run_environment(plan.environment, item, session, seed=0)
        if plan.annotator is not None:
            rollout = Rollout(
                key="check",
                item_id=item.id,
                skill_hash=skill.hash,
                turns=session.turns,
                answer=grade.answer,
                score=grade.score,
            )
            await plan.annotator.annotate(item, rollout)
    except ReflactError:
        raise
    except Exception as error:  # the caller's grader may raise anything
        raise EnvironmentFailure(describe_exception(item, error, target, session)) from error
    return grade


async def _describe_role(
    role: str, settings: ModelConfig, finished: list[events.ModelCallFinished], runtime: Runtime
) -> RoleCheck:
    calls = [event for event in finished if event.role == role]
    usage = sum((event.usage for event in calls), Usage())
    if usd_of(Usage(calls=1, input_tokens=1, output_tokens=1), settings) is None:
        usage = usage.model_copy(update={"usd": None})
    mode = await runtime.decision_log.get(0, f"mode/{role}") if settings.mode == "auto" else settings.mode
    return RoleCheck(
        role=role,
        title=settings.title,
        seconds=sum(event.seconds for event in calls) / len(calls),
        usage=usage,
        mode=None if role == "target" or mode is None else str(mode),
    )


def _limit_retries(models: ModelsConfig) -> ModelsConfig:
    limited = {
        role: settings.model_copy(update={"max_retries": min(CHECK_RETRIES, settings.max_retries)})
        for role in ModelsConfig.model_fields
        if isinstance(settings := getattr(models, role), ModelConfig)
    }
    return models.model_copy(update=limited)
