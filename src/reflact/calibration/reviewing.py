"""Batches of pairs before they count: scored with and without, tested, promoted or not, taken back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from anyio import to_thread

from reflact.calibration.critic import CRITIC, Critic
from reflact.calibration.holding import Taught
from reflact.calibration.limited import HeardCritic
from reflact.calibration.metrics import Measures, Scored, interval_of_mean, measure
from reflact.calibration.replay import Step, compared, score_steps
from reflact.calibration.results import Change
from reflact.calibration.review import (
    COVERAGE,
    NotEnoughTraces,
    Replay,
    Silent,
    Use,
    enough,
    replayed,
    silent_effect,
    trace_effects,
)
from reflact.calibration.trace import Trace
from reflact.errors import DataError
from reflact.memory import ContrastPair, Promotion
from reflact.memory_cards import Recording, visible_to
from reflact.memory_ports import BatchTest, CardStore, StoredPair, count_tests


class Standing(NamedTuple):
    """What the store says of pairs at a moment.

    Args:
        known: The ids of pairs that were tested, promoted or archived and are not to be made again. Others
            are, so that a round which was cut off before its test is made again as it was.
        learned: Traces that pairs were made from, whatever became of these.
        purposes: What these traces were after.
        promoted: What the critic is shown now.
        waiting: Pairs that may be tested and were not since they last changed; see ``testable``.
        tests: All tests.
    """

    known: frozenset[str]
    learned: frozenset[str]
    purposes: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    waiting: tuple[StoredPair, ...]
    tests: tuple[BatchTest, ...]

    @property
    def taught(self) -> Taught:
        """What was learned from."""
        return Taught(self.learned, self.purposes)

    def testable(self, held_out: Iterable[Trace]) -> tuple[ContrastPair, ...]:
        """Return the pairs that wait and were made of none of these traces."""
        held = {trace.id for trace in held_out}
        return tuple(
            one.pair for one in self.waiting if held.isdisjoint(origin.trace_id for origin in one.origins)
        )


class Reviewer:
    """Tests pairs on steps whose correct score is known.

    Args:
        critic: Scores them.
        store: Where pairs stand.
        limit: Steps that are scored at a time.
    """

    def __init__(self, critic: Critic, store: CardStore, *, limit: int) -> None:
        self.critic = critic
        self.heard = HeardCritic(critic)
        self._store = store
        self._limit = limit

    async def standing(self) -> Standing:
        """Return where the critic's pairs stand now."""
        stored, tests = await self._store.pairs(), await self._store.tests()
        ended = [test for test in tests if test.evidence is not None]
        tested = {unit: test.at for test in ended for unit in test.unit_ids}
        ours = [one for one in stored if visible_to(one.pair.scope, CRITIC)]
        return Standing(
            known=frozenset(
                one.pair.id
                for one in stored
                if one.pair.id in tested or one.status in {"promoted", "archived"}
            ),
            learned=frozenset(origin.trace_id for one in stored for origin in one.origins),
            purposes=frozenset(
                one.pair.purpose for one in stored if one.pair.construction != "other_purpose"
            ),
            promoted=tuple(one.pair for one in ours if one.status == "promoted"),
            waiting=tuple(
                one
                for one in ours
                if one.status == "quarantined" and not one.held and _changed_since(one, tested)
            ),
            tests=tests,
        )

    async def score(self, steps: Sequence[Step], pairs: Sequence[ContrastPair]) -> tuple[Scored | None, ...]:
        """Score steps with exactly these pairs to choose worked examples from; None: no valid score."""
        return await score_steps(self.heard, steps, pairs, limit=self._limit)

    async def test(
        self,
        batch: Sequence[ContrastPair],
        steps: Sequence[Step],
        *,
        promoted: Sequence[ContrastPair],
        name: str,
    ) -> Promotion | NotEnoughTraces:
        """Promote a batch if it lowers the error on held-out steps beside what is promoted already.

        Nothing is sent, and no error probability is used up, where there are too few traces.
        """
        with_ = [*promoted, *batch]
        return await self._tested(batch, steps, without=promoted, with_=with_, name=name, use="promote")

    async def recheck(
        self,
        batch: Sequence[ContrastPair],
        steps: Sequence[Step],
        *,
        promoted: Sequence[ContrastPair],
        name: str,
    ) -> Promotion | NotEnoughTraces:
        """Take a promoted batch back if it raises the error on held-out steps."""
        ids = {pair.id for pair in batch}
        rest = [pair for pair in promoted if pair.id not in ids]
        return await self._tested(batch, steps, without=rest, with_=promoted, name=name, use="demote")

    async def _tested(
        self,
        batch: Sequence[ContrastPair],
        steps: Sequence[Step],
        *,
        without: Sequence[ContrastPair],
        with_: Sequence[ContrastPair],
        name: str,
        use: Use,
    ) -> Promotion | NotEnoughTraces:
        traces = {step.trace for step in steps}
        ids = tuple(sorted(pair.id for pair in batch))
        booked = [t for t in await self._store.tests() if t.evidence is not None or t.unit_ids != ids]
        few = enough(traces, before=count_tests(booked, traces))
        if few is not None:
            return few
        before = await self.score(steps, without)
        unscored = before.count(None)
        if use == "promote" and len(steps) - unscored < COVERAGE * len(steps):
            return NotEnoughTraces(traces=len(traces), steps=len(steps), unscored=unscored)
        after = await self.score(steps, with_)
        try:
            test = await self._left_open(ids, traces, name=name, use=use) or await self._store.open_test(
                ids, held_out=name, traces=traces, use=use
            )
        except DataError:  # the batch was sound when it was read, so somebody was faster
            return NotEnoughTraces(traces=len(traces), overtaken=True)
        sides, silent = compared(before, after), _silent(steps, before, after)
        found = await to_thread.run_sync(
            lambda: replayed(sides.before, sides.after, before=test.before, use=use, silent=silent)
        )
        if isinstance(found, NotEnoughTraces):
            return found
        evidence = self._evidence(found, test)
        try:
            await self._store.close_test(test.number, evidence)
        except DataError:
            over = any(one.number == test.number and one.evidence for one in await self._store.tests())
            if not over:
                raise
            return NotEnoughTraces(traces=len(traces), overtaken=True)
        return evidence

    async def _left_open(
        self, ids: tuple[str, ...], traces: Collection[Recording], *, name: str, use: Use
    ) -> BatchTest | None:
        """Return a test of this batch on these traces that was opened and not closed, by a killed process.

        Nobody saw how it would have ended, so to end it is the same test and spends nothing further.
        """
        marks = tuple(sorted({trace.mark for trace in traces}))
        for test in await self._store.tests():
            same = (test.unit_ids, test.traces, test.held_out, test.use) == (ids, marks, name, use)
            if same and test.evidence is None:
                changed = [one.changed for one in await self._store.pairs(ids)]
                return test if changed and max(changed) <= test.at else None
        return None

    def _evidence(self, found: Replay, test: BatchTest) -> Promotion:
        return Promotion(
            pair_ids=test.unit_ids,
            promoted=found.passed,
            traces=found.traces,
            transitions=found.transitions,
            unscored=found.unscored,
            batches_before=test.before,
            effect=found.effect.value,
            low=found.effect.low,
            high=found.effect.high,
            p_value=found.p_value,
            alpha=found.alpha,
            critic=self.critic.identity,
            prompt=self.critic.prompt,
            accuracy_change=found.accuracy_change,
            outcome=found.outcome,
        )


def _silent(
    steps: Sequence[Step], without: Sequence[Scored | None], with_: Sequence[Scored | None]
) -> tuple[Silent, ...]:
    """Return the steps that have no valid score on a side."""
    return tuple(
        Silent(step.trace_id, silent_effect(step.gold, old, new))
        for step, old, new in zip(steps, without, with_, strict=True)
        if old is None or new is None
    )


def _changed_since(one: StoredPair, tested: Mapping[str, datetime]) -> bool:
    """Whether a pair was never tested, or was edited, released or taken back since its last test."""
    last = tested.get(one.pair.id)
    return last is None or one.changed > last


async def measured(scored: Sequence[Scored]) -> Measures | None:
    """Measure scores off the event loop."""
    return await to_thread.run_sync(measure, scored)


async def changed(before: Sequence[Scored | None], after: Sequence[Scored | None]) -> Change:
    """Return what changed between two scorings of the same steps, as far as both gave a score."""
    sides = compared(before, after)
    gain = None
    if sides.before:
        effects = trace_effects(sides.before, sides.after)
        gain = await to_thread.run_sync(lambda: interval_of_mean(effects, low=-10, high=10, label="effect"))
    return Change(
        before=await measured(sides.before),
        after=await measured(sides.after),
        gain=gain,
        unscored=sides.unscored,
    )


def batches_of(
    promoted: Collection[ContrastPair], tests: Sequence[BatchTest]
) -> tuple[tuple[ContrastPair, ...], ...]:
    """Return promoted pairs by the test that promoted them, in the order of the tests."""
    by_id = {pair.id: pair for pair in promoted}
    batches: dict[int, list[ContrastPair]] = defaultdict(list)
    for test in reversed(tests):
        if test.use == "promote" and test.evidence is not None and test.evidence.promoted:
            batches[test.number] += [by_id.pop(unit) for unit in test.unit_ids if unit in by_id]
    return tuple(tuple(batches[number]) for number in sorted(batches) if batches[number])
