"""Blind comparisons: balance, early ends that change nothing, judges of known accuracy."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from critic_world import KnowingJudge, event, generate, round_of
from memory_pairs import make_pair
from reflact.calibration.contrast import ContrastSettings, GenerationResult
from reflact.calibration.judges import compare_sides, count_needed, decide_outcome, plan_sides
from reflact.errors import ReplyError
from reflact.memory.models import ContrastPair, Evaluation, Label
from reflact.prompts import load_prompts
from reflact.testing import ScriptedLLM

PAIRS = 200
BOOK = load_prompts()


def clear(step: int) -> ContrastPair:
    """Return a pair that the knowing judge can tell apart."""
    right = Evaluation(progress_before=2, progress_after=2, reasoning=f"Nothing was achieved in step {step}.")
    wrong = Evaluation(progress_before=2, progress_after=8, reasoning="It looks like more.")
    return make_pair(step).model_copy(update={"right": right, "wrong": wrong})


async def compare(
    llm: ScriptedLLM, number: int, judges: int, agreement: float = 0.6
) -> tuple[str, tuple[bool, ...]]:
    """Compare the sides of a clear pair; return the outcome and what was found."""
    plan = plan_sides(number, judges, seed=0)
    pair = clear(number)
    return await compare_sides(pair, plan, step="", judge=llm, prompts=BOOK, min_agreement=agreement)


async def kept(judge: KnowingJudge, *, judges: int, agreement: float) -> Counter[str]:
    """Compare many pairs and count what became of them."""
    llm = ScriptedLLM(judge)
    return Counter([(await compare(llm, n, judges, agreement))[0] for n in range(PAIRS)])


def keep_probability(
    n_judges: int, min_agreement: float, *, first_rate: float, second_rate: float | None = None
) -> float:
    """Return how probable it is that a pair is kept, by how often a judge finds the right side in each order."""

    def binomial(hits: int, tries: int, rate: float) -> float:
        return math.comb(tries, hits) * rate**hits * (1 - rate) ** (tries - hits)

    total = 0.0
    for a, b in ((n_judges // 2, n_judges - n_judges // 2), (n_judges - n_judges // 2, n_judges // 2)):
        shown = ((a, first_rate), (b, first_rate if second_rate is None else second_rate))
        total += 0.5 * math.fsum(
            binomial(x, *shown[0]) * binomial(y, *shown[1])
            for x in range((a + 1) // 2, a + 1)
            for y in range((b + 1) // 2, b + 1)
            if x + y >= count_needed(n_judges, min_agreement)
        )
    return total


async def test_good_judges_keep_clear_pairs() -> None:
    """Judges who are right nine times in ten keep as many pairs as computed, nearly all."""
    results = await kept(KnowingJudge(0.9), judges=10, agreement=0.7)
    assert results["kept"] / PAIRS == pytest.approx(keep_probability(10, 0.7, first_rate=0.9), abs=0.05)
    assert results["kept"] >= 0.9 * PAIRS


async def test_judges_who_guess_keep_nearly_nothing() -> None:
    """With ten comparisons of which nine must agree, guessing passes about one pair in a hundred."""
    results = await kept(KnowingJudge(0.5), judges=10, agreement=0.9)
    assert results["kept"] <= 0.03 * PAIRS
    assert keep_probability(10, 0.9, first_rate=0.5) == pytest.approx(11 / 1024)


@pytest.mark.parametrize("side", ["first", "second"])
@pytest.mark.parametrize("judges", [2, 3, 5, 10])
async def test_a_judge_that_always_picks_one_side_keeps_nothing(side: str, judges: int) -> None:
    """Whatever the number of judges, position alone keeps no pair, and where it nearly would it is named."""
    results = await kept(KnowingJudge(always=side), judges=judges, agreement=0.6)
    assert results["kept"] == 0
    assert results["decided_by_position"] > 0 or judges == 2


async def test_a_judge_without_answers_finds_nothing() -> None:
    """Comparisons that give no valid reply never keep a pair."""
    llm = ScriptedLLM(lambda prompt, reply_type, call_id: ReplyError("no reply"))
    decided, found = await compare(llm, 0, 6)
    assert decided != "kept"
    assert not any(found)


@given(candidates=st.integers(0, 40), judges=st.integers(2, 15), seed=st.integers(0, 99))
def test_sides_are_balanced_exactly(candidates: int, judges: int, seed: int) -> None:
    """Over an even number of candidates both orders are equally many; within one nearly."""
    plans = [plan_sides(n, judges, seed=seed) for n in range(2 * candidates)]
    assert sum(plan.count(True) for plan in plans) == sum(plan.count(False) for plan in plans)
    assert all(abs(plan.count(True) - plan.count(False)) <= 1 for plan in plans)


async def test_the_judge_is_blind_and_sees_both_orders() -> None:
    """Prompts of one pair differ in nothing but the order of the two evaluations."""
    llm = ScriptedLLM(KnowingJudge())
    await compare(llm, 0, 4)
    texts = Counter(call.prompt.messages[1].content for call in llm.calls)
    assert sorted(texts.values()) == [2, 2]
    one, other = texts
    assert sorted(one.split()) != one.split()
    assert Counter(one) == Counter(other)
    assert not any(word in one for word in ("inflated", "asked", "construction"))


@given(
    found=st.lists(st.booleans(), min_size=2, max_size=9),
    agreement=st.sampled_from((0.6, 0.75, 0.8, 1.0)),
    begins=st.booleans(),
)
def test_an_early_end_changes_nothing(found: list[bool], agreement: float, begins: bool) -> None:
    """Once a prefix decides, no continuation decides otherwise; all of them decide."""
    plan = [begins == (n % 2 == 0) for n in range(len(found))]
    decided = [decide_outcome(plan, found[:n], min_agreement=agreement) for n in range(len(found) + 1)]
    assert decided[-1] is not None
    first = next(n for n, one in enumerate(decided) if one is not None)
    assert set(decided[first:]) == {decided[-1]}
    if decided[-1] == "kept":
        assert first == len(found)
        assert sum(found) >= count_needed(len(found), agreement)


@pytest.mark.parametrize(("judges", "agreement"), [(2, 0.6), (3, 0.6), (5, 0.6), (6, 0.8), (8, 1.0)])
@pytest.mark.parametrize("accuracy", [0.5, 0.9])
def test_the_computed_rate_is_that_of_all_outcomes(judges: int, agreement: float, accuracy: float) -> None:
    """Enumerating all replies of both starting sides gives the rate that the documents state."""
    total = 0.0
    for begins in (True, False):
        plan = [begins == (n % 2 == 0) for n in range(judges)]
        for found in product((True, False), repeat=judges):
            weight = accuracy ** sum(found) * (1 - accuracy) ** (judges - sum(found))
            total += 0.5 * weight * (decide_outcome(plan, found, min_agreement=agreement) == "kept")
    assert keep_probability(judges, agreement, first_rate=accuracy) == pytest.approx(total)


def test_the_rates_in_the_documents_are_computed() -> None:
    """Each row of the table in docs/contrast.md says what the binomial distribution gives."""
    text = (Path(__file__).parents[1] / "docs" / "contrast.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    rows = [[float(cell) for cell in row] for row in cells]
    assert len(rows) >= 8
    for judges, agreement, least, *rates in rows:
        orders = [(0.5, 0.5), (0.7, 0.7), (0.8, 0.8), (0.9, 0.9), (1.0, 0.0), (0.9, 0.5)]
        computed = [keep_probability(int(judges), agreement, first_rate=a, second_rate=b) for a, b in orders]
        assert least == count_needed(int(judges), agreement)
        assert rates == pytest.approx(computed, abs=0.0006)


async def test_hopeless_comparisons_end_early() -> None:
    """A judge who is always wrong is asked until that is certain, and not once more."""
    llm = ScriptedLLM(KnowingJudge(0.0))
    decided, found = await compare(llm, 0, 20)
    assert (decided, len(found), len(llm.calls)) == ("judged_wrong", 9, 9)


async def test_difficulty_is_the_share_that_erred() -> None:
    """A kept pair says how many judges there were and which share found it; a lost one is a drop."""
    gold = Label(progress_before=2, progress_after=6, source="human", reasoning="Half of it.")
    steps = [event(n, said=(2, 9)).model_copy(update={"label": gold}) for n in range(10)]

    async def made(accuracy: float) -> GenerationResult:
        return await generate(
            *steps,
            plan=round_of("inflated_score"),
            write=lambda prompt, reply_type, call_id: ReplyError("not asked"),
            judge=KnowingJudge(accuracy),
            settings=ContrastSettings(candidates_per_event=1, n_judges=10),
        )

    sure, unsure = await made(1.0), await made(0.8)
    assert {pair.difficulty for pair in sure.pairs} == {0}
    assert any(pair.difficulty for pair in unsure.pairs)
    assert all(pair.n_judgements == 10 and (pair.agreement or 0) >= 0.6 for pair in unsure.pairs)
    assert unsure.n_candidates == 10
    assert (await made(0.0)).pairs == ()
