"""Rounds of calibration: they make pairs, store them, and test them on held-out traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from reflact.calibration.call_policies import (
    FAIL_FAST_CALLS,
    FailFastLLM,
    LimitedCritic,
    UsageLedger,
    sum_usage,
)
from reflact.calibration.checkpoint import (
    CalibrationInputs,
    CalibrationResult,
    CalibrationState,
    StoredGeneration,
    explain_no_batch,
    find_missing,
    hash_snapshot,
    list_free_events,
    list_unscored_steps,
    load_pairs,
    open_calibration,
    refuse_other_traces,
)
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.contrast import PairModels, generate_planned_pairs
from reflact.calibration.critic import Critic
from reflact.calibration.curriculum import MAX_MEASURED_STEPS, RoundPlan, build_history, plan_next_round
from reflact.calibration.events import (
    BatchTestPostponed,
    CalibrationEventCallback,
    CalibrationStarted,
    CriticMeasured,
    PairBatchTested,
    PairsGenerated,
    RoundStarted,
    summarize_scores,
)
from reflact.calibration.labeled_steps import (
    LabeledStep,
    list_labeled_steps,
    list_pair_steps,
    list_steps_to_contrast,
    load_recordings,
)
from reflact.calibration.metrics import ScoredStep
from reflact.calibration.mistakes import DroppedCandidate
from reflact.calibration.perturbations import DistanceBand, build_observed_pair
from reflact.calibration.planning import (
    GenerationTask,
    TracePlan,
    choose_batch,
    draw_candidates,
    plan_jobs,
    plan_labeled_jobs,
)
from reflact.calibration.promotion import (
    PromotionTester,
    compare_metrics,
    group_by_test,
    measure_in_thread,
)
from reflact.calibration.report import CalibrationReport, count_drops, count_pairs
from reflact.calibration.significance import (
    NotEnoughTraces,
    ReplayTestUse,
    UnscoredStep,
    bound_unscored_error,
    describe_test_power,
    explain_nothing_to_learn,
)
from reflact.calibration.splits import CALLER_HOLDOUT_NAME
from reflact.calibration.trace import Trace
from reflact.concurrency import fan_out
from reflact.memory.cards import AnchorExclusions
from reflact.memory.models import ContrastPair, Evaluation, PromotionEvidence, Submission
from reflact.prompts import PromptBook
from reflact.protocols import LLM

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

CREATED_BY = "calibrator"

PairCallback = Callable[[ContrastPair], Awaitable[None]]
"""Gets each pair once it is in the store."""


class RoundRunner:
    """Makes and tests pairs."""

    def __init__(
        self,
        llm: LLM,
        store: MemoryStore,
        critic: Critic,
        *,
        settings: CalibratorSettings,
        prompts: PromptBook,
        on_event: CalibrationEventCallback,
        usage_ledger: UsageLedger,
    ) -> None:
        self._llm = llm
        self._judge = FailFastLLM(llm, fails_run=True)
        self._store = store
        self._settings = settings
        self._prompts = prompts
        self._on_event = on_event
        self._usage_ledger = usage_ledger
        self.tester = PromotionTester(critic, store, max_concurrent=settings.concurrency)
        self._semaphore = anyio.Semaphore(settings.concurrency)

    def make_writer(self) -> FailFastLLM:
        """Return the writer of mistakes for one calibration."""
        return FailFastLLM(self._llm, fails_run=False)

    async def generate_pairs(
        self,
        trace: Trace,
        *,
        writer: LLM,
        known_pair_ids: frozenset[str],
        on_pair: PairCallback | None = None,
    ) -> StoredGeneration:
        """Make a trace's pairs by the plan of a first round, and store each when it is ready."""
        round_plan = plan_next_round((), self._settings.curriculum)
        assert round_plan is not None
        task = GenerationTask(trace.purpose, trace.id, round_plan, known_pair_ids)
        (trace,) = await self._score_unscored_steps([trace], None)
        anchored = AnchorExclusions.from_anchors(await self._store.anchors())
        plan = await plan_jobs(list_free_events(trace, anchored), task, self._settings.contrast)
        return await self._generate_planned(plan, task, writer=writer, on_pair=on_pair)

    async def _score_unscored_steps(
        self, traces: Sequence[Trace], pairs: Sequence[ContrastPair] | None
    ) -> tuple[Trace, ...]:
        """Return traces with the critic's evaluation of labelled steps that have none: its real mistakes teach most."""
        anchored = AnchorExclusions.from_anchors(await self._store.anchors())
        steps = list_unscored_steps(traces, anchored, self._settings.contrast)
        evaluations: dict[str, dict[int, Evaluation]] = defaultdict(dict)
        for step, score in zip(steps, await self.tester.score(steps, pairs), strict=True):
            if score is not None:
                evaluations[step.trace_id][step.number] = score.evaluation
        return tuple(
            trace.add_evaluations(evaluations[trace.id]) if trace.id in evaluations else trace
            for trace in traces
        )

    async def _generate_planned(
        self,
        plan: TracePlan,
        task: GenerationTask,
        *,
        writer: LLM,
        observed: Sequence[ContrastPair] = (),
        shown_pairs: Sequence[ContrastPair] | None = None,
        on_pair: PairCallback | None = None,
    ) -> StoredGeneration:
        if not await self._store.remaining_capacity():
            return StoredGeneration(is_memory_full=True)
        submissions: list[Submission] = []

        async def report(one: ContrastPair | DroppedCandidate) -> None:
            if isinstance(one, DroppedCandidate):
                return
            await checkpoint()  # the next call goes out before this pair is scanned and written
            submissions.append(await self._store.submit(one, created_by=CREATED_BY))
            if on_pair is not None:
                await on_pair(one)

        for pair in observed:
            await report(pair)
        result = await generate_planned_pairs(
            plan,
            task,
            PairModels(
                writer,
                self._judge,
                LimitedCritic(self.tester.fail_fast_critic, self._semaphore, pairs=shown_pairs),
            ),
            settings=self._settings.contrast,
            prompts=self._prompts,
            on_result=report,
        )
        n_new = sum(one.is_new and one.status == "quarantined" and one.reason is None for one in submissions)
        n_quarantined = sum(
            one.status == "rejected" or (one.status == "quarantined" and one.reason is not None)
            for one in submissions
        )
        result = result.model_copy(update={"pairs": (*observed, *result.pairs)})
        return StoredGeneration(**dict(result), n_quarantined=n_quarantined, n_new=n_new)

    def emit_pairs_generated(self, trace: Trace, generation: StoredGeneration) -> None:
        """Emit the event of a trace's pairs."""
        self._on_event(
            PairsGenerated(
                trace_id=trace.id,
                n_candidates=generation.n_candidates,
                n_pairs=len(generation.pairs),
                n_quarantined=generation.n_quarantined,
                is_memory_full=generation.is_memory_full,
                dropped=count_drops(generation.dropped),
                usage=self._usage_ledger.usage,
            )
        )

    def emit_tested(
        self, result: PromotionEvidence | NotEnoughTraces, n_pairs: int, use: ReplayTestUse = "promote"
    ) -> None:
        """Emit how the test of so many pairs ended, or why there was none."""
        usage = self._usage_ledger.usage
        if isinstance(result, PromotionEvidence):
            self._on_event(PairBatchTested(use=use, evidence=result, usage=usage))
            return
        self._on_event(
            BatchTestPostponed(
                n_pairs=n_pairs,
                n_traces=result.n_traces,
                explanation=result.explanation,
                usage=usage,
            )
        )

    async def test_batch(
        self,
        batch: Sequence[ContrastPair],
        steps: Sequence[LabeledStep],
        *,
        promoted: Sequence[ContrastPair],
        name: str,
        use: ReplayTestUse = "promote",
    ) -> PromotionEvidence | NotEnoughTraces:
        """Test a batch beside the promoted pairs, and emit the result."""
        result = await self.tester.test(batch, steps, promoted=promoted, name=name, use=use)
        self.emit_tested(result, len(batch), use)
        return result

    async def recheck(self, heldout: Sequence[Trace]) -> tuple[PromotionEvidence, ...]:
        """Measure each promoted batch again, the oldest first, and demote batches that do harm."""
        snapshot = await self.tester.take_snapshot()
        await load_recordings(heldout)
        steps = list_labeled_steps(trace for trace in heldout if trace.id not in snapshot.learned.trace_ids)
        results = []
        for batch in group_by_test(snapshot.promoted, snapshot.tests):
            promoted = (await self.tester.take_snapshot()).promoted
            results.append(
                await self.test_batch(batch, steps, promoted=promoted, name=CALLER_HOLDOUT_NAME, use="demote")
            )
        return tuple(one for one in results if isinstance(one, PromotionEvidence))

    async def open_calibration(
        self, traces: Sequence[Trace], heldout: Sequence[Trace] | None, anchors: Sequence[ContrastPair]
    ) -> tuple[CalibrationState, str | None]:
        """Return the state of a calibration, and what is missing for a test; nothing is asked or stored.

        Raises:
            DataError: Two traces have one id, here or in the store.
        """
        snapshot = await self.tester.take_snapshot()
        critic, llm = self.tester.critic.identity, self._llm.identity
        inputs = CalibrationInputs(traces, heldout, anchors, critic, llm, self._settings, self._prompts)
        identity = await to_thread.run_sync(lambda: inputs.identity)
        everything = [*traces, *(heldout or ())]
        await load_recordings(everything)
        await refuse_other_traces(everything, snapshot, self._store)
        calibration = await open_calibration(inputs, identity, snapshot=snapshot, store=self._store)
        return calibration, await to_thread.run_sync(find_missing, calibration, inputs, snapshot)

    async def run(
        self, calibration: CalibrationState, anchors: Sequence[ContrastPair], *, ignore_finished: bool = False
    ) -> CalibrationReport:
        """Calibrate, and measure before and after; a finished calibration only if ``ignore_finished``."""
        if calibration.report is not None and not ignore_finished:
            return calibration.report.model_copy(update={"is_earlier_result": True})
        number = calibration.number
        if number is None:
            baseline = calibration.baseline.model_dump_json()
            number = (await self._store.start_calibration(calibration.identity, baseline)).number
        report = await self._run(calibration, list_pair_steps(anchors), ignore_finished=ignore_finished)
        snapshot_hash = hash_snapshot(await self.tester.take_snapshot())
        result = CalibrationResult(report=report, snapshot_hash=snapshot_hash)
        await self._store.finish_calibration(number, result.model_dump_json())
        return report

    async def _run(
        self, calibration: CalibrationState, anchors: Sequence[LabeledStep], *, ignore_finished: bool
    ) -> CalibrationReport:
        earlier_usage, split = self._usage_ledger.entries, calibration.split
        steps = list_labeled_steps(split.held_out)
        held_out_traces = {step.trace for step in steps}
        self._on_event(
            CalibrationStarted(
                n_training_traces=len(split.training),
                n_held_out_traces=len(held_out_traces),
                n_held_out_steps=len(steps),
                n_anchor_steps=len(anchors),
                resumed=calibration.number is not None,
            )
        )
        before = await self.tester.score(steps, calibration.promoted)
        anchors_before = await self.tester.score(anchors, calibration.promoted)
        self._emit_critic_measured("before", before, anchors_before)
        writer = self.make_writer()
        await self._run_rounds(calibration, steps, before, writer, is_forced=ignore_finished)
        promoted = (await self.tester.take_snapshot()).promoted
        after = await self.tester.score(steps, promoted)
        anchors_after = await self.tester.score(anchors, promoted)
        self._emit_critic_measured("after", after, anchors_after)
        consumed = self._usage_ledger.entries_since(earlier_usage)
        return CalibrationReport(
            critic=self.tester.critic.identity,
            prompt=self.tester.critic.prompt,
            n_rounds=calibration.n_rounds,
            n_training_traces=len(split.training),
            held_out_name=split.held_out_name,
            n_candidates=len(calibration.pairs) + len(calibration.dropped),
            pairs=count_pairs(calibration.pairs),
            dropped=count_drops(calibration.dropped),
            n_quarantined=calibration.n_quarantined,
            n_archived=calibration.n_archived,
            n_left_out=calibration.n_left_out,
            tests=tuple(calibration.tests),
            not_tested_reason=calibration.not_tested_reason,
            end_reason=calibration.end_reason,
            writer_stop_reason=writer.stop_reason,
            held_out=await compare_metrics(before, after),
            anchors=await compare_metrics(anchors_before, anchors_after),
            metrics_by_round=tuple(one for one in calibration.metrics_by_round if one is not None),
            power_summary=describe_test_power(
                len(held_out_traces), n_earlier_tests=calibration.n_earlier_tests
            ),
            usage=sum_usage(consumed),
            usage_by_purpose=consumed,
        )

    def _emit_critic_measured(
        self,
        when: Literal["before", "after"],
        held_out: Sequence[ScoredStep | None],
        anchors: Sequence[ScoredStep | None],
    ) -> None:
        scores, usage = (summarize_scores(held_out), summarize_scores(anchors)), self._usage_ledger.usage
        self._on_event(CriticMeasured(when=when, held_out=scores[0], anchors=scores[1], usage=usage))

    async def _run_rounds(
        self,
        calibration: CalibrationState,
        steps: Sequence[LabeledStep],
        before: Sequence[ScoredStep | None],
        writer: FailFastLLM,
        *,
        is_forced: bool,
    ) -> None:
        """Make rounds until the curriculum ends or nothing is left to learn; the first one always if forced."""
        history, curriculum = build_history(before, ()), self._settings.curriculum
        calibration.metrics_by_round = [await measure_in_thread(before)]
        after = before
        while (plan := plan_next_round(history, curriculum)) is not None:
            calibration.end_reason = self._explain_nothing_to_learn(calibration, steps, after)
            if calibration.end_reason is not None and not (is_forced and plan.number == 1):
                break
            calibration.n_rounds = plan.number
            n_traces = len(calibration.split.training)
            self._on_event(
                RoundStarted(number=plan.number, n_traces=n_traces, usage=self._usage_ledger.usage)
            )
            if plan.number == 1:
                learned = await self._score_unscored_steps(calibration.split.training, calibration.promoted)
                calibration.split = calibration.split._replace(training=learned)
            pairs = await self._run_round(calibration, plan, writer)
            if not await self._test_waiting_pairs(calibration, steps, pairs) or not history:
                break
            after = await self.tester.score(steps, calibration.promoted)
            calibration.metrics_by_round.append(await measure_in_thread(after))
            if plan_next_round([*history, *build_history(after, ())], curriculum) is None:
                break  # nothing would come of knowing which kinds the critic is weak on
            sample = list_pair_steps(pairs)[:MAX_MEASURED_STEPS]
            scored = await self.tester.score(sample, calibration.promoted)
            calibration.measured = tuple(zip(sample, scored, strict=True))
            history += build_history(after, scored)

    def _explain_nothing_to_learn(
        self,
        calibration: CalibrationState,
        steps: Sequence[LabeledStep],
        scored: Sequence[ScoredStep | None],
    ) -> str | None:
        return explain_nothing_to_learn(
            [score for score in scored if score is not None],
            unscored=[
                UnscoredStep(step.trace_id, bound_unscored_error(step.label))
                for step, score in zip(steps, scored, strict=True)
                if score is None
            ],
            n_earlier_tests=calibration.n_earlier_tests + len(calibration.tests),
            min_error_drop=self._settings.curriculum.min_error_drop,
        )

    async def _run_round(
        self, calibration: CalibrationState, round_plan: RoundPlan, writer: FailFastLLM
    ) -> list[ContrastPair]:
        """Make the pairs of all traces; the first ones alone until the writer gave a valid reply."""
        learn, shown = calibration.split.training, calibration.promoted
        known_ids = calibration.known_pair_ids.union(pair.id for pair in calibration.pairs)
        observed = self._choose_observed(calibration, round_plan, known_ids)
        known_ids = known_ids.union(pair.id for pair in observed)
        purposes = sorted({trace.purpose for trace in learn})
        tasks = {
            trace.id: GenerationTask(trace.purpose, trace.id, round_plan, known_ids, purposes)
            for trace in learn
        }
        plans = await self._plan_traces(learn, tasks, round_plan, taken=observed)

        async def one(trace: Trace) -> StoredGeneration:
            made = await self._generate_planned(
                plans[trace.id],
                tasks[trace.id],
                observed=[pair for pair in observed if pair.provenance.trace_id == trace.id],
                writer=writer,
                shown_pairs=shown,
            )
            self.emit_pairs_generated(trace, made)
            return made

        made: list[StoredGeneration] = []
        first = 0 if writer.has_replied else FAIL_FAST_CALLS
        for part in (learn[:first], learn[first:]):
            made += await fan_out(one, part, limit=self._settings.concurrency)
            writer.stop_if_silent()
        pairs = [pair for one in made for pair in one.pairs]
        stored = await self._store.pairs([pair.id for pair in pairs])
        calibration.pairs += pairs
        calibration.dropped += [drop for one in made for drop in one.dropped]
        calibration.n_quarantined += sum(one.n_quarantined for one in made)
        calibration.n_archived += sum(one.status == "archived" and one.reason == "bound" for one in stored)
        calibration.n_left_out += sum(one.is_memory_full for one in made)
        return pairs

    def _choose_observed(
        self, calibration: CalibrationState, round_plan: RoundPlan, known_pair_ids: frozenset[str]
    ) -> tuple[ContrastPair, ...]:
        """Return the mistakes that the critic still makes on steps of the last round's pairs, as pairs."""
        band = DistanceBand(round_plan.nearest, round_plan.farthest)
        found = (build_observed_pair(step) for step in list_steps_to_contrast(calibration.measured, band))
        new = [pair for pair in found if pair is not None and pair.id not in known_pair_ids]
        return choose_batch(new, max_pairs=self._settings.contrast.max_pairs)

    async def _plan_traces(
        self,
        traces: Sequence[Trace],
        tasks: Mapping[str, GenerationTask],
        round_plan: RoundPlan,
        *,
        taken: Sequence[ContrastPair],
    ) -> Mapping[str, TracePlan]:
        """Return the candidates of all traces, by their ids, as far as there is room beside the pairs that took some."""
        settings = self._settings.contrast
        anchored = AnchorExclusions.from_anchors(await self._store.anchors())
        plans = {}
        for trace in traces:
            plan = await plan_jobs(list_free_events(trace, anchored), tasks[trace.id], settings)
            if settings.max_pairs is not None:
                plan = await plan_labeled_jobs(plan, tasks[trace.id], settings, can_sample=True)
            plans[trace.id] = plan
        if settings.max_pairs is None:
            return plans
        return draw_candidates(
            plans,
            seed=settings.seed,
            max_pairs=settings.max_pairs,
            max_unproven=settings.max_unproven,
            taken=taken,
            label=f"contrast/room/{round_plan.number}",
        )

    async def _test_waiting_pairs(
        self, calibration: CalibrationState, steps: Sequence[LabeledStep], pairs: Sequence[ContrastPair]
    ) -> bool:
        """Test all waiting pairs that do not come from the held-out traces; return whether there was a test."""
        ended = calibration.pop_finished_test([pair.id for pair in pairs])
        if ended is not None and ended.evidence is not None:
            await self._replay_finished_test(calibration, steps, ended.evidence)
            return True
        snapshot = await self.tester.take_snapshot()
        waiting = snapshot.list_testable_pairs(calibration.split.held_out)
        batch = choose_batch(waiting, max_pairs=self._settings.contrast.max_pairs)
        if not batch:
            calibration.not_tested_reason = calibration.not_tested_reason or explain_no_batch(calibration)
            return False
        result = await self.test_batch(
            batch, steps, promoted=snapshot.promoted, name=calibration.split.held_out_name
        )
        if isinstance(result, NotEnoughTraces):
            calibration.not_tested_reason = result.explanation
            return False
        calibration.tests.append(result)
        calibration.known_pair_ids = calibration.known_pair_ids.union(result.pair_ids)
        calibration.promoted = (await self.tester.take_snapshot()).promoted
        return True

    async def _replay_finished_test(
        self, calibration: CalibrationState, steps: Sequence[LabeledStep], evidence: PromotionEvidence
    ) -> None:
        """Score both sides of a finished test as it did, and take its result."""
        promoted_ids = {pair.id for pair in calibration.promoted}
        with_batch = await load_pairs(self._store, promoted_ids.union(evidence.pair_ids))
        await self.tester.score(steps, calibration.promoted)
        await self.tester.score(steps, with_batch)
        self.emit_tested(evidence, len(evidence.pair_ids))
        calibration.tests.append(evidence)
        calibration.known_pair_ids = calibration.known_pair_ids.union(evidence.pair_ids)
        if evidence.passed_test:
            calibration.promoted = with_batch
