"""The closed union of what can happen in a run.

*Durable* events come in the plan's order, are stored once across all starts of a run and hold nothing
that differs between two runs of the same plan: no spend, and of times only the one at which they happened,
which is no part of what they say. *Live* events tell what is happening just now; siblings come in any order
and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal

from pydantic import AwareDatetime, Field, JsonValue, TypeAdapter

from reflact.records import Improvement, RunSummary, SkillScore, SkillVersion, SlowUpdate, Usage
from reflact.types import AnalystReport, EditResult, Fallback, FrozenModel, GateAction, Verdict, digest_json

Stage = Literal[
    "rollout",
    "reflect",
    "aggregate",
    "select",
    "update",
    "evaluate",
    "appendix",
    "slow_update",
    "meta_skill",
    "final_test",
]


def _now() -> datetime:
    return datetime.now(UTC)


class _Event(FrozenModel):
    """Base: which run, which step (0: before the first), and when.

    Two events are equal where they say the same, whenever they happened. ``subject_fields`` names the fields that tell
    what a live event is the latest word on.
    """

    durable: ClassVar[bool] = True
    subject_fields: ClassVar[tuple[str, ...]] = ()
    run_id: str
    step: int = 0
    at: AwareDatetime = Field(default_factory=_now)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Event) or type(other) is not type(self):
            return NotImplemented
        return {**self.__dict__, "at": None} == {**other.__dict__, "at": None}

    def __hash__(self) -> int:
        return hash(self.canonical_content)

    @property
    def canonical_content(self) -> str:
        """What the event says, as JSON, without its time: the same bytes in every run of the same plan."""
        return self.model_dump_json(exclude={"at"})

    @property
    def id(self) -> str:
        """Identity of what the event says, 16 hexadecimal digits: equal in every run of the same plan."""
        return digest_json(self.model_dump(mode="json", exclude={"at"}))[:16]

    @property
    def subject(self) -> Hashable | None:
        """What a live event is about; a newer one with the same subject makes it old. None: it stays true."""
        return None if self.durable else (type(self), *(getattr(self, name) for name in self.subject_fields))


class RunStarted(_Event):
    """The plan, before any call."""

    kind: Literal["run_started"] = "run_started"
    steps_per_epoch: int
    n_train: int
    n_val: int
    n_test: int


class GatePowerEstimated(_Event):
    """What the validation split can resolve and what a decision may cost, in words and numbers.

    ``effect`` is the smallest improvement, in 0..1, that the gate detects with 80% power; None where the
    policy makes no such promise. ``rollouts`` is the most that one decision may take.
    """

    kind: Literal["outlook"] = "outlook"
    description: str
    effect: float | None
    trials: int
    rollouts: int


class BaselineMeasured(_Event):
    """The initial skill's score on the validation split, in the gate's metric."""

    kind: Literal["baseline_measured"] = "baseline_measured"
    score: float
    n: int


class StepStarted(_Event):
    """A step begins; ``item_ids`` is its batch."""

    kind: Literal["step_started"] = "step_started"
    epoch: int
    item_ids: tuple[str, ...]


class RolloutsFinished(_Event):
    """The batch was rolled out."""

    kind: Literal["rollouts_done"] = "rollouts_done"
    n: int
    failures: int
    unmeasured: int


class AnalystReported(_Event):
    """One analyst's report, in the plan's order."""

    kind: Literal["report_done"] = "report_done"
    report: AnalystReport


class FallbackUsed(_Event):
    """A model's decision could not be had; what was done instead."""

    kind: Literal["fallback_taken"] = "fallback_taken"
    fallback: Fallback


class EditsApplied(_Event):
    """The step's edits and what became of each."""

    kind: Literal["edits_applied"] = "edits_applied"
    pool_size: int
    budget: int | None
    results: tuple[EditResult, ...]


class TrialRequested(_Event):
    """Live: the gate asks for rollouts: ``n`` items of a trial on both sides, for a decision of ``part``.

    The looks of a decision that could not be measured and is taken again are no part of the history.
    """

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("part",)
    kind: Literal["gate_looked"] = "gate_looked"
    part: str
    trial: int
    n: int


class CandidateJudged(_Event):
    """The gate's verdict."""

    kind: Literal["decided"] = "decided"
    verdict: Verdict


class StepCommitted(_Event):
    """The step is in the store."""

    kind: Literal["step_committed"] = "step_committed"
    epoch: int
    action: GateAction
    current: SkillVersion
    best: SkillVersion


class EpochCommitted(_Event):
    """An epoch's end is in the store: the slow update, the optimizer's memory, the skill afterwards."""

    kind: Literal["epoch_closed"] = "epoch_closed"
    epoch: int
    slow_update: SlowUpdate | None
    meta_skill: str | None
    fallbacks: tuple[Fallback, ...]
    current: SkillVersion
    best: SkillVersion


class PromotionJudged(_Event):
    """The last skill was compared with the best one after the last step."""

    kind: Literal["promoted"] = "promoted"
    verdict: Verdict
    best: SkillVersion


class TestSplitOpened(_Event):
    """The sealed test split is opened, for the ``count``-th time in this run."""

    __test__ = False
    kind: Literal["test_opened"] = "test_opened"
    count: int


class FinalScoreMeasured(_Event):
    """A score of the final report."""

    kind: Literal["final_score"] = "final_score"
    score: SkillScore


class ImprovementMeasured(_Event):
    """What a skill gained over the baseline, item by item."""

    kind: Literal["improvement_measured"] = "improvement_measured"
    improvement: Improvement


class StageProgressed(_Event):
    """Live: ``done`` of ``total`` parts of a stage are finished."""

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("stage", "note")
    kind: Literal["progress"] = "progress"
    stage: Stage
    done: int
    total: int
    note: str = ""


class SkillVersionCreated(_Event):
    """A skill version is in the store; version 0 is the initial document."""

    kind: Literal["skill_made"] = "skill_made"
    version: SkillVersion


class StageStarted(_Event):
    """Live: a stage of a step begins."""

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("stage",)
    kind: Literal["stage_started"] = "stage_started"
    stage: Stage


class StageFinished(_Event):
    """Live: a stage of a step is over, after so many seconds."""

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("stage",)
    kind: Literal["stage_finished"] = "stage_finished"
    stage: Stage
    seconds: float


class _ModelEvent(_Event):
    """Base: which call; ``sample`` is its label, equal in all events of its attempts."""

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("role", "purpose")
    role: str
    purpose: str
    call_id: str


class ModelCallFinished(_ModelEvent):
    """Live: a model call is over, all its attempts included.

    ``outcome`` is ``reply`` where a validated reply came of it. ``usage`` counts what came from the store
    as well; ``stored`` says that nothing was sent.
    """

    kind: Literal["model_called"] = "model_called"
    outcome: Literal["reply", "failed"]
    attempts: int
    usage: Usage
    seconds: float
    from_store: bool = False


class DraftUpdated(_ModelEvent):
    """Live: what an attempt has written so far, as JSON that grows and never takes anything back.

    It is not validated: the reply of the call is what counts. ``attempt`` is the attempt's number, from 1.
    """

    kind: Literal["drafted"] = "drafted"
    attempt: int
    draft: JsonValue


class DraftDiscarded(_ModelEvent):
    """Live: what was drafted so far counts for nothing; another attempt begins, or the call has failed."""

    kind: Literal["draft_reset"] = "draft_reset"
    attempt: int
    reason: str


class BudgetUpdated(_Event):
    """Live: what all starts of the run have taken, reservations apart, beside the limits."""

    durable: ClassVar[bool] = False
    kind: Literal["budget_moved"] = "budget_moved"
    usage: Usage
    seconds: float
    max_usd: float | None = None
    max_tokens: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None


class RateLimited(_Event):
    """Live: an endpoint said that it is asked too much; nothing is sent there for so many seconds.

    Without a ``status`` it could not be reached, and a call tries again after these seconds. ``rate`` is
    the calls a second at which it goes on, None where no rate was found.
    """

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("endpoint",)
    kind: Literal["backed_off"] = "backed_off"
    endpoint: str
    status: int | None
    seconds: float
    rate: float | None = None


class StepRetried(_Event):
    """Live: too little of a step could be measured, so it is tried again."""

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("step", "reason")
    kind: Literal["repeated"] = "repeated"
    reason: str


class WarningIssued(_Event):
    """Live: something worth knowing that changes nothing."""

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ("message",)
    kind: Literal["warned"] = "warned"
    message: str


class RunFinished(_Event):
    """Live: the run has ended; always the last event."""

    durable: ClassVar[bool] = False
    kind: Literal["finished"] = "finished"
    summary: RunSummary


Event = Annotated[
    RunStarted
    | GatePowerEstimated
    | BaselineMeasured
    | StepStarted
    | RolloutsFinished
    | AnalystReported
    | FallbackUsed
    | EditsApplied
    | TrialRequested
    | CandidateJudged
    | StepCommitted
    | EpochCommitted
    | PromotionJudged
    | TestSplitOpened
    | FinalScoreMeasured
    | ImprovementMeasured
    | SkillVersionCreated
    | StageStarted
    | StageFinished
    | StageProgressed
    | ModelCallFinished
    | DraftUpdated
    | DraftDiscarded
    | BudgetUpdated
    | RateLimited
    | StepRetried
    | WarningIssued
    | RunFinished,
    Field(discriminator="kind"),
]

EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)
"""Reads an event from JSON: ``EVENT.validate_json(text)``."""
