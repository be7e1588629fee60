"""What a calibration will take, said before anything is asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest

from calibration_memory import ListMemory
from flattered_world import PURPOSE, answer, steps
from reflact import Calibrator, Critic, Trace
from reflact.calibration.curriculum import CurriculumSettings
from reflact.calibration.forecast import Asking, CalibrationForecast
from reflact.calibration.settings import CalibratorSettings, PairSettings
from reflact.calls import Rendered, ReplyModel, Sample
from reflact.errors import ReplyError
from reflact.estimates import Row
from reflact.memory import ContrastPair, Evaluation, Provenance
from reflact.results import Spend, Usage
from reflact.testing import ScriptedLLM
from reflact.testing.llm import Answer, Call, Script

pytestmark = pytest.mark.anyio

CLAIMS = [n * 59 % 100 < 59 for n in range(200)]
KINDS = {
    "held-out steps": "score",
    "anchors": "score",
    "tests of batches": "score",
    "weakest kinds": "score",
    "agreement": "score",
    "another purpose": "score",
    "mistakes": "mistake",
    "other purposes": "other_purpose",
    "comparisons": "compare",
}


def trace(name: str, number: int, *, gold: bool = True, purpose: str = PURPOSE) -> Trace:
    """Return a trace of two steps whose critic was flattered wherever it claims success."""
    claims = CLAIMS[2 * number : 2 * number + 2]
    made = Trace(purpose, id=f"{name} {number}")
    for place, (step, right) in enumerate(steps(made.id, number, count=2, claims=claims)):
        said = Evaluation(
            phi_before=right.phi_before,
            phi_after=min(10.0, right.phi_after + 3 * claims[place]),
            reasoning="The agent says that all is finished.",
            evidence=("filed",),
        )
        made.record(step, said, gold=right if gold else None)
    return made


def traces(name: str, number: int, *, gold: bool = True) -> list[Trace]:
    """Return several of them."""
    return [trace(name, n, gold=gold) for n in range(number)]


def settings(
    *, judges: int = 0, rounds: int = 1, patience: int = 1, per_event: int = 2
) -> CalibratorSettings:
    """Return settings of a calibration."""
    return CalibratorSettings(
        contrast=PairSettings(judges=judges, per_event=per_event),
        curriculum=CurriculumSettings(rounds=rounds, patience=patience),
    )


def obliging(prompt: Rendered, reply_type: type[ReplyModel], sample: Sample) -> Answer:
    """Play the flattered model."""
    return answer(prompt, reply_type)


def different(calls: list[Call]) -> Counter[str]:
    """Return what a store of calls would pay for, by purpose."""
    asked = {json.dumps([c.sample.purpose, c.sample.label, str(c.prompt.messages)]) for c in calls}
    return Counter(json.loads(one)[0] for one in asked)


def by_kind(foreseen: CalibrationForecast, bound: str) -> Counter[str]:
    """Return the calls of a forecast by what their samples call them."""
    found: Counter[str] = Counter()
    for row in foreseen.rows:
        found[KINDS[row.purpose]] += getattr(row.calls, bound)
    return found


async def taken(
    how: CalibratorSettings, learn: list[Trace], held_out: list[Trace], script: Script = obliging
) -> tuple[CalibrationForecast, list[Call]]:
    """Return what was foreseen of a calibration, and what it asked."""
    llm = ScriptedLLM(script)
    calibrator = Calibrator(llm, ListMemory(), settings=how)
    foreseen = await calibrator.forecast(learn, heldout=held_out)
    assert llm.calls == []
    await calibrator.calibrate(learn, heldout=held_out, anyway=True)
    return foreseen, llm.calls


@pytest.mark.parametrize("judges", [0, 5])
@pytest.mark.parametrize("gold", [True, False], ids=["gold", "agreement"])
@pytest.mark.parametrize(("rounds", "patience"), [(1, 1), (3, 1), (3, 3)])
async def test_a_calibration_takes_what_was_foreseen(
    judges: int, gold: bool, rounds: int, patience: int
) -> None:
    """What is asked lies within a quarter of what was expected, and between the bounds for each kind."""
    how = settings(judges=judges, rounds=rounds, patience=patience)
    foreseen, calls = await taken(how, traces("learn", 8, gold=gold), traces("held out", 20))
    paid = different(calls)
    assert abs(foreseen.calls.expected - paid.total()) <= 0.25 * paid.total()
    low, high, every = by_kind(foreseen, "low"), by_kind(foreseen, "high"), Counter[str]()
    every.update(call.sample.purpose for call in calls)
    assert all(low[kind] <= paid[kind] and every[kind] <= high[kind] for kind in {*low, *every})


def stubborn(prompt: Rendered, reply_type: type[ReplyModel], sample: Sample) -> Answer:
    """Give a valid reply at the last attempt alone."""
    return answer(prompt, reply_type) if sample.attempt == 2 else "?"


def unwritten(prompt: Rendered, reply_type: type[ReplyModel], sample: Sample) -> Answer:
    """Give scores and comparisons, and write nothing."""
    return ReplyError("nothing") if sample.role == "contrast" else answer(prompt, reply_type)


def first_always(prompt: Rendered, reply_type: type[ReplyModel], sample: Sample) -> Answer:
    """Judge by position."""
    if sample.role == "judge":
        return {"reasoning": "It stands first.", "better": "first"}
    return answer(prompt, reply_type)


@pytest.mark.parametrize("script", [stubborn, unwritten, first_always])
@pytest.mark.parametrize("gold", [True, False], ids=["gold", "agreement"])
async def test_the_most_is_a_bound(script: Callable[..., Answer], gold: bool) -> None:
    """However often replies are refused, samples fail and judges err: no kind of call exceeds its bound."""
    how = settings(judges=4, rounds=2, patience=2, per_event=4)
    foreseen, calls = await taken(how, traces("learn", 5, gold=gold), traces("held out", 20), script)
    low, high = by_kind(foreseen, "low"), by_kind(foreseen, "high")
    asked = Counter(call.sample.purpose for call in calls)
    assert all(low[kind] <= asked[kind] <= high[kind] for kind in {*low, *asked})


async def test_too_few_held_out_traces_are_said_beforehand() -> None:
    """With nineteen of them there is one round and no test, and the words say what is missing."""
    foreseen, calls = await taken(settings(rounds=3), traces("learn", 4), traces("held out", 19))
    assert not foreseen.testable
    assert "19 held-out traces" in foreseen.outlook
    assert (foreseen.rounds.high, foreseen.tests.high) == (1, 0)
    assert foreseen.calls.low <= len(calls) <= foreseen.calls.high


async def test_steps_that_only_samples_agree_on_test_nothing() -> None:
    """Traces without gold are held out in vain, and that is said before they are paid for."""
    held_out = traces("held out", 30, gold=False)
    foreseen = await Calibrator(ScriptedLLM(obliging), ListMemory()).forecast([], heldout=held_out)
    assert (foreseen.held_out, foreseen.steps, foreseen.testable) == (0, 0, False)
    assert foreseen.calls.high == 0


async def test_anchors_are_measured_and_never_learned_from() -> None:
    """An anchor that is to be kept counts like one that is; its trace has no candidates."""
    learn = traces("learn", 3)
    event = learn[0].events[0]
    assert event.evaluation is not None
    anchor = ContrastPair(
        purpose=PURPOSE,
        transition=event.transition,
        right=event.evaluation,
        wrong=event.evaluation.model_copy(update={"phi_after": 10}),
        why="Too high.",
        mistake="inflated_score",
        construction="written",
        label="human",
        provenance=Provenance(trace_id=learn[0].id, step=event.step),
    )
    llm, memory = ScriptedLLM(obliging), ListMemory()
    calibrator = Calibrator(llm, memory, settings=settings())
    plain = await calibrator.forecast(learn, heldout=traces("held out", 20))
    given = await calibrator.forecast(learn, heldout=traces("held out", 20), anchors=[anchor])
    memory.kept = (anchor,)
    assert await calibrator.forecast(learn, heldout=traces("held out", 20), anchors=[anchor]) == given
    assert (plain.anchors, given.anchors) == (0, 1)
    assert plain.candidates.expected - given.candidates.expected == 4


async def test_the_held_out_slice_is_the_one_of_the_calibration() -> None:
    """Where nothing is passed to test on, the rule's slice of the traces is counted as held out."""
    given = traces("any", 90)
    calibrator = Calibrator(ScriptedLLM(obliging), ListMemory(), settings=settings())
    foreseen = await calibrator.forecast(given)
    report = await calibrator.calibrate(given)
    assert report.held_out.before is not None
    assert (foreseen.learn, foreseen.held_out) == (report.learned_from, report.held_out.before.traces)


async def test_pairs_that_were_tested_are_not_made_again() -> None:
    """A second calibration of the same traces is expected to ask for mistakes in their place."""
    learn, held_out = traces("learn", 6), traces("held out", 20)
    calibrator = Calibrator(ScriptedLLM(obliging), ListMemory(), settings=settings(judges=2, per_event=4))
    first = await calibrator.forecast(learn, heldout=held_out)
    await calibrator.calibrate(learn, heldout=held_out)
    second = await calibrator.forecast(learn, heldout=held_out)
    mistakes = [next(r for r in f.rows if r.purpose == "mistakes").calls.expected for f in (first, second)]
    assert mistakes[1] > mistakes[0]


def row(foreseen: CalibrationForecast, purpose: str) -> Row:
    """Return the row of a purpose."""
    return next(row for row in foreseen.rows if row.purpose == purpose)


async def test_tokens_follow_texts_caps_and_earlier_calls() -> None:
    """Longer steps take more tokens; what calls took before is expected again; prices make it money."""
    learn, held_out = traces("learn", 3), traces("held out", 20)
    calibrator = Calibrator(ScriptedLLM(obliging), ListMemory(), settings=settings(judges=2))
    plain = await calibrator.forecast(learn, heldout=held_out)
    capped = await calibrator.forecast(learn, heldout=held_out, asking=Asking(cap=100, reasks=0))
    assert capped.tokens().high < plain.tokens().high
    assert row(capped, "comparisons").output_tokens.high == 100 * row(capped, "comparisons").calls.high
    spent = Spend(role="critic", purpose="compare", usage=Usage(calls=2, input_tokens=1000, output_tokens=60))
    known = await calibrator.forecast(learn, heldout=held_out, asking=Asking(spent=(spent,)))
    compared = row(known, "comparisons")
    assert compared.input_tokens.expected == pytest.approx(500 * compared.calls.expected)
    assert compared.output_tokens.expected == pytest.approx(30 * compared.calls.expected)
    assert any("compare" in line for line in known.assumptions)
    priced = known.priced(lambda usage: (usage.input_tokens + 2 * usage.output_tokens) / 1e6)
    assert known.usd is None
    assert priced.usd is not None
    assert priced.usd.low < priced.usd.expected < priced.usd.high


async def test_a_critic_that_is_passed_in_is_counted_as_it_is() -> None:
    """Its samples multiply all scores."""
    learn, held_out = traces("learn", 2), traces("held out", 20)
    llm = ScriptedLLM(obliging)
    alone = await Calibrator(llm, ListMemory(), settings=settings()).forecast(learn, heldout=held_out)
    critic = Critic(llm, settings=Critic(llm).settings.model_copy(update={"samples": 3}))
    three = await Calibrator(llm, ListMemory(), critic=critic, settings=settings()).forecast(
        learn, heldout=held_out
    )
    tests = [row(foreseen, "tests of batches").calls for foreseen in (alone, three)]
    assert (tests[1].expected, tests[1].high) == (3 * tests[0].expected, 3 * tests[0].high)
    assert three.calls.low == 3 * by_kind(alone, "low")["score"] + by_kind(alone, "low")["mistake"]
