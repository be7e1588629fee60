"""The ranked gate: beliefs about versions, the passes that they are worth, and what a run does with them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from statistics import NormalDist, fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reflact.gate.ranked_decision import (
    BASELINE_MEAN,
    BASELINE_VARIANCE,
    EXPECTED_CHANGE,
    PRIOR_VARIANCE,
    SCALES,
    WEIGHTS,
    EffectObservation,
    Posterior,
    build_pass,
    choose_version,
    compare_paired,
    start_ranking,
    update_effect,
)
from reflact.records import build_buffer_entry
from reflact.skills.rejected_edits import collect_rejected_edits
from reflact.stages.reply_models import AnalystReply
from reflact.stages.slow_update import GuidanceReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.types import (
    MIN_VARIANCE,
    MeasuredScore,
    PassResult,
    Ranking,
    Skill,
    Split,
    VersionNode,
)
from toy_runs import LINES, Actor, playing, right, run

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


@given(trees)
def test_beliefs_are_the_conditioned_joint_normal(ranking: Ranking) -> None:
    means, cov = condition(ranking)
    posterior = Posterior(ranking)
    for i, mean in enumerate(means):
        assert posterior.find_belief(str(i)).mean == pytest.approx(mean, abs=1e-9)
        for j in range(len(means)):
            assert posterior.covariance(str(i), str(j)) == pytest.approx(cov[i][j], abs=1e-9)


@given(trees)
@example(grow([0, 0], [(0, 0.0), (0, 0.0), (0, 0.5), (14, 0.765625)]))
def test_the_worth_of_a_pass_is_the_expected_gain_of_the_choice(ranking: Ranking) -> None:
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


def test_a_baseline_that_fails_everything_makes_no_later_pass_certain() -> None:
    ranking = start_ranking("0", [dict.fromkeys(ITEMS, 0.0)] * 2, is_hard=True).add_version("1", "0")
    scores = {item: float(n < 14) for n, item in enumerate(ITEMS)}
    assert build_pass(ranking, "1", scores, earlier=(), others=()).variance > 0.09


def test_a_large_gain_is_believed_and_what_follows_is_no_gain() -> None:
    ranking = start_ranking("0", [dict.fromkeys(ITEMS, 0.0)] * 2, is_hard=True)
    scores = {item: float(n < 17) for n, item in enumerate(ITEMS)}
    for number in (1, 2):
        ranking = ranking.add_version(str(number), str(number - 1))
        ranking = ranking.add_pass(build_pass(ranking, str(number), scores, earlier=(), others=()))
    posterior = Posterior(ranking)
    assert posterior.find_belief("1").mean == pytest.approx(0.85, abs=0.03)
    assert posterior.find_probability("1", "0") > 0.99
    assert posterior.find_probability("2", "1") < 0.5


def test_unmeasured_items_are_filled_in_for_beliefs_and_left_out_of_scores() -> None:
    easy = {item: float(n < 10) for n, item in enumerate(ITEMS)}
    missing = {item: None if n < 2 else score for n, (item, score) in enumerate(easy.items())}
    ranking = start_ranking("0", [easy], is_hard=True).add_version("1", "0")
    assert ranking.find_score("1") is None
    alone, result = (build_pass(ranking, "1", missing, earlier=(), others=others) for others in ((), [easy]))
    assert (result.n, result.mean) == (18, pytest.approx(0.5, abs=0.01))
    assert alone.mean == pytest.approx(8 / 18)
    ranking = ranking.add_pass(result)
    ranking = ranking.add_pass(build_pass(ranking, "1", easy, earlier=[missing], others=[easy]))
    assert ranking.find_score("1") == MeasuredScore(score=18 / 38, n=20, trials=2)


@pytest.mark.parametrize(("observed", "variance"), [(-0.4, 0.01), (0.0, 1e-3), (0.02, 0.03), (0.3, 0.01)])
def test_an_effect_is_the_posterior_of_the_mixture(observed: float, variance: float) -> None:
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
    effect = compare_paired(gaps, n_items=n_items, variance=variance)
    assert 0 <= effect.p_better <= 1
    assert -1 <= effect.mean <= 1
    assert effect.deviation >= 0
    wider = compare_paired(gaps, n_items=10 * n_items, variance=variance)
    assert abs(wider.p_better - 0.5) <= abs(effect.p_better - 0.5) + 0.1


def test_a_few_equal_differences_are_no_certainty() -> None:
    six = compare_paired([1.0] * 6, n_items=28, variance=0.0)
    assert six.p_better > 0.99
    assert six.mean < 1
    assert six.deviation > 0.02
    two = compare_paired([1.0, 0.0, 0.0, 0.0], n_items=28, variance=0.14)
    assert two.p_better < 0.7
    complete = compare_paired([0.1] * 28, n_items=28, variance=0.0)
    assert (complete.mean, complete.p_better) == (pytest.approx(0.1), 1.0)
    assert complete.deviation < 1e-5


def test_soft_scores_expect_the_variance_of_the_baselines_passes() -> None:
    passes = [dict.fromkeys(ITEMS, 0.50), dict.fromkeys(ITEMS, 0.52)]
    soft, hard = (start_ranking("0", passes, is_hard=hard) for hard in (False, True))
    assert soft.find_variance(0.51) == pytest.approx(0.0002, rel=1e-2)
    assert hard.variance > 0.06
    still = start_ranking("0", [passes[0], passes[0]], is_hard=False)
    assert still.variance == MIN_VARIANCE


def test_a_version_without_a_pass_stands_for_the_one_it_was_made_from() -> None:
    ranking = grow([0, 1], [(0, 0.4), (1, 0.7)])
    assert ranking.list_contenders(("0", "1", "2")) == ("0", "2")
    measured = ranking.add_pass(observe("2", 0, 0.1))
    assert measured.list_contenders(("0", "1", "2")) == ("0", "1", "2")


def flicker(skill: Skill, message: str, times: int) -> str | None:
    """Answer now and then as nobody taught it, so that the target is noisy."""
    seed = random.Random(f"{skill.text}/{message}/{times}").random()
    return right(message) if seed < 0.3 else None


NOISY = {"target": {"deterministic": False}}


async def test_a_noisy_run_records_its_beliefs_and_its_state_is_their_fold(tmp_path: Path) -> None:
    """Each decision holds the passes it took; applying the records to the first state gives the last one."""
    done = await run(tmp_path, actor=Actor(flicker), train={"num_epochs": 3}, **NOISY)
    last = done.state
    judged = [record.verdict for record in done.records if record.verdict.ranked is not None]
    assert judged
    assert last.ranking is not None
    taken = [result for verdict in judged if verdict.ranked for result in verdict.ranked.passes]
    assert last.ranking.passes[2:] == tuple(taken)
    trials = [(result.skill_hash, result.trial) for result in last.ranking.passes]
    assert len(trials) == len(set(trials))
    contenders = last.ranking.list_contenders([version.skill_hash for version in last.kept])
    assert last.current.skill_hash == choose_version(Posterior(last.ranking), contenders)
    measured = last.ranking.find_score(last.current.skill_hash)
    current = last.current
    assert measured == MeasuredScore(score=current.score or 0, n=current.n, trials=current.trials)

    first = last.kept[0]
    empty = {"nodes": last.ranking.nodes[:1], "passes": (), "squares": 0.0, "repeats": 0, "room": 0.0}
    baseline = last.ranking.model_copy(update=empty)
    beginning = {
        "step": 0,
        "epoch": 0,
        "commits": 1,
        "latest_version": 0,
        "step_buffer": (),
        "current": first,
        "best": first,
        "kept": (first,),
        "seen_hashes": (first.skill_hash,),
        "ranking": baseline.add_pass(last.ranking.passes[0]).add_pass(last.ranking.passes[1]),
    }
    state = last.model_copy(update=beginning)
    one_by_one = reduce(lambda last, record: last.after([record]), done.records, state)
    state = state.after(done.records)
    assert state == one_by_one
    assert state.ranking == last.ranking
    assert [v.skill_hash for v in state.kept] == [v.skill_hash for v in last.kept]
    assert (state.current, state.best, state.seen_hashes) == (last.current, last.best, last.seen_hashes)


async def test_a_candidate_that_was_set_aside_may_come_again(tmp_path: Path) -> None:
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


async def test_unmeasured_guidance_is_measured_before_it_can_be_best(tmp_path: Path) -> None:
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


async def test_noise_that_shows_late_changes_the_rule_and_forgets_no_measurement(tmp_path: Path) -> None:
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
    assert not done.state.deterministic
    assert not done.summary.deterministic
    judged = [record.verdict for record in done.records[1:] if record.verdict.candidate_score is not None]
    assert all(verdict.ranked is not None for verdict in judged)


@pytest.mark.parametrize(("items", "confirmed"), [(4, False), (8, True)])
async def test_a_run_ends_with_one_claim_on_the_sealed_test(
    tmp_path: Path, items: int, confirmed: bool
) -> None:
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
    idle = playing((AnalystReply, lambda wanted, shown: append_reply(wanted, f"- nonsense {len(shown)}")))
    done = await run(tmp_path, script=idle, test={"enabled": True})
    assert done.summary.best is not None
    assert (done.summary.best.number, done.summary.claim) == (0, None)


async def test_without_a_test_split_fresh_passes_decide(tmp_path: Path) -> None:
    done = await run(tmp_path, actor=Actor(flicker), train={"num_epochs": 3}, **NOISY)
    if done.state.best.number == 0:
        pytest.fail("this world must have something to claim")
    claim = done.summary.claim
    assert claim is not None
    assert claim.improvement.split is Split.val
    scores = [score for score in done.summary.scores if score.split is Split.val]
    assert {score.trials for score in scores} == {4}
    assert not any(score.selected_on for score in scores)
