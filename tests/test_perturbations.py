"""Constructions: what is right for a perturbed input follows from how it was made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from critic_world import PURPOSE, evaluation, event
from reflact.calibration.guards import QuotableTexts
from reflact.calibration.mistakes import KNOWN_MISTAKES, Mistake, compute_reach
from reflact.calibration.perturbations import (
    HIDDEN_TEXT,
    DistanceBand,
    StepToContrast,
    build_pairs,
    classify_error,
    find_reference,
    quote_changes,
)
from reflact.calibration.transition_view import TransitionView
from reflact.memory.models import (
    MISTAKE_KINDS,
    Action,
    ContrastPair,
    Evaluation,
    Label,
    ScoreEvent,
    Transition,
)

BAND = DistanceBand(1, 10)
PHI = st.floats(0, 10)
LINES = st.lists(st.sampled_from(("one", "two words", " three ", "")), max_size=4).map("\n".join)
LEAF = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=8)
STATES = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def ways(one: ScoreEvent, band: DistanceBand = BAND) -> dict[str, ContrastPair]:
    """Return what is built of a step with gold, by construction."""
    right = find_reference(one)
    assert right is not None
    return {pair.construction: pair for pair in build_pairs(StepToContrast(one, right, PURPOSE, "t", band))}


def scored(before: JsonValue, after: JsonValue, low: float, high: float) -> ScoreEvent:
    """Return a step between two states whose scores are right."""
    said = Evaluation(progress_before=low, progress_after=high, reasoning="It was scored.")
    gold = Label(progress_before=low, progress_after=high, source="program")
    transition = Transition(before=before, action=Action(name="act"), after=after)
    return ScoreEvent(step=0, transition=transition, evaluation=said, label=gold)


@given(before=STATES, after=STATES, low=PHI, high=PHI, nearest=st.floats(0.1, 5))
def test_the_unperturbed_evaluation_is_wrong_for_every_perturbed_input(
    before: JsonValue, after: JsonValue, low: float, high: float, nearest: float
) -> None:
    """Distances keep to the band, no input equals the true one, and phi follows the states."""
    one = scored(before, after, low, high)
    for made in ways(one, DistanceBand(nearest, 10)).values():
        assert abs(made.right.progress_after - made.wrong.progress_after) >= nearest - 1e-6
        assert made.transition != one.transition
        assert made.wrong == one.evaluation
        assert made.right.progress_before in {low, high}
        assert made.right.reasoning.strip()
        assert not QuotableTexts(TransitionView(made.transition)).find_invented(made.right.evidence)


@given(before=STATES, low=PHI, high=PHI)
def test_nothing_is_perturbed_where_nothing_changed(before: JsonValue, low: float, high: float) -> None:
    """Equal states have no effect to take away; what gold says of them is not second-guessed."""
    assert ways(scored(before, before, low, high)) == {}


def test_each_perturbation_says_what_is_right() -> None:
    """Phi stays where nothing was achieved, and goes with the states where they are swapped."""
    made = ways(event())
    assert {name: (b.right.progress_before, b.right.progress_after) for name, b in made.items()} == {
        "no_effect": (2, 2),
        "claim_for_effect": (2, 2),
        "progress_reversed": (6, 2),
        "evidence_withdrawn": (2, 2),
    }
    true = event().transition
    assert made["no_effect"].transition.after == true.before
    assert made["claim_for_effect"].transition.after == {
        "chapters": "0/2",
        "title": "Report",
        "message": "The agent says: write is done, and with it all that was asked for.",
    }
    assert made["progress_reversed"].transition.before == true.after
    assert made["evidence_withdrawn"].transition.after == {"chapters": HIDDEN_TEXT, "title": "Report"}


def test_what_does_not_apply_is_left_out() -> None:
    """No evaluation credits a claim if the step went backwards; later rounds want small differences."""
    assert set(ways(event(before=6, after=2))) == {"no_effect", "progress_reversed", "evidence_withdrawn"}
    assert ways(event(), DistanceBand(1, 2)) == {}
    assert set(ways(event(after=3.5), DistanceBand(1, 2))) == set(ways(event()))


@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        ((2, 2), 5, "credit_for_intention"),
        ((4, 2), 5, "credit_for_intention"),
        ((2, 4), 9, "inflated_score"),
        ((2, 6), 3, "ignored_evidence"),
    ],
)
def test_an_observed_mistake_has_a_kind(right: tuple[float, float], wrong: float, kind: str) -> None:
    """Too high without progress, too high with it, too low: each is a kind of its own."""
    assert classify_error(evaluation(right[0], wrong), evaluation(*right)) == kind
    one = event(before=right[0], after=right[1], said=(right[0], wrong), changed=right[0] != right[1])
    observed = ways(one)["observed"]
    found = (observed.mistake, observed.right.progress_after, observed.wrong.progress_after)
    assert found == (kind, right[1], wrong)


def test_gold_without_reasons_takes_those_of_a_close_evaluation_alone() -> None:
    """The words of an evaluation that is far from gold never stand on the right side."""
    taken = find_reference(event(said=(2, 6.4)))
    own = find_reference(event(said=(2, 9)))
    assert (taken.progress_after, taken.reasoning) == (6, "Step 0 was scored.")
    assert own.progress_after == 6
    assert "scored" not in own.reasoning


@given(before=LINES, after=LINES)
def test_quotes_point_into_the_state_after(before: str, after: str) -> None:
    """What is quoted of a text is one of its new lines."""
    transition = Transition(before=before, action=Action(name="act"), after=after)
    lines = after.splitlines()
    assert all(quote in lines or f" {quote} " in lines for quote in quote_changes(transition))


@given(
    low=PHI,
    high=PHI,
    nearest=st.floats(0.1, 5),
    width=st.floats(0, 5),
    variation=st.integers(0, 3),
    mistake=st.sampled_from((*KNOWN_MISTAKES, Mistake(name="own", description="d"))),
)
def test_a_mistake_reaches_what_is_on_the_scale_and_far_enough(
    low: float, high: float, *, nearest: float, width: float, variation: int, mistake: Mistake
) -> None:
    """Every number within reach lies on the scale, at least ``nearest`` away and at most ``farthest``."""
    right, band = evaluation(low, high), DistanceBand(nearest, nearest + width)
    found = compute_reach(mistake, right, band=band, variant=variation)
    if found is None:
        assert high + nearest > 10 or high - nearest < 0
        return
    assert 0 <= found.low <= found.high <= 10
    for number in (found.low, found.high):
        assert nearest - 1e-6 <= abs(number - high) <= nearest + width + 1e-6
    if mistake.direction == "too_high":
        assert found.low > high
    if mistake.name == "ignored_evidence":
        assert (found.high < high) == (high > low)


def test_every_known_kind_is_described() -> None:
    """The kinds that models are told of are those that the memory knows."""
    assert tuple(mistake.name for mistake in KNOWN_MISTAKES) == MISTAKE_KINDS
