"""Stage 6: what becomes of a candidate on the validation split, and what finding out takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from reflact.gate.greater_mean import GateSettings
from reflact.gate.ranked_decision import REJECT_BELOW, build_pass, start_ranking
from reflact.stages.evaluate import (
    GateMetric,
    RankedEvaluator,
    build_measurement,
    decide_without_evaluation,
    evaluate,
)
from reflact.stages.reply_models import AnalystReply
from reflact.stages.update import RewriteReply
from reflact.testing import append_reply
from reflact.types import (
    AggregateResult,
    Candidate,
    Edit,
    Fallback,
    Patch,
    Ranking,
    Rollout,
    Score,
    SelectResult,
    Skill,
    Split,
    StepSize,
    Verdict,
)
from toy_runs import WORLD, Actor, document, playing, run

CANDIDATE, CURRENT, BEST = Skill(text="candidate"), Skill(text="current"), Skill(text="best")
ITEMS = tuple(f"v{n}" for n in range(8))
HARD = GateMetric(metric="hard")

REFUSED = -1.0
"""The mark of a rollout that is refused for ever."""

Marks = Callable[[str, str, int], "float | Score | None"]
"""The score of a document's text on an item in a trial; None is unmeasured."""


def rolled(marks: Marks, skill: Skill, item_id: str, trial: int) -> Rollout:
    """Return what a document gets on an item."""
    mark = marks(skill.text, item_id, trial)
    blank = Rollout(
        key=f"{skill.text}/{item_id}/{trial}", item_id=item_id, skill_hash=skill.hash, trial=trial
    )
    if mark is None or mark == REFUSED:
        return blank.model_copy(update={"error": "lost", "refused": mark == REFUSED})
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
) -> tuple[Verdict | None, Field]:
    """Return the verdict on the candidate, or None for a noisy target, and what it took."""
    field = Field(marks)
    verdict = await evaluate(
        CANDIDATE, CURRENT, best, settings=setting(**changes), metric=scale, run_pass=field.run
    )
    return verdict, field


async def judged(marks: Marks, **changes: Any) -> tuple[Verdict, Field]:
    """Return the verdict that there must be, and what it took."""
    verdict, field = await tried(marks, **changes)
    assert verdict is not None
    return verdict, field


def wins(*items: str, over: float = 0.0) -> Marks:
    """Let the candidate solve some items that the others do not, whatever the trial."""
    return lambda text, item_id, trial: 1.0 if text == "candidate" and item_id in items else over


PROPOSED = AggregateResult(patch=Patch(edits=(Edit(op="append", content="x"),)))
NO_REPLY = (Fallback(label="rewrite", reason="r", replacement="i"),)


@pytest.mark.parametrize(
    ("candidate", "merged", "action", "repeats"),
    [
        (Candidate(skill=CURRENT), AggregateResult(), "no_patches", None),
        (Candidate(skill=CURRENT), PROPOSED, "no_change", None),
        (Candidate(skill=BEST), PROPOSED, "no_change", "v1"),
        (Candidate(skill=CURRENT, fallbacks=NO_REPLY), PROPOSED, "no_rewrite", None),
        (Candidate(skill=CANDIDATE), PROPOSED, None, None),
    ],
)
def test_what_changes_nothing_is_not_evaluated(
    candidate: Candidate, merged: AggregateResult, action: str | None, repeats: str | None
) -> None:
    chosen = SelectResult(patch=merged.patch, pool_size=len(merged.patch.edits))
    verdict = decide_without_evaluation(
        candidate, CURRENT, merged=merged, chosen=chosen, known={BEST.hash: "v1", CURRENT.hash: "v2"}
    )
    assert (None if verdict is None else verdict.action) == action
    assert verdict is None or (verdict.candidate, verdict.accepted, verdict.repeats) == (None, False, repeats)


@pytest.mark.parametrize("reasoning", ["All are risky.", None])
def test_a_step_size_of_0_is_the_reason(reasoning: str | None) -> None:
    decision = reasoning and StepSize(count=0, reasoning=reasoning, confidence=0.5)
    chosen = SelectResult(pool_size=1, budget=0, decision=decision or None)
    verdict = decide_without_evaluation(
        Candidate(skill=CURRENT), CURRENT, merged=PROPOSED, chosen=chosen, known={}
    )
    assert verdict is not None
    assert verdict.action == "no_change"
    assert (reasoning or "The schedule allows no edit") in verdict.reason


@pytest.mark.parametrize(("solved", "repeated"), [(("v1", "v5"), ("v1", "v5")), (ITEMS, ITEMS[:6])])
async def test_a_deterministic_gain_is_repeated_where_the_sides_differ(
    solved: Sequence[str], repeated: Sequence[str]
) -> None:
    verdict, field = await judged(wins(*solved))
    assert (verdict.action, verdict.deterministic) == ("accept_new_best", True)
    assert (verdict.candidate_score, verdict.current_score) == (len(solved) / 8, 0.0)
    passes = [(0, ITEMS), (1, repeated)]
    assert field.asked == [(text, *each) for each in passes for text in ("candidate", "current")]


@pytest.mark.parametrize(("marks", "confirms"), [(wins(), True), (wins("v1"), False)])
async def test_without_confirmation_one_pass_decides(marks: Marks, confirms: bool) -> None:
    _, field = await judged(marks, best=CURRENT if not confirms else BEST, confirms=confirms)
    assert [(text, trial) for text, trial, _ in field.asked] == [("candidate", 0), ("current", 0)]


@pytest.mark.parametrize("noisy", ["candidate", "current"])
async def test_a_repeat_that_disagrees_gives_no_verdict(noisy: str) -> None:
    def marks(text: str, item_id: str, trial: int) -> float:
        mark = float(text == "candidate")
        return 1 - mark if (text, item_id, trial) == (noisy, "v3", 1) else mark

    assert (await tried(marks))[0] is None


@pytest.mark.parametrize(("threshold", "action"), [(None, "accept_new_best"), (1.0, "reject")])
async def test_what_counts_as_solved_is_the_success_threshold(threshold: float | None, action: str) -> None:
    def marks(text: str, item_id: str, trial: int) -> float:
        old, new = {"v0": (1.0, 0.5)}.get(item_id, (0.0, 1.0))
        return new if text == "candidate" else old

    scale = GateMetric(metric="hard", threshold=threshold)
    assert (await judged(marks, scale=scale, no_regression=0))[0].action == action


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_below_coverage_nothing_is_decided(is_enabled: bool) -> None:
    def marks(text: str, item_id: str, trial: int) -> float | None:
        return None if item_id in {"v1", "v2"} else 1.0

    verdict = (await judged(marks))[0] if is_enabled else await unguarded(marks)
    assert (verdict.action, verdict.accepted) == ("unmeasured", False)
    assert verdict.candidate is not None
    assert verdict.candidate.unmeasured == ("v1", "v2")


async def test_a_lost_repeat_is_no_disagreement() -> None:
    def marks(text: str, item_id: str, trial: int) -> float | None:
        if (text, item_id, trial) == ("candidate", "v1", 1):
            return None
        return float(text == "candidate" and item_id in {"v1", "v2"})

    verdict, _ = await judged(marks)
    assert verdict.action == "accept_new_best"


@pytest.mark.parametrize(
    ("of_best", "action"),
    [(0, "accept_new_best"), (3, "accept_new_best"), (5, "accept"), (8, "accept"), (None, "unmeasured")],
)
async def test_a_new_best_must_win_against_the_best(of_best: int | None, action: str) -> None:
    def marks(text: str, item_id: str, trial: int) -> float | None:
        solved = {"candidate": 5, "current": 0, "best": of_best}[text]
        return None if solved is None else float(ITEMS.index(item_id) < solved)

    verdict, field = await judged(marks, best=BEST, no_regression=0)
    assert verdict.action == action
    assert "best skill" in verdict.reason
    assert (verdict.candidate_score, verdict.current_score) == (0.625, 0.0)
    assert field.asked[-1] == ("best", 0, ITEMS)


@pytest.mark.parametrize(
    ("metric", "action", "score"),
    [("hard", "reject", 0.0), ("soft", "accept_new_best", 0.5), ("mixed", "accept_new_best", 0.1)],
)
async def test_the_metric_says_what_is_compared(metric: Any, action: str, score: float) -> None:
    def marks(text: str, item_id: str, trial: int) -> Score:
        return Score(hard=0.0, soft=0.5 if text == "candidate" else 0.25)

    verdict, _ = await judged(marks, scale=GateMetric(metric=metric, mixed_weight=0.2))
    assert (verdict.action, verdict.candidate_score) == (action, score)


async def unguarded(marks: Marks) -> Verdict:
    """Return the verdict of a gate that is off."""
    field = Field(marks)
    settings = setting(is_open=True)
    verdict = await evaluate(CANDIDATE, CURRENT, BEST, settings=settings, metric=HARD, run_pass=field.run)
    assert verdict is not None
    return verdict


async def test_a_gate_that_is_off_accepts_what_is_worse_and_records_it() -> None:
    verdict = await unguarded(lambda text, item_id, trial: float(text == "current"))
    assert verdict.action == "force_accept"
    assert (verdict.candidate_score, verdict.current_score) == (0.0, 1.0)


MANY = tuple(f"v{n}" for n in range(20))


def share(**solved: int) -> Marks:
    """Let each document solve that many of the first items, whatever the trial."""
    return lambda text, item_id, trial: float(MANY.index(item_id) < solved[text])


async def ranked(
    marks: Marks, *, versions: Sequence[Skill] = (CURRENT,), **changes: Any
) -> tuple[Verdict, list[tuple[str, int, int]]]:
    """Return the verdict on the candidate after two passes of each earlier version, and the passes it took."""
    field = Field(marks)

    async def read(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        return [rolled(marks, skill, item_id, trial) for item_id in item_ids]

    ranking: Ranking | None = None
    for parent, version in zip((None, *versions), versions, strict=False):
        passes = [HARD.score_items(await read(version, trial, MANY)) for trial in (0, 1)]
        if ranking is None or parent is None:
            ranking = start_ranking(version.hash, passes, is_hard=True)
            continue
        ranking = ranking.add_version(version.hash, parent.hash)
        for n, scores in enumerate(passes):
            result = build_pass(ranking, version.hash, scores, earlier=passes[:n], others=())
            ranking = ranking.add_pass(result)
    assert ranking is not None
    settings = GateSettings(item_ids=MANY, kept=tuple(version.hash for version in versions), **changes)
    evaluator = RankedEvaluator(
        candidate=CANDIDATE,
        current=versions[-1],
        settings=settings,
        metric=HARD,
        run_pass=field.run,
        read_pass=read,
    )
    verdict = await evaluator.evaluate(ranking)
    return verdict, [(text, trial, len(item_ids)) for text, trial, item_ids in field.asked]


@pytest.mark.parametrize(
    ("solved", "action"), [(16, "accept"), (11, "accept"), (9, "set_aside"), (4, "reject")]
)
async def test_the_version_that_is_believed_best_becomes_current(solved: int, action: str) -> None:
    verdict, _ = await ranked(share(candidate=solved, current=10))
    assert verdict.action == action
    assert verdict.ranked is not None
    assert verdict.ranked.chosen == (CANDIDATE if action == "accept" else CURRENT).hash
    assert (verdict.ranked.p_better < REJECT_BELOW) == (action == "reject") == verdict.refuted
    assert (verdict.candidate_score, verdict.current_score) == (pytest.approx(solved / 20), 0.5)
    assert f"{solved / 20:.3f} measured" in verdict.reason


async def test_a_clear_candidate_takes_one_pass_and_a_close_one_more() -> None:
    assert (await ranked(share(candidate=18, current=4)))[1] == [("candidate", 0, 20)]
    assert len((await ranked(share(candidate=10, current=10)))[1]) > 1
    assert (await ranked(share(candidate=10, current=10), worth=1.0))[1] == [("candidate", 0, 20)]
    _, endless = await ranked(share(candidate=10, current=10), worth=0.0)
    all_passes = [("candidate", t, 20) for t in range(4)] + [("current", t, 20) for t in (2, 3)]
    assert sorted(endless) == all_passes


async def test_an_older_version_can_become_current_again() -> None:
    verdict, _ = await ranked(share(candidate=3, current=4, best=15), versions=(BEST, CURRENT))
    assert (verdict.action, verdict.accepted, verdict.refuted) == ("return", False, False)
    assert verdict.ranked is not None
    assert verdict.ranked.chosen == BEST.hash
    assert "becomes current again" in verdict.reason


@pytest.mark.parametrize(("lost", "is_decided"), [(3, False), (2, True)])
async def test_below_coverage_no_belief_changes(lost: int, is_decided: bool) -> None:
    verdict, _ = await ranked(
        lambda text, item_id, trial: None if text == "candidate" and MANY.index(item_id) < lost else 1.0
    )
    assert (verdict.ranked is not None) == is_decided
    assert (verdict.action == "unmeasured") != is_decided


@pytest.mark.parametrize(("refused", "action"), [("all", "accept"), ("candidate", "reject")])
async def test_refused_items_count_if_the_candidate_alone_is_refused(refused: str, action: str) -> None:
    def mark(text: str, item_id: str, trial: int) -> float:
        if MANY.index(item_id) < 5:
            return REFUSED if refused in {"all", text} else 0.0
        return float(text == "candidate")

    verdict, _ = await ranked(mark)
    assert verdict.action == action
    assert (verdict.ranked is None) == (action == "reject")


@pytest.mark.parametrize(("allowed", "action"), [(None, "accept"), (2, "accept"), (1, "reject")])
async def test_a_better_version_that_loses_items_is_vetoed(allowed: int | None, action: str) -> None:
    def marks(text: str, item_id: str, trial: int) -> float:
        n = MANY.index(item_id)
        if text == "current":
            return float(n < 5)
        return float(n >= 2 and (n != 2 or trial != 0))

    verdict, passes = await ranked(marks, no_regression=allowed)
    assert (verdict.action, verdict.refuted) == (action, action == "reject")
    assert ("no_regression" in verdict.reason) == verdict.refuted
    repeats = [(text, trial) for text, trial, size in passes if size < 20]
    expected = [("candidate", t) for t in (1, 2, 3)] + [("current", t) for t in (2, 3)]
    assert sorted(repeats) == ([] if allowed is None else expected)


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
    done = await run(tmp_path, target={"deterministic": declared}, gate={"policy": policy})
    assert (done.records[0].verdict.ranked is not None) == noisy
    assert done.state.deterministic == (declared is not False)
    train = {str(item.input) for item in WORLD.items(Split.train)}
    before = [message for _, message in done.actor.asked]
    before = before[: next(n for n, message in enumerate(before) if message in train)]
    assert len(before) == 4 * baselines


async def test_rollouts_are_reused_across_phases(tmp_path: Path) -> None:
    idle = playing((AnalystReply, lambda wanted, shown: append_reply(wanted, f"- nonsense {len(shown)}")))
    done = await run(tmp_path, script=idle, test={"enabled": True})
    initial = [message for text, message in done.actor.asked if not text]
    for split in (Split.val, Split.test):
        assert sum(message in {str(item.input) for item in WORLD.items(split)} for message in initial) == 4
    again = await run(tmp_path, script=idle, test={"enabled": True})
    assert again.actor.asked == []


@pytest.mark.parametrize(
    "ends", [{"slow_update": {"enabled": True, "gated": False}}, {"appendix": {"enabled": True}}]
)
async def test_a_new_hash_gives_an_equal_candidate_no_second_chance(
    tmp_path: Path, ends: dict[str, Any]
) -> None:
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


def test_a_measurement_is_the_mean_of_what_was_measured() -> None:
    values = [None, Score(hard=1, soft=0.5), Score(hard=0.1, soft=0.3), None]
    rollouts = [
        Rollout(key=f"{n}", item_id=f"item-{n}", skill_hash="c", score=score)
        for n, score in enumerate(values)
    ]
    measured = build_measurement("c", Split.val, rollouts)
    assert (measured.n, measured.hard, measured.soft) == (2, 0.55, 0.4)
    assert measured.unmeasured == ("item-0", "item-3")
    assert build_measurement("c", Split.val, rollouts[::-1]) == measured
    nothing = build_measurement("c", Split.val, rollouts[:1])
    assert (nothing.n, nothing.hard, HARD.score_measurement(nothing)) == (0, None, None)
    with pytest.raises(ValueError, match="another skill"):
        build_measurement("d", Split.val, rollouts)
