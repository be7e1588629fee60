"""A calibration before its first call: its identity, what it learns from, and what an earlier start
left.

Its identity follows from its inputs. When it begins, the pairs that are known and promoted then are
stored. A start with equal inputs repeats everything from there: stored replies of models cost
nothing, a test that was left open is ended, and a test that had ended counts as it ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from reflact.calibration.config import CalibratorSettings
from reflact.calibration.generation import list_free_events
from reflact.calibration.pairs import select_events
from reflact.calibration.promotion import MemorySnapshot, take_snapshot
from reflact.calibration.report import CalibrationReport
from reflact.calibration.runtime import CalibrationRuntime
from reflact.calibration.significance import NotTested, find_missing_traces
from reflact.calibration.splits import (
    HoldoutRule,
    HoldoutSplit,
    deduplicate_traces,
    split_by_caller,
    split_by_rule,
)
from reflact.calibration.trace import Trace
from reflact.errors import DataError
from reflact.jsonutil import parse_stored
from reflact.memory.cards import AnchorExclusions, count_tests, describe_other_trace
from reflact.memory.models import BatchTest, ContrastPair
from reflact.types import FrozenModel, digest_json

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

# The prompts that a calibration asks with, beside the critic's own.
IDENTITY_PROMPTS = ("contrast", "judge")

# The settings that a calibration's result depends on.
IDENTITY_SETTINGS = set(CalibratorSettings.model_fields) - {
    "batch_size",
    "concurrency",
    "full_queue_policy",
    "queue_size",
}

# Why a batch would be empty.
NO_PAIRS = NotTested(
    "there is no new pair to test: there is no trace to learn from, its labelled steps give none, "
    "or all pairs were tested before or wait for a review"
)


class CalibrationBaseline(FrozenModel):
    """The memory when a calibration began: ids of pairs, and the last test (0: none)."""

    known_pair_ids: tuple[str, ...]
    promoted_pair_ids: tuple[str, ...]
    last_test_number: int


class CalibrationResult(FrozenModel):
    """The report of a calibration, and a hash of the memory at its end."""

    report: CalibrationReport
    snapshot_hash: str


class CalibrationStart(NamedTuple):
    """A calibration before its first call.

    Args:
        identity: A hash of all that it depends on.
        split: What is learned from, and what tests.
        known_pair_ids: Pairs that are not made again.
        promoted: The pairs that are promoted, by id.
        earlier_tests: The tests before it began.
        finished_tests: Its own tests that had ended when it was stopped.
        resumed: Whether an earlier start was stopped.
        report: Its earlier report, if nothing has changed since.
        missing: Why nothing can be tested; None if something can.
    """

    identity: str
    split: HoldoutSplit
    known_pair_ids: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    earlier_tests: tuple[BatchTest, ...]
    finished_tests: tuple[BatchTest, ...] = ()
    resumed: bool = False
    report: CalibrationReport | None = None
    missing: NotTested | None = None

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


async def open_calibration(
    runtime: CalibrationRuntime,
    traces: Sequence[Trace],
    heldout: Sequence[Trace] | None,
    anchors: Sequence[ContrastPair],
) -> CalibrationStart:
    """Return a calibration before its first call; nothing is asked or stored.

    Raises:
        DataError: Two traces have one id, here or in the store.
    """
    store = runtime.store
    snapshot = await take_snapshot(store)
    await _refuse_other_traces([*traces, *(heldout or ())], snapshot, store)
    start = CalibrationStart(
        identity=_compute_identity(runtime, traces, heldout, anchors),
        split=_split_traces(runtime.settings, traces, heldout, snapshot),
        known_pair_ids=snapshot.known_pair_ids,
        promoted=snapshot.promoted,
        earlier_tests=snapshot.tests,
    )
    last = await store.find_calibration(start.identity)
    if last is not None and last.result:
        result = parse_stored(
            CalibrationResult.model_validate_json, last.result, "result of a calibration"
        )
        if result.snapshot_hash == hash_snapshot(snapshot):
            start = start._replace(report=result.report)
    elif last is not None:
        baseline = parse_stored(
            CalibrationBaseline.model_validate_json, last.baseline, "baseline of a calibration"
        )
        promoted = await load_pairs(store, baseline.promoted_pair_ids)
        # If a pair was forgotten since, the calibration cannot be repeated and begins anew.
        if len(promoted) == len(baseline.promoted_pair_ids):
            n_earlier = baseline.last_test_number
            later = [test for test in snapshot.tests if test.number > n_earlier]
            start = start._replace(
                known_pair_ids=frozenset(baseline.known_pair_ids),
                promoted=promoted,
                earlier_tests=tuple(test for test in snapshot.tests if test.number <= n_earlier),
                finished_tests=_find_finished_tests(later, start.split, runtime),
                resumed=True,
            )
    return start._replace(missing=_find_missing(start, runtime.settings, anchors, snapshot))


def _compute_identity(
    runtime: CalibrationRuntime,
    traces: Sequence[Trace],
    heldout: Sequence[Trace] | None,
    anchors: Sequence[ContrastPair],
) -> str:
    """Return a hash of all inputs; how many calls are in flight makes no difference."""
    prompts = runtime.prompts.prompts
    checksums: dict[str, JsonValue] = {name: prompts[name].checksum for name in IDENTITY_PROMPTS}
    return digest_json(
        [
            runtime.scorer.critic.identity,
            runtime.llm.identity,
            runtime.settings.model_dump(mode="json", include=IDENTITY_SETTINGS),
            checksums,
            _hash_traces(traces),
            None if heldout is None else _hash_traces(heldout),
            *sorted(pair.id for pair in anchors),
        ]
    )


def _hash_traces(traces: Iterable[Trace]) -> str:
    """Return a hash of traces that does not depend on their order."""
    hashes: list[JsonValue] = []
    for trace in traces:
        events = [event.model_dump(mode="json") for event in trace.events]
        hashes.append(digest_json([trace.id, trace.purpose, *events]))
    return digest_json(sorted(hashes, key=str))


def _split_traces(
    settings: CalibratorSettings,
    traces: Sequence[Trace],
    heldout: Sequence[Trace] | None,
    snapshot: MemorySnapshot,
) -> HoldoutSplit:
    """Return what is learned from and what is held out."""
    if heldout is not None:
        return split_by_caller(traces, heldout, training=snapshot.learned)
    rule = HoldoutRule.choose(
        len({trace.purpose for trace in traces}),
        n_folds=settings.holdout_folds,
        holdout_by=settings.holdout_by,
    )
    return split_by_rule(
        traces, training=snapshot.learned, rule=rule, limit=settings.max_held_out_traces
    )


def _find_missing(
    start: CalibrationStart,
    settings: CalibratorSettings,
    anchors: Sequence[ContrastPair],
    snapshot: MemorySnapshot,
) -> NotTested | None:
    """Return why nothing can be tested; None if something can."""
    testing = deduplicate_traces(start.split.held_out)
    few = find_missing_traces(testing, n_earlier_tests=start.n_earlier_tests)
    if few is not None:
        return few
    if snapshot.list_testable_pairs(start.split.held_out):
        return None
    anchored = AnchorExclusions.from_anchors(anchors)
    for trace in start.split.training:
        if select_events(list_free_events(trace, anchored), min_delta=settings.min_delta):
            return None
    return NO_PAIRS


def _find_finished_tests(
    tests: Iterable[BatchTest], split: HoldoutSplit, runtime: CalibrationRuntime
) -> tuple[BatchTest, ...]:
    """Return the critic's finished tests on these held-out traces."""
    traces = deduplicate_traces(split.held_out)
    held_out = tuple(sorted({trace.recording.fingerprint for trace in traces}))
    return tuple(
        test
        for test in tests
        if test.kind == "promote"
        and test.content_fingerprints == held_out
        and test.evidence is not None
        and test.evidence.critic == runtime.scorer.critic.identity
    )


async def load_pairs(store: MemoryStore, pair_ids: Collection[str]) -> tuple[ContrastPair, ...]:
    """Return those of the pairs that the store has, by id."""
    return tuple(one.pair for one in await store.pairs(sorted(pair_ids)))


async def _refuse_other_traces(
    traces: Sequence[Trace], snapshot: MemorySnapshot, store: MemoryStore
) -> None:
    """Raise DataError if one of the traces has the id of another run."""
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
            other_purpose = min(purposes, default=trace.purpose)
            raise DataError(describe_other_trace(trace.id, trace.purpose, other_purpose))


def hash_snapshot(snapshot: MemorySnapshot) -> str:
    """Return a hash of what decides whether a calibration that is over would find anything new."""
    promoted = sorted(pair.id for pair in snapshot.promoted)
    waiting = sorted(one.pair.id for one in snapshot.waiting_pairs)
    return digest_json([*promoted, "waiting", *waiting])
