"""The ranked gate: beliefs about versions, the passes that they are worth, and what a run does with them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from statistics import NormalDist, fmean
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reflact.gate.intervals import within_item_interval
from reflact.gate.ranked_decision import (
    BASELINE_MEAN,
    BASELINE_VARIANCE,
    EXPECTED_CHANGE,
    PRIOR_VARIANCE,
    REJECT_BELOW,
    SCALES,
    WEIGHTS,
    EffectObservation,
    Posterior,
    build_pass,
    choose_pass,
    choose_version,
    compare_paired,
    start_ranking,
    update_effect,
)
from reflact.records import UNPROVEN, build_buffer_entry
from reflact.skills.rejected_edits import collect_rejected_edits
from reflact.stages.evaluate import EvaluationResult, GateMetric
from reflact.stages.ranked_evaluation import RankedEvaluator, RankSettings, choose_action
from reflact.stages.reply_models import AnalystReply
from reflact.stages.slow_update import GuidanceReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.types import (
    HARD_VARIANCE,
    MIN_VARIANCE,
    Belief,
    MeasuredScore,
    PassResult,
    RankedDecision,
    Ranking,
    Rollout,
    Score,
    Skill,
    Split,
    VersionNode,
)
from toy_runs import LINES, Actor, playing, right, run

CANDIDATE, CURRENT, OLDER = Skill(text="candidate"), Skill(text="current"), Skill(text="older")
ITEMS = tuple(f"v{n}" for n in range(20))


def observe(skill: str, trial: int, mean: float, *, n: int = 20, variance: float = 0.14) -> PassResult:
    """Return a pass with a mean."""
    return PassResult(skill_hash=skill, trial=trial, mean=mean, n=n, variance=variance)


def find_change(ranking: Ranking, skill: str) -> float:
    """Return the prior variance of a version's difference to its parent, as its latest pass has it."""
    variances = [r.change_variance for r in ranking.passes if r.skill_hash == skill and r.change_variance]
    return variances[-1] if variances else PRIOR_VARIANCE


def grow(parents: Sequence[int], passes: Sequence[tuple[int, float]]) -> Ranking:
    """Return the ranking of versions 0, 1, ... with these parents, after passes of (version, mean)."""
    ranking = Ranking(nodes=(VersionNode(skill_hash="0"),))
    for number, parent in enumerate(parents, 1):
        ranking = ranking.add_version(str(number), str(parent % number))
    for trial, (version, mean) in enumerate(passes):
        result = observe(str(version % len(ranking.nodes)), trial, mean)
        if trial % 2 and result.skill_hash != "0":
            result = result.model_copy(update={"change_variance": 0.1 * mean + 0.001})
        ranking = ranking.add_pass(result)
    return ranking


def condition(ranking: Ranking) -> tuple[list[float], list[list[float]]]:
    """Return the means and the covariances of all versions by conditioning the whole joint normal."""
    order = [node.skill_hash for node in ranking.nodes]
    parents = [0 if node.parent is None else order.index(node.parent) for node in ranking.nodes]
    means, cov = [BASELINE_MEAN], [[BASELINE_VARIANCE]]
    for i in range(1, len(order)):
        row = [cov[parents[i]][j] for j in range(i)]
        means.append(means[parents[i]] + EXPECTED_CHANGE)
        cov = [[*line, row[j]] for j, line in enumerate(cov)]
        cov.append([*row, cov[parents[i]][parents[i]] + find_change(ranking, order[i])])
    for result in ranking.passes:
        v = order.index(result.skill_hash)
        column = [line[v] for line in cov]
        gain = [value / (column[v] + result.variance / result.n) for value in column]
        error = result.mean - means[v]
        means = [mean + k * error for mean, k in zip(means, gain, strict=True)]
        cov = [[cov[i][j] - gain[i] * column[j] for j in range(len(order))] for i in range(len(order))]
    return means, cov


trees = st.builds(
    grow,
    st.lists(st.integers(0, 100), max_size=8),
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1)), max_size=12),
)


# --------------------------------------------------------------------------------------------- beliefs


@given(trees)
def test_beliefs_are_the_conditioned_joint_normal(ranking: Ranking) -> None:
    """Means and covariances equal those of plain conditioning, whatever the tree and the passes."""
    means, cov = condition(ranking)
    posterior = Posterior(ranking)
    for i, mean in enumerate(means):
        assert posterior.find_belief(str(i)).mean == pytest.approx(mean, abs=1e-9)
        for j in range(len(means)):
            assert posterior.covariance(str(i), str(j)) == pytest.approx(cov[i][j], abs=1e-9)


@given(trees)
@example(grow([0, 0], [(0, 0.0), (0, 0.0), (0, 0.5), (14, 0.765625)]))
def test_the_worth_of_a_pass_is_the_expected_gain_of_the_choice(ranking: Ranking) -> None:
    """It equals the mean over outcomes of the pass of the greater expected mean, minus today's."""
    first, second = ranking.nodes[0].skill_hash, ranking.nodes[-1].skill_hash
    posterior, noise = Posterior(ranking), 0.007
    today = max(posterior.find_belief(version).mean for version in (first, second))
    spread = math.sqrt(posterior.covariance(second, second) + noise)
    slopes = [posterior.covariance(version, second) / spread for version in (first, second)]
    means = [posterior.find_belief(version).mean for version in (first, second)]
    shares = [(2 * k + 1) / 8000 for k in range(4000)]
    later = fmean(
        max(m + s * z for m, s in zip(means, slopes, strict=True)) for z in map(NormalDist().inv_cdf, shares)
    )
    worth = posterior.find_worth(second, first, second, noise)
    if first != second:
        assert worth == pytest.approx(later - today, abs=2e-4)
    assert worth >= 0


def test_a_rejected_child_corrects_the_belief_in_its_parent() -> None:
    """A bad result of a child lowers what is believed of the version it was made from, by less."""
    before = Posterior(grow([0], [(0, 0.6)]))
    after = Posterior(grow([0], [(0, 0.6), (1, 0.2)]))
    fall = before.find_belief("0").mean - after.find_belief("0").mean
    assert 0 < fall < before.find_belief("1").mean - after.find_belief("1").mean


def test_each_pass_keeps_the_variance_with_which_it_entered() -> None:
    """Repeats that agree lower the variance of later passes only."""
    same = dict.fromkeys(ITEMS, 1.0)
    ranking = start_ranking("0", [same, same], is_hard=True)
    assert ranking.variance == pytest.approx(20 * HARD_VARIANCE / 40)
    assert ranking.passes[0].variance > ranking.passes[1].variance


def test_scores_near_the_ends_vary_less() -> None:
    """The variance within an item is in proportion to the greatest one that a mean allows, with a lower bound."""
    ranking = Ranking(nodes=(VersionNode(skill_hash="0"),))
    assert ranking.find_variance(0.5) == ranking.variance == HARD_VARIANCE
    assert ranking.find_variance(0.9) == pytest.approx(HARD_VARIANCE * 0.09 / 0.25)
    assert ranking.find_variance(0.0) == ranking.find_variance(1.0) == pytest.approx(HARD_VARIANCE / 5)


def test_a_baseline_that_fails_everything_makes_no_later_pass_certain() -> None:
    """Where nothing succeeds nothing varies; a version that succeeds now and then varies nevertheless."""
    ranking = start_ranking("0", [dict.fromkeys(ITEMS, 0.0)] * 2, is_hard=True).add_version("1", "0")
    scores = {item: float(n < 14) for n, item in enumerate(ITEMS)}
    assert build_pass(ranking, "1", scores, earlier=(), others=()).variance > 0.09


def test_a_large_gain_is_believed_and_what_follows_is_no_gain() -> None:
    """After a jump the belief is near the measured score, so the same score again is no improvement."""
    ranking = start_ranking("0", [dict.fromkeys(ITEMS, 0.0)] * 2, is_hard=True)
    scores = {item: float(n < 17) for n, item in enumerate(ITEMS)}
    for number in (1, 2):
        ranking = ranking.add_version(str(number), str(number - 1))
        ranking = ranking.add_pass(build_pass(ranking, str(number), scores, earlier=(), others=()))
    posterior = Posterior(ranking)
    assert posterior.find_belief("1").mean == pytest.approx(0.85, abs=0.03)
    assert posterior.find_probability("1", "0") > 0.99
    assert posterior.find_probability("2", "1") < 0.5


def test_the_score_of_a_version_is_the_mean_of_what_was_measured() -> None:
    """All measured rollouts count alike, without the adjustment for items that stayed unmeasured."""
    easy = {item: float(n < 10) for n, item in enumerate(ITEMS)}
    missing = {item: None if n < 2 else score for n, (item, score) in enumerate(easy.items())}
    ranking = start_ranking("0", [easy], is_hard=True).add_version("1", "0")
    assert ranking.find_score("1") is None
    ranking = ranking.add_pass(build_pass(ranking, "1", missing, earlier=(), others=[easy]))
    ranking = ranking.add_pass(build_pass(ranking, "1", easy, earlier=[missing], others=[easy]))
    assert ranking.find_score("1") == MeasuredScore(score=18 / 38, n=20, trials=2)


# ---------------------------------------------------------------------------------------------- effects


@pytest.mark.parametrize("observed", [-0.4, -0.1, 0.0, 0.02, 0.3, 0.5])
@pytest.mark.parametrize("variance", [1e-3, 0.01, 0.03])
def test_an_effect_is_the_posterior_of_the_mixture(observed: float, variance: float) -> None:
    """Mean, deviation and probability equal those of a sum over a fine grid of effects."""
    effect = update_effect(EffectObservation(observed, variance))
    grid = [(k + 0.5) / 1000 for k in range(-1200, 1200)]
    priors = [NormalDist(EXPECTED_CHANGE, scale) for scale in SCALES]
    logs = [-((observed - x) ** 2) / (2 * variance) for x in grid]
    masses = [
        math.exp(log - max(logs)) * sum(w * p.pdf(x) for w, p in zip(WEIGHTS, priors, strict=True))
        for log, x in zip(logs, grid, strict=True)
    ]
    total = math.fsum(masses)
    mean = math.fsum(x * mass for x, mass in zip(grid, masses, strict=True)) / total
    square = math.fsum(x * x * mass for x, mass in zip(grid, masses, strict=True)) / total
    better = math.fsum(mass for x, mass in zip(grid, masses, strict=True) if x > 0) / total
    assert effect.mean == pytest.approx(mean, abs=2e-3)
    assert effect.deviation == pytest.approx(math.sqrt(square - mean**2), abs=2e-3)
    assert effect.p_better == pytest.approx(better, abs=2e-3)


differences = st.lists(st.floats(-1, 1), min_size=1, max_size=20)


@given(differences, st.floats(0, 0.25), st.integers(20, 60))
def test_a_slice_states_what_it_can(gaps: list[float], variance: float, n_items: int) -> None:
    """Values are in their ranges, and a slice that is a smaller part of the items says no more."""
    effect = compare_paired(gaps, n_items=n_items, variance=variance)
    assert 0 <= effect.p_better <= 1
    assert -1 <= effect.mean <= 1
    assert effect.deviation >= 0
    wider = compare_paired(gaps, n_items=10 * n_items, variance=variance)
    assert abs(wider.p_better - 0.5) <= abs(effect.p_better - 0.5) + 0.1


def test_a_few_equal_differences_are_no_certainty() -> None:
    """Six items that all gain leave doubt about the others; all items of a deterministic target leave none."""
    six = compare_paired([1.0] * 6, n_items=28, variance=0.0)
    assert six.p_better > 0.99
    assert six.mean < 1
    assert six.deviation > 0.02
    two = compare_paired([1.0, 0.0, 0.0, 0.0], n_items=28, variance=0.14)
    assert two.p_better < 0.7
    complete = compare_paired([0.1] * 28, n_items=28, variance=0.0)
    assert (complete.mean, complete.p_better) == (pytest.approx(0.1), 1.0)
    assert complete.deviation < 1e-5


def test_a_slice_is_one_of_the_items() -> None:
    """No difference, or more than items, is an error."""
    for gaps in ([], [0.1] * 5):
        with pytest.raises(ValueError, match="slice of 4 items"):
            compare_paired(gaps, n_items=4, variance=0.1)


def test_soft_scores_expect_the_variance_of_the_baselines_passes() -> None:
    """Fractions that hardly vary are not taken for coin flips; the variance has a lower bound."""
    passes = [dict.fromkeys(ITEMS, 0.50), dict.fromkeys(ITEMS, 0.52)]
    soft, hard = (start_ranking("0", passes, is_hard=hard) for hard in (False, True))
    assert soft.find_variance(0.51) == pytest.approx(0.0002, rel=1e-2)
    assert hard.variance > 0.06
    still = start_ranking("0", [passes[0], passes[0]], is_hard=False)
    assert still.variance == MIN_VARIANCE


def test_the_variance_is_pooled_from_repeats() -> None:
    """Coin flips measured often have a variance near 1/4, whatever was expected."""
    chance = random.Random(1)
    trials = [{item: float(chance.random() < 0.5) for item in ITEMS} for _ in range(60)]
    assert start_ranking("0", trials, is_hard=True).variance == pytest.approx(0.25, abs=0.02)


def test_unmeasured_items_are_filled_in_from_the_other_version() -> None:
    """A pass that misses the easy items is not taken for a bad one; its weight is that of what was measured."""
    easy = {item: float(n < 10) for n, item in enumerate(ITEMS)}
    missing = {item: None if n < 2 else score for n, (item, score) in enumerate(easy.items())}
    ranking = start_ranking("0", [easy], is_hard=True).add_version("1", "0")
    result = build_pass(ranking, "1", missing, earlier=(), others=[easy])
    assert result.n == 18
    assert result.mean == pytest.approx(0.5, abs=0.01)
    assert build_pass(ranking, "1", missing, earlier=(), others=()).mean == pytest.approx(8 / 18)


def test_a_version_without_a_pass_stands_for_the_one_it_was_made_from() -> None:
    """Notes that nobody measured do not return the run to the document without them."""
    ranking = grow([0, 1], [(0, 0.4), (1, 0.7)])
    assert ranking.list_contenders(("0", "1", "2")) == ("0", "2")
    measured = ranking.add_pass(observe("2", 0, 0.1))
    assert measured.list_contenders(("0", "1", "2")) == ("0", "1", "2")


def test_equal_versions_keep_the_older_one() -> None:
    """Only a higher expected mean replaces a version."""
    posterior = Posterior(grow([0], [(0, 0.5)]))
    assert choose_version(posterior, ("0", "0")) == "0"
    assert posterior.find_probability("0", "0") == 0.5


# ------------------------------------------------------------------------------------------- decisions

Marks = Callable[[str, str, int], "float | None"]
REFUSED = -1.0
"""The mark of a rollout that is refused for ever."""


class Passes:
    """Scores passes from a table, and notes which were run and which were read."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.ran: list[tuple[str, int, int]] = []

    async def run(self, skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        self.ran.append((skill.text, trial, len(item_ids)))
        return await self.read(skill, trial, item_ids)

    async def read(self, skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        return [self._roll(skill, trial, item_id) for item_id in item_ids]

    def _roll(self, skill: Skill, trial: int, item_id: str) -> Rollout:
        mark = self._marks(skill.text, item_id, trial)
        key = f"{skill.text}/{item_id}/{trial}"
        score, error = (None, "lost") if mark is None else (Score.of(abs(mark)), None)
        if mark == REFUSED:
            score, error = None, "refused"
        return Rollout(
            key=key,
            item_id=item_id,
            skill_hash=skill.hash,
            trial=trial,
            score=score,
            error=error,
            refused=mark == REFUSED,
        )


def share(**solved: int) -> Marks:
    """Let each document solve that many of the first items, whatever the trial."""
    return lambda text, item_id, trial: float(ITEMS.index(item_id) < solved[text])


async def judge(
    marks: Marks, *, versions: Sequence[Skill] = (CURRENT,), **changes: Any
) -> tuple[EvaluationResult, Passes]:
    """Return the verdict on the candidate after two passes of each earlier version, the first one first."""
    passes = Passes(marks)
    table = [
        [{r.item_id: r.score and r.score.hard for r in await passes.read(v, t, ITEMS)} for t in (0, 1)]
        for v in versions
    ]
    ranking = start_ranking(versions[0].hash, table[0], is_hard=True)
    for parent, version, trials in zip(versions, versions[1:], table[1:], strict=False):
        ranking = ranking.add_version(version.hash, parent.hash)
        for n, scores in enumerate(trials):
            ranking = ranking.add_pass(
                build_pass(ranking, version.hash, scores, earlier=trials[:n], others=())
            )
    plain = {
        "item_ids": ITEMS,
        "kept": tuple(v.hash for v in versions),
        "worth": 0.00005,
        "max_passes": 4,
        "coverage": 0.9,
    }
    evaluator = RankedEvaluator(
        RankSettings.model_validate({**plain, **changes}), GateMetric(metric="hard"), passes.run, passes.read
    )
    return await evaluator.evaluate(CANDIDATE, versions[-1], ranking), passes


@pytest.mark.parametrize(
    ("solved", "action"), [(16, "accept"), (11, "accept"), (9, "set_aside"), (4, "reject")]
)
async def test_the_version_that_is_believed_best_becomes_current(solved: int, action: str) -> None:
    """A likely gain is accepted, a likely loss rejected, and what may still be better is set aside."""
    evaluated, _ = await judge(share(candidate=solved, current=10))
    verdict = evaluated.verdict
    assert verdict.action == action
    assert verdict.ranked is not None
    assert verdict.ranked.chosen == (CANDIDATE if action == "accept" else CURRENT).hash
    assert (verdict.ranked.p_better < REJECT_BELOW) == (action == "reject")
    assert verdict.candidate_score == pytest.approx(solved / 20)
    assert verdict.current_score == pytest.approx(0.5)
    assert f"{solved / 20:.3f} measured" in verdict.reason
    assert verdict.refuted == (action == "reject")


async def test_a_clear_candidate_takes_one_pass_and_a_close_one_more() -> None:
    """Rollouts go where the choice is open; ``worth: 1`` takes a single pass, and ``max_passes`` bounds all."""
    clear = (await judge(share(candidate=18, current=4)))[1]
    assert clear.ran == [("candidate", 0, 20)]
    close = (await judge(share(candidate=10, current=10)))[1]
    assert len(close.ran) > 1
    assert {text for text, _, _ in close.ran} >= {"candidate"}
    assert max(trial for _, trial, _ in close.ran) <= 3
    single = (await judge(share(candidate=10, current=10), worth=1.0))[1]
    assert single.ran == [("candidate", 0, 20)]
    endless = (await judge(share(candidate=10, current=10), worth=0.0))[1]
    assert sorted(endless.ran) == [("candidate", t, 20) for t in range(4)] + [
        ("current", t, 20) for t in (2, 3)
    ]


async def test_an_older_version_can_become_current_again() -> None:
    """If neither the candidate nor the current version is believed best, the run returns to the one that is."""
    marks = share(candidate=3, current=4, older=15)
    evaluated, _ = await judge(marks, versions=(OLDER, CURRENT))
    verdict = evaluated.verdict
    assert verdict.action == "return"
    assert verdict.ranked is not None
    assert verdict.ranked.chosen == OLDER.hash
    assert not verdict.accepted
    assert "becomes current again" in verdict.reason


async def test_below_coverage_no_belief_changes() -> None:
    """A pass with three of twenty items missing is no observation; with two it is."""

    def lose(count: int) -> Marks:
        return lambda text, item_id, trial: (
            None if text == "candidate" and ITEMS.index(item_id) < count else 1.0
        )

    evaluated, _ = await judge(lose(3))
    assert (evaluated.verdict.action, evaluated.verdict.ranked) == ("unmeasured", None)
    assert len(evaluated.unmeasured) == 3
    evaluated, _ = await judge(lose(2))
    assert evaluated.verdict.ranked is not None
    assert {result.n for result in evaluated.verdict.ranked.passes} >= {18}


@pytest.mark.parametrize(("refused", "action"), [("all", "accept"), ("candidate", "reject")])
async def test_refused_items_count_if_the_candidate_alone_is_refused(refused: str, action: str) -> None:
    """Five of twenty that are refused with every skill are left out; a candidate that is refused alone is rejected."""

    def mark(text: str, item_id: str, trial: int) -> float:
        if ITEMS.index(item_id) < 5:
            return REFUSED if refused in {"all", text} else 0.0
        return float(text == "candidate")

    evaluated, passes = await judge(mark)
    assert evaluated.verdict.action == action
    assert (evaluated.verdict.ranked is None) == (action == "reject")
    assert all(rollout.refused for rollout in evaluated.unmeasured)
    assert len(evaluated.unmeasured) >= 5
    assert passes.ran[0] == ("candidate", 0, 20)


@pytest.mark.parametrize(("allowed", "action"), [(None, "accept"), (2, "accept"), (1, "reject")])
async def test_a_better_version_that_loses_items_is_vetoed(allowed: int | None, action: str) -> None:
    """Items that were always solved and are never any more count; they are tried four times on both sides first."""

    def marks(text: str, item_id: str, trial: int) -> float:
        n = ITEMS.index(item_id)
        if text == "current":
            return float(n < 5)
        lost = n < 2 or (n == 2 and trial == 0)
        return float(not lost)

    evaluated, passes = await judge(marks, no_regression=allowed)
    assert evaluated.verdict.action == action
    repeats = [(text, trial) for text, trial, size in passes.ran if size < 20]
    expected = [("candidate", t) for t in (1, 2, 3)] + [("current", t) for t in (2, 3)]
    assert sorted(repeats) == ([] if allowed is None else expected)
    if action == "reject":
        assert "no_regression" in evaluated.verdict.reason
        assert evaluated.verdict.refuted


def test_a_candidate_that_led_to_an_older_version_is_not_refuted() -> None:
    """The decision to return says nothing against the candidate."""
    belief = Belief(skill_hash=CANDIDATE.hash, mean=0.5, deviation=0.1)
    decision = RankedDecision(
        candidate=belief,
        current=belief.model_copy(update={"skill_hash": CURRENT.hash}),
        p_better=0.4,
        chosen=OLDER.hash,
    )
    assert choose_action(decision) == "return"
    assert "return" in UNPROVEN


def count_lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python some work executes, which no machine's speed changes."""
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("reach", [1, 5, 1000])
def test_a_decision_takes_time_in_proportion_to_the_versions(reach: int) -> None:
    """In a chain, a bushy tree or a star: twice the versions take twice the work, so 500 are replayed in a second."""
    chance = random.Random(7)

    def decide(versions: int) -> Callable[[], object]:
        parents = [str(max(0, n - 1 - chance.randrange(reach))) for n in range(1, versions)]
        nodes = [VersionNode(skill_hash="0")]
        nodes += [VersionNode(skill_hash=str(n), parent=parent) for n, parent in enumerate(parents, start=1)]
        passes = [
            PassResult(skill_hash=node.skill_hash, trial=0, mean=chance.random(), n=20, variance=0.14)
            for node in nodes
        ]
        ranking = Ranking(nodes=tuple(nodes), passes=tuple(passes))
        ends = nodes[-1].skill_hash, nodes[-2].skill_hash

        def work() -> None:
            choose_pass(ranking, *ends, worth=0.00005, n=20, most=4)
            posterior = Posterior(ranking)
            choose_version(posterior, [node.skill_hash for node in nodes])
            posterior.find_probability(ends[0], "0")

        return work

    few, many = (count_lines(decide(versions)) for versions in (250, 500))
    assert many < 2.1 * few


# ------------------------------------------------------------------------------------------------ runs


def flicker(skill: Skill, message: str, times: int) -> str | None:
    """Answer now and then as nobody taught it, so that the target is noisy."""
    seed = random.Random(f"{skill.text}/{message}/{times}").random()
    return right(message) if seed < 0.3 else None


NOISY = {"target": {"deterministic": False}}


async def test_a_noisy_run_records_its_beliefs(tmp_path: Path) -> None:
    """Each decision holds both beliefs and the passes it took; the state holds all of them, in order."""
    done = await run(tmp_path, actor=Actor(flicker), train={"num_epochs": 3}, **NOISY)
    judged = [record.verdict for record in done.records if record.verdict.ranked is not None]
    assert judged
    assert done.state.ranking is not None
    taken = [result for verdict in judged if verdict.ranked for result in verdict.ranked.passes]
    assert done.state.ranking.passes[2:] == tuple(taken)
    posterior = Posterior(done.state.ranking)
    kept = [version.skill_hash for version in done.state.kept]
    contenders = done.state.ranking.list_contenders(kept)
    assert done.state.current.skill_hash == choose_version(posterior, contenders)
    measured = done.state.ranking.find_score(done.state.current.skill_hash)
    assert measured is not None
    assert (done.state.current.score, done.state.current.n, done.state.current.trials) == (
        measured.score,
        measured.n,
        measured.trials,
    )
    assert done.promotions == ()


async def test_the_state_is_a_fold_of_the_records(tmp_path: Path) -> None:
    """Applying the records to the first state gives the last one, without any rollout."""
    done = await run(tmp_path, actor=Actor(flicker), train={"num_epochs": 3}, **NOISY)
    last = done.state
    assert last.ranking is not None
    first = last.kept[0]
    baseline = last.ranking.model_copy(
        update={"nodes": last.ranking.nodes[:1], "passes": (), "squares": 0.0, "repeats": 0, "room": 0.0}
    )
    baseline = baseline.add_pass(last.ranking.passes[0]).add_pass(last.ranking.passes[1])
    state = last.model_copy(
        update={
            "step": 0,
            "epoch": 0,
            "commits": 1,
            "current": first,
            "best": first,
            "latest_version": 0,
            "step_buffer": (),
            "seen_hashes": (first.skill_hash,),
            "kept": (first,),
            "ranking": baseline,
        }
    )
    one_by_one = reduce(lambda last, record: last.after([record]), done.records, state)
    state = state.after(done.records)
    assert state == one_by_one
    assert state.ranking == last.ranking
    assert [v.skill_hash for v in state.kept] == [v.skill_hash for v in last.kept]
    assert (state.current, state.best, state.seen_hashes) == (last.current, last.best, last.seen_hashes)


async def test_a_candidate_that_was_set_aside_may_come_again(tmp_path: Path) -> None:
    """It is judged again, with the passes it has and perhaps more, and nobody is shown that it did not help."""

    def coins(skill: Skill, message: str, times: int) -> str | None:
        chance = random.Random(f"{'x' if 'nonsense' in skill.text else ''}{message}/{times}").random()
        return right(message) if chance < 0.5 else None

    script = playing((AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense")))
    done = await run(tmp_path, actor=Actor(coins), script=script, train={"num_epochs": 3}, **NOISY)
    unproven = [record for record in done.records if record.verdict.action == "set_aside"]
    assert unproven
    assert unproven[0].candidate_hash not in done.state.seen_hashes or len(done.records) > len(unproven)
    entry = build_buffer_entry(unproven[0])
    assert (entry.score_before, entry.score_after, entry.rejected_edits) == (None, None, ())
    assert collect_rejected_edits([unproven[0]]) == ()


async def test_passes_are_measured_once(tmp_path: Path) -> None:
    """No trial of a version is rolled out twice."""
    done = await run(tmp_path, actor=Actor(flicker), train={"num_epochs": 3}, **NOISY)
    assert done.state.ranking is not None
    trials = [(result.skill_hash, result.trial) for result in done.state.ranking.passes]
    assert len(trials) == len(set(trials))


async def test_unmeasured_guidance_is_measured_before_it_can_be_best(tmp_path: Path) -> None:
    """Ungated guidance is current without a pass; the end of the run measures it, and may return to the text before."""

    def harmed(skill: Skill, message: str, times: int) -> str | None:
        return "unknown" if "HARM" in skill.text else flicker(skill, message, times)

    script = playing((GuidanceReply, {"reasoning": "r", "helped": "unclear", "guidance": "HARM"}))
    slow = {"enabled": True, "gated": False}
    done = await run(
        tmp_path, actor=Actor(harmed), script=script, train={"num_epochs": 2}, slow_update=slow, **NOISY
    )
    assert any("HARM" in text for text in done.texts.values())
    assert done.promotions
    assert done.promotions[-1].verdict.ranked is not None
    assert "HARM" not in done.current + done.best


async def test_a_deterministic_target_is_judged_by_one_pass(tmp_path: Path) -> None:
    """A greater mean is accepted after one repeat of what differs, if nothing disagrees."""
    done = await run(tmp_path)
    assert done.state.deterministic
    verdict = done.records[0].verdict
    assert (verdict.action, verdict.ranked) == ("accept_new_best", None)


async def test_noise_that_shows_late_changes_the_rule(tmp_path: Path) -> None:
    """A repeat of a differing item that disagrees turns the decision, and all later ones, to beliefs."""

    def late(skill: Skill, message: str, times: int) -> str | None:
        return right(message) if skill.text.strip() and times % 2 == 0 else None

    done = await run(tmp_path, actor=Actor(late), train={"num_epochs": 2})
    assert not done.state.deterministic
    judged = [record.verdict for record in done.records if record.verdict.candidate_score is not None]
    assert judged[-1].ranked is not None


async def test_noise_that_shows_late_forgets_no_measurement(tmp_path: Path) -> None:
    """The current skill, which one comparison accepted before, enters the beliefs with the pass of that comparison."""

    def late(skill: Skill, message: str, times: int) -> str | None:
        if sum(line in skill.text for line in LINES.values()) > 1:
            return right(message) if times == 0 else "unknown"
        return None

    done = await run(tmp_path, actor=Actor(late), train={"num_epochs": 2})
    first, second = done.records[:2]
    assert (first.verdict.action, first.verdict.ranked) == ("accept_new_best", None)
    decision = second.verdict.ranked
    assert decision is not None
    assert decision.current.skill_hash == first.candidate_hash
    measured = decision.passes[0]
    assert (measured.skill_hash, measured.trial, measured.mean) == (first.candidate_hash, 0, 0.25)


# -------------------------------------------------------------------------------------------- the claim


@pytest.mark.parametrize(("items", "confirmed"), [(4, False), (8, True)])
async def test_a_run_ends_with_one_claim_on_the_sealed_test(
    tmp_path: Path, items: int, confirmed: bool
) -> None:
    """The claim is confirmed if the paired difference lies above 0, and an exact test agrees that it is no chance."""
    world = ToyEnvironment(train=8, val=4, test=items)
    done = await run(tmp_path, environment=world, test={"enabled": True}, train={"num_epochs": 4})
    claim = done.summary.claim
    assert claim is not None
    assert claim.improvement.split is Split.test
    assert (claim.improvement.mean, claim.chance) == (1.0, 0.5**items)
    assert claim.improvement.low > 0
    assert claim.confirmed == confirmed
    assert done.summary.verdict.startswith("Better: " if confirmed else "Perhaps better, not confirmed: ")
    best = next(i for i in done.summary.improvements if (i.name, i.split) == ("best", Split.test))
    assert claim.improvement == best


async def test_a_run_without_a_better_document_claims_nothing(tmp_path: Path) -> None:
    """If the initial skill stays the best one there is nothing to claim."""
    idle = playing((AnalystReply, lambda wanted, shown: append_reply(wanted, f"- nonsense {len(shown)}")))
    done = await run(tmp_path, script=idle, test={"enabled": True})
    assert done.summary.best is not None
    assert (done.summary.best.number, done.summary.claim) == (0, None)


async def test_without_a_test_split_fresh_passes_decide(tmp_path: Path) -> None:
    """The claim on validation items uses trials that no decision used, and only their variance within items."""
    done = await run(tmp_path, actor=Actor(flicker), train={"num_epochs": 3}, **NOISY)
    if done.state.best.number == 0:
        pytest.fail("this world must have something to claim")
    claim = done.summary.claim
    assert claim is not None
    assert claim.improvement.split is Split.val
    scores = [score for score in done.summary.scores if score.split is Split.val]
    assert {score.trials for score in scores} == {4}
    assert not any(score.selected_on for score in scores)


def test_the_interval_within_items_ignores_the_items_differences() -> None:
    """Items that always win or always lose have no variance; two coins have that of their means."""
    same = within_item_interval([[0, 0], [1, 1]], [[1, 1], [1, 1]])
    assert same == (0.5, 0.5, 0.5)
    mean, low, high = within_item_interval([[0, 0]], [[0, 1]])
    assert (mean, low, high) == (0.5, pytest.approx(0.5 - 1.96 * 0.5, abs=1e-3), 1.0)
    with pytest.raises(ValueError, match="two scores"):
        within_item_interval([[0]], [[1]])
