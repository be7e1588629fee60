"""Makes the pairs of a round, or of one trace beside an agent, and stores each when it is ready."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from anyio.lowlevel import checkpoint

from reflact.calibration.asked import (
    DroppedCandidate,
    Mistake,
    ProgressRange,
    ask_for_pair,
    compute_reach,
)
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.curriculum import SEED, RoundPlan, deal_mistakes, plan_next_round
from reflact.calibration.events import CalibrationEventCallback, PairsGenerated
from reflact.calibration.labeled_steps import LabeledStep, StepScorer
from reflact.calibration.pairs import (
    StepToContrast,
    choose_batch,
    find_reference,
    is_fully_labeled,
    pairs_of,
    select_events,
)
from reflact.calibration.report import count_drops
from reflact.calibration.trace import Trace
from reflact.calibration.usage import UsageLedger
from reflact.concurrency import fan_out
from reflact.data import shuffle
from reflact.memory.cards import AnchorExclusions
from reflact.memory.models import ContrastPair, Evaluation, Origin, ScoreEvent, Submission
from reflact.prompts import PromptBook
from reflact.protocols import LLM

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore


# So many labelled steps are scored for each pair of a batch, since a critic is right about most
# steps.
SCORED_STEPS_PER_PAIR = 3

# Gets each pair once it is in the store.
PairCallback = Callable[[ContrastPair], Awaitable[None]]


class AskedMistake(NamedTuple):
    """A mistake that a model is to write."""

    step: StepToContrast
    mistake: Mistake
    reach: ProgressRange


class GeneratedPairs(NamedTuple):
    """The pairs of some traces, in the store, each once, and the candidates that became none.

    The scan holds ``n_quarantined`` of the pairs back; ``n_new`` of the others are new. The memory
    had no room for ``n_left_out`` further ones.
    """

    pairs: tuple[ContrastPair, ...] = ()
    dropped: tuple[DroppedCandidate, ...] = ()
    n_quarantined: int = 0
    n_new: int = 0
    n_left_out: int = 0


class CalibrationRuntime(NamedTuple):
    """The open collaborators of a calibrator.

    Args:
        llm: Writes mistakes and judges them.
        store: Keeps traces, pairs and tests.
        scorer: Scores steps with the critic that is calibrated.
        settings: How pairs are made and tested.
        prompts: The prompts of the writer and the judge.
        on_event: Gets each event.
        usage_ledger: The usage of all calls so far.
    """

    llm: LLM
    store: MemoryStore
    scorer: StepScorer
    settings: CalibratorSettings
    prompts: PromptBook
    on_event: CalibrationEventCallback
    usage_ledger: UsageLedger


class PairGenerator:
    """Makes pairs of traces with one model, and scores steps that no critic has scored."""

    def __init__(self, runtime: CalibrationRuntime) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._settings = runtime.settings

    async def make_trace_pairs(
        self, trace: Trace, *, known_pair_ids: frozenset[str], on_pair: PairCallback | None = None
    ) -> GeneratedPairs:
        """Make a trace's pairs by the plan of a first round, and store each when it is ready."""
        plan = plan_next_round((), tuple(self._settings.all_mistakes), max_rounds=1)
        assert plan is not None
        traces = await self.score_unscored_steps([trace], None)
        return await self.make_pairs(traces, plan, known_pair_ids=known_pair_ids, on_pair=on_pair)

    async def make_pairs(
        self,
        traces: Sequence[Trace],
        plan: RoundPlan,
        *,
        known_pair_ids: frozenset[str],
        observed: Sequence[ContrastPair] = (),
        on_pair: PairCallback | None = None,
    ) -> GeneratedPairs:
        """Make the pairs of a round for which there is room, and store each when it is ready."""
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
            ready = {
                pair.id: pair
                for pair in (*still_wrong, *constructed[trace.id])
                if pair.id in kept_ids
            }
            missing = [one for trace_id, one in drawn if trace_id == trace.id]
            generated = await self._store_candidates(
                [*ready.values(), *missing], plan, known_pair_ids=known_pair_ids, on_pair=on_pair
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
        self,
        trace: Trace,
        plan: RoundPlan,
        anchored: AnchorExclusions,
        known_pair_ids: Collection[str],
    ) -> tuple[list[ContrastPair], list[AskedMistake]]:
        """Return a trace's new pairs of the dealt kinds, and what a model would have to write."""
        events = select_events(
            list_free_events(trace, anchored), min_delta=self._settings.min_delta
        )
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
        """Return the ids of the pairs for which the memory has room, and the room beyond them."""
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
                made = await ask_for_pair(
                    candidate.step,
                    candidate.mistake,
                    candidate.reach,
                    llm=self._runtime.llm,
                    prompts=self._runtime.prompts,
                    round_number=plan.number,
                    state_tokens=self._runtime.scorer.critic.settings.state_tokens,
                )
                if isinstance(made, ContrastPair) and made.id in known_pair_ids:
                    made = DroppedCandidate(
                        reason="known",
                        explanation="the pair was there before",
                        step=candidate.step.event.step,
                        mistake=candidate.mistake.name,
                    )
            if isinstance(made, ContrastPair):
                await checkpoint()  # the next call goes out before this pair is scanned and written
                submissions.append(await self._store.submit(made))
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
                one.is_new and one.status == "quarantined" and one.reason is None
                for one in submissions
            ),
        )

    async def score_unscored_steps(
        self, traces: Sequence[Trace], pairs: Sequence[ContrastPair] | None
    ) -> tuple[Trace, ...]:
        """Return traces in which the critic has scored labelled steps that had no score."""
        anchored = AnchorExclusions.from_anchors(await self._store.anchors())
        steps = list_unscored_steps(traces, anchored, max_pairs=self._settings.max_pairs)
        scores = await self._runtime.scorer.score(steps, pairs)
        evaluations: dict[str, dict[int, Evaluation]] = defaultdict(dict)
        for step, score in zip(steps, scores, strict=True):
            if score is not None:
                evaluations[step.trace_id][step.number] = score.evaluation
        return tuple(
            trace.add_evaluations(evaluations[trace.id]) if trace.id in evaluations else trace
            for trace in traces
        )

    def _emit_pairs_generated(self, trace: Trace, generated: GeneratedPairs) -> None:
        self._runtime.on_event(
            PairsGenerated(
                trace_id=trace.id,
                n_candidates=len(generated.pairs) + len(generated.dropped),
                n_pairs=len(generated.pairs),
                n_quarantined=generated.n_quarantined,
                dropped=count_drops(generated.dropped),
                usage=self._runtime.usage_ledger.usage,
            )
        )


def list_free_events(trace: Trace, anchored: AnchorExclusions) -> list[ScoreEvent]:
    """Return the steps of a trace that are no anchors; anchors teach nothing."""
    return [
        event
        for event in trace.events
        if not anchored.excludes(
            trace.purpose, event.transition, Origin(trace_id=trace.id, step=event.step)
        )
    ]


def list_unscored_steps(
    traces: Iterable[Trace], anchored: AnchorExclusions, *, max_pairs: int | None
) -> tuple[LabeledStep, ...]:
    """Return labelled steps that no critic has scored; by chance, as many as a batch needs."""
    steps = [
        LabeledStep(trace.recording, event.step, trace.purpose, event.transition, event.label)
        for trace in sorted(traces, key=lambda trace: trace.id)
        for event in list_free_events(trace, anchored)
        if event.evaluation is None and event.label is not None and is_fully_labeled(event)
    ]
    if max_pairs is None:
        return tuple(steps)
    return shuffle(steps, SEED, "calibrate/unscored")[: SCORED_STEPS_PER_PAIR * max_pairs]
