"""The records that a run commits, its state after each commit, and its summary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field, JsonValue

from reflact.text import list_items
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
    PassResult,
    RaceEntry,
    Ranking,
    Rewrite,
    Rollout,
    Score,
    SelectResult,
    ShortReprModel,
    Skill,
    Split,
    Verdict,
    VersionNode,
    WorkedExample,
    digest_json,
)

# Decisions after which the same document may be judged again.
UNPROVEN: tuple[GateAction, ...] = ("set_aside", "return")


class SkillVersion(FrozenModel):
    """A skill version: number 0 is the initial document; ``origin`` names the step that created it.

    The score is the mean, in the gate's metric, over ``n`` items with ``trials`` each. An
    ``inherited`` score is that of the version before; it is shown and decides nothing. The document
    contains the text of the items of its ``examples``.
    """

    number: int
    skill_hash: str
    origin: str
    score: float | None = None
    inherited: bool = False
    n: int | None = None
    trials: int | None = None
    examples: tuple[WorkedExample, ...] = ()

    @property
    def examples_note(self) -> str:
        """Whose text the document holds in its worked examples, as the end of a sentence."""
        if not self.examples:
            return ""
        items = list_items((example.item_id for example in self.examples), "train item")
        return f", and holds the text of {items}"


class StepBufferEntry(FrozenModel):
    """What the prompts of later steps in the same epoch say about an earlier step."""

    step: int
    action: GateAction
    n_failures: int
    n_total: int
    patterns: tuple[FailurePattern, ...] = ()
    rejected_edits: tuple[Edit, ...] = ()
    score_before: float | None = None
    score_after: float | None = None


class _Commit(FrozenModel):
    """Base of the records that a run commits: the versions after a step, and those that it made."""

    step: int
    created_versions: tuple[SkillVersion, ...] = ()
    current: SkillVersion
    best: SkillVersion


class StepRecord(_Commit):
    """The result of a committed step; the same inputs give the same bytes.

    ``created_versions`` are an accepted candidate, then the document with new notes in its
    appendix. ``notes`` is None if the step did not change them. ``fallbacks`` are model decisions
    that failed, other than those of merging and selection. ``fail_reasons`` are the failures
    grouped by the environment's feedback, if no analyst named a pattern. ``source`` made the
    candidates, ``rewrites`` are the documents that it wrote, ``race`` is what was measured of them
    before the gate. ``n_rollouts`` and ``n_tokens`` are what the step cost: rollouts that no
    earlier step had, and estimated tokens of the optimizer.
    """

    epoch: int
    skill_before: str
    item_ids: tuple[str, ...]
    rollout: Measurement
    n_failures: int
    reports: tuple[AnalystReport, ...]
    merged: AggregateResult
    chosen: SelectResult
    edits: tuple[EditResult, ...]
    rewrite_summary: str = ""
    candidate_hash: str
    verdict: Verdict
    notes: tuple[str, ...] | None = None
    fallbacks: tuple[Fallback, ...] = ()
    fail_reasons: tuple[FailurePattern, ...] = ()
    source: str = "edits"
    rewrites: tuple[Rewrite, ...] = ()
    race: tuple[RaceEntry, ...] = ()
    n_rollouts: int = 0
    n_tokens: int = 0

    @property
    def all_fallbacks(self) -> tuple[Fallback, ...]:
        """All model decisions that failed, those of merging and selection first."""
        return (*self.merged.fallbacks, *self.chosen.fallbacks, *self.fallbacks)

    @property
    def patterns(self) -> tuple[FailurePattern, ...]:
        """The patterns that analysts or the proposer named, or else the failures by feedback."""
        named = [pattern for report in self.reports for pattern in report.patterns]
        named += [pattern for rewrite in self.rewrites[:1] for pattern in rewrite.patterns]
        return tuple(named) or self.fail_reasons


ComparisonCategory = Literal["improved", "regressed", "persistent_failure", "stable_success"]


class ItemComparison(FrozenModel):
    """A train item's scores under the last skill of the previous epoch and the current one."""

    item_id: str
    category: ComparisonCategory
    before: Score
    after: Score


class SlowUpdate(FrozenModel):
    """The result of the slow update at the end of an epoch.

    ``guidance`` is None if the model gave none. ``verdict`` is None if the update was not gated.
    """

    action: Literal["reserved", "forced", "accepted", "unchanged", "no_reply"]
    helped: Literal["helped", "hurt", "unclear", "none"] = "none"
    reasoning: str = ""
    guidance: str | None = None
    candidate_hash: str | None = None
    verdict: Verdict | None = None


class EpochRecord(_Commit):
    """The result of the end of an epoch, whose last step is ``step``.

    ``last_hash`` is the hash of the skill after that step, before any slow update. ``comparisons``
    are the items that were measured under both skills, ``left_out`` those of them that
    ``slow_update.pair_policy`` did not choose. ``meta_skill`` is None if it did not change.
    """

    epoch: int = Field(ge=1)
    last_hash: str
    comparisons: tuple[ItemComparison, ...] = ()
    left_out: tuple[ItemComparison, ...] = ()
    slow_update: SlowUpdate | None = None
    meta_skill: str | None = None
    meta_skill_reasoning: str = ""
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the slow update; None without a gated one."""
        return None if self.slow_update is None else self.slow_update.verdict


class PromotionRecord(_Commit):
    """The comparison of the last skill with the best one, after the last step."""

    verdict: Verdict


# The records that a run commits; its state after them follows from them, see ``RunState.after``.
CommitRecord = StepRecord | EpochRecord | PromotionRecord


# The gated decisions at a step: the step itself, the end of its epoch, and the end of the run.
DecisionPoint = Literal["step", "slow update", "promotion"]


class CandidateReview(FrozenModel):
    """A candidate that the gate would accept, and the unified diff from the current document."""

    step: int
    part: DecisionPoint
    current: Skill
    candidate: Skill
    diff: str
    verdict: Verdict


class RunState(FrozenModel):
    """The state of a run after its last commit: the input of the next step.

    ``step_buffer`` are the earlier steps of the epoch. ``seen_hashes`` are the documents that the
    run accepted or rejected. ``deterministic``: all repeated rollouts agreed so far. ``kept`` are
    the versions that were ever current, the initial one first; ``ranking`` is what the ranked gate
    has observed. ``last_hash``: the skill after the last step of ``last_committed_epoch``.
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
    kept: tuple[SkillVersion, ...] = ()
    ranking: Ranking | None = None
    last_committed_epoch: int = 0
    last_hash: str | None = None
    meta_skill: str = ""

    def after(self, records: Iterable[CommitRecord]) -> RunState:
        """Return the state after further commits, in time proportional to their number."""
        state = self
        kept = {version.number: version for version in self.kept}
        seen = dict.fromkeys(self.seen_hashes)
        parents: dict[str, str] = {}
        passes: list[PassResult] = []
        for record in records:
            verdict = record.verdict
            parent = state.current.skill_hash
            if verdict is not None and verdict.ranked is not None:
                parents.setdefault(verdict.ranked.candidate.skill_hash, parent)
                passes += verdict.ranked.passes
                if verdict.action == "return":
                    parent = verdict.ranked.chosen
            for version in record.created_versions:
                kept.setdefault(version.number, version)
                parents.setdefault(version.skill_hash, parent)
                parent = version.skill_hash
            seen |= dict.fromkeys(sorted(_list_settled(record)))
            changes: dict[str, object] = {
                **_update_position(state, record),
                "commits": state.commits + 1,
                "current": record.current,
                "best": record.best,
                "latest_version": max(state.latest_version, record.current.number),
            }
            if verdict is not None and not verdict.deterministic:
                changes["deterministic"] = False
            state = state.model_copy(update=changes)
        ranking = self.ranking
        if ranking is not None:
            known = {node.skill_hash for node in ranking.nodes}
            new = [
                VersionNode(skill_hash=h, parent=p) for h, p in parents.items() if h not in known
            ]
            ranking = ranking.extend(new, passes)
        growth = {"seen_hashes": tuple(seen), "kept": tuple(kept.values()), "ranking": ranking}
        return state.model_copy(update=growth)


def _list_settled(record: CommitRecord) -> set[str]:
    """Return the documents of a commit that need no further decision."""
    settled = {version.skill_hash for version in record.created_versions}
    if record.verdict is not None and record.verdict.action in UNPROVEN:
        return settled
    match record:
        case StepRecord():
            settled.add(record.candidate_hash)
        case EpochRecord(slow_update=SlowUpdate(action="unchanged", candidate_hash=str(candidate))):
            settled.add(candidate)
    return settled


def _update_position(state: RunState, record: CommitRecord) -> dict[str, object]:
    """Return where a run is after a commit, and what its prompts show of it."""
    match record:
        case StepRecord():
            buffer = state.step_buffer if state.epoch == record.epoch else ()
            entry = build_buffer_entry(record)
            return {"step": record.step, "epoch": record.epoch, "step_buffer": (*buffer, entry)}
        case EpochRecord():
            position = {"last_committed_epoch": record.epoch, "last_hash": record.last_hash}
            memory = {} if record.meta_skill is None else {"meta_skill": record.meta_skill}
            return {**position, **memory}
    return {}


def build_buffer_entry(record: StepRecord) -> StepBufferEntry:
    """Return the entry that the prompts of later steps in the epoch show.

    An unproven candidate is without scores and edits, which the optimizer would read as refuted.
    """
    verdict = record.verdict
    entry = StepBufferEntry(
        step=record.step,
        action=verdict.action,
        n_failures=record.n_failures,
        n_total=record.rollout.n,
        patterns=record.patterns,
    )
    proven: dict[str, object] = {}
    if verdict.accepted or verdict.refuted:
        proven["score_before"] = verdict.current_score
        proven["score_after"] = verdict.candidate_score
    if verdict.refuted:
        edits = record.chosen.patch.edits
        proven["rejected_edits"] = tuple(edit for edit in edits if edit.op != "examples")
    return entry.model_copy(update=proven)


# Costs are whole billionths of a dollar, rounded up for each call, so that sums are exact.
BILLION = 10**9


class Usage(FrozenModel):
    """The consumption of calls; ``usd`` is None if no price is known.

    ``uncounted`` is the number of calls whose tokens the provider did not count.
    """

    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usd: float | None = None
    uncounted: int = 0

    @property
    def billionths(self) -> int | None:
        """``usd`` in billionths of a dollar."""
        return None if self.usd is None else round(self.usd * BILLION)

    def __add__(self, other: Usage) -> Usage:
        usd = self.usd if other.usd is None else other.usd + (self.usd or 0.0)
        return Usage(
            usd=usd, **{name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        )

    def __sub__(self, other: Usage) -> Usage:
        """Return the consumption since an earlier moment; without a price now, without one."""
        usd = None if self.usd is None else self.usd - (other.usd or 0.0)
        return Usage(
            usd=usd, **{name: getattr(self, name) - getattr(other, name) for name in COUNTS}
        )


# The fields of a usage that are numbers of calls and tokens.
COUNTS = tuple(name for name in Usage.model_fields if name != "usd")


class Spend(FrozenModel):
    """A run's usage for one role and purpose.

    ``unsettled`` counts calls that were cut off, by a crash for example. ``worst_case`` is the most
    that these calls and all uncounted answers may have cost; budgets count it beside ``usage``.
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


def weigh_scores(hard: float, soft: float, soft_weight: float) -> float:
    """Return the weighted mean of a hard and a soft score, in 0..1; see ``gate.metric``."""
    return (1 - soft_weight) * hard + soft_weight * soft


class SkillScore(FrozenModel):
    """The score of a skill on a split for reports: mean, count and 95% interval of the hard score.

    ``n`` counts measured rollouts: items times ``trials``. The interval is Wilson's if there is a
    single trial with scores of 0 and 1, else a normal one over the means of items (see
    ``reflact.gate.intervals``). ``selected_on``: the gate used the same trials, which biases the
    score upwards. ``buckets`` are the task types, if items have one. A null answer, which is graded
    in place of the target's, has an ``answer``, and the ``skill_hash`` of a document that stands
    for it. ``metrics`` are means over the rollouts that have them. ``soft_weight`` is that of the
    soft score in the gate's metric, 0..1.
    """

    name: str
    answer: str | None = Field(default=None, exclude_if=lambda value: value is None)
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
    metrics: dict[str, float] = Field(default_factory=dict)
    soft_weight: float = 0.0

    def __hash__(self) -> int:
        return hash((self.name, self.skill_hash, self.split))

    @property
    def value(self) -> float | None:
        """The mean in the gate's metric; None if nothing was measured."""
        if not self.soft_weight or self.hard is None or self.soft is None:
            return self.hard
        return weigh_scores(self.hard, self.soft, self.soft_weight)


class NamedDocument(FrozenModel):
    """A document that is measured outside a training, with its name, such as that of its file."""

    name: str
    skill_hash: str


class SkillEvaluation(FrozenModel):
    """What one ``eval`` measures: documents on a split, each item so many times.

    It is stored beside the run of the same configuration, ``run_id``, with a cost of its own.
    ``documents`` begin with the one that is measured; the others it is compared with.
    """

    run_id: str
    split: Split
    repeats: int
    documents: tuple[NamedDocument, ...]

    @property
    def id(self) -> str:
        """The id under which its work is stored; equal for equal measurements."""
        return f"e{digest_json(self.model_dump(mode='json'))[:12]}"

    @property
    def title(self) -> str:
        """What it is, such as ``eval of rule.md``."""
        return f"eval of {self.documents[0].name}"


class Improvement(FrozenModel):
    """The mean difference between a skill and the baseline over the same ``n`` items.

    In the gate's metric, in which the soft score has the weight ``soft_weight``; with the 95%
    interval.
    """

    name: str
    split: Split
    n: int
    mean: float
    low: float
    high: float
    soft_weight: float = 0.0


class CaseComparison(FrozenModel):
    """What repeats of the same cases say about a document and the one with a ``name``.

    It holds for these cases, and for no others. ``gain`` is the mean difference, -1..1; each case
    counts the same, and has at least so many ``repeats`` on each side. ``chance_better`` and
    ``chance_worse`` are the probabilities of so large a gain or loss if the document changes no
    answer. ``better`` are the cases that mostly failed before and are mostly solved now, ``worse``
    the others that flip. ``flips_by_chance`` is how many cases differ between two single runs of
    one document, on average; None without repeats.
    """

    name: str
    n_cases: int
    repeats: int
    gain: float
    chance_better: float
    chance_worse: float
    proven: Literal["better", "worse"] | None
    better: tuple[str, ...]
    worse: tuple[str, ...]
    flips_by_chance: float | None


class ItemSides(FrozenModel):
    """An item under the document with a ``name`` and under another: mean scores, first answers.

    A score is None if no rollout of that side was measured.
    """

    name: str
    item_id: str
    before: float | None
    after: float | None
    answer_before: str
    answer_after: str


class SkillComparison(ShortReprModel):
    """A document beside others on one split; the names of their scores say what they are.

    ``run_id`` is the id under which it is stored beside its run.
    ``improvements`` are what the document gains over each of them, paired by item, as far as they
    say something of new items. ``on_cases`` is what the repeats prove on these items alone;
    ``items`` are those that flip, or have no score on one side. ``judge`` graded, if a model did.
    """

    run_id: str
    skill: SkillScore
    others: tuple[SkillScore, ...]
    improvements: tuple[Improvement, ...]
    on_cases: tuple[CaseComparison, ...] = ()
    items: tuple[ItemSides, ...] = ()
    judge: JudgeDescription | None = None


class Claim(FrozenModel):
    """The claim at the end of a run: its best skill is better than the initial one.

    It is ``confirmed`` if the 95% interval of the improvement lies above 0, and ``chance`` is at
    most 2.5%. On the test split nothing was selected, so a false claim is confirmed in at most 2.5%
    of runs. On ``val`` it says nothing about other items.

    ``chance`` is the probability of so large a gain if each item that differs were as likely to be
    worse as better (exact sign test, one-sided); for several trials of the same items that of the
    exact test of ``gate.cases``.
    """

    improvement: Improvement
    confirmed: bool
    chance: float | None = Field(default=None, ge=0, le=1)


class ActionCount(FrozenModel):
    """The number of a run's decisions with one outcome."""

    action: GateAction
    count: int


class StageCost(FrozenModel):
    """What a stage of a step took, over all starts of the run: active seconds, and spend.

    Step 0 is the baseline; the ends of epochs and of the run count for the step before them. The
    spend leaves out what was found in the store.
    """

    step: int
    stage: str
    seconds: float = 0.0
    spend: tuple[Spend, ...] = ()


class StepCost(FrozenModel):
    """The sum of what a step's stages took; see ``StageCost`` and ``Spend``."""

    step: int
    seconds: float = 0.0
    usage: Usage = Usage()
    unsettled: int = 0
    worst_case: Usage = Usage()


def sum_step_costs(costs: Sequence[StageCost]) -> tuple[StepCost, ...]:
    """Return the cost of each step, in order."""
    sums: dict[int, StepCost] = {}
    for cost in costs:
        total = sums.get(cost.step, StepCost(step=cost.step))
        changes = {
            "seconds": total.seconds + cost.seconds,
            "usage": sum((entry.usage for entry in cost.spend), total.usage),
            "unsettled": total.unsettled + sum(entry.unsettled for entry in cost.spend),
            "worst_case": sum((entry.worst_case for entry in cost.spend), total.worst_case),
        }
        sums[cost.step] = total.model_copy(update=changes)
    return tuple(sums[step] for step in sorted(sums))


class Reuse(FrozenModel):
    """The number of stored results that the latest start of a run used again."""

    rollouts: int = 0
    replies: int = 0


# How an attempt of a call can fail, or give a useless answer; see ``reflact.llm.errors``.
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
    "oversized",
    "overcounted",
    "cut prompt",
    "cut answer",
    "empty answer",
    "other model",
]


class FaultCount(FrozenModel):
    """The number of attempts with a fault of one kind, over all starts of the run."""

    kind: FaultKind
    count: int


class LossCount(FrozenModel):
    """What a run lost on its way: ``count`` of ``total``, if there is a total.

    An ``invalid reply`` is one of the optimizer, also if it was corrected after it was sent back; a
    ``dropped analyst`` gave no report; a ``replaced decision`` is one of the optimizer in whose
    place a rule decided; a ``lost rollout`` has no score.
    """

    kind: Literal["invalid reply", "dropped analyst", "replaced decision", "lost rollout"]
    count: int
    total: int | None = None


class IntervalEstimate(FrozenModel):
    """A measured number and its 95% interval; that of a single trace is the whole range."""

    value: float
    low: float
    high: float


class CriticAccuracy(FrozenModel):
    """The accuracy of a critic's scores on traces with known correct scores.

    ``error`` is the mean absolute error of the estimated progress of ``transitions`` scored steps,
    in 0..10; ``accuracy`` the share of pairs of states in the correct order; None without a pair.
    """

    traces: int
    transitions: int
    error: IntervalEstimate
    accuracy: IntervalEstimate | None = None


class DocumentResult(FrozenModel):
    """What the target answered to an item under one document.

    ``rollouts`` are the measured trials that the document's reported score covers. ``usage`` is
    None if their calls were not seen, as with a target of your own. ``error`` is the reason of a
    trial that could not be measured.
    """

    rollouts: tuple[Rollout, ...] = ()
    usage: Usage | None = None
    error: str | None = None

    @property
    def answer(self) -> str | None:
        """The answer of the first trial; None if the item is not measured."""
        return self.rollouts[0].answer if self.rollouts else None

    @property
    def hard(self) -> float | None:
        """The mean hard score of the trials; None if the item is not measured."""
        scores = [rollout.score.hard for rollout in self.rollouts if rollout.score is not None]
        return math.fsum(scores) / len(scores) if scores else None


class ItemResult(FrozenModel):
    """An item of a run with the answers under the initial document and under the best one.

    ``expected`` is the item's reference. ``wrong``: the best document's hard score is below 1, or
    below ``train.success_threshold``. ``category`` is None unless both documents are measured.
    """

    item_id: str
    split: Split
    task_type: str | None = None
    input: JsonValue
    expected: JsonValue = None
    baseline: DocumentResult
    best: DocumentResult
    category: ComparisonCategory | None = None
    wrong: bool = False


def average_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the mean of each further number of the rollouts, by name, over those that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in () if rollout.score is None else rollout.score.metrics.items():
            values[name].append(value)
    return {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


class CodeFailure(FrozenModel):
    """An exception of the caller's own code, such as an environment, a target or a grader.

    ``item_id`` is None outside of rollouts. ``traceback`` has no keys; a long one is cut.
    """

    step: int
    item_id: str | None
    reason: str
    traceback: str


class CriticDescription(FrozenModel):
    """A critic whose scores or notes a run used; without ``accuracy`` if it was not measured.

    ``identity`` is its model, prompt, settings and snapshot as canonical JSON, ``snapshot`` the
    hash of the pinned prompt and pairs, ``pairs`` their number.
    """

    identity: str
    snapshot: str
    prompt: str
    pairs: int
    accuracy: CriticAccuracy | None = None


class JudgeError(FrozenModel):
    """How often a judge errs on sentences that a person marked.

    ``met`` and ``unmet`` are the sentences that a person calls true and not true of an answer;
    ``false_unmet`` and ``false_met`` those of them on which the judge says the opposite.
    ``unjudged`` are further ones, on which it gave no valid reply.
    """

    met: int
    unmet: int
    false_unmet: int
    false_met: int
    unjudged: int = 0


class JudgeDescription(FrozenModel):
    """The model that judged the sentences of a rubric; ``error`` is None if it is unknown."""

    model: str
    prompt: str
    votes: int
    error: JudgeError | None = None


RunStatus = Literal["completed", "budget", "cancelled", "failed"]

# ``running``: a process works on the run now. A run that was killed has no status.
StoredStatus = RunStatus | Literal["running"]


class RunSummary(ShortReprModel):
    """The outcome of a run: ``Trainer.train`` returns it, and ``summary.json`` contains it.

    ``claim`` is None if the initial skill is the best one or the claim could not be measured.
    ``missing`` names each final measurement that failed, with the reason. ``faults`` counts faults
    of attempts of calls, even if a retry succeeded; ``losses`` counts what was lost for good, or
    cost a reply more. ``critic`` or ``judge`` graded, and ``annotated_by`` wrote notes for failure
    analysts. ``version`` is that of reflact. ``verdict`` is the outcome in words. ``added_tokens``
    is about how many tokens the best document adds to each call of the target, beside the initial
    one.
    """

    version: str | None = None
    run_id: str
    status: RunStatus
    reason: str | None = None
    verdict: str = ""
    steps: int = 0
    accepts: int = 0
    rejects: int = 0
    skips: int = 0
    actions: tuple[ActionCount, ...] = ()
    best: SkillVersion | None = None
    final: SkillVersion | None = None
    scores: tuple[SkillScore, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    claim: Claim | None = None
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    added_tokens: int = 0
    spend: tuple[Spend, ...] = ()
    faults: tuple[FaultCount, ...] = ()
    losses: tuple[LossCount, ...] = ()
    reuse: Reuse = Reuse()
    deterministic: bool = True
    test_openings: int = 0
    seconds: float = 0.0
    config: JsonValue = Field(default=None, repr=False)
    critic: CriticDescription | None = None
    judge: JudgeDescription | None = None
    annotated_by: CriticDescription | None = None

    def score(self, name: str, split: Split) -> SkillScore | None:
        """Return a score on a split by its name, or None.

        Names are ``baseline``, ``placebo``, ``shuffled``, ``null_empty``, ``null_refusal``,
        ``null_frequent``, ``best``, ``final``.
        """
        return next((s for s in self.scores if s.name == name and s.split is split), None)
