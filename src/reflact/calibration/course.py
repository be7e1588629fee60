"""What a calibration began with, so that one which was stopped goes on as if it had not been.

A calibration is known by what it is given: the critic, the settings, the traces, the anchors. When it begins,
what then stood in the memory is stored: which pairs were known, which were promoted, which traces are held
out. A start that is given the same goes on from there: rounds are made as they were, which an effect store
pays for once, and tests that had ended are taken as they ended. Its tests need no record of their own: they
are its critic's on its held-out traces since it began that hold the pairs of its rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pydantic import JsonValue, ValidationError

from reflact.calibration.holding import Split
from reflact.calibration.replay import steps_of
from reflact.calibration.results import CalibrationReport
from reflact.calibration.reviewing import Standing
from reflact.calibration.settings import CalibratorSettings
from reflact.calibration.trace import Trace
from reflact.calibration_ports import StoredCalibration
from reflact.memory import ContrastPair
from reflact.memory_ports import BatchTest, CardStore
from reflact.prompts import PromptBook
from reflact.types import Frozen, digest

Stored = TypeVar("Stored", bound=Frozen)

PROMPTS = ("contrast", "judge", "other_purpose")
"""The prompts that a calibration asks with, beside the critic's own."""


class Baseline(Frozen):
    """What stood in the memory when a calibration began; traces are named by hashes of their ids.

    Args:
        known: The ids of pairs that are not made again.
        promoted: The ids of pairs that were promoted.
        last_test: The number of the last test, 0 where there was none.
        learn: Traces that are learned from.
        held_out: Traces that are held out.
        held_out_name: What these are called.
    """

    known: tuple[str, ...]
    promoted: tuple[str, ...]
    last_test: int
    learn: tuple[str, ...]
    held_out: tuple[str, ...]
    held_out_name: str


class Result(Frozen):
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
        return digest([*about, *sorted(pair.id for pair in self.anchors)])


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
        report: What came of it earlier, where nothing has changed since.
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
        """What it began with, where it has not come further."""
        return Baseline(
            known=tuple(sorted(self.known)),
            promoted=tuple(pair.id for pair in self.promoted),
            last_test=max((test.number for test in self.before), default=0),
            learn=_names(self.parts.learn),
            held_out=_names(self.parts.held_out),
            held_out_name=self.parts.name,
        )

    @property
    def resumed(self) -> bool:
        """Whether it was begun by an earlier start."""
        return self.number is not None

    def take(self, pair_ids: Collection[str]) -> BatchTest | None:
        """Return how the test of a round ended before the calibration was stopped; None where it did not.

        Args:
            pair_ids: The pairs of the round.
        """
        first, self.ended = self.ended[:1], self.ended[1:]
        for test in first:
            if not pair_ids or not set(pair_ids).isdisjoint(test.unit_ids):
                return test
        self.ended = ()
        return None


async def opened(
    given: Given,
    identity: str,
    split: Split,
    *,
    standing: Standing,
    store: CardStore,
    last: StoredCalibration | None,
) -> Course:
    """Return the course of a calibration: a new one, or that of the last one that was given the same.

    Args:
        given: What it is given.
        identity: What it is known by; see ``Given.identity``.
        split: What a new one would learn from and hold out.
        standing: Where the memory's pairs stand now.
        store: Where pairs are.
        last: The last calibration that was given the same.
    """
    course = Course(identity, split, standing.known, standing.promoted, standing.tests)
    if last is None:
        return course
    if last.result is not None:
        result = _read(Result, last.result)
        if result is not None and result.standing == hash_of(standing):
            course.report = result.report
        return course
    baseline = _read(Baseline, last.baseline)
    wanted = set() if baseline is None else set(baseline.promoted)
    promoted = await stored(store, wanted) if wanted else ()
    if baseline is None or len(promoted) < len(wanted):
        return course
    parts = _parts(baseline, [*given.traces, *(given.heldout or ())])
    return Course(
        identity,
        parts,
        frozenset(baseline.known),
        promoted,
        before=tuple(test for test in standing.tests if test.number <= baseline.last_test),
        ended=_ended(standing.tests, baseline, parts, critic=given.critic),
        number=last.number,
    )


async def stored(store: CardStore, pair_ids: Collection[str]) -> tuple[ContrastPair, ...]:
    """Return those of the pairs that the store has, by id."""
    found = {one.pair.id: one.pair for one in await store.pairs(sorted(pair_ids))}
    return tuple(found[pair_id] for pair_id in sorted(pair_ids) if pair_id in found)


def hash_of(standing: Standing) -> str:
    """Return a hash of what decides whether a calibration that is over would find anything new."""
    promoted = sorted(pair.id for pair in standing.promoted)
    return digest([*promoted, "waiting", *sorted(one.pair.id for one in standing.waiting)])


def _ended(
    tests: Iterable[BatchTest], baseline: Baseline, parts: Split, *, critic: str
) -> tuple[BatchTest, ...]:
    """Return a critic's tests on held-out traces of a calibration since it began, as far as they are over."""
    held_out = tuple(sorted({step.trace.mark for step in steps_of(parts.held_out)}))
    return tuple(
        test
        for test in tests
        if test.number > baseline.last_test
        and test.use == "promote"
        and test.evidence is not None
        and test.evidence.critic == critic
        and test.held_out == baseline.held_out_name
        and test.traces == held_out
    )


def _parts(baseline: Baseline, traces: Iterable[Trace]) -> Split:
    by_name = {_name(trace): trace for trace in traces}
    learn, held_out = (
        tuple(by_name[name] for name in names) for names in (baseline.learn, baseline.held_out)
    )
    return Split(learn=learn, held_out=held_out, name=baseline.held_out_name)


def _names(traces: Iterable[Trace]) -> tuple[str, ...]:
    return tuple(map(_name, traces))


def _name(trace: Trace) -> str:
    return digest(trace.id)


def _contents(traces: Iterable[Trace]) -> str:
    """Return a hash of what traces hold, in whatever order they come."""
    hashes = sorted(
        digest([trace.id, trace.purpose, *(event.model_dump(mode="json") for event in trace.events)])
        for trace in traces
    )
    return digest(list[JsonValue](hashes))


def _read(kind: type[Stored], text: str) -> Stored | None:
    """Return a stored value; None where another version wrote it otherwise: then nothing rests on it."""
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None
