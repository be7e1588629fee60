"""What a calibration lacks to come to a test is said before anything is asked, with the exact remedy."""

from __future__ import annotations

import pytest

from calibration_memory import ListMemory
from flattered_world import flattered
from reflact import Calibrator, Trace
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.significance import is_level_used_up
from reflact.errors import DataError
from reflact.memory.models import Action, ContrastPair, Evaluation, Provenance, Transition
from test_cost_estimate import traces

pytestmark = pytest.mark.anyio


def settings(**contrast: object) -> CalibratorSettings:
    """Return settings without judges."""
    return CalibratorSettings(
        contrast=PairSettings.model_validate({"n_judges": 0, "candidates_per_event": 1, **contrast})
    )


def still(name: str) -> Trace:
    """Return a trace in which nothing gets anywhere."""
    trace = Trace("Count to ten", id=name)
    trace.record(Transition(before="0", action=Action(name="wait"), after="0"))
    return trace


@pytest.mark.parametrize(
    ("learn", "held_out", "how", "words"),
    [
        (2, traces("h", 19), {}, "19 held-out traces have steps with a gold score; .* so 1 more is missing"),
        (2, traces("h", 12), {}, "so 8 more are missing: hold out more traces with gold"),
        (
            2,
            traces("h", 15) + traces("u", 3, gold=False),
            {},
            "15 held-out traces .* beside 3 without a gold score; .* so 5 more",
        ),
        (0, traces("h", 20), {}, "no trace to learn from"),
    ],
    ids=["one", "eight", "some without gold", "nothing to learn from"],
)
async def test_what_is_missing_is_said_and_nothing_is_asked(
    learn: int, held_out: list[Trace], how: dict[str, object], words: str
) -> None:
    """The error names the count that is missing and what to do; no call is made and no event is told."""
    llm, told = flattered(), list[object]()
    calibrator = Calibrator(llm, ListMemory(), settings=settings(**how), on_event=told.append)
    with pytest.raises(DataError, match=words):
        await calibrator.calibrate(traces("learn", learn), heldout=held_out)
    assert (llm.calls, told) == ([], [])
    estimate = await calibrator.estimate_cost(traces("learn", learn), heldout=held_out)
    assert estimate.missing_reason is not None


async def test_it_is_said_how_many_more_traces_the_rule_takes() -> None:
    """If one slice of the traces is too small, the error names how many to label or record."""
    calibrator = Calibrator(flattered(), ListMemory(), settings=settings())
    with pytest.raises(DataError, match=r"of 8 traces 8 have gold .* record about \d+ more with gold"):
        await calibrator.calibrate(traces("any", 8))
    with pytest.raises(DataError, match=r"0 held-out traces .* so 20 more are missing: .* 0 have gold"):
        await calibrator.calibrate(traces("any", 60, gold=False))


async def test_fresh_traces_are_asked_for_when_the_error_probability_is_used_up() -> None:
    """If 20 traces cannot reach the level of the next test, nothing is asked; fresh ones can."""
    memory, held_out = ListMemory(), traces("h", 20)
    while not is_level_used_up(20, len(memory.booked)):
        await memory.open_test([], holdout_id="caller", traces=[one.recording for one in held_out])
    llm = flattered()
    calibrator = Calibrator(llm, memory, settings=settings())
    with pytest.raises(DataError, match=r"of the 20 held-out traces is used up: 126 batches .* fresh traces"):
        await calibrator.calibrate(traces("learn", 4), heldout=held_out)
    assert llm.calls == []
    report = await calibrator.calibrate(traces("learn", 4), heldout=traces("fresh", 20))
    assert report.tests[0].n_earlier_tests == 0


async def test_steps_that_teach_nothing_are_told() -> None:
    """Traces in which nothing moves, or all steps are anchors, are not paid for."""
    held_out = traces("h", 20)
    calibrator = Calibrator(flattered(), ListMemory(), settings=settings(include_no_change=False))
    with pytest.raises(DataError, match=r"none of 2 steps of 2 traces .* set a smaller contrast.min_delta"):
        await calibrator.calibrate([still("a"), still("b")], heldout=held_out)
    memory, one = ListMemory(), still("a")
    said = Evaluation(progress_before=0, progress_after=0, reasoning="Nothing happened.")
    memory.kept = (
        ContrastPair(
            purpose=one.purpose,
            transition=one.events[0].transition,
            right=said,
            wrong=said.model_copy(update={"progress_after": 9.0}),
            reason="Nothing happened.",
            mistake="inflated_score",
            construction="written",
            label_source="human",
            provenance=Provenance(trace_id="a", step=0),
        ),
    )
    with pytest.raises(DataError, match=r"none of 1 steps of 1 trace .* all of them are of anchors' traces"):
        await Calibrator(flattered(), memory, settings=settings()).calibrate([one], heldout=held_out)


async def test_pairs_that_wait_can_be_tested_without_a_trace_to_learn_from() -> None:
    """What was made earlier for want of held-out traces is tested once there are enough of them."""
    memory, learn = ListMemory(), traces("learn", 4)
    calibrator = Calibrator(flattered(), memory, settings=settings())
    first = await calibrator.calibrate(learn, heldout=traces("h", 19), allow_untested=True)
    assert (first.tests, len(memory.stored)) == ((), sum(kind.n_pairs for kind in first.pairs))
    second = await calibrator.calibrate([], heldout=traces("h", 20))
    assert [test.outcome for test in second.tests] == ["better"]
