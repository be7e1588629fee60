"""What a critic's scores are worth: errors, orders, confidences, each with an interval by trace."""

from __future__ import annotations

import math
import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from contrast_world import PURPOSE, PlainCritic, generate, mistaken
from profiles import cases
from reflact import Calibrator, Trace
from reflact.calibration.contrast import ContrastSettings, select_events
from reflact.calibration.critic import CriticReply
from reflact.calibration.metrics import (
    MIN_LABEL_DIFFERENCE,
    ScoredStep,
    bootstrap_mean,
    compute_metrics,
    pairwise_accuracy,
)
from reflact.data import make_rng
from reflact.memory.models import Action, Evaluation, Label, LabelSource, ScoreEvent, Transition
from reflact.memory.store import MemoryStore
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM

pytestmark = pytest.mark.anyio

PHI = st.floats(0, 10)


def scored(
    trace: str,
    step: int,
    gold: tuple[float, float],
    said: tuple[float, float],
    *,
    confidence: float = 0.5,
    wrong: tuple[float, ...] = (),
    mistakes: tuple[str, ...] = (),
    difficulty: float | None = None,
) -> ScoredStep:
    """Return a scored step."""
    return ScoredStep(
        trace_id=trace,
        step=step,
        label=Label(progress_before=gold[0], progress_after=gold[1], source="program"),
        evaluation=Evaluation(
            progress_before=said[0], progress_after=said[1], reasoning="r", confidence=confidence
        ),
        wrong_progress=wrong,
        mistakes=mistakes,
        difficulty=difficulty,
    )


STEPS = st.lists(
    st.builds(
        scored,
        st.sampled_from("abcd"),
        st.integers(0, 5),
        st.tuples(PHI, PHI),
        st.tuples(PHI, PHI),
        confidence=st.floats(0, 1),
        wrong=st.lists(PHI, max_size=2).map(tuple),
        mistakes=st.sampled_from([(), ("inflated_score",)]),
        difficulty=st.sampled_from([None, 0.0, 0.2, 0.4]),
    ),
    min_size=1,
    max_size=12,
)


def test_nothing_scored_is_no_measure() -> None:
    """Without steps there is no number at all."""
    assert compute_metrics([]) is None


def test_error_and_bias() -> None:
    """Errors are absolute, the bias keeps its sign, and the constant predictor says the median."""
    steps = [
        scored("a", 0, (0, 2), (0, 5)),
        scored("a", 1, (2, 4), (5, 3)),
        scored("b", 0, (0, 0), (0, 1)),
    ]
    found = compute_metrics(steps)
    assert found is not None
    assert (found.n_traces, found.n_transitions) == (2, 3)
    assert found.error.value == pytest.approx(5 / 3)
    assert found.bias.value == pytest.approx(1.0)
    assert found.constant.progress == 2
    assert found.constant.error == pytest.approx(4 / 3)


def test_pairwise_accuracy_counts_ties_half_and_forgets_equal_states() -> None:
    """States that are correctly equal are no pair; an order that is not seen counts half."""
    tied = compute_metrics([scored("a", 0, (0, 4), (3, 3))])
    equal = compute_metrics([scored("a", 0, (4, 4), (3, 9))])
    wrong = compute_metrics([scored("a", 0, (0, 4), (5, 3))])
    assert tied is not None
    assert tied.accuracy is not None
    assert tied.accuracy.value == 0.5
    assert equal is not None
    assert equal.accuracy is None
    assert wrong is not None
    assert wrong.accuracy is not None
    assert wrong.accuracy.value == 0


@cases(200, 10)
@given(
    st.lists(
        st.tuples(PHI | st.sampled_from([0.0, 0.5, 1.0, 4.0]), PHI | st.sampled_from([1.0, 2.0])), max_size=9
    )
)
def test_pairwise_accuracy_is_what_comparing_every_two_states_gives(said: list[tuple[float, float]]) -> None:
    """Sorting finds what a comparison of all pairs finds, ties and near states included."""
    decided = [
        0.5 if a[1] == b[1] else float((a[1] < b[1]) == (a[0] < b[0]))
        for a, b in combinations(said, 2)
        if abs(a[0] - b[0]) >= MIN_LABEL_DIFFERENCE
    ]
    steps = [scored("t", n, (gold, gold), (phi, phi)) for n, (gold, phi) in enumerate(said)]
    assert pairwise_accuracy(steps) == (sum(decided) / len(decided) if decided else None)


def test_pairwise_accuracy_compares_states_of_one_trace_alone() -> None:
    """Phi of different purposes are not ordered against each other."""
    found = compute_metrics([scored("a", 0, (1, 1), (9, 9)), scored("b", 0, (9, 9), (1, 1))])
    assert found is not None
    assert found.accuracy is None


def test_a_wrong_evaluation_nearer_to_the_critic_costs_accuracy() -> None:
    """Of a contrast pair the critic should stand nearer to the right side."""
    found = compute_metrics([scored("a", 0, (2, 2), (2, 4), wrong=(5, 9))])
    assert found is not None
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5


def test_order_consistency_compares_one_call_with_two() -> None:
    """A state above the one before it in one call and below it across calls is inconsistent."""
    steps = [
        scored("a", 0, (0, 2), (0, 5)),
        scored("a", 1, (2, 4), (2, 4)),
        scored("a", 2, (4, 6), (4, 6)),
        scored("a", 5, (6, 8), (8, 6)),
    ]
    found = compute_metrics(steps)
    assert found is not None
    assert found.consistency is not None
    assert found.consistency.value == 0.5
    perturbed = compute_metrics([*steps, scored("a", 1, (2, 2), (9, 9))])
    assert perturbed is not None
    assert perturbed.consistency is None, "a step that stands twice succeeds nothing"


def test_confidence_that_knows_has_no_error() -> None:
    """Sure where right and unsure where wrong is perfect; the other way round is as bad as can be."""
    right, wrong = ((0.0, 2.0), (0.0, 2.0)), ((0.0, 2.0), (0.0, 9.0))
    knows = compute_metrics([scored("a", 0, *right, confidence=1), scored("a", 1, *wrong, confidence=0)])
    boasts = compute_metrics([scored("a", 0, *right, confidence=0), scored("a", 1, *wrong, confidence=1)])
    assert knows is not None
    assert boasts is not None
    assert (knows.brier.value, knows.calibration.value) == (0, 0)
    assert (boasts.brier.value, boasts.calibration.value) == (1, 1)
    assert [(b.low, b.confidence, b.right_share) for b in boasts.reliability] == [(0.0, 0, 1), (0.9, 1, 0)]


def test_kinds_and_difficulties_are_measured_apart() -> None:
    """A step counts with each kind of mistake that it invites, and in the band of its difficulty."""
    steps = [
        scored("a", 0, (0, 2), (0, 5), mistakes=("inflated_score", "mine"), difficulty=0.0),
        scored("b", 0, (0, 2), (0, 3), mistakes=("mine",), difficulty=0.4),
        scored("c", 0, (0, 2), (0, 2)),
    ]
    found = compute_metrics(steps)
    assert found is not None
    kinds = [(g.name, g.n_transitions, g.error.value) for g in found.by_mistake]
    assert kinds == [("inflated_score", 1, 3), ("mine", 2, 2)]
    assert [(g.name, g.error.value) for g in found.by_difficulty] == [("easy", 3), ("hard", 1)]


def test_one_trace_says_nothing_about_others() -> None:
    """The interval of a single trace is the whole range, however many steps it has."""
    found = compute_metrics([scored("a", n, (0, 2), (0, 3)) for n in range(50)])
    assert found is not None
    assert (found.error.low, found.error.high) == (0, 10)
    assert bootstrap_mean([0.25], low=-10, high=10, stream_name="x").high == 10


def test_intervals_are_resampled_by_trace() -> None:
    """A hundred equal steps of a trace are no more evidence than one."""
    once = compute_metrics([scored(f"t{n}", 0, (0, 2), (0, 2 + n)) for n in range(8)])
    often = compute_metrics([scored(f"t{n}", s, (0, 2), (0, 2 + n)) for n in range(8) for s in range(100)])
    assert once is not None
    assert often is not None
    assert often.error == once.error
    assert once.error.low < 2.5
    assert once.error.high > 4.5


def test_the_interval_of_a_mean_covers_as_often_as_it_says() -> None:
    """Of 200 means of 40 draws, about 95% have the true one in their interval."""
    hits = 0
    for number in range(200):
        draw = make_rng(7, f"covers/{number}").random
        found = bootstrap_mean([draw() for _ in range(40)], low=0, high=1, stream_name=str(number))
        hits += found.low <= 0.5 <= found.high
    assert 180 <= hits <= 199


@cases(60, 10)
@given(STEPS)
def test_measures_are_in_range_and_deterministic(steps: list[ScoredStep]) -> None:
    """Every number lies in its range and its interval in the same; equal steps give equal measures."""
    found = compute_metrics(steps)
    assert found is not None
    assert found == compute_metrics(steps)
    for each in (found.accuracy, found.consistency, found.brier, found.calibration):
        assert each is None or 0 <= each.low <= each.high <= 1
    assert 0 <= found.error.low <= found.error.high <= 10
    assert abs(found.bias.value) <= found.error.value + 1e-9
    assert math.isclose(found.error.value, sum(abs(s.error) for s in steps) / len(steps), abs_tol=1e-9)
    assert sum(each.n_transitions for each in found.reliability) == len(steps)


# ---------- half gold

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
    made = await generate(half, write=llm, critic=critic)
    assert (made.pairs, {drop.reason for drop in made.dropped}) == ((), {"unverified"})
    assert "not the progress before" in made.dropped[0].explanation
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
