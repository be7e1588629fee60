"""The state of a calibration, so that one that was stopped goes on as if it had not been.

Its identity follows from its inputs. When it begins, the pairs that are known and promoted then are stored. A
start with equal inputs repeats everything from there: stored replies of models cost nothing, and tests that
had ended count as they ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.labeled_steps import LabeledStep
from reflact.calibration.metrics import CriticMetrics, ScoredStep
from reflact.calibration.mistakes import DroppedCandidate, GenerationResult
from reflact.calibration.planning import select_events
from reflact.calibration.promotion import MemorySnapshot
from reflact.calibration.report import CalibrationReport
from reflact.calibration.significance import find_missing_traces
from reflact.calibration.splits import (
    CALLER_HOLDOUT_NAME,
    HoldoutRule,
    HoldoutSplit,
    deduplicate_traces,
    list_labeled_events,
    split_by_caller,
    split_by_rule,
)
from reflact.calibration.trace import Trace
from reflact.data import shuffle
from reflact.errors import DataError
from reflact.jsonutil import parse_stored
from reflact.memory.cards import MIN_TRACES, AnchorExclusions, count_tests, describe_other_trace
from reflact.memory.models import BatchTest, ContrastPair, Origin, PromotionEvidence, ScoreEvent
from reflact.prompts import PromptBook
from reflact.types import FrozenModel, digest_json

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

IDENTITY_PROMPTS = ("contrast", "judge", "other_purpose")
"""The prompts that a calibration asks with, beside the critic's own."""


class CalibrationBaseline(FrozenModel):
    """The memory when a calibration began: ids of pairs, and the number of the last test (0: none)."""

    known_pair_ids: tuple[str, ...]
    promoted_pair_ids: tuple[str, ...]
    last_test_number: int


class CalibrationResult(FrozenModel):
    """The report of a calibration, and a hash of the memory at its end."""

    report: CalibrationReport
    snapshot_hash: str


class CalibrationInputs(NamedTuple):
    """All that a calibration depends on; ``critic`` and ``llm`` are identities."""

    traces: Sequence[Trace]
    heldout: Sequence[Trace] | None
    anchors: Sequence[ContrastPair]
    critic: str
    llm: str
    settings: CalibratorSettings
    prompts: PromptBook

    @property
    def identity(self) -> str:
        """A hash of all of it; how many calls are in flight makes no difference."""
        settings = self.settings.model_dump(
            mode="json",
            include={"contrast", "curriculum", "holdout_folds", "holdout_by", "max_held_out_traces"},
            exclude={"contrast": {"concurrency"}},
        )
        sums = {name: one.checksum for name, one in self.prompts.prompts.items() if name in IDENTITY_PROMPTS}
        return digest_json(
            [
                self.critic,
                self.llm,
                settings,
                dict[str, JsonValue](sums),
                _hash_traces(self.traces),
                None if self.heldout is None else _hash_traces(self.heldout),
                *sorted(pair.id for pair in self.anchors),
            ]
        )

    def split_traces(self, snapshot: MemorySnapshot, tests: Sequence[BatchTest]) -> HoldoutSplit:
        """Return what is learned from and what is held out; the rule's choice if the caller made none."""
        if self.heldout is not None:
            return split_by_caller(self.traces, self.heldout, training=snapshot.learned)
        settings = self.settings
        n_purposes = len({trace.purpose for trace in self.traces})
        return split_by_rule(
            self.traces,
            training=snapshot.learned,
            tests=tests,
            rule=HoldoutRule.choose(
                n_purposes, n_folds=settings.holdout_folds, holdout_by=settings.holdout_by
            ),
            limit=settings.max_held_out_traces,
        )


class StoredGeneration(GenerationResult):
    """The result of a trace: the scan holds ``n_quarantined`` kept pairs back, ``n_new`` of the others are new."""

    n_quarantined: int = 0
    n_new: int = 0
    is_memory_full: bool = False


@dataclass
class CalibrationState:
    """A calibration from its beginning to its end; the fields from ``n_rounds`` on say what it made.

    ``measured`` are steps of the last round's pairs, as the critic scored them after it.
    ``promoted`` are the pairs that are promoted so far, by id, and ``finished_tests`` its tests that had ended when
    it was stopped and are not replayed yet. ``number`` is None while it is not begun. ``report`` is its earlier
    report, if nothing has changed since.
    """

    identity: str
    split: HoldoutSplit
    known_pair_ids: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    earlier_tests: tuple[BatchTest, ...]
    finished_tests: tuple[BatchTest, ...] = ()
    number: int | None = None
    report: CalibrationReport | None = None
    n_rounds: int = 0
    pairs: list[ContrastPair] = field(default_factory=list)
    dropped: list[DroppedCandidate] = field(default_factory=list)
    n_quarantined: int = 0
    n_archived: int = 0
    n_left_out: int = 0
    tests: list[PromotionEvidence] = field(default_factory=list)
    not_tested_reason: str | None = None
    end_reason: str | None = None
    metrics_by_round: list[CriticMetrics | None] = field(default_factory=list)
    measured: tuple[tuple[LabeledStep, ScoredStep | None], ...] = ()

    @property
    def baseline(self) -> CalibrationBaseline:
        """The memory as it is now, before anything is made."""
        return CalibrationBaseline(
            known_pair_ids=tuple(sorted(self.known_pair_ids)),
            promoted_pair_ids=tuple(pair.id for pair in self.promoted),
            last_test_number=max((test.number for test in self.earlier_tests), default=0),
        )

    @property
    def n_earlier_tests(self) -> int:
        """How many batches were tested on its held-out traces before it began."""
        return count_tests(self.earlier_tests, [trace.recording for trace in self.split.held_out])

    def pop_finished_test(self, round_pair_ids: Collection[str]) -> BatchTest | None:
        """Return the test of a round if it had ended before the calibration was stopped."""
        tests, self.finished_tests = self.finished_tests, self.finished_tests[1:]
        if tests and (not round_pair_ids or not set(round_pair_ids).isdisjoint(tests[0].pair_ids)):
            return tests[0]
        self.finished_tests = ()
        return None


async def open_calibration(
    inputs: CalibrationInputs, identity: str, *, snapshot: MemorySnapshot, store: MemoryStore
) -> CalibrationState:
    """Return the state of a calibration: a new one, or the last one with the same identity."""
    last, report = await store.find_calibration(identity), None
    if last is not None and last.result:
        result = parse_stored(CalibrationResult.model_validate_json, last.result, "result of a calibration")
        report = result.report if result.snapshot_hash == hash_snapshot(snapshot) else None
    elif last is not None:
        baseline = parse_stored(
            CalibrationBaseline.model_validate_json, last.baseline, "baseline of a calibration"
        )
        promoted = await load_pairs(store, baseline.promoted_pair_ids)
        if len(promoted) == len(baseline.promoted_pair_ids):
            before = tuple(test for test in snapshot.tests if test.number <= baseline.last_test_number)
            split = inputs.split_traces(snapshot, before)
            finished = _find_finished_tests(snapshot.tests[len(before) :], split, critic=inputs.critic)
            known = frozenset(baseline.known_pair_ids)
            return CalibrationState(identity, split, known, promoted, before, finished, last.number)
    return CalibrationState(
        identity,
        inputs.split_traces(snapshot, snapshot.tests),
        snapshot.known_pair_ids,
        snapshot.promoted,
        snapshot.tests,
        report=report,
    )


async def refuse_other_traces(traces: Sequence[Trace], snapshot: MemorySnapshot, store: MemoryStore) -> None:
    """Raise DataError if one of the traces has the id of another run: among them, in the store, or in a pair."""
    hashes = await store.content_hashes()
    known: dict[str, Trace] = {}
    for trace in traces:
        is_stored = hashes.get(trace.id) in {None, *trace.recording.content_hashes}
        stored = None if is_stored or trace.id in known else await store.trace(trace.id)
        other = known.setdefault(trace.id, trace if stored is None else Trace.from_stored(stored))
        steps = zip(trace.events, other.events, strict=False)  # a trace may have grown
        has_other_steps = any(one.transition != two.transition for one, two in steps)
        purposes = {other.purpose, snapshot.purposes.get(trace.id, trace.purpose)} - {trace.purpose}
        if purposes or has_other_steps:
            raise DataError(
                describe_other_trace(trace.id, trace.purpose, min(purposes, default=trace.purpose))
            )


async def load_pairs(store: MemoryStore, pair_ids: Collection[str]) -> tuple[ContrastPair, ...]:
    """Return those of the pairs that the store has, by id."""
    if not pair_ids:
        return ()
    pairs = {one.pair.id: one.pair for one in await store.pairs(sorted(pair_ids))}
    return tuple(pairs[pair_id] for pair_id in sorted(pair_ids) if pair_id in pairs)


def hash_snapshot(snapshot: MemorySnapshot) -> str:
    """Return a hash of what decides whether a calibration that is over would find anything new."""
    promoted = sorted(pair.id for pair in snapshot.promoted)
    return digest_json([*promoted, "waiting", *sorted(one.pair.id for one in snapshot.waiting_pairs)])


def _find_finished_tests(
    tests: Iterable[BatchTest], split: HoldoutSplit, *, critic: str
) -> tuple[BatchTest, ...]:
    """Return a critic's finished tests on these held-out traces."""
    held_out = tuple(sorted({trace.recording.fingerprint for trace in deduplicate_traces(split.held_out)}))
    where = ("promote", split.held_out_name, held_out)
    return tuple(
        test
        for test in tests
        if (test.kind, test.holdout_id, test.content_fingerprints) == where
        and test.evidence is not None
        and test.evidence.critic == critic
    )


def _hash_traces(traces: Iterable[Trace]) -> str:
    """Return a hash of traces that does not depend on their order."""
    hashes = (
        digest_json([trace.id, trace.purpose, *(event.model_dump(mode="json") for event in trace.events)])
        for trace in traces
    )
    return digest_json(list[JsonValue](sorted(hashes)))


NOTHING_TO_LEARN = "there is no trace to learn from, because all are held out; pass more traces"


def find_missing(
    calibration: CalibrationState, inputs: CalibrationInputs, snapshot: MemorySnapshot
) -> str | None:
    """Return in a sentence what is missing for a test, and what to do; None if nothing is."""
    split, traces = calibration.split, inputs.traces if inputs.heldout is None else inputs.heldout
    testing = deduplicate_traces(split.held_out)
    few = find_missing_traces(testing, n_earlier_tests=calibration.n_earlier_tests)
    if few is None:
        waits = snapshot.list_testable_pairs(split.held_out)
        return None if waits else _explain_no_events(split, inputs)
    if few.n_tested:
        return few.explanation
    missing = MIN_TRACES - len(testing)
    by_caller = split.held_out_name == CALLER_HOLDOUT_NAME
    bare = sum(not list_labeled_events(trace) for trace in traces)
    words = (
        f"{len(testing)} held-out traces have labelled steps{f' beside {bare} without a label' * (by_caller and bare > 0)}; "
        f"a batch is tested on at least {MIN_TRACES}, so {missing} more {'is' if missing == 1 else 'are'} missing: "
    )
    if by_caller:
        spoilt = sum(trace.id in snapshot.learned.trace_ids for trace in traces if list_labeled_events(trace))
        learned = f", since pairs were made from {spoilt} of these earlier" if spoilt else ""
        return f"{words}hold out more labelled traces{learned}"
    usable = sum(trace.id not in snapshot.learned.trace_ids for trace in deduplicate_traces(traces))
    folds = inputs.settings.holdout_folds
    return (
        f"{words}one fold of {folds} is held out, and {usable} of {_count_traces(traces)} have labels and were not "
        f"learned from; label or record about {missing * folds} more, set a smaller calibrator.holdout_folds, or "
        f"pass {MIN_TRACES} held-out traces as `heldout`"
    )


def _explain_no_events(split: HoldoutSplit, inputs: CalibrationInputs) -> str | None:
    """Return why no step can be learned from; None if one can."""
    if not split.training:
        return NOTHING_TO_LEARN
    settings, anchored = inputs.settings.contrast, AnchorExclusions.from_anchors(inputs.anchors)
    free = [list_free_events(trace, anchored) for trace in split.training]
    if any(select_events(events, settings) for events in free):
        return None
    n_events = sum(len(trace.events) for trace in split.training)
    if any(free):
        why = (
            f"no score moves by contrast.min_delta {settings.min_delta:g}; record traces with more progress, or set a "
            "smaller contrast.min_delta"
        )
    else:
        why = "all of them are in traces of anchors, or show the state of an anchor; use other traces or other anchors"
    return f"no pair can be made from the {n_events} steps of {_count_traces(split.training)} to learn from: {why}"


def list_free_events(trace: Trace, anchored: AnchorExclusions) -> list[ScoreEvent]:
    """Return the steps of a trace that are no anchors; anchors teach nothing."""
    return [
        event
        for event in trace.events
        if not anchored.excludes(trace.purpose, event.transition, Origin(trace_id=trace.id, step=event.step))
    ]


SCORED_STEPS_PER_PAIR = 3
"""So many labelled steps are scored for each pair of a batch, since a critic is right about most steps."""


def list_unscored_steps(
    traces: Iterable[Trace], anchored: AnchorExclusions, settings: PairSettings
) -> tuple[LabeledStep, ...]:
    """Return labelled steps that no critic has scored and that can become pairs; by chance, as many as a batch needs."""
    steps = [
        LabeledStep(trace.recording, event.step, trace.purpose, event.transition, event.label)
        for trace in sorted(traces, key=lambda trace: trace.id)
        for event in list_free_events(trace, anchored)
        if event.evaluation is None and event.label is not None
        if event.label.source != "agreement" and event.label.progress_before is not None
    ]
    if settings.max_pairs is None:
        return tuple(steps)
    return shuffle(steps, settings.seed, "calibrate/unscored")[: SCORED_STEPS_PER_PAIR * settings.max_pairs]


def _count_traces(traces: Sequence[Trace]) -> str:
    return "1 trace" if len(traces) == 1 else f"{len(traces)} traces"


def explain_no_batch(calibration: CalibrationState) -> str:
    """Return in a sentence why there is nothing to test."""
    n_pairs = len(calibration.pairs)
    if not calibration.split.training:
        return NOTHING_TO_LEARN
    if calibration.n_quarantined == n_pairs > 0:
        return f"the scan quarantined or rejected all {n_pairs} pairs; check them and release the sound ones"
    is_blocked = calibration.n_quarantined + calibration.n_archived == n_pairs
    if is_blocked and (calibration.n_left_out or calibration.n_archived):
        return (
            f"the memory is full, so {calibration.n_left_out} traces were left out and {calibration.n_archived} of "
            f"{n_pairs} pairs were archived at once: reject pairs that are not needed, or open it with a larger "
            "max_active_pairs"
        )
    if not n_pairs:
        return f"none of {len(calibration.dropped)} candidates became a pair; the dropped candidates have the reasons"
    return "all pairs were tested before or wait for a review"
