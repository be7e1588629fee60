"""Rounds of calibration: pairs are made, stored, tested on held-out traces; what changed is measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import anyio
from anyio.lowlevel import checkpoint

from reflact.calibration.contrast import contrast
from reflact.calibration.counted import Books, total
from reflact.calibration.critic import Critic
from reflact.calibration.curriculum import KindMeasured, Measured, Round, measured, next_round
from reflact.calibration.events import Began, CriticMeasured, PairsMade, RoundBegan, Tell, figures_of
from reflact.calibration.holding import GIVEN, Split, known, split
from reflact.calibration.limited import LimitedCritic
from reflact.calibration.made import Drop, Made
from reflact.calibration.metrics import Measures, Scored, measure_accuracy
from reflact.calibration.replay import Step, steps_in, steps_of
from reflact.calibration.results import CalibrationReport, count_drops, count_pairs
from reflact.calibration.review import NotEnoughTraces, Use, outlook
from reflact.calibration.reviewing import Reviewer, Standing, batches_of, changed
from reflact.calibration.reviewing import measured as measures
from reflact.calibration.settings import CalibratorSettings
from reflact.calibration.trace import Trace
from reflact.memory import ContrastPair, Origin, Promotion, ScoreEvent
from reflact.memory_cards import Anchored
from reflact.memory_ports import CardStore, Submission, TraceStore, count_tests
from reflact.ports import LLM
from reflact.prompts import PromptBook
from reflact.tasks import fan_out

CREATED_BY = "calibrator"

Also = Callable[[ContrastPair], Awaitable[None]]
"""Is handed each pair once it is in the store."""

Tested = Callable[[Promotion | NotEnoughTraces, int, Use], None]
"""Is told how a test of so many pairs ended, and what it was for."""


class Memory(CardStore, TraceStore, Protocol):
    """A store of cards and traces, such as ``MemoryStore``."""


@dataclass
class Tally:
    """What the rounds of one call made."""

    rounds: int = 0
    pairs: list[ContrastPair] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    held: int = 0
    tests: list[Promotion] = field(default_factory=list)
    not_tested: str | None = None
    by_round: list[Measures] = field(default_factory=list)


class Stored(Made):
    """What became of a trace's candidates: how many kept pairs the scan holds back, how many are new."""

    held: int = 0
    new: int = 0


class Rounds:
    """Makes and tests pairs.

    Args:
        llm: Writes mistakes and compares.
        store: Where everything goes.
        critic: What is calibrated.
        settings: How.
        prompts: The prompts.
        tested: Is told of each test.
        tell: Is told of what else happens.
        books: Where the calls of ``llm`` and ``critic`` are counted.
    """

    def __init__(
        self,
        llm: LLM,
        store: Memory,
        critic: Critic,
        *,
        settings: CalibratorSettings,
        prompts: PromptBook,
        tested: Tested,
        tell: Tell,
        books: Books,
    ) -> None:
        self._llm = llm
        self._store = store
        self._sampled = LimitedCritic(critic, anyio.Semaphore(settings.concurrency))
        self._settings = settings
        self._prompts = prompts
        self._tell = tell
        self._books = books
        self.tested = tested
        self.reviewer = Reviewer(critic, store, limit=settings.concurrency)

    @property
    def first(self) -> Round:
        """What a round asks for about which nothing is known."""
        plan = next_round((), self._settings.curriculum)
        assert plan is not None
        return plan

    async def make(
        self,
        trace: Trace,
        plan: Round,
        *,
        known_ids: frozenset[str],
        others: Sequence[str] = (),
        also: Also | None = None,
    ) -> Stored:
        """Make a trace's pairs and store each as it comes about; steps that are anchors teach nothing."""
        submissions: list[Submission] = []
        anchored = Anchored.of(await self._store.anchors())

        def free(event: ScoreEvent) -> bool:
            origin = Origin(trace_id=trace.id, step=event.step)
            return not anchored.holds(trace.purpose, event.transition, origin)

        async def report(one: ContrastPair | Drop) -> None:
            if isinstance(one, Drop):
                return
            await checkpoint()  # the next call goes out before this pair is scanned and written
            submissions.append(await self._store.submit(one, created_by=CREATED_BY))
            if also is not None:
                await also(one)

        made = await contrast(
            [event for event in trace.events if free(event)],
            purpose=trace.purpose,
            trace_id=trace.id,
            plan=plan,
            llm=self._llm,
            judge=self._llm,
            critic=self._sampled,
            settings=self._settings.contrast,
            prompts=self._prompts,
            known=known_ids,
            others=others,
            report=report,
        )
        held = [one for one in submissions if one.reason is not None or one.status == "rejected"]
        fresh = [one for one in submissions if one.new and one not in held]
        return Stored(**dict(made), held=len(held), new=len(fresh))

    def made(self, trace: Trace, made: Stored) -> None:
        """Tell of a trace's pairs."""
        self._tell(
            PairsMade(
                trace_id=trace.id,
                candidates=made.candidates,
                kept=len(made.pairs),
                held=made.held,
                drops=count_drops(made.drops),
                usage=self._books.usage,
            )
        )

    async def test(
        self, batch: Sequence[ContrastPair], steps: Sequence[Step], *, standing: Standing, name: str
    ) -> Promotion | NotEnoughTraces:
        """Test a batch beside what is promoted, and tell of it."""
        result = await self.reviewer.test(batch, steps, promoted=standing.promoted, name=name)
        self.tested(result, len(batch), "promote")
        return result

    async def recheck(self, heldout: Sequence[Trace]) -> tuple[Promotion, ...]:
        """Measure each promoted batch again, the oldest first, and take back what harms."""
        standing = await self.reviewer.standing()
        steps = steps_of(trace for trace in heldout if trace.id not in standing.learned)
        found: list[Promotion] = []
        for batch in batches_of(standing.promoted, standing.tests):
            now = await self.reviewer.standing()
            result = await self.reviewer.recheck(batch, steps, promoted=now.promoted, name=GIVEN)
            self.tested(result, len(batch), "demote")
            if isinstance(result, Promotion):
                found.append(result)
        return tuple(found)

    def split(self, traces: Sequence[Trace], heldout: Sequence[Trace] | None, standing: Standing) -> Split:
        """Return what is learned from and what is held out; the rule's choice where the caller made none."""
        settings = self._settings
        if heldout is None:
            return split(
                traces,
                learned=standing.learned,
                tests=standing.tests,
                slices=settings.slices,
                most=settings.most_held_out,
            )
        held = {trace.id for trace in heldout}
        return Split(
            learn=tuple(trace for trace in traces if trace.id not in held),
            held_out=tuple(t for t in heldout if t.id not in standing.learned and known(t)),
            name=GIVEN,
        )

    async def run(self, traces: Sequence[Trace], heldout: Sequence[Trace] | None) -> CalibrationReport:
        """Calibrate on traces, round by round, and measure before and after."""
        began = self._books.entries
        standing = await self.reviewer.standing()
        parts = self.split(traces, heldout, standing)
        steps, anchors = steps_of(parts.held_out), steps_in(await self._store.anchors())
        held = {step.trace for step in steps}
        self._tell(Began(learn=len(parts.learn), held_out=len(held), steps=len(steps), anchors=len(anchors)))
        before = await self.reviewer.score(steps, standing.promoted)
        anchors_before = await self.reviewer.score(anchors, standing.promoted)
        self._measured("before", before, anchors_before)
        tally = await self._rounds(parts, steps, before)
        promoted = (await self.reviewer.standing()).promoted
        after = await self.reviewer.score(steps, promoted)
        anchors_after = await self.reviewer.score(anchors, promoted)
        self._measured("after", after, anchors_after)
        consumed = self._books.since(began)
        return CalibrationReport(
            critic=self.reviewer.critic.identity,
            prompt=self.reviewer.critic.prompt,
            rounds=tally.rounds,
            learned_from=len(parts.learn),
            held_out_name=parts.name,
            candidates=len(tally.pairs) + len(tally.drops),
            pairs=count_pairs(tally.pairs),
            drops=count_drops(tally.drops),
            held=tally.held,
            tests=tuple(tally.tests),
            not_tested=tally.not_tested,
            held_out=await changed(before, after),
            anchors=await changed(anchors_before, anchors_after),
            by_round=tuple(tally.by_round),
            outlook=outlook(len(held), before=count_tests(standing.tests, held)),
            usage=total(consumed),
            consumed=consumed,
        )

    def _measured(
        self,
        when: Literal["before", "after"],
        held_out: Sequence[Scored | None],
        anchors: Sequence[Scored | None],
    ) -> None:
        self._tell(
            CriticMeasured(
                when=when,
                held_out=figures_of(held_out),
                anchors=figures_of(anchors),
                usage=self._books.usage,
            )
        )

    async def _rounds(self, parts: Split, steps: Sequence[Step], before: Sequence[Scored | None]) -> Tally:
        tally, history = Tally(by_round=await _measures(before)), _history(before, ())
        while (plan := next_round(history, self._settings.curriculum)) is not None:
            tally.rounds = plan.number
            self._tell(RoundBegan(number=plan.number, traces=len(parts.learn), usage=self._books.usage))
            pairs = await self._round(parts, plan, tally)
            if not await self._tested(parts, steps, tally) or not history:
                break
            standing = await self.reviewer.standing()
            after = await self.reviewer.score(steps, standing.promoted)
            tally.by_round += await _measures(after)
            if next_round([*history, *_history(after, ())], self._settings.curriculum) is None:
                break  # nothing would come of knowing which kinds the critic is weak on
            invited = await self.reviewer.score(steps_in(pairs), standing.promoted)
            history += _history(after, invited)
        return tally

    async def _round(self, parts: Split, plan: Round, tally: Tally) -> list[ContrastPair]:
        """Make the pairs of a round from all traces, several at a time."""
        ids = (await self.reviewer.standing()).known
        purposes = sorted({trace.purpose for trace in parts.learn})

        async def one(trace: Trace) -> Stored:
            made = await self.make(trace, plan, known_ids=ids, others=purposes)
            self.made(trace, made)
            return made

        made = await fan_out(one, parts.learn, limit=self._settings.concurrency)
        pairs = [pair for one in made for pair in one.pairs]
        tally.pairs += pairs
        tally.drops += [drop for one in made for drop in one.drops]
        tally.held += sum(one.held for one in made)
        return pairs

    async def _tested(self, parts: Split, steps: Sequence[Step], tally: Tally) -> bool:
        """Test all pairs that wait and do not come from the held-out traces; say whether there was a test."""
        standing = await self.reviewer.standing()
        batch = standing.testable(parts.held_out)
        if not batch:
            tally.not_tested = tally.not_tested or _no_batch(parts, tally)
            return False
        result = await self.test(batch, steps, standing=standing, name=parts.name)
        if isinstance(result, NotEnoughTraces):
            tally.not_tested = result.words
            return False
        tally.tests.append(result)
        return True


async def _measures(scored: Sequence[Scored | None]) -> list[Measures]:
    found = await measures([one for one in scored if one is not None])
    return [] if found is None else [found]


def _no_batch(parts: Split, tally: Tally) -> str:
    """Return in a sentence why there is nothing to test."""
    if not parts.learn:
        return (
            "there was no trace to learn from: all that were given are held out; pass others, or more of them"
        )
    if not tally.pairs:
        return f"none of {len(tally.drops)} candidates became a pair: the drops say why"
    if tally.held == len(tally.pairs):
        return f"the scan holds back all {tally.held} pairs: look at them, and release those that are sound"
    return "all pairs were tested before, or wait for somebody to look at them"


def _history(held_out: Sequence[Scored | None], invited: Sequence[Scored | None]) -> list[Measured]:
    """Return what a curriculum may know: accuracy on held-out steps, kinds on those that are learned from.

    Which kinds the critic is weak on is never read off the held-out steps, whose tests have to stay blind
    to how their batches came about.
    """
    accuracy = measure_accuracy([one for one in held_out if one is not None])
    if accuracy is None:
        return []
    learned = measured([one for one in invited if one is not None])
    kinds: tuple[KindMeasured, ...] = () if learned is None else learned.kinds
    return [Measured(accuracy=accuracy, kinds=kinds)]
