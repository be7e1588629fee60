"""What a calibration began with, so that one that was stopped goes on as if it had not been.

A calibration is known by what it is given: the critic, the settings, the traces, the anchors. When it begins,
the pairs that are known and promoted then are stored. A start that is given the same repeats everything from
there: stored replies of models cost nothing, and tests that had ended count as they ended. What is held out
follows from the traces alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pydantic import JsonValue, ValidationError

from reflact.calibration.config import CalibratorSettings
from reflact.calibration.contrast import select_events
from reflact.calibration.metrics import CriticMetrics
from reflact.calibration.mistakes import ContrastSettings, DroppedCandidate, GenerationResult
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
from reflact.memory.cards import MIN_TRACES, AnchorExclusions, count_tests
from reflact.memory.models import (
    BatchTest,
    ContrastPair,
    Origin,
    PromotionEvidence,
    ScoreEvent,
    StoredCalibration,
)
from reflact.prompts import PromptBook
from reflact.types import FrozenModel, digest_json

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

StoredModel = TypeVar("StoredModel", bound=FrozenModel)

IDENTITY_PROMPTS = ("contrast", "judge", "other_purpose")
"""The prompts that a calibration asks with, beside the critic's own."""


class CalibrationBaseline(FrozenModel):
    """What stood in the memory when a calibration began.

    Args:
        known_pair_ids: The ids of pairs that are not made again.
        promoted_pair_ids: The ids of pairs that were promoted.
        last_test_number: The number of the last test, 0 if there was none.
    """

    known_pair_ids: tuple[str, ...]
    promoted_pair_ids: tuple[str, ...]
    last_test_number: int


class CalibrationResult(FrozenModel):
    """What came of a calibration, and a hash of what stood in the memory at its end."""

    report: CalibrationReport
    snapshot_hash: str


class CalibrationInputs(NamedTuple):
    """What a calibration is given; it is known by it."""

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
        heldout_hash = None if self.heldout is None else _hash_traces(self.heldout)
        about: list[JsonValue] = [
            self.critic,
            self.llm,
            settings,
            dict(sums),
            _hash_traces(self.traces),
            heldout_hash,
        ]
        return digest_json([*about, *sorted(pair.id for pair in self.anchors)])

    def split_traces(self, snapshot: MemorySnapshot, tests: Sequence[BatchTest]) -> HoldoutSplit:
        """Return what is learned from and what is held out; the rule's choice if the caller made none."""
        if self.heldout is not None:
            return split_by_caller(self.traces, self.heldout, training=snapshot.training_history)
        settings = self.settings
        purposes = len({trace.purpose for trace in self.traces})
        slices = HoldoutRule.choose(purposes, n_folds=settings.holdout_folds, holdout_by=settings.holdout_by)
        taught = snapshot.training_history
        return split_by_rule(
            self.traces, training=taught, tests=tests, rule=slices, limit=settings.max_held_out_traces
        )


@dataclass
class CalibrationState:
    """A calibration from its beginning to its end.

    Args:
        identity: What it is known by.
        split: What is learned from and what is held out.
        known_pair_ids: Pairs that were known when it began.
        promoted: What is promoted, as far as it has come; by id.
        earlier_tests: The tests that were there when it began.
        finished_tests: Its tests that had ended when it was stopped, and are not taken yet.
        number: Its number in the store; None while it is not begun.
        report: What came of it earlier, if nothing has changed since.
    """

    identity: str
    split: HoldoutSplit
    known_pair_ids: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    earlier_tests: tuple[BatchTest, ...]
    finished_tests: tuple[BatchTest, ...] = ()
    number: int | None = None
    report: CalibrationReport | None = None

    @property
    def baseline(self) -> CalibrationBaseline:
        """What it began with, if it has not come further."""
        return CalibrationBaseline(
            known_pair_ids=tuple(sorted(self.known_pair_ids)),
            promoted_pair_ids=tuple(pair.id for pair in self.promoted),
            last_test_number=max((test.number for test in self.earlier_tests), default=0),
        )

    @property
    def was_resumed(self) -> bool:
        """Whether it was begun by an earlier start."""
        return self.number is not None

    @property
    def n_earlier_tests(self) -> int:
        """How many batches were tested on its held-out traces before it began."""
        return count_tests(self.earlier_tests, [trace.recording for trace in self.split.held_out])

    def pop_finished_test(self, round_pair_ids: Collection[str]) -> BatchTest | None:
        """Return how the test of a round ended before the calibration was stopped; None if it did not.

        Args:
            round_pair_ids: The pairs of the round.
        """
        first, self.finished_tests = self.finished_tests[:1], self.finished_tests[1:]
        for test in first:
            if not round_pair_ids or not set(round_pair_ids).isdisjoint(test.unit_ids):
                return test
        self.finished_tests = ()
        return None


async def open_calibration(
    inputs: CalibrationInputs,
    identity: str,
    last_calibration: StoredCalibration | None,
    *,
    snapshot: MemorySnapshot,
    store: MemoryStore,
) -> CalibrationState:
    """Return the course of a calibration: a new one, or that of the last one that was given the same.

    Args:
        inputs: What it is given.
        identity: What it is known by; see ``CalibrationInputs.identity``.
        last_calibration: The last calibration that was given the same.
        snapshot: What is in the memory now.
        store: If pairs are.
    """
    if last_calibration is not None and last_calibration.result is None:
        baseline = _parse_stored(CalibrationBaseline, last_calibration.baseline)
        promoted = () if baseline is None else await load_pairs(store, baseline.promoted_pair_ids)
        if baseline is not None and len(promoted) == len(baseline.promoted_pair_ids):
            before = tuple(test for test in snapshot.tests if test.number <= baseline.last_test_number)
            split = inputs.split_traces(snapshot, before)
            ended = _find_finished_tests(snapshot.tests[len(before) :], split, critic=inputs.critic)
            known_ids = frozenset(baseline.known_pair_ids)
            return CalibrationState(
                identity,
                split,
                known_ids,
                promoted,
                before,
                finished_tests=ended,
                number=last_calibration.number,
            )
    split = inputs.split_traces(snapshot, snapshot.tests)
    calibration = CalibrationState(
        identity, split, snapshot.known_pair_ids, snapshot.promoted, snapshot.tests
    )
    result = (
        None
        if last_calibration is None or last_calibration.result is None
        else _parse_stored(CalibrationResult, last_calibration.result)
    )
    if result is not None and result.snapshot_hash == hash_snapshot(snapshot):
        calibration.report = result.report
    return calibration


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
    """Return a critic's tests on the held-out traces of a calibration, as far as they are over."""
    held_out = tuple(sorted({trace.recording.fingerprint for trace in deduplicate_traces(split.held_out)}))
    return tuple(
        test
        for test in tests
        if test.kind == "promote"
        and test.evidence is not None
        and test.evidence.critic == critic
        and test.holdout_id == split.held_out_name
        and test.content_fingerprints == held_out
    )


def _hash_traces(traces: Iterable[Trace]) -> str:
    """Return a hash of what traces hold, in whatever order they come."""
    hashes = sorted(
        digest_json([trace.id, trace.purpose, *(event.model_dump(mode="json") for event in trace.events)])
        for trace in traces
    )
    return digest_json(list[JsonValue](hashes))


def _parse_stored(model_type: type[StoredModel], text: str) -> StoredModel | None:
    """Return a stored value; None if another version wrote it otherwise: then nothing rests on it."""
    try:
        return model_type.model_validate_json(text)
    except ValidationError:
        return None


class StoredGeneration(GenerationResult):
    """What became of a trace's candidates.

    Args:
        n_quarantined: Kept pairs that the scan holds back.
        n_new: Kept pairs that are new.
        is_memory_full: Nothing was made, since the memory has no room for a pair.
    """

    n_quarantined: int = 0
    n_new: int = 0
    is_memory_full: bool = False


@dataclass
class RoundTotals:
    """What the rounds of one call made."""

    n_rounds: int = 0
    pairs: list[ContrastPair] = field(default_factory=list)
    dropped: list[DroppedCandidate] = field(default_factory=list)
    n_quarantined: int = 0
    n_archived: int = 0
    n_left_out: int = 0
    tests: list[PromotionEvidence] = field(default_factory=list)
    not_tested_reason: str | None = None
    measurements_by_round: list[CriticMetrics] = field(default_factory=list)


# ------------------------------------------------------------------------------------- what is missing


def find_missing(
    calibration: CalibrationState, inputs: CalibrationInputs, snapshot: MemorySnapshot
) -> str | None:
    """Return in a sentence what is missing for a test, and how to come by it; None if nothing is. Pure."""
    parts, traces = calibration.split, inputs.traces if inputs.heldout is None else inputs.heldout
    testing = deduplicate_traces(parts.held_out)
    few = find_missing_traces(testing, n_earlier_tests=calibration.n_earlier_tests)
    if few is None:
        taught = snapshot.list_testable_pairs(parts.held_out)
        return (
            None
            if taught
            else _explain_no_events(
                parts, AnchorExclusions.from_anchors(inputs.anchors), inputs.settings.contrast
            )
        )
    if few.n_tested:
        return few.explanation
    missing = MIN_TRACES - len(testing)
    bare = sum(not list_labeled_events(trace) for trace in traces)
    spoilt = sum(trace.id in snapshot.training_trace_ids for trace in traces if list_labeled_events(trace))
    beside = f" beside {bare} without a label" if bare and parts.held_out_name == CALLER_HOLDOUT_NAME else ""
    words = (
        f"{len(testing)} held-out traces have labelled steps{beside}; a batch is tested on at least "
        f"{MIN_TRACES}, so {missing} more {'is' if missing == 1 else 'are'} missing: "
    )
    if parts.held_out_name == CALLER_HOLDOUT_NAME:
        learned = f", since pairs were made from {spoilt} of these earlier" if spoilt else ""
        return f"{words}hold out more labelled traces{learned}"
    usable = sum(trace.id not in snapshot.training_trace_ids for trace in deduplicate_traces(traces))
    slices = inputs.settings.holdout_folds
    return (
        f"{words}one slice of {slices} tests, and of {_count_traces_text(len(traces))} {usable} have labels and were not "
        f"learned from; label or record about {missing * slices} more, set a smaller "
        f"calibrator.holdout_folds, or name {MIN_TRACES} traces that are to be held out as `heldout`"
    )


def _explain_no_events(
    split: HoldoutSplit, anchored: AnchorExclusions, settings: ContrastSettings
) -> str | None:
    if not split.training:
        return (
            "there is no trace to learn from: all that were given are held out; pass others, or more of them"
        )
    events = sum(len(trace.events) for trace in split.training)
    free = [list_free_events(trace, anchored) for trace in split.training]
    if any(select_events(each, settings) for each in free):
        return None
    about = (
        f"none of {events} steps of {_count_traces_text(len(split.training))} to learn from teaches anything"
    )
    if not any(free):
        return (
            f"{about}: all of them are of anchors' traces, or show what an anchor scores; learn from "
            "other traces, or take other anchors"
        )
    still = "" if settings.include_no_change else ", and contrast.include_no_change is false"
    return (
        f"{about}: no score moves by contrast.min_delta {settings.min_delta:g}{still}; record "
        "traces whose steps get somewhere, or set a smaller contrast.min_delta"
    )


def list_free_events(trace: Trace, anchored: AnchorExclusions) -> list[ScoreEvent]:
    """Return the steps of a trace that are no anchors; anchors teach nothing."""
    return [
        event
        for event in trace.events
        if not anchored.excludes(trace.purpose, event.transition, Origin(trace_id=trace.id, step=event.step))
    ]


def _count_traces_text(n_traces: int) -> str:
    return "1 trace" if n_traces == 1 else f"{n_traces} traces"


def explain_no_batch(split: HoldoutSplit, totals: RoundTotals) -> str:
    """Return in a sentence why there is nothing to test."""
    if not split.training:
        return (
            "there was no trace to learn from: all that were given are held out; pass others, or more of them"
        )
    if not totals.pairs and totals.n_left_out:
        return (
            f"the memory is full, so that nothing was made of {totals.n_left_out} traces: reject pairs that are "
            "not needed, or open it with larger active_cards"
        )
    if not totals.pairs:
        return f"none of {len(totals.dropped)} candidates became a pair: the drops say why"
    if totals.n_quarantined == len(totals.pairs):
        return f"the scan holds back all {totals.n_quarantined} pairs: look at them, and release those that are sound"
    if totals.n_archived and totals.n_quarantined + totals.n_archived == len(totals.pairs):
        return (
            f"the memory is full, and its bound put {totals.n_archived} of {len(totals.pairs)} pairs away at "
            "once: reject pairs that are not needed, or open it with larger active_cards"
        )
    return "all pairs were tested before, or wait for somebody to look at them"
