"""Measurements, their scores in a metric, and the strict rule."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.config import GateConfig
from reflact.gate import decide, measure, score
from reflact.types import Rollout, Score, Split

CANDIDATE, CURRENT = "c" * 64, "d" * 64
scores = st.none() | st.sampled_from((0.0, 0.1, 1 / 3, 0.5, 1.0)) | st.floats(0, 1)


def _rollouts(skill_hash: str, values: Sequence[float | Score | None]) -> list[Rollout]:
    return [
        Rollout(
            key=f"{skill_hash}/{n}",
            item_id=f"item-{n:02}",
            skill_hash=skill_hash,
            score=Score.of(value) if isinstance(value, float) else value,
            error="the endpoint is down" if value is None else None,
        )
        for n, value in enumerate(values)
    ]


def _action(
    candidate: Sequence[float | None], current: Sequence[float | None], best: float | None, config: GateConfig
) -> str:
    return decide(_rollouts(CANDIDATE, candidate), _rollouts(CURRENT, current), best, config).action


# ------------------------------------------------------------------------------------------- measurements


def test_a_measurement_is_the_mean_of_what_was_measured() -> None:
    """Unmeasured items are listed and left out; fractions of success count as such."""
    rollouts = _rollouts(CANDIDATE, [None, Score(hard=1, soft=0.5), Score(hard=0.1, soft=0.3), None])
    found = measure(CANDIDATE, Split.val, rollouts)
    assert (found.n, found.hard, found.soft) == (2, 0.55, 0.4)
    assert found.unmeasured == ("item-00", "item-03")


def test_nothing_measured_has_no_score() -> None:
    """Absence is None, never a zero."""
    found = measure(CANDIDATE, Split.val, _rollouts(CANDIDATE, [None]))
    assert (found.n, found.hard, found.soft) == (0, None, None)
    assert score(found, metric="hard", mixed_weight=0.5) is None


@given(st.lists(scores, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_measurements_do_not_depend_on_order(values: list[float | None], chance: random.Random) -> None:
    """The same rollouts in any order give the same bytes."""
    rollouts = _rollouts(CANDIDATE, values)
    mixed = chance.sample(rollouts, len(rollouts))
    one, other = (measure(CANDIDATE, Split.val, order) for order in (rollouts, mixed))
    assert one.model_dump_json() == other.model_dump_json()


def test_a_score_belongs_to_one_skill() -> None:
    """Rollouts of another skill are never counted for this one."""
    with pytest.raises(ValueError, match="another skill"):
        measure(CANDIDATE, Split.val, _rollouts(CURRENT, [1.0]))


def test_metrics_pick_and_mix() -> None:
    """Hard and soft are taken as they are, mixed weighs soft by its weight."""
    found = measure(CANDIDATE, Split.val, _rollouts(CANDIDATE, [Score(hard=1, soft=0.5)]))
    assert score(found, metric="hard", mixed_weight=0.2) == 1
    assert score(found, metric="soft", mixed_weight=0.2) == 0.5
    assert score(found, metric="mixed", mixed_weight=0.2) == 0.9


# ---------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("candidate", "current", "best", "action"),
    [
        ([1.0, 1.0], [1.0, 0.0], 0.5, "accept_new_best"),
        ([1.0, 0.0], [0.0, 0.0], 0.5, "accept"),
        ([1.0, 0.0], [0.0, 0.0], 0.0, "accept_new_best"),
        ([1.0, 0.0], [0.0, 0.0], None, "accept_new_best"),
        ([1.0, 0.0], [0.0, 1.0], 0.0, "reject"),
        ([0.0, 0.0], [0.0, 0.0], None, "reject"),
        ([0.0, 0.0], [1.0, 0.0], None, "reject"),
    ],
)
def test_only_a_greater_mean_is_accepted(
    candidate: list[float], current: list[float], best: float | None, action: str
) -> None:
    """A tie is a rejection, 0.0 is a score like any other, and no best score is beaten by any."""
    assert _action(candidate, current, best, GateConfig()) == action


def test_the_verdict_says_what_was_compared() -> None:
    """The reason is a sentence with the numbers, and the evidence holds both sides."""
    verdict = decide(_rollouts(CANDIDATE, [1.0, 0.0]), _rollouts(CURRENT, [0.0, 0.0]), 0.75, GateConfig())
    assert verdict.reason == (
        "The candidate's 0.5000 is above the current 0.0000 over 2 of 2 pairs, but not above the best 0.7500."
    )
    assert (verdict.candidate_score, verdict.current_score) == (0.5, 0.0)
    assert verdict.candidate is not None
    assert verdict.candidate.skill_hash == CANDIDATE


def test_a_best_score_of_zero_is_a_score() -> None:
    """0.0 is beaten as a number, None is named as the lack of one."""
    sides = _rollouts(CANDIDATE, [1.0]), _rollouts(CURRENT, [0.0])
    assert decide(*sides, 0.0, GateConfig()).reason.endswith("and above the best 0.0000.")
    assert decide(*sides, None, GateConfig()).reason.endswith("there was no best score yet.")


def test_pairs_with_an_unmeasured_side_are_left_out_on_both() -> None:
    """A provider's failure costs neither side: the pair counts for none of them."""
    config = GateConfig(coverage=0.5)
    candidate, current = (
        _rollouts(CANDIDATE, [1.0, None, 0.0, 1.0]),
        _rollouts(CURRENT, [1.0, 1.0, None, 0.0]),
    )
    verdict = decide(candidate, current, 0.0, config)
    assert verdict.action == "accept_new_best"
    assert (verdict.candidate_score, verdict.current_score) == (1.0, 0.5)
    assert verdict.candidate is not None
    assert verdict.current is not None
    assert verdict.candidate.unmeasured == verdict.current.unmeasured == ("item-01", "item-02")


def test_below_coverage_the_step_is_unmeasured() -> None:
    """Nine of ten pairs are enough for a coverage of 0.9, eight are no decision at all."""
    won, lost = [1.0] * 10, [0.0] * 10
    assert _action([None, *won[1:]], lost, 0.0, GateConfig()) == "accept_new_best"
    assert _action([None, *won[1:]], [*lost[:9], None], 0.0, GateConfig()) == "unmeasured"
    verdict = decide(_rollouts(CANDIDATE, [None]), _rollouts(CURRENT, [1.0]), None, GateConfig())
    assert (verdict.action, verdict.candidate_score) == ("unmeasured", None)
    assert verdict.reason == "Only 0 of 1 pairs are measured on both sides; the gate needs a share of 0.9."


@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=12))
def test_a_gate_that_is_off_accepts_everything(pairs: list[tuple[float | None, float | None]]) -> None:
    """It records the scores and never refuses."""
    candidate, current = zip(*pairs, strict=True)
    assert _action(candidate, current, 1.0, GateConfig(enabled=False)) == "force_accept"


@given(
    st.lists(st.tuples(scores, scores), min_size=1, max_size=12), scores, st.sampled_from(("hard", "mixed"))
)
def test_no_candidate_and_its_parent_both_win(
    pairs: list[tuple[float | None, float | None]], best: float | None, metric: str
) -> None:
    """With the sides exchanged at most one of them is accepted, and an equal one never is."""
    config = GateConfig.model_validate({"metric": metric, "coverage": 0.01})
    candidate, current = (
        _rollouts(h, v) for h, v in zip((CANDIDATE, CURRENT), zip(*pairs, strict=True), strict=True)
    )
    there, back = decide(candidate, current, best, config), decide(current, candidate, best, config)
    assert not (there.accepted and back.accepted)
    assert not decide(candidate, candidate, best, config).accepted


def test_rounding_is_no_improvement() -> None:
    """Equal mixtures that differ in the last binary digit are equal."""
    config = GateConfig(metric="mixed", mixed_weight=0.7)
    candidate = _rollouts(CANDIDATE, [Score(hard=0.1 + 0.2, soft=0.3)])
    current = _rollouts(CURRENT, [Score(hard=0.3, soft=0.3)])
    assert decide(candidate, current, 0.0, config).action == "reject"


@pytest.mark.parametrize(
    ("candidate", "current", "words"),
    [
        ([], [], "at least one"),
        (_rollouts(CANDIDATE, [1.0]), _rollouts(CURRENT, [1.0, 0.0]), "same items"),
        (_rollouts(CANDIDATE, [1.0]) * 2, _rollouts(CURRENT, [1.0]), "one rollout for each"),
        (
            [*_rollouts(CANDIDATE, [1.0]), *_rollouts(CURRENT, [1.0, 1.0])[1:]],
            _rollouts(CURRENT, [1.0, 0.0]),
            "mixes rollouts",
        ),
    ],
)
def test_sides_that_do_not_match_are_errors(
    candidate: list[Rollout], current: list[Rollout], words: str
) -> None:
    """Sides are compared on the same items and trials, each of one skill."""
    with pytest.raises(ValueError, match=words):
        decide(candidate, current, None, GateConfig())


def test_trials_of_an_item_are_paired_with_their_like() -> None:
    """Two trials of one item are two pairs."""
    trials = [rollout.model_copy(update={"trial": 1}) for rollout in _rollouts(CANDIDATE, [0.0])]
    sides = [*_rollouts(CANDIDATE, [1.0]), *trials]
    verdict = decide(
        sides, [rollout.model_copy(update={"skill_hash": CURRENT}) for rollout in sides], 0.0, GateConfig()
    )
    assert verdict.candidate is not None
    assert verdict.candidate.n == 2
