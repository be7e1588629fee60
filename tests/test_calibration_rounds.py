"""The loop is closed: what a critic got wrong becomes a worked example, and it stops getting it wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from calibration_memory import ListMemory
from critic_flaws import Flaw, make_flaw
from flattered_world import (
    CLAIM,
    EXAMPLE,
    PURPOSE,
    answer,
    flattered,
    flattered_traces,
    record_flattered,
    transition,
)
from reflact import MemoryStore
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.critic import CriticReply
from reflact.errors import DataError
from reflact.memory.models import ContrastPair, Evaluation, Provenance
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

SETTINGS = CalibratorSettings(pairs_per_step=2, max_rounds=2)


async def test_the_loop_is_closed(tmp_path: Path) -> None:
    """From 40 traces the critic learns what takes its error on 100 others from 1.77 to below 0.3."""
    llm = flattered()
    async with MemoryStore(tmp_path / "memory.db") as store:
        calibrator = Calibrator(llm, store, settings=SETTINGS)
        learn, heldout = flattered_traces("learn", 40), flattered_traces("held out", 100)
        report = await calibrator.calibrate(learn, heldout=heldout)

        before, after, gain = report.held_out.before, report.held_out.after, report.held_out.gain
        assert before.error.value == pytest.approx(1.77)
        assert after.error.value <= 0.3
        assert gain.low > 0
        assert (before.n_traces, before.n_transitions) == (100, 200)
        assert report.n_training_traces == 40
        assert report.n_candidates == report.n_pairs + sum(d.n_candidates for d in report.dropped)
        assert report.n_promoted > 0
        assert len(report.metrics_by_round) == 1 + report.n_rounds
        assert (report.metrics_by_round[0].error, report.metrics_by_round[-1].error) == (
            before.error,
            after.error,
        )
        first = report.tests[0]
        assert (first.n_traces, first.n_transitions, first.n_earlier_tests) == (100, 200, 0)
        assert (first.outcome, first.prompt) == ("better", "critic@1")
        assert first.critic == calibrator.critic.identity
        assert report.usage.calls == len(llm.calls)

        promoted = await store.pairs(status="promoted")
        assert {one.pair.provenance.trace_id for one in promoted} <= {trace.id for trace in learn}
        shown = [call.prompt.messages[-1].content for call in llm.calls[-100:]]
        assert any(CLAIM in text and "credit_for_intention" in text for text in shown)


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "learned from"])
@pytest.mark.parametrize("is_other_purpose", [True, False], ids=["purpose", "steps"])
async def test_traces_of_another_agent_are_refused_by_name(is_stored: bool, is_other_purpose: bool) -> None:
    memory, llm = ListMemory(), flattered()
    calibrator = Calibrator(llm, memory, settings=SETTINGS)
    ours = [record_flattered(f"run {n}", n, claims=(True, True)) for n in range(30)]
    if is_stored:
        for trace in ours:
            await trace.save_to(memory)
    else:
        await calibrator.calibrate(ours, allow_untested=True)
    purpose = "Count the fruit" if is_other_purpose else PURPOSE
    other = record_flattered("run 7", 7, claims=(True, True), purpose=purpose, content="elsewhere")
    n_calls = len(llm.calls)
    if is_stored or is_other_purpose:
        with pytest.raises(DataError, match="run 7") as refusal:
            await calibrator.calibrate([*ours[:7], other])
        assert (purpose in str(refusal.value), PURPOSE in str(refusal.value)) == (True, True)
    with pytest.raises(DataError, match="run 7"):  # among the traces that are passed
        await calibrator.calibrate(ours, heldout=[other])
    assert len(llm.calls) == n_calls
    grown = [record_flattered(f"run {n}", n, claims=(True, True, False)[: 1 + n % 3]) for n in range(30)]
    assert (await calibrator.estimate_cost(grown)).n_training_traces > 0


@pytest.mark.slow
async def test_further_rounds_learn_nothing_twice_and_what_harms_is_taken_back(tmp_path: Path) -> None:
    async with MemoryStore(tmp_path / "memory.db") as store:
        calibrator = Calibrator(flattered(), store, settings=SETTINGS)
        learn, heldout = flattered_traces("learn", 12), flattered_traces("held out", 24)
        await calibrator.calibrate(learn, heldout=heldout)
        pairs = await store.pairs()
        promoted = [one.pair.id for one in await store.pairs(status="promoted")]
        contrary = Calibrator(flattered(contrary=True), store, settings=SETTINGS)
        report = await calibrator.calibrate(learn, heldout=heldout, ignore_finished=True)
        again = {one.pair.id for one in await store.pairs()}
        assert {one.pair.id for one in pairs} <= again
        assert len(again) - len(pairs) == report.n_pairs
        assert report.held_out.after.error.value <= 0.3

        found = await contrary.recheck(flattered_traces("later", 30))
        assert {(one.passed_test, one.outcome) for one in found} == {(False, "worse")}
        assert await store.pairs(status="promoted") == ()
        assert all(one.needs_review for one in await store.pairs(promoted))


@pytest.mark.parametrize(
    ("flaw", "before", "after"),
    [
        ("flattered", 1.76, 0.0),
        ("exact", 0.0, 0.0),
        pytest.param("inflated", 4.0, 1.0, marks=pytest.mark.slow),
    ],
)
async def test_forty_traces_take_at_most_600_calls(flaw: Flaw, before: float, after: float) -> None:
    """At the defaults, whatever the critic does; what it can learn is learned, and without error it is only measured."""
    memory, (llm, learn, held_out) = ListMemory(), make_flaw(flaw)
    report = await Calibrator(llm, memory).calibrate(learn, heldout=held_out)
    assert len(llm.calls) == report.usage.calls <= 600
    assert report.n_candidates == report.n_pairs + sum(drop.n_candidates for drop in report.dropped)
    assert report.held_out.before.error.value == pytest.approx(before, abs=0.01)
    assert report.held_out.after.error.value <= after
    if flaw == "exact":
        assert (report.usage.calls, report.n_rounds, report.tests) == (80, 0, ())
        assert "nothing to learn" in report.end_reason
    for test in report.tests:
        pairs = [one.pair for one in await memory.pairs(test.pair_ids)]
        directions = Counter(pair.right.direction for pair in pairs)
        assert len(pairs) <= 120
        assert max(directions.values()) <= 40


def anchor(number: int) -> ContrastPair:
    return ContrastPair(
        purpose=PURPOSE,
        transition=transition(f"anchor {number}", 2, 4, claims=True),
        right=Evaluation(
            progress_before=1, progress_after=2, reasoning="Four are filed.", evidence=("filed",)
        ),
        wrong=Evaluation(progress_before=1, progress_after=9, reasoning="It says so."),
        reason="A message is no effect.",
        mistake="credit_for_intention",
        construction="asked",
        label_source="human",
        provenance=Provenance(trace_id=f"anchor {number}", step=0),
    )


async def test_anchors_are_reported_and_never_learned_from(tmp_path: Path) -> None:
    """Gold pairs that are kept as anchors are measured before and after, by mistake, and stay apart.

    No pair is made of such a step, perturbed or not, nor of those beside it, which show its states.
    """
    async with MemoryStore(tmp_path / "memory.db") as store:
        learn, heldout = flattered_traces("learn", 12), flattered_traces("held out", 24)
        made_of = Provenance(trace_id=learn[0].id, step=0)
        update = {"transition": learn[0].events[0].transition, "provenance": made_of}
        anchors = [*(anchor(number) for number in range(3)), anchor(0).model_copy(update=update)]
        await store.add_anchors(anchors[:3])
        report = await Calibrator(flattered(), store, settings=SETTINGS).calibrate(learn, heldout=heldout)
        before, after = report.anchors.before, report.anchors.after
        assert (before.error.value, after.error.value) == (3, 0)
        assert not {pair.id for pair in anchors} & {one.pair.id for one in await store.pairs()}
    async with MemoryStore(tmp_path / "other.db") as store:
        await store.add_anchors(anchors[3:])
        await Calibrator(flattered(), store, settings=SETTINGS).calibrate(
            learn, heldout=heldout[:19], allow_untested=True
        )
        sources = {(one.pair.provenance.trace_id, one.pair.provenance.step) for one in await store.pairs()}
        assert not {(learn[0].id, 0), (learn[0].id, 1)} & sources
        assert (learn[1].id, 0) in sources


def silenced(*folders: str) -> ScriptedLLM:
    """Return the flattered model, which says nothing valid of some folders."""

    def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        question = EXAMPLE.sub("", prompt.messages[-1].content)
        mute = any(folder in question for folder in folders)
        return "?" if issubclass(reply_type, CriticReply) and mute else answer(prompt, reply_type)

    return ScriptedLLM(script)


@pytest.mark.parametrize(("share", "tested"), [(12, True), (5, False)])
async def test_steps_that_cannot_be_scored_are_counted(share: int, tested: bool) -> None:
    """A few of them change nothing where both sides lack them; with more than a tenth nothing is decided."""
    calibrator = Calibrator(
        silenced(*(f"held out {n}-" for n in range(0, 100, share))), memory := ListMemory(), settings=SETTINGS
    )
    report = await calibrator.calibrate(
        flattered_traces("learn", 12), heldout=flattered_traces("held out", 36)
    )
    assert report.held_out.n_unscored == 2 * -(-36 // share)
    assert (report.n_promoted > 0) is tested
    if not tested:
        assert "no valid score of 16 of 72 held-out steps, on 36 traces" in report.not_tested_reason
        assert memory.booked == []
    else:
        (test, *_) = report.tests
        assert (test.n_traces, test.n_transitions, test.n_unscored) == (36, 72, 6)


def stubborn(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Give a valid reply at the last attempt alone."""
    return answer(prompt, reply_type) if call_id.attempt == 2 else "?"


@pytest.mark.parametrize(("asked", "rounds", "is_stubborn"), [(0, 1, False), (8, 3, False), (8, 2, True)])
async def test_a_calibration_stays_between_its_bounds(asked: int, rounds: int, is_stubborn: bool) -> None:
    """A store of calls pays for at least the low count; however often replies are refused, the high one is a bound."""
    llm = ScriptedLLM(stubborn) if is_stubborn else flattered()
    settings = CalibratorSettings(pairs_per_step=4, max_asked=asked, max_rounds=rounds)
    calibrator = Calibrator(llm, ListMemory(), settings=settings)
    learn, held_out = flattered_traces("learn", 5 if is_stubborn else 8), flattered_traces("held out", 20)
    estimate = await calibrator.estimate_cost(learn, heldout=held_out)
    assert llm.calls == []
    await calibrator.calibrate(learn, heldout=held_out, allow_untested=True)
    different = {(c.call_id.purpose, c.call_id.label, str(c.prompt.messages)) for c in llm.calls}
    assert estimate.min_calls <= (len(llm.calls) if is_stubborn else len(different))
    assert len(llm.calls) <= estimate.max_calls
