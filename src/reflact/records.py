"""What a run commits: its steps, the ends of its epochs, and the state after each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import Field, JsonValue

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
    Split,
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


class Usage(FrozenModel):
    """What calls consumed: tokens as the provider counted them; ``usd`` is None where no price is known.

    ``uncounted`` says in how many of the calls the provider counted nothing.
    """

    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usd: float | None = None
    uncounted: int = 0

    def __add__(self, other: Usage) -> Usage:
        usd = None if self.usd is None and other.usd is None else (self.usd or 0.0) + (other.usd or 0.0)
        return Usage(
            calls=self.calls + other.calls,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            usd=usd,
            uncounted=self.uncounted + other.uncounted,
        )


class Spend(FrozenModel):
    """A run's usage for one role and purpose.

    ``unsettled`` counts calls that were cut off in flight: by a crash, a cancellation, a time-out or a
    broken connection. ``worst`` is the most that they may have cost, together with the tokens and the money
    of the answers in which nothing was counted; budgets hold ``usage`` and ``worst`` against the run.
    """

    role: str
    purpose: str
    usage: Usage
    unsettled: int = 0
    worst_case: Usage = Usage()


class TaskTypeScore(FrozenModel):
    """The part of a score that comes from items of one task type."""

    task_type: str
    n: int
    hard: float
    soft: float


class SkillScore(FrozenModel):
    """A score shown to people: mean, count and 95% interval of a skill on a split.

    ``n`` counts measured rollouts: items times ``trials``. The interval is Wilson's for single trials with
    scores of 0 and 1, a normal one of the items' means otherwise (see ``reflact.gate.intervals.interval_of``).
    ``selected`` tells that a gate read the same trials, which biases the score upwards. ``buckets`` are the
    task types, in alphabetical order; none where items have no type.
    """

    name: str
    skill_hash: str
    split: Split
    n: int
    trials: int = 1
    selected_on: bool = False
    buckets: tuple[TaskTypeScore, ...] = ()
    unmeasured: int = 0
    successes: float = 0.0
    hard: float | None = None
    soft: float | None = None
    low: float | None = None
    high: float | None = None


class Improvement(FrozenModel):
    """The mean difference between a skill and the baseline over the same items, with its 95% interval.

    In the hard score; ``n`` counts the items that were measured under both.
    """

    name: str
    split: Split
    n: int
    mean: float
    low: float
    high: float


class ActionCount(FrozenModel):
    """How many of a run's decisions came out one way."""

    action: GateAction
    count: int


class StageTime(FrozenModel):
    """Active wall time spent in a stage, in seconds, over all starts of the run; stages may overlap."""

    stage: str
    seconds: float


class Reuse(FrozenModel):
    """What the latest start of a run found in its store instead of doing it again."""

    rollouts: int = 0
    replies: int = 0

    def add(self, *, rollouts: int = 0, replies: int = 0) -> Reuse:
        """Return the counts with more added."""
        return Reuse(rollouts=self.rollouts + rollouts, replies=self.replies + replies)


FaultKind = Literal[
    "408",
    "409",
    "429",
    "5xx",
    "timeout",
    "unreachable",
    "reset",
    "truncated",
    "malformed",
    "broken stream",
    "unusable",
]
"""How an attempt of a call can fail; ``reflact.llm.errors`` says what each kind is."""


class FaultCount(FrozenModel):
    """How many attempts of calls failed in one way, over all starts of the run."""

    kind: FaultKind
    count: int


class EpochStats(FrozenModel):
    """Counts of one epoch's decisions, and the gate scores at its end; None for an unmeasured text."""

    epoch: int
    steps: int
    accepts: int
    rejects: int
    skips: int
    inconclusive: int = 0
    slow_update: str | None = None
    current_score: float | None
    best_score: float | None


class IntervalEstimate(FrozenModel):
    """A measured number and its 95% interval; of a single trace the interval is all that can be."""

    value: float
    low: float
    high: float


class CriticAccuracy(FrozenModel):
    """How far a critic's scores are right, on traces whose correct scores are known.

    Args:
        traces: The traces, over which the intervals are resampled.
        transitions: Scored steps in them.
        error: Mean absolute error of phi, in 0..10.
        accuracy: Share of pairs of states that it orders rightly, 0..1; None where nothing can be ordered.
    """

    traces: int
    transitions: int
    error: IntervalEstimate
    accuracy: IntervalEstimate | None = None


class CriticDescription(FrozenModel):
    """A critic whose opinion a run used.

    Args:
        identity: Model, prompt, settings and snapshot, as canonical JSON.
        snapshot: Hash of the prompt and the pairs that it is pinned to.
        prompt: Its prompt's name and version.
        pairs: How many pairs it is pinned to.
        measured: Its accuracy; None where nobody measured it.
    """

    identity: str
    snapshot: str
    prompt: str
    pairs: int
    accuracy: CriticAccuracy | None = None


RunStatus = Literal["completed", "budget", "cancelled", "failed"]


def _is_none(value: object) -> bool:
    return value is None


class RunSummary(FrozenModel):
    """The outcome of a run: what ``Trainer.train`` returns and ``summary.json`` holds.

    ``missing`` says, for each measurement of the end that could not be had, which one and why. ``surplus``
    counts rollouts that had finished when a decision was clear without them; they and ``reused`` are those
    of the latest start. ``faults`` counts failed attempts of calls, also where a repeat succeeded; those of
    models that were passed in are not seen. ``critic`` says whose opinion the scores are, where a critic
    graded, ``noted_by`` whose opinion failure analysts were shown; both are left out of JSON where there
    was none. ``version`` is that of reflact.
    """

    version: str | None = None
    run_id: str
    status: RunStatus
    reason: str | None = None
    steps: int = 0
    accepts: int = 0
    rejects: int = 0
    skips: int = 0
    actions: tuple[ActionCount, ...] = ()
    best: SkillVersion | None = None
    final: SkillVersion | None = None
    scores: tuple[SkillScore, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    missing: tuple[str, ...] = ()
    epochs: tuple[EpochStats, ...] = ()
    spend: tuple[Spend, ...] = ()
    stages: tuple[StageTime, ...] = ()
    faults: tuple[FaultCount, ...] = ()
    reuse: Reuse = Reuse()
    surplus: int = 0
    deterministic: bool = True
    test_openings: int = 0
    seconds: float = 0.0
    config: JsonValue = Field(default=None, repr=False)
    critic: CriticDescription | None = Field(default=None, exclude_if=_is_none)
    noted_by: CriticDescription | None = Field(default=None, exclude_if=_is_none)

    def score(self, name: str, split: Split) -> SkillScore | None:
        """Return the score of ``baseline``, ``placebo``, ``best`` or ``final`` on a split, or None."""
        return next((s for s in self.scores if s.name == name and s.split is split), None)


ACTIONS: tuple[GateAction, ...] = get_args(GateAction)
UNCHANGED: tuple[GateAction, ...] = ("no_change", "no_patches", "no_rewrite")


def summarize_history(
    summary: RunSummary,
    records: Sequence[StepRecord],
    epochs: Sequence[EpochRecord],
    state: RunState | None,
) -> RunSummary:
    """Return a summary with what the committed history says: counts, epochs, best and final skill.

    A run that ended before its first state has no best and no final skill.
    """
    actions: Counter[str] = Counter(r.verdict.action for r in records)
    ends = {e.epoch: e for e in epochs}
    numbers = sorted({r.epoch for r in records})
    return summary.model_copy(
        update={
            "steps": len(records),
            "accepts": sum(r.verdict.accepted for r in records),
            "rejects": actions["reject"],
            "skips": sum(actions[action] for action in UNCHANGED),
            "actions": tuple(ActionCount(action=a, count=actions[a]) for a in ACTIONS if actions[a]),
            "best": state.best if state is not None else None,
            "final": state.current if state is not None else None,
            "deterministic": state is None or state.deterministic,
            "epochs": tuple(
                _summarize_epoch([r for r in records if r.epoch == n], ends.get(n)) for n in numbers
            ),
        }
    )


def _summarize_epoch(records: Sequence[StepRecord], end: EpochRecord | None) -> EpochStats:
    last = records[-1] if end is None else end
    return EpochStats(
        epoch=records[-1].epoch,
        steps=len(records),
        accepts=sum(r.verdict.accepted for r in records),
        rejects=sum(r.verdict.action == "reject" for r in records),
        skips=sum(r.verdict.action in UNCHANGED for r in records),
        inconclusive=sum(r.verdict.action == "inconclusive" for r in records),
        slow_update=None if end is None or end.slow_update is None else end.slow_update.action,
        current_score=None if last.current.inherited else last.current.score,
        best_score=last.best.score,
    )
