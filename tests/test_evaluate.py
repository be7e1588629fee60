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

from reflact.gate.greater_mean import GateSettings
from reflact.stages.evaluate import (
    EvaluationResult,
    GateMetric,
    build_measurement,
    decide_without_evaluation,
    evaluate,
    force_accept,
)
from reflact.stages.reply_models import AnalystReply
from reflact.stages.update import RewriteReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.types import (
    AggregateResult,
    Candidate,
    Edit,
    Fallback,
    Patch,
    Rollout,
    Score,
    SelectResult,
    Skill,
    Split,
    StepSize,
)
from toy_runs import WORLD, Actor, document, playing, run

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
    """Runs passes for the gate, and notes which."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.asked: list[tuple[str, int, tuple[str, ...]]] = []

    async def run(self, skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        self.asked.append((skill.text, trial, tuple(item_ids)))
        return [rolled(self._marks, skill, item_id, trial) for item_id in item_ids]


def setting(**changes: Any) -> GateSettings:
    """Return a gate of eight items that repeats what differs."""
    return GateSettings.model_validate({"item_ids": ITEMS, "confirms": True, **changes})


async def tried(
    marks: Marks, *, best: Skill = CURRENT, scale: GateMetric = HARD, **changes: Any
) -> tuple[EvaluationResult | None, Field]:
    """Return the verdict on the candidate, or None for a noisy target, and what it took."""
    field = Field(marks)
    evaluated = await evaluate(
        CANDIDATE, CURRENT, best, settings=setting(**changes), metric=scale, run_pass=field.run
    )
    return evaluated, field


async def judged(marks: Marks, **changes: Any) -> tuple[EvaluationResult, Field]:
    """Return the verdict that there must be, and what it took."""
    evaluated, field = await tried(marks, **changes)
    assert evaluated is not None
    return evaluated, field


def wins(*items: str, over: float = 0.0) -> Marks:
    """Let the candidate solve some items that the others do not, whatever the trial."""
    return lambda text, item_id, trial: 1.0 if text == "candidate" and item_id in items else over


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
    """All items once, the differing ones once more on both sides, then accepted."""
    evaluated, field = await judged(wins("v1", "v5"))
    verdict = evaluated.verdict
    assert verdict.action == "accept_new_best"
    assert (verdict.candidate_score, verdict.current_score) == (0.25, 0.0)
    passes = [(0, ITEMS), (1, ("v1", "v5"))]
    assert field.asked == [(text, *each) for each in passes for text in ("candidate", "current")]
    assert verdict.deterministic
    assert verdict.candidate.n == 8


async def test_six_repeats_are_enough() -> None:
    """A candidate that solves all items costs no second pass."""
    evaluated, field = await judged(wins(*ITEMS))
    assert evaluated.verdict.action == "accept_new_best"
    assert field.asked[2:] == [("candidate", 1, ITEMS[:6]), ("current", 1, ITEMS[:6])]


@pytest.mark.parametrize("marks", [wins(), wins("v1")])
async def test_without_confirmation_one_pass_decides(marks: Marks) -> None:
    """The strict policy, and a target that was declared as deterministic, repeat nothing; nor does a rejection."""
    evaluated, field = await judged(marks, confirms=marks("candidate", "v1", 0) == 0)
    assert evaluated.verdict.action in {"accept_new_best", "reject"}
    assert [(text, trial) for text, trial, _ in field.asked] == [("candidate", 0), ("current", 0)]


@pytest.mark.parametrize("noisy", ["candidate", "current"])
async def test_a_repeat_that_disagrees_gives_no_verdict(noisy: str) -> None:
    """Beliefs decide then; either side can show it."""

    def marks(text: str, item_id: str, trial: int) -> float:
        mark = float(text == "candidate")
        return 1 - mark if (text, item_id, trial) == (noisy, "v3", 1) else mark

    assert (await tried(marks))[0] is None


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
        if (text, item_id, trial) == ("candidate", "v1", 1):
            return None
        return float(text == "candidate" and item_id in {"v1", "v2"})

    evaluated, _ = await judged(marks)
    assert evaluated.verdict.action == "accept_new_best"
    assert [(r.item_id, r.trial) for r in evaluated.unmeasured] == [("v1", 1)]


async def test_a_best_skill_that_cannot_be_measured_leaves_the_step_unmeasured() -> None:
    """A provider that fails during the second comparison does not cost a candidate its place as best."""

    def marks(text: str, item_id: str, trial: int) -> float | None:
        return None if text == "best" else float(text == "candidate")

    verdict = (await judged(marks, best=BEST))[0].verdict
    assert verdict.action == "unmeasured"
    assert "8 of the best skill are missing" in verdict.reason


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
    assert "the best skill's" in verdict.reason
    assert (verdict.candidate_score, verdict.current_score) == (0.625, 0.0)
    assert field.asked[-1] == ("best", 0, ITEMS)


async def test_what_loses_is_not_compared_with_the_best() -> None:
    """A rejected candidate costs no rollout of the best skill."""
    evaluated, field = await judged(wins(), best=BEST)
    assert evaluated.verdict.action == "reject"
    assert {text for text, _, _ in field.asked} == {"candidate", "current"}


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


async def unguarded(marks: Marks, **changes: Any) -> EvaluationResult:
    """Return the verdict of a gate that is off."""
    field = Field(marks)
    return await force_accept(
        CANDIDATE, CURRENT, settings=setting(**changes), metric=HARD, run_pass=field.run
    )


async def test_a_gate_that_is_off_accepts_and_records() -> None:
    """Also what is worse; the scores are those of the pairs."""
    evaluated = await unguarded(lambda text, item_id, trial: float(text == "current"))
    verdict = evaluated.verdict
    assert verdict.action == "force_accept"
    assert (verdict.candidate_score, verdict.current_score) == (0.0, 1.0)


async def test_a_gate_that_is_off_still_needs_coverage() -> None:
    """One measured item of eight is no score for a best skill: it stays unmeasured, and is tried again."""

    def marks(text: str, item_id: str, trial: int) -> float | None:
        return 1.0 if item_id == "v0" else None

    evaluated = await unguarded(marks)
    assert evaluated.verdict.action == "unmeasured"
    assert not evaluated.verdict.accepted


async def test_noise_that_was_seen_once_is_remembered(tmp_path: Path) -> None:
    """A repeat that disagrees makes this decision and every later one a matter of beliefs."""

    def once(skill: Skill, message: str, times: int) -> str | None:
        return "unknown" if skill.text and message.startswith("double") and times == 1 else None

    done = await run(tmp_path, actor=Actor(once), train={"num_epochs": 2})
    assert not done.state.deterministic
    assert not done.summary.deterministic
    judged = [r.verdict for r in done.records if r.verdict.candidate_score is not None]
    ranked = [verdict.ranked is not None for verdict in judged]
    assert ranked == sorted(ranked)
    assert sum(ranked) > 1


@pytest.mark.parametrize(
    ("policy", "declared", "baselines", "noisy"),
    [
        ("ranked", None, 1, False),
        ("ranked", True, 1, False),
        ("ranked", False, 2, True),
        ("strict", False, 1, False),
    ],
)
async def test_the_baseline_is_measured_twice_only_if_beliefs_begin_at_once(
    tmp_path: Path, policy: str, declared: bool | None, baselines: int, noisy: bool
) -> None:
    """A target declared as noisy is ranked from the start; any other costs one pass before the first step."""
    done = await run(tmp_path, target={"deterministic": declared}, gate={"policy": policy})
    assert (done.records[0].verdict.ranked is not None) == noisy
    assert done.state.deterministic == (declared is not False)
    train = {str(item.input) for item in WORLD.items(Split.train)}
    before = [message for _, message in done.actor.asked]
    before = before[: next(n for n, message in enumerate(before) if message in train)]
    assert len(before) == 4 * baselines


def times_asked(done: Any, split: Split, **sizes: int) -> Counter[str]:
    """Return how often the items of a split were put to each skill, by its text."""
    inputs = {str(i.input) for i in ToyEnvironment(**{"train": 8, "val": 4, "test": 4, **sizes}).items(split)}
    return Counter(text for text, message in done.actor.asked if message in inputs)


async def test_rollouts_are_reused_across_phases(tmp_path: Path) -> None:
    """The report uses the gate's own passes, and a second start measures nothing."""
    idle = playing((AnalystReply, lambda wanted, shown: append_reply(wanted, f"- nonsense {len(shown)}")))
    done = await run(tmp_path, script=idle, test={"enabled": True})
    assert times_asked(done, Split.val)[""] == times_asked(done, Split.test)[""] == 4
    again = await run(tmp_path, script=idle, test={"enabled": True})
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
