"""The loop of a calibration: measure, make pairs, store and test them, and measure again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from reflact.calibration.asked import DroppedCandidate
from reflact.calibration.curriculum import (
    MAX_MEASURED_STEPS,
    RoundMeasurement,
    RoundPlan,
    measure,
    plan_next_round,
)
from reflact.calibration.events import (
    BatchTestPostponed,
    CalibrationStarted,
    CriticMeasured,
    PairBatchTested,
    RoundStarted,
    summarize_scores,
)
from reflact.calibration.generation import CalibrationRuntime, PairGenerator, list_unscored_steps
from reflact.calibration.labeled_steps import (
    LabeledStep,
    list_labeled_steps,
    list_pair_steps,
    list_steps_to_contrast,
)
from reflact.calibration.metrics import CriticMetrics, ScoredStep, compute_metrics
from reflact.calibration.pairs import build_observed_pair, choose_batch
from reflact.calibration.promotion import (
    PromotionTester,
    compare_metrics,
    group_by_test,
    pair_scores,
    take_snapshot,
)
from reflact.calibration.report import CalibrationReport, count_drops, count_pairs
from reflact.calibration.significance import (
    NotTested,
    NotTestedReason,
    ReplayTestUse,
    compute_error,
    describe_test_power,
    explain_nothing_to_learn,
)
from reflact.calibration.splits import CALLER_HOLDOUT_NAME, HoldoutSplit
from reflact.calibration.start import (
    CalibrationInputs,
    CalibrationResult,
    CalibrationStart,
    hash_snapshot,
    load_pairs,
    open_calibration,
)
from reflact.calibration.trace import Trace
from reflact.memory.cards import AnchorExclusions
from reflact.memory.models import BatchTest, ContrastPair, PromotionEvidence


class RoundState(NamedTuple):
    """What a calibration knows between two rounds.

    ``scored`` are the held-out steps as the critic scores them now; ``measured`` those of the last
    round's pairs. The rest is what it made so far.
    """

    training: tuple[Trace, ...]
    known_pair_ids: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    finished_tests: tuple[BatchTest, ...]
    scored: tuple[ScoredStep | None, ...]
    history: tuple[RoundMeasurement, ...] = ()
    measured: tuple[tuple[LabeledStep, ScoredStep | None], ...] = ()
    n_rounds: int = 0
    pairs: tuple[ContrastPair, ...] = ()
    dropped: tuple[DroppedCandidate, ...] = ()
    n_quarantined: int = 0
    n_left_out: int = 0
    tests: tuple[PromotionEvidence, ...] = ()
    not_tested: NotTested | None = None
    end_reason: str | None = None
    metrics: tuple[CriticMetrics, ...] = ()

    def pop_finished_test(
        self, round_pair_ids: Collection[str]
    ) -> tuple[RoundState, BatchTest | None]:
        """Return the test of a round that had ended before a stop, and what is left."""
        tests = self.finished_tests
        if tests and (not round_pair_ids or not set(round_pair_ids).isdisjoint(tests[0].pair_ids)):
            return self._replace(finished_tests=tests[1:]), tests[0]
        return self._replace(finished_tests=()), None


class CalibrationLoop:
    """Measures the critic, has pairs made, and tests them."""

    def __init__(self, runtime: CalibrationRuntime) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._settings = runtime.settings
        self._critic = runtime.scorer.critic
        self._scorer = runtime.scorer
        self._tester = PromotionTester(runtime.scorer, runtime.store)
        self.generator = PairGenerator(runtime)

    # -------------------------------------------------------------------------------- a calibration

    async def open(
        self,
        traces: Sequence[Trace],
        heldout: Sequence[Trace] | None,
        anchors: Sequence[ContrastPair],
    ) -> CalibrationStart:
        """Return a calibration before its first call; see ``start.open_calibration``."""
        inputs = CalibrationInputs(
            traces,
            heldout,
            anchors,
            self._critic.identity,
            self._runtime.llm.identity,
            self._settings,
            self._runtime.prompts,
        )
        return await open_calibration(inputs, self._store)

    async def run(
        self,
        start: CalibrationStart,
        anchors: Sequence[ContrastPair],
        *,
        ignore_finished: bool = False,
    ) -> CalibrationReport:
        """Calibrate; a finished calibration only if ``ignore_finished``."""
        if start.report is not None and not ignore_finished:
            return start.report.model_copy(update={"is_earlier_result": True})
        number = start.number
        if number is None:
            baseline = start.baseline.model_dump_json()
            number = (await self._store.start_calibration(start.identity, baseline)).number
        report = await self._run(start, list_pair_steps(anchors), is_forced=ignore_finished)
        snapshot_hash = hash_snapshot(await take_snapshot(self._store))
        result = CalibrationResult(report=report, snapshot_hash=snapshot_hash)
        await self._store.finish_calibration(number, result.model_dump_json())
        return report

    async def _run(
        self, start: CalibrationStart, anchors: Sequence[LabeledStep], *, is_forced: bool
    ) -> CalibrationReport:
        consumed_before = self._runtime.usage_ledger.total
        split = start.split
        steps = list_labeled_steps(split.held_out)
        held_out_traces = {step.trace for step in steps}
        self._runtime.on_event(
            CalibrationStarted(
                n_training_traces=len(split.training),
                n_held_out_traces=len(held_out_traces),
                n_held_out_steps=len(steps),
                n_anchor_steps=len(anchors),
                resumed=start.number is not None,
            )
        )
        before, anchors_before = await self._measure_critic(
            "before", steps, anchors, start.promoted
        )
        state = RoundState(
            split.training, start.known_pair_ids, start.promoted, start.finished_tests, before
        )
        state = await self._run_rounds(state, start, steps, is_forced=is_forced)
        promoted = (await take_snapshot(self._store)).promoted
        after, anchors_after = await self._measure_critic("after", steps, anchors, promoted)
        consumed = self._runtime.usage_ledger.total - consumed_before
        return CalibrationReport(
            critic=self._critic.identity,
            prompt=self._critic.prompt,
            n_rounds=state.n_rounds,
            n_training_traces=len(split.training),
            held_out_name=split.held_out_name,
            n_candidates=len(state.pairs) + len(state.dropped),
            pairs=count_pairs(state.pairs),
            dropped=count_drops(state.dropped),
            n_quarantined=state.n_quarantined,
            n_left_out=state.n_left_out,
            tests=state.tests,
            not_tested_reason=None if state.not_tested is None else state.not_tested.explanation,
            end_reason=state.end_reason,
            held_out=compare_metrics(pair_scores(steps, before, after)),
            anchors=compare_metrics(pair_scores(anchors, anchors_before, anchors_after)),
            metrics_by_round=state.metrics,
            power_summary=describe_test_power(
                len(held_out_traces), n_earlier_tests=start.n_earlier_tests
            ),
            usage=consumed.usage,
            n_questions=consumed.n_questions,
            n_unanswered=consumed.n_unanswered,
            n_invalid=consumed.n_invalid,
        )

    async def _measure_critic(
        self,
        when: Literal["before", "after"],
        steps: Sequence[LabeledStep],
        anchors: Sequence[LabeledStep],
        promoted: Sequence[ContrastPair],
    ) -> tuple[tuple[ScoredStep | None, ...], tuple[ScoredStep | None, ...]]:
        """Return the scores of held-out steps and of anchors, and emit their figures."""
        held_out = await self._scorer.score(steps, promoted)
        anchored = await self._scorer.score(anchors, promoted)
        self._runtime.on_event(
            CriticMeasured(
                when=when,
                held_out=summarize_scores(held_out),
                anchors=summarize_scores(anchored),
                usage=self._runtime.usage_ledger.usage,
            )
        )
        return held_out, anchored

    async def _run_rounds(
        self,
        state: RoundState,
        start: CalibrationStart,
        steps: Sequence[LabeledStep],
        *,
        is_forced: bool,
    ) -> RoundState:
        """Make rounds until the curriculum ends or nothing is left to learn."""
        state = self._add_measurement(state, measure(state.scored))
        while (plan := self._plan_round(state.history)) is not None:
            reason = self._explain_nothing_to_learn(state, start, steps)
            state = state._replace(end_reason=reason)
            if reason is not None and not (is_forced and plan.number == 1):
                break
            state, round_pairs = await self._make_round(state, plan)
            n_tests = len(state.tests)
            state = await self._test_round(state, start.split, steps, round_pairs)
            if len(state.tests) == n_tests or not state.history:
                break
            scored = await self._scorer.score(steps, state.promoted)
            state = await self._measure_round(state._replace(scored=scored), round_pairs)
        return state

    def _plan_round(self, history: Sequence[RoundMeasurement]) -> RoundPlan | None:
        mistakes = tuple(self._settings.all_mistakes)
        return plan_next_round(history, mistakes, max_rounds=self._settings.max_rounds)

    def _explain_nothing_to_learn(
        self, state: RoundState, start: CalibrationStart, steps: Sequence[LabeledStep]
    ) -> str | None:
        errors = [
            (step.trace_id, compute_error(step.label, score))
            for step, score in zip(steps, state.scored, strict=True)
        ]
        return explain_nothing_to_learn(
            errors, n_earlier_tests=start.n_earlier_tests + len(state.tests)
        )

    async def _make_round(
        self, state: RoundState, plan: RoundPlan
    ) -> tuple[RoundState, tuple[ContrastPair, ...]]:
        """Make and store the pairs of a round, first those of present mistakes."""
        self._runtime.on_event(
            RoundStarted(
                number=plan.number,
                n_traces=len(state.training),
                usage=self._runtime.usage_ledger.usage,
            )
        )
        if plan.number == 1:
            training = await self.generator.score_unscored_steps(state.training, state.promoted)
            state = state._replace(training=training)
        still_wrong = [
            build_observed_pair(step) for step in list_steps_to_contrast(state.measured, plan.band)
        ]
        known = state.known_pair_ids.union(pair.id for pair in state.pairs)
        observed = [pair for pair in still_wrong if pair is not None and pair.id not in known]
        generated = await self.generator.make_pairs(
            state.training,
            plan,
            known_pair_ids=known,
            observed=choose_batch(observed, max_pairs=self._settings.max_pairs),
        )
        state = state._replace(
            n_rounds=plan.number,
            pairs=(*state.pairs, *generated.pairs),
            dropped=(*state.dropped, *generated.dropped),
            n_quarantined=state.n_quarantined + generated.n_quarantined,
            n_left_out=state.n_left_out + generated.n_left_out,
        )
        return state, generated.pairs

    async def _test_round(
        self,
        state: RoundState,
        split: HoldoutSplit,
        steps: Sequence[LabeledStep],
        round_pairs: Sequence[ContrastPair],
    ) -> RoundState:
        """Test all waiting pairs of training traces, unless that was done before a stop."""
        state, finished = state.pop_finished_test([pair.id for pair in round_pairs])
        if finished is not None and finished.evidence is not None:
            return await self._replay_finished_test(state, steps, finished.evidence)
        snapshot = await take_snapshot(self._store)
        waiting = snapshot.list_testable_pairs(split.held_out)
        batch = choose_batch(waiting, max_pairs=self._settings.max_pairs)
        if not batch:
            reason: NotTestedReason = "memory_full" if state.n_left_out else "no_pairs"
            return state._replace(not_tested=NotTested(reason=reason))
        result = await self.test_batch(
            batch, steps, promoted=snapshot.promoted, name=split.held_out_name
        )
        if isinstance(result, NotTested):
            return state._replace(not_tested=result)
        return state._replace(
            tests=(*state.tests, result),
            known_pair_ids=state.known_pair_ids.union(result.pair_ids),
            promoted=(await take_snapshot(self._store)).promoted,
        )

    async def _replay_finished_test(
        self, state: RoundState, steps: Sequence[LabeledStep], evidence: PromotionEvidence
    ) -> RoundState:
        """Score both sides of a finished test as it did, and take its result."""
        promoted_ids = {pair.id for pair in state.promoted}
        with_batch = await load_pairs(self._store, promoted_ids.union(evidence.pair_ids))
        await self._scorer.score(steps, state.promoted)
        await self._scorer.score(steps, with_batch)
        self.emit_tested(evidence, len(evidence.pair_ids))
        return state._replace(
            tests=(*state.tests, evidence),
            known_pair_ids=state.known_pair_ids.union(evidence.pair_ids),
            promoted=with_batch if evidence.passed_test else state.promoted,
        )

    async def _measure_round(
        self, state: RoundState, round_pairs: Sequence[ContrastPair]
    ) -> RoundState:
        """Add how the critic does now; by kind of mistake only if another round may follow."""
        measurement = measure(state.scored)
        if measurement is not None and self._plan_round((*state.history, measurement)) is not None:
            sample = list_pair_steps(round_pairs)[:MAX_MEASURED_STEPS]
            scored = await self._scorer.score(sample, state.promoted)
            state = state._replace(measured=tuple(zip(sample, scored, strict=True)))
            measurement = measure(state.scored, scored)
        return self._add_measurement(state, measurement)

    def _add_measurement(
        self, state: RoundState, measurement: RoundMeasurement | None
    ) -> RoundState:
        metrics = compute_metrics([score for score in state.scored if score is not None])
        return state._replace(
            metrics=state.metrics if metrics is None else (*state.metrics, metrics),
            history=state.history if measurement is None else (*state.history, measurement),
        )

    # ---------------------------------------------------------------------------------------- tests

    async def test_batch(
        self,
        batch: Sequence[ContrastPair],
        steps: Sequence[LabeledStep],
        *,
        promoted: Sequence[ContrastPair],
        name: str,
        use: ReplayTestUse = "promote",
    ) -> PromotionEvidence | NotTested:
        """Test a batch beside the promoted pairs, and emit the result."""
        result = await self._tester.test(batch, steps, promoted=promoted, name=name, use=use)
        self.emit_tested(result, len(batch), use)
        return result

    async def recheck(self, heldout: Sequence[Trace]) -> tuple[PromotionEvidence, ...]:
        """Measure each promoted batch again, the oldest first, and demote batches that do harm."""
        snapshot = await take_snapshot(self._store)
        steps = list_labeled_steps(
            trace for trace in heldout if trace.id not in snapshot.learned.trace_ids
        )
        results = []
        for batch in group_by_test(snapshot.promoted, snapshot.tests):
            promoted = (await take_snapshot(self._store)).promoted
            result = await self.test_batch(
                batch, steps, promoted=promoted, name=CALLER_HOLDOUT_NAME, use="demote"
            )
            if isinstance(result, PromotionEvidence):
                results.append(result)
        return tuple(results)

    def emit_tested(
        self, result: PromotionEvidence | NotTested, n_pairs: int, use: ReplayTestUse = "promote"
    ) -> None:
        """Emit how the test of so many pairs ended, or why there was none."""
        usage = self._runtime.usage_ledger.usage
        if isinstance(result, PromotionEvidence):
            self._runtime.on_event(PairBatchTested(use=use, evidence=result, usage=usage))
            return
        self._runtime.on_event(
            BatchTestPostponed(
                n_pairs=n_pairs,
                n_traces=result.n_traces,
                explanation=result.explanation,
                usage=usage,
            )
        )

    # ------------------------------------------------------------------------------------- estimate

    def count_calls(
        self, start: CalibrationStart, anchors: Sequence[ContrastPair], *, max_reasks: int
    ) -> tuple[int, int]:
        """Return the least and the largest number of calls of a calibration; stored replies count
        too.

        The least measures the critic once. The largest lets every round take place, finds no score
        in the cache, and sends every reply back as often as allowed.
        """
        settings = self._settings
        n_steps = len(list_labeled_steps(start.split.held_out))
        n_anchors = len(list_pair_steps(anchors))
        anchored = AnchorExclusions.from_anchors(anchors)
        n_unscored = len(
            list_unscored_steps(start.split.training, anchored, max_pairs=settings.max_pairs)
        )
        n_scores = (
            n_steps
            * (2 + 3 * settings.max_rounds)  # before, after; both sides of each test, and after it
            + n_anchors * 2
            + n_unscored
            + MAX_MEASURED_STEPS * (settings.max_rounds - 1)
        )
        n_samples = self._critic.settings.n_samples
        n_asked = 3 * settings.max_asked * settings.max_rounds  # the mistake, and two comparisons
        return (n_steps + n_anchors) * n_samples, (n_scores * n_samples + n_asked) * (
            1 + max_reasks
        )
