"""What a run commits: its steps, the ends of its epochs, and the state after each of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reflact.types import (
    AggregateResult,
    AnalystReport,
    Edit,
    EditResult,
    FailurePattern,
    Fallback,
    FrozenModel,
    GateAction,
    Measurement,
    Score,
    SelectResult,
    Skill,
    Verdict,
)


class SkillVersion(FrozenModel):
    """A skill version: number 0 is the initial document; ``origin`` says which step made it.

    An ``inherited`` score is that of the version before: this text was never measured, and the score is
    shown but decides nothing.
    """

    number: int
    skill_hash: str
    origin: str
    score: float | None = None
    inherited: bool = False


class StepBufferEntry(FrozenModel):
    """What later steps of the same epoch are told of an earlier one."""

    step: int
    action: GateAction
    n_failures: int
    n_total: int
    patterns: tuple[FailurePattern, ...] = ()
    rejected_edits: tuple[Edit, ...] = ()
    score_before: float | None = None
    score_after: float | None = None


class StepRecord(FrozenModel):
    """All that a committed step did. The same inputs give the same bytes; times and spend live elsewhere.

    Args:
        made: The versions that the step made, in order: an accepted candidate, then the same or the old
            document with new notes in its appendix.
        notes: The appendix's notes after the step; None where the step left them alone.
        current: The current version after the step.
        best: The best version after the step.
        fallbacks: Decisions of a model that could not be had, beside those of merging and selection.
    """

    step: int
    epoch: int
    step_in_epoch: int
    skill_before: str
    item_ids: tuple[str, ...]
    rollout: Measurement
    n_failures: int
    reports: tuple[AnalystReport, ...]
    merged: AggregateResult
    chosen: SelectResult
    edits: tuple[EditResult, ...]
    candidate_hash: str
    verdict: Verdict
    created_versions: tuple[SkillVersion, ...] = ()
    notes: tuple[str, ...] | None = None
    current: SkillVersion
    best: SkillVersion
    fallbacks: tuple[Fallback, ...] = ()


ComparisonCategory = Literal["improved", "regressed", "persistent_failure", "stable_success"]


class ItemComparison(FrozenModel):
    """One train item under the previous epoch's last skill and the current one."""

    item_id: str
    category: ComparisonCategory
    before: Score
    after: Score


class SlowUpdate(FrozenModel):
    """What the slow update did at an epoch's end.

    ``guidance`` is None where none could be had; ``verdict`` is None where it was not gated.
    """

    action: Literal["reserved", "forced", "accepted", "kept", "refused"]
    helped: Literal["helped", "hurt", "unclear", "none"] = "none"
    reasoning: str = ""
    guidance: str | None = None
    candidate_hash: str | None = None
    verdict: Verdict | None = None


class EpochRecord(FrozenModel):
    """What happened after an epoch's last step.

    Args:
        epoch: Which epoch ended, from 1.
        step: Its last step.
        last_hash: The skill as it stood at that step, before any slow update.
        compared: The items that both skills worked on.
        slow: The slow update; None where it is off.
        meta: The optimizer's memory after the epoch; None where it stays as it was.
        fallbacks: Decisions of a model that could not be had.
        made: The version that the slow update made.
        current: The current version afterwards.
        best: The best version afterwards.
    """

    epoch: int = Field(ge=1)
    step: int
    last_hash: str
    comparisons: tuple[ItemComparison, ...] = ()
    slow_update: SlowUpdate | None = None
    meta_skill: str | None = None
    fallbacks: tuple[Fallback, ...] = ()
    created_versions: tuple[SkillVersion, ...] = ()
    current: SkillVersion
    best: SkillVersion


class PromotionRecord(FrozenModel):
    """The comparison of the last skill with the best one, after the last step."""

    step: int
    verdict: Verdict
    current: SkillVersion
    best: SkillVersion


DecisionPoint = Literal["step", "slow update", "promotion"]
"""The decisions that a step may have, its epoch's and its run's end included."""


class CandidateReview(FrozenModel):
    """What an approver sees of a candidate that the gate would accept.

    ``diff`` is the unified diff from the current document.
    """

    step: int
    part: DecisionPoint
    current: Skill
    candidate: Skill
    diff: str
    verdict: Verdict


class AlphaBudget(FrozenModel):
    """An error probability and the gated decisions that share it: those up to ``until_step``.

    A run has one; each extension of it opens another.
    """

    alpha: float = Field(gt=0, lt=1)
    decisions: int = Field(ge=1)
    until_step: int

    @property
    def level(self) -> float:
        """The share of one decision."""
        return self.alpha / self.decisions


class OpenComparison(FrozenModel):
    """A comparison that stayed inconclusive, so that a later one goes on with it.

    Args:
        skill_hash: The candidate.
        against: The skill it was compared with.
        trials: The trials that it was given so far.
        planned: The trials of the first comparison, which fixed the size of its bets.
        level: The error probability of the first comparison, likewise.
    """

    skill_hash: str
    against: str
    trials: int
    planned_trials: int
    level: float


class RunState(FrozenModel):
    """Where a run stands after its last commit; all that the next step needs.

    Args:
        step: The last committed step.
        epoch: Its epoch.
        commits: How many commits the run has had; the greater state is the later one.
        current: The current skill.
        best: The best measured skill.
        latest_version: The highest version number given.
        step_buffer: What the steps of the epoch left for later ones.
        seen_hashes: Documents that the run holds or has rejected; undecided ones are not among them.
        deterministic: Whether no repeat of a rollout ever disagreed.
        alphas: The error probabilities that decisions so far were taken under, one for each extension.
        undecided: Candidates that stayed inconclusive.
        closed_epoch: The last epoch whose end was committed.
        last_hash: The skill at that epoch's last step, before any slow update.
        meta: The optimizer's memory.
    """

    step: int = 0
    epoch: int = 0
    commits: int = 0
    current: SkillVersion
    best: SkillVersion
    latest_version: int = 0
    step_buffer: tuple[StepBufferEntry, ...] = ()
    seen_hashes: tuple[str, ...] = ()
    deterministic: bool = True
    alphas: tuple[AlphaBudget, ...] = ()
    open_comparisons: tuple[OpenComparison, ...] = ()
    last_committed_epoch: int = 0
    last_hash: str | None = None
    meta_skill: str = ""
