"""The replay test: what a batch of pairs has to show on held-out traces, and what keeps it out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flattered_world import EXAMPLE
from memory_pairs import make_pair
from reflact.calibration.critic import Critic, CriticReply
from reflact.calibration.labeled_steps import StepScorer, list_labeled_steps
from reflact.calibration.metrics import ScoredStep
from reflact.calibration.significance import (
    NotTested,
    ReplayTestResult,
    StepScores,
    decide_replay_test,
    explain_nothing_to_learn,
    sign_flip_p_value,
)
from reflact.calibration.trace import Trace
from reflact.memory.cards import TOTAL_ALPHA, compute_alpha
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

TRACES = 24


def step(trace: int, number: int, gold: float, said: float) -> ScoredStep:
    return ScoredStep(
        trace_id=f"t{trace:03}",
        step=number,
        label=Label(progress_before=0, progress_after=gold, source="program"),
        evaluation=Evaluation(progress_before=0, progress_after=said, reasoning="r"),
    )


def side(*said: float, traces: int = TRACES) -> list[ScoredStep]:
    return [step(trace, n, 4, phi) for trace in range(traces) for n, phi in enumerate(said)]


def paired(
    without: Sequence[ScoredStep], with_: Sequence[ScoredStep], silent: Sequence[str] = ()
) -> list[StepScores]:
    scores = [StepScores(old.trace_id, old.label, old, new) for old, new in zip(without, with_, strict=True)]
    return scores + [StepScores(name, without[0].label, None, None) for name in silent]


def decided(
    without: Sequence[ScoredStep], with_: Sequence[ScoredStep], silent: Sequence[str] = (), **options: Any
) -> ReplayTestResult:
    found = decide_replay_test(paired(without, with_, silent), **{"n_earlier_tests": 0, **options})
    assert isinstance(found, ReplayTestResult)
    return found


def test_a_batch_that_takes_errors_away_passes() -> None:
    found = decided(side(7, 4), side(4, 4))
    assert (found.outcome, found.has_passed) == ("better", True)
    assert (found.n_traces, found.n_transitions) == (TRACES, 2 * TRACES)
    assert (found.effect.value, found.effect.low, found.effect.high) == (1.5, 1.5, 1.5)
    assert found.p_value == 2**-TRACES


@pytest.mark.parametrize("changed", [(7.0, 4.0), (9.0, 4.0)], ids=["placebo", "harmful"])
def test_a_batch_that_changes_nothing_or_harms_does_not_pass(changed: tuple[float, float]) -> None:
    assert decided(side(7, 4), side(*changed)).outcome == "not_shown"


def test_too_few_traces_decide_nothing() -> None:
    scores = paired(side(*[9.0] * 50, traces=19), side(*[4.0] * 50, traces=19))
    found = decide_replay_test(scores, n_earlier_tests=0)
    assert isinstance(found, NotTested)
    assert found.n_traces == 19
    assert "19 held-out traces" in found.explanation


def test_steps_of_a_trace_are_one_witness() -> None:
    without = [*side(4), *(step(0, n, 4, 9) for n in range(1, 100))]
    with_ = [*side(4), *(step(0, n, 4, 4) for n in range(1, 100))]
    assert decided(without, with_).outcome == "not_shown"


def test_accuracy_that_falls_blocks_a_smaller_error() -> None:
    without = [
        step(trace, n, gold, said)
        for trace in range(TRACES)
        for n, (gold, said) in enumerate([(2, 5), (3, 6), (4, 7)])
    ]
    with_ = [step(trace, n, gold, 3) for trace in range(TRACES) for n, gold in enumerate((2, 3, 4))]
    found = decided(without, with_)
    assert found.effect.low > 0
    assert found.accuracy_change < -0.02
    assert (found.outcome, found.has_passed) == ("accuracy_fell", False)


def test_what_was_promoted_and_harms_goes() -> None:
    assert decided(side(4, 4), side(6, 4), use="demote").outcome == "worse"
    assert decided(side(4, 4), side(4, 4), use="demote").outcome == "no_harm_shown"
    assert decided(side(6, 4), side(4, 4), use="demote").outcome == "no_harm_shown"


def test_levels_of_all_batches_sum_to_the_level() -> None:
    levels = [compute_alpha(before) for before in range(10_000)]
    assert levels == sorted(levels, reverse=True)
    assert TOTAL_ALPHA - 1e-5 < sum(levels) <= TOTAL_ALPHA


def test_a_step_without_a_score_stays_in_the_test() -> None:
    found = decided(side(7, traces=19), side(4, traces=19), silent=["t019"])
    assert (found.outcome, found.n_traces, found.n_transitions, found.n_unscored) == ("better", 20, 20, 1)


PHI = st.one_of(st.none(), st.integers(0, 10))


@pytest.mark.parametrize("use", ["promote", "demote"])
@given(st.lists(st.tuples(st.integers(0, 10), PHI, PHI), min_size=1, max_size=7))
def test_silence_keeps_the_error_probability(
    use: Literal["promote", "demote"], steps: list[tuple[int, int | None, int | None]]
) -> None:
    """A batch that changes nothing gets no p-value more often than it says, over all swaps of sides."""

    def effect(trace: int, gold: float, old: float | None, new: float | None) -> float:
        without, with_ = (None if phi is None else step(trace, 0, gold, phi) for phi in (old, new))
        label = Label(progress_before=0, progress_after=gold, source="program")
        found = StepScores("t", label, without, with_).effect
        return found if use == "promote" else -found

    values = []
    for swapped in product((False, True), repeat=len(steps)):
        sides = ((g, b, a) if swap else (g, a, b) for swap, (g, a, b) in zip(swapped, steps, strict=True))
        values.append(sign_flip_p_value([effect(trace, *one) for trace, one in enumerate(sides)]))
    for value in values:
        assert sum(other <= value for other in values) <= value * len(values)


@given(st.lists(st.integers(-20, 20), max_size=9))
def test_the_test_counts_all_signs(some: list[int]) -> None:
    """The p-value is the share of sign patterns that do at least as well: enumerated, it is the same.

    The sizes add up to what makes them whole steps of the grid.
    """
    effects = [*some, 200 - sum(map(abs, some))]
    sums = [
        sum(s * abs(e) for s, e in zip(signs, effects, strict=True))
        for signs in product((1, -1), repeat=len(effects))
    ]
    expected = sum(total >= sum(effects) for total in sums) / len(sums)
    assert sign_flip_p_value([float(effect) for effect in effects]) == expected


PURPOSE = "Fill the shelf."


def move(before: str, after: str) -> Transition:
    return Transition(before=before, action=Action(name="put"), after=after)


def example(before: str, after: str) -> ContrastPair:
    return make_pair().model_copy(
        update={
            "purpose": PURPOSE,
            "transition": move(before, after),
            "right": Evaluation(progress_before=1, progress_after=4, reasoning="Four books."),
        }
    )


def trace(number: int) -> Trace:
    made = Trace(PURPOSE, id=f"run {number}")
    made.record(
        move("empty", f"shelf {number}"), label=Label(progress_before=0, progress_after=4, source="program")
    )
    return made


async def test_a_critic_that_remembers_states_gains_nothing() -> None:
    def parrot(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        assert issubclass(reply_type, CriticReply)
        content = prompt.messages[-1].content
        asked = re.findall(r"shelf \d+", EXAMPLE.sub("", content))[-1]
        remembered = any(asked in shown for _, shown in EXAMPLE.findall(content))
        phi = 4.0 if remembered else 9.0
        said = {"phi_before": 0, "phi_after": phi, "confidence": 1}
        return {"reasoning": "r", "evidence": [asked], **said}

    critic, steps = Critic(ScriptedLLM(parrot)), list_labeled_steps([trace(n) for n in range(4)])
    pairs = [example("empty", f"shelf {n}") for n in range(4)]
    found = await critic.score(steps[0].transition, purpose="Another.", pairs=pairs)
    assert found.evaluation.progress_after == 4
    scored = await StepScorer(critic, max_concurrent=2).score(steps, pairs)
    assert [one and one.evaluation.progress_after for one in scored] == [9.0] * 4


@pytest.mark.parametrize(
    ("errors", "n_unscored", "n_tests", "ends"),
    [
        ([0.0] * TRACES, 0, 0, True),
        ([0.09] * TRACES, 0, 0, True),
        ([0.11] * TRACES, 0, 0, False),
        ([2.0] * 6 + [0.0] * (TRACES - 6), 0, 0, True),
        ([2.0] * 7 + [0.0] * (TRACES - 7), 0, 0, False),
        ([2.0] * 7 + [0.0] * (TRACES - 7), 0, 1, True),
        ([0.0] * (TRACES - 7), 7, 0, False),
        ([0.0] * 19, 0, 0, False),
    ],
)
def test_nothing_is_to_learn_if_even_the_best_batch_would_fail(
    errors: list[float], n_unscored: int, n_tests: int, ends: bool
) -> None:
    scored = [step(trace, 0, 5, 5 + error) for trace, error in enumerate(errors)]
    by_trace = [(one.trace_id, abs(one.error)) for one in scored]
    by_trace += [(f"mute {n}", 5.0) for n in range(n_unscored)]
    reason = explain_nothing_to_learn(by_trace, n_earlier_tests=n_tests)
    assert (reason is not None) is ends
    if len(errors) == TRACES:
        best = decided(scored, [step(t, 0, 5, 5) for t in range(TRACES)], n_earlier_tests=n_tests)
        counts = best.has_passed and best.effect.value >= 0.1
        assert counts is not ends
