"""The trainer: trains a skill document and returns a summary or streams events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from pydantic import JsonValue

from reflact import events
from reflact.adapters import EnvironmentAdapter
from reflact.concurrency import Stream, require_asyncio
from reflact.config import loading
from reflact.config.training import TrainerConfig
from reflact.data import DataSet, make_id
from reflact.errors import DataError, RunFailed
from reflact.protocols import LLM, Annotator, Approver, Environment, EventCallback, Proposer, Target
from reflact.records import RunSummary, SkillComparison, SkillScore
from reflact.store.artifacts import write_atomically
from reflact.training.final_test import compare_skill
from reflact.training.loop import train
from reflact.training.open_run import open_run
from reflact.training.plan import (
    Overrides,
    RunPlan,
    check_config,
    import_collaborators,
    prepare_run,
    refuse_idle_keys,
)
from reflact.training.run import Run, ignore_event
from reflact.training.shutdown import GracefulStop
from reflact.types import Control, Item, Skill, Split

if TYPE_CHECKING:
    import httpx

    from reflact.environments.dataset import DatasetEnvironment
    from reflact.environments.graders import Grader
    from reflact.integrations.opentelemetry import Telemetry

# An input and its right answer.
Example = tuple[JsonValue, JsonValue]


class Trainer:
    """Trains a skill document.

    Args:
        config: A ``TrainerConfig``, a mapping, or the path of a YAML or TOML file.
        environment: Used instead of the one that the configuration names.
        target: Used instead of a chat model.
        optimizer: Used instead of the configured model.
        transport: Carries HTTP requests instead of the network.
        approve: Asked about each candidate that the gate would accept; it may veto.
        telemetry: Receives spans and metrics instead of the OpenTelemetry providers of this
            process.
        annotator: Adds notes to the trajectories in the prompts of failure analysts.
        proposer: Writes the candidate of each step instead of the stages.
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
            train: Items to learn from: ``Item`` objects, or pairs of an input and its right answer.
            val: Items on which candidates are judged.
            test: Items that stay sealed until the run is complete; without any, the closing claim
                rests on ``val``.
            grade: A function of an item and an answer, async or not. It returns a ``Grade``, a
                ``Score``, a number from 0 to 1, or a bool. Its code and the plain values that it
                uses are part of the run's identity, but not the code of installed packages. A
                function with an attribute ``identity`` is known by that alone.
            target: The agent under training, or the name of a chat model.
            optimizer: The model that writes the skill, or its name.
            label: Your name for the run in log lines.
            config: Keys of the configuration, with two underscores for the dot:
                ``train__num_epochs=2``, ``out_dir="runs/mine"``.

        Raises:
            ConfigError: A key is unknown or has a wrong value.
            DataError: Two items have the same id (raised when the run starts).
        """
        settings = {key.replace("__", "."): value for key, value in config.items()}
        models: dict[str, Any] = {"target": target, "optimizer": optimizer}
        for role, model in models.items():
            if isinstance(model, str):
                settings[f"models.{role}.model"] = model
                models[role] = None
        items = {Split.train: train, Split.val: val, Split.test: test}
        environment = _ItemsEnvironment(items, grade)
        return cls(loading.load_keys(settings), environment=environment, label=label, **models)

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

    @property
    def identity(self) -> Mapping[str, JsonValue]:
        """What ``run_id`` is made of, by key: settings, data, prompts, initial skill, your objects.

        Raises:
            UsageError: As ``run_id``.
        """
        return self._prepare().identity

    async def train(self, *, show: bool = False, raise_on_failure: bool = False) -> RunSummary:
        """Run to the end, or resume where an earlier start stopped, and return the summary.

        With ``show``, standard output shows the run as ``reflact train`` does: a live view at a
        terminal, lines otherwise, such as in a notebook.

        If a provider or the environment fails, the status is ``failed`` with a reason. If a limit
        of ``budget`` is reached, it is ``budget``. Both runs can be started again. ``verdict`` says
        why the run ended and what to do next. Cancelling ends the run within a second and keeps all
        finished work. The data is read on a worker thread, so that the event loop stays free.

        Raises:
            UsageError: The data, a prompt or the initial skill is wrong, or no asyncio event loop
                runs.
            RunConflict: The folder holds another run, or another process works in it.
            CassetteError: A recording is missing, malformed, or lacks a request.
            StoreError: The database cannot be opened, read or written.
            RunFailed: With ``raise_on_failure``, if the run is not complete; holds the verdict.
        """
        if show:
            from reflact.reporting.live import show_run

            async with self.stream() as stream:
                summary = await show_run(stream, self._config, asks=self._approve is not None)
        else:
            summary = await self._train(ignore_event)
        if raise_on_failure and summary.status != "completed":
            raise RunFailed(summary.verdict)
        return summary

    def stream(self) -> Stream[events.Event]:
        """Run as ``train`` does and iterate over the events; ``RunFinished`` comes last.

        ``async with trainer.stream() as stream`` cleans up within a second of leaving the block.
        After a bare ``break`` the run is cancelled when the event loop finalises the iterator.
        """

        async def produce(emit: EventCallback) -> None:
            await self._train(emit)

        return Stream(produce, subject=lambda event: event.subject)

    def stop(self, reason: str) -> None:
        """Stop the run soon, with the status ``cancelled`` and a reason; the next start resumes it.

        The run begins nothing new. Work under way may finish within ``train.grace_seconds``; a step
        that completes is committed. ``train`` returns the summary, and ``stream`` ends with it.
        Call this in the thread of the event loop. To end the run at once, cancel the task instead.
        """
        self._graceful_stop.request(reason)

    async def evaluate(
        self, skill: Skill, split: Split = Split.val, *, on_event: EventCallback = ignore_event
    ) -> SkillScore:
        """Measure one document on a split, with the trainer's own objects; see ``compare``.

        The score is stored beside the run, so that ``read_run`` and ``reflact show`` list it.
        """
        return (await self.compare(skill, (), split, on_event=on_event)).skill

    async def compare(
        self,
        skill: Skill,
        against: Sequence[Skill | Control],
        split: Split = Split.val,
        *,
        repeats: int = 1,
        names: Sequence[str] = (),
        on_event: EventCallback = ignore_event,
    ) -> SkillComparison:
        """Measure a document beside others on a split, paired by item; a rollout is paid once.

        The measurement is stored beside the run, with a cost of its own: ``budget`` limits it
        alone, and ``reflact runs`` lists it.

        Args:
            skill: The document.
            against: Other documents; ``none``: an empty one; ``placebo``: one of equal length about
                something else; ``null``: constant answers, which no model has to give.
            split: Where to measure.
            repeats: How often each item is run under each document; a few items can prove something
                about themselves only if they are repeated.
            names: What lists and tables call the documents: first ``skill``, then the others.
            on_event: Takes the events. A ``BudgetUpdated`` with what earlier starts of the same
                measurement used comes first.

        Raises:
            UsageError: The data is wrong, or the folder holds another run.
            ModelError, RunFailed: Too few items could be measured.
            EnvironmentFailure: The skill does not reach the agent.
            BudgetSpent: The budget has no room for a call.
        """
        plan = await self._load_plan(needed=())
        return await compare_skill(
            plan, skill, against, Split(split), repeats=repeats, names=names, on_event=on_event
        )

    def _prepare(self) -> RunPlan:
        if self._plan is None:
            self._plan = prepare_run(self._config, self._overrides)
        return self._plan

    async def _load_plan(self, needed: Sequence[Split] | None = None) -> RunPlan:
        """Import the run's collaborators and prepare it, or a measurement, in a thread."""

        def load() -> RunPlan:
            import_collaborators(self._config, self._overrides)
            if needed is None:
                return self._prepare()
            return prepare_run(self._config, self._overrides, needed)

        return await anyio.to_thread.run_sync(load)

    async def _train(self, on_event: EventCallback) -> RunSummary:
        require_asyncio()
        database = (self._config.store or self._config.out_dir).absolute()
        plan = await self._load_plan()
        opening = open_run(plan, on_event, approve=self._approve, graceful_stop=self._graceful_stop)
        try:
            async with opening as run:
                run.describe = describe_verdict
                with run.tracing.run():
                    summary = await train(run)
                    run.tracing.record_outcome(summary)
                if self._config.report and summary.status != "cancelled":
                    await _write_report(run, database)
        finally:
            self._graceful_stop = GracefulStop(self._config.train.grace_seconds)
        await on_event(events.RunFinished(run_id=plan.run_id, step=summary.steps, summary=summary))
        return summary


def describe_verdict(summary: RunSummary) -> str:
    """Return how a run ended, in a sentence for its summary."""
    from reflact.reporting.facts import ResultFact

    return ResultFact(summary=summary).verdict


async def _write_report(run: Run, database: Path) -> None:
    """Write the page of a run; a failure is a warning, since the store has all of it."""

    def render() -> str:
        from reflact.reporting.html.run import read_report, render_run_page

        return render_run_page(anyio.run(read_report, database, run.id))

    try:
        page = await anyio.to_thread.run_sync(render, abandon_on_cancel=True)
        write_atomically(run.folder / "report.html", page)
    except Exception as error:  # noqa: BLE001 - the run is complete without its page
        reason = f"the page of the run could not be written: {type(error).__name__}: {error}"
        await run.on_event(events.WarningIssued(run_id=run.id, message=reason))


class _ItemsEnvironment(EnvironmentAdapter):
    """The environment of lists of items, built at its first use, which is on a worker thread."""

    def __init__(self, splits: Mapping[Split, Sequence[Item | Example]], grade: Grader) -> None:
        self._splits = splits
        self._grade = grade

    @cached_property
    def own(self) -> DatasetEnvironment:  # type: ignore[override]
        from reflact.environments.dataset import DatasetEnvironment

        splits: dict[str, tuple[Item, ...]] = {}
        for split, items in self._splits.items():
            splits[split.value] = tuple(map(_build_item, items))
        return DatasetEnvironment(DataSet.model_validate(splits), grade=self._grade)


def _build_item(item: Item | Example) -> Item:
    """Return an item; a pair of an input and its right answer gets its digest as id."""
    if isinstance(item, Item):
        return item
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(
            f"an item is an Item or a pair of an input and its right answer, not {item!r:.200}"
        )
    return Item(id=make_id(*item), input=item[0], reference=item[1])
