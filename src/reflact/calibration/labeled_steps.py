"""Labelled steps, and the scores of them that measure a critic and decide a replay test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import JsonValue

from reflact.calibration.critic import Scorer
from reflact.calibration.metrics import ScoredStep
from reflact.calibration.perturbations import DistanceBand, StepToContrast
from reflact.calibration.splits import deduplicate_traces, list_labeled_events
from reflact.calibration.trace import Trace
from reflact.concurrency import fan_out, run_in_thread
from reflact.errors import CallError
from reflact.memory.cards import TraceIdentity
from reflact.memory.models import ContrastPair, Evaluation, Label, ScoreEvent, Transition
from reflact.types import digest_json


class LabeledStep(NamedTuple):
    """A step whose correct score is known, and the contrast pairs that speak of it."""

    trace: TraceIdentity
    number: int
    purpose: str
    transition: Transition
    label: Label
    pairs: tuple[ContrastPair, ...] = ()

    @property
    def trace_id(self) -> str:
        """The trace that it is a step of."""
        return self.trace.id

    def build_scored_step(self, evaluation: Evaluation) -> ScoredStep:
        """Return an evaluation of this step beside what is right."""
        difficulties = [pair.difficulty for pair in self.pairs if pair.difficulty is not None]
        return ScoredStep(
            trace_id=self.trace_id,
            step=self.number,
            label=self.label,
            evaluation=evaluation,
            wrong_progress=tuple(pair.wrong.progress_after for pair in self.pairs),
            mistakes=tuple(sorted({pair.mistake for pair in self.pairs})),
            difficulty=max(difficulties, default=None),
        )


def list_labeled_steps(traces: Iterable[Trace]) -> tuple[LabeledStep, ...]:
    """Return the steps of traces whose correct score is known; copies of one recording count once."""
    return tuple(
        LabeledStep(trace.recording, event.step, trace.purpose, event.transition, event.label)
        for trace in deduplicate_traces(traces)
        for event in list_labeled_events(trace)
        if event.label is not None
    )


def list_pair_steps(pairs: Iterable[ContrastPair]) -> tuple[LabeledStep, ...]:
    """Return the steps of pairs, each once; the right side is the label. Unknown traces have one step each."""
    about: dict[str, list[ContrastPair]] = defaultdict(list)
    for pair in pairs:
        about[pair.hashes.subject].append(pair)
    return tuple(_build_pair_step(name, together) for name, together in sorted(about.items()))


def _build_pair_step(name: str, pairs: Sequence[ContrastPair]) -> LabeledStep:
    first = pairs[0]
    label = Label(
        progress_before=first.right.progress_before,
        progress_after=first.right.progress_after,
        source=first.label_source,
        reasoning=first.right.reasoning,
    )
    trace_id, number = first.provenance.trace_id or name, first.provenance.step or 0
    return LabeledStep(
        TraceIdentity(trace_id, (name,)), number, first.purpose, first.transition, label, tuple(pairs)
    )


def list_steps_to_contrast(
    measured: Iterable[tuple[LabeledStep, ScoredStep | None]], band: DistanceBand
) -> Iterator[StepToContrast]:
    """Yield steps of pairs with the critic's present evaluation, if their label comes from outside the critic."""
    for step, score in measured:
        if score is not None and step.label.source != "agreement":
            event = ScoreEvent(
                step=step.number, transition=step.transition, evaluation=score.evaluation, label=step.label
            )
            yield StepToContrast(event, step.pairs[0].right, step.purpose, step.trace_id, band)


async def score_steps(
    critic: Scorer, steps: Sequence[LabeledStep], pairs: Sequence[ContrastPair] | None, *, max_concurrent: int
) -> tuple[ScoredStep | None, ...]:
    """Score steps, so many at a time; None stands for a step without a valid score.

    Worked examples are chosen from exactly these pairs, without those that reveal the step's score; if pairs is
    None, the critic chooses as it always does.
    """
    purposes = {step.purpose for step in steps}
    leaks = LeakFilter([pair for pair in pairs or () if pair.purpose in purposes])
    await leaks.hash_states()

    async def one(step: LabeledStep) -> ScoredStep | None:
        examples = None if pairs is None else await leaks.exclude_leaking(pairs, step)
        try:
            score = await critic.score(step.transition, purpose=step.purpose, pairs=examples)
        except CallError:
            return None
        return step.build_scored_step(score.evaluation)

    return await fan_out(one, steps, limit=max_concurrent)


class LeakFilter:
    """Knows the pairs that reveal a step's score: they show the state after it, under its purpose."""

    def __init__(self, pairs: Sequence[ContrastPair]) -> None:
        self._pairs = pairs
        self._purposes = {pair.purpose for pair in pairs}
        self._pair_ids_by_state: dict[tuple[str, str], set[str]] = defaultdict(set)

    async def hash_states(self) -> None:
        """Hash the states of the pairs, beside the event loop."""
        for pair in self._pairs:
            states = pair.transition.payloads[:2]
            for state in await run_in_thread(partial(_hash_states, states), *states):
                self._pair_ids_by_state[pair.purpose, state].add(pair.id)

    async def exclude_leaking(
        self, candidates: Sequence[ContrastPair], step: LabeledStep
    ) -> Sequence[ContrastPair]:
        """Return the pairs that do not show the state after a step under its purpose."""
        if step.purpose not in self._purposes:
            return candidates
        after = step.transition.after
        (state,) = await run_in_thread(partial(_hash_states, [after]), after)
        leaking = self._pair_ids_by_state.get((step.purpose, state), set())
        return [pair for pair in candidates if pair.id not in leaking] if leaking else candidates


def _hash_states(states: Iterable[JsonValue]) -> list[str]:
    return [digest_json(state) for state in states]


async def load_recordings(traces: Iterable[Trace]) -> None:
    """Compute ``Trace.recording`` of traces beside the event loop; it is kept."""
    for trace in traces:
        states = (state for event in trace.events for state in event.transition.payloads)
        await run_in_thread(partial(getattr, trace, "recording"), *states)


class PairedScores(NamedTuple):
    """Steps that were scored on both sides, in one order, and the number of others."""

    before: tuple[ScoredStep, ...]
    after: tuple[ScoredStep, ...]
    n_unscored: int


def pair_scores(before: Sequence[ScoredStep | None], after: Sequence[ScoredStep | None]) -> PairedScores:
    """Return the steps that have a score on both sides."""
    both = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return PairedScores(tuple(a for a, _ in both), tuple(b for _, b in both), len(before) - len(both))
