"""What a run reports of itself: consumption, scores and the summary."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from reflact.records import SkillVersion
from reflact.types import FrozenModel, GateAction, Split


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
    scores of 0 and 1, a normal one of the items' means otherwise (see ``reflact.intervals.interval_of``).
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
