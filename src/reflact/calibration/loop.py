"""The loop of a calibration: measure, then in rounds make pairs, store and test them, then measure again.

Its identity follows from its inputs. When it begins, the pairs that are known and promoted then are stored.
A start with equal inputs repeats everything from there: stored replies of models cost nothing, a test that
was left open is ended, and a test that had ended counts as it ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from anyio import to_thread
from anyio.lowlevel import checkpoint
from pydantic import JsonValue

from reflact.calibration.asked import (
    DroppedCandidate,
    Mistake,
    ProgressRange,
    ask_for_pair,
    compute_reach,
)
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.critic import Critic
from reflact.calibration.curriculum import (
    MAX_MEASURED_STEPS,
    SEED,
    Measurement,
    RoundPlan,
    deal_mistakes,
    measure,
    plan_next_round,
)
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
    StepScorer,
    list_labeled_steps,
    list_pair_steps,
    list_steps_to_contrast,
)
from reflact.calibration.metrics import CriticMetrics, ScoredStep, compute_metrics
from reflact.calibration.pairs import (
    StepToContrast,
    build_observed_pair,
    choose_batch,
    find_reference,
    is_fully_labeled,
    pairs_of,
    select_events,
)
from reflact.calibration.promotion import (
    MemorySnapshot,
    PromotionTester,
    compare_metrics,
    group_by_test,
    take_snapshot,
)
from reflact.calibration.report import CalibrationReport, count_drops, count_pairs
from reflact.calibration.significance import (
    NotTested,
    ReplayTestUse,
    UnscoredStep,
    bound_unscored_error,
    describe_test_power,
    explain_nothing_to_learn,
    find_missing_traces,
)
from reflact.calibration.splits import (
    CALLER_HOLDOUT_NAME,
    HoldoutRule,
    HoldoutSplit,
    deduplicate_traces,
    split_by_caller,
    split_by_rule,
)
from reflact.calibration.trace import Trace
from reflact.calibration.usage import UsageLedger, sum_usage
from reflact.concurrency import fan_out
from reflact.data import shuffle
from reflact.errors import DataError
from reflact.jsonutil import parse_stored
from reflact.memory.cards import AnchorExclusions, count_tests, describe_other_trace
from reflact.memory.models import (
    BatchTest,
    ContrastPair,
    Evaluation,
    Origin,
    PromotionEvidence,
    ScoreEvent,
    StoredPair,
    Submission,
)
from reflact.prompts import PromptBook
from reflact.protocols import LLM
from reflact.types import FrozenModel, digest_json

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

CREATED_BY = "calibrator"

IDENTITY_PROMPTS = ("contrast", "judge")
"""The prompts that a calibration asks with, beside the critic's own."""

IDENTITY_SETTINGS = frozenset(CalibratorSettings.model_fields) - {
    "batch_size",
    "concurrency",
    "full_queue_policy",
    "queue_size",
}
"""The settings that a calibration's result depends on."""

SCORED_STEPS_PER_PAIR = 3
"""So many labelled steps are scored for each pair of a batch, since a critic is right about most steps."""

PairCallback = Callable[[ContrastPair], Awaitable[None]]
"""Gets each pair once it is in the store."""


class CalibrationBaseline(FrozenModel):
    """The memory when a calibration began: ids of pairs, and the number of the last test (0: none)."""

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
        number: Its number in the store; None while it is not begun.
        report: Its earlier report, if nothing has changed since.
        missing: Why nothing can be tested; None if something can.
    """

    identity: str
    split: HoldoutSplit
    known_pair_ids: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    earlier_tests: tuple[BatchTest, ...]
    finished_tests: tuple[BatchTest, ...] = ()
    number: int | None = None
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


class RoundState(NamedTuple):
    """What a calibration knows between two rounds.

    ``scored`` are the held-out steps as the critic scores them now; ``measured`` those of the last round's
    pairs. The rest is what it made so far.
    """

    training: tuple[Trace, ...]
    known_pair_ids: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    finished_tests: tuple[BatchTest, ...]
    scored: tuple[ScoredStep | None, ...]
    history: tuple[Measurement, ...] = ()
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

    def pop_finished_test(self, round_pair_ids: Collection[str]) -> tuple[RoundState, BatchTest | None]:
        """Return the test of a round if it had ended before the calibration was stopped, and what is left."""
        tests = self.finished_tests
        if tests and (not round_pair_ids or not set(round_pair_ids).isdisjoint(tests[0].pair_ids)):
            return self._replace(finished_tests=tests[1:]), tests[0]
        return self._replace(finished_tests=()), None


class AskedMistake(NamedTuple):
    """A mistake that a model is to write."""

    step: StepToContrast
    mistake: Mistake
    reach: ProgressRange


class GeneratedPairs(NamedTuple):
    """The pairs of some traces, in the store, each once, and the candidates that became none.

    The scan holds ``n_quarantined`` of the pairs back; ``n_new`` of the others are new. The memory had no room
    for ``n_left_out`` further ones.
    """

    pairs: tuple[ContrastPair, ...] = ()
    dropped: tuple[DroppedCandidate, ...] = ()
    n_quarantined: int = 0
    n_new: int = 0
    n_left_out: int = 0


class CalibrationLoop:
    """Makes pairs, tests them and measures the critic, for a whole calibration or for one trace."""

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
        self._store = store
        self._critic = critic
        self._settings = settings
        self._prompts = prompts
        self._on_event = on_event
        self._usage_ledger = usage_ledger
        self._scorer = StepScorer(critic, max_concurrent=settings.concurrency)
        self._tester = PromotionTester(self._scorer, store)

    # ------------------------------------------------------------------------------------ a calibration

    async def open(
        self, traces: Sequence[Trace], heldout: Sequence[Trace] | None, anchors: Sequence[ContrastPair]
    ) -> CalibrationStart:
        """Return a calibration before its first call; nothing is asked or stored.

        Raises:
            DataError: Two traces have one id, here or in the store.
        """
        snapshot = await take_snapshot(self._store)
        await _refuse_other_traces([*traces, *(heldout or ())], snapshot, self._store)
        identity = await to_thread.run_sync(self._compute_identity, traces, heldout, anchors)
        start = CalibrationStart(
            identity=identity,
            split=self._split_traces(traces, heldout, snapshot, snapshot.tests),
            known_pair_ids=snapshot.known_pair_ids,
            promoted=snapshot.promoted,
            earlier_tests=snapshot.tests,
        )
        last = await self._store.find_calibration(identity)
        if last is not None and last.result:
            result = parse_stored(
                CalibrationResult.model_validate_json, last.result, "result of a calibration"
            )
            if result.snapshot_hash == _hash_snapshot(snapshot):
                start = start._replace(report=result.report)
        elif last is not None:
            baseline = parse_stored(
                CalibrationBaseline.model_validate_json, last.baseline, "baseline of a calibration"
            )
            promoted = await self._load_pairs(baseline.promoted_pair_ids)
            if len(promoted) == len(baseline.promoted_pair_ids):
                earlier = tuple(test for test in snapshot.tests if test.number <= baseline.last_test_number)
                split = self._split_traces(traces, heldout, snapshot, earlier)
                start = start._replace(
                    split=split,
                    known_pair_ids=frozenset(baseline.known_pair_ids),
                    promoted=promoted,
                    earlier_tests=earlier,
                    finished_tests=self._find_finished_tests(snapshot.tests[len(earlier) :], split),
                    number=last.number,
                )
        return start._replace(missing=self._find_missing(start, anchors, snapshot))

    async def run(
        self, start: CalibrationStart, anchors: Sequence[ContrastPair], *, ignore_finished: bool = False
    ) -> CalibrationReport:
        """Calibrate, and measure before and after; a finished calibration only if ``ignore_finished``."""
        if start.report is not None and not ignore_finished:
            return start.report.model_copy(update={"is_earlier_result": True})
        number = start.number
        if number is None:
            baseline = start.baseline.model_dump_json()
            number = (await self._store.start_calibration(start.identity, baseline)).number
        report = await self._run(start, list_pair_steps(anchors), is_forced=ignore_finished)
        snapshot_hash = _hash_snapshot(await take_snapshot(self._store))
        result = CalibrationResult(report=report, snapshot_hash=snapshot_hash)
        await self._store.finish_calibration(number, result.model_dump_json())
        return report

    async def _run(
        self, start: CalibrationStart, anchors: Sequence[LabeledStep], *, is_forced: bool
    ) -> CalibrationReport:
        earlier_usage = self._usage_ledger.entries
        split = start.split
        steps = list_labeled_steps(split.held_out)
        held_out_traces = {step.trace for step in steps}
        self._on_event(
            CalibrationStarted(
                n_training_traces=len(split.training),
                n_held_out_traces=len(held_out_traces),
                n_held_out_steps=len(steps),
                n_anchor_steps=len(anchors),
                resumed=start.number is not None,
            )
        )
        before = await self._scorer.score(steps, start.promoted)
        anchors_before = await self._scorer.score(anchors, start.promoted)
        self._on_event(
            CriticMeasured(
                when="before",
                held_out=summarize_scores(before),
                anchors=summarize_scores(anchors_before),
                usage=self._usage_ledger.usage,
            )
        )
        state = RoundState(split.training, start.known_pair_ids, start.promoted, start.finished_tests, before)
        state = await self._run_rounds(state, start, steps, is_forced=is_forced)
        promoted = (await take_snapshot(self._store)).promoted
        after = await self._scorer.score(steps, promoted)
        anchors_after = await self._scorer.score(anchors, promoted)
        self._on_event(
            CriticMeasured(
                when="after",
                held_out=summarize_scores(after),
                anchors=summarize_scores(anchors_after),
                usage=self._usage_ledger.usage,
            )
        )
        consumed = self._usage_ledger.entries_since(earlier_usage)
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
            held_out=await compare_metrics(before, after),
            anchors=await compare_metrics(anchors_before, anchors_after),
            metrics_by_round=state.metrics,
            power_summary=describe_test_power(len(held_out_traces), n_earlier_tests=start.n_earlier_tests),
            usage=sum_usage(consumed),
            usage_by_purpose=consumed,
        )

    async def _run_rounds(
        self, state: RoundState, start: CalibrationStart, steps: Sequence[LabeledStep], *, is_forced: bool
    ) -> RoundState:
        """Make rounds until the curriculum ends or nothing is left to learn; the first one always if forced."""
        state = await self._add_measurement(state, measure(state.scored))
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

    def _plan_round(self, history: Sequence[Measurement]) -> RoundPlan | None:
        mistakes = tuple(self._settings.all_mistakes)
        return plan_next_round(history, mistakes, max_rounds=self._settings.max_rounds)

    def _explain_nothing_to_learn(
        self, state: RoundState, start: CalibrationStart, steps: Sequence[LabeledStep]
    ) -> str | None:
        unscored = [
            UnscoredStep(step.trace_id, bound_unscored_error(step.label))
            for step, score in zip(steps, state.scored, strict=True)
            if score is None
        ]
        return explain_nothing_to_learn(
            [score for score in state.scored if score is not None],
            unscored=unscored,
            n_earlier_tests=start.n_earlier_tests + len(state.tests),
        )

    async def _make_round(
        self, state: RoundState, plan: RoundPlan
    ) -> tuple[RoundState, tuple[ContrastPair, ...]]:
        """Make and store the pairs of a round, first those of mistakes that the critic still makes."""
        self._on_event(
            RoundStarted(number=plan.number, n_traces=len(state.training), usage=self._usage_ledger.usage)
        )
        if plan.number == 1:
            training = await self._score_unscored_steps(state.training, state.promoted)
            state = state._replace(training=training)
        still_wrong = [
            build_observed_pair(step) for step in list_steps_to_contrast(state.measured, plan.band)
        ]
        known = state.known_pair_ids.union(pair.id for pair in state.pairs)
        observed = [pair for pair in still_wrong if pair is not None and pair.id not in known]
        generated = await self._make_pairs(
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
        """Test all waiting pairs that do not come from the held-out traces, unless that was done before a stop."""
        state, finished = state.pop_finished_test([pair.id for pair in round_pairs])
        if finished is not None and finished.evidence is not None:
            return await self._replay_finished_test(state, steps, finished.evidence)
        snapshot = await take_snapshot(self._store)
        waiting = snapshot.list_testable_pairs(split.held_out)
        batch = choose_batch(waiting, max_pairs=self._settings.max_pairs)
        if not batch:
            return state._replace(not_tested=_explain_no_batch(state))
        result = await self.test_batch(batch, steps, promoted=snapshot.promoted, name=split.held_out_name)
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
        with_batch = await self._load_pairs(promoted_ids.union(evidence.pair_ids))
        await self._scorer.score(steps, state.promoted)
        await self._scorer.score(steps, with_batch)
        self.emit_tested(evidence, len(evidence.pair_ids))
        return state._replace(
            tests=(*state.tests, evidence),
            known_pair_ids=state.known_pair_ids.union(evidence.pair_ids),
            promoted=with_batch if evidence.passed_test else state.promoted,
        )

    async def _measure_round(self, state: RoundState, round_pairs: Sequence[ContrastPair]) -> RoundState:
        """Add how the critic does now; by kind of mistake only if another round may follow."""
        measurement = measure(state.scored)
        if measurement is not None and self._plan_round((*state.history, measurement)) is not None:
            sample = list_pair_steps(round_pairs)[:MAX_MEASURED_STEPS]
            scored = await self._scorer.score(sample, state.promoted)
            state = state._replace(measured=tuple(zip(sample, scored, strict=True)))
            measurement = measure(state.scored, scored)
        return await self._add_measurement(state, measurement)

    async def _add_measurement(self, state: RoundState, measurement: Measurement | None) -> RoundState:
        scored = [score for score in state.scored if score is not None]
        metrics = await to_thread.run_sync(compute_metrics, scored)
        return state._replace(
            metrics=state.metrics if metrics is None else (*state.metrics, metrics),
            history=state.history if measurement is None else (*state.history, measurement),
        )

    # ------------------------------------------------------------------------------------ making pairs

    async def make_trace_pairs(
        self, trace: Trace, *, known_pair_ids: frozenset[str], on_pair: PairCallback | None = None
    ) -> GeneratedPairs:
        """Make a trace's pairs by the plan of a first round, and store each when it is ready."""
        plan = self._plan_round(())
        assert plan is not None
        traces = await self._score_unscored_steps([trace], None)
        return await self._make_pairs(traces, plan, known_pair_ids=known_pair_ids, on_pair=on_pair)

    async def _make_pairs(
        self,
        traces: Sequence[Trace],
        plan: RoundPlan,
        *,
        known_pair_ids: frozenset[str],
        observed: Sequence[ContrastPair] = (),
        on_pair: PairCallback | None = None,
    ) -> GeneratedPairs:
        """Make the pairs of a round, as many as there is room for, and store each when it is ready."""
        anchored = AnchorExclusions.from_anchors(await self._store.anchors())
        known = known_pair_ids.union(pair.id for pair in observed)
        constructed: dict[str, list[ContrastPair]] = {}
        asked: list[tuple[str, AskedMistake]] = []
        for trace in sorted(traces, key=lambda trace: trace.id):
            ready, missing = self._list_candidates(trace, plan, anchored, known)
            constructed[trace.id] = ready
            asked += [(trace.id, one) for one in missing]
        chosen = choose_batch(
            (pair for ready in constructed.values() for pair in ready),
            max_pairs=self._settings.max_pairs,
            taken=observed,
        )
        kept_ids, n_free = await self._fit_in_memory([*observed, *chosen])
        n_asked = max(0, min(self._settings.max_asked, n_free))
        drawn = shuffle(asked, SEED, f"contrast/asked/{plan.number}")[:n_asked]

        async def make_pairs_of(trace: Trace) -> GeneratedPairs:
            still_wrong = [pair for pair in observed if pair.provenance.trace_id == trace.id]
            ready = [pair for pair in (*still_wrong, *constructed[trace.id]) if pair.id in kept_ids]
            missing = [one for trace_id, one in drawn if trace_id == trace.id]
            generated = await self._store_candidates(
                [*ready, *missing], plan, known_pair_ids=known_pair_ids, on_pair=on_pair
            )
            self._emit_pairs_generated(trace, generated)
            return generated

        by_trace = await fan_out(make_pairs_of, traces, limit=self._settings.concurrency)
        pairs = {pair.id: pair for generated in by_trace for pair in generated.pairs}
        return GeneratedPairs(
            pairs=tuple(pairs.values()),
            dropped=tuple(drop for generated in by_trace for drop in generated.dropped),
            n_quarantined=sum(generated.n_quarantined for generated in by_trace),
            n_new=sum(generated.n_new for generated in by_trace),
            n_left_out=max(0, -n_free),
        )

    def _list_candidates(
        self, trace: Trace, plan: RoundPlan, anchored: AnchorExclusions, known_pair_ids: Collection[str]
    ) -> tuple[list[ContrastPair], list[AskedMistake]]:
        """Return a trace's new pairs of the dealt kinds of mistakes, and what a model would have to write."""
        events = select_events(_list_free_events(trace, anchored), min_delta=self._settings.min_delta)
        hands = deal_mistakes(
            plan, trace_id=trace.id, n_events=len(events), per_event=self._settings.pairs_per_step
        )
        pairs: list[ContrastPair] = []
        asked: list[AskedMistake] = []
        for event, hand in zip(events, hands, strict=True):
            right = find_reference(event)
            if right is None:
                continue
            step = StepToContrast(event, right, trace.purpose, trace.id, plan.band)
            ready = [pair for pair in pairs_of(step) if pair.id not in known_pair_ids]
            missing = []
            for name in hand:
                pair = next((pair for pair in ready if pair.mistake == name), None)
                if pair is None:
                    missing.append(name)
                else:
                    ready.remove(pair)
                    pairs.append(pair)
            for name in dict.fromkeys(missing):
                mistake = self._settings.all_mistakes[name]
                reach = compute_reach(mistake, right, band=plan.band)
                if reach is not None:
                    asked.append(AskedMistake(step, mistake, reach))
        return pairs, asked

    async def _fit_in_memory(self, pairs: Sequence[ContrastPair]) -> tuple[frozenset[str], int]:
        """Return the ids of the pairs that the memory holds or has room for, and the room beyond all of them."""
        pair_ids = [pair.id for pair in pairs]
        stored = {one.pair.id for one in await self._store.pairs(pair_ids)}
        new = [pair_id for pair_id in pair_ids if pair_id not in stored]
        capacity = await self._store.remaining_capacity()
        return frozenset(stored.union(new[:capacity])), capacity - len(new)

    async def _store_candidates(
        self,
        candidates: Sequence[ContrastPair | AskedMistake],
        plan: RoundPlan,
        *,
        known_pair_ids: Collection[str],
        on_pair: PairCallback | None,
    ) -> GeneratedPairs:
        submissions: list[Submission] = []

        async def make(candidate: ContrastPair | AskedMistake) -> ContrastPair | DroppedCandidate:
            made: ContrastPair | DroppedCandidate
            if isinstance(candidate, ContrastPair):
                made = candidate
            else:
                made = await self._ask(candidate, plan, known_pair_ids)
            if isinstance(made, ContrastPair):
                await checkpoint()  # the next call goes out before this pair is scanned and written
                submissions.append(await self._store.submit(made, created_by=CREATED_BY))
                if on_pair is not None:
                    await on_pair(made)
            return made

        made = await fan_out(make, candidates)
        return GeneratedPairs(
            pairs=tuple(one for one in made if isinstance(one, ContrastPair)),
            dropped=tuple(one for one in made if isinstance(one, DroppedCandidate)),
            n_quarantined=sum(
                one.status == "rejected" or (one.status == "quarantined" and one.reason is not None)
                for one in submissions
            ),
            n_new=sum(
                one.is_new and one.status == "quarantined" and one.reason is None for one in submissions
            ),
        )

    async def _ask(
        self, asked: AskedMistake, plan: RoundPlan, known_pair_ids: Collection[str]
    ) -> ContrastPair | DroppedCandidate:
        made = await ask_for_pair(
            asked.step,
            asked.mistake,
            asked.reach,
            llm=self._llm,
            prompts=self._prompts,
            round_number=plan.number,
            state_tokens=self._critic.settings.state_tokens,
        )
        if isinstance(made, ContrastPair) and made.id in known_pair_ids:
            return DroppedCandidate(
                reason="known",
                explanation="the pair was there before",
                step=asked.step.event.step,
                mistake=asked.mistake.name,
            )
        return made

    async def _score_unscored_steps(
        self, traces: Sequence[Trace], pairs: Sequence[ContrastPair] | None
    ) -> tuple[Trace, ...]:
        """Return traces with the critic's evaluation of labelled steps that have none: its real mistakes teach most."""
        anchored = AnchorExclusions.from_anchors(await self._store.anchors())
        steps = self._list_unscored_steps(traces, anchored)
        scores = await self._scorer.score(steps, pairs)
        evaluations: dict[str, dict[int, Evaluation]] = defaultdict(dict)
        for step, score in zip(steps, scores, strict=True):
            if score is not None:
                evaluations[step.trace_id][step.number] = score.evaluation
        return tuple(
            trace.add_evaluations(evaluations[trace.id]) if trace.id in evaluations else trace
            for trace in traces
        )

    def _list_unscored_steps(
        self, traces: Iterable[Trace], anchored: AnchorExclusions
    ) -> tuple[LabeledStep, ...]:
        """Return labelled steps that no critic has scored; by chance, as many as a batch needs."""
        steps = [
            LabeledStep(trace.recording, event.step, trace.purpose, event.transition, event.label)
            for trace in sorted(traces, key=lambda trace: trace.id)
            for event in _list_free_events(trace, anchored)
            if event.evaluation is None and event.label is not None and is_fully_labeled(event)
        ]
        if self._settings.max_pairs is None:
            return tuple(steps)
        return shuffle(steps, SEED, "calibrate/unscored")[: SCORED_STEPS_PER_PAIR * self._settings.max_pairs]

    def _emit_pairs_generated(self, trace: Trace, generated: GeneratedPairs) -> None:
        self._on_event(
            PairsGenerated(
                trace_id=trace.id,
                n_candidates=len(generated.pairs) + len(generated.dropped),
                n_pairs=len(generated.pairs),
                n_quarantined=generated.n_quarantined,
                dropped=count_drops(generated.dropped),
                usage=self._usage_ledger.usage,
            )
        )

    # ------------------------------------------------------------------------------------ testing pairs

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
        steps = list_labeled_steps(trace for trace in heldout if trace.id not in snapshot.learned.trace_ids)
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
        usage = self._usage_ledger.usage
        if isinstance(result, PromotionEvidence):
            self._on_event(PairBatchTested(use=use, evidence=result, usage=usage))
            return
        self._on_event(
            BatchTestPostponed(
                n_pairs=n_pairs, n_traces=result.n_traces, explanation=result.explanation, usage=usage
            )
        )

    # ------------------------------------------------------------------------------------ before a calibration

    def count_calls(
        self, start: CalibrationStart, anchors: Sequence[ContrastPair], *, max_reasks: int
    ) -> tuple[int, int]:
        """Return the least and the largest number of calls of a calibration; stored replies count too.

        The least measures the critic once. The largest lets every round take place, finds no score in the
        cache, and sends every reply back as often as allowed.
        """
        settings = self._settings
        n_steps = len(list_labeled_steps(start.split.held_out))
        n_anchors = len(list_pair_steps(anchors))
        anchored = AnchorExclusions.from_anchors(anchors)
        n_unscored = len(self._list_unscored_steps(start.split.training, anchored))
        n_scores = (
            n_steps * (2 + 3 * settings.max_rounds)  # before, after; both sides of each test, and after it
            + n_anchors * 2
            + n_unscored
            + MAX_MEASURED_STEPS * (settings.max_rounds - 1)
        )
        n_samples = self._critic.settings.n_samples
        n_asked = 3 * settings.max_asked * settings.max_rounds  # the mistake, and two comparisons
        return (n_steps + n_anchors) * n_samples, (n_scores * n_samples + n_asked) * (1 + max_reasks)

    def _compute_identity(
        self, traces: Sequence[Trace], heldout: Sequence[Trace] | None, anchors: Sequence[ContrastPair]
    ) -> str:
        """Return a hash of all that a calibration depends on; how many calls are in flight makes no difference."""
        prompts = self._prompts.prompts
        sums: dict[str, JsonValue] = {name: prompts[name].checksum for name in IDENTITY_PROMPTS}
        return digest_json(
            [
                self._critic.identity,
                self._llm.identity,
                self._settings.model_dump(mode="json", include=set(IDENTITY_SETTINGS)),
                sums,
                _hash_traces(traces),
                None if heldout is None else _hash_traces(heldout),
                *sorted(pair.id for pair in anchors),
            ]
        )

    def _split_traces(
        self,
        traces: Sequence[Trace],
        heldout: Sequence[Trace] | None,
        snapshot: MemorySnapshot,
        tests: Sequence[BatchTest],
    ) -> HoldoutSplit:
        """Return what is learned from and what is held out; the rule's choice if the caller made none."""
        if heldout is not None:
            return split_by_caller(traces, heldout, training=snapshot.learned)
        settings = self._settings
        rule = HoldoutRule.choose(
            len({trace.purpose for trace in traces}),
            n_folds=settings.holdout_folds,
            holdout_by=settings.holdout_by,
        )
        return split_by_rule(
            traces,
            training=snapshot.learned,
            tests=tests,
            rule=rule,
            limit=settings.max_held_out_traces,
        )

    def _find_missing(
        self, start: CalibrationStart, anchors: Sequence[ContrastPair], snapshot: MemorySnapshot
    ) -> NotTested | None:
        """Return why nothing can be tested; None if something can."""
        split = start.split
        testing = deduplicate_traces(split.held_out)
        few = find_missing_traces(testing, n_earlier_tests=start.n_earlier_tests)
        if few is not None:
            return few
        if snapshot.list_testable_pairs(split.held_out):
            return None
        if not split.training:
            return NotTested(reason="no_training_traces")
        anchored = AnchorExclusions.from_anchors(anchors)
        for trace in split.training:
            if select_events(_list_free_events(trace, anchored), min_delta=self._settings.min_delta):
                return None
        return NotTested(reason="no_pairs")

    def _find_finished_tests(self, tests: Iterable[BatchTest], split: HoldoutSplit) -> tuple[BatchTest, ...]:
        """Return the critic's finished tests on these held-out traces."""
        traces = deduplicate_traces(split.held_out)
        held_out = tuple(sorted({trace.recording.fingerprint for trace in traces}))
        return tuple(
            test
            for test in tests
            if test.kind == "promote"
            and test.holdout_id == split.held_out_name
            and test.content_fingerprints == held_out
            and test.evidence is not None
            and test.evidence.critic == self._critic.identity
        )

    async def _load_pairs(self, pair_ids: Collection[str]) -> tuple[ContrastPair, ...]:
        """Return those of the pairs that the store has, by id."""
        stored: Sequence[StoredPair] = await self._store.pairs(sorted(pair_ids)) if pair_ids else ()
        return tuple(one.pair for one in stored)


def _explain_no_batch(state: RoundState) -> NotTested:
    if not state.training:
        return NotTested(reason="no_training_traces")
    return NotTested(reason="memory_full" if state.n_left_out else "no_pairs")


def _list_free_events(trace: Trace, anchored: AnchorExclusions) -> list[ScoreEvent]:
    """Return the steps of a trace that are no anchors; anchors teach nothing."""
    return [
        event
        for event in trace.events
        if not anchored.excludes(trace.purpose, event.transition, Origin(trace_id=trace.id, step=event.step))
    ]


async def _refuse_other_traces(traces: Sequence[Trace], snapshot: MemorySnapshot, store: MemoryStore) -> None:
    """Raise DataError if one of the traces has the id of another run: among them, in the store, or in a pair."""
    hashes: Mapping[str, str] = await store.content_hashes()
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


def _hash_snapshot(snapshot: MemorySnapshot) -> str:
    """Return a hash of what decides whether a calibration that is over would find anything new."""
    promoted = sorted(pair.id for pair in snapshot.promoted)
    return digest_json([*promoted, "waiting", *sorted(one.pair.id for one in snapshot.waiting_pairs)])


def _hash_traces(traces: Iterable[Trace]) -> str:
    """Return a hash of traces that does not depend on their order."""
    hashes = (
        digest_json([trace.id, trace.purpose, *(event.model_dump(mode="json") for event in trace.events)])
        for trace in traces
    )
    return digest_json(list[JsonValue](sorted(hashes)))
