"""Gold that speaks of the state after alone: what it measures, and where the state before is known from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import JsonValue

from contrast_world import PURPOSE, PlainCritic, mistaken, round_of
from reflact import Calibrator, Trace
from reflact.calibration.contrast import ContrastSettings, generate_contrast_pairs, select_events
from reflact.calibration.critic import CriticReply
from reflact.calibration.metrics import ScoredStep, compute_metrics, pairwise_accuracy
from reflact.memory.models import Action, Evaluation, Label, LabelSource, ScoreEvent, Transition
from reflact.memory.store import MemoryStore
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM

pytestmark = pytest.mark.anyio

CLAIM = "All letters are sorted!"


def reached(phi: float, source: LabelSource = "program") -> Label:
    """Return what a check of the state after found."""
    return Label(progress_after=phi, source=source)


def step(before: JsonValue, after: JsonValue) -> Transition:
    """Return a step between two states."""
    return Transition(before=before, action=Action(name="sort"), after=after)


def phis(trace: Trace) -> list[float | None]:
    """Return what is known of the states before."""
    return [None if event.label is None else event.label.progress_before for event in trace.events]


def chain(trace: Trace) -> Trace:
    """Record steps of which the state after was checked: two that follow, one of another state, one still."""
    trace.record(step("a", "b"), label=reached(2))
    trace.record(step("b", "c"), label=reached(5))
    trace.record(step("other", "d"), label=reached(6))
    trace.record(step("d", "d"), label=reached(6))
    trace.record(step(1, 2), label=reached(7))
    trace.record(step(2.0, 3), label=reached(8))
    trace.record(step(3, 4))
    trace.record(step(4, 5), label=reached(9))
    trace.record(step(5, 6), label=Label(progress_before=1, progress_after=9, source="human"))
    return trace


KNOWN = [None, 2, None, 6, None, None, None, None, 1]


# ----------------------------------------------------------------------------------- the state before


def test_the_state_before_is_worth_what_the_same_state_was_worth(tmp_path: Path) -> None:
    """Equal states have one phi: that of the step before, or of a step without a change; or unknown."""
    trace = chain(Trace(PURPOSE, id="t", path=tmp_path / "t.jsonl"))
    assert phis(trace) == KNOWN
    assert Trace.load(tmp_path / "t.jsonl").events == trace.events


def test_what_samples_agreed_on_is_not_taken_for_known() -> None:
    """A program's label is not completed by an opinion; an opinion is, by either."""
    trace = Trace(PURPOSE)
    sources: tuple[LabelSource, ...] = ("agreement", "program", "agreement", "human")
    for state, source in enumerate(sources):
        trace.record(step(state, state + 1), label=reached(state, source))
    assert phis(trace) == [None, None, 1, None]


async def test_a_label_that_comes_later_says_what_follows(tmp_path: Path) -> None:
    """Labelling a stored step completes the next one as well, whatever was labelled first."""
    trace = Trace(PURPOSE, id="t")
    for state in range(3):
        trace.record(step(state, state + 1))
    async with MemoryStore(tmp_path / "memory.db") as memory:
        await trace.save_to(memory)
        await memory.label("t", 2, reached(6, "human"))
        await memory.label("t", 1, reached(4, "human"))
        stored = await memory.trace("t")
        assert stored is not None
        assert phis(Trace.from_stored(stored)) == [None, None, 4]
        assert await chain(Trace(PURPOSE, id="u")).save_to(memory) == len(KNOWN)
        stored = await memory.trace("u")
    assert stored is not None
    assert phis(Trace.from_stored(stored)) == KNOWN


# ------------------------------------------------------------------------------- what it measures, makes


def test_it_measures_by_the_state_after() -> None:
    """Error, bias and the order of states across steps need no state before; the order within a step does."""
    said = Evaluation(progress_before=0, progress_after=6, reasoning="r")
    steps = [
        ScoredStep(
            trace_id="t", step=n, label=gold, evaluation=said.model_copy(update={"progress_after": 6 + n})
        )
        for n, gold in enumerate((reached(4), reached(9)))
    ]
    assert pairwise_accuracy(steps) == 1
    assert pairwise_accuracy(steps[:1]) is None
    measured = compute_metrics(steps)
    assert measured is not None
    assert (measured.error.value, measured.bias.value) == (2, 0)


async def test_no_pair_is_made_of_what_is_known_by_half() -> None:
    """Its candidates are dropped with words, and neither the writer nor the critic is asked."""
    half = ScoreEvent(step=0, transition=step("a", "b"), label=reached(4))
    llm = ScriptedLLM(mistaken)
    critic = PlainCritic()
    made = await generate_contrast_pairs(
        [half], purpose=PURPOSE, trace_id="t", round_plan=round_of(), llm=llm, critic=critic
    )
    assert (made.pairs, {drop.reason for drop in made.dropped}) == ((), {"unverified"})
    assert "not the state before" in made.dropped[0].explanation
    assert (llm.calls, critic.trials) == ([], [])
    assert select_events([half], ContrastSettings()) == (half,)


# ---------------------------------------------------------------------------------------- whole rounds


def flattered(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
    """Believe a claim until a worked example shows it better; write no mistakes."""
    if reply_type is not CriticReply:
        return None
    examples, _, question = prompt.messages[-1].content.rpartition("<purpose>")
    before, after = (int(n) for n in re.findall(r"(\d+) of 10", question)[:2])
    believes = CLAIM in question and CLAIM not in examples
    return {
        "reasoning": f"{after} are sorted.",
        "evidence": ["are sorted"],
        "phi_before": before,
        "phi_after": 9 if believes else after,
        "confidence": 0.9,
    }


def letters(run: int, *, outcome_only: bool) -> Trace:
    """Return a run of three steps; a program checked the state after each of them, or the last one alone."""
    trace = Trace("Sort all ten letters.", id=f"run {run}")
    for done in range(3):
        before, after = (f"Desk {run}: {n} of 10 are sorted." for n in (done, done + 1))
        action = Action(name="sort", arguments=CLAIM if done else "I begin.")
        gold = None if outcome_only and done < 2 else reached(done + 1)
        trace.record(Transition(before=before, action=action, after=after), label=gold)
    return trace


async def test_a_check_of_the_last_state_alone_is_enough_to_test(tmp_path: Path) -> None:
    """Held-out runs with an outcome and nothing else promote what helps; the estimate says that they can."""
    learn = [letters(n, outcome_only=False) for n in range(12)]
    held_out = [letters(n, outcome_only=True) for n in range(100, 125)]
    async with MemoryStore(tmp_path / "memory.db") as memory:
        calibrator = Calibrator(ScriptedLLM(flattered), memory, n_judges=0)
        estimate = await calibrator.estimate_cost(learn, heldout=held_out)
        report = await calibrator.calibrate(learn, heldout=held_out)
    before, after = report.held_out.before, report.held_out.after
    assert before is not None
    assert after is not None
    assert (before.n_traces, before.error.value, after.error.value) == (25, 6, 0)
    assert report.n_promoted > 0
    assert estimate.missing_reason is None
