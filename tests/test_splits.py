"""Which traces are held out: by their ids or purposes, never one that was learned from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration_memory import ListMemory
from flattered_world import flattered, flattered_traces
from reflact import Calibrator, Trace
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.labeled_steps import list_labeled_steps
from reflact.calibration.splits import (
    HoldoutRule,
    HoldoutSplit,
    TrainingHistory,
    deduplicate_traces,
    split_by_caller,
    split_by_rule,
)
from reflact.errors import DataError
from reflact.memory.cards import MIN_TRACES
from reflact.memory.models import Action, Evaluation, Label, LabelSource, Transition

SLICES = 4


def trace(name: str, *sources: LabelSource | None, purpose: str = "Wait.") -> Trace:
    made = Trace(purpose, id=name)
    for source in sources or ("program",):
        gold = None if source is None else Label(progress_before=0, progress_after=1, source=source)
        step = Transition(before=name, action=Action(name="wait"), after=f"{name} later")
        made.record(step, Evaluation(progress_before=0, progress_after=1, reasoning="r"), label=gold)
    return made


NAMES = [f"t{n}" for n in range(200)]
BY_TRACE = HoldoutRule(SLICES, "trace")


def copy_of(recording: Trace, name: str) -> Trace:
    made = Trace(recording.purpose, id=name)
    for event in recording.events:
        made.record(event.transition, label=event.label if event.step == 0 else None)
    return made


def test_copies_of_a_recording_are_one_trace() -> None:
    """Of equal ones that counts of which most is known, whatever it is called."""
    whole, other = trace("whole", "program", "program", "human"), trace("other")
    copies = [copy_of(whole, "a"), copy_of(whole, "b")]
    unknown = trace("unknown", None)
    assert deduplicate_traces([*copies, other, whole, unknown]) == (other, whole)
    assert deduplicate_traces(copies) == (copies[0],)
    assert {step.trace_id for step in list_labeled_steps([*copies, whole])} == {"whole"}


def dealt(
    traces: Sequence[Trace], taught: Iterable[str] = (), *, rule: HoldoutRule = BY_TRACE, **more: Any
) -> HoldoutSplit:
    options = {"training": TrainingHistory(frozenset(taught)), "limit": 100} | more
    return split_by_rule(traces, rule=rule, **options)


def ids(traces: Iterable[Trace]) -> set[str]:
    return {trace.id for trace in traces}


@given(st.sets(st.sampled_from(NAMES), max_size=60))
def test_parts_do_not_meet_and_do_not_depend_on_order(learned: set[str]) -> None:
    traces = [trace(name) for name in NAMES[:120]]
    parts = dealt(traces, learned, limit=50)
    assert not ids(parts.held_out) & ids(parts.training)
    assert not ids(parts.held_out) & learned
    turned = dealt(traces[::-1], learned, limit=50)
    assert turned.held_out == parts.held_out
    assert set(turned.training) == set(parts.training)


def test_copies_of_a_recording_are_on_one_side() -> None:
    originals = [trace(name) for name in NAMES[:100]]
    copies = [copy_of(one, f"copy of {one.id}") for one in originals]
    parts = dealt([*copies, *originals])
    held, learn = ({t.recording.fingerprint for t in part} for part in (parts.held_out, parts.training))
    assert not held & learn
    assert len(parts.held_out) == len(held) >= MIN_TRACES
    again = dealt([*copies, *originals], [one.id for one in copies])
    assert again.held_out == ()


def test_what_a_caller_holds_out_is_not_learned_from_as_a_copy() -> None:
    held, taught, other = trace("held"), trace("taught"), trace("other")
    copies = [copy_of(one, f"copy of {one.id}") for one in (held, taught)]
    parts = split_by_caller(
        [other, taught, copies[0]], [held, copies[1]], training=TrainingHistory(frozenset({"taught"}))
    )
    assert parts.training == (other, taught)
    assert parts.held_out == (held,)


def of_purpose(purpose: int, run: int) -> Trace:
    return trace(f"run {run} of {purpose}", purpose=f"Purpose {purpose}.")


def test_a_purpose_is_on_one_side() -> None:
    traces = [of_purpose(n % 24, n) for n in range(240)]
    slices = HoldoutRule.choose(24, n_folds=SLICES, holdout_by=None)
    parts = dealt(traces, rule=slices)
    held, learn = ({t.purpose for t in part} for part in (parts.held_out, parts.training))
    assert len(parts.held_out) >= MIN_TRACES
    assert learn
    assert not held & learn
    spoilt = next(iter(held))
    later = dealt(traces, rule=slices, training=TrainingHistory(purposes=frozenset({spoilt})))
    assert spoilt not in {t.purpose for t in later.held_out}


SETTINGS = CalibratorSettings(max_asked=0, pairs_per_step=1)


TWO = flattered_traces("learn", 2)


@pytest.mark.parametrize(
    ("learn", "held_out", "words"),
    [
        (TWO, flattered_traces("h", 19), "19 held-out traces have labelled steps, and a test needs 20"),
        (TWO, flattered_traces("h", 15) + flattered_traces("u", 3, gold=False), "15 held-out traces"),
        ([], flattered_traces("h", 20), "no trace to learn from"),
        (flattered_traces("any", 60, gold=False), None, "0 held-out traces"),
    ],
    ids=["one", "some without gold", "nothing to learn from", "no labels"],
)
async def test_what_is_missing_is_said_and_nothing_is_asked(
    learn: list[Trace], held_out: list[Trace] | None, words: str
) -> None:
    llm, told = flattered(), list[object]()
    calibrator = Calibrator(llm, ListMemory(), settings=SETTINGS, on_event=told.append)
    with pytest.raises(DataError, match=words):
        await calibrator.calibrate(learn, heldout=held_out)
    assert (llm.calls, told) == ([], [])
    estimate = await calibrator.estimate_cost(learn, heldout=held_out)
    assert estimate.missing_reason is not None


async def test_fresh_traces_are_asked_for_when_the_error_probability_is_used_up() -> None:
    memory, held_out = ListMemory(), flattered_traces("h", 20)
    for _ in range(126):
        await memory.open_test([], traces=[one.recording for one in held_out])
    llm = flattered()
    calibrator = Calibrator(llm, memory, settings=SETTINGS)
    with pytest.raises(
        DataError, match=r"of the 20 held-out traces is used up by 126 tests: .* fresh traces"
    ):
        await calibrator.calibrate(flattered_traces("learn", 4), heldout=held_out)
    assert llm.calls == []
    report = await calibrator.calibrate(flattered_traces("learn", 4), heldout=flattered_traces("fresh", 20))
    assert report.tests[0].n_earlier_tests == 0
