"""The loop of a calibration: measure, make pairs, store and test them, and measure again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from reflact.calibration.events import (
    CalibrationStarted,
    CriticMeasured,
    RoundStarted,
    summarize_scores,
)
from reflact.calibration.generation import (
    GeneratedPairs,
    has_plateaued,
    list_unscored_steps,
    make_pairs,
    measure_weakness,
    plan_round,
    score_unscored_steps,
)
from reflact.calibration.labeled_steps import LabeledStep, list_labeled_steps, list_pair_steps
from reflact.calibration.metrics import CriticMetrics, ScoredStep, compute_metrics
from reflact.calibration.pairs import StepToContrast, build_observed_pair, choose_batch
from reflact.calibration.promotion import (
    compare_metrics,
    emit_tested,
    group_by_test,
    pair_scores,
    run_replay_test,
    take_snapshot,
)
from reflact.calibration.report import (
    CalibrationCostEstimate,
    CalibrationReport,
    count_drops,
    count_pairs,
)
from reflact.calibration.runtime import CalibrationRuntime
from reflact.calibration.significance import (
    NotTested,
    compute_error,
    describe_test_power,
    explain_nothing_to_learn,
)
from reflact.calibration.start import (
    NO_PAIRS,
    CalibrationResult,
    CalibrationStart,
    hash_snapshot,
    load_pairs,
)
from reflact.calibration.trace import Trace
from reflact.memory.cards import AnchorExclusions
from reflact.memory.models import BatchTest, ContrastPair, PromotionEvidence, ScoreEvent

# On so many steps of a round's pairs at most, the critic's weak kinds of mistakes are measured: the
# first by hash.
MAX_MEASURED_STEPS = 24


class RoundState(NamedTuple):
    """What a calibration knows between two rounds.

    ``scored`` are the held-out steps as the critic scores them now, and ``history`` what that was
    worth before the first round and after each. ``measured`` are steps of the last round's pairs
    with the critic's present evaluation, and ``weakness`` its error rates there by kind of mistake.
    ``finished_tests`` had ended before a stop. The rest is what was made so far.
    """

    training: tuple[Trace, ...]
    known_pair_ids: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    finished_tests: tuple[BatchTest, ...]
    scored: tuple[ScoredStep | None, ...]
    history: tuple[CriticMetrics, ...] = ()
    measured: tuple[tuple[LabeledStep, ScoredStep | None], ...] = ()
    weakness: Mapping[str, float] = {}
    n_rounds: int = 0
    made: GeneratedPairs = GeneratedPairs()
    tests: tuple[PromotionEvidence, ...] = ()
    not_tested_reason: str | None = None
    end_reason: str | None = None

    def may_go_on(self, max_rounds: int) -> bool:
        """Whether another round may follow, as far as its measurements say."""
        return self.n_rounds < max_rounds and not has_plateaued(self.history)

    def add_scores(self, scored: tuple[ScoredStep | None, ...]) -> RoundState:
        """Return the state after the held-out steps were scored."""
        metrics = compute_metrics([score for score in scored if score is not None])
        history = self.history if metrics is None else (*self.history, metrics)
        return self._replace(scored=scored, history=history)

    def pop_finished_test(
        self, round_pair_ids: Collection[str]
    ) -> tuple[RoundState, PromotionEvidence | None]:
        """Return the evidence of a round's test that had ended before a stop, and what is left."""
        tests = self.finished_tests
        if tests and (not round_pair_ids or not set(round_pair_ids).isdisjoint(tests[0].pair_ids)):
            return self._replace(finished_tests=tests[1:]), tests[0].evidence
        return self._replace(finished_tests=()), None

    def add_test(
        self, evidence: PromotionEvidence, promoted: tuple[ContrastPair, ...]
    ) -> RoundState:
        """Return the state after a test, and with the pairs that are promoted now."""
        return self._replace(
            tests=(*self.tests, evidence),
            known_pair_ids=self.known_pair_ids.union(evidence.pair_ids),
            promoted=promoted,
        )


async def run_calibration(
    runtime: CalibrationRuntime,
    start: CalibrationStart,
    anchors: Sequence[ContrastPair],
    *,
    ignore_finished: bool,
) -> CalibrationReport:
    """Calibrate; a finished calibration only if ``ignore_finished``."""
    if start.report is not None and not ignore_finished:
        return start.report.model_copy(update={"is_earlier_result": True})
    store = runtime.store
    if not start.resumed:
        await store.start_calibration(start.identity, start.baseline.model_dump_json())
    run = _CalibrationRun(runtime, start, list_pair_steps(anchors), is_forced=ignore_finished)
    report = await run.run()
    snapshot_hash = hash_snapshot(await take_snapshot(store))
    result = CalibrationResult(report=report, snapshot_hash=snapshot_hash)
    await store.finish_calibration(start.identity, result.model_dump_json())
    return report


class _CalibrationRun:
    """One calibration: its inputs, its held-out steps and anchors, and its collaborators."""

    def __init__(
        self,
        runtime: CalibrationRuntime,
        start: CalibrationStart,
        anchors: Sequence[LabeledStep],
        *,
        is_forced: bool,
    ) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._start = start
        self._split = start.split
        self._steps = list_labeled_steps(start.split.held_out)
        self._anchors = anchors
        self._is_forced = is_forced

    async def run(self) -> CalibrationReport:
        """Measure the critic, make and test pairs in rounds, and measure it again."""
        runtime = self._runtime
        start = self._start
        consumed_before = runtime.ledger.total
        n_held_out_traces = len({step.trace for step in self._steps})
        runtime.on_event(
            CalibrationStarted(
                n_training_traces=len(self._split.training),
                n_held_out_traces=n_held_out_traces,
                n_held_out_steps=len(self._steps),
                n_anchor_steps=len(self._anchors),
                resumed=start.resumed,
            )
        )
        before, anchors_before = await self._measure_critic("before", start.promoted)
        state = RoundState(
            self._split.training, start.known_pair_ids, start.promoted, start.finished_tests, before
        )
        state = await self._run_rounds(state.add_scores(before))
        promoted = (await take_snapshot(runtime.store)).promoted
        after, anchors_after = await self._measure_critic("after", promoted)
        consumed = runtime.ledger.total
        critic = runtime.scorer.critic
        return CalibrationReport(
            critic=critic.identity,
            prompt=critic.prompt,
            n_rounds=state.n_rounds,
            n_training_traces=len(self._split.training),
            n_candidates=len(state.made.pairs) + len(state.made.dropped),
            pairs=count_pairs(state.made.pairs),
            dropped=count_drops(state.made.dropped),
            n_quarantined=state.made.n_quarantined,
            tests=state.tests,
            not_tested_reason=state.not_tested_reason,
            end_reason=state.end_reason,
            held_out=compare_metrics(pair_scores(self._steps, before, after)),
            anchors=compare_metrics(pair_scores(self._anchors, anchors_before, anchors_after)),
            metrics_by_round=state.history,
            power_summary=describe_test_power(
                n_held_out_traces, n_earlier_tests=start.n_earlier_tests
            ),
            usage=consumed.usage - consumed_before.usage,
            n_questions=consumed.n_questions - consumed_before.n_questions,
            n_unanswered=consumed.n_unanswered - consumed_before.n_unanswered,
            n_invalid=consumed.n_invalid - consumed_before.n_invalid,
        )

    async def _measure_critic(
        self, when: Literal["before", "after"], promoted: Sequence[ContrastPair]
    ) -> tuple[tuple[ScoredStep | None, ...], tuple[ScoredStep | None, ...]]:
        """Return the scores of held-out steps and of anchors, and emit their figures."""
        held_out = await self._runtime.scorer.score(self._steps, promoted)
        anchored = await self._runtime.scorer.score(self._anchors, promoted)
        self._runtime.on_event(
            CriticMeasured(
                when=when,
                held_out=summarize_scores(held_out),
                anchors=summarize_scores(anchored),
                usage=self._runtime.usage,
            )
        )
        return held_out, anchored

    async def _run_rounds(self, state: RoundState) -> RoundState:
        """Make rounds until the curriculum ends or nothing is left to learn."""
        max_rounds = self._settings.max_rounds
        while state.may_go_on(max_rounds):
            reason = self._explain_nothing_to_learn(state)
            state = state._replace(end_reason=reason)
            if reason is not None and not (self._is_forced and state.n_rounds == 0):
                break
            state, round_pairs = await self._make_round(state)
            n_tests = len(state.tests)
            state = await self._test_round(state, round_pairs)
            if len(state.tests) == n_tests:
                break
            scored = await self._runtime.scorer.score(self._steps, state.promoted)
            state = state.add_scores(scored)
            if state.may_go_on(max_rounds):
                state = await self._measure_mistakes(state, round_pairs)
        return state

    def _explain_nothing_to_learn(self, state: RoundState) -> str | None:
        errors = [
            (step.trace_id, compute_error(step.label, score))
            for step, score in zip(self._steps, state.scored, strict=True)
        ]
        n_earlier_tests = self._start.n_earlier_tests + len(state.tests)
        return explain_nothing_to_learn(errors, n_earlier_tests=n_earlier_tests)

    async def _make_round(self, state: RoundState) -> tuple[RoundState, tuple[ContrastPair, ...]]:
        """Make and store the pairs of a round, first those of present mistakes."""
        runtime = self._runtime
        plan = plan_round(state.n_rounds + 1, tuple(self._settings.all_mistakes), state.weakness)
        n_traces = len(state.training)
        runtime.on_event(RoundStarted(number=plan.number, n_traces=n_traces, usage=runtime.usage))
        if plan.number == 1:
            training = await score_unscored_steps(runtime, state.training, state.promoted)
            state = state._replace(training=training)
        known = state.known_pair_ids.union(pair.id for pair in state.made.pairs)
        still_wrong = [_build_pair(*one, plan.max_distance) for one in state.measured]
        observed = [pair for pair in still_wrong if pair is not None and pair.id not in known]
        made = await make_pairs(
            runtime,
            state.training,
            plan,
            known_pair_ids=known,
            observed=choose_batch(observed, max_pairs=self._settings.max_pairs),
        )
        all_made = GeneratedPairs.sum_up([state.made, made])
        return state._replace(n_rounds=plan.number, made=all_made), made.pairs

    async def _test_round(
        self, state: RoundState, round_pairs: Sequence[ContrastPair]
    ) -> RoundState:
        """Test all waiting pairs of training traces, unless that was done before a stop."""
        runtime = self._runtime
        state, evidence = state.pop_finished_test([pair.id for pair in round_pairs])
        if evidence is not None:
            promoted = state.promoted
            ids = {pair.id for pair in promoted}.union(evidence.pair_ids)
            with_batch = await load_pairs(runtime.store, ids)
            # Both sides are scored as the test did, so that the stored replies count as then.
            await runtime.scorer.score(self._steps, promoted)
            await runtime.scorer.score(self._steps, with_batch)
            emit_tested(runtime, evidence)
            return state.add_test(evidence, with_batch if evidence.passed_test else promoted)
        snapshot = await take_snapshot(runtime.store)
        waiting = snapshot.list_testable_pairs(self._split.held_out)
        batch = choose_batch(waiting, max_pairs=self._settings.max_pairs)
        if not batch:
            return state._replace(not_tested_reason=NO_PAIRS.explanation)
        result = await run_replay_test(
            runtime,
            batch,
            self._steps,
            promoted=snapshot.promoted,
        )
        if isinstance(result, NotTested):
            return state._replace(not_tested_reason=result.explanation)
        return state.add_test(result, (await take_snapshot(runtime.store)).promoted)

    async def _measure_mistakes(
        self, state: RoundState, round_pairs: Sequence[ContrastPair]
    ) -> RoundState:
        """Score steps of a round's pairs: what is still wrong there, and by kind of mistake."""
        sample = list_pair_steps(round_pairs)[:MAX_MEASURED_STEPS]
        scored = await self._runtime.scorer.score(sample, state.promoted)
        measured = tuple(zip(sample, scored, strict=True))
        return state._replace(measured=measured, weakness=measure_weakness(scored))


def _build_pair(
    step: LabeledStep, score: ScoredStep | None, max_distance: float
) -> ContrastPair | None:
    """Return the pair of the critic's present mistake on a step of pairs, if it makes one."""
    if score is None:
        return None
    event = ScoreEvent(
        step=step.number,
        transition=step.transition,
        evaluation=score.evaluation,
        label=step.label,
    )
    right = step.pairs[0].right
    return build_observed_pair(
        StepToContrast(event, right, step.purpose, step.trace_id, max_distance)
    )


async def recheck(
    runtime: CalibrationRuntime, heldout: Sequence[Trace]
) -> tuple[PromotionEvidence, ...]:
    """Measure each promoted batch again, the oldest first, and demote batches that do harm."""
    snapshot = await take_snapshot(runtime.store)
    learned = snapshot.learned.trace_ids
    steps = list_labeled_steps(trace for trace in heldout if trace.id not in learned)
    results = []
    for batch in group_by_test(snapshot.promoted, snapshot.tests):
        promoted = (await take_snapshot(runtime.store)).promoted
        result = await run_replay_test(runtime, batch, steps, promoted=promoted, use="demote")
        if isinstance(result, PromotionEvidence):
            results.append(result)
    return tuple(results)


def estimate_cost(
    runtime: CalibrationRuntime,
    start: CalibrationStart,
    anchors: Sequence[ContrastPair],
    *,
    max_reasks: int,
) -> CalibrationCostEstimate:
    """Return the least and the largest number of calls of a calibration; stored replies count too.

    The least measures the critic once. The largest lets every round take place, finds no score in
    the cache, and sends every reply back as often as allowed.
    """
    settings = runtime.settings
    steps = list_labeled_steps(start.split.held_out)
    n_traces = len({step.trace for step in steps})
    n_anchors = len(list_pair_steps(anchors))
    anchored = AnchorExclusions.from_anchors(anchors)
    unscored = list_unscored_steps(start.split.training, anchored, max_pairs=settings.max_pairs)
    n_scores = n_anchors * 2 + len(unscored) + MAX_MEASURED_STEPS * (settings.max_rounds - 1)
    # Held-out steps are scored before and after, on both sides of each test, and after it.
    n_scores += len(steps) * (2 + 3 * settings.max_rounds)
    n_samples = runtime.scorer.critic.settings.n_samples
    n_asked = 3 * settings.max_asked * settings.max_rounds  # the mistake, and two comparisons
    return CalibrationCostEstimate(
        n_training_traces=len(start.split.training),
        n_held_out_traces=n_traces,
        n_held_out_steps=len(steps),
        n_anchor_steps=n_anchors,
        min_calls=(len(steps) + n_anchors) * n_samples,
        max_calls=(n_scores * n_samples + n_asked) * (1 + max_reasks),
        power_summary=describe_test_power(n_traces, n_earlier_tests=start.n_earlier_tests),
        missing_reason=None if start.missing is None else start.missing.explanation,
        n_earlier_tests=start.n_earlier_tests,
        resumed=start.resumed,
        is_finished=start.report is not None,
    )
