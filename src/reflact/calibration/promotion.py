"""Tests of batches: held-out steps are scored with and without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reflact.calibration.critic import CRITIC_SCOPE
from reflact.calibration.events import BatchTestPostponed, PairBatchTested
from reflact.calibration.labeled_steps import LabeledStep
from reflact.calibration.metrics import ScoredStep, compute_metrics, estimate_effect
from reflact.calibration.report import MetricsChange
from reflact.calibration.runtime import CalibrationRuntime
from reflact.calibration.significance import (
    MIN_COVERAGE,
    NotTested,
    ReplayTestUse,
    StepScores,
    compute_trace_effects,
    decide_replay_test,
    find_missing_traces,
    select_scored,
)
from reflact.calibration.splits import TrainingHistory
from reflact.calibration.trace import Trace
from reflact.errors import DataError
from reflact.memory.cards import TraceIdentity, count_tests, is_visible_to
from reflact.memory.models import BatchTest, ContrastPair, PromotionEvidence, StoredPair

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore


class MemorySnapshot(NamedTuple):
    """The pairs and tests of a store at a moment.

    ``known_pair_ids`` were tested, promoted or archived and are not made again. Other pairs are, so
    that a round which was cut off before its test is made again as it was. ``waiting_pairs`` may be
    tested and were not since they last changed. ``learned`` is what any pair was made from, and
    ``purposes`` are those of its traces, by id.
    """

    known_pair_ids: frozenset[str]
    learned: TrainingHistory
    promoted: tuple[ContrastPair, ...]
    waiting_pairs: tuple[StoredPair, ...]
    tests: tuple[BatchTest, ...]
    purposes: Mapping[str, str]

    def list_testable_pairs(self, held_out: Iterable[Trace]) -> tuple[ContrastPair, ...]:
        """Return the waiting pairs that were made of none of these traces."""
        held_out_ids = {trace.id for trace in held_out}
        return tuple(
            one.pair
            for one in self.waiting_pairs
            if held_out_ids.isdisjoint(origin.trace_id for origin in one.origins)
        )


async def take_snapshot(store: MemoryStore) -> MemorySnapshot:
    """Return the present status of the critic's pairs."""
    stored = await store.pairs()
    tests = await store.tests()
    tested_at = {}
    for test in tests:
        if test.evidence is not None:
            tested_at.update(dict.fromkeys(test.pair_ids, test.at))
    purposes: dict[str, str] = {}
    known_pair_ids: set[str] = set()
    promoted: list[ContrastPair] = []
    waiting: list[StoredPair] = []
    for one in stored:
        purposes.update((origin.trace_id, one.pair.purpose) for origin in one.origins)
        last_test = tested_at.get(one.pair.id)
        if last_test is not None or one.status in {"promoted", "archived"}:
            known_pair_ids.add(one.pair.id)
        if not is_visible_to(one.pair.scope, CRITIC_SCOPE):
            continue
        if one.status == "promoted":
            promoted.append(one.pair)
        has_changed = last_test is None or one.changed_at > last_test
        if one.status == "quarantined" and not one.needs_review and has_changed:
            waiting.append(one)
    return MemorySnapshot(
        frozenset(known_pair_ids),
        TrainingHistory(frozenset(purposes), frozenset(purposes.values())),
        tuple(promoted),
        tuple(waiting),
        tests,
        purposes,
    )


async def run_replay_test(
    runtime: CalibrationRuntime,
    batch: Sequence[ContrastPair],
    steps: Sequence[LabeledStep],
    *,
    promoted: Sequence[ContrastPair],
    use: ReplayTestUse = "promote",
) -> PromotionEvidence | NotTested:
    """Score held-out steps with the promoted pairs, with the batch and without; promote or demote
    it, and emit the result.

    The batch is promoted if it lowers the error, and demoted if it raises it. Nothing is sent, and
    no error probability is used up, if there are too few traces.
    """
    result = await _score_and_decide(runtime, batch, steps, promoted=promoted, use=use)
    if isinstance(result, PromotionEvidence):
        emit_tested(runtime, result, use)
    else:
        emit_postponed(runtime, result, len(batch))
    return result


def emit_tested(
    runtime: CalibrationRuntime, evidence: PromotionEvidence, use: ReplayTestUse = "promote"
) -> None:
    """Emit how the test of a batch ended."""
    runtime.on_event(PairBatchTested(use=use, evidence=evidence, usage=runtime.usage))


def emit_postponed(runtime: CalibrationRuntime, reason: NotTested, n_pairs: int) -> None:
    """Emit why a batch was not tested."""
    runtime.on_event(
        BatchTestPostponed(
            n_pairs=n_pairs,
            n_traces=reason.n_traces,
            explanation=reason.explanation,
            usage=runtime.usage,
        )
    )


async def _score_and_decide(
    runtime: CalibrationRuntime,
    batch: Sequence[ContrastPair],
    steps: Sequence[LabeledStep],
    *,
    promoted: Sequence[ContrastPair],
    use: ReplayTestUse,
) -> PromotionEvidence | NotTested:
    store = runtime.store
    ids = tuple(sorted(pair.id for pair in batch))
    without = [pair for pair in promoted if pair.id not in ids]
    traces = {step.trace for step in steps}
    # An open test of the same batch is the one that this one ends, so it does not count.
    counted = [test for test in await store.tests() if test.evidence or test.pair_ids != ids]
    missing = find_missing_traces(traces, n_earlier_tests=count_tests(counted, traces))
    if missing is not None:
        return missing
    before = await runtime.scorer.score(steps, without)
    n_unscored = before.count(None)
    if use == "promote" and len(steps) - n_unscored < MIN_COVERAGE * len(steps):
        explanation = (
            f"without the batch the model gave no valid score of {n_unscored} of {len(steps)} "
            f"held-out steps, on {len(traces)} traces, and a test needs nine in ten: use a model "
            "that gives valid replies, or raise `max_tokens` or `reasks`"
        )
        return NotTested(explanation, len(traces))
    after = await runtime.scorer.score(steps, [*without, *batch])
    batch_changed = NotTested(
        "another process changed or tested a pair of the batch while it was scored; the next test "
        "has the other pairs",
        len(traces),
    )
    try:
        test = await _find_open_test(store, ids, traces, use=use)
        test = test or await store.open_test(ids, traces=traces, kind=use)
    except DataError:  # the batch was sound when it was read, so another process was faster
        return batch_changed
    scores = pair_scores(steps, before, after)
    result = decide_replay_test(scores, n_earlier_tests=test.n_earlier_tests, use=use)
    if isinstance(result, NotTested):
        return result
    evidence = PromotionEvidence(
        pair_ids=ids,
        passed_test=result.has_passed,
        n_traces=result.n_traces,
        n_transitions=result.n_transitions,
        n_earlier_tests=test.n_earlier_tests,
        effect=result.effect.value,
        low=result.effect.low,
        high=result.effect.high,
        p_value=result.p_value,
        alpha=result.alpha,
        critic=runtime.scorer.critic.identity,
        prompt=runtime.scorer.critic.prompt,
        accuracy_change=result.accuracy_change,
        outcome=result.outcome,
        n_unscored=result.n_unscored,
    )
    try:
        await store.close_test(test.number, evidence)
    except DataError:
        stored = next(one for one in await store.tests() if one.number == test.number)
        if stored.evidence is None:
            raise
        return batch_changed
    return evidence


async def _find_open_test(
    store: MemoryStore,
    ids: tuple[str, ...],
    traces: Collection[TraceIdentity],
    *,
    use: ReplayTestUse,
) -> BatchTest | None:
    """Return the test of this batch on these traces that a killed process opened and did not close.

    Nobody saw its result, so to end it spends no further error probability.
    """
    wanted = (ids, tuple(sorted({trace.fingerprint for trace in traces})), use)
    for test in await store.tests():
        found = (test.pair_ids, test.content_fingerprints, test.kind)
        if found == wanted and test.evidence is None:
            changed = [one.changed_at for one in await store.pairs(ids)]
            return test if changed and max(changed) <= test.at else None
    return None


def pair_scores(
    steps: Sequence[LabeledStep],
    before: Sequence[ScoredStep | None],
    after: Sequence[ScoredStep | None],
) -> tuple[StepScores, ...]:
    """Return two scorings of the same steps, step by step."""
    return tuple(
        StepScores(step.trace_id, step.label, old, new)
        for step, old, new in zip(steps, before, after, strict=True)
    )


def compare_metrics(scores: Sequence[StepScores]) -> MetricsChange:
    """Return what changed between two scorings, as far as both gave a score."""
    both = [one for one in scores if one.without is not None and one.with_batch is not None]
    before, after = select_scored(both)
    return MetricsChange(
        before=compute_metrics(before),
        after=compute_metrics(after),
        gain=estimate_effect(compute_trace_effects(both)) if both else None,
        n_unscored=len(scores) - len(both),
    )


def group_by_test(
    promoted: Collection[ContrastPair], tests: Sequence[BatchTest]
) -> tuple[tuple[ContrastPair, ...], ...]:
    """Return promoted pairs by the test that promoted them, in the order of the tests."""
    by_id = {pair.id: pair for pair in promoted}
    batches: dict[int, list[ContrastPair]] = defaultdict(list)
    for test in reversed(tests):  # the latest test that passed is the one that counts
        if test.kind == "promote" and test.evidence is not None and test.evidence.passed_test:
            found = [by_id.pop(pair_id) for pair_id in test.pair_ids if pair_id in by_id]
            batches[test.number] += found
    return tuple(tuple(batches[number]) for number in sorted(batches) if batches[number])
