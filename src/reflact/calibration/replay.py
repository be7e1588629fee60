"""Scoring known steps again: what measures a critic, and what a replay test compares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import JsonValue

from reflact.aside import run_in_thread
from reflact.calibration.critic import Scorer
from reflact.calibration.holding import distinct, known
from reflact.calibration.metrics import Scored
from reflact.calibration.trace import Trace
from reflact.errors import ContextOverflow, ReplyError
from reflact.memory import ContrastPair, Evaluation, Gold, Transition
from reflact.memory_cards import Recording, subject
from reflact.tasks import fan_out
from reflact.types import digest_json


class Step(NamedTuple):
    """A step whose correct score is known, and the contrast pairs that speak of it."""

    trace: Recording
    number: int
    purpose: str
    transition: Transition
    gold: Gold
    pairs: tuple[ContrastPair, ...] = ()

    @property
    def trace_id(self) -> str:
        """The trace that it is a step of."""
        return self.trace.id

    def scored(self, evaluation: Evaluation) -> Scored:
        """Return an evaluation of this step beside what is right."""
        difficulties = [pair.difficulty for pair in self.pairs if pair.difficulty is not None]
        return Scored(
            trace_id=self.trace_id,
            step=self.number,
            gold=self.gold,
            evaluation=evaluation,
            wrong=tuple(pair.wrong.phi_after for pair in self.pairs),
            mistakes=tuple(sorted({pair.mistake for pair in self.pairs})),
            difficulty=max(difficulties, default=None),
        )


def steps_of(traces: Iterable[Trace]) -> tuple[Step, ...]:
    """Return the steps of traces whose correct score is known; copies of one recording count once."""
    return tuple(
        Step(trace.recording, event.step, trace.purpose, event.transition, event.gold)
        for trace in distinct(traces)
        for event in known(trace)
        if event.gold is not None
    )


def steps_in(pairs: Iterable[ContrastPair]) -> tuple[Step, ...]:
    """Return the steps that pairs speak of, each once with all its pairs; their right side is correct.

    Steps of unknown traces count as traces of their own.
    """
    about: dict[str, list[ContrastPair]] = defaultdict(list)
    for pair in pairs:
        about[subject(pair)].append(pair)
    return tuple(_step(name, together) for name, together in sorted(about.items()))


def _step(name: str, pairs: Sequence[ContrastPair]) -> Step:
    first = pairs[0]
    gold = Gold(
        phi_before=first.right.phi_before,
        phi_after=first.right.phi_after,
        source=first.label,
        reasoning=first.right.reasoning,
    )
    trace_id, number = first.provenance.trace_id or name, first.provenance.step or 0
    return Step(Recording(trace_id, (name,)), number, first.purpose, first.transition, gold, tuple(pairs))


async def score_steps(
    critic: Scorer, steps: Sequence[Step], pairs: Sequence[ContrastPair] | None, *, limit: int
) -> tuple[Scored | None, ...]:
    """Score steps with exactly these pairs to choose worked examples from, so many at a time.

    No step is shown a pair that tells its score, see ``Telling``. With None in place of pairs the critic
    chooses as it always does.

    None stands for a step of which the model gave no valid score.
    """
    purposes = {step.purpose for step in steps}
    telling = Telling([pair for pair in pairs or () if pair.purpose in purposes])
    await telling.look()

    async def one(step: Step) -> Scored | None:
        examples = None if pairs is None else await telling.left(pairs, step)
        try:
            score = await critic.score(step.transition, purpose=step.purpose, pairs=examples)
        except (ReplyError, ContextOverflow):
            return None
        return step.scored(score.evaluation)

    return await fan_out(one, steps, limit=limit)


class Telling:
    """Which pairs show which states, of pairs that may be shown while steps are measured.

    A pair that shows the state after a step, under its purpose, tells the score that is asked for: by such
    pairs a critic gains that remembers states and understands nothing.
    """

    def __init__(self, pairs: Sequence[ContrastPair]) -> None:
        self._pairs = pairs
        self._purposes = {pair.purpose for pair in pairs}
        self._showing: dict[tuple[str, str], set[str]] = defaultdict(set)

    async def look(self) -> None:
        """Look at the pairs; takes time that grows with their states, beside the event loop."""
        for pair in self._pairs:
            states = pair.transition.states[:2]
            for state in await run_in_thread(partial(_hashes, states), *states):
                self._showing[pair.purpose, state].add(pair.id)

    async def left(self, pairs: Sequence[ContrastPair], step: Step) -> Sequence[ContrastPair]:
        """Return those of the pairs that do not show the state after a step under its purpose."""
        if step.purpose not in self._purposes:
            return pairs
        after = step.transition.after
        (state,) = await run_in_thread(partial(_hashes, [after]), after)
        telling = self._showing.get((step.purpose, state), set())
        return [pair for pair in pairs if pair.id not in telling] if telling else pairs


def _hashes(states: Iterable[JsonValue]) -> list[str]:
    return [digest_json(state) for state in states]


async def look_through(traces: Iterable[Trace]) -> None:
    """Find out what traces hold, beside the event loop; what is asked of them next is known then."""
    for trace in traces:
        states = (state for event in trace.events for state in event.transition.states)
        await run_in_thread(partial(_recording, trace), *states)


def _recording(trace: Trace) -> Recording:
    return trace.recording


class Compared(NamedTuple):
    """Steps that were scored on both sides, in one order, and how many were not."""

    before: tuple[Scored, ...]
    after: tuple[Scored, ...]
    unscored: int


def compared(before: Sequence[Scored | None], after: Sequence[Scored | None]) -> Compared:
    """Return what can be compared of the same steps scored twice."""
    both = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return Compared(tuple(a for a, _ in both), tuple(b for _, b in both), len(before) - len(both))
