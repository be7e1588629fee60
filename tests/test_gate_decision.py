"""The paired gate: requests, and decisions on complete trials."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.gate.decision import CONFIRMATION_REPEATS, GateSettings, Ruling, ScorePair, TrialRequest, decide

Sides = tuple[float | None, float | None]
WON, LOST, BOTH, NEITHER = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def setting(n: int, **changes: Any) -> GateSettings:
    """Return a setting for n items."""
    values = {"trials": 4, "level": 0.05, **changes}
    return GateSettings.model_validate({"item_ids": tuple(f"item-{i:02}" for i in range(n)), **values})


def pair(item: int, sides: Sides) -> ScorePair:
    """Return a pair whose scores are also what is solved."""
    candidate, current = sides
    return ScorePair(
        item_id=f"item-{item:02}",
        candidate=candidate,
        current=current,
        candidate_solved=None if candidate is None else candidate > 0,
        current_solved=None if current is None else current > 0,
    )


def trial(sides: Iterable[Sides | None]) -> dict[str, ScorePair]:
    """Return one trial's pairs; None leaves an item out."""
    pairs = [pair(i, both) for i, both in enumerate(sides) if both is not None]
    return {each.item_id: each for each in pairs}


def ask(number: int, *items: int) -> TrialRequest:
    """Return the question for some items."""
    return TrialRequest(trial=number, item_ids=tuple(f"item-{i:02}" for i in items))


def ruled(setting: GateSettings, trials: dict[int, dict[str, ScorePair]]) -> Ruling:
    """Return the decision that there must be."""
    found = decide(setting, trials)
    assert isinstance(found, Ruling)
    return found


# --------------------------------------------------------------------------------------------- one pass


def test_the_first_question_is_one_trial_of_everything() -> None:
    """Nothing is known at first; what is at hand already is not asked again."""
    assert decide(setting(3), {}) == ask(0, 0, 1, 2)
    assert decide(setting(3), {0: trial([BOTH, None, None])}) == ask(0, 1, 2)


@pytest.mark.parametrize(
    ("sides", "action"),
    [([WON, BOTH], "accept"), ([WON, LOST], "reject"), ([BOTH, BOTH], "reject"), ([LOST, BOTH], "reject")],
)
def test_strict_accepts_a_greater_mean(sides: list[Sides], action: str) -> None:
    """One pass decides, a tie is a rejection, and noise is not asked after."""
    found = ruled(setting(2, policy="strict", deterministic=False), {0: trial(sides)})
    assert (found.action, found.evidence.rounds, found.evidence.pairs) == (action, 1, 2)
    assert (found.deterministic, found.evidence.value, found.evidence.level) == (False, None, None)


def test_the_ruling_says_what_was_compared() -> None:
    """The reason is a sentence with the numbers, and the scores are those of the pairs used."""
    found = ruled(setting(4, policy="strict"), {0: trial([WON, BOTH, LOST, NEITHER])})
    assert found.reason == "The candidate's 0.5000 is not above the current 0.5000 over 4 of 4 pairs."


def test_an_improvement_must_exceed_the_least_one_asked_for() -> None:
    """With a least improvement of one item in four, one item is not enough and two are."""
    strict = setting(4, policy="strict", min_improvement=0.25)
    assert ruled(strict, {0: trial([WON, BOTH, BOTH, BOTH])}).action == "reject"
    assert ruled(strict, {0: trial([WON, WON, BOTH, BOTH])}).action == "accept"


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_no_candidate_and_its_parent_both_win(sides: list[tuple[float, float]]) -> None:
    """With the sides exchanged at most one is accepted, and an equal one never is."""
    strict = setting(len(sides), policy="strict")
    there, back, same = (
        ruled(strict, {0: trial(each)}).action
        for each in (sides, [(b, a) for a, b in sides], [(a, a) for a, _ in sides])
    )
    assert {there, back} != {"accept"}
    assert same == "reject"


def test_rounding_is_no_improvement() -> None:
    """Scores that differ in the last binary digit are equal."""
    assert ruled(setting(1), {0: trial([(0.1 + 0.2, 0.3)])}).action == "reject"


# ----------------------------------------------------------------------------------------- deterministic


def test_what_differs_must_happen_again() -> None:
    """A target that never disagreed repeats only the items that differ, four times, before it is believed."""
    first = trial([WON, LOST, WON, BOTH])
    trials = {0: first}
    assert decide(setting(4), trials) == ask(1, 0, 1, 2)
    for number in range(1, CONFIRMATION_REPEATS):
        trials[number] = trial([WON, LOST, WON, None])
        assert decide(setting(4), trials) == ask(number + 1, 0, 1, 2)
    trials[CONFIRMATION_REPEATS] = trials[1]
    found = ruled(setting(4), trials)
    assert (found.action, found.deterministic) == ("accept", True)
    assert (found.evidence.rounds, found.evidence.pairs, found.evidence.value) == (1, 4, None)


def test_a_declared_target_needs_no_repeats() -> None:
    """`target.deterministic: true` accepts on one pass."""
    assert ruled(setting(2, declared_deterministic=True), {0: trial([WON, BOTH])}).action == "accept"


@pytest.mark.parametrize("declared", [False, True])
def test_a_mean_that_is_not_greater_needs_no_repeats(declared: bool) -> None:
    """A rejection costs one pass."""
    found = ruled(setting(2, declared_deterministic=declared), {0: trial([WON, LOST])})
    assert (found.action, found.deterministic, found.evidence.futile) == ("reject", True, False)


def test_a_disagreement_makes_the_target_noisy() -> None:
    """The trial that showed it is completed before it counts, then the test goes on with all of it."""
    trials = {0: trial([WON, WON, BOTH, BOTH]), 1: trial([WON, BOTH, None, None])}
    assert decide(setting(4), trials) == ask(1, 2, 3)
    trials[1] = trial([WON, BOTH, BOTH, BOTH])
    assert decide(setting(4), trials) == ask(2, 0, 1, 2, 3)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("repeat", [(0.0, 0.0), (1.0, 1.0), (0.0, None), (None, 1.0)])
def test_one_side_of_one_stored_repeat_is_enough_to_show_noise(repeat: Sides, declared: bool) -> None:
    """A repeat of either side that disagrees is seen wherever it is, and refutes a declaration."""
    trials = {0: trial([WON, BOTH]), 7: trial([repeat, None])}
    assert decide(setting(2, declared_deterministic=declared), trials) == ask(1, 0, 1)
    assert decide(setting(2, declared_deterministic=declared), {0: trials[0], 7: trial([WON, None])}) != ask(
        1, 0, 1
    )


def test_noise_is_remembered() -> None:
    """A target that once disagreed is tested, whatever the repeats at hand say."""
    trials = {0: trial([WON, BOTH]), 1: trial([WON, None])}
    assert decide(setting(2, deterministic=False, declared_deterministic=True), trials) == ask(1, 1)


def test_repeats_that_are_unmeasured_count_only_against_the_candidate() -> None:
    """What could not be repeated proves nothing; what is proven without it is accepted."""
    first, lossy = trial([WON, WON, LOST, BOTH]), trial([WON, (None, 0.0), LOST, None])
    again = trial([WON, WON, LOST, None])
    found = ruled(setting(4), {0: first, 1: lossy} | dict.fromkeys(range(2, CONFIRMATION_REPEATS + 1), again))
    assert found.action == "unmeasured"
    assert found.reason == "Of 3 items that differ, 1 could not be measured again."
    first = trial([WON, WON, WON, LOST])
    lossy, again = trial([WON, (None, 0.0), WON, LOST]), trial([WON, WON, WON, LOST])
    trials = {0: first, 1: lossy} | dict.fromkeys(range(2, CONFIRMATION_REPEATS + 1), again)
    assert ruled(setting(4), trials).action == "accept"


# ------------------------------------------------------------------------------------------------- noisy


def evidence(rounds: Sequence[Sequence[float]], trials: int, level: float, margin: float = 0.0) -> float:
    """The evidence as the procedure states it, factor by factor."""
    least = math.sqrt(4 * math.log(1 / level) / (len(rounds[0]) * trials))
    stakes = [min(size, 0.9 / (1 + margin)) for size in (least, 2 * least, 4 * least)]
    capital = [math.prod(1 + stake * (d - margin) for each in rounds for d in each) for stake in stakes]
    return sum(weight * value for weight, value in zip((0.4, 0.4, 0.2), capital, strict=True))


differences = st.sampled_from((-1.0, -0.5, 0.0, 0.0, 0.25, 1.0))


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(differences, min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.sampled_from((0.0, 0.1)),
    st.sampled_from((0.01, 0.3)),
)
def test_the_evidence_is_the_stated_product(rounds: list[list[float]], margin: float, level: float) -> None:
    """What is recorded equals the formula, and acceptance is where it first reaches 1 / level."""
    n, count = len(rounds[0]), len(rounds)
    values = [evidence(rounds[: k + 1], count, level, margin) for k in range(count)]
    trials = {k: trial([(max(d, 0.0), max(-d, 0.0)) for d in each]) for k, each in enumerate(rounds)}
    found = ruled(
        setting(n, trials=count, level=level, min_improvement=margin, deterministic=False, effect=1e-9),
        trials,
    )
    used = found.evidence.rounds
    assert found.evidence.value == pytest.approx(values[used - 1], rel=1e-5)
    assert all(value < 1 / level for value in values[: used - 1])
    assert (found.action == "accept") == (values[used - 1] >= 1 / level)


def test_an_improvement_that_stays_is_accepted() -> None:
    """Two items of eight won in each round and none lost: accepted at the first round that proves it."""
    noisy = setting(8, trials=20, level=0.0125, deterministic=False)
    trials: dict[int, dict[str, ScorePair]] = {}
    while isinstance(found := decide(noisy, trials), TrialRequest):
        assert found == ask(len(trials), *range(8))
        trials[found.trial] = trial([WON, WON, *[BOTH] * 6])
    assert (found.action, found.evidence.rounds, found.evidence.pairs) == (
        "accept",
        len(trials),
        8 * len(trials),
    )
    assert found.evidence.value is not None
    assert found.evidence.value >= 80
    assert found.evidence.level == 0.0125
    assert found.reason == (
        "The candidate has 1.0000 and the current skill 0.7500 over 40 of 40 pairs in 5 trials: "
        f"evidence of {found.evidence.value:.4g} for an improvement; 80 is required."
    )


def test_partial_rounds_are_never_tested() -> None:
    """A trial with one open item adds nothing, however well the others went."""
    noisy = setting(8, trials=20, level=0.0125, deterministic=False)
    trials = {0: trial([BOTH] * 8), 1: trial([*[WON] * 7, None]), 2: trial([WON] * 8)}
    assert decide(noisy, trials) == ask(1, 7)


def test_an_improvement_that_has_become_unlikely_is_given_up() -> None:
    """From the second round on, when mean and two standard errors stay below the effect; under its name."""
    noisy = setting(10, trials=20, deterministic=False)
    trials = {0: trial([WON, LOST, *[BOTH] * 8])}
    assert decide(noisy, trials) == ask(1, *range(10))
    trials[1] = trial([LOST, *[BOTH] * 9])
    found = ruled(noisy, trials)
    assert (found.action, found.evidence.futile, found.evidence.rounds) == ("reject", True, 2)
    assert found.reason == (
        "The candidate has 0.9000 and the current skill 0.9500 over 20 of 20 pairs in 2 trials; "
        "an improvement of 0.15 has become unlikely."
    )


def test_what_stays_open_is_inconclusive() -> None:
    """At the last round neither is shown; the record says what this much evidence could have resolved."""
    noisy = setting(4, trials=2, level=0.0125, deterministic=False)
    found = ruled(noisy, {0: trial([WON, BOTH, BOTH, LOST]), 1: trial([WON, WON, BOTH, LOST])})
    assert (found.action, found.evidence.futile) == ("inconclusive", False)
    share = math.sqrt(2 * (math.log(80) + 0.4)) + 0.84
    assert found.evidence.detectable_effect == pytest.approx(min(1.0, share * math.sqrt(5 / 8 / 8)))
    assert "2 trials of 4 items detect improvements of about 1.00" in found.reason


def test_further_trials_go_on_with_the_same_stakes() -> None:
    """An inconclusive comparison that is given more rounds keeps the bets of its first plan."""
    rounds = [[1.0, 0.0, 0.0, -1.0], [1.0, 1.0, 0.0, -1.0], [1.0, 0.0, 0.0, 0.0]]
    trials = {k: trial([(max(d, 0.0), max(-d, 0.0)) for d in each]) for k, each in enumerate(rounds)}
    changes = {"planned_trials": 40, "planned_level": 0.0125, "deterministic": False}
    assert decide(setting(4, trials=4, **changes), trials) == ask(3, 0, 1, 2, 3)
    found = ruled(setting(4, trials=3, level=0.05, **changes), trials)
    assert found.evidence.value == pytest.approx(evidence(rounds, 40, 0.0125), rel=1e-5)


def test_a_comparison_goes_on_for_the_least_improvement_that_counts() -> None:
    """Where more than the effect is asked for, it is given up as soon as that has become unlikely."""
    trials = {k: trial([WON, *[BOTH] * 9]) for k in range(2)}
    noisy = setting(10, trials=3, effect=0.05, deterministic=False)
    assert decide(noisy, trials) == ask(2, *range(10))
    found = ruled(noisy.model_copy(update={"min_improvement": 0.5}), trials)
    assert (found.action, found.evidence.futile) == ("reject", True)
    assert found.reason.endswith("an improvement of 0.5 has become unlikely.")


def test_overwhelming_evidence_is_still_a_number() -> None:
    """Thousands of wins neither overflow nor hide, and as many losses neither."""
    noisy = setting(3000, trials=2, level=1e-12, deterministic=False)
    won = ruled(noisy, {0: trial([WON] * 3000)})
    assert won.action == "accept"
    assert won.evidence.value == pytest.approx(1.01423e304)
    lost = ruled(noisy, {0: trial([LOST] * 3000), 1: trial([LOST] * 3000)})
    assert (lost.action, lost.evidence.value) == ("reject", 0.0)


@given(st.randoms(use_true_random=False), st.lists(st.lists(differences, min_size=4, max_size=4), max_size=6))
def test_the_order_of_arrival_is_not_seen(chance: random.Random, rounds: list[list[float]]) -> None:
    """The same pairs in mappings of any order give the same bytes."""
    trials = {k: trial([(max(d, 0.0), max(-d, 0.0)) for d in each]) for k, each in enumerate(rounds)}
    mixed = {
        k: {i: trials[k][i] for i in chance.sample(sorted(trials[k]), len(trials[k]))}
        for k in chance.sample(sorted(trials), len(trials))
    }
    noisy = setting(4, trials=6, deterministic=False, level=0.3)
    assert decide(noisy, trials).model_dump_json() == decide(noisy, mixed).model_dump_json()


# ----------------------------------------------------------------------------------------------- coverage


def test_below_coverage_nothing_is_decided() -> None:
    """Nineteen pairs of twenty are enough for a coverage of 0.95, eighteen are not."""
    whole = setting(20, policy="strict", coverage=0.95)
    assert ruled(whole, {0: trial([(None, None), *[WON] * 19])}).action == "accept"
    found = ruled(whole, {0: trial([(None, None), (None, None), *[WON] * 18])})
    assert found.action == "unmeasured"
    assert found.reason == (
        "Only 18 of 20 pairs are measured on both sides, with 2 rollouts of the candidate and 2 of the "
        "current skill missing; the gate needs a share of 0.95, and the sides' shares at most 5 points apart."
    )


def test_nothing_measured_has_no_score() -> None:
    """Absence is None, never a zero."""
    found = ruled(setting(1, coverage=0.01), {0: trial([(None, 0.0)])})
    assert found.action == "unmeasured"


def test_sides_that_fail_unequally_are_not_compared() -> None:
    """One side unmeasured 5 points more often than the other is as far as it may go."""
    noisy = setting(20, coverage=0.5, deterministic=False)
    at_most = trial([(None, 0.0), *[WON] * 19])
    beyond = trial([(None, 0.0), (None, 0.0), *[WON] * 18])
    alike = trial([(None, 0.0), (0.0, None), *[WON] * 18])
    assert [ruled(noisy, {0: each}).action for each in (at_most, beyond, alike)] == [
        "accept",
        "unmeasured",
        "accept",
    ]


def test_unmeasured_pairs_are_left_out_of_the_evidence() -> None:
    """They are no losses: the evidence is that of the other pairs."""
    noisy = setting(11, trials=1, coverage=0.9, deterministic=False)
    found = ruled(noisy, {0: trial([(None, None), WON, *[BOTH] * 9])})
    assert found.evidence.value == pytest.approx(evidence([[1.0, *[0.0] * 10]], 1, 0.05), rel=1e-5)
    assert found.evidence.pairs == 10


# ------------------------------------------------------------------------------------------ no regression


@pytest.mark.parametrize(("allowed", "action"), [(0, "reject"), (1, "accept"), (None, "accept")])
@pytest.mark.parametrize("changes", [{"policy": "strict"}, {"declared_deterministic": True}])
def test_lost_items_veto_an_acceptance(allowed: int | None, action: str, changes: dict[str, Any]) -> None:
    """Three items won and one lost: accepted by the mean, vetoed where none may be lost."""
    found = ruled(setting(4, no_regression=allowed, **changes), {0: trial([WON, WON, WON, LOST])})
    assert found.action == action
    vetoed = "The candidate fails 1 item that was solved before; `no_regression` allows 0."
    assert (found.reason == vetoed) == (action == "reject")
    assert not found.evidence.futile


def test_an_unmeasured_item_is_not_lost() -> None:
    """Nor is one whose current side alone was measured."""
    strict = setting(4, policy="strict", coverage=0.5, no_regression=0)
    found = ruled(strict, {0: trial([WON, WON, (None, None), WON])})
    assert found.action == "accept"
    wide = setting(20, policy="strict", coverage=0.5, no_regression=0)
    assert ruled(wide, {0: trial([(None, 1.0), *[WON] * 19])}).action == "accept"


def test_a_noisy_target_is_asked_again_before_an_item_counts_as_lost() -> None:
    """Suspects get four trials on both sides; one that solves it once more is no loss."""
    noisy = setting(12, trials=4, level=0.2, no_regression=0, deterministic=False)
    trials = {0: trial([LOST, LOST, *[WON] * 10])}
    assert decide(noisy, trials) == ask(1, 0, 1)
    trials[1] = trial([LOST, BOTH])
    assert decide(noisy, trials) == ask(2, 0)
    trials[2] = trial([LOST])
    assert decide(noisy, trials) == ask(3, 0)
    lost = ruled(noisy, {**trials, 3: trial([LOST])})
    assert (lost.action, lost.evidence.futile, lost.evidence.rounds) == ("reject", False, 1)
    assert lost.reason == "The candidate fails 1 item that was solved before; `no_regression` allows 0."
    assert ruled(noisy, {**trials, 3: trial([NEITHER])}).action == "accept"


def test_few_enough_suspects_are_not_run_again() -> None:
    """Where the veto cannot come, nothing is spent on it."""
    noisy = setting(12, trials=4, level=0.2, no_regression=2, deterministic=False)
    assert ruled(noisy, {0: trial([LOST, LOST, *[WON] * 10])}).action == "accept"


def test_the_suspects_trials_do_not_undo_the_acceptance() -> None:
    """The first round that proves the improvement decides, even where suspects complete a second one."""
    noisy = setting(2, trials=2, level=0.9, no_regression=0, deterministic=False)
    first = {
        "item-00": ScorePair(
            item_id="item-00", candidate=1, current=0, candidate_solved=False, current_solved=True
        )
    }
    first["item-01"] = first["item-00"].model_copy(update={"item_id": "item-01"})
    assert decide(noisy, {0: first}) == ask(1, 0, 1)
    found = ruled(noisy, {0: first, 1: trial([BOTH, NEITHER])})
    assert (found.action, found.evidence.rounds) == ("accept", 1)
