"""A start of a run: all that it works with, open, and what it has measured so far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from pydantic import TypeAdapter

from reflact.adapters import TargetAdapter
from reflact.concurrency import Slots
from reflact.config.training import TrainerConfig
from reflact.events import Event, Stage, StageFinished, StageStarted, WarningIssued
from reflact.llm.budget import Budget, CurrentStage
from reflact.protocols import (
    LLM,
    Approver,
    DecisionLog,
    EventCallback,
)
from reflact.records import (
    Claim,
    CriticDescription,
    Improvement,
    JudgeDescription,
    RunState,
    RunSummary,
    SkillScore,
    StepRecord,
)
from reflact.skills.rejected_edits import RejectedEdit
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_task
from reflact.stages.rollout import log_unmeasured
from reflact.training.plan import RunPlan
from reflact.training.shutdown import GracefulStop
from reflact.training.trouble import FailureLog
from reflact.types import Rollout, Skill, is_failure

if TYPE_CHECKING:
    from reflact.calibration.critic import Critic
    from reflact.environments.rubric import RubricGrader
    from reflact.integrations.opentelemetry import Tracing
    from reflact.store.runs import SQLiteRunStore

# What the keys of a run's rollouts have in common: the identities of its target and environment.
IDENTITIES_LABEL = "rollout_identities"
IDENTITIES_ADAPTER: TypeAdapter[tuple[str, str]] = TypeAdapter(tuple[str, str])

# A step, and what is measured in it.
StageKey = tuple[int, str]


async def ignore_event(event: Event) -> None:
    """Do nothing with an event."""


@dataclass
class Results:
    """What a start measured at its end, and what its summary warns of.

    ``missing`` says why a measurement failed, and ``unmeasured`` why an item has no score.
    """

    scores: list[SkillScore] = field(default_factory=list)
    improvements: list[Improvement] = field(default_factory=list)
    claim: Claim | None = None
    missing: list[str] = field(default_factory=list)
    unmeasured: dict[str, str | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    test_openings: int = 0
    stop_reason: str | None = None
    critic: CriticDescription | None = None
    judge: JudgeDescription | None = None


@dataclass
class Run:
    """One start of a run.

    ``on_event`` receives all events. ``documents`` are those that the next commit stores.
    ``records`` are the committed steps. ``describe`` words the result for the summary. ``rejected``
    are the keys of a critic's invalid replies. ``pinned_edits`` are rejected edits of other runs,
    ``rejected_edits`` those of the epochs before ``edits_until``.
    """

    plan: RunPlan
    store: SQLiteRunStore
    target: TargetAdapter
    optimizer: LLM
    budget: Budget
    tracing: Tracing
    on_event: EventCallback = ignore_event
    approve: Approver | None = None
    graceful_stop: GracefulStop = field(default_factory=GracefulStop)
    critic: Critic | None = None
    judge: RubricGrader | None = None
    exports: Path | None = None
    state: RunState | None = None
    records: list[StepRecord] = field(default_factory=list)
    documents: dict[str, Skill] = field(default_factory=dict)
    pinned_edits: tuple[RejectedEdit, ...] = ()
    rejected_edits: tuple[RejectedEdit, ...] = ()
    edits_until: int = 0
    results: Results = field(default_factory=Results)
    describe: Callable[[RunSummary], str] | None = None
    rejected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id: str = self.plan.work_id
        self.config: TrainerConfig = self.plan.config
        self.decision_log: DecisionLog = self.store.decision_log(self.id)
        self.slots = Slots(self.config.train.rollout_concurrency)
        self.timer = StageTimer(self.id, self.on_event, self.tracing, self.budget.current_stage)
        self.failures = FailureLog(
            self.id, self.config, self.store, self.on_event, self.plan.overrides.label
        )

    @property
    def folder(self) -> Path:
        """The folder of the run's exported files."""
        return self.exports or self.config.out_dir

    async def emit(self, event: Event) -> None:
        """Store a durable event, and pass it on unless an earlier start did."""
        if await self.store.append_event(event):
            await self.on_event(event)

    async def warn(self, message: str) -> None:
        """Report something that the summary repeats."""
        self.results.warnings.append(message)
        await self.on_event(WarningIssued(run_id=self.id, message=message))

    async def find_skill(self, skill_hash: str) -> Skill:
        """Return a document of the run."""
        return self.documents.get(skill_hash) or await self.store.skill(skill_hash)

    def add_document(self, skill: Skill) -> None:
        """Let the next commit store a document."""
        self.documents.setdefault(skill.hash, skill)

    async def log_unmeasured(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Log the unmeasured rollouts that a decision of a step is about to use."""
        await log_unmeasured(rollouts, decision_log=self.decision_log, step=step)

    def is_failure(self, rollout: Rollout) -> bool:
        """Whether a measured rollout failed, by ``train.success_threshold``."""
        return is_failure(rollout, self.config.train.success_threshold)

    def make_context(self, step: int) -> StageContext:
        """Return what the optimizer's calls of a step share."""
        described = [self.plan.environment.description, self.target.description]
        own = self.config.environment.description
        return StageContext(
            llm=self.optimizer,
            prompts=self.plan.prompts,
            decision_log=self.decision_log,
            step=step,
            task=show_task(own, *described),
        )


@dataclass
class StageTimer:
    """Measures active time since the last reading, in total and by step and stage.

    ``current`` is told what the run works on. Stages that are measured follow one another.
    """

    run_id: str
    on_event: EventCallback
    tracing: Tracing
    current: CurrentStage
    _spent: dict[StageKey, float] = field(default_factory=dict)
    _running: dict[StageKey, float] = field(default_factory=dict)
    _since: float = field(default_factory=anyio.current_time)

    @asynccontextmanager
    async def stage(
        self, *stages: Stage, step: int, name: str | None = None
    ) -> AsyncIterator[None]:
        """Measure the time of the block, even if it fails; step 0 is the baseline."""
        key = (step, " and ".join(stages) if name is None else name)
        self._running[key] = anyio.current_time()
        self.current.step, self.current.stage = key
        try:
            async with AsyncExitStack() as stack:
                for stage in stages:
                    await stack.enter_async_context(self.announce_stage(stage, step=step))
                yield
        finally:
            self._measure_running()
            del self._running[key]

    def _measure_running(self) -> None:
        now = anyio.current_time()
        for key, since in self._running.items():
            self._spent[key] = self._spent.get(key, 0.0) + now - since
            self._running[key] = now

    @asynccontextmanager
    async def announce_stage(self, stage: Stage, *, step: int) -> AsyncIterator[None]:
        """Emit the start of a stage and, unless the block fails, its end."""
        start = anyio.current_time()
        with self.tracing.stage(stage, step=step):
            await self.on_event(StageStarted(run_id=self.run_id, step=step, stage=stage))
            yield
            seconds = anyio.current_time() - start
            await self.on_event(
                StageFinished(run_id=self.run_id, step=step, stage=stage, seconds=seconds)
            )

    def read_and_reset(self, ahead: float = 0.0) -> tuple[float, dict[StageKey, float]]:
        """Return the time since the last reading, in total and by step and stage, and reset both.

        ``ahead`` adds seconds in advance. The next reading is that much shorter, and negative if it
        comes earlier.
        """
        self._measure_running()
        now = anyio.current_time() + ahead
        read = (now - self._since, self._spent)
        self._since = now
        self._spent = {}
        return read
