"""The events of a run, as a closed union.

The store keeps each *durable* event once across all starts of a run, in the order of the plan. Two
runs of the same plan have the same durable events, apart from their times; durable events therefore
contain no spend. *Live* events report progress. They are not stored, and concurrent work reports in
any order.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal

from pydantic import AwareDatetime, Field, JsonValue, TypeAdapter

from reflact.records import Improvement, RunSummary, SkillScore, SkillVersion, SlowUpdate, Usage
from reflact.types import (
    AnalystReport,
    EditResult,
    Fallback,
    FrozenModel,
    GateAction,
    Verdict,
    digest_json,
)

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


class _Event(FrozenModel):
    """Base of all events: the run, the step (0 before the first step) and the time.

    Two events with the same content are equal, whatever their times.
    """

    durable: ClassVar[bool] = True
    run_id: str
    step: int = 0
    at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Event) or type(other) is not type(self):
            return NotImplemented
        return {**self.__dict__, "at": None} == {**other.__dict__, "at": None}

    def __hash__(self) -> int:
        return hash(self.canonical_content)

    @property
    def canonical_content(self) -> str:
        """The event without its time, as JSON: the same bytes in every run of the same plan."""
        return self.model_dump_json(exclude={"at"})

    @property
    def id(self) -> str:
        """Digest of the content, 16 hexadecimal digits: equal in every run of the same plan."""
        return digest_json(self.model_dump(mode="json", exclude={"at"}))[:16]

    @property
    def subject(self) -> Hashable | None:
        """The subject of a live event, which a newer event with the same subject replaces."""
        return None


class _LiveEvent(_Event):
    """Base of the events that report progress; ``subject_fields`` identify their subject."""

    durable: ClassVar[bool] = False
    subject_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def subject(self) -> Hashable:
        """The kind of the event, and the values of its subject's fields."""
        return (type(self), *(getattr(self, name) for name in self.subject_fields))


class RunStarted(_Event):
    """The sizes of the plan, before any call."""

    kind: Literal["run_started"] = "run_started"
    steps_per_epoch: int
    n_train: int
    n_val: int
    n_test: int


class GatePowerEstimated(_Event):
    """What the gate does and what the final test can confirm, in words, and the cost of a decision.

    ``trials`` is the largest number of passes of a skill, ``rollouts`` that of rollouts for one
    decision.
    """

    kind: Literal["gate_power_estimated"] = "gate_power_estimated"
    description: str
    trials: int
    rollouts: int


class NullAnswersGraded(_Event):
    """Constant answers were graded on train items, before anything is paid.

    ``warning`` says in plain words if one has a high score; else it is None.
    """

    kind: Literal["null_answers_graded"] = "null_answers_graded"
    scores: tuple[SkillScore, ...]
    warning: str | None = None


class BaselineMeasured(_Event):
    """The initial skill's score on the validation split, in the gate's metric.

    The score is that of the first trial of ``n`` items. The gate learns from further ``trials`` if
    rollouts agree.
    """

    kind: Literal["baseline_measured"] = "baseline_measured"
    score: float
    n: int
    trials: int = 1


class StepStarted(_Event):
    """A step begins; ``item_ids`` is its batch."""

    kind: Literal["step_started"] = "step_started"
    epoch: int
    item_ids: tuple[str, ...]


class RolloutsFinished(_Event):
    """The batch was rolled out."""

    kind: Literal["rollouts_finished"] = "rollouts_finished"
    n: int
    failures: int
    unmeasured: int


class AnalystReported(_Event):
    """One analyst's report, in the plan's order."""

    kind: Literal["analyst_reported"] = "analyst_reported"
    report: AnalystReport


class FallbackUsed(_Event):
    """A model call gave no valid decision; names the replacement."""

    kind: Literal["fallback_used"] = "fallback_used"
    fallback: Fallback


class EditsApplied(_Event):
    """The step's edits with the result of each."""

    kind: Literal["edits_applied"] = "edits_applied"
    pool_size: int
    budget: int | None
    results: tuple[EditResult, ...]


class TrialRequested(_LiveEvent):
    """Live: for a decision of ``part``, the gate requests a trial of one skill on ``n`` items.

    Requests for a decision that is retried later are not part of the history.
    """

    subject_fields: ClassVar[tuple[str, ...]] = ("part",)
    kind: Literal["trial_requested"] = "trial_requested"
    part: str
    trial: int
    n: int


class CandidateJudged(_Event):
    """The gate's verdict."""

    kind: Literal["candidate_judged"] = "candidate_judged"
    verdict: Verdict


class VersionReturned(_Event):
    """An earlier version, named by its hash, is believed best and becomes current again."""

    kind: Literal["version_returned"] = "version_returned"
    skill_hash: str
    reason: str


class StepCommitted(_Event):
    """The step is in the store."""

    kind: Literal["step_committed"] = "step_committed"
    epoch: int
    action: GateAction
    current: SkillVersion
    best: SkillVersion


class EpochCommitted(_Event):
    """The end of an epoch is in the store: slow update, meta skill and the skill afterwards."""

    kind: Literal["epoch_committed"] = "epoch_committed"
    epoch: int
    slow_update: SlowUpdate | None
    meta_skill: str | None
    fallbacks: tuple[Fallback, ...]
    current: SkillVersion
    best: SkillVersion


class TrainingStopped(_Event):
    """`train.patience` or the search ended the training before its last planned step."""

    kind: Literal["training_stopped"] = "training_stopped"
    reason: str


class PromotionJudged(_Event):
    """The last skill was compared with the best one after the last step."""

    kind: Literal["promotion_judged"] = "promotion_judged"
    verdict: Verdict
    best: SkillVersion


class TestSplitOpened(_Event):
    """The sealed test split is opened, for the ``count``-th time in this run."""

    __test__ = False
    kind: Literal["test_split_opened"] = "test_split_opened"
    count: int


class FinalScoreMeasured(_Event):
    """A score of the final report."""

    kind: Literal["final_score_measured"] = "final_score_measured"
    score: SkillScore


class ImprovementMeasured(_Event):
    """The paired improvement of a skill over the baseline."""

    kind: Literal["improvement_measured"] = "improvement_measured"
    improvement: Improvement


class StageProgressed(_LiveEvent):
    """Live: ``done`` of ``total`` rollouts of a stage are finished; ``from_store`` were stored."""

    subject_fields: ClassVar[tuple[str, ...]] = ("stage", "note")
    kind: Literal["stage_progressed"] = "stage_progressed"
    stage: Stage
    done: int
    total: int
    from_store: int = 0
    note: str = ""


class SkillVersionCreated(_Event):
    """A skill version is in the store; version 0 is the initial document."""

    kind: Literal["skill_version_created"] = "skill_version_created"
    version: SkillVersion


class StageStarted(_LiveEvent):
    """Live: a stage of a step begins."""

    subject_fields: ClassVar[tuple[str, ...]] = ("stage",)
    kind: Literal["stage_started"] = "stage_started"
    stage: Stage


class StageFinished(_LiveEvent):
    """Live: a stage of a step has finished after ``seconds``."""

    subject_fields: ClassVar[tuple[str, ...]] = ("stage",)
    kind: Literal["stage_finished"] = "stage_finished"
    stage: Stage
    seconds: float


class _ModelEvent(_LiveEvent):
    """Base: role, purpose and id of a call; all attempts of a call have the same ``call_id``."""

    subject_fields: ClassVar[tuple[str, ...]] = ("role", "purpose")
    role: str
    purpose: str
    call_id: str


class ModelCallFinished(_ModelEvent):
    """Live: a model call has finished, with all its attempts.

    ``outcome`` is ``reply`` if the call gave a validated reply; otherwise ``reason`` says why it
    did not. ``usage`` includes stored responses. ``from_store`` is true if nothing was sent.
    """

    kind: Literal["model_call_finished"] = "model_call_finished"
    outcome: Literal["reply", "failed"]
    reason: str | None = None
    attempts: int
    usage: Usage
    seconds: float
    from_store: bool = False


class DraftUpdated(_ModelEvent):
    """Live: the partial reply of an attempt, as JSON that only grows.

    The draft is not validated; only the reply of the call counts. ``attempt`` is a number from 1.
    """

    kind: Literal["draft_updated"] = "draft_updated"
    attempt: int
    draft: JsonValue


class DraftDiscarded(_ModelEvent):
    """Live: discard the draft; another attempt begins, or the call has failed."""

    kind: Literal["draft_discarded"] = "draft_discarded"
    attempt: int
    reason: str


class BudgetUpdated(_LiveEvent):
    """Live: the consumption of all starts of the run, without calls in flight, and the limits.

    ``worst_case`` is the most that interrupted and uncounted calls may have used beyond ``usage``.
    The limits count both.
    """

    kind: Literal["budget_updated"] = "budget_updated"
    usage: Usage
    worst_case: Usage = Usage()
    seconds: float
    max_usd: float | None = None
    max_tokens: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None


class RateLimited(_LiveEvent):
    """Live: an endpoint limits its rate; the client sends nothing there for ``seconds``.

    If ``status`` is None, the endpoint was unreachable and a call retries after these seconds.
    ``rate`` is the resulting limit in calls per second; None if none was found.
    """

    subject_fields: ClassVar[tuple[str, ...]] = ("endpoint",)
    kind: Literal["rate_limited"] = "rate_limited"
    endpoint: str
    status: int | None
    seconds: float
    rate: float | None = None


class StepRetried(_LiveEvent):
    """Live: too few rollouts of a step could be measured, so the step is retried."""

    subject_fields: ClassVar[tuple[str, ...]] = ("step", "reason")
    kind: Literal["step_retried"] = "step_retried"
    reason: str


class WarningIssued(_LiveEvent):
    """Live: a warning that does not affect the result."""

    subject_fields: ClassVar[tuple[str, ...]] = ("message",)
    kind: Literal["warning_issued"] = "warning_issued"
    message: str


class RunFinished(_LiveEvent):
    """Live: the run has ended; always the last event."""

    kind: Literal["run_finished"] = "run_finished"
    summary: RunSummary


Event = Annotated[
    RunStarted
    | GatePowerEstimated
    | NullAnswersGraded
    | BaselineMeasured
    | StepStarted
    | RolloutsFinished
    | AnalystReported
    | FallbackUsed
    | EditsApplied
    | TrialRequested
    | CandidateJudged
    | VersionReturned
    | StepCommitted
    | EpochCommitted
    | TrainingStopped
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
"""Any event of a run; its ``kind`` tells which."""

EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)
"""Reads an event from JSON: ``EVENT_ADAPTER.validate_json(text)``."""
