"""The race: growing slices, losers dropped early, nothing measured twice, and one at most to the gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from profiles import cases
from reflact.search.race import (
    RaceResult,
    RaceSettings,
    plan_slices,
    run_race,
)
from reflact.types import Candidate, Rollout, Score, Skill

CURRENT = "current"
ITEMS = tuple(f"val-{n:02}" for n in range(20))
SLICES = (6, 10, 20)


def make_candidate(text: str) -> Candidate:
    return Candidate(skill=Skill(text=text), label=text)


def solve_first(count: int) -> dict[str, float | None]:
    """Return the scores of a document that solves so many of the first items."""
    return {item: float(number < count) for number, item in enumerate(ITEMS)}


async def race(
    scores: Mapping[str, Mapping[str, float | None]], slices: tuple[int, ...] = SLICES
) -> tuple[RaceResult, Counter[tuple[str, str]]]:
    """Race all documents but the current one; also return how often each was measured on each item."""
    asked: Counter[tuple[str, str]] = Counter()

    async def measure(skill: Skill, item_ids: Sequence[str]) -> Sequence[Rollout]:
        asked.update((skill.text, item) for item in item_ids)
        await checkpoint()
        rollouts = []
        for item in item_ids:
            value = scores[skill.text].get(item)
            score = None if value is None else Score(hard=value, soft=value)
            rollouts.append(Rollout(key=item, item_id=item, skill_hash=skill.hash, score=score))
        return rollouts

    result = await run_race(
        [make_candidate(text) for text in scores if text != CURRENT],
        Skill(text=CURRENT),
        RaceSettings(item_ids=ITEMS, slices=slices, variance=0.0),
        measure=measure,
        score=lambda rollout: None if rollout.score is None else rollout.score.hard,
    )
    return result, asked


async def test_losers_cost_a_first_look_and_the_last_slice_is_left_to_the_gate() -> None:
    texts = {"good": 8, "best": 10, "same": 5, "worse": 0}
    scores = {CURRENT: solve_first(5), **{text: solve_first(n) for text, n in texts.items()}}
    result, asked = await race(scores)
    assert result.winner == 1
    assert [entry.judged for entry in result.entries] == [False, True, False, False]
    assert [entry.label for entry in result.entries] == list(texts)
    assert {item for _, item in asked} == set(ITEMS[:10])
    best, worse = result.entries[1], result.entries[3]
    assert (best.n, best.score, best.current_score, worse.n) == (10, 1.0, 0.5, 6)
    assert worse.p_better < 0.4
    assert best.p_better > 0.9


@cases(200)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=20, max_size=20), min_size=2, max_size=7),
    st.floats(0, 30),
)
async def test_nothing_is_measured_twice_and_one_at_most_goes_on(
    values: list[list[float]], passes: float
) -> None:
    """Whatever the scores: each document once on each item, no more than half the split, one winner at most."""
    names = [CURRENT, *(f"document {n}" for n in range(len(values) - 1))]
    scores = {name: dict(zip(ITEMS, row, strict=True)) for name, row in zip(names, values, strict=True)}
    slices = plan_slices(len(ITEMS), passes)
    result, asked = await race(scores, slices)
    assert max(asked.values()) == 1
    assert sum(entry.judged for entry in result.entries) == (result.winner is not None)
    for entry in result.entries:
        assert entry.n == sum(document == entry.label for document, _ in asked) <= 10
    assert (await race(scores, slices))[0] == result
