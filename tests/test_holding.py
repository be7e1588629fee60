"""Which traces are held out: by their ids or purposes, never one that was learned from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from calibration_memory import NOW
from reflact.calibration.replay import list_labeled_steps
from reflact.calibration.significance import is_level_used_up
from reflact.calibration.splits import (
    HoldoutRule,
    HoldoutSplit,
    TrainingHistory,
    deduplicate_traces,
    list_labeled_events,
    list_tested_marks,
    split_by_caller,
    split_by_rule,
)
from reflact.calibration.trace import Trace
from reflact.memory.cards import MIN_TRACES
from reflact.memory.models import Action, Evaluation, Label, LabelSource, Transition
from reflact.memory.protocols import BatchTest, count_tests

SLICES = 4


def trace(name: str, *sources: LabelSource | None, purpose: str = "Wait.") -> Trace:
    """Return a trace with a step for each source of gold, or for none."""
    made = Trace(purpose, id=name)
    for source in sources or ("program",):
        gold = None if source is None else Label(progress_before=0, progress_after=1, source=source)
        step = Transition(before=name, action=Action(name="wait"), after=f"{name} later")
        made.record(step, Evaluation(progress_before=0, progress_after=1, reasoning="r"), label=gold)
    return made


NAMES = [f"t{n}" for n in range(200)]
BY_TRACE = HoldoutRule(SLICES, "trace")
LEARNED = {name for name in NAMES if not BY_TRACE.is_held_out(name, "p")}


def test_only_gold_from_outside_counts() -> None:
    """Steps whose gold is the critic's own agreement, or missing, test nothing."""
    found = list_labeled_events(trace("t", "program", "agreement", None, "human"))
    assert [event.step for event in found] == [0, 3]


def copy_of(recording: Trace, name: str, steps: int) -> Trace:
    """Return the first steps of a trace under another name; only of the first it is known what is right."""
    made = Trace(recording.purpose, id=name)
    for event in recording.events[:steps]:
        made.record(event.transition, label=event.label if event.step == 0 else None)
    return made


def test_copies_of_a_recording_are_one_trace() -> None:
    """Of equal ones that counts of which most is known, whatever it is called; beginnings are parts."""
    whole, other = trace("whole", "program", "program", "human"), trace("other")
    copies = [copy_of(whole, name, steps) for name, steps in (("a", 3), ("b", 2), ("c", 1))]
    unknown = trace("unknown", None)
    assert deduplicate_traces([*copies, other, whole, unknown]) == (other, whole)
    assert deduplicate_traces([copies[0], copies[2]]) == (copies[0],)
    assert {step.trace_id for step in list_labeled_steps([*copies, whole])} == {"whole"}


def dealt(
    traces: Sequence[Trace],
    taught: Iterable[str] = (),
    *,
    tests: Sequence[BatchTest] = (),
    slices: HoldoutRule = BY_TRACE,
    most: int = 100,
) -> HoldoutSplit:
    """Return the parts of traces, of which some were learned from."""
    return split_by_rule(
        traces, training=TrainingHistory(frozenset(taught)), tests=tests, rule=slices, limit=most
    )


@given(st.sets(st.sampled_from(NAMES), max_size=60))
def test_parts_do_not_meet_and_do_not_depend_on_order(learned: set[str]) -> None:
    """No trace is in both parts, none that was learned from is held out, and order changes nothing."""
    traces = [trace(name) for name in NAMES[:120]]
    parts = dealt(traces, learned, most=50)
    held, learn = ({t.id for t in part} for part in (parts.held_out, parts.training))
    assert not held & learn
    assert not held & learned
    turned = dealt(list(reversed(traces)), learned, most=50)
    assert (turned.held_out, set(turned.training), turned.held_out_name) == (
        parts.held_out,
        set(parts.training),
        parts.held_out_name,
    )


def test_a_trace_keeps_its_part_while_others_come() -> None:
    """What was held out stays so when more traces are there, and what was learned from never is."""
    few = dealt([trace(n) for n in NAMES[:100]])
    learned = {t.id for t in few.training}
    more = dealt([trace(n) for n in NAMES], learned)
    assert {t.id for t in few.held_out} <= {t.id for t in more.held_out}
    assert learned <= {t.id for t in more.training}
    assert {t.id for t in more.training} == LEARNED


def test_at_most_so_many_are_scored() -> None:
    """The others of the slice are not learned from instead."""
    parts = dealt([trace(n) for n in NAMES], most=7)
    assert len(parts.held_out) == 7
    assert {t.id for t in parts.training} == LEARNED


def test_copies_of_a_recording_are_on_one_side() -> None:
    """Whatever they are called: none of what tests is learned from, in this call or an earlier one."""
    originals = [trace(name) for name in NAMES[:100]]
    copies = [copy_of(one, f"copy of {one.id}", 1) for one in originals]
    parts = dealt([*copies, *originals])
    held, learn = ({t.recording.fingerprint for t in part} for part in (parts.held_out, parts.training))
    assert not held & learn
    assert len(parts.held_out) == len(held) >= MIN_TRACES
    again = dealt([*copies, *originals], [one.id for one in copies])
    assert again.held_out == ()


def test_what_a_caller_holds_out_is_not_learned_from_as_a_copy() -> None:
    """A copy of a given held-out trace teaches nothing, and one of what taught tests nothing."""
    held, taught, other = trace("held"), trace("taught"), trace("other")
    copies = [copy_of(one, f"copy of {one.id}", 1) for one in (held, taught)]
    parts = split_by_caller(
        [other, taught, copies[0]], [held, copies[1]], training=TrainingHistory(frozenset({"taught"}))
    )
    assert parts.training == (other, taught)
    assert parts.held_out == (held,)


# ------------------------------------------------------------------------------------------- purposes


def of_purpose(purpose: int, run: int) -> Trace:
    """Return a run of a task."""
    return trace(f"run {run} of {purpose}", purpose=f"Purpose {purpose}.")


def test_a_purpose_is_on_one_side() -> None:
    """By purpose, no purpose that is learned from is tested on, now or after an earlier round."""
    traces = [of_purpose(n % 24, n) for n in range(240)]
    slices = HoldoutRule.choose(24, n_folds=SLICES, holdout_by=None)
    parts = dealt(traces, slices=slices)
    held, learn = ({t.purpose for t in part} for part in (parts.held_out, parts.training))
    assert len(parts.held_out) >= MIN_TRACES
    assert learn
    assert not held & learn
    assert parts.held_out_name.endswith(", by purpose")
    spoilt = next(iter(held))
    later = split_by_rule(
        traces, training=TrainingHistory(purposes=frozenset({spoilt})), tests=(), rule=slices, limit=100
    )
    assert spoilt not in {t.purpose for t in later.held_out}


def test_one_purpose_is_dealt_by_traces() -> None:
    """An agent with one aim has traces on both sides; which way is taken follows from the purposes alone."""
    assert HoldoutRule.choose(1, n_folds=SLICES, holdout_by=None) == BY_TRACE
    assert HoldoutRule.choose(2 * SLICES - 1, n_folds=SLICES, holdout_by=None) == BY_TRACE
    assert HoldoutRule.choose(2 * SLICES, n_folds=SLICES, holdout_by=None) == HoldoutRule(SLICES, "purpose")
    assert HoldoutRule.choose(1, n_folds=SLICES, holdout_by="purpose").holdout_by == "purpose"
    assert HoldoutRule.choose(99, n_folds=SLICES, holdout_by="trace") == BY_TRACE


# ------------------------------------------------------------------------------------- fresh traces


def a_test(traces: Sequence[Trace], name: str, before: Sequence[BatchTest] = ()) -> BatchTest:
    """Return the next test on traces."""
    return BatchTest(
        number=len(before) + 1,
        holdout_id=name,
        n_earlier_tests=count_tests(before, [t.recording for t in traces]),
        unit_ids=("u",),
        content_fingerprints=tuple(t.recording.fingerprint for t in traces),
        at=NOW,
    )


def use_up(traces: Sequence[Trace]) -> list[BatchTest]:
    """Return tests on traces, as many as use up their error probability."""
    tests: list[BatchTest] = []
    while not is_level_used_up(len(traces), len(tests)):
        tests.append(a_test(traces, BY_TRACE.held_out_name, tests))
    return tests


def test_the_same_traces_test_until_their_error_probability_is_used_up() -> None:
    """After that fresh traces test, if there are enough of them."""
    traces = [trace(name) for name in NAMES[:100]]
    first = dealt(traces, most=20).held_out
    assert len(first) == MIN_TRACES
    tests = use_up(first)
    assert dealt(traces, most=20, tests=tests[:-1]).held_out == first
    assert dealt(traces[:100], most=20, tests=tests).held_out == first
    fresh = dealt([*traces, *(trace(f"f{n}") for n in range(200))], most=20, tests=tests).held_out
    assert len(fresh) == MIN_TRACES
    assert {t.id for t in fresh}.isdisjoint(t.id for t in first)


def test_measuring_again_leaves_traces_fresh() -> None:
    """A test that can only take back does not count."""
    traces = [trace(name) for name in NAMES]
    again = a_test(traces, "given").model_copy(update={"kind": "demote"})
    assert list_tested_marks([again]) == frozenset()
    assert list_tested_marks([a_test(traces[:1], "given")]) == {traces[0].recording.fingerprint}
