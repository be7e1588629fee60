"""The curriculum: weak kinds get more, contrasts get subtler, nothing comes twice, a plateau ends it."""

from __future__ import annotations

from collections import Counter
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from critic_world import KnowingJudge, event, generate
from reflact.calibration.contrast import ContrastSettings
from reflact.calibration.curriculum import (
    CriticAccuracyByMistake,
    CurriculumSettings,
    MistakeAccuracy,
    MistakeShare,
    RoundPlan,
    apportion,
    build_history,
    deal_mistakes,
    has_plateaued,
    plan_next_round,
)
from reflact.calibration.metrics import ScoredStep
from reflact.memory.models import MISTAKE_KINDS, ContrastPair, Label

FOUR = CurriculumSettings(max_rounds=9)


def known(accuracy: float, **right: int) -> CriticAccuracyByMistake:
    """Return a measurement: of each kind so many of twenty steps are right."""
    kinds = tuple(MistakeAccuracy(mistake=kind, n_right=n, n_steps=20) for kind, n in right.items())
    return CriticAccuracyByMistake(accuracy=accuracy, by_mistake=kinds)


def shares(plan: RoundPlan | None) -> dict[str, float]:
    """Return a round's shares by kind."""
    return {kind.mistake: kind.share for kind in plan.shares}


def test_the_weakest_kind_gets_most_and_every_kind_something() -> None:
    """Without a measurement all are equal; later half goes to where errors are certain, in proportion."""
    first = plan_next_round([], FOUR)
    assert set(shares(first).values()) == {0.25}
    assert (first.number, first.nearest, first.farthest) == (1, 1, 10)
    plan = plan_next_round([known(0.5, inflated_score=4, ignored_evidence=20, credit_for_intention=14)], FOUR)
    later = shares(plan)
    assert max(later, key=lambda kind: later[kind]) == "inflated_score"
    assert later["ignored_evidence"] == later["scale_inconsistency"] == 0.125
    assert sum(later.values()) == pytest.approx(1)


def test_little_evidence_attracts_little() -> None:
    """One error in one step says less than fifteen in twenty."""
    kinds = (
        MistakeAccuracy(mistake="inflated_score", n_right=5, n_steps=20),
        MistakeAccuracy(mistake="ignored_evidence", n_right=0, n_steps=1),
    )
    given_shares = shares(plan_next_round([CriticAccuracyByMistake(accuracy=0.5, by_mistake=kinds)], FOUR))
    assert given_shares["inflated_score"] > given_shares["ignored_evidence"] > 0.125


def test_contrasts_get_subtler_from_round_to_round() -> None:
    """The largest distance shrinks towards the margin and stays wide enough to be met."""
    rising = [CriticAccuracyByMistake(accuracy=n / 10) for n in range(9)]
    plans = [plan_next_round(rising[: n + 1], FOUR) for n in range(8)]
    widths = [plan.farthest - plan.nearest for plan in plans if plan is not None]
    assert widths == sorted(widths, reverse=True)
    assert widths[:3] == [9, 4.5, 2.25]
    assert min(widths) == 0.5


@pytest.mark.parametrize(
    ("accuracies", "patience", "over"),
    [
        ([], 1, False),
        ([0.5], 1, False),
        ([0.5, 0.6], 1, False),
        ([0.5, 0.505], 1, True),
        ([0.5, 0.4], 1, True),
        ([0.5, 0.6, 0.6], 2, False),
        ([0.5, 0.6, 0.6, 0.6], 2, True),
        ([0.5, 0.6, 0.6, 0.7], 2, False),
    ],
)
def test_a_plateau_ends_the_rounds(accuracies: list[float], patience: int, over: bool) -> None:
    """Rounds end if the last ones gained nothing over the best before them."""
    history = [CriticAccuracyByMistake(accuracy=a) for a in accuracies]
    chosen = CurriculumSettings(patience=patience, max_rounds=9)
    assert has_plateaued(history, chosen) is over
    assert (plan_next_round(history, chosen) is None) is over


@pytest.mark.parametrize(
    ("errors", "over"),
    [
        ([4.0, 2.0], False),
        ([4.0, 3.95], True),
        ([2.0, 4.0], True),
        ([4.0, 2.0, 2.0], True),
        ([None, 2.0], True),
    ],
)
def test_rounds_go_on_while_the_error_falls(errors: list[float | None], over: bool) -> None:
    """A critic that inflates evenly orders all states rightly, and still learns until its error stays."""
    history = [CriticAccuracyByMistake(accuracy=1.0, error=error) for error in errors]
    assert has_plateaued(history, FOUR) is over
    assert (plan_next_round(history, FOUR) is None) is over


def test_a_critic_that_inflates_evenly_is_taught_until_it_is_right() -> None:
    """Held-out scores that all are 4 too high, then 2, then right: the history holds what tells them apart."""
    history: list[CriticAccuracyByMistake] = []
    for excess in (4, 2, 0, 0):
        scored = [
            ScoredStep(
                trace_id=str(n),
                step=0,
                label=Label(progress_before=0, progress_after=n, source="program"),
                evaluation=event(before=0, after=n + excess).evaluation,
            )
            for n in range(1, 6)
        ]
        assert plan_next_round(history, FOUR) is not None
        history += build_history(scored, ())
    assert [(measured.accuracy, measured.error) for measured in history] == [(1, 4), (1, 2), (1, 0), (1, 0)]
    assert plan_next_round(history, FOUR) is None


def test_rounds_end_when_all_are_made() -> None:
    """However much each of them gained."""
    rising = [CriticAccuracyByMistake(accuracy=n / 10) for n in range(4)]
    assert plan_next_round(rising, CurriculumSettings(max_rounds=3)) is None


def test_scores_are_measured_by_kind() -> None:
    """Of each kind counts how many steps that invite it were scored within the tolerance."""
    scored = [
        ScoredStep(
            trace_id=str(n),
            step=0,
            label=Label(progress_before=1, progress_after=5, source="program"),
            evaluation=event(before=1, after=5 if n else 9).evaluation,
            wrong_progress=(9,),
            mistakes=("inflated_score",),
        )
        for n in range(4)
    ]
    (result,) = build_history(scored, scored)
    assert result.by_mistake == (MistakeAccuracy(mistake="inflated_score", n_right=3, n_steps=4),)
    assert build_history([], scored) == []


@pytest.mark.parametrize(
    "broken",
    [
        {"shares": ()},
        {"shares": (MistakeShare(mistake="a", share=0.5),)},
        {"shares": (MistakeShare(mistake="a", share=0.5),) * 2},
        {"nearest": 5},
    ],
)
def test_a_round_that_makes_no_sense_is_refused(broken: dict[str, object]) -> None:
    """Shares add up to 1 and name each kind once; the nearest is not beyond the farthest."""
    whole = {"number": 1, "shares": (MistakeShare(mistake="a", share=1),), "nearest": 1, "farthest": 4}
    RoundPlan.model_validate(whole)
    with pytest.raises(ValidationError):
        RoundPlan.model_validate(whole | broken)


@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    events=st.integers(0, 20),
    each=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_what_is_dealt_has_the_shares(weights: list[int], events: int, each: int, seed: int) -> None:
    """Every event gets as many, every kind its share but for one, and kinds repeat only where they must."""
    parts = tuple(MistakeShare(mistake=f"k{n}", share=w / sum(weights)) for n, w in enumerate(weights))
    plan = RoundPlan(number=1, shares=parts, nearest=1, farthest=2)
    hands = deal_mistakes(plan, trace_id="t", n_events=events, per_event=each, seed=seed)
    assert [len(hand) for hand in hands] == [each] * events
    counts = Counter(kind for hand in hands for kind in hand)
    for part in parts:
        assert abs(counts[part.mistake] - part.share * events * each) < 1 + 1e-6
        often = -(-counts[part.mistake] // events) if events else 0
        assert all(hand.count(part.mistake) <= often for hand in hands)


@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=6), places=st.integers(0, 40))
def test_places_are_rounded_without_bias(weights: list[int], places: int) -> None:
    """Over evenly spread marks every kind gets its share on average, and at each mark that but for one."""
    parts = tuple(MistakeShare(mistake=f"k{n}", share=w / sum(weights)) for n, w in enumerate(weights))
    found = [apportion(parts, places, offset=n / 64) for n in range(64)]
    for part in parts:
        counts = [one[part.mistake] for one in found]
        exact = part.share * places
        assert all(abs(count - exact) < 1 + 1e-6 for count in counts)
        assert sum(counts) / 64 == pytest.approx(exact, abs=2 / 64)
    assert all(sum(one.values()) == places for one in found)


async def test_three_rounds_without_duplicates_get_harder_and_turn_to_the_weakest_kind() -> None:
    """Difficulty and the weakest kind's share rise, no pair comes twice, and a plateau ends it."""
    steps = []
    for n in range(24):
        one = event(n, before=1, after=4 + n % 3)
        gold = one.label.model_copy(update={"reasoning": f"Half of step {n} is there."})
        steps.append(one.model_copy(update={"label": gold}))
    chosen, history = CurriculumSettings(max_rounds=9), [known(0.6, **dict.fromkeys(MISTAKE_KINDS, 12))]
    seen: list[tuple[ContrastPair, ...]] = []
    weakest: list[float] = []
    accuracies = iter((0.7, 0.8, 0.805))
    while (plan := plan_next_round(history, chosen)) is not None:
        result = await generate(
            *steps,
            plan=plan,
            judge=KnowingJudge(None),
            settings=ContrastSettings(n_judges=10),
            known_pair_ids={pair.id for made in seen for pair in made},
        )
        seen.append(result.pairs)
        asked = Counter([*(p.mistake for p in result.pairs), *(d.mistake for d in result.dropped)])
        weakest.append(asked["scale_inconsistency"] / result.n_candidates)
        weak = {"scale_inconsistency": 12 - 4 * len(seen)}
        history.append(known(next(accuracies), **(dict.fromkeys(MISTAKE_KINDS, 12 + 2 * len(seen)) | weak)))
    ids = [pair.id for made in seen for pair in made]
    difficulties = [mean(pair.difficulty or 0 for pair in made) for made in seen]
    assert len(seen) == 3
    assert len(set(ids)) == len(ids)
    assert all(len(made) >= 24 for made in seen)
    assert difficulties == sorted(set(difficulties))
    assert weakest == sorted(set(weakest))
