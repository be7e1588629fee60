"""Stage 6: what becomes of a candidate on the validation split, and what finding out takes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.gate.paired_decision import CONFIRMATION_REPEATS, GateSettings, TrialRequest
from reflact.records import AlphaBudget
from reflact.stages.evaluate import (
    EvaluationResult,
    GateMetric,
    RolloutPairs,
    StopCondition,
    build_measurement,
    decide_without_evaluation,
    evaluate,
    force_accept,
)
from reflact.stages.reply_models import AnalystReply
from reflact.stages.update import RewriteReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.training.state import add_alpha_budget, plan_alpha_budget
from reflact.types import (
    AggregateResult,
    Candidate,
    Edit,
    Evidence,
    Fallback,
    Patch,
    Rollout,
    Score,
    SelectResult,
    Skill,
    Split,
    StepSize,
)
from toy_runs import WORLD, Actor, Part, Ran, document, playing, right, run

CANDIDATE, CURRENT, BEST = Skill(text="candidate"), Skill(text="current"), Skill(text="best")
ITEMS = tuple(f"v{n}" for n in range(8))
HARD = GateMetric(metric="hard")

Marks = Callable[[str, str, int], "float | Score | None"]
"""The score of a document's text on an item in a trial; None is unmeasured."""


def rolled(marks: Marks, skill: Skill, item_id: str, trial: int) -> Rollout:
    """Return what a document gets on an item."""
    mark = marks(skill.text, item_id, trial)
    blank = Rollout(
        key=f"{skill.text}/{item_id}/{trial}", item_id=item_id, skill_hash=skill.hash, trial=trial
    )
    if mark is None:
        return blank.model_copy(update={"error": "lost"})
    return blank.model_copy(update={"score": mark if isinstance(mark, Score) else Score.of(mark)})


class Field:
    """Rolls two skills out for the gate, up to the shortest prefix that is enough, and notes what it did."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.asked: list[tuple[str, int, tuple[str, ...]]] = []
        self.pairs = 0

    async def duel(
        self, candidate: Skill, current: Skill, ask: TrialRequest, until: StopCondition | None
    ) -> RolloutPairs:
        self.asked.append((current.text, ask.trial, ask.item_ids))
        duels: list[tuple[Rollout, Rollout]] = []
        for item_id in ask.item_ids:
            duels.append(
                (
                    rolled(self._marks, candidate, item_id, ask.trial),
                    rolled(self._marks, current, item_id, ask.trial),
                )
            )
            if until is not None and until(duels):
                break
        self.pairs += len(duels)
        return duels


def setting(**changes: Any) -> GateSettings:
    """Return a gate of eight items with twenty trials at a level of 0.05."""
    return GateSettings.model_validate({"item_ids": ITEMS, "trials": 20, "level": 0.05, **changes})


async def judged(
    marks: Marks, *, best: Skill = CURRENT, scale: GateMetric = HARD, **changes: Any
) -> tuple[EvaluationResult, Field]:
    """Return the verdict on the candidate, and what it took."""
    field = Field(marks)
    evaluated = await evaluate(
        CANDIDATE, CURRENT, best, settings=setting(**changes), metric=scale, run_pairs=field.duel
    )
    return evaluated, field


def wins(*items: str, over: float = 0.0) -> Marks:
    """Let the candidate solve some items that the others do not, whatever the trial."""
    return lambda text, item_id, trial: 1.0 if text == "candidate" and item_id in items else over


def mixed_up(text: str, item_id: str, trial: int) -> float:
    """Let the candidate solve six of eight items in each trial, the current skill one, at changing places."""
    place = (ITEMS.index(item_id) + trial) % 8
    return float(place < 6) if text == "candidate" else float(place == 7)


PROPOSED = AggregateResult(patch=Patch(edits=(Edit(op="append", content="x"),)))


@pytest.mark.parametrize(
    ("candidate", "merged", "action"),
    [
        (Candidate(skill=CURRENT), AggregateResult(), "no_patches"),
        (Candidate(skill=CURRENT), PROPOSED, "no_change"),
        (Candidate(skill=BEST), PROPOSED, "no_change"),
        (
            Candidate(skill=CURRENT, fallbacks=(Fallback(label="rewrite", reason="r", replacement="i"),)),
            PROPOSED,
            "no_rewrite",
        ),
        (Candidate(skill=CANDIDATE), PROPOSED, None),
    ],
)
def test_what_changes_nothing_is_not_evaluated(
    candidate: Candidate, merged: AggregateResult, action: str | None
) -> None:
    """No proposals, no rewrite, no change, and a document known before each have an outcome of their own."""
    chosen = SelectResult(patch=merged.patch, pool_size=len(merged.patch.edits))
    verdict = decide_without_evaluation(
        candidate, CURRENT, merged=merged, chosen=chosen, known={BEST.hash: "v1", CURRENT.hash: "v2"}
    )
    assert (None if verdict is None else verdict.action) == action
    if verdict is not None:
        assert (verdict.candidate, verdict.candidate_score, verdict.accepted) == (None, None, False)
        assert verdict.repeats == ("v1" if candidate.skill == BEST else None)
        assert action != "no_change" or (" v1, " if candidate.skill == BEST else ", v2.") in verdict.reason


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (
            StepSize(count=0, reasoning="All are risky.", confidence=0.5),
            "The optimizer chose to apply none of the 1 proposed edits: All are risky.",
        ),
        (None, "The schedule allows no edit in this step, so none of the 1 proposed edits was applied."),
    ],
)
def test_a_step_size_of_0_is_the_reason(decision: StepSize | None, reason: str) -> None:
    """If no edit of the pool was to be applied, the verdict says who decided that."""
    verdict = decide_without_evaluation(
        Candidate(skill=CURRENT),
        CURRENT,
        merged=PROPOSED,
        chosen=SelectResult(pool_size=1, budget=0, decision=decision),
        known={},
    )
    assert verdict is not None
    assert (verdict.action, verdict.reason) == ("no_change", reason)


async def test_a_deterministic_gain_is_repeated_where_the_sides_differ() -> None:
    """All items once, the differing ones four times more on both sides, then accepted."""
    evaluated, field = await judged(wins("v1", "v5"))
    verdict = evaluated.verdict
    assert verdict.action == "accept_new_best"
    assert (verdict.candidate_score, verdict.current_score) == (0.25, 0.0)
    repeats = [(trial, ("v1", "v5")) for trial in range(1, CONFIRMATION_REPEATS["paired"] + 1)]
    assert [ask[1:] for ask in field.asked] == [(0, ITEMS), *repeats]
    assert verdict.deterministic


async def test_a_noisy_gain_is_proven_by_rounds() -> None:
    """A disagreeing repeat turns to complete rounds of both sides; the verdict remembers the noise."""
    evaluated, field = await judged(mixed_up, early_stop=False)
    verdict = evaluated.verdict
    assert (verdict.action, verdict.deterministic) == ("accept_new_best", False)
    assert verdict.evidence.value >= 1 / 0.05
    per_round = Counter(trial for _, trial, ids in field.asked for _ in ids)
    assert set(list(per_round.values())[: verdict.evidence.rounds]) == {8}
    assert verdict.candidate.n == 8 * verdict.evidence.rounds


async def test_scores_cover_the_trials_of_the_decision_alone() -> None:
    """Repeats of the differing items beyond the round that an early stop cut short are not averaged in."""

    def late_noise(text: str, item_id: str, trial: int) -> float:
        if (text, item_id) == ("candidate", "v0"):
            return float(trial < 2)
        return float(text == "candidate" or item_id in {"v5", "v6", "v7"})

    evaluated, field = await judged(late_noise, level=0.02, trials=2)
    verdict = evaluated.verdict
    assert [(trial, len(ids)) for _, trial, ids in field.asked] == [(0, 8), (1, 5), (2, 5), (1, 3)]
    assert (verdict.deterministic, verdict.evidence.bound, verdict.evidence.pairs) == (False, True, 15)
    assert (verdict.candidate.n, verdict.candidate.hard) == (15, 1.0)


sides = st.sampled_from([0.0, 0.5, 1.0, 1.0, None])
tables = st.lists(st.lists(sides, min_size=16, max_size=16), min_size=4, max_size=4)


@given(
    tables,
    st.sampled_from(["strict", "paired"]),
    st.booleans(),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([0.5, 0.9]),
)
async def test_early_stop_changes_no_verdict(
    table: list[list[float | None]], policy: str, noisy: bool, lost: int | None, coverage: float
) -> None:
    """Whatever the scores, the gate decides with early stop as without, on no more rollouts.

    Only what was never run cannot leave the decision unmeasured.
    """

    def marks(text: str, item_id: str, trial: int) -> float | None:
        return table[trial % 4][ITEMS.index(item_id) + 8 * (text == "candidate")]

    changes: dict[str, Any] = {
        "policy": policy,
        "deterministic": not noisy,
        "no_regression": lost,
        "coverage": coverage,
        "trials": 4,
        "level": 0.2,
    }
    short, less = await judged(marks, early_stop=True, **changes)
    whole, more = await judged(marks, early_stop=False, **changes)
    assert whole.verdict.action in {short.verdict.action, "unmeasured"}
    assert less.pairs <= more.pairs


@pytest.mark.parametrize(("threshold", "action"), [(None, "accept_new_best"), (1.0, "reject")])
async def test_what_counts_as_solved_is_the_success_threshold(threshold: float | None, action: str) -> None:
    """An item that falls from 1.0 to 0.5 is lost where only 1.0 is a success."""

    def marks(text: str, item_id: str, trial: int) -> float:
        old, new = {"v0": (1.0, 0.5)}.get(item_id, (0.0, 1.0))
        return new if text == "candidate" else old

    scale = GateMetric(metric="hard", threshold=threshold)
    assert (await judged(marks, scale=scale, no_regression=0))[0].verdict.action == action


async def test_below_coverage_nothing_is_decided() -> None:
    """Two of eight pairs unmeasured are too many for 0.9; what was lost is named, not journalled yet."""

    def marks(text: str, item_id: str, trial: int) -> float | None:
        return None if item_id in {"v1", "v2"} else 1.0

    evaluated, _ = await judged(marks)
    assert evaluated.verdict.action == "unmeasured"
    assert evaluated.verdict.candidate.unmeasured == ("v1", "v2")
    assert {(r.item_id, r.skill_hash) for r in evaluated.unmeasured} == {
        (i, s.hash) for i in ("v1", "v2") for s in (CANDIDATE, CURRENT)
    }


async def test_a_lost_repeat_is_among_what_was_used() -> None:
    """A repeat that stayed unmeasured is named, so that a restart decides on the same evidence."""

    def marks(text: str, item_id: str, trial: int) -> float | None:
        if (text, item_id, trial) == ("candidate", "v1", 2):
            return None
        return float(text == "candidate" and item_id in {"v1", "v2"})

    evaluated, _ = await judged(marks)
    assert evaluated.verdict.action == "accept_new_best"
    assert [(r.item_id, r.trial) for r in evaluated.unmeasured] == [("v1", 2)]


async def test_a_best_skill_that_cannot_be_measured_leaves_the_step_unmeasured() -> None:
    """A provider that fails during the second comparison does not cost a candidate its place as best."""

    def marks(text: str, item_id: str, trial: int) -> float | None:
        return None if text == "best" else float(text == "candidate")

    verdict = (await judged(marks, best=BEST))[0].verdict
    assert verdict.action == "unmeasured"
    assert "Against the best skill" in verdict.reason


@pytest.mark.parametrize(
    ("of_best", "action"), [(0, "accept_new_best"), (3, "accept_new_best"), (5, "accept"), (8, "accept")]
)
async def test_a_new_best_must_win_against_the_best(of_best: int, action: str) -> None:
    """Five items solved beat a current skill without any; the best skill has to be beaten as well."""

    def marks(text: str, item_id: str, trial: int) -> float:
        return float(ITEMS.index(item_id) < {"candidate": 5, "current": 0, "best": of_best}[text])

    evaluated, field = await judged(marks, best=BEST, no_regression=0)
    verdict = evaluated.verdict
    assert verdict.action == action
    assert verdict.against_best is not None
    assert (verdict.candidate_score, verdict.current_score) == (0.625, 0.0)
    assert {text for text, _, _ in field.asked} == {"current", "best"}


async def test_what_loses_is_not_compared_with_the_best() -> None:
    """A rejected candidate costs no rollout of the best skill."""
    evaluated, field = await judged(wins(), best=BEST)
    assert evaluated.verdict.action == "reject"
    assert evaluated.verdict.against_best is None
    assert {text for text, _, _ in field.asked} == {"current"}


async def test_noise_in_the_second_comparison_is_noise() -> None:
    """A best skill that disagrees with itself makes the target noisy, and is then beaten by rounds only."""

    def marks(text: str, item_id: str, trial: int) -> float:
        if text == "best":
            return float(item_id == "v0" and trial > 0)
        return float(text == "candidate")

    verdict = (await judged(marks, best=BEST))[0].verdict
    assert verdict.action == "accept_new_best"
    assert verdict.evidence.deterministic
    assert (verdict.against_best.deterministic, verdict.against_best.level) == (False, 0.05)
    assert not verdict.deterministic


@pytest.mark.parametrize(
    ("metric", "action"), [("hard", "reject"), ("soft", "accept_new_best"), ("mixed", "accept_new_best")]
)
async def test_the_metric_says_what_is_compared(metric: Any, action: str) -> None:
    """A gain in soft scores alone counts where soft scores count."""

    def marks(text: str, item_id: str, trial: int) -> Score:
        return Score(hard=0.0, soft=0.5 if text == "candidate" else 0.25)

    evaluated, _ = await judged(marks, scale=GateMetric(metric=metric, mixed_weight=0.2))
    assert evaluated.verdict.action == action
    expected = {"soft": 0.5, "mixed": 0.1}.get(metric, 0.0)
    assert evaluated.verdict.candidate_score == expected


def unguarded(marks: Marks, **changes: Any) -> EvaluationResult:
    """Return the verdict of a gate that is off."""
    duels = [(rolled(marks, CANDIDATE, i, 0), rolled(marks, CURRENT, i, 0)) for i in ITEMS]
    return force_accept(CANDIDATE, CURRENT, duels, settings=setting(**changes), metric=HARD)


def test_a_gate_that_is_off_accepts_and_records() -> None:
    """Also what is worse; the scores are those of the pairs."""
    verdict = unguarded(lambda text, item_id, trial: float(text == "current")).verdict
    assert verdict.action == "force_accept"
    assert (verdict.candidate_score, verdict.current_score) == (0.0, 1.0)


def test_a_gate_that_is_off_still_needs_coverage() -> None:
    """One measured item of eight is no score for a best skill: it stays unmeasured, and is tried again."""

    def marks(text: str, item_id: str, trial: int) -> float | None:
        return 1.0 if item_id == "v0" else None

    evaluated = unguarded(marks)
    assert evaluated.verdict.action == "unmeasured"
    assert not evaluated.verdict.accepted


async def test_noise_that_was_seen_once_is_remembered(tmp_path: Path) -> None:
    """A baseline that disagrees with its repeat makes every later decision one of rounds."""

    def once(skill: Skill, message: str, times: int) -> str | None:
        return right(message) if skill.text == "" and message == "double 18" and times == 0 else None

    assert WORLD.items(Split.val)[0].input == "double 18"
    done = await run(tmp_path, actor=Actor(once), gate={"policy": "paired", "max_trials": 6, "alpha": 0.9})
    assert not done.state.deterministic
    assert not done.summary.deterministic
    assert all(r.verdict.evidence and r.verdict.evidence.value is not None for r in done.records)


@pytest.mark.parametrize(
    ("declared", "baselines", "noisy"), [(None, 2, False), (True, 1, False), (False, 1, True)]
)
async def test_what_is_declared_needs_no_finding_out(
    tmp_path: Path, declared: bool | None, baselines: int, noisy: bool
) -> None:
    """The baseline is repeated only to find out; a target declared noisy is tested by rounds at once."""
    done = await run(
        tmp_path,
        target={"deterministic": declared},
        gate={"policy": "paired", "max_trials": 4, "early_stop": False},
    )
    first = done.records[0].verdict
    assert (first.evidence.value is not None) == noisy
    assert done.state.deterministic == (not noisy)
    world = WORLD
    train = {str(item.input) for item in world.items(Split.train)}
    before = [message for _, message in done.actor.asked]
    before = before[: next(n for n, message in enumerate(before) if message in train)]
    assert len(before) == 4 * baselines


async def test_an_undecided_candidate_goes_on_with_its_trials(tmp_path: Path) -> None:
    """Proposed again it is given as many rounds more, unless rollouts are not used again."""

    def coins(skill: Skill, message: str, times: int) -> str | None:
        mine, odd = ("double", 0) if "nonsense" in skill.text else ("square", 1)
        return right(message) if message.startswith(mine) and times % 2 == odd else None

    script = playing((AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense")))
    gate = {
        "policy": "paired",
        "max_trials": 2,
        "effect": 0.01,
        "early_stop": False,
    }  # an early stop cuts off a rollout at work
    done = await run(tmp_path / "a", actor=Actor(coins), script=script, gate=gate)
    assert done.actions == ["inconclusive", "inconclusive"]
    evidence = [r.verdict.evidence for r in done.records if r.verdict.evidence]
    assert [e.rounds for e in evidence] == [2, 4]
    assert evidence[0].detectable_effect is not None
    val = {str(i.input) for i in WORLD.items(Split.val)}
    times = Counter(asked for asked in done.actor.asked if asked[1] in val)
    assert set(times.values()) <= {4, 8}  # four gate trials; four fresh ones of the initial skill's report
    assert done.summary.rejects == 0
    assert {a.action: a.count for a in done.summary.actions} == {"inconclusive": 2}
    anew = {"reuse_rollouts": False}
    done = await run(tmp_path / "b", actor=Actor(coins), script=script, gate=gate, train=anew)
    assert [r.verdict.evidence.rounds for r in done.records if r.verdict.evidence] == [2, 2]


def times_asked(done: Any, split: Split, **sizes: int) -> Counter[str]:
    """Return how often the items of a split were put to each skill, by its text."""
    inputs = {str(i.input) for i in ToyEnvironment(**{"train": 8, "val": 4, "test": 4, **sizes}).items(split)}
    return Counter(text for text, message in done.actor.asked if message in inputs)


async def test_interleaved_sides_are_both_rolled_out_anew(tmp_path: Path) -> None:
    """Each decision asks the current skill again, though its rollouts are at hand."""
    idle = playing((AnalystReply, lambda wanted, shown: append_reply(wanted, f"- nonsense {len(shown)}")))
    stored = await run(tmp_path / "a", script=idle, gate={"policy": "paired"})
    fresh = await run(tmp_path / "b", script=idle, gate={"policy": "paired", "interleave": True})
    assert stored.actions == fresh.actions == ["reject", "reject"]
    assert times_asked(stored, Split.val)[""] == 2 * 4
    early = sum(r.verdict.evidence.pairs for r in fresh.records if r.verdict.evidence)
    assert times_asked(fresh, Split.val)[""] >= 2 * 4 + early


async def test_rollouts_are_reused_across_phases_unless_they_are_not(tmp_path: Path) -> None:
    """With ``reuse_rollouts: false`` every step and the report measure the same document again."""
    idle = playing((AnalystReply, lambda wanted, shown: append_reply(wanted, f"- nonsense {len(shown)}")))
    gate = {"early_stop": False}
    shared = await run(tmp_path / "a", script=idle, gate=gate, test={"enabled": True})
    apart = await run(
        tmp_path / "b", script=idle, gate=gate, test={"enabled": True}, train={"reuse_rollouts": False}
    )
    assert times_asked(shared, Split.val)[""] == 4 * 2
    assert times_asked(apart, Split.val)[""] == 4 * (2 + 2 + 1)
    assert times_asked(shared, Split.test)[""] == times_asked(apart, Split.test)[""] == 4
    again = await run(
        tmp_path / "b", script=idle, gate=gate, test={"enabled": True}, train={"reuse_rollouts": False}
    )
    assert again.actor.asked == []


@pytest.mark.parametrize(
    "ends",
    [
        {"slow_update": {"enabled": True, "gated": False}},
        {"slow_update": {"enabled": True}},
        {"appendix": {"enabled": True}},
    ],
    ids=["reservation", "guidance", "notes"],
)
async def test_a_new_hash_gives_an_equal_candidate_no_second_chance(
    tmp_path: Path, ends: dict[str, Any]
) -> None:
    """Proposals that change nothing cost no evaluation, also after a region gave the text another hash."""

    def deaf(skill: Skill, message: str, times: int) -> str | None:
        return "unknown" if message.startswith("double") else None

    known = document("double")
    script = playing((RewriteReply, {"summary": "s", "document": known}))
    done = await run(
        tmp_path,
        initial=known,
        actor=Actor(deaf),
        script=script,
        train={"num_epochs": 3},
        update={"mode": "rewrite"},
        **ends,
    )
    assert len({record.skill_before for record in done.records}) > 1
    assert set(done.actions) <= {"no_change", "no_patches"}
    assert done.summary.accepts == 0
    assert all(record.verdict.candidate is None for record in done.records)


async def test_the_least_improvement_is_the_paired_policys(tmp_path: Path) -> None:
    """A gain that is too small for the paired gate is still strictly greater for the strict one."""
    gate = {"policy": "paired", "min_improvement": 0.5}
    assert (await run(tmp_path / "a", gate=gate)).actions[0] == "reject"
    strict = await run(tmp_path / "b", gate={**gate, "policy": "strict"})
    assert strict.actions[0] == "accept_new_best"


HASH = "c" * 64
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


def test_a_measurement_is_the_mean_of_what_was_measured() -> None:
    """Unmeasured items are left out and listed; fractions of success count; of nothing it is None, never zero."""
    rollouts = _rollouts(HASH, [None, Score(hard=1, soft=0.5), Score(hard=0.1, soft=0.3), None])
    found = build_measurement(HASH, Split.val, rollouts)
    assert (found.n, found.hard, found.soft) == (2, 0.55, 0.4)
    assert found.unmeasured == ("item-00", "item-03")
    nothing = build_measurement(HASH, Split.val, _rollouts(HASH, [None]))
    assert (nothing.n, nothing.hard, nothing.soft) == (0, None, None)
    assert GateMetric(metric="hard").score_measurement(nothing) is None


@given(st.lists(scores, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_measurements_do_not_depend_on_order(values: list[float | None], chance: random.Random) -> None:
    """The same rollouts in any order give the same bytes."""
    rollouts = _rollouts(HASH, values)
    mixed = chance.sample(rollouts, len(rollouts))
    one, other = (build_measurement(HASH, Split.val, order) for order in (rollouts, mixed))
    assert one.model_dump_json() == other.model_dump_json()


def test_a_score_belongs_to_one_skill() -> None:
    """Rollouts of another skill are never counted for this one."""
    with pytest.raises(ValueError, match="another skill"):
        build_measurement(HASH, Split.val, _rollouts("d" * 64, [1.0]))


NOISY: dict[str, Any] = {
    "target": {"deterministic": False},
    "gate": {"policy": "paired", "max_trials": 2, "alpha": 0.2, "early_stop": False},
}


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "slow_gated", "decisions"),
    [(1, 4, True, 5), (1, 4, False, 5), (4, 2, True, 12), (4, 2, False, 9), (2, 3, True, 8)],
)
def test_a_run_plans_its_decisions(epochs: int, per_epoch: int, slow_gated: bool, decisions: int) -> None:
    """Each step, each gated slow update from the second epoch on, and the promotion at the end."""
    total = epochs * per_epoch
    alpha = plan_alpha_budget(1, (), alpha=0.1, total=total, per_epoch=per_epoch, slow_gated=slow_gated)
    assert alpha == AlphaBudget(alpha=0.1, decisions=decisions, until_step=total)
    assert alpha.level == pytest.approx(0.1 / decisions)


@given(
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
)
def test_no_more_decisions_are_taken_than_were_planned(
    per_epoch: int, slow_gated: bool, starts: list[tuple[int, bool]]
) -> None:
    """However often a run is extended, before its end or after it, each alpha is enough."""
    alphas: tuple[AlphaBudget, ...] = ()
    taken: Counter[AlphaBudget] = Counter()
    step = epochs = 0
    for more, is_cut in starts:
        epochs += more
        total = epochs * per_epoch

        def decide(at: int, total: int = total) -> None:
            nonlocal alphas
            alpha = plan_alpha_budget(
                at, alphas, alpha=0.1, total=total, per_epoch=per_epoch, slow_gated=slow_gated
            )
            alphas = add_alpha_budget(alphas, alpha)
            taken[alpha] += 1

        last = total - per_epoch // 2 - 1 if is_cut else total
        while step < last:
            step += 1
            decide(step)
            if slow_gated and step % per_epoch == 0 and step > per_epoch:
                decide(step)
        if step == total:
            decide(step)
    assert all(count <= alpha.decisions for alpha, count in taken.items())
    assert [a.until_step for a in alphas] == sorted({a.until_step for a in alphas})


def evidence(done: Ran) -> list[Evidence]:
    """Return what the steps' verdicts rested on."""
    return [r.verdict.evidence for r in done.records if r.verdict.evidence is not None]


async def test_an_extension_opens_another_one_and_states_it(tmp_path: Path) -> None:
    """Earlier decisions keep their share, the added ones share a further alpha, and both are told."""
    number = iter(range(1000))
    script = playing((AnalystReply, lambda wanted, _: append_reply(wanted, f"- nonsense {next(number)}")))
    short = await run(tmp_path, script=script, **NOISY)
    assert short.state.alphas == (AlphaBudget(alpha=0.2, decisions=3, until_step=2),)
    assert [e.level for e in evidence(short)] == [pytest.approx(0.2 / 3)] * 2
    longer = await run(tmp_path, script=script, train={"num_epochs": 3}, **NOISY)
    assert longer.state.alphas == (*short.state.alphas, AlphaBudget(alpha=0.2, decisions=5, until_step=6))
    assert [e.level for e in evidence(longer)] == [pytest.approx(x) for x in [0.2 / 3] * 2 + [0.2 / 5] * 4]
    assert longer.records[:2] == short.records
    assert len([e for e in longer.events if e.kind == "gate_power_estimated"]) == 2
    again = await run(tmp_path, script=script, train={"num_epochs": 3}, **NOISY)
    assert again.state.alphas == longer.state.alphas


async def test_guidance_and_promotion_have_their_share(tmp_path: Path) -> None:
    """Gated slow updates are decided at the same level as the steps; ungated ones take no share."""
    idle: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense"))
    gated = await run(
        tmp_path / "a", script=playing(idle), train={"num_epochs": 3}, slow_update={"enabled": True}, **NOISY
    )
    assert [a.decisions for a in gated.state.alphas] == [6 + 2 + 1]
    slow = [e.slow_update.verdict.evidence for e in gated.epochs if e.slow_update and e.slow_update.verdict]
    assert [e.level for e in slow if e] == [pytest.approx(0.2 / 9)] * len(slow)
    assert slow
    forced = {"enabled": True, "gated": False}
    ungated = await run(
        tmp_path / "b", script=playing(idle), train={"num_epochs": 3}, slow_update=forced, **NOISY
    )
    assert [a.decisions for a in ungated.state.alphas] == [6 + 1]
    (promotion,) = ungated.promotions
    assert promotion.verdict.evidence.level == pytest.approx(0.2 / 7)
