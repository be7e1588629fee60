"""Rounds of calibration: pairs are made, stored, tested on held-out traces; what changed is measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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
    RoundTotals,
    StoredGeneration,
    explain_no_batch,
    find_missing,
    hash_snapshot,
    list_free_events,
    load_pairs,
    open_calibration,
)
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.contrast import GenerationTask, PairModels, generate_contrast_pairs
from reflact.calibration.critic import Critic
from reflact.calibration.curriculum import RoundPlan, build_history, plan_next_round
from reflact.calibration.events import (
    CalibrationEventCallback,
    CalibrationStarted,
    CriticMeasured,
    PairsGenerated,
    RoundStarted,
    summarize_scores,
)
from reflact.calibration.metrics import CriticMetrics, ScoredStep
from reflact.calibration.mistakes import DroppedCandidate
from reflact.calibration.promotion import (
    MemorySnapshot,
    PromotionTester,
    compare_metrics,
    group_by_test,
    measure_in_thread,
)
from reflact.calibration.replay import LabeledStep, list_labeled_steps, list_pair_steps, load_recordings
from reflact.calibration.report import CalibrationReport, count_drops, count_pairs
from reflact.calibration.significance import NotEnoughTraces, ReplayTestUse, describe_test_power
from reflact.calibration.splits import CALLER_HOLDOUT_NAME
from reflact.calibration.trace import Trace
from reflact.concurrency import fan_out
from reflact.memory.cards import AnchorExclusions
from reflact.memory.models import ContrastPair, PromotionEvidence, Submission
from reflact.prompts import PromptBook
from reflact.protocols import LLM

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

CREATED_BY = "calibrator"

PairCallback = Callable[[ContrastPair], Awaitable[None]]
"""Is handed each pair once it is in the store."""

TestCallback = Callable[[PromotionEvidence | NotEnoughTraces, int, ReplayTestUse], None]
"""Is told how a test of so many pairs ended, and what it was for."""


class RoundRunner:
    """Makes and tests pairs.

    Args:
        llm: Writes mistakes and compares.
        store: Where everything goes.
        critic: What is calibrated.
        settings: How.
        prompts: The prompts.
        on_test: Gets each test.
        on_event: Gets what else happens.
        usage_ledger: Counts the calls of ``llm`` and ``critic``
    """

    def __init__(
        self,
        llm: LLM,
        store: MemoryStore,
        critic: Critic,
        *,
        settings: CalibratorSettings,
        prompts: PromptBook,
        on_test: TestCallback,
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
        self.on_test = on_test
        self.tester = PromotionTester(critic, store, max_concurrent=settings.concurrency)
        self._semaphore = anyio.Semaphore(settings.concurrency)

    @property
    def first_round_plan(self) -> RoundPlan:
        """What a round asks for about which nothing is known."""
        plan = plan_next_round((), self._settings.curriculum)
        assert plan is not None
        return plan

    def make_writer(self) -> FailFastLLM:
        """Return who writes for one calibration, of whom nothing was heard yet."""
        return FailFastLLM(self._llm, fails_run=False)

    async def generate_pairs(
        self,
        trace: Trace,
        round_plan: RoundPlan,
        *,
        writer: LLM,
        known_pair_ids: frozenset[str],
        other_purposes: Sequence[str] = (),
        shown_pairs: Sequence[ContrastPair] | None = None,
        on_pair: PairCallback | None = None,
    ) -> StoredGeneration:
        """Make a trace's pairs and store each when it is ready; steps that are anchors teach nothing."""
        submissions: list[Submission] = []
        anchored = AnchorExclusions.from_anchors(await self._store.anchors())

        async def report(one: ContrastPair | DroppedCandidate) -> None:
            if isinstance(one, DroppedCandidate):
                return
            await checkpoint()  # the next call goes out before this pair is scanned and written
            submissions.append(await self._store.submit(one, created_by=CREATED_BY))
            if on_pair is not None:
                await on_pair(one)

        result = await generate_contrast_pairs(
            list_free_events(trace, anchored),
            GenerationTask(trace.purpose, trace.id, round_plan, known_pair_ids, other_purposes),
            PairModels(
                writer,
                self._judge,
                LimitedCritic(self.tester.fail_fast_critic, self._semaphore, pairs=shown_pairs),
            ),
            settings=self._settings.contrast,
            prompts=self._prompts,
            on_result=report,
        )
        fresh = sum(
            one.is_new and one.status == "quarantined" and not is_quarantined(one) for one in submissions
        )
        return StoredGeneration(
            **dict(result), n_quarantined=sum(map(is_quarantined, submissions)), n_new=fresh
        )

    def emit_pairs_generated(self, trace: Trace, generation: StoredGeneration) -> None:
        """Tell of a trace's pairs."""
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

    async def test_batch(
        self,
        batch: Sequence[ContrastPair],
        steps: Sequence[LabeledStep],
        *,
        snapshot: MemorySnapshot,
        name: str,
    ) -> PromotionEvidence | NotEnoughTraces:
        """Test a batch beside what is promoted, and tell of it."""
        result = await self.tester.test(batch, steps, promoted=snapshot.promoted, name=name)
        self.on_test(result, len(batch), "promote")
        return result

    async def recheck(self, heldout: Sequence[Trace]) -> tuple[PromotionEvidence, ...]:
        """Measure each promoted batch again, the oldest first, and take back what harms."""
        snapshot = await self.tester.take_snapshot()
        await load_recordings(heldout)
        steps = list_labeled_steps(trace for trace in heldout if trace.id not in snapshot.training_trace_ids)
        evidence: list[PromotionEvidence] = []
        for batch in group_by_test(snapshot.promoted, snapshot.tests):
            current = await self.tester.take_snapshot()
            result = await self.tester.recheck(
                batch, steps, promoted=current.promoted, name=CALLER_HOLDOUT_NAME
            )
            self.on_test(result, len(batch), "demote")
            if isinstance(result, PromotionEvidence):
                evidence.append(result)
        return tuple(evidence)

    async def open_calibration(
        self, traces: Sequence[Trace], heldout: Sequence[Trace] | None, anchors: Sequence[ContrastPair]
    ) -> tuple[CalibrationState, str | None]:
        """Return the course of a calibration, and in a sentence what is missing for a test.

        Nothing is asked and nothing is stored.
        """
        snapshot = await self.tester.take_snapshot()
        critic, llm = self.tester.critic.identity, self._llm.identity
        inputs = CalibrationInputs(traces, heldout, anchors, critic, llm, self._settings, self._prompts)
        identity = await to_thread.run_sync(lambda: inputs.identity)
        await load_recordings([*traces, *(heldout or ())])
        last = await self._store.find_calibration(identity)
        calibration = await open_calibration(inputs, identity, last, snapshot=snapshot, store=self._store)
        return calibration, await to_thread.run_sync(find_missing, calibration, inputs, snapshot)

    async def run(
        self, calibration: CalibrationState, anchors: Sequence[ContrastPair], *, ignore_finished: bool = False
    ) -> CalibrationReport:
        """Calibrate, round by round, and measure before and after.

        Args:
            calibration: The calibration, see ``open_calibration``.
            anchors: Labelled pairs that are measured.
            ignore_finished: Make another one if it is over and nothing has changed since; else its report is
                returned as it is.
        """
        if calibration.report is not None and not ignore_finished:
            return calibration.report.model_copy(update={"is_earlier_result": True})
        number = calibration.number
        if number is None:
            baseline = calibration.baseline.model_dump_json()
            number = (await self._store.start_calibration(calibration.identity, baseline)).number
        report = await self._run(calibration, list_pair_steps(anchors))
        result = CalibrationResult(
            report=report, snapshot_hash=hash_snapshot(await self.tester.take_snapshot())
        )
        await self._store.finish_calibration(number, result.model_dump_json())
        return report

    async def _run(self, calibration: CalibrationState, anchors: Sequence[LabeledStep]) -> CalibrationReport:
        earlier_usage, split = self._usage_ledger.entries, calibration.split
        steps = list_labeled_steps(split.held_out)
        held_out_traces = {step.trace for step in steps}
        self._on_event(
            CalibrationStarted(
                n_training_traces=len(split.training),
                n_held_out_traces=len(held_out_traces),
                n_held_out_steps=len(steps),
                n_anchor_steps=len(anchors),
                resumed=calibration.was_resumed,
            )
        )
        before = await self.tester.score(steps, calibration.promoted)
        anchors_before = await self.tester.score(anchors, calibration.promoted)
        self._emit_critic_measured("before", before, anchors_before)
        writer = self.make_writer()
        tally = await self._run_rounds(calibration, steps, before, writer)
        promoted = (await self.tester.take_snapshot()).promoted
        after = await self.tester.score(steps, promoted)
        anchors_after = await self.tester.score(anchors, promoted)
        self._emit_critic_measured("after", after, anchors_after)
        consumed = self._usage_ledger.entries_since(earlier_usage)
        return CalibrationReport(
            critic=self.tester.critic.identity,
            prompt=self.tester.critic.prompt,
            n_rounds=tally.n_rounds,
            n_training_traces=len(split.training),
            held_out_name=split.held_out_name,
            n_candidates=len(tally.pairs) + len(tally.dropped),
            pairs=count_pairs(tally.pairs),
            dropped=count_drops(tally.dropped),
            n_quarantined=tally.n_quarantined,
            n_archived=tally.n_archived,
            n_left_out=tally.n_left_out,
            tests=tuple(tally.tests),
            not_tested_reason=tally.not_tested_reason,
            writer_stop_reason=writer.stop_reason,
            held_out=await compare_metrics(before, after),
            anchors=await compare_metrics(anchors_before, anchors_after),
            metrics_by_round=tuple(tally.measurements_by_round),
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
        self._on_event(
            CriticMeasured(
                when=when,
                held_out=summarize_scores(held_out),
                anchors=summarize_scores(anchors),
                usage=self._usage_ledger.usage,
            )
        )

    async def _run_rounds(
        self,
        calibration: CalibrationState,
        steps: Sequence[LabeledStep],
        before: Sequence[ScoredStep | None],
        writer: FailFastLLM,
    ) -> RoundTotals:
        tally, history = (
            RoundTotals(measurements_by_round=await measure_scores(before)),
            build_history(before, ()),
        )
        while (plan := plan_next_round(history, self._settings.curriculum)) is not None:
            tally.n_rounds = plan.number
            learn = len(calibration.split.training)
            self._on_event(RoundStarted(number=plan.number, n_traces=learn, usage=self._usage_ledger.usage))
            pairs = await self._run_round(calibration, plan, tally, writer)
            if not await self._test_waiting_pairs(calibration, steps, pairs, tally) or not history:
                break
            after = await self.tester.score(steps, calibration.promoted)
            tally.measurements_by_round += await measure_scores(after)
            if plan_next_round([*history, *build_history(after, ())], self._settings.curriculum) is None:
                break  # nothing would come of knowing which kinds the critic is weak on
            invited = await self.tester.score(list_pair_steps(pairs), calibration.promoted)
            history += build_history(after, invited)
        return tally

    async def _run_round(
        self,
        calibration: CalibrationState,
        round_plan: RoundPlan,
        totals: RoundTotals,
        writer: FailFastLLM,
    ) -> list[ContrastPair]:
        """Make the pairs of a round from all traces, several at a time.

        As long as nothing valid was heard of the writer, the others wait for the first of them.
        """
        learn, shown = calibration.split.training, calibration.promoted
        ids = calibration.known_pair_ids.union(pair.id for pair in totals.pairs)
        purposes = sorted({trace.purpose for trace in learn})

        async def one(trace: Trace) -> StoredGeneration:
            made = StoredGeneration(is_memory_full=True)
            if await self._store.remaining_capacity():
                made = await self.generate_pairs(
                    trace,
                    round_plan,
                    writer=writer,
                    known_pair_ids=ids,
                    other_purposes=purposes,
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
        totals.pairs += pairs
        totals.dropped += [drop for one in made for drop in one.dropped]
        totals.n_quarantined += sum(one.n_quarantined for one in made)
        totals.n_archived += await count_archived(self._store, pairs)
        totals.n_left_out += sum(one.is_memory_full for one in made)
        return pairs

    async def _test_waiting_pairs(
        self,
        calibration: CalibrationState,
        steps: Sequence[LabeledStep],
        pairs: Sequence[ContrastPair],
        totals: RoundTotals,
    ) -> bool:
        """Test all pairs that wait and do not come from the held-out traces; say whether there was a test.

        A test that had ended when the calibration was stopped is taken as it ended.
        """
        ended = calibration.pop_finished_test([pair.id for pair in pairs])
        if ended is not None and ended.evidence is not None:
            totals.tests.append(
                await self._replay_finished_test(calibration, steps, ended.unit_ids, ended.evidence)
            )
            return True
        snapshot = await self.tester.take_snapshot()
        batch = snapshot.list_testable_pairs(calibration.split.held_out)
        if not batch:
            totals.not_tested_reason = totals.not_tested_reason or explain_no_batch(calibration.split, totals)
            return False
        result = await self.test_batch(batch, steps, snapshot=snapshot, name=calibration.split.held_out_name)
        if isinstance(result, NotEnoughTraces):
            totals.not_tested_reason = result.explanation
            return False
        totals.tests.append(result)
        calibration.known_pair_ids = calibration.known_pair_ids.union(result.pair_ids)
        calibration.promoted = (await self.tester.take_snapshot()).promoted
        return True

    async def _replay_finished_test(
        self,
        calibration: CalibrationState,
        steps: Sequence[LabeledStep],
        pair_ids: Sequence[str],
        evidence: PromotionEvidence,
    ) -> PromotionEvidence:
        """Score the sides of a test that is over, as it did, and go on from what it decided."""
        with_ = await load_pairs(self._store, {*pair_ids, *(pair.id for pair in calibration.promoted)})
        await self.tester.score(steps, calibration.promoted)
        await self.tester.score(steps, with_)
        self.on_test(evidence, len(pair_ids), "promote")
        calibration.known_pair_ids = calibration.known_pair_ids.union(pair_ids)
        if evidence.passed_test:
            calibration.promoted = with_
        return evidence


async def measure_scores(scored: Sequence[ScoredStep | None]) -> list[CriticMetrics]:
    """Return what scores measure, as a list; empty if nothing was scored."""
    metrics = await measure_in_thread([one for one in scored if one is not None])
    return [] if metrics is None else [metrics]


def is_quarantined(submission: Submission) -> bool:
    """Whether a pair is in no test until somebody has looked at it, or ever."""
    return submission.status == "rejected" or (
        submission.status == "quarantined" and submission.reason is not None
    )


async def count_archived(store: MemoryStore, pairs: Sequence[ContrastPair]) -> int:
    """Return how many of the pairs the memory's bound has archived."""
    stored = await store.pairs([pair.id for pair in pairs])
    return sum(one.status == "archived" and one.reason == "bound" for one in stored)
