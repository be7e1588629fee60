"""Rounds of calibration: pairs are made, stored, tested on held-out traces; what changed is measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from reflact.calibration.config import CalibratorSettings
from reflact.calibration.contrast import contrast
from reflact.calibration.course import (
    Course,
    Given,
    Result,
    Stored,
    Tally,
    find_missing,
    free_events,
    hash_of,
    load_pairs,
    no_batch,
    open_course,
)
from reflact.calibration.critic import Critic
from reflact.calibration.curriculum import Round, history_of, next_round
from reflact.calibration.events import Began, CriticMeasured, PairsMade, RoundBegan, Tell, figures_of
from reflact.calibration.holding import GIVEN
from reflact.calibration.limited import (
    FIRST,
    Books,
    HeardJudge,
    HeardWriter,
    LimitedCritic,
    total,
)
from reflact.calibration.metrics import Measures, Scored
from reflact.calibration.mistakes import Drop
from reflact.calibration.replay import Step, look_through, steps_in, steps_of
from reflact.calibration.results import CalibrationReport, count_drops, count_pairs
from reflact.calibration.review import NotEnoughTraces, Use, outlook
from reflact.calibration.reviewing import Reviewer, Standing, batches_of, changed, measured
from reflact.calibration.trace import Trace
from reflact.calibration_ports import CalibrationStore
from reflact.memory import ContrastPair, Promotion
from reflact.memory_cards import Anchored
from reflact.memory_ports import CardStore, Submission, TraceStore
from reflact.ports import LLM
from reflact.prompts import PromptBook
from reflact.tasks import fan_out

CREATED_BY = "calibrator"

Also = Callable[[ContrastPair], Awaitable[None]]
"""Is handed each pair once it is in the store."""

Tested = Callable[[Promotion | NotEnoughTraces, int, Use], None]
"""Is told how a test of so many pairs ended, and what it was for."""


class Memory(CardStore, TraceStore, CalibrationStore, Protocol):
    """A store of cards, traces and calibrations, such as ``MemoryStore``."""


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
        self._judge = HeardJudge(llm)
        self._store = store
        self._settings = settings
        self._prompts = prompts
        self._tell = tell
        self._books = books
        self.tested = tested
        self.reviewer = Reviewer(critic, store, limit=settings.concurrency)
        self._places = anyio.Semaphore(settings.concurrency)

    @property
    def first(self) -> Round:
        """What a round asks for about which nothing is known."""
        plan = next_round((), self._settings.curriculum)
        assert plan is not None
        return plan

    def writer(self) -> HeardWriter:
        """Return who writes for one calibration, of whom nothing was heard yet."""
        return HeardWriter(self._llm)

    async def make(
        self,
        trace: Trace,
        plan: Round,
        *,
        writer: LLM,
        known_ids: frozenset[str],
        others: Sequence[str] = (),
        shown: Sequence[ContrastPair] | None = None,
        also: Also | None = None,
    ) -> Stored:
        """Make a trace's pairs and store each as it comes about; steps that are anchors teach nothing."""
        submissions: list[Submission] = []
        anchored = Anchored.of(await self._store.anchors())

        async def report(one: ContrastPair | Drop) -> None:
            if isinstance(one, Drop):
                return
            await checkpoint()  # the next call goes out before this pair is scanned and written
            submissions.append(await self._store.submit(one, created_by=CREATED_BY))
            if also is not None:
                await also(one)

        made = await contrast(
            free_events(trace, anchored),
            purpose=trace.purpose,
            trace_id=trace.id,
            plan=plan,
            llm=writer,
            judge=self._judge,
            critic=LimitedCritic(self.reviewer.heard, self._places, pairs=shown),
            settings=self._settings.contrast,
            prompts=self._prompts,
            known=known_ids,
            others=others,
            report=report,
        )
        fresh = sum(one.new and one.status == "quarantined" and not held(one) for one in submissions)
        return Stored(**dict(made), held=sum(map(held, submissions)), new=fresh)

    def made(self, trace: Trace, made: Stored) -> None:
        """Tell of a trace's pairs."""
        self._tell(
            PairsMade(
                trace_id=trace.id,
                candidates=made.candidates,
                kept=len(made.pairs),
                held=made.held,
                full=made.full,
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
        await look_through(heldout)
        steps = steps_of(trace for trace in heldout if trace.id not in standing.learned)
        found: list[Promotion] = []
        for batch in batches_of(standing.promoted, standing.tests):
            now = await self.reviewer.standing()
            result = await self.reviewer.recheck(batch, steps, promoted=now.promoted, name=GIVEN)
            self.tested(result, len(batch), "demote")
            if isinstance(result, Promotion):
                found.append(result)
        return tuple(found)

    async def open(
        self, traces: Sequence[Trace], heldout: Sequence[Trace] | None, anchors: Sequence[ContrastPair]
    ) -> tuple[Course, str | None]:
        """Return the course of a calibration, and in a sentence what is missing for a test.

        Nothing is asked and nothing is stored.
        """
        standing = await self.reviewer.standing()
        critic, llm = self.reviewer.critic.identity, self._llm.identity
        given = Given(traces, heldout, anchors, critic, llm, self._settings, self._prompts)
        identity = await to_thread.run_sync(lambda: given.identity)
        await look_through([*traces, *(heldout or ())])
        last = await self._store.calibration(identity)
        course = await open_course(given, identity, last, standing=standing, store=self._store)
        return course, await to_thread.run_sync(find_missing, course, given, standing)

    async def run(
        self, course: Course, anchors: Sequence[ContrastPair], *, again: bool = False
    ) -> CalibrationReport:
        """Calibrate, round by round, and measure before and after.

        Args:
            course: The calibration, see ``open``.
            anchors: Gold pairs that are measured.
            again: Make another one where it is over and nothing has changed since; else its report is
                returned as it is.
        """
        if course.report is not None and not again:
            return course.report.model_copy(update={"earlier": True})
        number = course.number
        if number is None:
            baseline = course.baseline.model_dump_json()
            number = (await self._store.begin_calibration(course.identity, baseline)).number
        report = await self._run(course, steps_in(anchors))
        result = Result(report=report, standing=hash_of(await self.reviewer.standing()))
        await self._store.end_calibration(number, result.model_dump_json())
        return report

    async def _run(self, course: Course, anchors: Sequence[Step]) -> CalibrationReport:
        began, parts = self._books.entries, course.parts
        steps = steps_of(parts.held_out)
        held = {step.trace for step in steps}
        self._tell(
            Began(
                learn=len(parts.learn),
                held_out=len(held),
                steps=len(steps),
                anchors=len(anchors),
                resumed=course.resumed,
            )
        )
        before = await self.reviewer.score(steps, course.promoted)
        anchors_before = await self.reviewer.score(anchors, course.promoted)
        self._measured("before", before, anchors_before)
        writer = self.writer()
        tally = await self._rounds(course, steps, before, writer)
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
            archived=tally.archived,
            left_out=tally.left_out,
            tests=tuple(tally.tests),
            not_tested=tally.not_tested,
            writer_given_up=writer.given_up,
            held_out=await changed(before, after),
            anchors=await changed(anchors_before, anchors_after),
            by_round=tuple(tally.by_round),
            outlook=outlook(len(held), before=course.tests_before),
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

    async def _rounds(
        self,
        course: Course,
        steps: Sequence[Step],
        before: Sequence[Scored | None],
        writer: HeardWriter,
    ) -> Tally:
        tally, history = Tally(by_round=await measures_of(before)), history_of(before, ())
        while (plan := next_round(history, self._settings.curriculum)) is not None:
            tally.rounds = plan.number
            learn = len(course.parts.learn)
            self._tell(RoundBegan(number=plan.number, traces=learn, usage=self._books.usage))
            pairs = await self._round(course, plan, tally, writer)
            if not await self._tested(course, steps, pairs, tally) or not history:
                break
            after = await self.reviewer.score(steps, course.promoted)
            tally.by_round += await measures_of(after)
            if next_round([*history, *history_of(after, ())], self._settings.curriculum) is None:
                break  # nothing would come of knowing which kinds the critic is weak on
            invited = await self.reviewer.score(steps_in(pairs), course.promoted)
            history += history_of(after, invited)
        return tally

    async def _round(
        self, course: Course, plan: Round, tally: Tally, writer: HeardWriter
    ) -> list[ContrastPair]:
        """Make the pairs of a round from all traces, several at a time.

        As long as nothing valid was heard of the writer, the others wait for the first of them.
        """
        learn, shown = course.parts.learn, course.promoted
        ids = course.known.union(pair.id for pair in tally.pairs)
        purposes = sorted({trace.purpose for trace in learn})

        async def one(trace: Trace) -> Stored:
            made = Stored(full=True)
            if await self._store.room():
                made = await self.make(
                    trace, plan, writer=writer, known_ids=ids, others=purposes, shown=shown
                )
            self.made(trace, made)
            return made

        made: list[Stored] = []
        first = 0 if writer.heard else FIRST
        for part in (learn[:first], learn[first:]):
            made += await fan_out(one, part, limit=self._settings.concurrency)
            writer.settle()
        pairs = [pair for one in made for pair in one.pairs]
        tally.pairs += pairs
        tally.drops += [drop for one in made for drop in one.drops]
        tally.held += sum(one.held for one in made)
        tally.archived += await put_away(self._store, pairs)
        tally.left_out += sum(one.full for one in made)
        return pairs

    async def _tested(
        self, course: Course, steps: Sequence[Step], pairs: Sequence[ContrastPair], tally: Tally
    ) -> bool:
        """Test all pairs that wait and do not come from the held-out traces; say whether there was a test.

        A test that had ended when the calibration was stopped is taken as it ended.
        """
        ended = course.take([pair.id for pair in pairs])
        if ended is not None and ended.evidence is not None:
            tally.tests.append(await self._retold(course, steps, ended.unit_ids, ended.evidence))
            return True
        standing = await self.reviewer.standing()
        batch = standing.testable(course.parts.held_out)
        if not batch:
            tally.not_tested = tally.not_tested or no_batch(course.parts, tally)
            return False
        result = await self.test(batch, steps, standing=standing, name=course.parts.name)
        if isinstance(result, NotEnoughTraces):
            tally.not_tested = result.words
            return False
        tally.tests.append(result)
        course.known = course.known.union(result.pair_ids)
        course.promoted = (await self.reviewer.standing()).promoted
        return True

    async def _retold(
        self, course: Course, steps: Sequence[Step], pair_ids: Sequence[str], evidence: Promotion
    ) -> Promotion:
        """Score the sides of a test that is over, as it did, and go on from what it decided."""
        with_ = await load_pairs(self._store, {*pair_ids, *(pair.id for pair in course.promoted)})
        await self.reviewer.score(steps, course.promoted)
        await self.reviewer.score(steps, with_)
        self.tested(evidence, len(pair_ids), "promote")
        course.known = course.known.union(pair_ids)
        if evidence.promoted:
            course.promoted = with_
        return evidence


async def measures_of(scored: Sequence[Scored | None]) -> list[Measures]:
    """Return what scores measure, as a list; empty where nothing was scored."""
    found = await measured([one for one in scored if one is not None])
    return [] if found is None else [found]


def held(one: Submission) -> bool:
    """Whether a pair is in no test until somebody has looked at it, or ever."""
    return one.status == "rejected" or (one.status == "quarantined" and one.reason is not None)


async def put_away(store: CardStore, pairs: Sequence[ContrastPair]) -> int:
    """Return how many of the pairs the memory's bound has archived."""
    found = await store.pairs([pair.id for pair in pairs])
    return sum(one.status == "archived" and one.reason == "bound" for one in found)
