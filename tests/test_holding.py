"""Which traces are held out: by their ids, one slice at a time, never one that was learned from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from calibration_memory import NOW
from reflact.calibration.holding import ROTATE, distinct, held_slice, known, slice_name, split
from reflact.calibration.replay import steps_of
from reflact.calibration.review import slice_of
from reflact.calibration.trace import Trace
from reflact.memory import Action, Evaluation, Gold, GoldSource, Transition
from reflact.memory_cards import LEAST_TRACES
from reflact.memory_ports import BatchTest

SLICES = 4


def trace(name: str, *sources: GoldSource | None) -> Trace:
    """Return a trace with a step for each source of gold, or for none."""
    made = Trace("Wait.", id=name)
    for source in sources or ("program",):
        gold = None if source is None else Gold(phi_before=0, phi_after=1, source=source)
        step = Transition(before=name, action=Action(name="wait"), after=f"{name} later")
        made.record(step, Evaluation(phi_before=0, phi_after=1, reasoning="r"), gold=gold)
    return made


def booked(number: int, count: int) -> list[BatchTest]:
    """Return tests on a slice."""
    name = slice_name(number, SLICES)
    return [BatchTest(number=n + 1, held_out=name, before=n, unit_ids=("u",), at=NOW) for n in range(count)]


NAMES = [f"t{n}" for n in range(200)]
BY_SLICE = [[name for name in NAMES if slice_of(name, slices=SLICES) == number] for number in range(SLICES)]


def test_only_gold_from_outside_counts() -> None:
    """Steps whose gold is the critic's own agreement, or missing, test nothing."""
    found = known(trace("t", "program", "agreement", None, "human"))
    assert [event.step for event in found] == [0, 3]


def copy_of(recording: Trace, name: str, steps: int) -> Trace:
    """Return the first steps of a trace under another name; only of the first it is known what is right."""
    made = Trace(recording.purpose, id=name)
    for event in recording.events[:steps]:
        made.record(event.transition, gold=event.gold if event.step == 0 else None)
    return made


def test_copies_of_a_recording_are_one_trace() -> None:
    """Of equal ones that counts of which most is known, whatever it is called; beginnings are parts."""
    whole, other = trace("whole", "program", "program", "human"), trace("other")
    copies = [copy_of(whole, name, steps) for name, steps in (("a", 3), ("b", 2), ("c", 1))]
    unknown = trace("unknown", None)
    assert distinct([*copies, other, whole, unknown]) == (other, whole)
    assert distinct([copies[0], copies[2]]) == (copies[0],)
    assert {step.trace_id for step in steps_of([*copies, whole])} == {"whole"}


@given(st.sets(st.sampled_from(NAMES), max_size=60))
def test_parts_do_not_meet_and_do_not_depend_on_order(learned: set[str]) -> None:
    """No trace is in both parts, none that was learned from is held out, and order changes nothing."""
    traces = [trace(name) for name in NAMES[:120]]
    parts = split(traces, learned=learned, tests=(), slices=SLICES, most=50)
    held, learn = ({t.id for t in part} for part in (parts.held_out, parts.learn))
    assert not held & learn
    assert not held & learned
    turned = split(list(reversed(traces)), learned=learned, tests=(), slices=SLICES, most=50)
    assert (turned.held_out, set(turned.learn), turned.name) == (parts.held_out, set(parts.learn), parts.name)


def test_a_trace_keeps_its_part_while_others_come() -> None:
    """What was held out stays so when more traces are there, and what was learned from never is."""
    few = split([trace(n) for n in NAMES[:100]], learned=(), tests=(), slices=SLICES, most=100)
    more = split([trace(n) for n in NAMES], learned=(), tests=(), slices=SLICES, most=100)
    assert {t.id for t in few.held_out} <= {t.id for t in more.held_out}
    assert {t.id for t in few.learn} <= {t.id for t in more.learn}


def test_the_next_slice_is_held_out_after_enough_tests() -> None:
    """Slices take turns once batches were tested on one, as far as the next has traces that are unspoilt."""
    first = held_slice(NAMES, learned=(), tests=(), slices=SLICES)
    assert first == held_slice(NAMES, learned=(), tests=booked(first, ROTATE - 1), slices=SLICES)
    after = held_slice(NAMES, learned=(), tests=booked(first, ROTATE), slices=SLICES)
    assert after != first


def test_a_slice_that_was_learned_from_is_passed_over() -> None:
    """Without twenty unspoilt traces in another slice the same one stays, at lower and lower levels."""
    spoilt = [name for number in range(1, SLICES) for name in BY_SLICE[number]]
    assert all(len(names) >= LEAST_TRACES for names in BY_SLICE)
    assert held_slice(NAMES, learned=spoilt, tests=booked(0, 3 * ROTATE), slices=SLICES) == 0
    assert held_slice(NAMES, learned=BY_SLICE[0], tests=(), slices=SLICES) == 1


def test_at_most_so_many_are_scored() -> None:
    """The most held-out traces are the first by name; the others are not learned from instead."""
    parts = split([trace(n) for n in NAMES], learned=(), tests=(), slices=SLICES, most=7)
    assert len(parts.held_out) == 7
    assert {t.id for t in parts.learn} == set(NAMES) - set(BY_SLICE[0])
