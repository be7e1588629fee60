"""Constructions: what is right for a perturbed input follows from how it was made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from critic_world import PURPOSE, event
from memory_pairs import make_pair
from reflact.calibration.pairs import (
    HIDDEN_TEXT,
    StepToContrast,
    choose_batch,
    find_reference,
    pairs_of,
    select_events,
)
from reflact.memory.models import ContrastPair, Evaluation, Label, ScoreEvent


def ways(one: ScoreEvent) -> dict[str, ContrastPair]:
    right = find_reference(one)
    assert right is not None
    return {pair.construction: pair for pair in pairs_of(StepToContrast(one, right, PURPOSE, "t"))}


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


def unscored(**fields: Any) -> ScoreEvent:
    return event(**fields).model_copy(update={"evaluation": None})


@pytest.mark.parametrize(
    ("one", "is_selected"),
    [
        (event(after=2.5), True),
        (event(after=2.4), False),
        (event(after=2), True),
        (event(after=2.3, changed=False), True),
        (event(said=(2, 2.3)), True),
        (unscored(after=2.5), True),
        (event(gold=False), False),
    ],
)
def test_labelled_steps_that_moved_or_stood_still_are_selected(one: ScoreEvent, is_selected: bool) -> None:
    assert bool(select_events([one], min_delta=0.5)) is is_selected
    twin = one.model_copy(update={"step": 7})
    assert len(select_events([one, twin], min_delta=0.5)) == is_selected


def test_a_step_without_a_label_has_the_critics_own_evaluation_as_its_right_side() -> None:
    made = ways(event(gold=False))
    assert set(made) == {"no_effect", "claim_for_effect", "progress_reversed", "evidence_withdrawn"}
    assert {pair.label_source for pair in made.values()} == {None}
    half = event().model_copy(update={"label": Label(progress_after=6, source="human")})
    assert find_reference(half) is None


def moved(number: int, delta: float) -> ContrastPair:
    right = Evaluation(progress_before=5, progress_after=5 + delta, reasoning=f"right {number}")
    return make_pair().model_copy(update={"right": right})


def test_a_batch_has_room_for_a_third_of_each_direction() -> None:
    pairs = [moved(n, delta) for n, delta in enumerate([0] * 20 + [-2] * 9 + [3] * 2)]
    batch = choose_batch(pairs, max_pairs=12)
    assert Counter(pair.right.direction for pair in batch) == {"stays": 4, "falls": 4, "rises": 2}
    assert choose_batch([*reversed(pairs), *pairs], max_pairs=12) == batch
    less = choose_batch(pairs, max_pairs=12, taken=[moved(50, 0)] * 3)
    assert Counter(pair.right.direction for pair in less) == {"stays": 1, "falls": 4, "rises": 2}
    assert len(choose_batch(pairs, max_pairs=None)) == len(pairs)
