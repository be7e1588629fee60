"""The race: growing slices, losers dropped early, nothing measured twice, and one at most to the gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from profiles import cases
from reflact.search.race import (
    FEWEST_ITEMS,
    FIRST_ITEMS,
    Contender,
    RaceResult,
    RaceSettings,
    choose_survivors,
    limit_contenders,
    order_items,
    plan_slices,
    run_race,
)
from reflact.skills.document import digest_form
from reflact.types import Candidate, Rollout, Score, Skill

CURRENT = "current"
ITEMS = tuple(f"val-{n:02}" for n in range(20))
SLICES = (6, 10, 20)


def make_settings(
    *, items: Sequence[str] = ITEMS, slices: tuple[int, ...] = SLICES, variance: float = 0.0
) -> RaceSettings:
    """Return the settings of a race on twenty items."""
    return RaceSettings(item_ids=tuple(items), slices=slices, variance=variance)


def make_contender(text: str) -> Contender:
    """Return a candidate with a text that is its name."""
    return Contender(label=text, candidate=Candidate(skill=Skill(text=text)), form=digest_form(text))


def score_rollout(rollout: Rollout) -> float | None:
    """Return the hard score of a rollout."""
    return None if rollout.score is None else rollout.score.hard


class Scripted:
    """Measures documents by a script: the scores of each document by item; what is missing is unmeasured.

    Attributes:
        asked: How often each document was measured on each item.
        slices: The documents and items of each request, in order.
    """

    def __init__(self, scores: Mapping[str, Mapping[str, float]]) -> None:
        self._scores = scores
        self.asked: Counter[tuple[str, str]] = Counter()
        self.slices: list[tuple[str, tuple[str, ...]]] = []

    async def __call__(self, skill: Skill, item_ids: Sequence[str]) -> Sequence[Rollout]:
        self.slices.append((skill.text, tuple(item_ids)))
        self.asked.update((skill.text, item) for item in item_ids)
        await checkpoint()
        return [self._roll_out(skill.text, item) for item in item_ids]

    def _roll_out(self, text: str, item: str) -> Rollout:
        value = self._scores[text].get(item)
        score = None if value is None else Score(hard=value, soft=value)
        return Rollout(
            key=f"{text}/{item}",
            item_id=item,
            skill_hash=Skill(text=text).hash,
            score=score,
            error=None if value is not None else "the endpoint was down",
        )

    def count_items(self, text: str) -> int:
        return sum(document == text for document, _ in self.asked)


def solve(*solved: int) -> dict[str, float]:
    """Return the scores of a document that solves the items with these numbers."""
    return {item: float(number in solved) for number, item in enumerate(ITEMS)}


def solve_first(count: int) -> dict[str, float]:
    """Return the scores of a document that solves so many of the first items."""
    return solve(*range(count))


async def race(
    scores: Mapping[str, Mapping[str, float]], settings: RaceSettings | None = None
) -> tuple[RaceResult, Scripted]:
    """Race all documents but the current one, in the order of the script."""
    measure = Scripted(scores)
    contenders = [make_contender(text) for text in scores if text != CURRENT]
    result = await run_race(
        contenders,
        Skill(text=CURRENT),
        settings or make_settings(),
        measure=measure,
        score=score_rollout,
    )
    return result, measure


# ------------------------------------------------------------------------------------- slices and order


@cases(300)
@given(st.integers(1, 300), st.floats(0, 100))
def test_slices_grow_to_all_items(n_items: int, passes: float) -> None:
    slices = plan_slices(n_items, passes)
    assert list(slices) == sorted(set(slices))
    assert slices[0] >= 1
    assert slices[-1] == n_items
    assert slices[0] >= min(n_items, FEWEST_ITEMS)
    assert plan_slices(n_items, 100.0)[0] >= max(slices[0], min(n_items, FIRST_ITEMS))


@cases(300)
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_each_slice_holds_solved_and_failed_items_in_proportion(scores: list[float]) -> None:
    known = {f"val-{n}": score for n, score in enumerate(scores)}
    order = order_items(list(known), known)
    assert sorted(order) == sorted(known)
    n_failed = scores.count(0.0)
    for size in range(1, len(order) + 1):
        failed = sum(known[item] == 0 for item in order[:size])
        assert abs(failed - size * n_failed / len(order)) <= 1.5
    if n_failed:
        assert known[order[0]] == 0


@pytest.mark.parametrize(
    ("slices", "rollouts", "count"),
    [
        (SLICES, float("inf"), 6),
        (SLICES, 58, 6),
        (SLICES, 57, 5),
        (SLICES, 26, 2),
        (SLICES, 25, 1),
        (SLICES, 0, 1),
        ((3, 4), 19, 6),
        ((5,), 30, 6),
        ((5,), 14, 2),
    ],
)
def test_as_many_candidates_race_as_the_budget_pays_for(
    slices: tuple[int, ...], rollouts: float, count: int
) -> None:
    contenders = [make_contender(f"document {n}") for n in range(6)]
    assert limit_contenders(contenders, slices, rollouts) == contenders[:count]


# -------------------------------------------------------------------------------------------- survivors


def survive(
    contenders: Mapping[int, Mapping[str, float | None]],
    current: Mapping[str, float | None],
    *,
    most: int = 9,
) -> list[int]:
    """Return who stays in a race on twenty items."""
    return choose_survivors(contenders, current, make_settings(), most=most)


def test_a_contender_that_is_worse_than_the_current_document_is_dropped() -> None:
    assert survive({1: solve_first(2), 2: solve_first(12)}, solve_first(8)) == [2]


def test_an_unmeasured_item_is_left_out_of_the_comparison() -> None:
    current: dict[str, float | None] = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0, "e": 0.0, "f": None}
    gaps: dict[str, float | None] = {"a": None, "b": None, "c": None, "d": 1.0, "e": 1.0, "f": 0.0}
    zeros: dict[str, float | None] = gaps | {"a": 0.0, "b": 0.0, "c": 0.0}
    assert survive({1: gaps}, current) == [1]
    assert survive({1: zeros}, current) == []


def test_a_contender_without_any_pair_stays_only_if_all_are_so() -> None:
    lost = dict.fromkeys(ITEMS)
    assert survive({1: lost, 2: solve_first(12)}, solve_first(8)) == [2]
    assert survive({1: solve_first(12)}, lost) == [1]


# ------------------------------------------------------------------------------------------- whole races


async def test_one_of_several_reaches_the_end_and_the_last_slice_is_left_to_the_gate() -> None:
    scores = {
        CURRENT: solve_first(5),
        "good": solve_first(8),
        "best": solve_first(10),
        "same": solve_first(5),
    }
    result, measure = await race(scores)
    assert result.winner == 1
    assert [entry.judged for entry in result.entries] == [False, True, False]
    assert [entry.label for entry in result.entries] == ["good", "best", "same"]
    assert measure.count_items("best") == measure.count_items(CURRENT) == 10
    assert {item for _, item in measure.asked} == set(ITEMS[:10])


async def test_losers_are_dropped_after_the_first_slice() -> None:
    scores = {CURRENT: solve_first(5), "worse": solve(), "better": solve_first(20)}
    result, measure = await race(scores)
    assert [entry.n for entry in result.entries] == [6, 10]
    assert measure.count_items("worse") == 6
    assert [entry.score for entry in result.entries] == [0.0, 1.0]
    assert [entry.current_score for entry in result.entries] == [5 / 6, 0.5]
    worse, better = (entry.p_better for entry in result.entries)
    assert worse < 0.4
    assert better > 0.9


async def test_unmeasured_items_are_told_and_left_out_of_pairs() -> None:
    patchy = {item: score for item, score in solve_first(10).items() if item not in ITEMS[:3]}
    result, _ = await race({CURRENT: solve_first(3), "patchy": patchy})
    (entry,) = result.entries
    assert (entry.n, entry.score, entry.current_score) == (7, 1.0, 0.0)
    assert result.winner == 0
    assert [rollout.item_id for rollout in result.unmeasured] == list(ITEMS[:3])


async def test_noise_of_the_target_makes_a_race_slower_to_believe() -> None:
    scores = {CURRENT: solve_first(4), "better": solve_first(7)}
    (sure,) = (await race(scores))[0].entries
    (unsure,) = (await race(scores, make_settings(variance=0.2)))[0].entries
    assert unsure.p_better < sure.p_better


@cases(200)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=20, max_size=20), min_size=2, max_size=7),
    st.floats(0, 30),
)
async def test_nothing_is_measured_twice_and_one_at_most_goes_on(
    values: list[list[float]], passes: float
) -> None:
    names = [CURRENT, *(f"document {n}" for n in range(len(values) - 1))]
    scores = {name: dict(zip(ITEMS, row, strict=True)) for name, row in zip(names, values, strict=True)}
    result, measure = await race(scores, make_settings(slices=plan_slices(len(ITEMS), passes)))
    assert max(measure.asked.values()) == 1
    assert sum(entry.judged for entry in result.entries) == (result.winner is not None)
    for entry in result.entries:
        assert entry.n == measure.count_items(entry.label) <= 10
        assert entry.n <= measure.count_items(CURRENT)
    again, _ = await race(scores, make_settings(slices=plan_slices(len(ITEMS), passes)))
    assert again == result
