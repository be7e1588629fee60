"""What a calibration began with, so that one that was stopped goes on as if it had not been.

A calibration is known by what it is given: the critic, the settings, the traces, the anchors. When it begins,
the pairs that are known and promoted then are stored. A start that is given the same repeats everything from
there: stored replies of models cost nothing, and tests that had ended count as they ended. What is held out
follows from the traces alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pydantic import JsonValue, ValidationError

from reflact.calibration.config import CalibratorSettings
from reflact.calibration.contrast import selected
from reflact.calibration.holding import GIVEN, Slices, Split, distinct, known, split, split_given
from reflact.calibration.metrics import Measures
from reflact.calibration.mistakes import ContrastSettings, Drop, Made
from reflact.calibration.results import CalibrationReport
from reflact.calibration.review import enough
from reflact.calibration.reviewing import Standing
from reflact.calibration.trace import Trace
from reflact.calibration_ports import StoredCalibration
from reflact.memory import ContrastPair, Origin, Promotion, ScoreEvent
from reflact.memory_cards import LEAST_TRACES, Anchored
from reflact.memory_ports import BatchTest, CardStore, count_tests
from reflact.prompts import PromptBook
from reflact.types import FrozenModel, digest_json

Value = TypeVar("Value", bound=FrozenModel)

PROMPTS = ("contrast", "judge", "other_purpose")
"""The prompts that a calibration asks with, beside the critic's own."""


class Baseline(FrozenModel):
    """What stood in the memory when a calibration began.

    Args:
        known: The ids of pairs that are not made again.
        promoted: The ids of pairs that were promoted.
        last_test: The number of the last test, 0 if there was none.
    """

    known: tuple[str, ...]
    promoted: tuple[str, ...]
    last_test: int


class Result(FrozenModel):
    """What came of a calibration, and a hash of what stood in the memory at its end."""

    report: CalibrationReport
    standing: str


class Given(NamedTuple):
    """What a calibration is given; it is known by it."""

    traces: Sequence[Trace]
    heldout: Sequence[Trace] | None
    anchors: Sequence[ContrastPair]
    critic: str
    llm: str
    settings: CalibratorSettings
    prompts: PromptBook

    @property
    def identity(self) -> str:
        """A hash of all of it; how many calls are in flight makes no difference."""
        settings = self.settings.model_dump(
            mode="json",
            include={"contrast", "curriculum", "slices", "slices_by", "most_held_out"},
            exclude={"contrast": {"concurrency"}},
        )
        sums = {name: one.checksum for name, one in self.prompts.prompts.items() if name in PROMPTS}
        held = None if self.heldout is None else _contents(self.heldout)
        about: list[JsonValue] = [self.critic, self.llm, settings, dict(sums), _contents(self.traces), held]
        return digest_json([*about, *sorted(pair.id for pair in self.anchors)])

    def split(self, standing: Standing, tests: Sequence[BatchTest]) -> Split:
        """Return what is learned from and what is held out; the rule's choice if the caller made none."""
        if self.heldout is not None:
            return split_given(self.traces, self.heldout, taught=standing.taught)
        settings = self.settings
        purposes = len({trace.purpose for trace in self.traces})
        slices = Slices.of(purposes, total=settings.slices, by=settings.slices_by)
        taught = standing.taught
        return split(self.traces, taught=taught, tests=tests, slices=slices, most=settings.most_held_out)


@dataclass
class Course:
    """A calibration from its beginning to its end.

    Args:
        identity: What it is known by.
        parts: What is learned from and what is held out.
        known: Pairs that were known when it began.
        promoted: What is promoted, as far as it has come; by id.
        before: The tests that were there when it began.
        ended: Its tests that had ended when it was stopped, and are not taken yet.
        number: Its number in the store; None while it is not begun.
        report: What came of it earlier, if nothing has changed since.
    """

    identity: str
    parts: Split
    known: frozenset[str]
    promoted: tuple[ContrastPair, ...]
    before: tuple[BatchTest, ...]
    ended: tuple[BatchTest, ...] = ()
    number: int | None = None
    report: CalibrationReport | None = None

    @property
    def baseline(self) -> Baseline:
        """What it began with, if it has not come further."""
        return Baseline(
            known=tuple(sorted(self.known)),
            promoted=tuple(pair.id for pair in self.promoted),
            last_test=max((test.number for test in self.before), default=0),
        )

    @property
    def resumed(self) -> bool:
        """Whether it was begun by an earlier start."""
        return self.number is not None

    @property
    def tests_before(self) -> int:
        """How many batches were tested on its held-out traces before it began."""
        return count_tests(self.before, [trace.recording for trace in self.parts.held_out])

    def take(self, pair_ids: Collection[str]) -> BatchTest | None:
        """Return how the test of a round ended before the calibration was stopped; None if it did not.

        Args:
            pair_ids: The pairs of the round.
        """
        first, self.ended = self.ended[:1], self.ended[1:]
        for test in first:
            if not pair_ids or not set(pair_ids).isdisjoint(test.unit_ids):
                return test
        self.ended = ()
        return None


async def open_course(
    given: Given, identity: str, last: StoredCalibration | None, *, standing: Standing, store: CardStore
) -> Course:
    """Return the course of a calibration: a new one, or that of the last one that was given the same.

    Args:
        given: What it is given.
        identity: What it is known by; see ``Given.identity``.
        last: The last calibration that was given the same.
        standing: What is in the memory now.
        store: Where pairs are.
    """
    if last is not None and last.result is None:
        baseline = _read(Baseline, last.baseline)
        promoted = () if baseline is None else await load_pairs(store, baseline.promoted)
        if baseline is not None and len(promoted) == len(baseline.promoted):
            before = tuple(test for test in standing.tests if test.number <= baseline.last_test)
            parts = given.split(standing, before)
            ended = _ended(standing.tests[len(before) :], parts, critic=given.critic)
            known_ids = frozenset(baseline.known)
            return Course(identity, parts, known_ids, promoted, before, ended=ended, number=last.number)
    parts = given.split(standing, standing.tests)
    course = Course(identity, parts, standing.known, standing.promoted, standing.tests)
    result = None if last is None or last.result is None else _read(Result, last.result)
    if result is not None and result.standing == hash_of(standing):
        course.report = result.report
    return course


async def load_pairs(store: CardStore, pair_ids: Collection[str]) -> tuple[ContrastPair, ...]:
    """Return those of the pairs that the store has, by id."""
    if not pair_ids:
        return ()
    found = {one.pair.id: one.pair for one in await store.pairs(sorted(pair_ids))}
    return tuple(found[pair_id] for pair_id in sorted(pair_ids) if pair_id in found)


def hash_of(standing: Standing) -> str:
    """Return a hash of what decides whether a calibration that is over would find anything new."""
    promoted = sorted(pair.id for pair in standing.promoted)
    return digest_json([*promoted, "waiting", *sorted(one.pair.id for one in standing.waiting)])


def _ended(tests: Iterable[BatchTest], parts: Split, *, critic: str) -> tuple[BatchTest, ...]:
    """Return a critic's tests on the held-out traces of a calibration, as far as they are over."""
    held_out = tuple(sorted({trace.recording.mark for trace in distinct(parts.held_out)}))
    return tuple(
        test
        for test in tests
        if test.use == "promote"
        and test.evidence is not None
        and test.evidence.critic == critic
        and test.held_out == parts.name
        and test.traces == held_out
    )


def _contents(traces: Iterable[Trace]) -> str:
    """Return a hash of what traces hold, in whatever order they come."""
    hashes = sorted(
        digest_json([trace.id, trace.purpose, *(event.model_dump(mode="json") for event in trace.events)])
        for trace in traces
    )
    return digest_json(list[JsonValue](hashes))


def _read(kind: type[Value], text: str) -> Value | None:
    """Return a stored value; None if another version wrote it otherwise: then nothing rests on it."""
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None


class Stored(Made):
    """What became of a trace's candidates.

    Args:
        held: Kept pairs that the scan holds back.
        new: Kept pairs that are new.
        full: Nothing was made, since the memory has no room for a pair.
    """

    held: int = 0
    new: int = 0
    full: bool = False


@dataclass
class Tally:
    """What the rounds of one call made."""

    rounds: int = 0
    pairs: list[ContrastPair] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    held: int = 0
    archived: int = 0
    left_out: int = 0
    tests: list[Promotion] = field(default_factory=list)
    not_tested: str | None = None
    by_round: list[Measures] = field(default_factory=list)


# ------------------------------------------------------------------------------------- what is missing


def find_missing(course: Course, given: Given, standing: Standing) -> str | None:
    """Return in a sentence what is missing for a test, and how to come by it; None if nothing is. Pure."""
    parts, traces = course.parts, given.traces if given.heldout is None else given.heldout
    testing = distinct(parts.held_out)
    few = enough(testing, before=course.tests_before)
    if few is None:
        taught = standing.testable(parts.held_out)
        return None if taught else _nothing_taught(parts, Anchored.of(given.anchors), given.settings.contrast)
    if few.tested:
        return few.words
    missing = LEAST_TRACES - len(testing)
    bare = sum(not known(trace) for trace in traces)
    spoilt = sum(trace.id in standing.learned for trace in traces if known(trace))
    beside = f" beside {bare} without a gold score" if bare and parts.name == GIVEN else ""
    words = (
        f"{len(testing)} held-out traces have steps with a gold score{beside}; a batch is tested on at least "
        f"{LEAST_TRACES}, so {missing} more {'is' if missing == 1 else 'are'} missing: "
    )
    if parts.name == GIVEN:
        learned = f", since pairs were made from {spoilt} of these earlier" if spoilt else ""
        return f"{words}hold out more traces with gold{learned}"
    usable = sum(trace.id not in standing.learned for trace in distinct(traces))
    slices = given.settings.slices
    return (
        f"{words}one slice of {slices} tests, and of {_counted(len(traces))} {usable} have gold and were not "
        f"learned from; label or record about {missing * slices} more with gold, set a smaller "
        f"calibrator.slices, or name {LEAST_TRACES} traces that are to be held out as `heldout`"
    )


def _nothing_taught(parts: Split, anchored: Anchored, settings: ContrastSettings) -> str | None:
    if not parts.learn:
        return (
            "there is no trace to learn from: all that were given are held out; pass others, or more of them"
        )
    events = sum(len(trace.events) for trace in parts.learn)
    free = [free_events(trace, anchored) for trace in parts.learn]
    if any(selected(each, settings) for each in free):
        return None
    about = f"none of {events} steps of {_counted(len(parts.learn))} to learn from teaches anything"
    if not any(free):
        return (
            f"{about}: all of them are of anchors' traces, or show what an anchor scores; learn from "
            "other traces, or take other anchors"
        )
    still = "" if settings.include_no_change else ", and contrast.include_no_change is false"
    return (
        f"{about}: no score moves by contrast.min_delta {settings.min_delta:g}{still}; record "
        "traces whose steps get somewhere, or set a smaller contrast.min_delta"
    )


def free_events(trace: Trace, anchored: Anchored) -> list[ScoreEvent]:
    """Return the steps of a trace that are no anchors; anchors teach nothing."""
    return [
        event
        for event in trace.events
        if not anchored.holds(trace.purpose, event.transition, Origin(trace_id=trace.id, step=event.step))
    ]


def _counted(traces: int) -> str:
    return "1 trace" if traces == 1 else f"{traces} traces"


def no_batch(parts: Split, tally: Tally) -> str:
    """Return in a sentence why there is nothing to test."""
    if not parts.learn:
        return (
            "there was no trace to learn from: all that were given are held out; pass others, or more of them"
        )
    if not tally.pairs and tally.left_out:
        return (
            f"the memory is full, so that nothing was made of {tally.left_out} traces: reject pairs that are "
            "not needed, or open it with larger active_cards"
        )
    if not tally.pairs:
        return f"none of {len(tally.drops)} candidates became a pair: the drops say why"
    if tally.held == len(tally.pairs):
        return f"the scan holds back all {tally.held} pairs: look at them, and release those that are sound"
    if tally.archived and tally.held + tally.archived == len(tally.pairs):
        return (
            f"the memory is full, and its bound put {tally.archived} of {len(tally.pairs)} pairs away at "
            "once: reject pairs that are not needed, or open it with larger active_cards"
        )
    return "all pairs were tested before, or wait for somebody to look at them"
