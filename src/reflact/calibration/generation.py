"""Plans a round of contrast pairs, makes them, and stores each when it is ready."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from anyio.lowlevel import checkpoint

from reflact.calibration.asked import (
    AskedMistake,
    DroppedCandidate,
    ask_for_pair,
    compute_reach,
)
from reflact.calibration.events import PairsGenerated
from reflact.calibration.labeled_steps import LabeledStep
from reflact.calibration.metrics import CriticMetrics, ScoredStep
from reflact.calibration.pairs import (
    MIN_DISTANCE,
    StepToContrast,
    choose_batch,
    find_reference,
    is_fully_labeled,
    pairs_of,
    select_events,
)
from reflact.calibration.report import count_drops
from reflact.calibration.runtime import CalibrationRuntime
from reflact.calibration.significance import MIN_ERROR_DROP
from reflact.calibration.trace import Trace
from reflact.concurrency import fan_out
from reflact.data import make_rng, shuffle
from reflact.gate.intervals import wilson_interval
from reflact.memory.cards import AnchorExclusions
from reflact.memory.models import ContrastPair, Evaluation, Origin, ScoreEvent

# So many labelled steps are scored for each pair of a batch, since a critic is right about most
# steps.
SCORED_STEPS_PER_PAIR = 3

# Gets each pair once it is in the store.
PairCallback = Callable[[ContrastPair], Awaitable[None]]

# The part of a round that goes to all kinds equally, whatever was measured.
EXPLORED_SHARE = 0.5

# The least rise of held-out pairwise accuracy for which another round follows.
MIN_ACCURACY_RISE = 0.01

# Wrong scores may lie at least this much farther than the least distance, however late the round.
MIN_DISTANCE_ROOM = 0.5

# Equal inputs give equal rounds; nothing is gained by another draw.
SEED = 0


class RoundPlan(NamedTuple):
    """A round's number, from 1, and the share of each kind of mistake in it."""

    number: int
    shares: Mapping[str, float]

    @property
    def max_distance(self) -> float:
        """How far a wrong score may be from the right one; the room halves from round to round."""
        room = (10 - MIN_DISTANCE) * 0.5 ** (self.number - 1)
        return MIN_DISTANCE + max(MIN_DISTANCE_ROOM, room)


def measure_weakness(learned: Iterable[ScoredStep | None]) -> Mapping[str, float]:
    """Return the lower 95% bound of the critic's error rate on each kind of mistake.

    It is measured on steps that are learned from, never on held-out ones: tests stay blind to how
    their batches were made.
    """
    n_steps: Counter[str] = Counter()
    n_wrong: Counter[str] = Counter()
    for step in learned:
        if step is not None:
            n_steps.update(step.mistakes)
            n_wrong.update(() if step.is_right else step.mistakes)
    return {kind: wilson_interval(n_wrong[kind], n)[0] for kind, n in sorted(n_steps.items())}


def plan_round(number: int, mistakes: Sequence[str], weakness: Mapping[str, float]) -> RoundPlan:
    """Return a round: half of it is dealt to all kinds equally, the rest by the critic's
    weakness.
    """
    equal = 1 / len(mistakes)
    total = sum(weakness.get(kind, 0.0) for kind in mistakes)
    shares = {}
    for kind in mistakes:
        part = weakness.get(kind, 0.0) / total if total > 0 else equal
        shares[kind] = EXPLORED_SHARE * equal + (1 - EXPLORED_SHARE) * part
    return RoundPlan(number, shares)


def has_plateaued(history: Sequence[CriticMetrics]) -> bool:
    """Whether the last round gained too little over the best before it, in accuracy and in error.

    Accuracy alone is not enough: a critic that inflates evenly orders all states rightly from the
    start. Without states that can be ordered, nothing is known to move.
    """
    accuracies = [one.accuracy.value for one in history if one.accuracy is not None]
    errors = [one.error.value for one in history]
    if len(history) < 2:
        return False
    if len(accuracies) < len(history):
        return True
    rise = accuracies[-1] - max(accuracies[:-1])
    drop = min(errors[:-1]) - errors[-1]
    return rise < MIN_ACCURACY_RISE and drop < MIN_ERROR_DROP


def deal_mistakes(
    plan: RoundPlan, *, trace_id: str, n_events: int, per_event: int
) -> tuple[tuple[str, ...], ...]:
    """Return for each event of a trace ``per_event`` kinds of mistakes to make pairs of.

    The kinds have their shares, rounded by chance. An event gets a kind twice only if it must.
    """
    label = f"contrast/deal/{plan.number}/{trace_id}"
    counts = apportion(
        shuffle(plan.shares.items(), SEED, f"{label}/kinds"),
        n_events * per_event,
        offset=make_rng(SEED, label).random(),
    )
    row: list[str] = []
    for kind, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        row += [kind] * count
    hands: list[list[str]] = [[] for _ in range(n_events)]
    order = shuffle(range(n_events), SEED, f"{label}/events")
    for index, kind in enumerate(row):
        hands[order[index % n_events]].append(kind)
    return tuple(tuple(hand) for hand in hands)


def apportion(
    shares: Sequence[tuple[str, float]], n_places: int, *, offset: float
) -> dict[str, int]:
    """Return how many of so many places each kind gets: its share, rounded up or down without bias.

    Systematic sampling (W. G. Madow, 1949): the shares lie end to end, and a place goes to the kind
    in whose part its mark falls. Marks lie one place apart, the first one at ``offset`` in [0, 1).
    """
    total = sum(share for _, share in shares)
    counts = {}
    end = 0.0
    n_before = ceil(-offset)
    for kind, share in shares:
        end += share
        n_after = ceil(end / total * n_places - offset)
        counts[kind] = n_after - n_before
        n_before = n_after
    return counts


# ------------------------------------------------------------------------------------------- pairs


class GeneratedPairs(NamedTuple):
    """The pairs of some traces, in the store, each once, and the candidates that became none.

    The scan holds ``n_quarantined`` of the pairs back; ``n_new`` of the others are new.
    """

    pairs: tuple[ContrastPair, ...] = ()
    dropped: tuple[DroppedCandidate, ...] = ()
    n_quarantined: int = 0
    n_new: int = 0

    @classmethod
    def sum_up(cls, parts: Iterable[GeneratedPairs]) -> GeneratedPairs:
        """Return all parts together."""
        parts = tuple(parts)
        pairs = {pair.id: pair for part in parts for pair in part.pairs}
        return cls(
            tuple(pairs.values()),
            tuple(drop for part in parts for drop in part.dropped),
            sum(part.n_quarantined for part in parts),
            sum(part.n_new for part in parts),
        )


async def make_trace_pairs(
    runtime: CalibrationRuntime,
    trace: Trace,
    *,
    known_pair_ids: frozenset[str],
    on_pair: PairCallback | None = None,
) -> GeneratedPairs:
    """Make a trace's pairs by the plan of a first round, and store each when it is ready."""
    plan = plan_round(1, tuple(runtime.settings.all_mistakes), {})
    traces = await score_unscored_steps(runtime, [trace], None)
    return await make_pairs(runtime, traces, plan, known_pair_ids=known_pair_ids, on_pair=on_pair)


async def make_pairs(
    runtime: CalibrationRuntime,
    traces: Sequence[Trace],
    plan: RoundPlan,
    *,
    known_pair_ids: frozenset[str],
    observed: Sequence[ContrastPair] = (),
    on_pair: PairCallback | None = None,
) -> GeneratedPairs:
    """Make the pairs of a round, and store each when it is ready.

    ``observed`` are the critic's present mistakes on pairs of earlier rounds; they come first.
    """
    settings = runtime.settings
    anchored = AnchorExclusions.from_anchors(await runtime.store.anchors())
    known = known_pair_ids.union(pair.id for pair in observed)
    constructed: dict[str, list[ContrastPair]] = {}
    to_ask: list[AskedMistake] = []
    for trace in sorted(traces, key=lambda trace: trace.id):
        ready, missing = _list_candidates(runtime, trace, plan, anchored, known)
        constructed[trace.id] = ready
        to_ask += missing
    all_constructed = [pair for ready in constructed.values() for pair in ready]
    chosen = choose_batch(all_constructed, max_pairs=settings.max_pairs, taken=observed)
    chosen_ids = {pair.id for pair in (*observed, *chosen)}
    drawn = shuffle(to_ask, SEED, f"contrast/asked/{plan.number}")[: settings.max_asked]

    async def make_pairs_of(trace: Trace) -> GeneratedPairs:
        still_wrong = [pair for pair in observed if pair.provenance.trace_id == trace.id]
        ready = {pair.id: pair for pair in (*still_wrong, *constructed[trace.id])}
        candidates: list[ContrastPair | AskedMistake] = [
            pair for pair in ready.values() if pair.id in chosen_ids
        ]
        candidates += [one for one in drawn if one.step.trace_id == trace.id]
        made = await _store_candidates(
            runtime, candidates, known_pair_ids=known_pair_ids, on_pair=on_pair
        )
        runtime.on_event(
            PairsGenerated(
                trace_id=trace.id,
                n_candidates=len(made.pairs) + len(made.dropped),
                n_pairs=len(made.pairs),
                n_quarantined=made.n_quarantined,
                dropped=count_drops(made.dropped),
                usage=runtime.usage,
            )
        )
        return made

    by_trace = await fan_out(make_pairs_of, traces, limit=settings.concurrency)
    return GeneratedPairs.sum_up(by_trace)


def _list_candidates(
    runtime: CalibrationRuntime,
    trace: Trace,
    plan: RoundPlan,
    anchored: AnchorExclusions,
    known_pair_ids: Collection[str],
) -> tuple[list[ContrastPair], list[AskedMistake]]:
    """Return a trace's new pairs of the dealt kinds, and what a model would have to write."""
    settings = runtime.settings
    events = select_events(list_free_events(trace, anchored), min_delta=settings.min_delta)
    hands = deal_mistakes(
        plan, trace_id=trace.id, n_events=len(events), per_event=settings.pairs_per_step
    )
    pairs: list[ContrastPair] = []
    to_ask: list[AskedMistake] = []
    for event, hand in zip(events, hands, strict=True):
        right = find_reference(event)
        assert right is not None  # selected events are labelled
        step = StepToContrast(event, right, trace.purpose, trace.id, plan.max_distance)
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
            mistake = settings.all_mistakes[name]
            reach = compute_reach(mistake, step)
            if reach is not None:
                to_ask.append(AskedMistake(step, mistake, reach, plan.number))
    return pairs, to_ask


async def _store_candidates(
    runtime: CalibrationRuntime,
    candidates: Sequence[ContrastPair | AskedMistake],
    *,
    known_pair_ids: Collection[str],
    on_pair: PairCallback | None,
) -> GeneratedPairs:
    async def make(candidate: ContrastPair | AskedMistake) -> GeneratedPairs:
        pair: ContrastPair | DroppedCandidate
        if isinstance(candidate, ContrastPair):
            pair = candidate
        else:
            pair = await ask_for_pair(
                candidate,
                llm=runtime.llm,
                prompts=runtime.prompts,
                state_tokens=runtime.scorer.critic.settings.state_tokens,
            )
            if isinstance(pair, ContrastPair) and pair.id in known_pair_ids:
                pair = DroppedCandidate("known", "the pair was there before")
        if isinstance(pair, DroppedCandidate):
            return GeneratedPairs(dropped=(pair,))
        await checkpoint()  # the next call goes out before this pair is scanned and written
        submission = await runtime.store.submit(pair)
        if on_pair is not None:
            await on_pair(pair)
        is_waiting = submission.status == "quarantined" and submission.reason is None
        is_held_back = submission.status in {"quarantined", "rejected"} and not is_waiting
        return GeneratedPairs(
            pairs=(pair,),
            n_quarantined=int(is_held_back),
            n_new=int(is_waiting and submission.is_new),
        )

    return GeneratedPairs.sum_up(await fan_out(make, candidates))


async def score_unscored_steps(
    runtime: CalibrationRuntime,
    traces: Sequence[Trace],
    pairs: Sequence[ContrastPair] | None,
) -> tuple[Trace, ...]:
    """Return traces in which the critic has scored labelled steps that had no score."""
    anchored = AnchorExclusions.from_anchors(await runtime.store.anchors())
    steps = list_unscored_steps(traces, anchored, max_pairs=runtime.settings.max_pairs)
    scores = await runtime.scorer.score(steps, pairs)
    evaluations: dict[str, dict[int, Evaluation]] = defaultdict(dict)
    for step, score in zip(steps, scores, strict=True):
        if score is not None:
            evaluations[step.trace_id][step.number] = score.evaluation
    return tuple(
        trace.add_evaluations(evaluations[trace.id]) if trace.id in evaluations else trace
        for trace in traces
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
