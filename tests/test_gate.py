"""The paired gate: requests, and decisions on complete trials."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reflact.gate.early_stop import EarlyStopMonitor, decide_early
from reflact.gate.intervals import (
    CLAIM_LEVEL,
    MIN_CLAIM_ITEMS,
    compute_chance,
    describe_claim,
    improvement_interval,
    mean_interval,
    student_quantile,
    wilson_interval,
)
from reflact.gate.paired_decision import (
    CONFIRMATION_REPEATS,
    GateSettings,
    Ruling,
    ScorePair,
    TrialRequest,
    count_required,
    decide,
)
from reflact.gate.paired_test import (
    PairStatistics,
    choose_stakes,
    choose_trials,
    describe_power,
    detectable_effect,
)
from reflact.types import Verdict

Sides = tuple[float | None, float | None]
WON, LOST, BOTH, NEITHER = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def setting(n: int, **changes: Any) -> GateSettings:
    """Return a setting for n items."""
    values = {"trials": 4, "level": 0.05, **changes}
    return GateSettings.model_validate({"item_ids": tuple(f"item-{i:02}" for i in range(n)), **values})


def pair(item_id: str, sides: Sides) -> ScorePair:
    """Return a pair whose scores are also what is solved."""
    candidate, current = sides
    return ScorePair(
        item_id=item_id,
        candidate=candidate,
        current=current,
        candidate_solved=None if candidate is None else candidate > 0,
        current_solved=None if current is None else current > 0,
    )


def trial(sides: Iterable[Sides | None]) -> dict[str, ScorePair]:
    """Return one trial's pairs; None leaves an item out."""
    pairs = [pair(f"item-{i:02}", both) for i, both in enumerate(sides) if both is not None]
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


def test_a_share_of_items_is_counted_in_whole_numbers() -> None:
    """A coverage in hundredths needs as many items as its decimal says, at least one, although floats are rounded."""
    for percent, total in itertools.product(range(1, 101), range(1, 201)):
        assert count_required(percent / 100, total) == -(-percent * total // 100), (percent, total)
    assert (count_required(0.0, 10), count_required(1e-05, 100_000), count_required(1 / 3, 9)) == (1, 1, 3)


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
    for number in range(1, CONFIRMATION_REPEATS["paired"]):
        trials[number] = trial([WON, LOST, WON, None])
        assert decide(setting(4), trials) == ask(number + 1, 0, 1, 2)
    trials[CONFIRMATION_REPEATS["paired"]] = trials[1]
    found = ruled(setting(4), trials)
    assert (found.action, found.deterministic) == ("accept", True)
    assert (found.evidence.rounds, found.evidence.pairs, found.evidence.value) == (1, 4, None)


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
    found = ruled(
        setting(4), {0: first, 1: lossy} | dict.fromkeys(range(2, CONFIRMATION_REPEATS["paired"] + 1), again)
    )
    assert found.action == "unmeasured"
    assert found.reason == "Of 3 items that differ, 1 could not be measured again."
    first = trial([WON, WON, WON, LOST])
    lossy, again = trial([WON, (None, 0.0), WON, LOST]), trial([WON, WON, WON, LOST])
    trials = {0: first, 1: lossy} | dict.fromkeys(range(2, CONFIRMATION_REPEATS["paired"] + 1), again)
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
@example([[0.25, 0.0]] * 5, 0.0, 0.01)
def test_the_evidence_is_the_stated_product(rounds: list[list[float]], margin: float, level: float) -> None:
    """What is recorded equals the formula, and acceptance is where it first reaches 1 / level.

    Scores that agreed in five rounds may also be accepted because they repeat, which the reason says.
    """
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
    repeats = "if all scores that agreed" in (found.reason or "")
    assert (found.action == "accept") == (values[used - 1] >= 1 / level or repeats)


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
        "The candidate has 1 and the current skill 0.75, on 8 items in 5 trials: "
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
        "The candidate has 0.9 and the current skill 0.95, on 10 items in 2 trials; "
        "an improvement of 0.15 has become unlikely."
    )


def test_a_gain_two_errors_above_zero_is_not_given_up() -> None:
    """Ten items of a hundred won in two rounds and none lost: though the effect is out of reach, the test goes on."""
    noisy = setting(100, trials=5, level=0.0125, deterministic=False)
    trials = {0: trial([*[WON] * 5, *[BOTH] * 95]), 1: trial([*[BOTH] * 5, *[WON] * 5, *[BOTH] * 90])}
    assert decide(noisy, trials) == ask(2, *range(100))
    assert ruled(noisy.model_copy(update={"min_improvement": 0.03}), trials).evidence.futile
    given_up = ruled(noisy, {0: trials[0], 1: trial([*[LOST] * 5, *[BOTH] * 95])})
    assert given_up.evidence.futile
    assert not Verdict(action="reject", reason=given_up.reason, evidence=given_up.evidence).refuted


COIN = ([WON, NEITHER, LOST, NEITHER, BOTH], [BOTH, WON, WON, BOTH, LOST])
"""Five trials of an item that is noisy on both sides."""


@pytest.mark.parametrize(
    ("won", "coins", "changes", "action"),
    [
        (2, 1, {}, "accept"),
        (3, 2, {}, "accept"),
        (1, 1, {}, "reject"),
        (2, 2, {}, "inconclusive"),
        (2, 1, {"min_improvement": 0.02}, "reject"),
        (2, 1, {"trust_repeats": False}, "inconclusive"),
        (2, 1, {"trials": 4}, "inconclusive"),
    ],
)
def test_a_coin_flip_does_not_hide_a_certain_gain(
    won: int, coins: int, changes: dict[str, Any], action: str
) -> None:
    """After five rounds items that never disagreed count as reproduced, and each that did as lost."""
    noisy = setting(100, **{"trials": 5, "level": 0.0001, "deterministic": False, **changes})
    trials = {
        k: trial([*[WON] * won, *(side[k] for side in COIN[:coins]), *[BOTH] * (100 - won - coins)])
        for k in range(5)
    }
    found = ruled(noisy, trials)
    assert found.action == action
    if action != "accept":
        return
    assert found.evidence.rounds == 5
    items = {1: "1 item", 2: "2 items"}[coins]
    assert found.reason == (
        "The candidate gains at least 0.0100 on 100 items if all scores that agreed in 5 trials repeat; "
        f"{items} that disagreed count as lost."
    )
    lossy = {**trials, 3: {**trials[3], "item-00": pair("item-00", (None, 0.0))}}
    assert ruled(noisy, lossy).action != "accept"


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
        "Only 18 of 20 comparisons are measured with both skills: 2 rollouts of the candidate and 2 of the current "
        "skill are missing. The gate needs a share of 0.95, and the skills' shares at most 5 points apart."
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


# ---------- gate early stop

Score = Callable[[int, str], Sides]
WON, LOST, BOTH, NEITHER = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def pairs(*sides: Sides) -> list[ScorePair]:
    """Return pairs of the first items."""
    return list(trial(sides).values())


def first_stop(
    setting: GateSettings, trials: dict[int, dict[str, ScorePair]], sides: Sequence[Sides]
) -> tuple[int, str]:
    """Return after how many answers to the next question the decision is clear, and which it is."""
    asked = decide(setting, trials)
    assert isinstance(asked, TrialRequest)
    found = [pair(i, both) for i, both in zip(asked.item_ids, sides, strict=False)]
    for length in range(1, len(found) + 1):
        ruling = decide_early(setting, trials, asked, found[:length])
        if ruling is not None:
            assert ruling.evidence.bound
            return length, ruling.action
    return 0, "open"


# ---------------------------------------------------------------------------------------------- one pass


STRICT = setting(6, policy="strict")
DECLARED = setting(6, declared_deterministic=True)
NOISY = setting(12, level=0.2, no_regression=0, deterministic=False)


@pytest.mark.parametrize(
    ("setting", "stored", "sides", "stop"),
    [
        *(
            (each, {}, sides, stop)
            for each in (STRICT, DECLARED)
            for sides, stop in [
                ([WON, WON, BOTH, BOTH, BOTH, BOTH], (5, "accept")),
                ([WON, WON, WON, WON, BOTH, BOTH], (4, "accept")),
                ([LOST, LOST, LOST, BOTH, BOTH, BOTH], (3, "reject")),
                ([WON, LOST, BOTH, NEITHER, BOTH], (0, "open")),
                ([LOST, BOTH, BOTH, BOTH, BOTH], (5, "reject")),
            ]
        ),
        # the least improvement counts in the open pairs too
        (setting(2, policy="strict", min_improvement=0.75), {}, [BOTH, WON], (1, "reject")),
        (setting(2, policy="strict", min_improvement=0.25), {}, [BOTH, WON], (0, "open")),
        (setting(4, policy="strict", min_improvement=0.25), {}, [WON] * 4, (3, "accept")),
        # an improvement that must be repeated has no early acceptance
        (setting(4), {}, [WON] * 4, (0, "open")),
        (setting(4), {}, [LOST] * 4, (2, "reject")),
        # stored repeats of open items may show noise
        (setting(4), {1: {"item-03": pair("item-03", BOTH)}}, [LOST] * 4, (0, "open")),
        (setting(4, policy="strict"), {1: {"item-03": pair("item-03", BOTH)}}, [LOST] * 4, (2, "reject")),
        # repeats and items that may be lost are run to the end
        (setting(4), {0: trial([WON, WON, WON, BOTH])}, [WON, BOTH, BOTH], (0, "open")),
        (NOISY, {0: trial([LOST, LOST, *[WON] * 10])}, [BOTH, BOTH], (0, "open")),
        # too many lost items reject at once
        (STRICT.model_copy(update={"no_regression": 0}), {}, [WON, LOST, *[WON] * 4], (2, "reject")),
        (STRICT.model_copy(update={"no_regression": 1}), {}, [WON, LOST, *[WON] * 4], (0, "open")),
        (STRICT, {}, [WON, LOST, *[WON] * 4], (5, "accept")),
        # an acceptance waits while a veto is possible
        (STRICT, {}, [WON] * 6, (4, "accept")),
        (STRICT.model_copy(update={"no_regression": 1}), {}, [WON] * 6, (5, "accept")),
        (STRICT.model_copy(update={"no_regression": 0}), {}, [WON] * 6, (0, "open")),
        # a complete request is for the gate itself, and early stop may be off
        (setting(1, policy="strict"), {}, [WON], (0, "open")),
        (setting(6, policy="strict", early_stop=False), {}, [LOST] * 6, (0, "open")),
        # the last round stops when it cannot prove anything
        (setting(2, trials=1, level=0.0001, deterministic=False), {}, [WON], (1, "inconclusive")),
        (setting(2, trials=2, level=0.0001, deterministic=False), {}, [WON], (0, "open")),
    ],
)
def test_a_request_stops_when_its_open_pairs_cannot_change_the_decision(
    setting: GateSettings, stored: dict[int, dict[str, ScorePair]], sides: list[Sides], stop: tuple[int, str]
) -> None:
    """A decision is made after as many pairs as determine it, and not before."""
    assert first_stop(setting, stored, sides) == stop


def test_the_record_says_that_it_is_a_bound() -> None:
    """The scores are those of the pairs that are known."""
    ruling = decide_early(
        setting(6, policy="strict"),
        {},
        TrialRequest(trial=0, item_ids=setting(6).item_ids),
        pairs(*[LOST] * 3),
    )
    assert ruling is not None
    assert ruling.reason == (
        "The candidate's 0 is not above the current skill's 1, on 3 of 6 items. "
        "The 3 comparisons that are left cannot change that."
    )
    assert (ruling.evidence.rounds, ruling.evidence.pairs, ruling.evidence.bound) == (1, 3, True)


def test_losing_suspects_again_does_not_undo_the_acceptance() -> None:
    """Evidence that was just enough stays so, whatever the further trials of suspects would make of it."""
    noisy = setting(12, trials=2, planned_level=0.2, no_regression=0, deterministic=False)
    first = {0: trial([LOST, LOST, *[WON] * 10])}
    enough = decide(noisy.model_copy(update={"no_regression": None, "level": 0.9}), first)
    assert isinstance(enough, Ruling)
    assert enough.evidence.value is not None
    barely = noisy.model_copy(update={"level": 1.01 / enough.evidence.value})
    assert decide(barely, first) == TrialRequest(trial=1, item_ids=("item-00", "item-01"))
    assert first_stop(barely, first, [LOST, LOST]) == (0, "open")


def test_an_item_that_was_solved_once_is_not_lost() -> None:
    """Neither by a repeat before its failure nor by one after it, where the metric sees no difference."""
    half = pair("item-00", (0.5, 0.5))
    failed, solved = (half.model_copy(update={"candidate_solved": each}) for each in (False, True))
    declared = setting(6, declared_deterministic=True, no_regression=0)
    for order in ((failed, solved), (solved, failed)):
        stored = {number: {"item-00": each} for number, each in enumerate(order)}
        assert first_stop(declared, stored, [WON, WON, WON, BOTH, BOTH]) == (0, "open")
    assert first_stop(declared, {0: {"item-00": failed}}, [WON, WON, WON, BOTH, BOTH]) == (1, "reject")


# ------------------------------------------------------------------------------------------------- noisy


def test_proof_that_no_loss_can_undo_is_accepted() -> None:
    """The recorded evidence is the least that the open pairs can leave, and the first that is enough."""
    noisy = setting(12, trials=1, level=0.2, deterministic=False)
    least = math.sqrt(4 * math.log(5) / 12)
    stakes = list(zip((0.4, 0.4, 0.2), (least, min(2 * least, 0.9), 0.9), strict=True))
    left = [sum(w * (1 + s) ** n * (1 - s) ** (12 - n) for w, s in stakes) for n in range(12)]
    length = next(n for n in range(12) if left[n] >= 5)
    assert length < 11
    assert first_stop(noisy, {}, [WON] * 12) == (length, "accept")
    ruling = decide_early(noisy, {}, TrialRequest(trial=0, item_ids=noisy.item_ids), pairs(*[WON] * 11))
    complete = decide(noisy, {0: trial([*[WON] * length, *[LOST] * (12 - length)])})
    assert ruling is not None
    assert isinstance(complete, Ruling)
    assert ruling.evidence.value == complete.evidence.value == pytest.approx(left[length], rel=1e-5)
    assert (ruling.evidence.bound, complete.evidence.bound) == (True, False)


def test_a_round_that_will_end_as_futile_stops() -> None:
    """After a round without a win, lost pairs settle it as soon as winning the rest cannot help."""
    noisy = setting(20, trials=4, level=0.0125, deterministic=False)
    length, action = first_stop(noisy, {0: trial([*[LOST] * 6, *[BOTH] * 14])}, [LOST] * 20)
    assert (0 < length < 20, action) == (True, "reject")
    ruling = decide_early(
        noisy,
        {0: trial([*[LOST] * 6, *[BOTH] * 14])},
        TrialRequest(trial=1, item_ids=noisy.item_ids),
        pairs(*[LOST] * 19),
    )
    assert ruling is not None
    assert ruling.evidence.futile


# -------------------------------------------------------------------------------------------- everything


@dataclass
class Evaluation:
    """An evaluation of both sides, with what was run in it."""

    setting: GateSettings
    score: Score
    trials: dict[int, dict[str, ScorePair]] = field(default_factory=dict)
    ran: set[tuple[int, str]] = field(default_factory=set)
    last: TrialRequest | None = None
    prefix: list[ScorePair] = field(default_factory=list)

    def store(self, stored: dict[int, tuple[str, ...]]) -> Evaluation:
        """Begin with pairs at hand."""
        for number, item_ids in stored.items():
            self.trials[number] = {i: pair(i, self.score(number, i)) for i in item_ids}
            self.ran |= {(number, i) for i in item_ids}
        return self

    def run(self, stop: Callable[[TrialRequest, list[ScorePair]], Ruling | None]) -> Ruling:
        """Answer what is asked until there is a decision."""
        while isinstance(asked := decide(self.setting, self.trials), TrialRequest):
            found = [pair(i, self.score(asked.trial, i)) for i in asked.item_ids]
            self.last, self.prefix = asked, []
            if (ruling := stop(asked, found)) is not None:
                return ruling
            self.trials.setdefault(asked.trial, {}).update({each.item_id: each for each in found})
        return asked

    def complete(self) -> Ruling:
        """Evaluate without early stop."""
        return self.run(lambda _, found: None)

    def in_order(self) -> Ruling:
        """Evaluate one item after the other."""

        def stop(asked: TrialRequest, found: list[ScorePair]) -> Ruling | None:
            watch = EarlyStopMonitor(self.setting, self.trials, asked)
            for each in found:
                self.prefix.append(each)
                self.ran.add((asked.trial, each.item_id))
                if (ruling := watch.add(each)) is not None:
                    return ruling
            return None

        return self.run(stop)

    def out_of_order(self, chance: random.Random) -> Ruling:
        """Evaluate all items at once; they finish in a random order."""

        def stop(asked: TrialRequest, found: list[ScorePair]) -> Ruling | None:
            finished: set[int] = set()
            for place in chance.sample(range(len(found)), len(found)):
                finished.add(place)
                length = next(n for n in range(len(found) + 1) if n not in finished)
                if (ruling := decide_early(self.setting, self.trials, asked, found[:length])) is not None:
                    return ruling
            return None

        return self.run(stop)


class World:
    """Random settings and scores; the same seed gives the same."""

    def __init__(self, seed: int, fewest: int = 2, most: int = 7) -> None:
        chance = random.Random(seed)
        self.setting = setting(
            chance.randint(fewest, most),
            policy=chance.choice(("strict", "paired", "paired", "paired")),
            trials=chance.randint(1, CONFIRMATION_REPEATS["paired"] + 1),
            level=chance.choice((0.0001, 0.02, 0.2, 0.5)),
            effect=chance.choice((0.05, 0.15, 0.4)),
            min_improvement=chance.choice((0.0, 0.0, 0.1)),
            coverage=chance.choice((0.5, 0.8)),
            no_regression=chance.choice((None, None, 0, 1)),
            deterministic=chance.random() < 0.4,
            declared_deterministic=chance.random() < 0.3,
            trust_repeats=chance.random() < 0.7,
        )
        self.values = chance.choice(((0.0, 1.0), (0.0, 0.3, 0.5, 1.0)))
        self.skill, self.lift = chance.random(), chance.choice((-0.5, 0.0, 0.5, 1.0))
        self.missing = chance.choice((0.0, 0.0, 0.05))
        ids = self.setting.item_ids
        stored = chance.sample(range(CONFIRMATION_REPEATS["paired"] + 1), chance.choice((0, 0, 0, 1, 2)))
        self.stored = {number: tuple(chance.sample(ids, chance.randint(0, len(ids)))) for number in stored}
        self.scores = {(0, item_id): self._sides(chance) for item_id in ids}
        noise = chance.choice((0.0, 0.3, 1.0))
        for number in range(1, CONFIRMATION_REPEATS["paired"] + 1):
            for item_id in ids:
                again = self._sides(chance) if chance.random() < noise else self.scores[0, item_id]
                self.scores[number, item_id] = again

    def score(self, number: int, item_id: str) -> Sides:
        """Return both sides' scores."""
        return self.scores[number, item_id]

    def evaluation(self, score: Score | None = None) -> Evaluation:
        """Return an evaluation that begins with what is stored."""
        return Evaluation(self.setting, self.score if score is None else score).store(self.stored)

    def _sides(self, chance: random.Random) -> Sides:
        return self._side(chance, self.lift), self._side(chance, 0.0)

    def _side(self, chance: random.Random, lift: float) -> float | None:
        if chance.random() < self.missing:
            return None
        if chance.random() < abs(lift):
            return self.values[-1 if lift > 0 else 0]
        if chance.random() < 0.2:
            return chance.choice(self.values)
        return self.values[-1 if chance.random() < self.skill else 0]


def table(scores: Mapping[tuple[int, str], Sides]) -> Score:
    """Return the look-up of a table."""
    return lambda number, item_id: scores[number, item_id]


def continuations(world: World, ran: set[tuple[int, str]], seed: int) -> Iterator[Score]:
    """Yield what the pairs that were never run may give: all won, all lost, either, or no difference too."""
    chance = random.Random(seed)
    for choices in ((WON,), (LOST,), (WON, LOST), (WON, LOST, BOTH)):
        drawn = {key: world.scores[key] if key in ran else chance.choice(choices) for key in world.scores}
        yield table(drawn)


def kind(ruling: Ruling) -> str:
    """Name what a decision rested on."""
    words = [ruling.action, "by test" if ruling.evidence.value is not None else "by one pass"]
    words += ["veto"] * ("no_regression" in ruling.reason) + ["bound"] * ruling.evidence.bound
    return ", ".join(words)


BOUNDS = (
    "accept, by one pass, bound",
    "reject, by one pass, bound",
    "reject, by one pass, veto, bound",
    "accept, by test, bound",
    "reject, by test, bound",
    "inconclusive, by test, bound",
)


@pytest.mark.slow
def test_the_decision_is_that_of_the_complete_evaluation(thorough: bool) -> None:
    """In 10,000 random sequences (1,000 unless thorough), whatever the pairs that are never run would give.

    The action is the complete evaluation's, futile where that is futile; and in a random order of completion
    the record is the same bytes.
    """
    kinds: Counter[str] = Counter()
    sequences = 10_000 if thorough else 1_000
    for seed in range(sequences):
        world = World(seed)
        evaluation = world.evaluation()
        stopped = evaluation.in_order()
        shuffled = world.evaluation().out_of_order(random.Random(seed))
        assert shuffled.model_dump_json() == stopped.model_dump_json(), seed
        kinds[kind(stopped)] += 1
        for score in continuations(world, evaluation.ran, seed):
            complete = world.evaluation(score).complete()
            assert complete.action == stopped.action, seed
            assert complete.evidence.futile == stopped.evidence.futile, seed
    assert min(kinds[each] for each in BOUNDS) >= (30 if thorough else 1), kinds


def test_what_is_never_run_needs_no_measurement(thorough: bool) -> None:
    """Were they as drawn, unmeasured ones among them, the action could differ only for want of coverage."""
    for seed in range(2000 if thorough else 200):
        world = World(seed)
        stopped, complete = world.evaluation().in_order(), world.evaluation().complete()
        if complete.action != stopped.action:
            assert (stopped.evidence.bound, complete.action) == (True, "unmeasured"), seed


def test_measuring_an_unmeasured_pair_after_all_changes_nothing(thorough: bool) -> None:
    """A decision that was clear beside unmeasured pairs of the prefix is the same when they are had."""
    mended = 0
    for seed in range(1000 if thorough else 300):
        world, chance = World(seed, 20, 25), random.Random(seed)
        lossy = {
            key: (None, old) if chance.random() < 0.03 else (new, old)
            for key, (new, old) in world.scores.items()
        }
        evaluation = world.evaluation(table(lossy))
        stopped = evaluation.in_order()
        if not stopped.evidence.bound or all(each.difference is not None for each in evaluation.prefix):
            continue
        assert evaluation.last is not None
        for candidate in (1.0, 0.0):
            prefix = [
                pair(each.item_id, (candidate if each.candidate is None else each.candidate, each.current))
                for each in evaluation.prefix
            ]
            again = decide_early(world.setting, evaluation.trials, evaluation.last, prefix)
            assert again is not None, seed
            assert again.action == stopped.action, seed
            mended += 1
    assert mended > (100 if thorough else 20)


# ---------- the evidence of pairs

scores = st.sampled_from((0.0, 0.25, 0.5, 1.0))
sides = st.tuples(scores, scores)


def counted(pairs: Sequence[tuple[float | None, float | None]], margin: float = 0.0) -> PairStatistics:
    """Return the tally of some pairs in a plan for 40."""
    tally = PairStatistics(stakes=choose_stakes(40, level=0.05, margin=margin), margin=margin)
    for candidate, current in pairs:
        tally.add(candidate, current)
    return tally


def test_stakes_are_those_of_the_plan() -> None:
    """Each is twice the one before it, and none can lose more than nine tenths in a pair."""
    assert choose_stakes(400, level=0.0125, margin=0.0) == pytest.approx(
        (0.20933, 0.41867, 0.83733), abs=1e-5
    )
    assert choose_stakes(20, level=0.0125, margin=0.25) == (0.72, 0.72, 0.72)


@given(st.lists(sides, min_size=2, max_size=20))
def test_sums_are_those_of_the_differences(pairs: list[tuple[float, float]]) -> None:
    """Mean and two standard errors are the sample's."""
    tally, found = counted(pairs), [new - old for new, old in pairs]
    assert tally.total == pytest.approx(sum(found))
    assert tally.upper_bound == pytest.approx(mean(found) + 2 * stdev(found) / math.sqrt(len(found)))


def test_unmeasured_pairs_are_counted_and_left_out() -> None:
    """Each side's are counted apart; neither sums nor evidence move."""
    tally, same = counted([(1.0, 0.0), (None, 1.0), (None, None), (1.0, None)]), counted([(1.0, 0.0)])
    assert (tally.n_pairs, tally.n_measured, tally.n_unmeasured) == (4, 1, (2, 2))
    assert (tally.total, tally.log_evidence(), tally.upper_bound) == (1.0, same.log_evidence(), math.inf)


@given(st.lists(sides, max_size=8), st.integers(0, 5), st.sampled_from((-1.0, 1.0)))
def test_evidence_of_further_pairs_is_that_of_adding_them(
    pairs: list[tuple[float, float]], further: int, difference: float
) -> None:
    """What-if and real pairs are worth the same."""
    added = counted([*pairs, *[(max(difference, 0.0), max(-difference, 0.0))] * further], margin=0.1)
    assert counted(pairs, margin=0.1).log_evidence(further, difference) == pytest.approx(added.log_evidence())


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4), st.sampled_from((0.0, 0.1))
)
def test_a_candidate_that_is_not_better_has_no_expected_evidence(
    chances: list[tuple[float, float]], margin: float
) -> None:
    """Over all outcomes of a round, whatever each item's chances on both sides, the mean is at most 1.

    ``chances`` are probabilities of solving an item; the candidate's are lowered until the mean difference
    is at most the margin.
    """
    surplus = sum(new - old for new, old in chances) - margin * len(chances)
    scale = 1.0 if surplus <= 0 else 1 - surplus / sum(new for new, _ in chances)
    chances = [(max(0.0, new * scale), old) for new, old in chances]
    expected = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=2 * len(chances)):
        pairs = list(zip(outcome[::2], outcome[1::2], strict=True))
        probability = math.prod(
            (p if new else 1 - p) * (q if old else 1 - q)
            for (new, old), (p, q) in zip(pairs, chances, strict=True)
        )
        expected += probability * math.exp(counted(pairs, margin=margin).log_evidence())
    assert expected <= 1 + 1e-9


# ---------- gate power


@pytest.mark.parametrize(("n", "trials"), [(20, 20), (50, 8), (100, 5), (400, 5), (5, 20)])
def test_trials_follow_from_the_split(n: int, trials: int) -> None:
    """Fewer items need more trials for 15 points in 8 decisions, within 5 and 20."""
    assert choose_trials(n, decisions=8, alpha=0.1, effect=0.15) == trials


def test_resolution_is_that_of_the_design() -> None:
    """Known values at a level of 0.0125; fewer pairs that differ resolve more, and nothing exceeds 1."""
    assert detectable_effect(20, 4, level=0.0125) == pytest.approx(0.311, abs=5e-4)
    assert detectable_effect(20, 20, level=0.0125) == pytest.approx(0.139, abs=5e-4)
    assert detectable_effect(20, 20, level=0.0125, discordant=0.125) == pytest.approx(0.139 / 2, abs=5e-4)
    assert detectable_effect(1, 1, level=0.0125) == 1.0


@given(st.integers(1, 500), st.integers(1, 40), st.sampled_from((0.05, 0.1)), st.floats(0.05, 0.5))
def test_planned_trials_resolve_the_effect(n: int, decisions: int, alpha: float, effect: float) -> None:
    """Where the number is not cut, it is enough for the effect and not by more than the allowance."""
    trials = choose_trials(n, decisions=decisions, alpha=alpha, effect=effect)
    level = alpha / decisions
    if trials < 20:
        assert detectable_effect(n, trials, level=level) <= effect
    if trials > 5:
        assert detectable_effect(n, trials - 1, level=level) > effect / 1.15**0.5


def test_the_outlook_names_what_it_would_take() -> None:
    """A plan that is too small says so before anything is spent on it."""
    words = "20 items x 20 trials can detect improvements of about 14 points if the target is noisy."
    assert describe_power(20, 20, decisions=8, alpha=0.1, effect=0.15) == words
    assert describe_power(20, 4, decisions=8, alpha=0.1, effect=0.15) == (
        "20 items x 4 trials can detect only improvements of about 31 points if the target is noisy. To detect "
        "15 points, use 20 trials, or 100 items x 4. Otherwise most candidates end as `inconclusive`. `strict` always "
        "decides, but its acceptances are not verified."
    )


# ---------- intervals


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_shares_have_wilsons_interval(successes: int, n: int, low: float, high: float) -> None:
    """Known values; 81 of 263 is the example of Newcombe (1998), table I."""
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_hold_the_share_and_stay_within_bounds(counts: tuple[int, int]) -> None:
    """An interval lies in 0..1, contains the observed share, and mirrors that of the failures."""
    successes, n = counts
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_fractional_scores_have_a_normal_interval() -> None:
    """Mean and standard error times 1.96, cut to 0..1; scores of 0 and 1 have Wilson's."""
    assert mean_interval([0.2, 0.4, 0.6]) == pytest.approx(
        (0.4 - 1.95996 * 0.2 / math.sqrt(3), 0.6263), abs=1e-4
    )
    assert mean_interval([0.0, 0.9]) == (0.0, 1.0)
    assert mean_interval([0.5]) == (0.0, 1.0)
    assert mean_interval([1.0, 0.0, 0.0]) == wilson_interval(1, 3)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_counts_have_no_interval(successes: int, n: int) -> None:
    """There is no interval without trials, or with more successes than trials."""
    with pytest.raises(ValueError, match="no interval"):
        wilson_interval(successes, n)
    with pytest.raises(ValueError, match="no interval"):
        mean_interval([])


# ------------------------------------------------------------------------------------------- improvements


def test_matched_shares_have_agresti_and_mins_interval() -> None:
    """Half a pair is added to each of the four outcomes; worked by hand for 10 pairs, 4 won and 1 lost."""
    before = [0.0] * 4 + [1.0] + [1.0] * 3 + [0.0] * 2
    after = [1.0] * 4 + [0.0] + [1.0] * 3 + [0.0] * 2
    spread = 1.959964 * math.sqrt(6 - 9 / 12) / 12
    assert improvement_interval(before, after) == pytest.approx((0.3, 0.25 - spread, 0.25 + spread), abs=1e-6)


@pytest.mark.parametrize(("n", "is_shown"), [(2, False), (6, True)])
def test_equal_fractional_differences_are_counted(n: int, is_shown: bool) -> None:
    """A gain of the same fraction on each of two items shows nothing, although their differences do not vary."""
    mean, low, high = improvement_interval([0.1] * n, [0.4] * n)
    _, binary_low, _ = improvement_interval([0.0] * n, [1.0] * n)
    assert (mean, low) == (pytest.approx(0.3), pytest.approx(0.3 * binary_low))
    assert (low > 0) is is_shown
    assert high >= mean
    assert improvement_interval([0.5] * n, [0.5] * n) == (0.0, 0.0, 0.0)


def test_fractional_differences_have_students_interval() -> None:
    """Mean and standard error times the quantile for 4 degrees of freedom."""
    mean, low, high = improvement_interval([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.2, 0.5, 0.4, 0.7])
    spread = 2.7764 * 0.1 / math.sqrt(5)
    assert (mean, low, high) == pytest.approx((0.1, 0.1 - spread, 0.1 + spread), abs=1e-6)


def test_one_item_says_little() -> None:
    """A single fractional difference excludes nothing; a single binary one has a wide interval."""
    assert improvement_interval([0.25], [0.5]) == (0.25, -1.0, 1.0)
    mean, low, high = improvement_interval([0.0], [1.0])
    assert (mean, high) == (1.0, 1.0)
    assert low < 0


@pytest.mark.parametrize(
    ("won", "lost", "chance"),
    [
        (4, 0, 1 / 16),
        (6, 0, 1 / 64),
        (7, 1, 9 / 256),
        (8, 1, 10 / 512),
        (0, 0, 1.0),
        (2, 2, 11 / 16),
        (0, 3, 1.0),
    ],
)
def test_the_chance_of_a_gain_is_that_of_the_exact_sign_test(won: int, lost: int, chance: float) -> None:
    """Items that do not differ count for nothing, also if all differences are the same fraction."""
    before, after = [0.0] * won + [1.0] * lost + [1.0, 0.0], [1.0] * won + [0.0] * lost + [1.0, 0.0]
    assert compute_chance(before, after) == pytest.approx(chance)
    assert compute_chance([x / 3 for x in before], [x / 3 for x in after]) == pytest.approx(chance)


def test_the_chance_of_other_gains_is_no_smaller_than_that_of_all_signs() -> None:
    """Two items cannot confirm a gain, however alike their gains are; a thousand can."""
    assert compute_chance([0.5, 0.5], [0.6, 0.61]) == 0.25
    assert compute_chance([0.5] * 1000 + [0.0], [0.6] * 1000 + [0.2]) < 1e-300
    assert compute_chance([0.0] * 5000 + [1.0] * 5000, [1.0] * 5000 + [0.0] * 5000) == pytest.approx(
        0.504, abs=1e-3
    )


def test_the_fewest_items_of_a_claim() -> None:
    """On one item less, no gain has so small a chance."""
    chances = {n: compute_chance([0.0] * n, [1.0] * n) for n in (MIN_CLAIM_ITEMS - 1, MIN_CLAIM_ITEMS)}
    assert [chance <= CLAIM_LEVEL for chance in chances.values()] == [False, True]
    assert "too small to confirm any gain" in describe_claim(MIN_CLAIM_ITEMS - 1)
    gains = [re.findall(r"about (\d+) points", describe_claim(n)) for n in (MIN_CLAIM_ITEMS, 10, 20, 280)]
    assert gains == [["97"], ["68"], ["37"], ["9"]]


@pytest.mark.parametrize(("before", "after"), [([], []), ([0.0], [1.0, 0.0])])
def test_improvements_need_the_same_items(before: list[float], after: list[float]) -> None:
    """Nothing is compared with nothing, or with something else."""
    with pytest.raises(ValueError, match="item by item"):
        improvement_interval(before, after)


pairs_of_scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30) | st.lists(
    st.tuples(st.sampled_from((0.0, 1.0)), st.sampled_from((0.0, 1.0))), min_size=1, max_size=60
)


@given(pairs_of_scores)
def test_improvements_lie_in_their_interval_and_mirror(pairs: list[tuple[float, float]]) -> None:
    """The interval lies in -1..1 and holds the mean; with the sides exchanged it is mirrored."""
    before, after = zip(*pairs, strict=True)
    mean, low, high = improvement_interval(before, after)
    assert -1 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    assert improvement_interval(after, before) == pytest.approx((-mean, -high, -low), abs=1e-9)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (9, 2.262), (10, 2.228), (15, 2.131), (30, 2.042), (120, 1.980)]
)
def test_students_quantiles_are_the_tabulated_ones(freedom: int, quantile: float) -> None:
    """To three decimals, on both sides of the change from the table to the expansion."""
    assert student_quantile(freedom) == pytest.approx(quantile, abs=6e-4)
