"""Tests of batches: held-out steps are scored with and without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from reflact.calibration.critic import CRITIC_SCOPE
from reflact.calibration.labeled_steps import LabeledStep, StepScorer
from reflact.calibration.metrics import ScoredStep, bootstrap_mean, compute_metrics
from reflact.calibration.report import MetricsChange
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
    tested_at = {
        pair_id: test.at for test in tests if test.evidence is not None for pair_id in test.pair_ids
    }
    purposes = {origin.trace_id: one.pair.purpose for one in stored for origin in one.origins}
    ours = [one for one in stored if is_visible_to(one.pair.scope, CRITIC_SCOPE)]
    return MemorySnapshot(
        known_pair_ids=frozenset(
            one.pair.id
            for one in stored
            if one.pair.id in tested_at or one.status in {"promoted", "archived"}
        ),
        learned=TrainingHistory(
            frozenset(origin.trace_id for one in stored for origin in one.origins),
            frozenset(purposes.values()),
        ),
        promoted=tuple(one.pair for one in ours if one.status == "promoted"),
        waiting_pairs=tuple(
            one
            for one in ours
            if one.status == "quarantined"
            and not one.needs_review
            and _has_changed_since(one, tested_at)
        ),
        tests=tests,
        purposes=purposes,
    )


class PromotionTester:
    """Tests pairs on steps whose correct score is known."""

    def __init__(self, scorer: StepScorer, store: MemoryStore) -> None:
        self._scorer = scorer
        self._store = store

    async def test(
        self,
        batch: Sequence[ContrastPair],
        steps: Sequence[LabeledStep],
        *,
        promoted: Sequence[ContrastPair],
        name: str,
        use: ReplayTestUse = "promote",
    ) -> PromotionEvidence | NotTested:
        """Score held-out steps with the promoted pairs, with the batch and without; promote or
        demote it.

        The batch is promoted if it lowers the error, and demoted if it raises it. Nothing is sent,
        and no error probability is used up, if there are too few traces.
        """
        ids = tuple(sorted(pair.id for pair in batch))
        without = [pair for pair in promoted if pair.id not in ids]
        traces = {step.trace for step in steps}
        counted = [
            test for test in await self._store.tests() if test.evidence or test.pair_ids != ids
        ]
        missing = find_missing_traces(traces, n_earlier_tests=count_tests(counted, traces))
        if missing is not None:
            return missing
        before = await self._scorer.score(steps, without)
        n_unscored = before.count(None)
        if use == "promote" and len(steps) - n_unscored < MIN_COVERAGE * len(steps):
            return NotTested(
                reason="too_few_scores",
                n_traces=len(traces),
                n_steps=len(steps),
                n_unscored=n_unscored,
            )
        after = await self._scorer.score(steps, [*without, *batch])
        batch_changed = NotTested(reason="batch_changed", n_traces=len(traces))
        try:
            test = await self._find_open_test(ids, traces, name=name, use=use)
            test = test or await self._store.open_test(
                ids, holdout_id=name, traces=traces, kind=use
            )
        except DataError:  # the batch was sound when it was read, so another process was faster
            return batch_changed
        evidence = self._decide(test, pair_scores(steps, before, after))
        if isinstance(evidence, NotTested):
            return evidence
        try:
            await self._store.close_test(test.number, evidence)
        except DataError:
            is_over = any(
                one.number == test.number and one.evidence for one in await self._store.tests()
            )
            if not is_over:
                raise
            return batch_changed
        return evidence

    def _decide(
        self, test: BatchTest, scores: Sequence[StepScores]
    ) -> PromotionEvidence | NotTested:
        result = decide_replay_test(scores, n_earlier_tests=test.n_earlier_tests, use=test.kind)
        if isinstance(result, NotTested):
            return result
        critic = self._scorer.critic
        return PromotionEvidence(
            pair_ids=test.pair_ids,
            passed_test=result.has_passed,
            n_earlier_tests=test.n_earlier_tests,
            effect=result.effect.value,
            low=result.effect.low,
            high=result.effect.high,
            critic=critic.identity,
            prompt=critic.prompt,
            **result.model_dump(exclude={"effect"}),
        )

    async def _find_open_test(
        self,
        ids: tuple[str, ...],
        traces: Collection[TraceIdentity],
        *,
        name: str,
        use: ReplayTestUse,
    ) -> BatchTest | None:
        """Return the test of this batch on these traces that a killed process opened and did not
        close.

        Nobody saw its result, so to end it spends no further error probability.
        """
        wanted = (ids, tuple(sorted({trace.fingerprint for trace in traces})), name, use)
        for test in await self._store.tests():
            found = (test.pair_ids, test.content_fingerprints, test.holdout_id, test.kind)
            if found == wanted and test.evidence is None:
                changed = [one.changed_at for one in await self._store.pairs(ids)]
                return test if changed and max(changed) <= test.at else None
        return None


def _has_changed_since(pair: StoredPair, last_tested: Mapping[str, datetime]) -> bool:
    """Whether a pair was never tested, or was changed since its last test."""
    last = last_tested.get(pair.pair.id)
    return last is None or pair.changed_at > last


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
    before, after = select_scored(scores)
    gain = None
    if before:
        both = [one for one in scores if one.without is not None and one.with_batch is not None]
        effects = compute_trace_effects(both)
        gain = bootstrap_mean(effects, low=-10, high=10, stream_name="effect")
    return MetricsChange(
        before=compute_metrics(before),
        after=compute_metrics(after),
        gain=gain,
        n_unscored=len(scores) - len(before),
    )


def group_by_test(
    promoted: Collection[ContrastPair], tests: Sequence[BatchTest]
) -> tuple[tuple[ContrastPair, ...], ...]:
    """Return promoted pairs by the test that promoted them, in the order of the tests."""
    by_id = {pair.id: pair for pair in promoted}
    batches: dict[int, list[ContrastPair]] = defaultdict(list)
    for test in reversed(tests):
        if test.kind == "promote" and test.evidence is not None and test.evidence.passed_test:
            batches[test.number] += [
                by_id.pop(pair_id) for pair_id in test.pair_ids if pair_id in by_id
            ]
    return tuple(tuple(batches[number]) for number in sorted(batches) if batches[number])
